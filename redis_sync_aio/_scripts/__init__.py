"""Load the Lua scripts: each decision on the server is one file in the folder of its subject.

A line ``-- include: part`` is replaced by ``include/part.lua``, and the names of `constants` by their values. The
header of each script documents its keys, arguments, replies and cost, and why running it twice is safe. Comments do
not travel to the server.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import NamedTuple

from .constants import put_in

_FILES = Path(__file__).parent
_INCLUDE = re.compile(r"-- include: (\w+)")


@dataclass(frozen=True, slots=True)
class Script:
    """A script as the server sees it."""

    name: str
    source: bytes
    sha: bytes


class Line(NamedTuple):
    """A line of a script, and where it comes from."""

    path: str
    number: int
    text: str


@cache
def lines(name: str) -> tuple[Line, ...]:
    """Return the lines of the file ``name``.lua, comments included, with its includes, and theirs, in place."""
    found: list[Line] = []
    path = f"{name}.lua"
    for number, text in enumerate(_FILES.joinpath(path).read_text("utf-8").splitlines(), 1):
        if not text.startswith("--"):
            found.append(Line(path, number, put_in(text)))
        elif include := _INCLUDE.fullmatch(text):
            found += lines(f"include/{include[1]}")
        else:
            found.append(Line(path, number, text))
    return tuple(found)


@cache
def load(name: str) -> Script:
    """Return the script of the file ``name``.lua, such as ``lock/acquire``, with its includes in place.

    The first call for a script takes about half a millisecond. So it is loaded when it is first sent, and no loop has
    to wait for the scripts of primitives that are not used.
    """
    code = [text.partition(" --")[0].rstrip() for _, _, text in lines(name) if not text.startswith("--")]
    source = "\n".join(filter(None, code)).encode()
    return Script(name, source, sha1(source, usedforsecurity=False).hexdigest().encode())
