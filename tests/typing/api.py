"""The types that users see. This file is only type-checked, by mypy and pyright; pytest does not collect it.

`assert_type` fails when a public signature gets wider, narrower or unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from datetime import timedelta
from typing import Any, Literal, assert_type

from redis.asyncio import Redis, RedisCluster

from redis_sync_aio import (
    AsyncBarrier,
    AsyncCountDownLatch,
    AsyncEvent,
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncRedlock,
    AsyncReentrantLock,
    AsyncRobustLock,
    AsyncSemaphore,
    Backoff,
    Compensation,
    Coordinator,
    FenceGate,
    LeaderElection,
    Lease,
    LeaseLost,
    SyncError,
    compat,
    embedded,
    errors,
    synchronized,
    transaction,
    types,
    watch_retry,
)
from redis_sync_aio.inspection import HolderView, NameView, WaiterView
from redis_sync_aio.types import (
    Abandoned,
    Acquiring,
    Attempt,
    Committed,
    GuardedTransaction,
    Leader,
    MultiLease,
    ReadSide,
    RedlockLease,
    RobustLease,
    Term,
    Transaction,
    WriteSide,
)


async def locks(redis: Redis, cluster: RedisCluster) -> None:
    """A lock, from a client of each kind, and its lease."""
    AsyncLock(cluster, b"name", ttl=None, max_hold=timedelta(minutes=1), on_lost="event", engine="watch")
    lock = AsyncLock(redis, "name", ttl=30, share=True, linger=0.5)
    assert_type(lock.name, str)
    assert_type(await lock.acquire(timeout=5, ttl=timedelta(seconds=3), identity="worker"), Lease)
    assert_type(await lock.try_acquire(), Lease | None)
    assert_type(lock.acquire(timeout=5), Acquiring[Lease])
    assert_type(await lock.locked(), bool)
    assert_type(await lock.force_release(), bool)
    assert_type(await lock.statistics(), NameView)
    await lock.release()
    async with lock as lease:
        assert_type(lease, Lease)
    async with lock.acquire(ttl=3) as lease:
        assert_type(lease, Lease)
    async with await lock.acquire() as lease:
        assert_type(lease, Lease)


async def leases(lease: Lease) -> None:
    """What a holder may ask."""
    assert_type(lease.name, str)
    assert_type(lease.fence, int)
    assert_type(lease.token, str)
    assert_type(lease.remaining(), float)
    assert_type(lease.lost, bool)
    assert_type(await lease.wait_lost(), bool)
    assert_type(lease.check(), None)
    assert_type(await lease.extend(60), None)
    assert_type(await lease.release(), None)
    assert_type(await lease.detach(60), str)
    assert_type(lease.transaction(), GuardedTransaction)
    async with lease.transaction() as tx:
        assert_type(tx, GuardedTransaction)


async def robust_locks(redis: Redis) -> None:
    """A lock that keeps a record."""
    lock = AsyncRobustLock(redis, "name", ttl=30, engine="lua")
    assert_type(await lock.acquire(timeout=5), RobustLease)
    assert_type(await lock.try_acquire(), RobustLease | None)
    assert_type(lock.acquire(timeout=5), Acquiring[RobustLease])
    assert_type(await lock.statistics(), NameView)
    async with lock as lease:
        assert_type(lease, RobustLease)
        assert_type(lease.abandoned, Abandoned | None)
        assert_type(lease.progress, dict[str, types.Json] | None)
        assert_type(await lease.record({"step": 1}), None)
        assert_type(await lease.compensate({}), None)
        assert_type(await lease.clear_record(), None)


async def views(sync: Coordinator, found: NameView) -> None:
    """What the server, or this process, says of a name."""
    assert_type(found.holders, tuple[HolderView, ...])
    assert_type(found.waiters, tuple[WaiterView, ...])
    assert_type(found.held, int)
    assert_type(found.limit, int | None)
    assert_type(found.holders[0].remaining, float | None)
    assert_type(sync.statistics(), tuple[NameView, ...])
    assert_type(await sync.inspect("orders:*", limit=5), tuple[NameView, ...])
    assert_type(await sync.ping(), float)
    assert_type(await sync.event("name").statistics(), NameView)
    assert_type(await sync.latch("name", 2).statistics(), NameView)
    assert_type(await sync.barrier("name", 2).statistics(), NameView)
    assert_type(await sync.election("name").statistics(), NameView)
    assert_type(await sync.reentrant_lock("name").statistics(), NameView)
    assert_type(await sync.read_write_lock("name").read().statistics(), NameView)


async def semaphores(sync: Coordinator) -> None:
    """Permits."""
    semaphore = AsyncSemaphore(sync, "name", limit=5, on_mismatch="keep", max_waiting=10)
    assert_type(await semaphore.acquire(weight=2, timeout=1), Lease)
    assert_type(await semaphore.try_acquire(weight=2), Lease | None)
    assert_type(semaphore.limit, int | None)
    assert_type(await semaphore.get_limit(), int)
    assert_type(await semaphore.resize(7), None)
    assert_type(await semaphore.statistics(), NameView)
    async with semaphore.acquire(weight=2) as lease:
        assert_type(lease, Lease)


async def read_write_locks(sync: Coordinator) -> None:
    """Readers and writers."""
    rw = AsyncReadWriteLock(sync, "name")
    assert_type(rw.read(), ReadSide)
    assert_type(rw.write(), WriteSide)
    assert_type(await rw.statistics(), NameView)
    async with rw.read() as lease:
        assert_type(lease, types.GuardingLease)
    async with rw.write() as writer:
        assert_type(writer, types.WriteLease)
        assert_type(writer.previous_fence, int | None)
        assert_type(await rw.downgrade(writer), None)


async def compound_locks(sync: Coordinator, servers: list[Redis]) -> None:
    """Locks that are made of locks."""
    reentrant = AsyncReentrantLock(sync, "name")
    assert_type(await reentrant.acquire(identity="request 7"), types.GuardingLease)
    assert_type(await reentrant.try_acquire(), types.GuardingLease | None)
    assert_type(reentrant.depth(), int)

    multi = AsyncMultiLock(sync, ["a", "b"])
    assert_type(await multi.try_acquire(), MultiLease | None)
    assert_type(await multi.statistics(), tuple[NameView, ...])
    async with multi as together:
        assert_type(together, MultiLease)
        assert_type(together.names, tuple[str, ...])
        assert_type(together.fences, Mapping[str, int])

    redlock = AsyncRedlock(servers, "name")
    assert_type(await redlock.try_acquire(), RedlockLease | None)
    assert_type(await redlock.force_release(), int)
    assert_type(await redlock.statistics(), tuple[NameView | None, ...])
    async with redlock as majority:
        assert_type(majority, RedlockLease)
        assert_type(majority.held_on, int)

    election = LeaderElection(sync, "name", label="me", ttl=timedelta(seconds=10))
    async with election.lead(timeout=5) as term:
        assert_type(term, Term)
        assert_type(term.number, int)
        assert_type(term.label, str)
    assert_type(await election.leader(), Leader | None)
    assert_type(await election.resign(), bool)
    async for leader in election.watch(every=0.5):
        assert_type(leader, Leader | None)


async def parties(sync: Coordinator, redis: Redis) -> None:
    event = AsyncEvent(redis, b"name", keep=timedelta(days=1), engine="watch")
    assert_type(sync.event("name"), AsyncEvent)
    assert_type(await event.wait(timeout=5), Literal[True])
    await event.set()
    await event.clear()
    assert_type(await event.is_set(), bool)
    latch = AsyncCountDownLatch(sync, "name", 3, keep=60)
    assert_type(sync.latch("name", count=3), AsyncCountDownLatch)
    assert_type(await latch.count_down(2, identity=b"part"), int)
    assert_type(await latch.count(), int)
    await latch.wait(timeout=timedelta(minutes=1))
    barrier = AsyncBarrier(sync, "name", 3, ttl=timedelta(seconds=5), engine="lua")
    assert_type(sync.barrier("name", parties=3), AsyncBarrier)
    assert_type(await barrier.wait(timeout=5), int)
    assert_type(await barrier.n_waiting(), int)
    assert_type(await barrier.broken(), bool)
    assert_type(barrier.parties, int)
    await barrier.abort()
    await barrier.reset()


async def coordinators(redis: Redis) -> None:
    """The object that a service makes at its start."""
    async with Coordinator(redis, push="never", retry_for=1.0) as sync:
        assert_type(sync, Coordinator)
        assert_type(sync.lock("name", ttl=3), AsyncLock)
        assert_type(sync.semaphore("name", limit=3, share=True), AsyncSemaphore)
        assert_type(sync.read_write_lock("name", on_lost="event"), AsyncReadWriteLock)
        assert_type(sync.reentrant_lock("name"), AsyncReentrantLock)
        assert_type(sync.multi_lock(["name", b"another"], max_hold=timedelta(minutes=1)), AsyncMultiLock)
        assert_type(sync.client, Redis | RedisCluster)
        assert_type(sync.connection_error, Exception | None)
        assert_type((sync.connections, sync.why_closed), tuple[int, str | None])
    assert_type(await sync.aclose(drain=1), None)


async def transactions(redis: Redis) -> None:
    """Optimistic transactions, in their three forms."""

    async def body(tx: Transaction) -> int:
        tx.multi()
        return 1

    done = await transaction(redis, body, "a", b"b", timeout=timedelta(seconds=1), backoff=Backoff())
    assert_type(done, Committed[int])
    assert_type(done.value, int)
    assert_type(done.recovered, bool)

    @watch_retry(redis, "stock:{item}", exactly_once=True)
    async def deduct(tx: Transaction, item: int, number: int = 1) -> str:
        return f"{item} {number}"

    assert_type(await deduct(7, number=2), str)
    async for attempt in watch_retry(redis, "a"):
        assert_type(attempt, Attempt)
        async with attempt as tx:
            assert_type(tx, Transaction)


async def decorators(redis: Redis) -> None:
    """Functions keep their types."""

    @synchronized(redis, "user:{user}", timeout=5)
    async def charge(user: int, amount: float) -> str:
        return f"{user} {amount}"

    @synchronized(lambda: redis, "report", on_busy="skip")
    async def report() -> int:
        return 1

    @AsyncLock(redis, "name").wrap
    async def nightly(day: str) -> bytes:
        return day.encode()

    assert_type(await charge(1, amount=2.0), str)
    assert_type(await report(), int | None)
    assert_type(await nightly("monday"), bytes)
    of_call: Callable[[int, float], Coroutine[Any, Any, str]] = charge
    assert_type(await of_call(1, 2.0), str)


async def recovery(redis: Redis, lease: Lease) -> None:
    """What the next holder does after a crash, and fences."""
    assert_type(await FenceGate(redis, "name").accept(lease), None)
    assert_type(await FenceGate(redis, "name").accept(7), None)
    assert_type(await FenceGate(redis, "name").highest(), int | None)
    async with Compensation() as undo:
        assert_type(undo, Compensation)
        assert_type(undo.push(asyncio.sleep, 1.0), None)
        assert_type(await undo.push("refund", order=7), None)


async def compatibility(redis: Redis) -> None:
    """The lock with redis-py's face."""
    lock = compat.Lock(redis, "name", timeout=10)
    assert_type(await lock.acquire(blocking=False), bool)
    assert_type(await lock.extend(5), Literal[True])
    assert_type(await lock.owned(), bool)


def servers() -> None:
    """A server for tests."""
    with embedded.EmbeddedServer() as server:
        assert_type(server.url, str)
        assert_type(server.client(), Redis)


def failures(error: SyncError, lost: LeaseLost) -> None:
    """What an error carries."""
    assert_type(lost.reason, types.LossReason)
    assert_type(lost.name, str)
    if isinstance(error, errors.AcquireTimeout):
        assert_type(error.remaining, float | None)
    if isinstance(error, errors.OutcomeUnknown):
        assert_type(error.attempts, int)
