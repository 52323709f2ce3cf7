"""FAULTS F12: very many leases or waiters do not stall the event loop, and cost nothing while they are not due."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, Coordinator, Lease, LeaseLost, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed

from ..support.body import FAST
from ..support.callbacks import callbacks

MANY = 20_000
AT_ONCE = 100
LONGEST = 0.06
"""Seconds. A slice takes 5 to 15 milliseconds; work on all of them took 0.1 at least, in one callback."""


async def each(what: Callable[[int], Awaitable[object]]) -> None:
    """Do ``what`` `MANY` times, by some tasks."""
    numbers = iter(range(MANY))

    async def some() -> None:
        for number in numbers:
            await what(number)

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))


async def scripts(client: Redis) -> int:
    """Return how many scripts the server has run."""
    return int((await client.info("commandstats"))["cmdstat_evalsha"]["calls"])


async def cut(client: Redis, coordinator: Coordinator) -> None:
    """Cut the connection of ``coordinator``; return when the next one has carried a script for each of many."""
    before, connections = await scripts(client), coordinator.connections
    await client.client_kill_filter(_type="pubsub")

    async def all_have_asked() -> bool:
        return coordinator.connections > connections and await scripts(client) >= before + MANY

    await wait_until(all_have_asked, FAST, timeout=60)


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
    await wait_until(lambda: len(leases) == MANY, FAST, timeout=60)
    try:
        yield coordinator, leases
    finally:
        await coordinator.aclose()
        over.set()
        await asyncio.gather(*holders)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    """A server of its own: the number of its scripts counts."""
    async with EmbeddedServer(port=0) as server:
        yield server


@pytest.mark.ci
@pytest.mark.real
async def test_no_callback_works_on_all_leases(server: EmbeddedServer, caplog: pytest.LogCaptureFixture) -> None:
    """Renewals, the look at them after a reconnect, and the end of the coordinator are done in slices."""
    caplog.set_level("ERROR", "redis_sync_aio")
    async with server.client() as client, server.client() as aside, held(client, ttl=30) as (coordinator, leases):
        with callbacks() as renewing:
            before = await scripts(aside)
            await wait_until(lambda: _ran(aside, before + MANY), FAST, timeout=60)
        with callbacks() as reconnecting:
            await cut(aside, coordinator)
        assert not any(lease.lost for lease in leases)
        with callbacks() as closing:
            await coordinator.aclose()
    for phase in (renewing, reconnecting, closing):
        assert phase.longest < LONGEST, phase.which


async def _ran(client: Redis, number: int) -> bool:
    return await scripts(client) >= number


@pytest.mark.ci
@pytest.mark.real
async def test_leases_that_are_not_due_cost_nothing(server: EmbeddedServer, caplog: pytest.LogCaptureFixture) -> None:
    """One lease among them is renewed thirty times a second: a look at all of them each time would take CPU time."""
    caplog.set_level("ERROR", "redis_sync_aio")
    async with server.client() as client, held(client, ttl=600) as (coordinator, _):
        lock = AsyncLock(coordinator, "short", ttl=0.1)
        with callbacks() as found:
            cpu, begun = found.clock(), time.monotonic()
            while time.monotonic() - begun < 3:
                with suppress(LeaseLost):  # the machine may have stopped us
                    async with lock.acquire():
                        await asyncio.sleep(0.5)
            share = (found.clock() - cpu) / (time.monotonic() - begun)
    assert share < 0.1


@pytest.mark.ci
@pytest.mark.real
async def test_no_callback_works_on_all_waiters(server: EmbeddedServer, caplog: pytest.LogCaptureFixture) -> None:
    """The look after a reconnect at where they stand, and the end of all waits, are done in slices."""
    caplog.set_level("ERROR", "redis_sync_aio")
    async with server.client() as client, server.client() as aside, Coordinator(aside) as other:
        names = [f"waited:{number}" for number in range(20)]
        theirs = [await AsyncLock(other, name, ttl=300).acquire() for name in names]
        coordinator = Coordinator(client)
        ended = 0

        async def wait(number: int) -> None:
            nonlocal ended
            with pytest.raises(CoordinatorClosed):
                await AsyncLock(coordinator, names[number % len(names)]).acquire()
            ended += 1

        before = await scripts(aside)
        waiting = []
        for number in range(MANY):
            waiting.append(asyncio.create_task(wait(number)))
            if number % 20 == 0:
                await asyncio.sleep(0)
        await wait_until(lambda: _ran(aside, before + MANY), FAST, timeout=60)
        with callbacks() as reconnecting:
            await cut(aside, coordinator)
        with callbacks() as closing:
            await coordinator.aclose()
            for task in waiting:
                await task
        assert ended == MANY
        for lease in theirs:
            await lease.release()
    for phase in (reconnecting, closing):
        assert phase.longest < LONGEST, phase.which
