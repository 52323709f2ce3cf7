"""Decisions about gates, which let in everybody or nobody: events and latches, whose waiters want permits.

The scripts permits/acquire.lua and release.lua decide about those, with a limit that says whether the gate is open. See
`permit_rules`; what is here changes that limit.
"""

from __future__ import annotations

from redis_sync_aio._engine.permit_rules import PermitDecision, PermitDraft
from redis_sync_aio._engine.snapshot import PermitSnapshot
from redis_sync_aio._scripts.constants import OPEN_LIMIT


def count_down(before: PermitSnapshot, token: bytes, by: int, whole: int, lasts: int, token_ms: int) -> PermitDecision:
    """Count a gate down ``by`` so much, or close it again (0); remember it for ``lasts`` ms, the token for its own."""
    draft = PermitDraft(before)
    count = max(-draft.limit, 0) if draft.limit else whole
    if token in draft.permits:
        draft.least = lasts  # an identity that counts again: the count is remembered from now on
    else:
        count = max(count - by, 0) if by else whole
        draft.limit = draft.known_limit = -count or OPEN_LIMIT
        draft.lasts = lasts
        draft.spend(token, token_ms)
        draft.settle()
    return draft.decide(count)
