"""Helpers for tests of transactions: bodies, connections, a client behind a proxy and what it wrote."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from redis_sync_aio import transaction, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import FaultProxy
from redis_sync_aio.types import Transaction

from .body import FAST


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
    async with FaultProxy(server) as proxy:
        client = proxy.client(retry=Retry(NoBackoff(), 0), **options)
        await prove(client)
        yield proxy, client
        await client.aclose()


TIMEOUT = 0.25


@dataclass
class Wired:
    """A client behind a proxy, one that is not, and keys of its own."""

    proxy: FaultProxy
    client: Redis
    direct: Redis
    key: str

    @property
    def done(self) -> str:
        return f"{self.key}:done"

    async def body(self, tx: Transaction) -> int:
        count = int(await tx.get(self.key) or 0) + 1
        tx.multi()
        tx.set(self.key, count)
        tx.incr(self.done)
        return count

    async def counted(self) -> int:
        """How often the transaction was done; both keys agree."""
        count, done = await self.direct.mget(self.key, self.done)
        assert (count or b"0") == (done or b"0"), f"half of it was done: {count!r}, {done!r}"
        return int(done or 0)

    async def check_clean(self) -> None:
        async def clean() -> bool:
            # A connection whose opening was cancelled goes back to the pool when it is open.
            return in_use(self.client) == 0 and await watchers(self.direct) == 0

        await wait_until(clean, FAST, timeout=30)


@asynccontextmanager
async def wired(server: EmbeddedServer, **options: Any) -> AsyncIterator[Wired]:
    timeouts: dict[str, Any] = {"socket_timeout": TIMEOUT, "socket_connect_timeout": 5, "retry": Retry(NoBackoff(), 0)}
    async with (
        FaultProxy(server) as proxy,
        server.client() as direct,
        proxy.client(max_connections=2, **(timeouts | options)) as client,
    ):
        await prove(client)
        proxy.commands.clear()
        yield Wired(proxy, client, direct, f"count:{next(numbers)}")


numbers = itertools.count()
