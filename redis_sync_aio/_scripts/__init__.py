"""Load the Lua scripts: each decision on the server is one file in the folder of its subject.

A line ``-- include: part`` is replaced by ``include/part.lua``, and the names of `constants` by their values. The
header of each script documents its keys, arguments, replies and cost, and why running it twice is safe. Comments do
not travel to the server.

A line ``-- NARROW script n m`` names the script that does the same, as far as possible, with keys n and m only. It
renews or releases a lease while the hash slot of its name is being moved to another node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import NamedTuple

from .constants import put_in

_INCLUDE = re.compile(r"-- include: (\w+)")
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


class Line(NamedTuple):
    """A line of a script, and where it comes from."""

    path: str
    number: int
    text: str


def _read(path: str) -> Iterator[Line]:
    """Return the lines of a file with its includes, and theirs, in place."""
    for number, text in enumerate(files(__name__).joinpath(path).read_text("utf-8").splitlines(), 1):
        if found := _INCLUDE.fullmatch(text):
            yield from _read(f"include/{found[1]}.lua")
        else:
            yield Line(path, number, put_in(text))


def lines(name: str) -> Iterator[Line]:
    """Return the lines of a script, comments included."""
    return _read(f"{name}.lua")


@cache
def load(name: str) -> Script:
    """Return the script of the file ``name``.lua, such as ``lock/acquire``, with its includes in place."""
    text = "\n".join(line.text for line in lines(name))
    source = _BLANK.sub("\n", _COMMENT.sub("", text)).strip().encode()
    found = _NARROW.search(text)
    narrow = Narrow(load(found[1]), tuple(int(number) - 1 for number in found[2].split())) if found else None
    return Script(name, source, sha1(source, usedforsecurity=False).hexdigest().encode(), narrow)
