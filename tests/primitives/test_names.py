"""Names: those whose braces break a hash tag, and those behind the prefix of a coordinator."""

from __future__ import annotations

import asyncio
import inspect as introspection
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis, RedisCluster

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncReentrantLock,
    AsyncRobustLock,
    AsyncSemaphore,
    Coordinator,
    FenceGate,
    Lease,
    Unreachable,
    transaction,
    wait_until,
)
from redis_sync_aio.compat import Lock
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed, PermissionDenied, StaleFence
from redis_sync_aio.inspection import inspect
from redis_sync_aio.testing.faults import FaultProxy
from redis_sync_aio.types import Push, Transaction

from ..conftest import MakeClient
from ..support.body import FAST, waits
from ..support.rights import CREDENTIALS, PREFIX, TENANT
from ..support.topologies import SHARDS, Nodes

# -- braces ------------------------------------------------------------------------------------------------

TORN = ("a}b", "a}", "}", "{}", "a}{b", "{}a")


@pytest.mark.parametrize("name", TORN)
async def test_one_server_takes_any_name(redis: Redis, sync: Coordinator, other: Coordinator, name: str) -> None:
    """All primitives and both engines; what they leave behind is found under that name."""
    for engine in ("lua", "watch"):
        held = await sync.lock(name, engine=engine).acquire()
        waiting = asyncio.create_task(other.lock(name, engine=engine).acquire())
        await wait_until(waits(sync.lock(name)), FAST, timeout=30)
        assert [(it.name, it.waiting) for it in await inspect(other)] == [(name, 1)]
        assert [(it.name, it.waiting) for it in await inspect(other, name)] == [(name, 1)]
        await held.release()
        async with asyncio.timeout(30):
            await (await waiting).release()
    async with AsyncSemaphore(sync, name, limit=1), AsyncReadWriteLock(sync, name).write(), AsyncRobustLock(sync, name):
        assert {it.kind for it in await inspect(sync)} == {"robust", "semaphore", "read_write"}
    async with AsyncMultiLock(sync, [name, "a", "{a}"]) as several:
        await FenceGate(sync, name).accept(several.fences[name])

    async def write(tx: Transaction) -> None:
        await tx.get(f"data {name}")
        tx.multi()
        tx.set(f"data {name}", "1")

    await transaction(sync, write, f"data {name}", exactly_once=True)
    await transaction(sync, write, f"data {name}", escalate_after=1)
    assert await redis.get(f"data {name}") == b"1"


@pytest.mark.parametrize("name", TORN)
async def test_a_cluster_refuses_them_before_anything_is_sent(name: str) -> None:
    """It needs one slot for the keys of a name."""
    client = RedisCluster(host="127.0.0.1", port=1)
    refused: list[Callable[[], object]] = [
        lambda: AsyncLock(client, name),
        lambda: AsyncSemaphore(client, name, limit=1),
        lambda: FenceGate(Coordinator(client), name),
        lambda: Lock(client, name),
    ]
    for make in refused:
        with pytest.raises(ValueError, match="braces"):
            make()
    with pytest.raises(ValueError, match="braces"):
        await inspect(client, name)
    await client.aclose()


# -- a prefix: who has rights on keys `app1:*` and channels `&app1:*` can do everything ---------------------
# The rights are the server's, so each key and each channel that does not begin with the prefix would be an error.

Pair = tuple[Coordinator, Coordinator]
Use = Callable[[Coordinator, Coordinator, Any], Awaitable[None]]


@pytest_asyncio.fixture
async def pair(redis: Redis, make_client: MakeClient) -> AsyncIterator[Pair]:
    """Two coordinators of a user that may use nothing but keys and channels with the prefix."""
    admin: Any = redis
    await admin.execute_command("ACL", "SETUSER", "tenant", *TENANT)
    clients = make_client(**CREDENTIALS), make_client(**CREDENTIALS)
    async with Coordinator(clients[0], prefix=PREFIX) as one, Coordinator(clients[1], prefix=PREFIX) as other:
        yield one, other
    for client in clients:
        await client.aclose()
    await admin.execute_command("ACL", "DELUSER", "tenant")


async def hand_over(one: Any, other: Any) -> None:
    """Let ``other`` wait for what ``one`` holds, and give it to it."""
    lease: Lease = await one.acquire()
    waiting = asyncio.create_task(other.acquire())
    await wait_until(waits(one), FAST, timeout=30)
    await lease.release()
    async with asyncio.timeout(30):
        await (await waiting).release()


