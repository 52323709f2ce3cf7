"""Snapshots: the keys of one name as plain values, before and after a decision. See `lock_rules`, `permit_rules`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from .._core.keys import SHARING_MARK, inbox_of
from .._scripts.constants import ASK_AGAIN, FREE_MS


@dataclass(frozen=True, slots=True)
class Permit:
    """The permit of a token. A weight of 0 is a tombstone: it was undone."""

    weight: int
    fence: int
    until: int  # server time in microseconds
    previous: int | None = None  # of a writer: the fence of the writer before it


_TICKET = re.compile(rb"([^|]*)\|(\d+)\|(\d+)\|(\d+)\|(.*)", re.DOTALL)
_LATER = re.compile(rb"([^|]*)\|[\d;]*?(\d+)\|")


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request in the queue, where it stands as ``inbox|number|claim_ms|weight|token``."""

    inbox: bytes  # empty if its owner polls
    number: int
    claim_ms: int  # how long a lease lasts that is granted by a hand-over
    weight: int  # of a request for a lock: 1
    token: bytes
    later: bool = False  # its layout is a later one: only inbox and number are known

    @classmethod
    def parse(cls, member: bytes) -> Ticket | None:
        """Return the ticket that stands in the queue as ``member``, None if it is none."""
        if (found := _TICKET.fullmatch(member)) is not None:
            return cls(found[1], int(found[2]), int(found[3]), int(found[4]), found[5])
        found = _LATER.match(member)
        return found and cls(found[1], int(found[2]), 0, 0, b"", later=True)


def ticket_member(inbox: bytes, number: int, claim_ms: int, token: bytes, weight: int = 1) -> bytes:
    """Return a ticket as it stands in the queue: see lock_queue.lua."""
    return b"%b|%d|%d|%d|%b" % (inbox, number, claim_ms, weight, token)


_SHARER = re.compile(rb"(.*:)([0-9A-Fa-f]+):(\d+)%b" % SHARING_MARK, re.DOTALL)


class Sharer(NamedTuple):
    """A process whose tasks share its leases; its tokens say so."""

    inbox: bytes
    number: int

    @classmethod
    def of(cls, token: bytes) -> Sharer | None:
        """Return the process that shares the lease of ``token``; None if its lease is not shared."""
        found = _SHARER.fullmatch(token)
        return None if found is None else cls(inbox_of(found[1], found[2]), int(found[3]))


@dataclass(frozen=True, slots=True)
class PermitSnapshot:
    """The keys of permits at one moment. When PERMITS or STATE is lost (evicted), there are no permits in it."""

    now: int  # server time in microseconds
    limit: int = 0  # 0: none was set
    used: int = 0  # the sum of all weights; stored, so that `permits` need not have those that no decision reads
    fence: int = 0  # the last one
    permits: Mapping[bytes, Permit] = field(default_factory=dict)  # by token
    queue: tuple[bytes, ...] = ()  # tickets in the order of their arrival
    places: Mapping[bytes, int] = field(default_factory=dict, compare=False)  # of tickets: when they came
    polls: Mapping[bytes, int] = field(default_factory=dict)  # ticket -> until when (ms) its polling owner is alive
    unread: int = 0  # how many tickets of the queue are not in `queue`, since no decision looks at them
    shared: bool = False  # whether a process that shares its leases got a grant
    deaf: frozenset[bytes] = frozenset()  # inboxes without a listener: their waiters are dead
    mute: bool = False  # the caller may not publish (ACL)
    resized: bool = False  # whether a resize set the limit: then no other request changes it
    lasts: int = field(default=0, compare=False)  # for how many ms a count, or a broken barrier, is remembered
    least: int = field(default=0, compare=False)  # for how many ms from now the keys last at least
    packed: bool = False  # nothing was free before some of the expired permits were dropped


@dataclass(frozen=True, slots=True)
class LockSnapshot:
    """The keys of one lock at one moment."""

    now: int  # server time in microseconds
    holder: bytes | None = None
    left: int = FREE_MS  # milliseconds until the holder's lease ends
    fence: int = 0  # the last one; 0: none is remembered
    granted: bytes = b""  # the token that it was granted to
    kept: int = FREE_MS  # for how many milliseconds it is remembered
    queue: tuple[bytes, ...] = ()  # tickets in the order of their arrival
    places: Mapping[bytes, int] = field(default_factory=dict, compare=False)  # of tickets: when they came
    polls: Mapping[bytes, int] = field(default_factory=dict)  # ticket -> until when (ms) its polling owner is alive
    unread: int = 0  # how many tickets of the queue are not in `queue`, since no decision looks at them
    deaf: frozenset[bytes] = frozenset()  # inboxes without a listener: their waiters are dead
    mute: bool = False  # the caller may not publish (ACL)
    full: bool = False  # the server is out of memory: nothing can be granted


class Message(NamedTuple):
    """A message to an inbox with a listener: 'number fence time ms', and about the next ticket ' number ms'.

    That number is 0 when the next ticket is not one of that inbox. The grant to a writer ends with the fence of the
    writer before it. In place of a fence: 0, ASK_AGAIN, CONTENDED.
    """

    inbox: bytes
    payload: bytes

    @classmethod
    def astray(cls, inbox: bytes, number: int) -> Message:
        """Return the message to an inbox that has no listener here, and may have one at another node."""
        return cls(inbox, b"%d %d 0 0" % (number, ASK_AGAIN))


ScriptReply: TypeAlias = int | tuple[int, ...]
"""A reply as the header of the script describes it."""


S = TypeVar("S", PermitSnapshot, LockSnapshot)


class Decision(NamedTuple, Generic[S]):
    """The outcome of one request."""

    reply: ScriptReply
    after: S
    messages: tuple[Message, ...]
