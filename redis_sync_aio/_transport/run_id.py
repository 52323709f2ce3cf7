"""The id by which a server knows itself: new at each start, and different for each server."""

from __future__ import annotations

import asyncio
import re

from redis.asyncio import Redis

from .._client.error_replies import error_answer
from .._client.redis_py import send_once
from .._client.settings import RedisClient
from .._core.cancellation import cancel_repeatedly
from .failures import not_from_outside

_RUN_ID = re.compile(rb"run_id:([0-9a-f]+)")


async def run_id(client: RedisClient, within: float) -> bytes | None:
    """Return the id of the server; empty if it does not answer in time, None if it is out of reach."""
    assert isinstance(client, Redis), "a cluster has several"
    try:
        async with asyncio.timeout(within):
            with cancel_repeatedly(within):
                answer = await send_once(client, (b"INFO", b"server"))
    except TimeoutError:
        return b""
    except (Exception, asyncio.CancelledError) as error:
        failure = not_from_outside(error, closed=False)
        return None if error_answer(failure) is None else b""
    found = _RUN_ID.search(answer) if isinstance(answer, bytes) else None
    return b"" if found is None else found[1]
