"""Names, times and pages of the documentation as messages show them."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

MAX_LISTED = 10
"""Names that one message shows."""
SITE = "https://redis-sync-aio.github.io/redis-sync-aio/"
"""Where the documentation is published: an installed package has no docs/."""


def listed(names: Collection[str]) -> str:
    """Return names for a message: the first ones, and how many more there are."""
    shown = ", ".join(map(repr, islice(names, MAX_LISTED)))
    more = len(names) - MAX_LISTED
    return f"{shown} and {more:,} more" if more > 0 else shown


def within(seconds: float) -> str:
    """Return "within 0.5 seconds" for a message. The rest of a timeout would have many digits."""
    if seconds == 0:
        return "immediately"
    return f"within {seconds if seconds < 0.001 else round(seconds, 3)} seconds"


def no_answer(name: str) -> str:
    """Return the reason for a request about ``name`` that ended before the first answer."""
    return f"Redis has not answered yet about {name!r}; allow more time"


def page(name: str, section: str = "") -> str:
    """Return the address of a page of the documentation, as in "operations/servers", or of a section on it."""
    return f"{SITE}{name}/" + (f"#{section}" if section else "")
