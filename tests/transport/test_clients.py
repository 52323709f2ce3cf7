"""P10, P12: what is known of a client is known of that very object, and its pool is left as the caller made it.

The connection of a coordinator says in CLIENT LIST whose it is, and never fails for that.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
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
    __version__,
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


# -- CLIENT LIST ---------------------------------------------------------------------------------------------------

HERE = f"redis_sync_aio:{socket.gethostname()[:32]}:{os.getpid()}"
OURS = f"redis_sync_aio_v{__version__}"


async def listening(redis: Redis) -> list[dict[str, str]]:
    """Return the connections that listen to channels, as CLIENT LIST shows them."""
    client: Any = redis
    return [one for one in await client.client_list() if one["sub"] != "0"]


async def used(client: Redis) -> Coordinator:
    """Return a coordinator whose connection is in use."""
    sync = Coordinator(client)
    async with sync.lock("x"):
        return sync


async def test_it_has_a_name_and_the_library(redis: Redis, make_client: MakeClient) -> None:
    """Host and process as in the tokens, so a holder's connection can be found; redis-py with this package on it."""
    sync = await used(make_client())
    (ours,) = await listening(redis)
    assert ours["name"] == HERE
    assert "lib-name" not in ours or OURS in ours["lib-name"]  # Redis before 7.2 knows no libraries
    await sync.aclose()


async def test_the_callers_own_name_and_library_stay(redis: Redis, make_client: MakeClient) -> None:
    """What the client says counts: its name, its driver next to this package, or no library at all."""
    driver_info = pytest.importorskip("redis.driver_info", reason="redis-py before 7.2 has only lib_name")
    info = driver_info.DriverInfo().add_upstream_driver("my-service", "7.1")
    sync = await used(make_client(client_name="mine", driver_info=info))
    (ours,) = await listening(redis)
    assert ours["name"] == "mine"
    assert "lib-name" not in ours or "my-service_v7.1" in ours["lib-name"]
    assert info.upstream_drivers == ["my-service_v7.1"]  # the caller's object is left alone
    await sync.aclose()


@pytest.mark.skipif(importlib.util.find_spec("redis.driver_info") is not None, reason="for redis-py before 7.2")
async def test_the_callers_own_library_stays_with_older_versions(redis: Redis, make_client: MakeClient) -> None:
    """The name that the client gives its library counts."""
    sync = await used(make_client(client_name="mine", lib_name="my-service"))
    (ours,) = await listening(redis)
    assert ours["name"] == "mine"
    assert ours.get("lib-name", "my-service") == "my-service"
    await sync.aclose()


async def test_a_client_that_wants_no_introduction_gets_none(redis: Redis, make_client: MakeClient) -> None:
    """Neither a name nor a library."""
    nothing = {"driver_info": None} if importlib.util.find_spec("redis.driver_info") else {"lib_name": None}
    sync = await used(make_client(**nothing))
    (ours,) = await listening(redis)
    assert (ours["name"], ours.get("lib-name", "")) == ("", "")
    await sync.aclose()


@pytest.mark.parametrize("refused", ["-client", "-client|setname -client|setinfo"])
async def test_rights_that_refuse_it_are_no_failure(redis: Redis, make_client: MakeClient, refused: str) -> None:
    """The coordinator works as before, and its connection has no name."""
    admin: Any = redis
    rights = ["on", ">secret", "~*", "&*", "+@all", *refused.split()]
    if "|" in refused and not (await admin.info("server"))["redis_version"] > "7":
        pytest.skip("Redis 6.2 cannot refuse a subcommand")
    await admin.execute_command("ACL", "SETUSER", "nameless", "reset", *rights)
    sync = await used(make_client(username="nameless", password="secret"))
    (ours,) = await listening(redis)
    assert ours["name"] == ""
    await sync.aclose()
    await admin.execute_command("ACL", "DELUSER", "nameless")


@pytest.mark.real
async def test_it_takes_no_round_trip(redis: Redis, make_client: MakeClient) -> None:
    """The name is set between commands that are sent together: nothing of this process comes in between."""
    admin: Any = redis
    if (await admin.info("server"))["redis_version"] < "7":
        pytest.skip("MONITOR of Redis 6.2 does not show CLIENT")
    sent = []
    async with make_client().monitor() as monitor:
        sync = await used(make_client())
        await redis.echo("the end")
        while (command := await monitor.next_command())["command"] != "ECHO the end":
            sent.append(command["command"].partition(" ")[0:3:2])
    words = [" ".join(one).upper() for one in sent]
    names = [index for index, one in enumerate(words) if one.startswith("CLIENT SETNAME")]
    assert len(names) == 1
    assert words[names[0] - 1].startswith("INFO")  # sent in the same write
    await sync.aclose()
