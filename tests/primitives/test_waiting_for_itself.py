"""A task that would wait for the end of its own body is refused immediately."""

from __future__ import annotations

import asyncio

import pytest

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncReentrantLock,
    Coordinator,
    Lease,
    WouldDeadlock,
    wait_until,
)

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
        async with rw.read() as reader:
            with pytest.raises(WouldDeadlock, match=r"upgrade\(\) that lease"):
                await rw.write().acquire()
            async with rw.read():  # nobody writes, so nobody waits for the other
                pass
            async with rw.upgrade(reader):
                with pytest.raises(WouldDeadlock, match=r"downgrade\(\) it"):
                    await rw.read().acquire()
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
    lock = AsyncLock(sync, "it")

    async def body(lease: Lease) -> None:
        releasing = asyncio.create_task(release_when_it_waits(lock, lease))
        again = await lock.acquire()
        await releasing
        await again.release()

    _, error = await lost_in(lock.hold(on_lost="event"), body)
    assert error.reason == "released"


async def release_when_it_waits(lock: AsyncLock, lease: Lease) -> None:
    await wait_until(waits(lock), FAST, timeout=5)
    await lease.release()
