"""Values as messages show them."""

from __future__ import annotations

from collections.abc import Collection

from ..errors._wording import listed as listed_text

LONGEST = 100


def shown(value: object) -> str:
    """Return the repr of a value that a caller gave, shortened if it is long."""
    whole = repr(value)
    return whole if len(whole) <= LONGEST else f"{whole[: LONGEST - 1]}…"


def listed(names: Collection[bytes]) -> str:
    """Return names for a message: the first ones, and how many more there are."""
    return listed_text(tuple(map(text, names)))


def text(value: bytes) -> str:
    """Return bytes from the server as text that can be shown; undecodable bytes are escaped."""
    return value.decode("utf-8", "backslashreplace")
