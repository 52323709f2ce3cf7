"""What is decided about permits, as pure functions: a snapshot of the keys -> reply, messages, the snapshot after.

The scripts permits_*.lua decide the same on the server; property tests compare the two, reply by reply and key by
key. Nothing here talks to a server, and nothing but the snapshot, its ``now`` included, enters a decision.

    key       in the snapshot         read by a decision                      written by it
    PERMITS   permits (until)         those over, the first that is not       its own, those over, those it grants
    STATE     limit, used, fence,     limit, used, fence; its own permit,     what changed of that
              permits (weight, fence) those of PERMITS above, of the tickets
    QUEUE     queue                   from the front to the first that has    those granted or dropped; its own, at
                                      to wait; its own; the last one's score  the end (score: the last one's + 1)
    POLLS     polls                   the first ticket in the queue           its own, those dropped
    (inboxes) deaf, mute              of those tickets                        a message is published

Whoever executes a decision with WATCH watches all four keys, as each decision settles the queue: it may grant.

The order of every decision: first what is over goes (`_Desk`), then those who wait get what is free, in their order
(`_Desk.settle`), and only then comes the request itself. So nobody barges, whoever calls first after an expiry.

Fences (P8) are a hybrid clock: max(last + 1, server time in microseconds). With a limit of WHOLE, readers weigh 1, a
writer weighs WHOLE, and readers share the fence of the last writer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, TypeAlias

from .outcomes import ASK_AGAIN, WHOLE, Outcome, Released, Renewed

TOMB_MS = 60_000
"""For how long a token that was undone is known to be spent."""


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


class _Turn(Enum):
    RESERVED = 1  # somebody ahead takes what is free himself: he polls, or could not be told
    FULL = 2  # the first one waits for more than is free
    FREE = 3  # nobody is ahead


class _Desk:
    """A snapshot on which one decision is worked out."""

    def __init__(self, before: Snapshot) -> None:
        """Drop what is over."""
        self.before, self.now = before, before.now
        self.limit, self.fence = before.limit, before.fence
        self.known_limit = before.limit  # the caller's becomes the server's with a grant
        self.queue, self.polls = list(before.queue), dict(before.polls)
        self.permits = {token: permit for token, permit in before.permits.items() if permit.until > before.now}
        over = sum(permit.weight for token, permit in before.permits.items() if token not in self.permits)
        self.used = before.used - over
        self.messages: list[Message] = []

    def decide(self, reply: Reply) -> Decision:
        after = replace(
            self.before,
            limit=self.known_limit,
            used=self.used,
            fence=self.fence,
            permits=self.permits,
            queue=tuple(self.queue),
            polls=self.polls,
        )
        return Decision(reply, after, tuple(self.messages))

    # -- small steps -------------------------------------------------------------------------------------

    def weight(self, token: bytes) -> int:
        return self.permits[token].weight if token in self.permits else 0

    def fits(self, weight: int, had: int) -> bool:
        return self.used - had + weight <= self.limit

    def left(self, until: int | None = None) -> int:
        """Milliseconds until then (None: until the first permit is over by itself; 0 when there is none)."""
        if until is None:
            until = min((permit.until for permit in self.permits.values()), default=None)
        return 0 if until is None else max(1, -((self.now - until) // 1000))

    def next_fence(self, weight: int) -> int:
        rises = self.limit != WHOLE or weight == WHOLE or self.fence == 0
        return max(self.fence + 1, self.now) if rises else self.fence

    def hold(self, token: bytes, weight: int, ms: int, fence: int) -> None:
        self.used += weight - self.weight(token)
        self.permits[token] = Permit(weight, fence, self.now + ms * 1000)
        self.known_limit, self.fence = self.limit, max(self.fence, fence)

    def drop(self, token: bytes) -> None:
        self.used -= self.weight(token)
        self.permits.pop(token, None)

    def leave(self, member: bytes) -> None:
        if member in self.queue:
            self.queue.remove(member)
        self.polls.pop(member, None)

    def tell(self, inbox: bytes, number: int, fence: int, ms: int, more: bytes = b"") -> bool:
        """Publish; return whether somebody listens, as far as we know."""
        if self.before.mute:
            return True
        if inbox in self.before.deaf:
            return False
        self.messages.append(Message(inbox, b"%d %d %016d %d%b" % (number, fence, self.now, ms, more)))
        return True

    # -- who is next -------------------------------------------------------------------------------------

    def settle(self, mine: bytes = b"") -> tuple[_Turn, int | None]:
        """Give what is free to those who wait ahead of ``mine``; return also until when a reservation holds."""
        while self.limit:
            if not self.queue or self.queue[0] == mine:
                return _Turn.FREE, None
            member = self.queue[0]
            ticket = Ticket.parse(member)
            if ticket is None:
                self.leave(member)
                continue
            had = self.weight(ticket.token)
            weight = max(ticket.weight, had)  # an identity that waits for more than it has, or has enough by now
            if weight > self.limit:  # the limit was lowered: it can never fit
                self.leave(member)
                if ticket.inbox:
                    self.tell(ticket.inbox, ticket.number, ASK_AGAIN, 0)
            elif not ticket.inbox:
                alive = self.polls.get(member, 0) * 1000
                if alive > self.now:
                    return _Turn.RESERVED, alive
                self.leave(member)
            elif not self.fits(weight, had):  # a dead one must not keep out those who would fit
                if self.used >= self.limit or self.tell(ticket.inbox, ticket.number, 0, self.left() or 1):
                    return _Turn.FULL, None
                self.leave(member)
            elif self.before.mute:
                return _Turn.RESERVED, None
            else:
                self.hand_over(member, ticket, weight, had)
        return _Turn.FULL, None  # nobody knows the limit: the next request brings it

    def hand_over(self, member: bytes, ticket: Ticket, weight: int, had: int) -> None:
        """Grant the first ticket, if its owner lives, and tell the one behind when to look."""
        following = Ticket.parse(self.queue[1]) if len(self.queue) > 1 else None
        self.leave(member)
        fence = self.permits[ticket.token].fence if had == weight else self.next_fence(weight)
        then = min(self.left() or ticket.claim_ms, ticket.claim_ms)
        together = following is not None and following.inbox == ticket.inbox
        more = b" %d %d" % (following.number, then) if following is not None and together else b""
        if self.tell(ticket.inbox, ticket.number, fence, ticket.claim_ms, more):
            self.hold(ticket.token, weight, ticket.claim_ms, fence)
            if following is not None and following.inbox and not together:
                self.tell(following.inbox, following.number, 0, then)


# -- the decisions -----------------------------------------------------------------------------------------


def acquire(
    before: Snapshot, token: bytes, ttl_ms: int, member: bytes, poll_ms: int, weight: int, limit: int
) -> Decision:
    """Take a permit, or a place in the queue unless ``member`` (the ticket) is empty; ``limit`` 0: the server's."""
    desk = _Desk(before)
    desk.limit = before.limit or limit
    turn, reserved = desk.settle(member)  # first: it may be this token that gets something, by another ticket
    queued = member in desk.queue
    differs = bool(limit) and limit != desk.limit and not queued
    if not desk.limit or differs or token in desk.permits or weight > desk.limit:
        if queued:
            desk.leave(member)
            desk.settle()
        own = desk.permits.get(token)
        if own is None:
            outcome = Outcome.MISMATCH if not desk.limit or differs else Outcome.TOO_HEAVY
            return desk.decide((outcome, desk.limit, -1, desk.now, 0))
        if not own.weight:
            return desk.decide((Outcome.SPENT, 0, -1, desk.now, 0))
        return desk.decide((Outcome.OWN, own.fence, desk.left(own.until), desk.now, own.weight))
    if turn is _Turn.FREE and desk.fits(weight, 0):
        if queued:
            desk.leave(member)
        fence = desk.next_fence(weight)
        desk.hold(token, weight, ttl_ms, fence)
        if queued:
            desk.settle()  # who is behind may fit, too
        return desk.decide(fence)
    look = desk.left() or -1
    if reserved is not None and (look < 0 or reserved - desk.now < look * 1000):
        look = desk.left(reserved)
    soon = int(turn is _Turn.RESERVED and reserved is None)
    if member and not queued:
        desk.queue.append(member)
    if member and poll_ms:
        desk.polls[member] = desk.now // 1000 + poll_ms
    return desk.decide((Outcome.QUEUED if member else Outcome.BUSY, 0, look, desk.now, soon))


def release(before: Snapshot, token: bytes, member: bytes, pending: bool) -> Decision:
    """Give up a permit and a ticket; ``pending``: a late copy of the request is to find its token spent."""
    desk = _Desk(before)
    desk.leave(member)
    held = desk.weight(token) > 0
    if held:
        desk.drop(token)
    if pending:
        desk.permits[token] = Permit(0, 0, desk.now + TOMB_MS * 1000)
    desk.settle()
    return desk.decide(Released.RELEASED if held else Released.GONE)


def renew(before: Snapshot, token: bytes, ttl_ms: int) -> Decision:
    """Let a permit end ``ttl_ms`` from now."""
    desk = _Desk(before)
    desk.settle()
    held = desk.weight(token)
    if held:
        desk.permits[token] = Permit(held, desk.permits[token].fence, desk.now + ttl_ms * 1000)
    return desk.decide((Renewed.RENEWED if held else Renewed.GONE, desk.now))


def resize(before: Snapshot, limit: int) -> Decision:
    """Set the limit. Those who fit now are granted; nothing is taken away."""
    desk = _Desk(before)
    desk.limit = desk.known_limit = limit
    desk.settle()
    return desk.decide(before.limit)
