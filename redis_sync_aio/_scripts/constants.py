"""The numbers and words that scripts and package share: reply codes, durations, marks. Each is named here alone.

`load` puts the values into the scripts: wherever a name of this module stands in one, strings included, its value
is written instead. So a script says ``return {Outcome.QUEUED, …}`` or ``'… CONTENDED …'``, and the server sees a
number. A constant in bytes is put in without quotes: the script writes ``'POLLERS_TICKET'``.
"""

from __future__ import annotations

import re
from enum import IntEnum

from .._core.keys import INBOX_PREFIX as INBOX_PREFIX
from .._core.keys import LABEL_MARK as LABEL_MARK
from .._core.keys import SHARD_MARK as SHARD_MARK
from .._core.keys import SHARING_MARK as SHARING_MARK


class Look(IntEnum):
    """The time at which a queued client looks again, apart from the end of the lease that it waits for."""

    NONE = 0
    SOON = 1  # no release will wake it
    IN_TIME = 2  # there is room behind the first in the queue, which may die unnoticed
    LATER = 3  # as SOON: the first ticket in the queue has a later layout


class Outcome(IntEnum):
    """Decisions of an acquire script."""

    BUSY = 0
    GRANTED = 1
    QUEUED = 2
    OWN = 3
    SPENT = 4
    MISMATCH = 5  # this and the following: refused, and not queued
    TOO_HEAVY = 6
    QUEUE_FULL = 7
    BROKEN = 8


class ReleaseReply(IntEnum):
    """Findings of a release script."""

    GONE = 0
    RELEASED = 1
    TAKEN = 2


class Renewed(IntEnum):
    """Findings of a script that renews a lease, or reads or writes the record of one."""

    GONE = 0
    RENEWED = 1
    TAKEN = 2
    SUPERSEDED = 3  # of a record: a later lease of the same identity writes it


FOREVER = 0
"""A ttl of 0 ms stands for a lock that does not expire."""
FREE_MS, FOREVER_MS = -2, -1
"""The replies of PTTL for a key that does not exist, and for one that does not expire."""

ASK_AGAIN = -1
"""In place of a fence: the request was taken out of the queue, and its owner is to ask for the reason."""
CONTENDED = -2
"""In place of a fence, to a process that shares a lease among its tasks: another client waits for it."""
NOT_OURS = b"holds what was not written by redis_sync_aio"
"""The complaint about data of another program under a key of ours; it stands behind the key, as in WRONGTYPE KEY …."""
TICKET = b"^([^|]*)|(%d+)|(%d+)|(%d+)|(.*)$"
"""The Lua pattern of a ticket: inbox, number, claim (ms), weight and token. See include/lock_queue.lua."""
PUSHED_TICKET = b"^([^|]+)|[%d;]-(%d+)|"
"""The Lua pattern of a ticket of any layout that is woken by a push: inbox and number. See include/later_layout.lua."""
PLAIN_TICKET = b"^" + INBOX_PREFIX + b"(%x+)|(%d+)|(%d+)|(%d+)|()"
"""The same with an inbox without a prefix: the rest of the inbox, number, claim, weight, and where the token begins."""
POLLERS_TICKET = b"|0|0|1|"
"""The common ticket of all clients that poll for a lock without one: see include/lock_poller_gap.lua."""

LATER_MS = 4500
"""Time for the owner of a ticket of a later layout to take what is free: one that hangs does not block the others."""
MAX_DEAD = 500
"""Number of dead tickets that one script drops: the server serves no other client meanwhile, 15 us for each."""
FENCE_RANGE = 128
"""Number of fences that one grant reserves for a process that shares."""
WRITER_WEIGHT = 2**31 - 1
"""The limit of a read/write lock: a reader weighs 1, the writer weighs it all."""
OPEN_LIMIT = 2**31 - 2
"""The limit of an event or a latch that is open: all get in. A limit of -n: closed until n counts are made."""
PAUSED_LIMIT = -(2**31 - 1)
"""The limit of a semaphore that is paused: it lets in none, like a closed gate, and nothing is too heavy for it."""
SOONER_TRIES = 2
"""Most waiters that are notified of a shorter lease, until one listens; the others look by themselves."""
MAX_NOTIFIED = 64
"""Most permits that are searched for processes that share, to notify them of contention."""

QUEUE_TTL_MS = 600_000
"""Lifetime of a queue after a ticket in it was last renewed."""
APART_US = 10_000_000
"""Microseconds by which the fence that a Redlock asks for may be ahead of a server's clock."""
HOUR_MS = 3_600_000
"""Least lifetime of fences and limits."""
DAY_MS = 86_400_000
"""Least lifetime of the state of a barrier after it was broken or reset."""
WEEK_MS = 604_800_000
"""The time for which the record of a robust lock is kept beyond its fence."""
TEN_YEARS_MS = 315_360_000_000
"""Lifetime of the fence of a lock without a ttl, and of a limit that was set by a resize."""
TOMBSTONE_MS = 60_000
"""Time for which a copy of an undone request for a permit finds that it was undone."""
BUSY_MS = 1500
"""Time for which a lock is handed over without a break before it is left free, for clients that poll for it."""

_VALUES = {
    name: value.decode() if isinstance(value, bytes) else str(value)
    for name, value in vars().items()
    if name.isupper() and isinstance(value, int | bytes)
}
for _codes in (Look, Outcome, ReleaseReply, Renewed):
    _VALUES |= {f"{_codes.__name__}.{code.name}": str(code.value) for code in _codes}
_NAME = re.compile(r"[A-Z]\w*(?:\.[A-Z]\w*)?")  # no `\b`: that takes twice as long, and no script mixes cases


def put_in(text: str) -> str:
    """Return the text of a script with the values of these constants in place of their names."""
    return _NAME.sub(lambda match: _VALUES.get(match[0], match[0]), text)


# -- The limit of a semaphore, as its users state it and as the server has it ---------------------------------------


def wire_limit(limit: int | None) -> int:
    """Return the limit as the server has it: 0 for None, PAUSED_LIMIT for 0."""
    return 0 if limit is None else limit or PAUSED_LIMIT


def stated_limit(limit: int) -> int | None:
    """Return the limit of `wire_limit` as users state it: None if there is none, 0 of a paused semaphore."""
    return 0 if limit == PAUSED_LIMIT else limit or None
