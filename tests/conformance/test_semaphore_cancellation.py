"""P5: cancelled requests for several permits leave none behind, and keep nobody out (FAULTS B1, B2, B6).

The sweeps of test_cancellation.py run for a semaphore of one permit. Here weights meet: who is cancelled may be the
head that the others wait for, and one release may grant somebody who is cancelled in the same turn of the loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from redis_sync_aio import AcquireTimeout, AsyncSemaphore, Backoff, Coordinator, Lease, Unreachable, wait_until

from ..support.body import FAST, waits
from ..support.inside import hub_of
from ..support.sweep import Outcome, sweep
from ..support.timed import Timed

NAME = "permits"
LIMIT = 5
FEWEST, ENOUGH = 5, 30
"""So many cancellations each test makes: at the points where it is suspended, and after turns of the loop."""


@pytest.fixture(params=["link", "polling", "cluster"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Arena:
    """A semaphore whose permits may be held, and what must be true after every cancelled operation."""

    def __init__(self, sync: Coordinator, other: Coordinator) -> None:
        self.sem = AsyncSemaphore(sync, NAME, limit=LIMIT)
        self.theirs = AsyncSemaphore(other, NAME, limit=LIMIT)
        self.helpers: list[asyncio.Task[None]] = []

    async def hold(self, *weights: int) -> None:
        """Somebody else holds these, and lets them go one after the other as soon as somebody waits."""
        leases = [await self.theirs.acquire(weight=weight, timeout=5) for weight in weights]
        self.helpers.append(asyncio.create_task(self._let_go(leases)))

    async def _let_go(self, leases: list[Lease]) -> None:
        await wait_until(self._somebody_waits, Backoff(initial=0.001, cap=0.002), timeout=5)
        for lease in leases:
            await lease.release()

    async def _somebody_waits(self) -> bool:
        return (await self.theirs.statistics()).waiting > 0

    async def finish(self) -> None:
        """End what the operation started, whichever task was cancelled; then everything is free."""
        for helper in self.helpers:
            helper.cancel()
        await asyncio.gather(*self.helpers, return_exceptions=True)
        self.helpers.clear()
        for sem in (self.sem, self.theirs):
            for lease in list(sem._resource().leases):
                await lease.release()
            sem._resource().forget_if_idle()
        await self.check_free()

    async def check_free(self) -> None:
        """All of it can be had: by this process in order, and by others when what was sent has arrived."""
        for sem in (self.sem, self.theirs):
            await (await sem.acquire(weight=LIMIT, timeout=5)).release()
        found = await self.theirs.statistics()
        assert (found.held, found.waiting, found.holders) == (0, 0, ()), found


async def weighted(arena: Arena) -> None:
    async with arena.sem.acquire(weight=3) as lease:
        await lease.extend(20)


async def several(arena: Arena) -> None:
    async with arena.sem.acquire(weight=2), arena.sem.acquire(weight=3):
        assert await arena.sem.try_acquire() is None


async def weighted_by_hand_over(arena: Arena) -> None:
    """It gets them from the second release: the first one frees too few."""
    await arena.hold(2, 3)
    async with arena.sem.acquire(weight=4, timeout=20):
        await asyncio.sleep(0)


async def by_identity_and_hand_over(arena: Arena) -> None:
    await arena.hold(5)
    async with arena.sem.acquire(weight=2, identity="worker-7"):
        await arena.sem.acquire(weight=1, identity="worker-7")


async def resized(arena: Arena) -> None:
    await arena.sem.resize(LIMIT)
    await arena.sem.get_limit()


OPERATIONS: dict[str, Callable[[Arena], Awaitable[None]]] = {
    operation.__name__: operation
    for operation in (
        weighted,
        several,
        weighted_by_hand_over,
        by_identity_and_hand_over,
        resized,
    )
}


@pytest_asyncio.fixture
async def arena(sync: Coordinator, other: Coordinator) -> AsyncIterator[Arena]:
    arena = Arena(sync, other)
    await arena.check_free()  # connected: the sweeps are not about the first connection
    yield arena


async def run(operation: Callable[[Arena], Awaitable[None]], arena: Arena) -> None:
    await operation(arena)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
async def test_p5_cancelled_at_every_suspension_point(arena: Arena, name: str, twice: bool) -> None:
    async def check(outcome: Outcome[None]) -> None:
        await arena.finish()

    result = await sweep(lambda: run(OPERATIONS[name], arena), check, twice=twice)
    assert not result.swallowed
    assert sum(result.cancellations.values()) >= FEWEST


@pytest.mark.parametrize("name", OPERATIONS)
async def test_p5_cancelled_after_any_number_of_turns(arena: Arena, name: str) -> None:
    number = 0

    async def cancel_after(turns: int) -> bool:
        task = asyncio.create_task(run(OPERATIONS[name], arena))
        for _ in range(turns):
            await asyncio.sleep(0)
        cancelled = task.cancel()
        if cancelled:
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await task
        await arena.finish()
        return cancelled

    for turns in (*range(30), *range(30, 90, 10)):
        number += await cancel_after(turns)
    while number < ENOUGH:  # on a fast machine it is over after few turns
        number += await cancel_after(number % 4)


async def test_p5_b6_random_cancellations(sync: Coordinator, other: Coordinator, way: str) -> None:
    """P1, P5: requests of weights 1 to 5 that are cancelled or time out at random: none leaks a permit."""
    rounds = 60 if way == "link" else 15
    chance = random.Random(4711)
    used = entered = 0
    ended = {"cancelled": 0, "timed out": 0}
    sems = [AsyncSemaphore(one, NAME, limit=LIMIT, ttl=10) for one in (sync, other)]

    async def section(weight: int, timeout: float | None) -> None:
        nonlocal used, entered
        async with chance.choice(sems).acquire(weight=weight, timeout=timeout):
            used += weight
            entered += 1
            assert used <= LIMIT
            try:
                for _ in range(chance.randrange(3)):
                    await asyncio.sleep(0)
            finally:
                used -= weight

    async def contend() -> None:
        for _ in range(rounds):
            timeout = chance.random() * 0.01 if chance.random() < 0.3 else None
            task = asyncio.create_task(section(1 + chance.randrange(LIMIT), timeout))
            if chance.random() > 0.5:
                for _ in range(chance.randrange(25)):
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                ended["cancelled"] += 1
            elif (error := task.exception()) is not None:
                assert isinstance(error, (AcquireTimeout, Unreachable)), error  # the latter: before any answer
                ended["timed out"] += 1

    async with asyncio.timeout(100):
        await asyncio.gather(*(contend() for _ in range(20)))
    async with Timed() as took:
        for sem in sems:
            await (await sem.acquire(weight=LIMIT, timeout=2)).release()
    assert took.waited < 0.2
    found = await sems[0].statistics()
    assert (found.held, found.waiting) == (0, 0)
    assert ended["cancelled"] > 4 * rounds
    assert not hub_of(sync).acquisitions
    assert not hub_of(sync).resources
    print(f"\n{way}: {20 * rounds} acquires, {ended}, {entered} sections")


async def test_p5_the_head_that_others_wait_for_is_cancelled(sync: Coordinator, other: Coordinator) -> None:
    """P5, B2: some turns after the release that makes room for it: the request behind it does not wait forever."""
    sem, theirs = (AsyncSemaphore(one, NAME, limit=LIMIT) for one in (sync, other))
    granted = 0
    for turns in (*range(-5, 25), *range(25, 60, 5)):
        holder = await theirs.acquire(weight=2)
        heavy = asyncio.create_task(sem.acquire(weight=LIMIT))
        await wait_until(waits(theirs, 1), FAST, timeout=5)
        light = asyncio.create_task(theirs.acquire(weight=4))
        await wait_until(waits(theirs, 2), FAST, timeout=5)
        if turns < 0:
            heavy.cancel()
        for _ in range(-turns):
            await asyncio.sleep(0)
        release = asyncio.create_task(holder.release())
        for _ in range(turns):
            await asyncio.sleep(0)
        heavy.cancel()
        await asyncio.wait([heavy])
        if not heavy.cancelled():
            granted += 1
            await heavy.result().release()
        lease = await asyncio.wait_for(light, 15)
        await release
        assert (await theirs.statistics()).held == 4
        await lease.release()
    assert granted < 37
    assert await sem.acquire(weight=LIMIT, timeout=0)


@pytest.mark.parametrize("way", ["link"])
async def test_p5_a_batch_meets_cancellations(sync: Coordinator, other: Coordinator) -> None:
    """P5, B2: one release grants six; three of them are cancelled some turns after it: the next ones get theirs."""
    sem, theirs = (AsyncSemaphore(one, NAME, limit=6) for one in (sync, other))
    for turns in range(25):
        holder = await theirs.acquire(weight=6)
        tasks = [asyncio.create_task(sem.acquire()) for _ in range(6)]
        await wait_until(waits(theirs, 6), FAST, timeout=5)
        behind = [asyncio.create_task(theirs.acquire()) for _ in range(3)]
        await wait_until(waits(theirs, 9), FAST, timeout=5)
        release = asyncio.create_task(holder.release())
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.wait(tasks)
        kept = [task.result() for task in tasks if not task.cancelled()]
        for lease in kept[3:]:  # the grant came first
            await lease.release()
        async with asyncio.timeout(15):
            kept = kept[:3] + [await task for task in behind]
        await release
        assert (await theirs.statistics()).held == 6
        for lease in kept:
            lease.check()
            await lease.release()
    assert await sem.acquire(weight=6, timeout=0)


def test_p5_the_sweeps_inject_enough() -> None:
    """The bar is 300 cancellations."""
    ways = 2
    assert len(OPERATIONS) * ways * (2 * FEWEST + ENOUGH) >= 400
