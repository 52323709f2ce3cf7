"""Decisions about permits, as pure functions: from a snapshot of the keys to a reply, messages and the next snapshot.

The scripts permits/*.lua decide the same on the server; property tests compare the two, reply by reply and key by
key. Nothing here talks to a server, and nothing but the snapshot, its ``now`` included, enters a decision.

    key       in the snapshot         read by a decision                      written by it
    PERMITS   permits (until)         those over, the first of worth          its own, those over, those it grants
    STATE     limit, used, fence,     limit, used, fence; its own permit,     what changed of that
              permits (weight, fence) those of PERMITS above, of the tickets
              resized                 what a request with another limit does  a resize
              shared                  the first MAX_NOTIFIED of PERMITS, if   a grant to a process that shares
                                      it is set, for a ticket that waits
    QUEUE     queue                   from the front to the first that has    those granted or dropped; its own, at
                                      to wait; its own; the last one's score  the end (score: the last one's + 1)
    POLLS     polls                   the first ticket in the queue           its own, those dropped
    (inboxes) deaf, mute              of those tickets                        a message is published

A decision with WATCH watches all four keys, since each decision settles the queue and may grant.

The order of every decision: first expired permits go (`PermitDraft`), then waiters get the free permits, in their order
(`PermitDraft.settle`). Only then comes the request itself. So no request barges in after an expiry.
(The script that acquires leaves tombstones that are over where nothing is held: no decision depends on them.)

Fences (P8) are a hybrid clock: max(last + 1, server time in microseconds). With a limit of WRITER_WEIGHT a reader
weighs 1 and a writer WRITER_WEIGHT, and readers share the fence of the last writer. A process that shares a permit
among its tasks gets FENCE_RANGE fences with it: STATE has the last of them, everything else the first.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import nsmallest
from typing import TypeAlias

from .._scripts.constants import (
    ASK_AGAIN,
    FENCE_RANGE,
    MAX_DEAD,
    MAX_NOTIFIED,
    OPEN_LIMIT,
    PAUSED_LIMIT,
    TOMBSTONE_MS,
    WRITER_WEIGHT,
    Look,
    Outcome,
    ReleaseReply,
    Renewed,
)
from .queue_rules import QueueDraft, Settled
from .snapshot import Decision, Permit, PermitSnapshot, ScriptReply, Sharer, Ticket

PermitDecision: TypeAlias = Decision[PermitSnapshot]


class PermitDraft(QueueDraft):
    """A snapshot on which one decision is worked out."""

    def __init__(self, before: PermitSnapshot) -> None:
        """Drop expired permits."""
        super().__init__(before)
        self.before = before
        self.limit, self.fence, self.shared = before.limit, before.fence, before.shared
        self.known_limit = before.limit  # the caller's limit becomes the server's with a grant
        self.lasts, self.least = 0, 0
        self.permits = {token: permit for token, permit in before.permits.items() if permit.until > before.now}
        over = sum(permit.weight for token, permit in before.permits.items() if token not in self.permits)
        self.used = before.used - over
        # Since the last waiter queued there may be room, or (in `settle`) another first waiter.
        self.moved = before.packed or before.used >= before.limit != 0

    def decide(self, reply: ScriptReply) -> PermitDecision:
        after = replace(
            self.before,
            limit=self.known_limit,
            used=self.used,
            fence=self.fence,
            permits=self.permits,
            queue=tuple(self.queue),
            polls=self.polls,
            shared=self.shared,
            packed=False,
            lasts=self.lasts,
            least=self.least,
        )
        return PermitDecision(reply, after, tuple(self.messages))

    # -- small steps -------------------------------------------------------------------------------------

    def weight(self, token: bytes) -> int:
        return self.permits[token].weight if token in self.permits else 0

    def fits(self, weight: int) -> bool:
        return self.used + weight <= self.limit

    def left(self, until: int | None = None) -> int:
        """Return the milliseconds until then (None: until the first permit expires; 0 when there is none).

        The end of a tombstone frees nothing. (The scripts look at 64 of them, and take the end of the last one then.)
        """
        if until is None:
            until = min((permit.until for permit in self.permits.values() if permit.weight), default=None)
        return 0 if until is None else max(1, -((self.now - until) // 1000))

    def fenced(self, weight: int) -> bool:
        """Return whether a permit of this weight gets a fence of its own: readers have the fence of the last writer."""
        return self.limit != WRITER_WEIGHT or weight == WRITER_WEIGHT

    def next_fence(self, weight: int) -> int:
        return max(self.fence + 1, self.now) if self.fenced(weight) or self.fence == 0 else self.fence

    def previous(self, weight: int) -> int | None:
        """Return the fence of the last writer for a new writer, None for any other permit."""
        return self.fence if weight == WRITER_WEIGHT else None

    def reserve(self, weight: int, fences: int) -> int:
        """Reserve ``fences`` more fences for a permit that is held; return the first, 0 if there are none."""
        if not fences or not self.fenced(weight):
            return 0
        first = self.next_fence(weight)
        self.fence = first + fences - 1
        return first

    def hold(self, token: bytes, weight: int, ms: int, fence: int) -> None:
        self.used += weight
        self.permits[token] = Permit(weight, fence, self.now + ms * 1000, self.previous(weight))
        shares = Sharer.of(token) is not None
        last = fence + FENCE_RANGE - 1 if shares and self.fenced(weight) else fence
        self.known_limit, self.fence, self.shared = self.limit, max(self.fence, last), self.shared or shares

    def spend(self, token: bytes, ms: int = TOMBSTONE_MS) -> None:
        """Leave a tombstone for ``ms``."""
        self.permits[token] = Permit(0, 0, self.now + ms * 1000)

    def drop(self, token: bytes) -> None:
        self.used -= self.weight(token)
        self.permits.pop(token, None)

    def tell(self, inbox: bytes, number: int, fence: int, ms: int, more: bytes = b"") -> bool:
        """Publish a grant of ``fence``, or what stands in its place, for ``ms``; return as `publish`."""
        return self.publish(inbox, number, b"%d %016d %d%b" % (fence, self.now, ms, more))

    def tell_holders(self) -> None:
        """Notify processes that share their permits among tasks of contention, each process once."""
        held = nsmallest(MAX_NOTIFIED, self.permits.items(), key=lambda item: (item[1].until, item[0]))
        whom: dict[bytes, bytes] = {}
        for token, permit in held if self.shared else ():
            sharer = Sharer.of(token)
            if sharer is not None and permit.weight:  # a tombstone holds nothing
                whom.setdefault(sharer.inbox, token)
        for token in whom.values():
            self.tell_contended(token)

    # -- who is next -------------------------------------------------------------------------------------

    def settle(self, mine: bytes = b"") -> tuple[Settled, int | None]:
        """Give the free permits to the waiters ahead of ``mine``; return also until when a reservation holds."""
        dead = 0
        while self.limit > 0:
            if dead == MAX_DEAD:
                return Settled.RESERVED, None
            used = self.used
            if not self.queue or self.queue[0] == mine:
                return Settled.FREE, None
            member = self.queue[0]
            ticket = Ticket.parse(member)
            if ticket is None or ticket.later:
                if self.used >= self.limit:
                    return Settled.FULL, None
                if self.lives(member, ticket):
                    return Settled.LATER, None
                self.leave(member)
                self.moved, dead = True, dead + 1
                continue
            weight = ticket.weight
            # The limit was lowered, or an identity holds a permit already: its owner requests again.
            if weight > self.limit or self.weight(ticket.token):
                self.leave(member)
                if ticket.inbox:
                    self.tell(ticket.inbox, ticket.number, ASK_AGAIN, 0)
            elif not ticket.inbox:
                alive = self.polls.get(member, 0) * 1000
                if alive > self.now and self.limit != OPEN_LIMIT:
                    return Settled.RESERVED, alive
                self.leave(member)
                if alive > self.now:
                    self.hold(ticket.token, weight, ticket.claim_ms, self.next_fence(weight))
            elif not self.fits(weight):  # a dead waiter must not block waiters that fit
                if self.used >= self.limit:
                    return Settled.FULL, None
                if self.tell(ticket.inbox, ticket.number, 0, self.left() or 1):
                    self.watch_over(ticket.inbox, mine)
                    return Settled.FULL, None
                self.leave(member)
            elif self.before.mute and ticket.inbox not in self.before.deaf and self.limit != OPEN_LIMIT:
                return Settled.RESERVED, None
            else:
                self.hand_over(member, ticket, weight)
            self.moved, dead = True, dead + (self.used == used)
        if self.limit == PAUSED_LIMIT and (not self.queue or self.queue[0] == mine):
            return Settled.FREE, None
        return Settled.FULL, None  # paused, a closed gate, or the limit is unknown: the next request brings it

    def watch_over(self, inbox: bytes, mine: bytes) -> None:
        """Let the second ticket look from time to time: the first waits for more permits, and may die."""
        following = Ticket.parse(self.queue[1]) if self.moved and len(self.queue) > 1 else None
        if following is not None and self.queue[1] != mine and following.inbox not in (b"", inbox):
            self.tell(following.inbox, following.number, ASK_AGAIN, 0)

    def hand_over(self, member: bytes, ticket: Ticket, weight: int) -> None:
        """Grant the first ticket, if its owner lives, and notify the next waiter of the time to look."""
        behind = self.queue[1:2]
        following = Ticket.parse(behind[0]) if behind else None
        self.leave(member)
        fence = self.next_fence(weight)
        then = min(self.left() or ticket.claim_ms, ticket.claim_ms)
        together = following is not None and following.inbox == ticket.inbox
        number = following.number if following is not None and together else 0  # 0: another process waits
        more = b" %d %d" % (number, then) if behind else b""
        previous = self.previous(weight)
        more += b"" if previous is None else b" %d" % previous
        if self.tell(ticket.inbox, ticket.number, fence, ticket.claim_ms, more) or self.limit == OPEN_LIMIT:
            self.hold(ticket.token, weight, ticket.claim_ms, fence)
            if following is not None and following.inbox and not together:
                self.tell(following.inbox, following.number, 0, then)

    # -- answers to a request ----------------------------------------------------------------------------

    def refuse(self, outcome: Outcome, number: int, more: int = 0) -> PermitDecision:
        return self.decide((outcome, number, -1, self.now, more))

    def own(self, token: bytes) -> PermitDecision:
        own = self.permits[token]
        previous = () if own.previous is None else (own.previous,)
        return self.decide((Outcome.OWN, own.fence, self.left(own.until), self.now, own.weight, *previous))

    def line_up(
        self,
        turn: Settled,
        reserved: int | None,
        member: bytes,
        poll_ms: int,
        *,
        back: bool = False,
    ) -> PermitDecision:
        new = bool(member) and member not in self.queue
        look = self.left() or -1
        if reserved is not None and (look < 0 or reserved - self.now < look * 1000):
            look = self.left(reserved)
        room = turn is Settled.FULL and self.used < self.limit
        soon = Look.SOON if turn is Settled.RESERVED and reserved is None else Look.IN_TIME if room else Look.NONE
        soon = Look.LATER if turn is Settled.LATER else soon
        if new:
            self.queue.append(member)
        if member and poll_ms:
            self.polls[member] = self.now // 1000 + poll_ms
        if member:
            self.tell_holders()
        return self.decide((Outcome.QUEUED if member else Outcome.BUSY, int(new or back), look, self.now, soon))


# -- the decisions -----------------------------------------------------------------------------------------


def acquire(
    before: PermitSnapshot,
    token: bytes,
    ttl_ms: int,
    member: bytes,
    poll_ms: int,
    weight: int,
    limit: int,
    whose: bytes = b"",
    most: int | None = None,
    former: int | None = None,
) -> PermitDecision:
    """Take a permit, or a place in the queue unless ``member`` (the ticket) is empty; ``limit`` 0: the server's.

    ``most``: it gets no place if so many tickets wait. ``former``: the place that the ticket had, if the request is
    repeated.
    ``whose`` says whose limit counts when the server has another one: see include/permit_choose_limit.lua.
    """
    draft = PermitDraft(before)
    draft.limit = before.limit or limit
    back = draft.come_back(member, former)
    turn, reserved = draft.settle(member)  # before the rest: another ticket may bring this token a grant
    states = limit > 0 or limit == PAUSED_LIMIT
    differs = states and limit != draft.limit and member not in draft.queue
    idle = not draft.used and turn is Settled.FREE
    has = token in draft.permits  # then this may be a late copy of the request that got the permit: it sets nothing
    if differs and not before.resized and not has and (whose == b"set" or idle):
        draft.limit = draft.known_limit = limit
        differs = False
        turn, reserved = draft.settle(member)
    differs = differs and whose != b"keep"
    if not draft.limit or differs or token in draft.permits or weight > abs(draft.limit):
        return _decline(draft, token, member, differs)
    if turn is Settled.FREE and draft.fits(weight):
        return _grant(draft, token, ttl_ms, member, weight)
    if member and member not in draft.queue and draft.crowded(most):
        return draft.decide((Outcome.QUEUE_FULL, draft.waiting(), draft.left() or -1, draft.now, 0))
    if member and draft.limit == PAUSED_LIMIT:  # no grant writes it, or keeps it
        draft.known_limit, draft.least = draft.limit, ttl_ms
    return draft.line_up(turn, reserved, member, poll_ms, back=back)


def _decline(draft: PermitDraft, token: bytes, member: bytes, differs: bool) -> PermitDecision:
    """Refuse a request, and take its ticket out of the queue. ``differs``: its limit is not the server's."""
    if member in draft.queue:
        draft.leave(member)
        draft.settle()
    own = draft.permits.get(token)
    if own is not None:
        return draft.own(token) if own.weight else draft.refuse(Outcome.SPENT, 0)
    if differs:
        return draft.refuse(Outcome.MISMATCH, draft.limit, int(draft.before.resized))
    return draft.refuse(Outcome.TOO_HEAVY if draft.limit else Outcome.MISMATCH, draft.limit)


