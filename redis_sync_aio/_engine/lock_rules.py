"""Decisions about a lock, as pure functions: from a snapshot of the keys to a reply, messages and the next snapshot.

The scripts lock/*.lua decide the same on the server; property tests compare the two, reply by reply and key by key.
Nothing here talks to a server, and nothing but the snapshot enters a decision.

    key     in the snapshot      read by a decision                     written by it
    NAME    holder, left         both                                   the holder after it
    FENCE   fence, granted, kept the last fence, and whose it was       those of the next grant
    QUEUE   queue                from the front to the first that has   those granted or dropped; its own, at the end
                                 to wait; its own
    POLLS   polls                the first ticket in the queue          its own, those dropped

The order of every decision: first a free lock goes to the waiters, in their order (`LockDraft.settle`). Only then comes
the request itself. So no request barges in, whichever arrives first after an expiry.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from .._scripts.constants import (
    APART_US,
    ASK_AGAIN,
    BUSY_MS,
    FENCE_RANGE,
    FOREVER,
    FOREVER_MS,
    FREE_MS,
    HOUR_MS,
    MAX_DEAD,
    POLLERS_TICKET,
    TEN_YEARS_MS,
    Look,
    Outcome,
    ReleaseReply,
    Renewed,
)
from .queue_rules import QueueDraft, Settled
from .snapshot import Decision, LockSnapshot, ScriptReply, Sharer, Ticket

LockDecision: TypeAlias = Decision[LockSnapshot]


def remembered(ms: int) -> int:
    """Return for how long (ms) the fence of a lease is remembered: longer than the lease, an hour at least."""
    return TEN_YEARS_MS if ms == FOREVER else max(HOUR_MS, 2 * ms)


def _fences_of(token: bytes) -> int:
    return 1 if Sharer.of(token) is None else FENCE_RANGE


class LockDraft(QueueDraft):
    """A snapshot on which one decision is worked out."""

    def __init__(self, before: LockSnapshot) -> None:
        super().__init__(before)
        self.before = before
        self.holder, self.left = before.holder, before.left
        self.fence, self.granted, self.kept = before.fence, before.granted, before.kept

    def decide(self, reply: ScriptReply) -> LockDecision:
        after = replace(
            self.before,
            holder=self.holder,
            left=self.left,
            fence=self.fence,
            granted=self.granted,
            kept=self.kept,
            queue=tuple(self.queue),
            polls=self.polls,
        )
        return LockDecision(reply, after, tuple(self.messages))

    # -- small steps -------------------------------------------------------------------------------------

    def next_fence(self, token: bytes, ms: int, number: int = 0, least: int = 0) -> int:
        begin = least if 0 < least - self.now <= APART_US else self.now
        first = max(self.fence + 1, begin)
        ahead = first - self.now if self.fence >= begin else 0  # the clock stood still or went back
        self.fence, self.granted = first - 1 + (number or _fences_of(token)), token
        self.kept = remembered(ms) + ahead // 1000
        return first

    def hold(self, token: bytes, ms: int) -> None:
        self.holder, self.left = token, FOREVER_MS if ms == FOREVER else ms

    def free(self) -> None:
        self.holder, self.left = None, FREE_MS

    def settle(self, mine: bytes = b"") -> Settled:
        """Give the lock to the first living ticket ahead of ``mine``."""
        for _ in range(MAX_DEAD):
            if not self.queue or self.queue[0] == mine:
                return Settled.FREE
            member = self.queue[0]
            ticket = Ticket.parse(member)
            if ticket is not None and ticket.inbox and self.before.full:
                self.publish(ticket.inbox, ticket.number, b"%d %016d 0" % (ASK_AGAIN, self.now))
                return Settled.RESERVED
            if ticket is None or ticket.later or not ticket.inbox:
                if self.lives(member, ticket):
                    return Settled.RESERVED if ticket is not None and not ticket.later else Settled.LATER
                self.leave(member)
                continue
            fence = self.next_fence(ticket.token, ticket.claim_ms)  # a dead waiter uses up a fence, too
            if self.before.mute and ticket.inbox not in self.before.deaf:
                return Settled.RESERVED
            self.queue.pop(0)
            if self.hand_over(ticket, fence):
                return Settled.GRANTED
        return Settled.RESERVED

    def hand_over(self, ticket: Ticket, fence: int) -> bool:
        """Notify the owner of a ticket, if it lives, of its grant, and the next waiter of the time to look."""
        following = Ticket.parse(self.queue[0]) if self.queue else None
        told = b"%016d %016d %d" % (fence, self.now, ticket.claim_ms)
        if self.queue:
            number = following.number if following is not None and following.inbox == ticket.inbox else 0
            told += b" %d %d" % (number, ticket.claim_ms)
        if not self.publish(ticket.inbox, ticket.number, told):
            return False
        self.hold(ticket.token, ticket.claim_ms)
        if following is not None and following.inbox not in (b"", ticket.inbox):
            self.publish(following.inbox, following.number, b"0 %016d %d" % (self.now, ticket.claim_ms))
        return True

    def leave_open(self, gap_ms: int) -> bool:
        """Leave the lock free for ``gap_ms``, if it has been handed over without a break for BUSY_MS."""
        ms, since = self.now // 1000, self.polls.get(POLLERS_TICKET)
        if self.before.full:
            return False
        if since is None or since > ms:
            self.polls[POLLERS_TICKET] = ms
            return False
        if ms - since < BUSY_MS:
            return False
        self.polls[POLLERS_TICKET] = ms + gap_ms
        self.tell_sooner(gap_ms)
        self.queue.insert(0, POLLERS_TICKET)
        self.free()
        return True

    def spent(self, token: bytes, reusable: bool) -> bool:
        return self.holder is None and self.fence > 0 and self.granted == token and not reusable

    def own(self, token: bytes, ttl_ms: int) -> tuple[int, ...]:
        granted = self.fence and self.granted == token
        fence = self.fence - _fences_of(token) + 1 if granted else self.next_fence(token, ttl_ms)
        return (Outcome.OWN, fence, self.left, self.now, 0)

    def tell_holder(self) -> None:
        """Notify a holder that shares its lease among tasks of contention, if there is a queue."""
        if self.queue and self.holder is not None:
            self.tell_contended(self.holder)


# -- the decisions -----------------------------------------------------------------------------------------


def acquire(
    before: LockSnapshot,
    token: bytes,
    ttl_ms: int,
    member: bytes,
    poll_ms: int,
    reusable: bool,
    most: int | None = None,
    former: int | None = None,
    least: int | None = None,
) -> LockDecision:
    """Take the lock, or a place in the queue unless ``member`` (the ticket) is empty, or ``most`` tickets wait.

    ``former``: the place that the ticket had, if the request is repeated. ``least``: of a Redlock, the least fence.
    """
    draft = LockDraft(before)
    if draft.spent(token, reusable):
        draft.leave(member)
        return draft.decide((Outcome.SPENT, 0, FREE_MS, draft.now, 0))
    if draft.holder == token:
        draft.leave(member)
        return draft.decide(draft.own(token, ttl_ms))
    back = draft.come_back(member, former)
    turn = draft.settle(member) if draft.holder is None else Settled.GRANTED
    if turn is Settled.FREE:
        draft.leave(member)
        fence = draft.next_fence(token, ttl_ms, least=least or 0)
        draft.hold(token, ttl_ms)
        draft.tell_holder()  # the waiters behind it in the queue
        return draft.decide(fence)
    new = bool(member) and member not in draft.queue
    if new and draft.crowded(most):
        return draft.decide((Outcome.QUEUE_FULL, draft.waiting(), draft.left, draft.now, 0))
    if new:
        draft.queue.append(member)
    if member and poll_ms:
        draft.polls[member] = draft.now // 1000 + poll_ms
    if member:
        draft.tell_holder()
    new = new or back
    soon = Look.LATER if turn is Settled.LATER else Look.SOON
    look = soon if draft.holder is None or draft.granted != draft.holder else Look.NONE
    return draft.decide((Outcome.QUEUED if member else Outcome.BUSY, int(new), draft.left, draft.now, look))


def release(before: LockSnapshot, token: bytes, member: bytes, pending: bool, gap_ms: int = 0) -> LockDecision:
    """Give up the lock and a ticket; ``pending``: a late copy of the request must find its token spent.

    ``gap_ms``: how long a busy lock is left free now and then, for clients that poll for it; 0: never.
    """
    draft = LockDraft(before)
    draft.leave(member)
    if draft.holder not in (None, token):
        return draft.decide(ReleaseReply.TAKEN)
    held = draft.holder is not None
    if held and gap_ms and not draft.queue:
        draft.polls.pop(POLLERS_TICKET, None)
    elif held and gap_ms and draft.leave_open(gap_ms):
        return draft.decide(ReleaseReply.RELEASED)
    turn = draft.settle()
    if turn is not Settled.GRANTED:
        draft.free()
    if pending and not held and turn is Settled.FREE and draft.granted != token:
        draft.next_fence(token, 1)
    return draft.decide(ReleaseReply.RELEASED if held else ReleaseReply.GONE)


def renew(before: LockSnapshot, token: bytes, ttl_ms: int, fences: int | None = None) -> LockDecision:
    """Let the lease end ``ttl_ms`` from now; ``fences``: how many more a process that shares it needs."""
    draft = LockDraft(before)
    if draft.holder == token:
        shorter = draft.left == FOREVER_MS or draft.left > ttl_ms
        draft.left = ttl_ms
        if shorter:
            draft.tell_sooner(ttl_ms)
        draft.kept = max(draft.kept, remembered(ttl_ms)) if draft.fence else draft.kept
        if fences is None:
            return draft.decide((Renewed.RENEWED, draft.now))
        first = draft.next_fence(token, ttl_ms, fences) if fences else 0
        return draft.decide((Renewed.RENEWED, draft.now, first, int(bool(draft.queue))))
    if draft.holder is not None:
        return draft.decide((Renewed.TAKEN, draft.now))
    draft.settle()
    return draft.decide((Renewed.GONE, draft.now))


def force(before: LockSnapshot) -> LockDecision:
    """Take the lock away from its holder."""
    draft = LockDraft(before)
    held = draft.holder
    if draft.settle() is not Settled.GRANTED:
        draft.free()
    if held is not None:
        draft.tell_contended(held)
    return draft.decide(int(held is not None))


def acquire_all(before: tuple[LockSnapshot, ...], ttl_ms: int, tokens: tuple[bytes, ...]) -> tuple[LockDecision, ...]:
    """Take several locks, all of them or none; the replies are those of `acquire` without a ticket."""
    drafts = [LockDraft(one) for one in before]
    replies: list[ScriptReply | None] = []
    for draft, token in zip(drafts, tokens, strict=True):
        free = draft.holder is None and not draft.spent(token, reusable=False)
        if draft.holder == token:
            replies.append(draft.own(token, ttl_ms))
        elif free and draft.settle() is Settled.FREE:
            replies.append(None)
        else:
            outcome = Outcome.SPENT if draft.spent(token, reusable=False) else Outcome.BUSY
            replies.append((outcome, 0, draft.left, draft.now, 0))
    all_or_none = not any(isinstance(reply, tuple) and reply[0] != Outcome.OWN for reply in replies)
    for number, (draft, token) in enumerate(zip(drafts, tokens, strict=True)):
        if replies[number] is None and all_or_none:
            replies[number] = draft.next_fence(token, ttl_ms)
            draft.hold(token, ttl_ms)
    busy = (Outcome.BUSY, 0, FREE_MS)
    return tuple(
        draft.decide((*busy, draft.now, 0) if reply is None else reply)
        for draft, reply in zip(drafts, replies, strict=True)
    )
