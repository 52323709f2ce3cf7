"""What a decision starts from and comes to: the keys of one name as plain values. See `lock_rules`, `permit_rules`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from .._core.keys import INBOX_PREFIX
from .._scripts.constants import ASK_AGAIN, FREE_MS


@dataclass(frozen=True, slots=True)
class Permit:
    """What a token holds. A weight of 0: nothing any more, it was undone (a tombstone)."""

    weight: int
    fence: int
    until: int  # server time in microseconds
    attempt: bytes = b""  # by which its reader became the writer


_TICKET = re.compile(rb"([^|]*)\|(\d+)\|(\d+)\|(\d+)\|(.*)", re.DOTALL)
_LOCK_TICKET = re.compile(rb"([^|]*)\|(\d+)\|(\d+)\|(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request in the queue, where it stands as ``inbox|number|claim_ms|weight|token``; for a lock without weight."""

    inbox: bytes  # empty: its owner polls
    number: int
    claim_ms: int  # for how long it is granted at first
    weight: int
    token: bytes

    @classmethod
    def parse(cls, member: bytes) -> Ticket | None:
        """Return the ticket that stands in the queue as ``member``, None if it is none."""
        if (found := _TICKET.fullmatch(member)) is None:
            return None
        return cls(found[1], int(found[2]), int(found[3]), int(found[4]), found[5])

    @classmethod
    def of_lock(cls, member: bytes) -> Ticket | None:
        """Return the ticket that stands in the queue of a lock as ``member``, None if it is none."""
        if (found := _LOCK_TICKET.fullmatch(member)) is None:
            return None
        return cls(found[1], int(found[2]), int(found[3]), 1, found[4])


def ticket_member(inbox: bytes, number: int, claim_ms: int, token: bytes, weight: int = 0) -> bytes:
    """Return a ticket as it stands in the queue: see lock_queue.lua, and with a weight permit_queue.lua."""
    if weight:
        return b"%b|%d|%d|%d|%b" % (inbox, number, claim_ms, weight, token)
    return b"%b|%d|%d|%b" % (inbox, number, claim_ms, token)


_SHARER = re.compile(rb":([0-9A-Fa-f]+):(\d+)~\Z")


class Sharer(NamedTuple):
    """A process whose tasks share what it holds; its tokens say so."""

    inbox: bytes
    number: int

    @classmethod
    def of(cls, token: bytes) -> Sharer | None:
        """Return whose token it is, None if nobody shares what it holds."""
        found = _SHARER.search(token)
        return None if found is None else cls(INBOX_PREFIX + found[1], int(found[2]))


@dataclass(frozen=True, slots=True)
class PermitSnapshot:
    """The keys of permits at one moment. When PERMITS or STATE is lost (evicted), there are no permits in it."""

    now: int  # server time in microseconds
    limit: int = 0  # 0: nobody has set one
    used: int = 0  # the sum of all weights; kept, not computed, so `permits` may lack those no decision reads
    fence: int = 0  # the last one
    permits: Mapping[bytes, Permit] = field(default_factory=dict)  # by token
    queue: tuple[bytes, ...] = ()  # tickets in the order of their arrival
    ahead: bytes = b""  # the first of them, if it is that of a reader that is to become the writer (score < 0)
    polls: Mapping[bytes, int] = field(default_factory=dict)  # ticket -> until when (ms) its polling owner is alive
    shared: bool = False  # a process that shares what it holds was granted something
    deaf: frozenset[bytes] = frozenset()  # the inboxes that nobody hears: their waiters are dead
    mute: bool = False  # the caller may not publish (ACL)
    resized: bool = False  # the limit was set by a resize: no other request changes it
    packed: bool = False  # nothing was free before what is over was dropped, of which this is the rest


@dataclass(frozen=True, slots=True)
class LockSnapshot:
    """The keys of one lock at one moment."""

    now: int  # server time in microseconds
    holder: bytes | None = None
    left: int = FREE_MS  # for how many milliseconds the holder has it
    fence: int = 0  # the last one; 0: none is remembered
    granted: bytes = b""  # the token it was granted to
    kept: int = FREE_MS  # for how many milliseconds it is remembered
    queue: tuple[bytes, ...] = ()  # tickets in the order of their arrival
    polls: Mapping[bytes, int] = field(default_factory=dict)  # ticket -> until when (ms) its polling owner is alive
    deaf: frozenset[bytes] = frozenset()  # the inboxes that nobody hears: their waiters are dead
    mute: bool = False  # the caller may not publish (ACL)
    full: bool = False  # the server is out of memory: nothing can be granted


class Message(NamedTuple):
    """What is published to an inbox that is heard: 'number fence time ms', and about the next ticket ' number ms'.

    That number is 0 when the next ticket is somebody else's. In place of a fence: 0, ASK_AGAIN, CONTENDED.
    """

    inbox: bytes
    payload: bytes

    @classmethod
    def astray(cls, inbox: bytes, number: int) -> Message:
        """Return what is said to an inbox of a cluster that nobody hears here: perhaps somebody does elsewhere."""
        return cls(inbox, b"%d %d 0 0" % (number, ASK_AGAIN))


ScriptReply: TypeAlias = int | tuple[int, ...]
"""As the script's header says."""


S = TypeVar("S", PermitSnapshot, LockSnapshot)


class Decision(NamedTuple, Generic[S]):
    """What one request comes to."""

    reply: ScriptReply
    after: S
    messages: tuple[Message, ...]
