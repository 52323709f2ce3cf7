"""P9, F12: very many leases, waiters or permits of a process do not block its loop, and cost nothing while not due."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncReadWriteLock, AsyncSemaphore, Coordinator, Lease, NotHeld, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed

from ..support.body import FAST
from ..support.callbacks import callbacks
from ..support.inspecting import calls

MANY = 20_000
AT_ONCE = 100
LONGEST = 0.06
"""Seconds of CPU. A slice takes 5 to 15 milliseconds; work on all of them took 0.1 at least, in one callback."""
either = pytest.mark.parametrize("share", [False, True])


# -- leases and waiters ------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def admin(caplog: pytest.LogCaptureFixture) -> AsyncIterator[tuple[EmbeddedServer, Redis]]:
    """A server of its own, the number of whose scripts counts, and a client of it."""
    caplog.set_level("ERROR", "redis_sync_aio")
    async with EmbeddedServer(port=0) as server, server.client() as client:
        yield server, client


async def ran(client: Redis, number: int) -> None:
    async def condition() -> bool:
        return await calls(client, "evalsha") >= number

    await wait_until(condition, FAST, timeout=300)


async def cut(client: Redis, coordinator: Coordinator) -> None:
    """Cut the connection of ``coordinator``; return when the next one has carried a script for each of many."""
    before, connections = await calls(client, "evalsha"), coordinator.connections
    await client.client_kill_filter(_type="pubsub")
    await wait_until(lambda: coordinator.connections > connections, FAST, timeout=300)
    await ran(client, before + MANY)


@asynccontextmanager
async def held(client: Redis, ttl: float) -> AsyncIterator[tuple[Coordinator, list[Lease]]]:
    """Hold very many leases, each by its own name."""
    leases: list[Lease] = []
    coordinator = Coordinator(client)
    over = asyncio.Event()
    numbers = iter(range(MANY))

    async def hold() -> None:
        for number in numbers:
            leases.append(await AsyncLock(coordinator, f"many:{number}", ttl=ttl).acquire())
        await over.wait()  # a lease is that of its task

    holders = [asyncio.create_task(hold()) for _ in range(AT_ONCE)]
    await wait_until(lambda: len(leases) == MANY, FAST, timeout=300)
    try:
        yield coordinator, leases
    finally:
        await coordinator.aclose()
        over.set()
        await asyncio.gather(*holders)


@asynccontextmanager
async def queued(client: Redis, aside: Redis) -> AsyncIterator[tuple[Coordinator, list[Lease]]]:
    """Wait by very many tasks, for some names."""
    coordinator = Coordinator(client)
    async with Coordinator(aside) as other:
        names = [f"waited:{number}" for number in range(20)]
        theirs = [await AsyncLock(other, name, ttl=300).acquire() for name in names]

        async def wait(number: int) -> None:
            with pytest.raises(CoordinatorClosed):
                await AsyncLock(coordinator, names[number % len(names)]).acquire()

        before = await calls(aside, "evalsha")
        waiting = []
        for number in range(MANY):
            waiting.append(asyncio.create_task(wait(number)))
            if number % 20 == 0:
                await asyncio.sleep(0)
        await ran(aside, before + MANY)
        yield coordinator, theirs
        await coordinator.aclose()
        await asyncio.gather(*waiting)


@pytest.mark.ci
@pytest.mark.real
@pytest.mark.parametrize("what", ["leases", "waiters"])
async def test_no_callback_works_on_all(admin: tuple[EmbeddedServer, Redis], what: str) -> None:
    """Renewals, the look at all after a reconnect, and the end of the coordinator are done in slices."""
    server, aside = admin
    async with server.client() as client:
        many: Any = held(client, ttl=30) if what == "leases" else queued(client, aside)
        async with many as (coordinator, leases):
            with callbacks() as renewing:
                if what == "leases":
                    await ran(aside, await calls(aside, "evalsha") + MANY)
            with callbacks() as reconnecting:
                await cut(aside, coordinator)
            assert not any(lease.lost for lease in leases)
            with callbacks() as closing:
                await coordinator.aclose()
    for phase in (renewing, reconnecting, closing):
        assert phase.longest < LONGEST, phase.which


@pytest.mark.ci
@pytest.mark.real
async def test_leases_that_are_not_due_cost_nothing(admin: tuple[EmbeddedServer, Redis]) -> None:
    """One lease among them is renewed each second: a look at all of them each time would take CPU time."""
    server, _ = admin
    async with server.client() as client, held(client, ttl=600) as (coordinator, _):
        with callbacks() as found:
            cpu, begun = found.clock(), time.monotonic()
            async with AsyncLock(coordinator, "short", ttl=3) as lease:
                await asyncio.sleep(5)
                lease.check()
            share = (found.clock() - cpu) / (time.monotonic() - begun)
    assert share < 0.1


# -- permits -----------------------------------------------------------------------------------------------


@either
async def test_release_gives_back_the_latest_lease_of_the_task_among_many(sync: Coordinator, share: bool) -> None:
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

    others = [asyncio.create_task(another()) for _ in range(100)]
    first, second = await semaphore.acquire(), await semaphore.acquire()
    await wait_until(lambda: taken == len(others), FAST, timeout=20)
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


async def test_the_read_side_gives_back_the_lease_of_its_task_among_many_readers(sync: Coordinator) -> None:
    """Though all readers have one permit."""
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


@pytest.mark.ci
@pytest.mark.real
@either
async def test_the_cost_of_a_release(sync: Coordinator, share: bool) -> None:
    """By the CPU time of the process: with 5,000 permits held as with 200."""

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
    while not factors or factors[-1] >= 4:  # the collector may have taken the time
        assert len(factors) < 4, factors
        few = await cost(200, len(factors))
        factors.append(await cost(5_000, len(factors)) / few)
