"""Clients of valkey-py are accepted wherever those of redis-py are, with their settings and with our errors."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import valkey
from redis.asyncio import Redis
from valkey.asyncio import BlockingConnectionPool, Connection, ConnectionPool, Valkey, ValkeyCluster
from valkey.asyncio.retry import Retry
from valkey.asyncio.sentinel import Sentinel
from valkey.backoff import ConstantBackoff
from valkey.credentials import UsernamePasswordCredentialProvider

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncReentrantLock,
    AsyncRobustLock,
    AsyncSemaphore,
    Conflict,
    Coordinator,
    FenceGate,
    transaction,
    wait_until,
)
from redis_sync_aio.compat import Lock
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed, PermissionDenied
from redis_sync_aio.inspection import inspect
from redis_sync_aio.testing.servers import SentinelTopology
from redis_sync_aio.types import Transaction

from ..support.body import FAST, waits
from ..support.tls import encrypted, make_tls
from ..support.topologies import SHARDS, Nodes


def port_of(server: EmbeddedServer) -> int:
    assert server.port is not None
    return server.port


@pytest_asyncio.fixture
async def client(server: EmbeddedServer, redis: Redis) -> AsyncIterator[Valkey]:
    made = Valkey(host=server.host, port=port_of(server))
    yield made
    await made.aclose()


async def increment(tx: Transaction) -> int:
    number = int(await tx.get("{n}") or 0) + 1
    tx.multi()
    tx.set("{n}", number)
    return number


async def every_use(client: Any) -> None:
    """Use each primitive with a client, and with a coordinator of it."""
    async with Coordinator(client) as sync:
        for source in (client, sync):
            lock = AsyncLock(source, "{n}lock")
            async with lock as lease, lease.transaction() as tx:
                tx.multi()
                tx.set("{n}", 0)
            assert (await transaction(source, increment, "{n}", escalate_after=1)).value == 1
            assert (await transaction(source, increment, "{n}", exactly_once=True)).value == 2
            async with AsyncSemaphore(source, "{n}s", limit=2), AsyncReadWriteLock(source, "{n}rw").read():
                assert {it.name for it in await inspect(source, "{n}*")} == {"{n}s", "{n}rw"}
            async with AsyncReentrantLock(source, "re") as outer, AsyncMultiLock(source, ["{n}1", "{n}2"]):
                await FenceGate(source, "gate").accept(outer.fence)
            async with AsyncRobustLock(source, "robust") as robust:
                await robust.record({"done": 1})
        held = await AsyncLock(client, "handed").acquire()
        waiting = asyncio.create_task(sync.lock("handed").acquire())
        await wait_until(waits(sync.lock("handed")), FAST, timeout=30)
        await held.release()
        async with asyncio.timeout(30):
            await (await waiting).release()
    async with Lock(client, "as redis-py's", timeout=30):
        pass


async def test_everything_works_with_a_client_of_valkey_py(client: Valkey) -> None:
    await every_use(client)


async def test_a_client_is_not_taken_for_one_that_is_gone(server: EmbeddedServer) -> None:
    """Its address in memory may be the same."""
    for db in range(6):
        client: Any = Valkey(host=server.host, port=port_of(server), db=db)
        async with Coordinator(client) as sync, sync.lock("own"):
            assert await client.exists("own") == 1
        await client.aclose()
        del client, sync
        gc.collect()


async def test_everything_works_in_a_cluster(nodes: Nodes) -> None:
    """At each shard; and closing the client leaves no connection behind."""
    for node in nodes.primaries:
        await nodes.call(node, "FLUSHALL")
    first = nodes.primaries[0]

    async def connected() -> int:
        found = [await nodes.call(node, "CLIENT", "LIST") for node in nodes.primaries]
        return sum("name=clustered" in str(one) for one in found)

    async def gone() -> bool:
        return await connected() == 0

    async with ValkeyCluster(host=first.host, port=port_of(first), client_name="clustered") as client:
        await every_use(client)
        async with Coordinator(client) as sync:
            for shard in range(SHARDS):
                async with sync.lock(nodes.name_at(shard)):
                    pass
            assert await connected() == SHARDS
    await wait_until(gone, FAST, timeout=30)


async def test_the_primary_that_sentinels_name_is_used(group: SentinelTopology) -> None:
    manager: Any = Sentinel([(group.primary.host, port) for port in group.ports])  # type: ignore[no-untyped-call]
    client = manager.master_for("main")
    await every_use(client)
    await client.aclose()
    for one in manager.sentinels:
        await one.aclose()


async def test_a_conflict_is_an_error_of_ours(client: Valkey) -> None:
    """WATCH and EXEC go over connections of redis-py, so nobody has to know the errors of valkey-py."""

    async def body(tx: Transaction) -> None:
        await tx.get("n")
        await client.incr("n")
        tx.multi()
        tx.set("n", 0)

    with pytest.raises(Conflict):
        await transaction(client, body, "n", attempts=2)


async def test_settings_are_carried_over(redis: Redis, server: EmbeddedServer) -> None:
    """Unix socket, db, user, name, protocol, decoding and time limits; and those of a pool of the caller's."""
    admin: Any = redis
    await admin.execute_command("ACL", "SETUSER", "few", "reset", "on", ">secret", "~*", "&*", "+@all")
    provider = UsernamePasswordCredentialProvider("few", "secret")
    path = server.unix_socket
    common: dict[str, Any] = {"credential_provider": provider, "db": 3, "client_name": "mine", "decode_responses": True}
    pool = BlockingConnectionPool(host=server.host, port=port_of(server), max_connections=7, timeout=9, **common)
    for client in (
        Valkey(unix_socket_path=path, socket_timeout=7, protocol=3, **common),
        Valkey(host=server.host, port=port_of(server), retry=Retry(ConstantBackoff(0), 2), **common),
        Valkey(connection_pool=pool),
    ):
        async with Coordinator(client) as sync, sync.lock("x"):
            (listener,) = [one for one in await admin.client_list() if one["user"] == "few" and one["sub"] != "0"]
            assert (listener["name"], listener["db"]) == ("mine", "3")
            assert sync.client.get_encoder().decode_responses
            assert (await transaction(sync, increment, "{n}")).attempts == 1
        await client.aclose()
    await pool.disconnect()
    await admin.execute_command("ACL", "DELUSER", "few")


