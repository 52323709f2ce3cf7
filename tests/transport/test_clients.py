"""P10, P12: what is known of a client is known of that very object, and its pool is left as the caller made it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReentrantLock,
    AsyncSemaphore,
    Coordinator,
    LeaseLost,
    transaction,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import Transaction

from ..conftest import MakeClient


class SameHost(Redis):
    """Equal to every client of the same server, also to those of another database."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameHost) and _port(self) == _port(other)

    def __hash__(self) -> int:
        return hash(_port(self))


class NotHashable(SameHost):
    """As a class is that defines ``__eq__`` alone."""

    __hash__ = None  # type: ignore[assignment]


def _port(client: Redis) -> object:
    return client.connection_pool.connection_kwargs["port"]


@pytest.mark.parametrize("kind", [SameHost, NotHashable])
async def test_clients_that_say_they_are_equal_are_two(server: EmbeddedServer, redis: Redis, kind: type[Redis]) -> None:
    """P1: each has an implicit coordinator of its own, so a lock is taken in the database of its client."""
    async with kind(port=server.port or 0, db=0) as zero, kind(port=server.port or 0, db=1) as one:
        await one.flushdb()
        async with AsyncLock(zero, "a") as first, AsyncLock(one, "a") as second:
            assert await zero.get("a") == first.token.encode()
            assert await one.get("a") == second.token.encode()
            assert first.token != second.token


@pytest.mark.parametrize("kind", [SameHost, NotHashable])
async def test_owners_of_equal_clients_are_two(server: EmbeddedServer, redis: Redis, kind: type[Redis]) -> None:
    """P1: a reentrant lock held in one database is not entered by way of another, nor is a multi-lock given back."""
    async with kind(port=server.port or 0, db=0) as zero, kind(port=server.port or 0, db=1) as one:
        await one.flushdb()
        async with AsyncReentrantLock(zero, "r"), AsyncReentrantLock(one, "r"):
            assert await one.exists("r") == 1
        both = [AsyncMultiLock(client, ["x", "y"]) for client in (zero, one)]
        async with both[0], both[1]:
            assert await zero.exists("x", "y") == await one.exists("x", "y") == 2
            await both[0].release()
            assert await zero.exists("x", "y") == 0
            assert await one.exists("x", "y") == 2


@pytest.mark.parametrize("kind", [SameHost, NotHashable])
async def test_transactions_of_clients_that_define_equality(
    server: EmbeddedServer, redis: Redis, kind: type[Redis]
) -> None:
    """What the server says of a command is remembered per client, whether that is hashable or not."""

    async def count(tx: Transaction) -> None:
        found = await tx.execute_command("LOLWUT", "VERSION", "1")
        assert found
        await tx.execute_command("FUNCTION", "STATS")  # not one of those that are known to read
        tx.multi()
        tx.incr("n")

    async with kind(port=server.port or 0) as client:
        await transaction(client, count, "n")
        assert await client.get("n") == b"1"


def _pools(server: EmbeddedServer) -> list[ConnectionPool]:
    return [
        ConnectionPool.from_url(server.url, max_connections=1),
        BlockingConnectionPool.from_url(server.url, max_connections=1),
    ]


@pytest.mark.parametrize("number", [0, 1], ids=["pool", "blocking pool"])
async def test_the_callers_pool_is_left_as_it_is(server: EmbeddedServer, redis: Redis, number: int) -> None:
    """Its limit is never changed, and none of its places is taken: ours is a connection next to it."""
    pool: Any = _pools(server)[number]
    async with Redis(connection_pool=pool) as client:
        for _ in range(3):
            async with Coordinator(client) as sync, sync.lock("a"), AsyncSemaphore(client, "s", limit=1):
                assert (pool.max_connections, len(pool._in_use_connections)) == (1, 0)
                assert await client.ping()
        assert (pool.max_connections, len(pool._in_use_connections)) == (1, 0)
        lease = await AsyncLock(client, "b").acquire()
        await pool.aclose()
        with pytest.raises(LeaseLost):  # its connection is closed with the pool all the same
            await lease.release()


async def test_idle_connections_of_the_pool_may_be_closed(make_client: MakeClient, redis: Redis) -> None:
    """``disconnect(inuse_connections=False)``, as Sentinel's pool does after a failover: ours goes on."""
    client = make_client()
    async with Coordinator(client) as sync:
        lease = await sync.lock("a").acquire()
        await client.connection_pool.disconnect(inuse_connections=False)
        await asyncio.sleep(0)
        await lease.release()
        assert sync.connections == 1
        await client.connection_pool.disconnect()
        async with asyncio.timeout(5):
            while sync.why_closed is None:
                await asyncio.sleep(0)


async def test_a_pool_whose_disconnect_the_caller_replaced(make_client: MakeClient, redis: Redis) -> None:
    """What the caller put in its place is called, and ours is closed."""
    client, called = make_client(), []
    pool: Any = client.connection_pool
    disconnect = pool.disconnect

    async def replaced(*args: Any, **options: Any) -> None:
        called.append(1)
        await disconnect(*args, **options)

    pool.disconnect = replaced
    sync = Coordinator(client)
    await (await sync.lock("a").acquire()).release()
    await client.aclose()
    assert 1 <= len(called) <= 2, "the coordinator may close once more what was opened meanwhile"
    assert sync.why_closed is not None
    await sync.aclose()
