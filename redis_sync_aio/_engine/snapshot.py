"""What a decision about permits starts from and comes to: the keys of one name as plain values. See `rules`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias


@dataclass(frozen=True, slots=True)
class Permit:
    """What a token holds. A weight of 0: nothing any more, it was undone (a tombstone)."""

    weight: int
    fence: int
    until: int  # server time in microseconds


_TICKET = re.compile(rb"([^|]*)\|(\d+)\|(\d+)\|(\d+)\|(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request in the queue, where it stands as ``inbox|number|claim_ms|weight|token``."""

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


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The keys of one name at one moment. When PERMITS or STATE is lost (evicted), there are no permits in it."""

    now: int  # server time in microseconds
    limit: int = 0  # 0: nobody has set one
    used: int = 0  # the sum of all weights; kept, not computed, so `permits` may lack those no decision reads
    fence: int = 0  # the last one
    permits: Mapping[bytes, Permit] = field(default_factory=dict)  # by token
    queue: tuple[bytes, ...] = ()  # tickets in the order of their arrival
    ahead: bytes = b""  # the first of them, if it is that of a reader that is to become the writer (score < 0)
    polls: Mapping[bytes, int] = field(default_factory=dict)  # ticket -> until when (ms) its polling owner is alive
    deaf: frozenset[bytes] = frozenset()  # the inboxes that nobody hears: their waiters are dead
    mute: bool = False  # the caller may not publish (ACL)


class Message(NamedTuple):
    """What is published to an inbox that is heard: 'number fence time ms', and about the next ticket ' number ms'."""

    inbox: bytes
    payload: bytes


Reply: TypeAlias = int | tuple[int, ...]
"""As the script's header says."""


class Decision(NamedTuple):
    """What one request comes to."""

    reply: Reply
    after: Snapshot
    messages: tuple[Message, ...]