async def taken_from_rest(mine: Any, theirs: Any) -> None:
    """The process that shares keeps it, until it is notified that another client waits."""
    async with mine:
        pass
    async with asyncio.timeout(60), theirs:
        pass


async def locks(one: Coordinator, other: Coordinator, engine: Any) -> None:
    await hand_over(one.lock("x", engine=engine), other.lock("x", engine=engine))
    await taken_from_rest(
        AsyncLock(one, "y", engine=engine, ttl=600, share=True, linger=600), AsyncLock(other, "y", engine=engine)
    )


async def semaphores(one: Coordinator, other: Coordinator, engine: Any) -> None:
    mine = AsyncSemaphore(one, "x", limit=1, engine=engine)
    await hand_over(mine, AsyncSemaphore(other, "x", limit=1, engine=engine))
    await mine.resize(2)
    await taken_from_rest(
        AsyncSemaphore(one, "y", limit=1, engine=engine, ttl=600, share=True, linger=600),
        AsyncSemaphore(other, "y", limit=1, engine=engine),
    )


async def read_write_locks(one: Coordinator, other: Coordinator, _: Any) -> None:
    mine, theirs = AsyncReadWriteLock(one, "x"), AsyncReadWriteLock(other, "x")
    async with mine.write() as writer:
        await mine.downgrade(writer)
    held = await mine.write().acquire()
    waiting = asyncio.create_task(theirs.read().acquire())
    await wait_until(waits(mine), FAST, timeout=30)
    await held.release()
    async with asyncio.timeout(30):
        await (await waiting).release()


async def composed_locks(one: Coordinator, other: Coordinator, engine: Any) -> None:
    reentrant = AsyncReentrantLock(one, "x", engine=engine)
    async with reentrant, reentrant:
        pass
    for names in (["{m}1", "{m}2"], ["a", "b"]):  # in one script, and one after the other
        async with AsyncMultiLock(one, names, engine=engine) as both:
            assert set(both.fences) == set(names)


async def fences_and_records(one: Coordinator, other: Coordinator, _: Any) -> None:
    async with AsyncRobustLock(one, "x") as lease:
        await lease.record({"done": 1})
        gate = FenceGate(one, "x")
        await gate.accept(lease.fence)
        with pytest.raises(StaleFence):
            await FenceGate(other, "x").accept(lease.fence - 1)


async def transactions(one: Coordinator, other: Coordinator, engine: Any) -> None:
    """Markers, turns and guards stand next to the caller's key, and behind the prefix."""

    async def add(tx: Transaction) -> None:
        await tx.get(f"{PREFIX}n")
        tx.multi()
        tx.incr(f"{PREFIX}n")

    await transaction(one, add, f"{PREFIX}n", exactly_once=True)
    await transaction(one, add, f"{PREFIX}n", escalate_after=1)
    async with one.lock("n", engine=engine) as lease, lease.transaction() as tx:
        tx.multi()
        tx.incr(f"{PREFIX}n")
    client: Any = one.client
    assert int(await client.get(f"{PREFIX}n")) == 3


async def views(one: Coordinator, other: Coordinator, engine: Any) -> None:
    """They show the names that users gave, and connected holders."""
    async with one.lock("seen", engine=engine, share=True) as lease, one.semaphore("seen", limit=2, engine=engine):
        waiting = asyncio.create_task(other.lock("seen", engine=engine).acquire())
        await wait_until(waits(one.lock("seen")), FAST, timeout=30)
        as_operator = await inspect(other.client, "seen", prefix=PREFIX)
        for found in (await inspect(other, "s*"), await inspect(other, "seen"), as_operator):
            assert [(it.name, it.kind) for it in found] == [("seen", "lock"), ("seen", "semaphore")]
            assert [it.holders[0].connected for it in found] == [True, True]
            assert found[0].holders[0].token == lease.token
            assert found[0].waiters[0].alive
            assert not any(it.problems for it in found)
        assert [it.name for it in one.statistics()] == ["seen", "seen"]
        assert one.lock("seen").name == lease.name == "seen"
    async with asyncio.timeout(30):
        await (await waiting).release()


USES: tuple[Use, ...] = (
    locks,
    semaphores,
    read_write_locks,
    composed_locks,
    fences_and_records,
    transactions,
    views,
)


