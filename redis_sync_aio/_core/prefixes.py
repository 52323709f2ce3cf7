"""Prefixes of keys and inboxes: what a user may give."""

from __future__ import annotations

import re

from .display import shown

MAX_PREFIX_CHARACTERS = 64

_PREFIX = re.compile(r"(?:[A-Za-z0-9_.:/-]*:)?")


def checked_prefix(prefix: object) -> bytes:
    """Return the prefix of keys and inboxes that a user gave; raise TypeError or ValueError if it cannot be one.

    It ends with a colon, so that `app1:` is not the beginning of `app10:`; it has no braces, so that names have the
    hash slots that they have without it; and none of its characters means anything in a pattern.
    """
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a str, not {shown(prefix)}")
    if len(prefix) > MAX_PREFIX_CHARACTERS or not _PREFIX.fullmatch(prefix):
        raise ValueError(
            f"prefix must consist of at most {MAX_PREFIX_CHARACTERS} letters of ASCII, digits, '_', '.', '/', '-' and "
            f"':', and end with ':', as in 'app1:'; not {shown(prefix)}"
        )
    return prefix.encode()
