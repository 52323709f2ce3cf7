"""Words of commands and replies, as they go over a connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import hiredis

Reply: TypeAlias = Any
"""A reply as hiredis returns it: int, bytes, None, list, dict …; the engine decodes it."""

Replies: TypeAlias = list[Reply]
"""Replies to several commands, error replies of the server among them as `ReplyError`."""

Argument: TypeAlias = bytes | int
Words: TypeAlias = tuple[Argument, ...]


class ReplyError(Exception):
    """An error reply of the server, verbatim."""


PackCommand: TypeAlias = Callable[[Words], bytes]

pack: PackCommand = cast("PackCommand", hiredis.pack_command)
"""Return a command as bytes."""


def unpack(commands: bytes) -> list[Words]:
    """Return the commands that `pack` made ``commands`` of."""
    reader = hiredis.Reader()
    reader.feed(commands)
    return [tuple(words) for words in iter(reader.gets, False)]
