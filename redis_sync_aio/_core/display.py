"""How values are shown in messages."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

LONGEST = 100
MAX_LISTED = 10
"""Names that one message shows."""


def shown(value: object) -> str:
    """Return the repr of a value that a caller gave, shortened if it is long."""
    whole = repr(value)
    return whole if len(whole) <= LONGEST else f"{whole[: LONGEST - 1]}…"


def shown_within(within: float | None) -> str:
    """Return "within 0.5 seconds" for a message. The rest of a timeout would have many digits."""
    if within == 0:
        return "immediately"
    return f"within {within if within is None or within < 0.001 else round(within, 3)} seconds"


def listed(names: Collection[bytes]) -> str:
    """Return names for a message: the first ones, and how many more there are."""
    shown = [repr(text(name)) for name in islice(names, MAX_LISTED)]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")


def text(value: bytes) -> str:
    """Return bytes from the server as text that can be shown; undecodable bytes are escaped."""
    return value.decode("utf-8", "backslashreplace")
