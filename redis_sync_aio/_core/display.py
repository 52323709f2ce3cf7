"""How values are shown in messages."""

from __future__ import annotations

LONGEST = 100


def shown(value: object) -> str:
    """Return the repr of a value that a caller gave, shortened if it is long."""
    whole = repr(value)
    return whole if len(whole) <= LONGEST else f"{whole[: LONGEST - 1]}…"
