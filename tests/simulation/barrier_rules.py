"""Decisions about barriers, as pure functions: the scripts barrier/*.lua decide the same. See `permit_rules`.

A party that waits is a ticket in the queue, and POLLS says until when it lives: it asks again in time. The last party
turns all tickets into permits. The limit is minus the number of parties, and above 0 while the barrier is broken.
"""

from __future__ import annotations

from redis_sync_aio._engine.permit_rules import PermitDecision, PermitDraft
from redis_sync_aio._engine.snapshot import PermitSnapshot, Ticket
from redis_sync_aio._scripts.constants import ASK_AGAIN, DAY_MS, Outcome


def join(
    before: PermitSnapshot,
    token: bytes,
    pass_ms: int,
    member: bytes,
    poll_ms: int,
    parties: int,
    ttl_ms: int,
    new: bool,
) -> PermitDecision:
    """Take a place, or pass with all others as the last party; an empty ``member`` takes no place.

    ``pass_ms``: for how long it is remembered that it passed. ``new``: it may take a place that it does not have yet.
    """
    draft = PermitDraft(before)
    present = member in draft.queue
    if not draft.limit or (draft.limit < 0 and not draft.queue):
        draft.limit = -parties
    if token in draft.permits or draft.limit != -parties or not (present or new):
        return _decline(draft, token, member if present else b"", parties)
    lives_ms = max(ttl_ms, poll_ms)
    alive, look = _look_at_others(draft, member, lives_ms)
    if not alive:
        _send_away(draft, member, parties)
        return draft.refuse(Outcome.BROKEN, 0, 1)
    if len(draft.queue) + (not present) >= parties:
        return _pass(draft, token, pass_ms, member, parties)
    if not member:
        return draft.refuse(Outcome.BUSY, 0)
    if not present:
        draft.queue.append(member)
    draft.polls[member] = draft.now // 1000 + lives_ms
    draft.known_limit = draft.limit
    return draft.decide((Outcome.QUEUED, int(not present), look, draft.now, 0))


def _decline(draft: PermitDraft, token: bytes, member: bytes, parties: int) -> PermitDecision:
    draft.leave(member)
    own = draft.permits.get(token)
    if own is not None and own.weight:
        return draft.own(token)
    if draft.limit < 0 and draft.limit != -parties:
        return draft.refuse(Outcome.MISMATCH, -draft.limit)
    return draft.refuse(Outcome.BROKEN, 0, int(draft.limit > 0))


def _look_at_others(draft: PermitDraft, member: bytes, lives_ms: int) -> tuple[bool, int]:
    """Keep the parties of this process alive; return whether all others are, and in how many ms to ask again."""
    own, time = Ticket.parse(member), draft.now // 1000
    alive, look = True, max(1, lives_ms // 3)
    for other in draft.queue:
        ticket = Ticket.parse(other)
        inbox = other.partition(b"|")[0] if ticket is None else ticket.inbox
        if other == member or (own is not None and own.inbox and own.inbox == inbox):
            draft.polls[other] = time + lives_ms
        else:
            rest = draft.polls.get(other, 0) - time
            alive = alive and rest > 0
            look = max(1, min(look, rest))
    return alive, look


def _pass(draft: PermitDraft, token: bytes, pass_ms: int, member: bytes, parties: int) -> PermitDecision:
    """Let all parties pass. The first fence is a multiple of their number, so each fence tells a rank."""
    base = -(-max(draft.fence + 1, draft.now) // parties) * parties
    every = [*draft.queue, *([] if member in draft.queue else [member])]
    mine = 0
    for fence, other in enumerate(every, base):
        draft.leave(other)
        ticket = Ticket.parse(other)
        if other == member:
            mine = fence
            draft.hold(token, 1, pass_ms, fence)
        elif ticket is not None:
            if ticket.inbox:
                draft.tell(ticket.inbox, ticket.number, fence, ticket.claim_ms)
            draft.hold(ticket.token, 1, ticket.claim_ms, fence)
    return draft.decide(mine)


def _send_away(draft: PermitDraft, mine: bytes, limit: int) -> None:
    """Take all parties out of the queue; each but ``mine`` finds the barrier broken."""
    for member in list(draft.queue):
        draft.leave(member)
        ticket = Ticket.parse(member)
        if ticket is not None and member != mine:
            draft.spend(ticket.token)
            if ticket.inbox:
                draft.tell(ticket.inbox, ticket.number, ASK_AGAIN, 0)
    draft.limit = draft.known_limit = limit
    draft.lasts = DAY_MS


def break_(before: PermitSnapshot, token: bytes, parties: int, broken: bool, token_ms: int) -> PermitDecision:
    """Break a barrier until it is reset, or reset it. ``token`` is that of this command."""
    draft = PermitDraft(before)
    if token not in draft.permits:
        _send_away(draft, b"", parties if broken else -parties)
        draft.spend(token, token_ms)
    return draft.decide(int(draft.limit > 0))
