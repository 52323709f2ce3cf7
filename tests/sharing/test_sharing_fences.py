"""P8 with local sharing: which fences rise in the order of the grants, and what holds for the others."""

from __future__ import annotations

import asyncio

import pytest

from redis_sync_aio import AsyncLock, AsyncReadWriteLock, AsyncSemaphore, Coordinator
from redis_sync_aio.types import WriteSide

NAME = "fences"


@pytest.mark.parametrize("linger", [0.0, 0.05])
@pytest.mark.parametrize("one", ["lock", "semaphore of one", "writer"])
async def test_p8_what_one_has_at_a_time_has_rising_fences(
    sync: Coordinator, other: Coordinator, one: str, linger: float
) -> None:
    """Two processes whose tasks hand it on, keep it, and lose it to the other one: as the guide to sharing says."""
    fences: list[int] = []

    def made(at: Coordinator) -> AsyncLock | AsyncSemaphore | WriteSide:
        if one == "lock":
            return AsyncLock(at, NAME, share=True, linger=linger)
        if one == "writer":
            return AsyncReadWriteLock(at, NAME, share=True, linger=linger).write()
        return AsyncSemaphore(at, NAME, limit=1, share=True, linger=linger)

    async def work(lock: AsyncLock | AsyncSemaphore | WriteSide) -> None:
        for number in range(30):
            async with lock.acquire() as lease:
                fences.append(lease.fence)
            if number % 5 == 0:
                await asyncio.sleep(0)

    await asyncio.gather(*(work(lock) for lock in (made(sync), made(other)) for _ in range(4)))
    assert len(fences) == 240
    assert fences == sorted(set(fences))


async def test_p8_what_holds_for_fences_of_several_permits(sync: Coordinator, other: Coordinator) -> None:
    """As the guide to sharing says: unique, rising for each permit, and above all others when the server grants."""
    here, there = [AsyncSemaphore(one, NAME, limit=3, share=True, linger=10) for one in (sync, other)]
    first = await here.acquire()
    second = await there.acquire()
    assert second.fence > first.fence
    await second.release()
    await first.release()  # both keep theirs
    third = await here.acquire()
    assert (third.token, third.fence > first.fence) == (first.token, True), "handed on, without a command"
    assert third.fence < second.fence, "by a range of its own"
    fourth = await here.acquire()  # this one is the server's
    assert fourth.fence > second.fence > third.fence
    await asyncio.gather(third.release(), fourth.release())