def _grant(draft: PermitDraft, token: bytes, ttl_ms: int, member: bytes, weight: int) -> PermitDecision:
    """Give the permit to a request that is next, and the remaining ones to the waiters behind its ticket."""
    queued = member in draft.queue
    if queued:
        draft.leave(member)
    fence, previous = draft.next_fence(weight), draft.previous(weight)
    draft.hold(token, weight, ttl_ms, fence)
    if queued:
        draft.settle()  # the next waiter may fit, too
    if draft.queue:
        draft.tell_contended(token)
    if previous is not None:
        return draft.decide((Outcome.GRANTED, fence, ttl_ms, draft.now, weight, previous))
    return draft.decide(fence)


def release(before: PermitSnapshot, token: bytes, member: bytes, pending: bool) -> PermitDecision:
    """Give up a permit and a ticket; ``pending``: a late copy of the request must find its token spent."""
    draft = PermitDraft(before)
    draft.leave(member)
    held = draft.weight(token) > 0
    if held:
        draft.drop(token)
    if pending:
        draft.spend(token)
    draft.settle()
    return draft.decide(ReleaseReply.RELEASED if held else ReleaseReply.GONE)


def renew(before: PermitSnapshot, token: bytes, ttl_ms: int, least: int, fences: int | None = None) -> PermitDecision:
    """Let a permit of that weight at ``least`` end ``ttl_ms`` from now.

    ``fences``: how many more a process that shares it needs.
    """
    draft = PermitDraft(before)
    draft.settle()
    held = draft.weight(token)
    if held < least:
        return draft.decide((Renewed.GONE, draft.now))
    until, ended = draft.now + ttl_ms * 1000, draft.permits[token].until
    draft.permits[token] = replace(draft.permits[token], until=until)
    if ended > until:
        draft.tell_sooner(draft.left() or 1)
    if fences is None:
        return draft.decide((Renewed.RENEWED, draft.now))
    contended = bool(draft.queue) or draft.used > draft.limit  # it may have been lowered
    return draft.decide((Renewed.RENEWED, draft.now, draft.reserve(held, fences), int(contended)))


def resize(before: PermitSnapshot, limit: int) -> PermitDecision:
    """Set the limit, until it is set again. Waiters that fit now get their permits; no holder loses any."""
    draft = PermitDraft(replace(before, resized=True))
    draft.limit = draft.known_limit = limit
    draft.settle()
    return draft.decide(before.limit)
