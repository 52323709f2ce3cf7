"""What the decisions about locks and permits come to, whoever executes them; the numbers are those of the scripts."""

from enum import IntEnum

FOR_EVER = 0
"""A ttl of 0 ms stands for a lock that does not expire."""
ASK_AGAIN = -1
"""In place of a fence: the request was thrown out of the queue, its owner is to ask why."""
WANTED = -2
"""In place of a fence, to a process that shares what it holds among its tasks: somebody else waits for it."""
FIRST = 2
"""Of so many waiters the first that listens is told when a lease is made shorter; the others look by themselves."""
OPEN = b"|0|0|"
"""The ticket of all clients that poll for a lock without one: see include/lock_poller_gap.lua."""
RANGE = 128
"""So many fences a process that shares is granted at once."""
WHOLE = 2**31 - 1
"""The limit of a read/write lock: a reader weighs 1, the writer weighs it all."""


class Look(IntEnum):
    """When one who is queued is to look again, beside the end of what he waits for."""

    NONE = 0
    SOON = 1  # no release will wake him
    IN_TIME = 2  # there is room behind the first in the queue, who may die unnoticed


class Outcome(IntEnum):
    """What an acquire script decided."""

    BUSY = 0
    GRANTED = 1
    QUEUED = 2
    OWN = 3
    SPENT = 4
    MISMATCH = 5  # this and the following: refused, and not queued
    TOO_HEAVY = 6
    DEADLOCK = 7
    GONE = 8


class Released(IntEnum):
    """What a release script found."""

    GONE = 0
    RELEASED = 1
    TAKEN = 2


class Renewed(IntEnum):
    """What a renew script found."""

    GONE = 0
    RENEWED = 1
    TAKEN = 2
