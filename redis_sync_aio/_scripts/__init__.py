"""Load the Lua scripts: each decision on the server is one file in the folder of its subject.

A line ``-- NARROW script n m`` names the script that does the same, as far as it can, with keys n and m only. By that
one leases are renewed and released while the hash slot of a name is being moved.

A line ``-- include: part`` is replaced by ``include/part.lua``. The header of each file documents its keys,
arguments, replies, cost, and why running it twice is safe. Comments do not travel to the server.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files

_INCLUDE = re.compile(r"^-- include: (\w+)$", re.MULTILINE)
_NARROW = re.compile(r"^-- NARROW ([\w/]+) ([\d ]+)$", re.MULTILINE)
_COMMENT = re.compile(r"(^|\s)--.*$", re.MULTILINE)
_BLANK = re.compile(r"\n\s*\n+")


@dataclass(frozen=True, slots=True)
class Script:
    """A script as the server sees it."""

    name: str
    source: bytes
    sha: bytes
    narrow: Narrow | None = None


@dataclass(frozen=True, slots=True)
class Narrow:
    """A script for some of the keys of another."""

    script: Script
    keys: tuple[int, ...]
    """Which of them, counted from 0."""


def _read(path: str) -> str:
    """Return the text of a file with its includes, and theirs, in place."""
    text = files(__name__).joinpath(path).read_text("utf-8")
    return _INCLUDE.sub(lambda match: _read(f"include/{match[1]}.lua"), text)


@cache
def load(name: str) -> Script:
    """Return the script of the file ``name``.lua, such as ``lock/acquire``, with its includes in place."""
    text = _read(f"{name}.lua")
    source = _BLANK.sub("\n", _COMMENT.sub("", text)).strip().encode()
    found = _NARROW.search(text)
    narrow = Narrow(load(found[1]), tuple(int(number) - 1 for number in found[2].split())) if found else None
    return Script(name, source, sha1(source, usedforsecurity=False).hexdigest().encode(), narrow)
