"""Parts of the views of names that tests compare."""

from __future__ import annotations

from collections.abc import Sequence

from redis_sync_aio.inspection import HolderView, NameView, WaiterView


def tokens(parties: Sequence[HolderView | WaiterView]) -> tuple[str, ...]:
    """Return the tokens of holders or waiters, in their order."""
    return tuple(it.token for it in parties)


def holder_of(view: NameView) -> str | None:
    """Return the token of the holder of a lock; None: it is free."""
    (*held,) = tokens(view.holders)
    assert len(held) <= 1
    return held[0] if held else None


def remaining_of(view: NameView) -> float | None:
    """Return the time that is left of the lease of a lock; None: it is free, or held without an end."""
    return view.holders[0].remaining if view.holders else None


def writer_of(view: NameView) -> str | None:
    """Return the token of the writer of a read/write lock."""
    return next((it.token for it in view.holders if it.access == "write"), None)


def readers_of(view: NameView) -> int:
    """Return how many readers a read/write lock has."""
    return 0 if writer_of(view) else view.held
