"""Helpers for tests of transactions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from redis_sync_aio import transaction
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import Transaction

from .proxy import FaultProxy


async def nothing(tx: Transaction) -> None:
    """The body of a transaction that writes nothing."""
    await tx.exists("nothing")
    tx.multi()


async def prove(client: Redis) -> None:
    """Let a connection of the client's pool find out that it may use MULTI and EXEC, which it does only once."""
    await transaction(client, nothing, "nothing")


async def increment(tx: Transaction) -> int:
    count = int(await tx.get("n") or 0) + 1
    tx.multi()
    tx.set("n", count)
    return count


def interrupted(redis: Redis, times: int) -> Any:
    """A body that somebody else gets ahead of, so many times."""
    left = times

    async def body(tx: Transaction) -> int:
        nonlocal left
        count = int(await tx.get("n") or 0)
        if left:
            left -= 1
            await redis.incr("n")
        tx.multi()
        tx.set("n", count + 100)
        return count

    return body


class Insufficient(Exception):
    """The body's own."""


async def watchers(redis: Redis) -> int:
    """How many connections of the server watch a key."""
    return sum(int(one.get("watch", 0)) for one in await redis.client_list())


def in_use(redis: Redis) -> int:
    pool: Any = redis.connection_pool
    return len(pool._in_use_connections)


@asynccontextmanager
async def proxied(server: EmbeddedServer, **options: Any) -> AsyncIterator[tuple[FaultProxy, Redis]]:
    """A proxy, and a client behind it that tries once."""
    async with FaultProxy(upstream=server.unix_socket) as proxy:
        client = Redis.from_url(proxy.url, retry=Retry(NoBackoff(), 0), **options)
        await prove(client)
        yield proxy, client
        await client.aclose()
