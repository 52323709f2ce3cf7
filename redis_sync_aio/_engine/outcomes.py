"""What the decisions about locks and permits come to, whoever executes them; the numbers are those of the scripts."""

from enum import IntEnum

ASK_AGAIN = -1
"""In place of a fence: the request was thrown out of the queue, its owner is to ask why."""


class Outcome(IntEnum):
    """What an acquire script decided."""

    BUSY = 0
    GRANTED = 1
    QUEUED = 2
    OWN = 3
    SPENT = 4
    MISMATCH = 5
    TOO_HEAVY = 6


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
