"""Decisions that only scripts make, as pure functions: lock/attach, permits/attach, permits/downgrade."""

from __future__ import annotations

from dataclasses import replace

from redis_sync_aio._engine.lock_rules import LockDecision, LockDraft, remembered
from redis_sync_aio._engine.permit_rules import PermitDecision, PermitDraft
from redis_sync_aio._engine.snapshot import LockSnapshot, Permit, PermitSnapshot
from redis_sync_aio._scripts.constants import FOREVER, FOREVER_MS, Outcome, ReleaseReply


def attach_lock(before: LockSnapshot, token: bytes, ttl_ms: int, replaced: bytes) -> LockDecision:
    """Let ``token`` hold, for ``ttl_ms`` from now and with the same fence, what ``replaced`` holds."""
    draft = LockDraft(before)
    if draft.holder not in (replaced, token):
        if draft.holder is None:
            draft.settle()
        return draft.decide((Outcome.BUSY, 0, draft.left, draft.now, 0))
    shorter = ttl_ms != FOREVER and (draft.left == FOREVER_MS or draft.left > ttl_ms)
    if draft.fence and draft.granted == draft.holder:
        fence, draft.granted = draft.fence, token
        draft.kept = max(draft.kept, remembered(ttl_ms))
    else:
        fence = draft.next_fence(token, ttl_ms)
    draft.hold(token, ttl_ms)
    if shorter:
        draft.tell_sooner(ttl_ms)
    return draft.decide((Outcome.OWN, fence, draft.left, draft.now, 0))


def attach(before: PermitSnapshot, token: bytes, ttl_ms: int, replaced: bytes) -> PermitDecision:
    """Let ``token`` have, for ``ttl_ms`` from now and with the same fence, the permit that ``replaced`` has."""
    draft = PermitDraft(before)
    draft.settle()
    own = draft.permits.get(token if token in draft.permits else replaced)
    if own is None or not own.weight:
        return draft.refuse(Outcome.BUSY, 0)
    draft.permits.pop(replaced, None)
    draft.permits[token] = Permit(own.weight, own.fence, draft.now + ttl_ms * 1000)
    if own.until > draft.permits[token].until:
        draft.tell_sooner(draft.left() or 1)
    return draft.decide((Outcome.OWN, own.fence, ttl_ms, draft.now, own.weight))


def downgrade(before: PermitSnapshot, token: bytes) -> PermitDecision:
    """Turn the writer into a reader."""
    draft = PermitDraft(before)
    held = draft.weight(token)
    if held > 1:
        draft.used += 1 - held
        draft.permits[token] = replace(draft.permits[token], weight=1, previous=None)
    draft.settle()
    return draft.decide(ReleaseReply.RELEASED if held else ReleaseReply.GONE)