@pytest.mark.real  # in virtual time each connection is asked PING, to which such a user has no right
@pytest.mark.parametrize("engine", ["lua", "watch"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
async def test_a_tenant_needs_rights_on_its_own_keys_and_channels_only(
    redis: Redis, pair: Pair, use: Use, engine: str
) -> None:
    """Without the prefix such a user is refused."""
    async with Coordinator(pair[0].client, push="never") as plain:
        with pytest.raises(PermissionDenied):
            await plain.lock("x").acquire(timeout=0)
    await use(*pair, engine)
    client: Any = redis
    keys = await client.keys()
    assert keys
    assert all(key.startswith(b"app1:") for key in keys)


@pytest.mark.real
async def test_a_tenant_of_a_cluster(nodes: Nodes) -> None:
    """There each name has its slot as without a prefix, and each shard an inbox of its own."""
    for node in nodes.primaries:
        await nodes.call(node, "FLUSHALL")
        await nodes.call(node, "ACL", "SETUSER", "tenant", *TENANT)
    async with (
        nodes.client(**CREDENTIALS) as client,
        Coordinator(client, prefix=PREFIX) as one,
        nodes.client(**CREDENTIALS) as second,
        Coordinator(second, prefix=PREFIX) as other,
    ):
        for use in (locks, semaphores, read_write_locks, fences_and_records, views):
            await use(one, other, "lua")
    for node in nodes.primaries:
        await nodes.call(node, "ACL", "DELUSER", "tenant")


async def test_names_of_two_prefixes_are_two_locks_and_one_means_a_name_without(redis: Redis) -> None:
    """`x` behind `app1:` is the lock `app1:{x}`, also for clients that know no prefix, such as redis-py's lock."""
    one, two = Coordinator(redis, prefix="app1:"), Coordinator(redis, prefix="app2:")
    client: Any = redis
    async with one, two, one.lock("x"), two.lock("x"), AsyncLock(redis, "x"):
        assert await AsyncLock(redis, "app1:{x}").try_acquire() is None
        assert not await Lock(redis, "app1:{x}").acquire(blocking=False)
        async with AsyncReentrantLock(one, "y"), AsyncReentrantLock(two, "y"):  # not the one that is held
            keys = {key for key in await client.keys() if not key.endswith(b":fence")}
        assert keys == {b"x", b"app1:{x}", b"app2:{x}", b"app1:{y}", b"app2:{y}"}


# -- a coordinator looks at the server: `inspect` for names, `ping` for the way there -----------------------


async def test_a_coordinator_inspects_the_names_of_its_prefix(redis: Redis) -> None:
    """Names are shown as its locks have them; another prefix can be asked for."""
    mine, plain = Coordinator(redis, prefix="app:"), Coordinator(redis)
    async with mine, plain, mine.lock("orders:1"), mine.semaphore("slots", 2), plain.lock("orders:2"):
        assert [it.name for it in await mine.inspect()] == ["orders:1", "slots"]
        assert [it.name for it in await mine.inspect("orders:*")] == ["orders:1"]
        assert [it.name for it in await plain.inspect("orders:*")] == ["orders:2"]
        assert [it.name for it in await plain.inspect(prefix="app:", limit=1)] == ["orders:1"]


def test_inspect_has_the_same_arguments_in_both_places() -> None:
    of_module, of_coordinator = (introspection.signature(it).parameters for it in (inspect, Coordinator.inspect))
    assert list(of_module.values())[1:] == list(of_coordinator.values())[1:]


@pytest.mark.parametrize("push", ["auto", "never"])
async def test_a_ping_takes_the_way_of_the_locks(server: EmbeddedServer, redis: Redis, push: Push) -> None:
    """It returns seconds, changes nothing, and fails without an answer and after the end of the coordinator."""
    async with FaultProxy(server) as proxy, proxy.client() as client:
        async with Coordinator(client, push=push, retry_for=0.5) as sync:
            assert 0 < await sync.ping() < 60
            assert sync.connections == 1
            assert await redis.keys() == []
            proxy.refuse = True
            await proxy.cut()
            with pytest.raises(Unreachable):
                await sync.ping()
        with pytest.raises(CoordinatorClosed):
            await sync.ping()


async def test_a_ping_reaches_each_shard_of_a_cluster(nodes: Nodes) -> None:
    async with nodes.client() as client, Coordinator(client, prefix="app:") as sync:
        assert await sync.ping() > 0
        assert sync.connections == SHARDS
