"""P2, P3: a server comes back with an older queue. Its tickets belong to living processes, and are not needed any more.

Each of them would be granted for a whole claim.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncRedlock,
    AsyncRobustLock,
    AsyncSemaphore,
    Coordinator,
    Unreachable,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import FaultProxy
from redis_sync_aio.testing.servers import SentinelTopology

from ..support.body import FAST, waits
from ..support.inside import hub_of, lock_keys, permit_keys
from ..support.primitives import Exclusive
from ..support.topologies import Nodes, processes
from ..support.views import holder_of

NAME = "older"
OLD = 6
CLAIM = 20.0
"""Seconds that each old ticket would cost, of those who are asked here."""
IN_TIME = 15.0
"""Seconds in which a free name has to be granted, whatever else the machine does: less than one claim."""
Make = Callable[..., Exclusive]
KINDS: dict[str, Make] = {
    "lock": AsyncLock,
    "lock, watch": lambda sync, name, **options: AsyncLock(sync, name, engine="watch", **options),
    "robust lock": lambda sync, name, **options: AsyncRobustLock(sync, name, **options),
    "semaphore": lambda sync, name, **options: AsyncSemaphore(sync, name, limit=1, **options),
    "semaphore, watch": lambda sync, name, **options: AsyncSemaphore(sync, name, limit=1, engine="watch", **options),
}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


async def use(lock: Any) -> None:
    async with lock:
        pass


@pytest_asyncio.fixture
async def sync(redis: Redis) -> AsyncIterator[Coordinator]:
    """A coordinator whose tickets would cost a claim."""
    async with Coordinator(redis, claim=CLAIM) as coordinator:
        yield coordinator


class Queue:
    """Tasks of one process that wait behind a lease of another one, and are served later."""

    def __init__(self, entered: Callable[[], Any]) -> None:
        self._entered = entered

    async def line_up(self, holder: Exclusive, count: int = OLD) -> None:
        """Return when all of them are in the queue."""
        self._lease = await holder.acquire()
        self._tasks = [asyncio.create_task(use(self._entered())) for _ in range(count)]
        await wait_until(waits(holder, count), FAST, timeout=10)

    async def serve(self) -> None:
        """Return when all of them have had their turn."""
        await self._lease.release()
        await asyncio.gather(*self._tasks)


async def free(lock: Exclusive) -> None:
    """Return when the lease that came back with the older data is over."""

    async def over() -> bool:
        return (await lock.statistics()).waiting > 0 and not await lock.locked()

    await wait_until(over, FAST, timeout=10)


async def granted_soon(lock: Exclusive | AsyncRedlock) -> None:
    """Acquire it."""
    await (await lock.acquire(timeout=IN_TIME)).release()


async def granted_when_free(lock: Exclusive) -> None:
    """Acquire it when the lease that came back is over."""
    await free(lock)
    await granted_soon(lock)


def connected(sync: Coordinator, count: int) -> Callable[[], bool]:
    return lambda: sync.connections >= count and sync.connection_error is None


def as_it_is(lock: Exclusive, _: int) -> Any:
    return lock


def by_identity(lock: Exclusive, number: int) -> Any:
    """Nothing is given back here: another process may hold what an identity was granted."""
    return lock.acquire(identity=f"somebody {number}")


@pytest.mark.ci
async def test_p3_a_snapshot() -> None:
    """A server restarts from a snapshot: tickets that were served since then keep nobody out.

    Locks and semaphores of all kinds, each with a queue of its own: so one restart is enough.
    """
    with EmbeddedServer() as server:
        async with (
            server.client() as first,
            server.client() as second,
            Coordinator(first, claim=CLAIM) as sync,
            Coordinator(second, claim=CLAIM) as other,
        ):
            cases = {f"{kind}, {by.__name__}": (KINDS[kind], by) for kind in KINDS for by in (as_it_is, by_identity)}
            queues = [queue_of(partial(make, sync, name), by) for name, (make, by) in cases.items()]
            theirs = [make(other, name) for name, (make, _) in cases.items()]
            holders = [make(other, name, ttl=3, auto_renew=False) for name, (make, _) in cases.items()]
            await asyncio.gather(*(queue.line_up(holder) for queue, holder in zip(queues, holders, strict=True)))
            await second.save()
            await asyncio.gather(*(queue.serve() for queue in queues))
            await sync.lock("something else").acquire()  # so its connection comes back
            server.kill()
            await asyncio.to_thread(server.start)
            await wait_until(connected(sync, 2), FAST, timeout=15)
            ends = await asyncio.gather(*map(granted_when_free, theirs), return_exceptions=True)
            assert dict(zip(cases, ends, strict=True)) == dict.fromkeys(cases)


def queue_of(make: Callable[[], Exclusive], by: Callable[[Exclusive, int], Any]) -> Queue:
    identities = itertools.count()
    return Queue(lambda: by(make(), next(identities)))


async def test_p3_a_snapshot_without_the_right_to_info() -> None:
    """A user that may not ask which data the server has counts each connection as one to other data."""
    with EmbeddedServer(args=("--user", "limited", "on", "nopass", "~*", "&*", "+@all", "-info")) as server:
        async with (
            server.client() as admin,
            server.client(username="limited", password="any") as client,
            Coordinator(client, claim=CLAIM) as sync,
            Coordinator(admin, claim=CLAIM) as other,
        ):
            queue = Queue(lambda: AsyncLock(sync, NAME))
            await queue.line_up(AsyncLock(other, NAME, ttl=1, auto_renew=False))
            await admin.save()
            await queue.serve()
            await sync.lock("something else").acquire()
            server.kill()
            await asyncio.to_thread(server.start)
            await wait_until(connected(sync, 2), FAST, timeout=15)
            await free(AsyncLock(other, NAME))
            await granted_soon(AsyncLock(other, NAME))


async def test_p3_a_waiter_that_waits_on_has_a_new_place() -> None:
    """Tasks of both processes wait when the older queue comes back: they are served as if it were empty."""
    with EmbeddedServer() as server:
        async with (
            server.client() as first,
            server.client() as second,
            Coordinator(first, claim=CLAIM) as sync,
            Coordinator(second, claim=CLAIM) as other,
        ):
            queue = Queue(lambda: AsyncLock(sync, NAME))
            holder = AsyncLock(other, NAME, ttl=1, auto_renew=False)
            await queue.line_up(holder)
            await second.save()
            await queue.serve()
            blocking = await AsyncLock(other, NAME, ttl=30).acquire()
            late = [asyncio.create_task(use(AsyncLock(it, NAME))) for it in (sync, other)]
            await wait_until(waits(holder, 2), FAST, timeout=15)
            server.kill()
            await asyncio.to_thread(server.start)
            await blocking.wait_lost()
            await asyncio.wait_for(asyncio.gather(*late), IN_TIME)


@pytest.mark.real
async def test_p3_a_replica_that_lagged() -> None:
    """Sentinel promotes a replica that knows nothing of what was served lately."""
    async with (
        SentinelTopology() as group,
        group.client() as first,
        group.client() as second,
        Coordinator(first, claim=CLAIM) as sync,
        Coordinator(second, claim=CLAIM) as other,
    ):
        queue = Queue(lambda: AsyncLock(sync, NAME))
        await queue.line_up(AsyncLock(other, NAME, ttl=1, auto_renew=False))
        await group.replicated()
        await group.cut_replication()
        await queue.serve()
        await sync.lock("something else").acquire()
        group.primary.kill()
        group.replica.resume()
        await group.promoted(any_sentinel=True)
        await wait_until(connected(sync, 2), FAST, timeout=10)
        await free(AsyncLock(other, NAME))
        await granted_soon(AsyncLock(other, NAME))


@pytest.mark.ci
@pytest.mark.real
async def test_p3_a_replica_of_a_shard_that_lagged() -> None:
    """The same in a cluster."""
    async with Nodes(replicas=1) as nodes, processes(nodes, claim=CLAIM) as (sync, other):
        name, primary, replica = nodes.name_at(0), nodes.primaries[0], nodes.replicas[0]
        queue = Queue(lambda: AsyncLock(sync, name))
        await queue.line_up(AsyncLock(other, name, ttl=1, auto_renew=False))
        await nodes.call(primary, "WAIT", 1, 5000)
        replica.pause()
        await nodes.call(primary, "CLIENT", "KILL", "TYPE", "replica")
        await queue.serve()
        await sync.lock(nodes.name_at(0, "else")).acquire()
        opened = sync.connections
        primary.kill()
        replica.resume()
        await nodes.promoted(primary)
        await wait_until(connected(sync, opened + 1), FAST, timeout=20)
        await free(AsyncLock(other, name))
        await granted_soon(AsyncLock(other, name))


async def test_p3_the_servers_of_a_redlock() -> None:
    """All three restart from snapshots that were made while tasks waited."""
    servers = [EmbeddedServer() for _ in range(3)]
    clients: list[Redis] = []
    try:
        for server in servers:
            server.start()
        both = [[Coordinator(server.client(), claim=CLAIM) for server in servers] for _ in range(2)]
        clients = [coordinator.client for group in both for coordinator in group]  # type: ignore[misc]
        ours, theirs = both
        queued = AsyncLock(theirs[0], NAME)
        lease = await AsyncRedlock(theirs, NAME, ttl=1, auto_renew=False).acquire()
        tasks = [asyncio.create_task(use(AsyncRedlock(ours, NAME))) for _ in range(OLD)]
        await wait_until(waits(queued, OLD), FAST, timeout=10)
        for client in clients[:3]:
            await client.save()
        await lease.release()
        await asyncio.gather(*tasks)
        for one in ours:
            await one.lock("something else").acquire()
        for server in servers:
            server.kill()
            await asyncio.to_thread(server.start)
        for one in ours:
            await wait_until(connected(one, 2), FAST, timeout=15)
        await free(queued)
        await granted_soon(AsyncRedlock(theirs, NAME))
    finally:
        for client in clients:
            await client.aclose()
        for server in servers:
            server.stop()


@kinds
async def test_p3_keys_that_somebody_restored(make: Make, sync: Coordinator, other: Coordinator, redis: Redis) -> None:
    """The server is the same as far as it says, and its queue is an older one: what it grants is given back."""
    queue = Queue(lambda: make(sync, NAME))
    holder = make(other, NAME)
    await queue.line_up(holder, 30)
    (key,) = await redis.keys("*:queue")
    old = await redis.dump(key)
    assert old is not None
    await queue.serve()
    assert not await redis.exists(key)
    await redis.restore(key, 0, old)
    await granted_soon(holder)
    assert (await holder.statistics()).waiting == 0


async def test_p1_a_grant_that_is_told_twice(sync: Coordinator, other: Coordinator, redis: Redis) -> None:
    """What a task holds is not given back, nor is what another process holds."""
    mine, theirs = AsyncLock(sync, NAME), AsyncLock(other, NAME)

    async def again(fence: int, number: bytes) -> None:
        inbox = hub_of(sync).endpoint_of(lock_keys(NAME.encode())).inbox
        assert await redis.publish(inbox, b"%b %d 1000000 2000" % (number, fence)) == 1
        await (await sync.lock("something else").acquire()).release()  # and whatever that led to was executed

    holder = await theirs.acquire()
    waiting = asyncio.create_task(mine.acquire())
    await wait_until(waits(mine), FAST, timeout=15)
    await holder.release()
    lease = await waiting
    number = lease._grant.wire_token.rpartition(b":")[2]
    await again(lease.fence, number)
    assert holder_of(await mine.statistics()) == lease.token
    await lease.extend(20)
    await lease.release()
    holder = await theirs.acquire()
    await again(lease.fence, number)
    assert holder_of(await mine.statistics()) == holder.token
    await holder.release()
    assert lease.fence < holder.fence


async def test_p3_a_place_that_could_not_be_given_up(
    server: EmbeddedServer, other: Coordinator, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task timed out in a long outage, and its undo too: its ticket is still in the queue, and keeps nobody out."""
    monkeypatch.setattr("redis_sync_aio._leases.manager.UNDO_FOR", 0.3)  # in place of a minute
    async with (
        FaultProxy(server) as proxy,
        proxy.client() as client,
        Coordinator(client, claim=CLAIM) as sync,
    ):
        theirs = AsyncLock(other, NAME)
        holder = await theirs.acquire()
        await sync.lock("something else").acquire()
        waiting = asyncio.create_task(AsyncLock(sync, NAME).acquire(timeout=0.5, identity="somebody"))
        await wait_until(waits(theirs), FAST, timeout=15)
        hub_of(sync).retry_for = 0.3  # for the undo
        proxy.refuse = True
        await proxy.cut()
        with pytest.raises(Unreachable):
            await waiting
        await wait_until(lambda: not hub_of(sync).manager.releases.in_flight._calls, FAST, timeout=15)
        proxy.refuse = False
        await wait_until(connected(sync, 2), FAST, timeout=15)
        assert (await theirs.statistics()).waiting == 1
        await holder.release()
        await granted_soon(theirs)


# -- very many waiters that died together ---------------------------------------------------------------------


DEAD = 1200
"""More tickets than two scripts drop."""


@pytest.mark.parametrize("kind", ["lock", "semaphore"])
async def test_p2_a_script_drops_at_most_500_of_the_dead(kind: str, redis: Redis, sync: Coordinator) -> None:
    """The server serves others between two of them, and a request that waits is granted when all are gone."""
    primitive: AsyncLock | AsyncSemaphore
    if kind == "lock":
        primitive, queue = AsyncLock(sync, "x", ttl=10), lock_keys(b"x").queue
    else:
        primitive, queue = AsyncSemaphore(sync, "x", 1, ttl=10), permit_keys(b"x", "sem").all[2]
    async with primitive:
        await redis.zadd(queue, {f"rsa:dead|{number}|5000|1|token{number}": number for number in range(1, DEAD + 1)})
    assert await redis.zcard(queue) == DEAD - 500
    assert await primitive.try_acquire() is None
    assert await redis.zcard(queue) == DEAD - 1000
    async with primitive.acquire(timeout=10):
        assert await redis.zcard(queue) == 0
