"""Decoded replies of the scripts, and decoded messages of our inbox."""

from __future__ import annotations

from typing import NamedTuple

from .._client.resp import Reply
from .._scripts.constants import CONTENDED, FREE_MS, Outcome, Renewed


class Answer(NamedTuple):
    """A decoded answer of an acquire script, other than a plain grant."""

    outcome: Outcome
    # QUEUED: 1 if the ticket is new in the queue; GRANTED, OWN: the fence; MISMATCH, TOO_HEAVY: the server's limit;
    # QUEUE_FULL: how many tickets there are
    number: int
    left: float | None  # seconds until the holder's lease ends; None: never, or nobody holds it
    server_time: float  # seconds
    more: int  # BUSY, QUEUED: a Look; GRANTED, OWN: the weight; MISMATCH: 1 if the limit was set by a resize
    previous: int = 0  # of a writer: the fence of the writer before it; 0: the server remembers none


_OUTCOMES = tuple(Outcome)  # by their numbers: far faster than a call of the class


def plain_grant(reply: Reply) -> bool:
    """Return whether an acquire script granted the whole ttl immediately: then its reply is just the fence."""
    return type(reply) is int


def read_acquire(reply: Reply) -> Answer:
    """Decode any other reply of an acquire script."""
    outcome, number, left, micros, more, *previous = reply
    return Answer(_OUTCOMES[outcome], number, _left(left), micros / 1e6, more, *previous)


def left_free(reply: Reply) -> bool:
    """Return whether lock/acquire_all.lua found this lock free, and did not take it because others are not."""
    return type(reply) is list and reply[0] == Outcome.BUSY and reply[2] == FREE_MS


def read_renew(reply: Reply) -> Renewed:
    """Decode a reply of a renew script."""
    return Renewed(reply[0])


def _left(milliseconds: int) -> float | None:
    return None if milliseconds < 0 else milliseconds / 1000


FENCES = 10**16
"""More than any fence, or any time in microseconds until the year 2286, and any duration in milliseconds."""
MESSAGE_BYTES = 200
"""More than any message has."""


class Pushed(NamedTuple):
    """A message in our inbox: a grant (fence > 0), ASK_AGAIN, CONTENDED, or word that the ticket is next (fence 0)."""

    number: int
    fence: int
    server_time: float  # seconds
    duration: float  # of the grant, or until the present holder's lease ends; 0 = forever
    contended: bool  # whether other requests wait for it
    following: int  # the number of the next ticket, if it is of this process; else 0
    next_duration: float  # until the end of the lease that this ticket waits for
    previous: int = 0  # as in `Answer`


def read_push(payload: bytes) -> Pushed:
    """Decode a message from settle() in lock_queue.lua or permit_queue.lua. Raises ValueError for any other."""
    if len(payload) > MESSAGE_BYTES:
        raise ValueError("too long")
    number, fence, micros, ms, *more = map(int, payload.split())
    previous = more.pop() if len(more) % 2 else 0  # the rest comes in pairs
    following = more[0] if more else 0
    then = more[1] if len(more) > 1 else ms
    times_fit = 0 <= micros < FENCES and -FENCES < ms < FENCES and -FENCES < then < FENCES
    if not (times_fit and CONTENDED <= fence < FENCES and 0 <= previous < FENCES):
        raise ValueError("out of range")
    return Pushed(number, fence, micros / 1e6, ms / 1000, bool(more), following, then / 1000, previous)