@pytest.mark.real
async def test_tls_is_carried_over(redis: Redis, server: EmbeddedServer, tmp_path: Path) -> None:
    """With the authority that the client believes: without it no connection could be opened."""
    tls = make_tls(tmp_path)
    with encrypted(server.unix_socket, tls) as port:
        client = Valkey(host="127.0.0.1", port=port, **tls.options)
        async with AsyncLock(client, "x"):
            assert (await transaction(client, increment, "{n}")).value == 1
        await client.aclose()


async def test_a_wrong_password_is_refused_as_with_redis_py(server: EmbeddedServer) -> None:
    client = Valkey(host=server.host, port=port_of(server), username="nobody", password="wrong")
    with pytest.raises(PermissionDenied):
        await AsyncLock(client, "x").acquire(timeout=5)
    await client.aclose()


async def test_closing_the_client_closes_what_was_opened_for_it(redis: Redis, server: EmbeddedServer) -> None:
    """As with a client of redis-py: waiters are told, and no connection is left."""
    client = Valkey(host=server.host, port=port_of(server), client_name="closes")
    admin: Any = redis
    sync = Coordinator(client)
    await sync.lock("x").acquire()
    await transaction(client, increment, "{n}")
    waiting = asyncio.create_task(sync.lock("x").acquire())
    await wait_until(waits(AsyncLock(redis, "x")), FAST, timeout=30)
    await client.aclose()
    with pytest.raises(CoordinatorClosed):
        await waiting
    assert sync.why_closed

    async def gone() -> bool:
        return not [one for one in await admin.client_list() if one["name"] == "closes"]

    await wait_until(gone, FAST, timeout=30)
    await sync.aclose()


async def test_what_redis_py_cannot_do_is_refused_at_the_call(server: EmbeddedServer) -> None:
    class Own(Connection):
        """A connection of the caller's own."""

    with pytest.raises(TypeError, match="cannot be opened by redis-py"):
        Coordinator(Valkey(connection_pool=ConnectionPool(connection_class=Own)))
    with pytest.raises(TypeError, match="valkey_connect_func"):
        Coordinator(Valkey(valkey_connect_func=lambda _: None))
    with pytest.raises(TypeError, match="not a pipeline"):
        Coordinator(Valkey().pipeline())
    with pytest.raises(TypeError, match="synchronous"):
        Coordinator(valkey.Valkey())  # type: ignore[arg-type]
