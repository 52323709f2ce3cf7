"""A task that would wait for the end of its own body is refused immediately."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncReentrantLock,
    AsyncRobustLock,
    Coordinator,
    Lease,
    WouldDeadlock,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer

from ..support.body import FAST, lost_in, waits
from .conftest import ALONE, Make, Primitive

exclusive = pytest.mark.parametrize("primitive", [one for one in ALONE if not one.reenters], ids=str)


@exclusive
@pytest.mark.parametrize("timeout", [None, 60])
async def test_acquiring_what_the_own_body_holds_is_refused(
    primitive: Primitive, make: Make, timeout: float | None
) -> None:
    """Whatever object of the same name asks; and nothing is left in the queue."""
    async with asyncio.timeout(5), make() as lease:
        with pytest.raises(WouldDeadlock, match="wait for itself"):
            await make().acquire(timeout=timeout)
        with pytest.raises(WouldDeadlock):
            async with make():
                pass
        assert await make().try_acquire() is None  # it does not wait
        lease.check()
    async with asyncio.timeout(5), make():
        pass


@pytest.mark.parametrize("share", [False, True])
async def test_both_sides_of_a_read_write_lock(sync: Coordinator, share: bool) -> None:
    rw = AsyncReadWriteLock(sync, "it", share=share)
    async with asyncio.timeout(5):
        async with rw.read():
            with pytest.raises(WouldDeadlock, match=r"release that lease before you acquire the write side"):
                await rw.write().acquire()
            async with rw.read():  # nobody writes, so nobody waits for the other
                pass
        async with rw.write():
            for side in (rw.read(), rw.write()):
                with pytest.raises(WouldDeadlock, match=r"downgrade\(\) it"):
                    await side.acquire()


async def test_locks_that_stand_on_the_same_name(sync: Coordinator) -> None:
    """What a multi-lock or a reentrant one holds is a lock like any other."""
    plain, several = AsyncLock(sync, "it"), AsyncMultiLock(sync, ["and that", "it"])
    reentrant = AsyncReentrantLock(sync, "it")
    async with asyncio.timeout(5):
        for outer, inner in ((plain, several), (several, plain), (reentrant, plain), (plain, reentrant)):
            async with outer:
                with pytest.raises(WouldDeadlock):
                    await inner.acquire()
        async with reentrant:
            with pytest.raises(WouldDeadlock):
                await reentrant.acquire(identity="another one")
        async with AsyncLock(sync, "and that"):  # the multi-lock gave it back
            pass


@exclusive
async def test_it_waits_for_a_lease_that_another_task_may_release(primitive: Primitive, make: Make) -> None:
    """Without a body that has to end first, nobody knows that the wait is endless."""
    lease = await make().acquire()
    releasing = asyncio.create_task(lease.release())
    async with asyncio.timeout(5):
        again = await make().acquire()
    await releasing
    await again.release()


async def test_it_waits_in_a_body_that_goes_on_without_its_lease(sync: Coordinator) -> None:
    lock = AsyncLock(sync, "it", on_lost="event")

    async def body(lease: Lease) -> None:
        releasing = asyncio.create_task(release_when_it_waits(lock, lease))
        again = await lock.acquire()
        await releasing
        await again.release()

    _, error = await lost_in(lock.acquire(), body)
    assert error.reason == "released"


async def release_when_it_waits(lock: AsyncLock, lease: Lease) -> None:
    await wait_until(waits(lock), FAST, timeout=5)
    await lease.release()


OTHERS: dict[str, Callable[[Coordinator, Coordinator, Coordinator], Any]] = {
    "another engine": lambda sync, second, other: sync.lock("it", engine="lua"),
    "the bare client": lambda sync, second, other: AsyncLock(second_client(second), "it"),
    "a second coordinator of the client": lambda sync, second, other: second.lock("it"),
    "another client": lambda sync, second, other: other.lock("it"),
    "tasks that share": lambda sync, second, other: other.lock("it", share=True),
    "WATCH": lambda sync, second, other: other.lock("it", engine="watch"),
    "a robust lock": lambda sync, second, other: AsyncRobustLock(other, "it"),
    "a reentrant lock": lambda sync, second, other: AsyncReentrantLock(other, "it"),
    "a multi-lock": lambda sync, second, other: AsyncMultiLock(other, ["and that", "it"]),
}


def second_client(second: Coordinator) -> Redis:
    client = second.client
    assert isinstance(client, Redis)
    return client


@pytest.mark.parametrize("outer", ["plain", "shared", "reentrant", "multi"])
@pytest.mark.parametrize("inner", OTHERS)
async def test_another_object_of_the_name_is_refused_whatever_it_is_made_of(
    sync: Coordinator, redis: Redis, other: Coordinator, outer: str, inner: str
) -> None:
    """The server says that it is the same lock: it has the token of the body's lease. Nothing is left in the queue."""
    holds: dict[str, Any] = {
        "plain": sync.lock("it"),
        "shared": sync.lock("it", share=True),
        "reentrant": sync.reentrant_lock("it"),
        "multi": AsyncMultiLock(sync, ["it", "that"]),
    }
    async with asyncio.timeout(30), Coordinator(redis) as second:
        asks = OTHERS[inner](sync, second, other)
        async with holds[outer] as lease:
            with pytest.raises(WouldDeadlock, match=r"a body of this task holds 'it' \(fence .*wait for itself"):
                await asks.acquire()
            with pytest.raises(WouldDeadlock):
                async with asks:
                    pass
            lease.check()
            await wait_until(waits(sync.lock("it"), 0), FAST, timeout=20)
        async with asks:
            pass


@pytest.mark.parametrize("share", [False, True])
async def test_a_writer_behind_its_own_reader_of_another_coordinator(
    sync: Coordinator, other: Coordinator, share: bool
) -> None:
    """Reading twice is no wait for itself."""
    here, there = AsyncReadWriteLock(sync, "it", share=share), AsyncReadWriteLock(other, "it", share=share)
    async with asyncio.timeout(30):
        async with here.read():
            async with there.read():
                pass
            with pytest.raises(WouldDeadlock):
                await there.write().acquire()
        async with here.write():
            for side in (there.read(), there.write()):
                with pytest.raises(WouldDeadlock):
                    await side.acquire()
        async with there.write():
            pass


async def test_behind_another_waiter(sync: Coordinator, other: Coordinator) -> None:
    """The task waits for itself, although it is not the next one."""
    async with asyncio.timeout(30):
        async with sync.lock("it"):
            before = asyncio.create_task(other.lock("it").acquire())
            await wait_until(waits(sync.lock("it")), FAST, timeout=20)
            with pytest.raises(WouldDeadlock):
                await other.lock("it").acquire()
        await (await before).release()


async def test_the_same_name_on_another_server_is_another_lock(
    sync: Coordinator, independent_servers: list[EmbeddedServer]
) -> None:
    """The task may wait there for what others hold."""
    async with independent_servers[0].client() as elsewhere, Coordinator(elsewhere) as there:
        await elsewhere.flushall()
        lock = AsyncLock(there, "it")
        blocker = await lock.acquire()
        async with asyncio.timeout(30), sync.lock("it"):
            releasing = asyncio.create_task(release_later(lock, blocker))
            async with lock:
                await releasing


async def release_later(lock: AsyncLock, lease: Lease) -> None:
    await wait_until(waits(lock), FAST, timeout=20)
    for _ in range(3):  # whatever the waiter asks of the server is answered before that
        await lock.statistics()
    await lease.release()
