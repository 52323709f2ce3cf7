"""Patterns for names, as Redis has them for keys: ``*``, ``?``, ``[abc]``, ``[^a]``, ``[a-z]``, and a backslash."""

from __future__ import annotations

import re

from .._core.display import shown, text

_UNFINISHED = re.compile(rb"(?:[^\[\\]|\\.|\[(?:\\.|[^\]\\])*\])*", re.DOTALL)
"""Everything before an opening bracket without its end, or before a backslash at the end."""
_PARTS = re.compile(rb"(\*+)|(\?)|\[(\^?)((?:\\.|[^\]\\])*)\]?|\\(.)|(.)", re.DOTALL)
ANYTHING = b"any-name"
"""The text that a star stands for in a sample. No other pattern is likely to match it."""
_TRIED = [*b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", *range(256)]
_ESCAPED = re.compile(r"([*?\[\]\\])")
_IN_CLASS = re.compile(rb"\\(.)|([^\\])-([^\\])|([^\\])", re.DOTALL)


def check(pattern: bytes) -> None:
    """Raise ValueError for a pattern that has no end: keys behind the name could not be told from it."""
    finished = _UNFINISHED.match(pattern)
    if finished is None or finished.end() == len(pattern):
        return
    wrong = "a [ without its ]" if pattern[finished.end() :].startswith(b"[") else "a single backslash at its end"
    raise ValueError(
        f"the pattern {shown(text(pattern))} has {wrong}, and would match nothing: if that character belongs to "
        "the name, put a backslash before it"
    )


def literal(name: str) -> str:
    """Return the pattern that matches ``name`` alone."""
    return _ESCAPED.sub(r"\\\1", name)


def exact(pattern: bytes) -> bytes | None:
    """Return the only name that ``pattern`` matches; None if it may match others."""
    found = b""
    for part in _PARTS.finditer(pattern):
        literal = part[5] or part[6]
        if literal is None:
            return None
        found += literal
    return found


def sample(pattern: bytes) -> bytes | None:
    """Return a text that ``pattern`` matches; None if there is none."""
    found = b""
    for part in _PARTS.finditer(pattern):
        if part[1]:
            found += ANYTHING
        elif literal := part[5] or part[6]:
            found += literal
        else:
            matches = re.compile(_translated(part), re.DOTALL).fullmatch
            one = next((it for it in (bytes([byte]) for byte in _TRIED) if matches(it)), None)
            if one is None:
                return None
            found += one
    return found


def compiled(pattern: bytes) -> re.Pattern[bytes]:
    """Return ``pattern`` as a regular expression, which matches as the server would."""
    return re.compile(b"".join(map(_translated, _PARTS.finditer(pattern))), re.DOTALL)


def _translated(part: re.Match[bytes]) -> bytes:
    several, one, negated, inside, escaped, literal = part.groups()
    if several:
        return b".*"
    if one:
        return b"."
    if inside is None:
        return re.escape(escaped or literal)
    members = b""
    for member in _IN_CLASS.finditer(inside):
        first, last = (member[2], member[3]) if member[2] else [member[1] or member[4]] * 2
        first, last = sorted((first, last))
        members += b"\\x%02x-\\x%02x" % (first[0], last[0])
    if not members:
        return b"." if negated else b"(?!)"
    return b"[%b%b]" % (b"^" if negated else b"", members)
