"""The answer to EXEC, as the client would return it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import redis.exceptions

from .._client.checkout import NEVER_DECODE, CheckedOut, Encodables, Packed
from .._client.resp import Reply
from ..errors import PartiallyApplied
from .command_flags import first_word

Command: TypeAlias = tuple[Packed, Encodables, dict[str, Any]]
"""A queued command: as it is sent, and as redis-py gave it, with its options."""

Replies: TypeAlias = tuple[Any, ...]
"""The replies to the commands of a transaction, in their order."""


@dataclass(frozen=True)
class ExecUnanswered:
    """The outcome of an EXEC that was sent and got no answer: it may have been executed."""

    cause: Exception


UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, redis.exceptions.RedisError)
"""Errors that the client's decoder, or a callback of it, raises for a reply. The command was executed."""


async def read_replies(connection: CheckedOut, commands: Sequence[Command], raw: Sequence[Reply]) -> Replies:
    """Return the replies to ``commands``. Raises PartiallyApplied if one failed, or cannot be read."""
    replies: list[Any] = []
    for (_, words, options), reply in zip(commands, raw, strict=True):
        if isinstance(reply, Exception):
            replies.append(reply)
            continue
        try:
            replies.append(await connection.as_from_client(words, options, _as_read(connection, reply, options)))
        except UNREADABLE as error:
            replies.append(error)
    bad = [number for number, reply in enumerate(replies) if isinstance(reply, Exception)]
    if not bad:
        return tuple(replies)
    failed = [number for number in bad if isinstance(raw[number], Exception)]
    first = (failed or bad)[0]
    command = first_word(commands[first][1][0])
    partially = PartiallyApplied(replies=tuple(replies), command=command, index=first, failed=len(failed))
    raise partially from replies[first]


def _as_read(connection: CheckedOut, reply: Reply, options: dict[str, Any]) -> Reply:
    """Return what was read raw, decoded if the client decodes this command's reply."""
    return reply if NEVER_DECODE in options else connection.decoded(reply)


def without_multi(error: redis.exceptions.ResponseError, replies: Sequence[Reply]) -> PartiallyApplied:
    """Return the error for a MULTI that was refused: what followed was executed, each command on its own."""
    return PartiallyApplied(replies=tuple(replies), multi=str(error))
