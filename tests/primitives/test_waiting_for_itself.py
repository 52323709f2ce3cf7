"""A task that would wait for the end of its own body is refused immediately."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

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
from ..support.primitives import LOCKS, Primitive, each
from .conftest import Make

exclusive = each(one for one in LOCKS if not one.reenters)


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


async def release_when_it_waits(lock: AsyncLock, lease: Lease) -> None:
    await wait_until(waits(lock), FAST, timeout=5)
    await asyncio.sleep(1)  # the waiter has its answers
    await lease.release()


async def test_it_waits_in_a_body_that_runs_on_without_its_lease(sync: Coordinator) -> None:
    lock = AsyncLock(sync, "it", on_lost="event")

    async def body(lease: Lease) -> None:
        releasing = asyncio.create_task(release_when_it_waits(lock, lease))
        again = await lock.acquire()
        await releasing
        await again.release()

    _, error = await lost_in(lock.acquire(), body)
    assert error.reason == "released"


async def test_the_same_name_on_another_server_is_another_lock(
    sync: Coordinator, independent_servers: list[EmbeddedServer]
) -> None:
    """The task may wait there for what others hold."""
    async with independent_servers[0].client() as elsewhere, Coordinator(elsewhere) as there:
        await elsewhere.flushall()
        lock = AsyncLock(there, "it")
        blocker = await lock.acquire()
        async with asyncio.timeout(30), sync.lock("it"):
            releasing = asyncio.create_task(release_when_it_waits(lock, blocker))
            async with lock:
                await releasing


HOLDS: dict[str, Callable[[Coordinator], Any]] = {
    "plain": lambda sync: sync.lock("it"),
    "shared": lambda sync: sync.lock("it", share=True),
    "reentrant": lambda sync: sync.reentrant_lock("it"),
    "multi": lambda sync: AsyncMultiLock(sync, ["it", "that"]),
}
ASKS: dict[str, Callable[[Coordinator, Coordinator], Any]] = {
    "another engine": lambda second, other: second.lock("it", engine="lua"),
    "the bare client": lambda second, other: AsyncLock(second.client, "it"),
    "a second coordinator of the client": lambda second, other: second.lock("it"),
    "another client": lambda second, other: other.lock("it"),
    "tasks that share": lambda second, other: other.lock("it", share=True),
    "WATCH": lambda second, other: other.lock("it", engine="watch"),
    "a robust lock": lambda second, other: AsyncRobustLock(other, "it"),
    "a reentrant lock": lambda second, other: AsyncReentrantLock(other, "it"),
    "a reentrant lock of the coordinator": lambda second, other: AsyncReentrantLock(second, "it"),
    "a multi-lock": lambda second, other: AsyncMultiLock(other, ["and that", "it"]),
}


@pytest.mark.parametrize("outer", HOLDS)
@pytest.mark.parametrize("inner", ASKS)
async def test_another_object_of_the_name_is_refused_whatever_it_is_made_of(
    sync: Coordinator, other: Coordinator, outer: str, inner: str
) -> None:
    """The server says that it is the same lock: it has the token of the body's lease. Nothing is left in the queue."""
    async with asyncio.timeout(30), Coordinator(sync.client) as second:
        asks = ASKS[inner](second, other)
        async with HOLDS[outer](sync) as lease:
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
@pytest.mark.parametrize("elsewhere", [False, True])
async def test_both_sides_of_a_read_write_lock(
    sync: Coordinator, other: Coordinator, share: bool, elsewhere: bool
) -> None:
    """Reading twice is no wait for itself."""
    here = AsyncReadWriteLock(sync, "it", share=share)
    there = AsyncReadWriteLock(other if elsewhere else sync, "it", share=share)
    async with asyncio.timeout(30):
        async with here.read():
            async with there.read():
                pass
            with pytest.raises(WouldDeadlock, match="release that lease before you acquire the write side"):
                await there.write().acquire()
        async with here.write():
            for side in (there.read(), there.write()):
                with pytest.raises(WouldDeadlock, match=r"downgrade\(\) it"):
                    await side.acquire()
        async with there.write():
            pass
