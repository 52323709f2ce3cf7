"""What is said first on a new connection."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from .._keys import INBOX_PREFIX
from .._types import text
from . import troubles
from .call import ReplyError
from .wire import Wire


async def introduce(wire: Wire, inbox: bytes, heard: asyncio.Future[None]) -> tuple[int, int | None]:
    """Switch to RESP3, subscribe the inbox and prove that it hears: then ``heard`` is done.

    Return how many connections hear it, and the id of this one, None where it may not be asked for.
    """
    hello = wire.ask((b"HELLO", 3))
    client_id = wire.ask((b"CLIENT", b"ID"))
    subscribed = wire.ask((b"SUBSCRIBE", inbox))
    published = wire.ask((b"PUBLISH", inbox, b""))
    rights = f"SUBSCRIBE and PUBLISH on {text(INBOX_PREFIX)}*"
    for answer, what in ((hello, "RESP3 (HELLO 3)"), (subscribed, rights), (published, rights)):
        try:
            await answer
        except ReplyError as error:
            raise troubles.not_possible(str(error), what) from error
    await heard
    with suppress(ReplyError):
        return await published, int(await client_id)
    return await published, None


async def retire(wire: Wire, inbox: bytes, client_id: int | None) -> bool:
    """Kill the previous connection, ``client_id``, if it lives on this very server; return whether none is left.

    Only then can no command of ours be executed any more that was sent before.
    """
    with suppress(ReplyError):
        _, listeners = await wire.ask((b"PUBSUB", b"NUMSUB", inbox))  # without those of patterns
        # If none of ours were left, the server may be another one, after a restart, and that id somebody else's.
        if listeners > 1 and client_id is not None:
            await wire.ask((b"CLIENT", b"KILL", b"ID", client_id))
            _, listeners = await wire.ask((b"PUBSUB", b"NUMSUB", inbox))
        return bool(listeners == 1)
    return False
