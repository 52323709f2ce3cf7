"""A coordinator with a prefix: a user with rights on the keys `app1:*` and the channels `&app1:*` can do everything.

The user's rights are the server's, so each key and each channel that does not begin with the prefix would be an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest
import pytest_asyncio
from redis.asyncio import Redis

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
    transaction,
    wait_until,
)
from redis_sync_aio.compat import Lock
from redis_sync_aio.errors import PermissionDenied, StaleFence
from redis_sync_aio.inspection import inspect
from redis_sync_aio.types import Transaction

from ..conftest import MakeClient
from ..support.body import FAST, waits
from ..support.clusters import Nodes
from ..support.tenants import CREDENTIALS, PREFIX, TENANT

pytestmark = pytest.mark.real
"""In virtual time each connection is asked PING, to which such a user has no right."""

Pair = tuple[Coordinator, Coordinator]


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


async def locks(one: Coordinator, other: Coordinator, engine: Any) -> None:
    await hand_over(one.lock("x", engine=engine), other.lock("x", engine=engine))


async def shared_locks(one: Coordinator, other: Coordinator, engine: Any) -> None:
    """The process that shares keeps the lock, until it is notified that another client waits."""
    mine = AsyncLock(one, "x", engine=engine, ttl=600, share=True, linger=600)
    async with mine:
        pass
    async with asyncio.timeout(60), AsyncLock(other, "x", engine=engine):
        pass


async def semaphores(one: Coordinator, other: Coordinator, engine: Any) -> None:
    mine = AsyncSemaphore(one, "x", limit=1, engine=engine)
    await hand_over(mine, AsyncSemaphore(other, "x", limit=1, engine=engine))
    await mine.resize(2)
    async with AsyncSemaphore(one, "y", limit=1, engine=engine, ttl=600, share=True, linger=600):
        pass
    async with asyncio.timeout(60), AsyncSemaphore(other, "y", limit=1, engine=engine):
        pass


def by_scripts(engine: Any) -> Any:
    """Return the engine for what needs scripts."""
    return "lua" if engine == "watch" else engine


async def read_write_locks(one: Coordinator, other: Coordinator, engine: Any) -> None:
    mine = AsyncReadWriteLock(one, "x", engine=by_scripts(engine))
    async with mine.write() as writer:
        await mine.downgrade(writer)
    held = await mine.write().acquire()
    waiting = asyncio.create_task(AsyncReadWriteLock(other, "x", engine=by_scripts(engine)).read().acquire())
    await wait_until(waits(mine), FAST, timeout=30)
    await held.release()
    async with asyncio.timeout(30):
        await (await waiting).release()


async def composed_locks(one: Coordinator, other: Coordinator, engine: Any) -> None:
    reentrant = AsyncReentrantLock(one, "x", engine=engine)
    async with reentrant, reentrant:
        pass
    async with AsyncMultiLock(one, ["{m}1", "{m}2"], engine=engine) as both:  # in one script
        assert set(both.fences) == {"{m}1", "{m}2"}
    async with AsyncMultiLock(one, ["a", "b"], engine=engine):
        pass


async def fences_and_records(one: Coordinator, other: Coordinator, engine: Any) -> None:
    """They need scripts, whatever the engine."""
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
    assert int(await cast(Any, one.client).get(f"{PREFIX}n")) == 3


async def views(one: Coordinator, other: Coordinator, engine: Any) -> None:
    """What is looked at has the names that its users gave it, and connected holders."""
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


USES = (
    locks,
    shared_locks,
    semaphores,
    read_write_locks,
    composed_locks,
    fences_and_records,
    transactions,
    views,
)
Use = Callable[[Coordinator, Coordinator, Any], Awaitable[None]]


@pytest.mark.parametrize("engine", ["lua", "watch"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
async def test_a_tenant_needs_rights_on_its_own_keys_and_channels_only(
    redis: Redis, pair: Pair, use: Use, engine: str
) -> None:
    await use(*pair, engine)
    keys = await cast(Any, redis).keys()
    assert keys
    assert all(key.startswith(b"app1:") for key in keys)


async def test_a_tenant_of_a_cluster(nodes: Nodes) -> None:
    """There each name has its slot as without a prefix, and each shard an inbox of its own."""
    for node in nodes.primaries:
        await nodes.say(node, "FLUSHALL")
        await nodes.say(node, "ACL", "SETUSER", "tenant", *TENANT)
    async with (
        nodes.client(**CREDENTIALS) as client,
        Coordinator(client, prefix=PREFIX) as one,
        nodes.client(**CREDENTIALS) as second,
        Coordinator(second, prefix=PREFIX) as other,
    ):
        for use in (locks, shared_locks, semaphores, read_write_locks, fences_and_records, views):
            await use(one, other, "lua")
    for node in nodes.primaries:
        await nodes.say(node, "ACL", "DELUSER", "tenant")


async def test_without_the_prefix_such_a_user_is_refused(pair: Pair) -> None:
    """So these rights are what the tests above are about."""
    async with Coordinator(pair[0].client, push="never") as plain:
        with pytest.raises(PermissionDenied):
            await plain.lock("x").acquire(timeout=0)


async def test_names_of_two_prefixes_are_two_locks_and_one_means_a_name_without(redis: Redis) -> None:
    """`x` behind `app1:` is the lock `app1:{x}`, also for clients that know no prefix, such as redis-py's lock."""
    one, two = Coordinator(redis, prefix="app1:"), Coordinator(redis, prefix="app2:")
    async with one, two, one.lock("x"), two.lock("x"), AsyncLock(redis, "x"):
        assert await AsyncLock(redis, "app1:{x}").try_acquire() is None
        assert not await Lock(redis, "app1:{x}").acquire(blocking=False)
        async with AsyncReentrantLock(one, "y"), AsyncReentrantLock(two, "y"):  # not the one that is held
            keys = {key for key in await cast(Any, redis).keys() if not key.endswith(b":fence")}
        assert keys == {b"x", b"app1:{x}", b"app2:{x}", b"app1:{y}", b"app2:{y}"}
