"""P1: what an identity is granted and what is released of it, in the order in which the server executes both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from redis_sync_aio import (
    AsyncLock,
    AsyncReadWriteLock,
    AsyncRobustLock,
    AsyncSemaphore,
    Coordinator,
    Lease,
    LeaseLost,
    WouldDeadlock,
    wait_until,
)
from redis_sync_aio.types import Push

from ..conftest import MakeClient
from ..support.body import FAST, waits

NAME = "named"
ME: dict[str, Any] = {"identity": "me"}

MAKES: dict[str, Callable[[Coordinator], Any]] = {
    "lock": lambda sync: AsyncLock(sync, NAME),
    "lock with WATCH": lambda sync: AsyncLock(sync, NAME, engine="watch"),
    "robust lock": lambda sync: AsyncRobustLock(sync, NAME),
    "semaphore": lambda sync: AsyncSemaphore(sync, NAME, limit=1),
    "semaphore with WATCH": lambda sync: AsyncSemaphore(sync, NAME, limit=1, engine="watch"),
    "writer": lambda sync: AsyncReadWriteLock(sync, NAME).write(),
}
each = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


@pytest_asyncio.fixture(params=["auto", "never"])
async def sync(request: pytest.FixtureRequest, make_client: MakeClient) -> AsyncIterator[Coordinator]:
    push: Push = request.param
    async with Coordinator(make_client(), push=push) as coordinator:
        yield coordinator


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def waiting(rival: Any) -> Callable[[], Awaitable[bool]]:
    """Return whether the rival is in the queue; a side of a read/write lock has no statistics of its own."""
    return waits(AsyncReadWriteLock(rival._source, NAME) if rival.name and not hasattr(rival, "statistics") else rival)


@each
@pytest.mark.parametrize("number", range(6))
async def test_p1_asked_before_a_release_and_answered_behind_it(
    sync: Coordinator, other: Coordinator, make: Callable[[Coordinator], Any], number: int
) -> None:
    """The request was sent first, so the server let it join what the release behind it gave to somebody else."""
    lock, rival = make(sync), make(other)
    first = await lock.acquire(**ME)
    their = asyncio.create_task(rival.acquire())
    await wait_until(waiting(rival), FAST, timeout=5)
    mine = asyncio.create_task(lock.acquire(**ME))
    await turns(number)
    await first.release()
    holder: Lease = await asyncio.wait_for(their, 5)
    await turns(3)
    if mine.done():  # it had it before the release, and so it ended with that; a robust lock's was still adopting
        assert isinstance(mine.exception(), LeaseLost) or mine.result().lost
        await holder.release()
        return
    holder.check()
    await holder.release()
    second: Lease = await asyncio.wait_for(mine, 5)
    assert second.fence > holder.fence
    second.check()
    await second.release()


@each
async def test_p1_tried_before_a_release_and_answered_behind_it(
    sync: Coordinator, other: Coordinator, make: Callable[[Coordinator], Any]
) -> None:
    """A request that does not wait finds that it is taken."""
    lock, rival = make(sync), make(other)
    first = await lock.acquire(**ME)
    their = asyncio.create_task(rival.acquire())
    await wait_until(waiting(rival), FAST, timeout=5)
    mine = asyncio.create_task(lock.try_acquire(**ME))
    await asyncio.sleep(0)
    await first.release()
    assert await asyncio.wait_for(mine, 5) is None
    holder: Lease = await their
    holder.check()
    await holder.release()


@each
async def test_p1_asked_before_a_release_from_elsewhere(
    sync: Coordinator, other: Coordinator, make_client: MakeClient, make: Callable[[Coordinator], Any]
) -> None:
    """What another process acquired for the identity is released by this one, which is joining it."""
    lock, rival = make(sync), make(other)
    async with Coordinator(make_client()) as third:
        await make(third).acquire(**ME)
        their = asyncio.create_task(rival.acquire())
        await wait_until(waiting(rival), FAST, timeout=5)
        mine = asyncio.create_task(lock.acquire(**ME))
        await asyncio.sleep(0)
        await lock.release(**ME)
        holder: Lease = await asyncio.wait_for(their, 5)
        await turns(3)
        assert not mine.done()
        holder.check()
        await holder.release()
        second: Lease = await asyncio.wait_for(mine, 5)
        assert second.fence > holder.fence
        await second.release()


async def test_p1_asked_for_the_writer_before_a_downgrade(sync: Coordinator, other: Coordinator) -> None:
    """The identity reads by the time of the answer: to write it would wait for itself."""
    rw, rival = AsyncReadWriteLock(sync, NAME), AsyncReadWriteLock(other, NAME)
    writer = await rw.write().acquire(**ME)
    again = asyncio.create_task(rw.write().acquire(**ME))
    await asyncio.sleep(0)
    await rw.downgrade(writer)
    async with rival.read().acquire(timeout=5):
        with pytest.raises(WouldDeadlock):
            await asyncio.wait_for(again, 5)
    await writer.release()


async def test_p5_a_release_by_identity_that_is_cancelled_goes_on(sync: Coordinator, other: Coordinator) -> None:
    """And requests of this identity are believed again, once it was answered."""
    lock, rival = AsyncLock(sync, NAME), AsyncLock(other, NAME)
    await rival.acquire(**ME)
    mine = asyncio.create_task(lock.acquire(**ME))  # so the name is known here
    await asyncio.sleep(0)
    releasing = asyncio.create_task(lock.release(**ME))
    await asyncio.sleep(0)
    releasing.cancel()
    await asyncio.gather(releasing, return_exceptions=True)
    second: Lease = await asyncio.wait_for(mine, 5)
    third: Lease = await asyncio.wait_for(lock.acquire(**ME), 5)
    assert third.fence == second.fence
    third.check()
    await third.release()


MANY = 8000


@pytest.mark.ci
@pytest.mark.parametrize("one_name", [False, True])
async def test_p9_a_release_of_an_identity_costs_the_same_however_many_there_are(
    other: Coordinator, one_name: bool
) -> None:
    """By the time that the process needs, against the same without identities."""
    sync = other

    def primitive(number: int) -> AsyncSemaphore:
        return AsyncSemaphore(sync, "one" if one_name else f"name {number}", limit=2 * MANY)

    async def work(identity: str | None) -> float:
        leases = []
        for begin in range(0, MANY, 1000):
            some = (
                primitive(number).acquire(identity=identity and f"{identity}{number}")
                for number in range(begin, begin + 1000)
            )
            leases += await asyncio.gather(*some)
        before = time.process_time()
        await asyncio.gather(*(lease.release() for lease in leases))
        return time.process_time() - before

    await work(None)
    # The best of three, as the time of one may have a collection of the garbage in it.
    without = min([await work(None) for _ in range(3)])
    assert min([await work(f"w{number} ") for number in range(3)]) < 3 * without
