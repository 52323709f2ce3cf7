"""P9: ``release()`` of a semaphore finds the lease of the current task, however many permits the process holds."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest

from redis_sync_aio import AsyncReadWriteLock, AsyncSemaphore, Coordinator, Lease, NotHeld

either = pytest.mark.parametrize("share", [False, True])


@either
async def test_the_latest_lease_of_the_task_among_many(sync: Coordinator, share: bool) -> None:
    """Whether others released theirs meanwhile, or itself by the lease; never that of another living task."""
    semaphore = AsyncSemaphore(sync, "many", limit=1000, share=share)
    taken, end = 0, asyncio.Event()

    async def another() -> None:
        nonlocal taken
        lease = await semaphore.acquire()
        taken += 1
        await end.wait()
        lease.check()
        await semaphore.release()
        with pytest.raises(NotHeld):
            await semaphore.release()

    for _ in range(2):
        others = [asyncio.create_task(another()) for _ in range(100)]
        first, second = await semaphore.acquire(), await semaphore.acquire()
        while taken < len(others):
            await asyncio.sleep(0.001)
        third, fourth = await semaphore.acquire(), await semaphore.acquire()
        for own in (fourth, third):
            own.check()
            await semaphore.release()
            with pytest.raises(NotHeld):
                own.check()
        await second.release()
        first.check()
        await semaphore.release()
        with pytest.raises(NotHeld):
            first.check()
        with pytest.raises(NotHeld, match="this task holds no lease"):
            await semaphore.release()
        end.set()
        await asyncio.gather(*others)
        assert (await semaphore.statistics()).held == 0
        taken, end = 0, asyncio.Event()


async def test_the_side_of_it_among_many_readers(sync: Coordinator) -> None:
    """The read side gives back the task's own read lease, though all readers have one permit."""
    side = AsyncReadWriteLock(sync, "many", share=True).read()
    end = asyncio.Event()

    async def another() -> None:
        async with side:
            await end.wait()

    others = [asyncio.create_task(another()) for _ in range(100)]
    lease = await side.acquire()
    await side.release()
    with pytest.raises(NotHeld):
        lease.check()
    with pytest.raises(NotHeld, match="this task holds no lease"):
        await side.release()
    end.set()
    await asyncio.gather(*others)


async def test_a_task_that_ended_is_not_kept_by_what_it_shared(sync: Coordinator) -> None:
    """Among many: what it left behind is released by any task that asks for that, as of few."""
    semaphore = AsyncSemaphore(sync, "many", limit=1000, share=True)

    async def acquire() -> None:
        leases.append(await semaphore.acquire())

    leases: list[Lease] = []
    held = [await semaphore.acquire() for _ in range(100)]
    await semaphore.release()  # so they are known by task
    await asyncio.create_task(acquire())
    for lease in held:
        with suppress(NotHeld):
            await lease.release()
    await semaphore.release()
    with pytest.raises(NotHeld):
        leases[0].check()


@pytest.mark.ci
@either
async def test_the_cost_of_a_release(sync: Coordinator, share: bool) -> None:
    """By the time that the process needs: with 5,000 permits held as with 200."""

    async def cost(held: int, again: int) -> float:
        semaphore = AsyncSemaphore(sync, f"{held} permits, {again}", limit=100_000, ttl=600, share=share)
        for _ in range(held // 100):
            await asyncio.gather(*(semaphore.acquire() for _ in range(100)))
        for _ in range(300):
            await semaphore.acquire()
        begin = time.process_time()
        for _ in range(300):
            await semaphore.release()
        return time.process_time() - begin

    factors: list[float] = []
    while not factors or factors[-1] >= 4:  # the collector, or another process, may have taken the time
        assert len(factors) < 4, factors
        few = await cost(200, len(factors))
        factors.append(await cost(5_000, len(factors)) / few)
