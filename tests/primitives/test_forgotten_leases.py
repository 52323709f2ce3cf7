"""A lease that nobody has any more is not renewed, and says so."""

from __future__ import annotations

import asyncio
import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import suppress

import pytest

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncReentrantLock,
    AsyncSemaphore,
    Backoff,
    Coordinator,
    Lease,
    wait_until,
)

from ..support.body import FAST, waits
from .conftest import PRIMITIVES, Everywhere, Make, Primitive

pytestmark = pytest.mark.timing

TTL = 1.0
OFTEN = Backoff(initial=0.05, cap=0.05)
"""For `wait_until`: a collection takes its time."""


class Noted:
    """Reads what was caught."""

    def __init__(self, caught: list[warnings.WarningMessage]) -> None:
        self._caught = caught

    def forgotten(self) -> list[str]:
        """Return the texts about forgotten leases, after a collection: a cycle may keep them."""
        gc.collect()
        return [
            str(one.message)
            for one in self._caught
            if one.category is ResourceWarning and "was forgotten" in str(one.message)
        ]


@pytest.fixture
def noted() -> Iterator[Noted]:
    """The warnings of a test."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield Noted(caught)


async def ended(make: Make, keep: list[Lease] | None = None) -> None:
    """Acquire in a task that ends by an error, without a release."""

    async def job() -> None:
        lease = await make(ttl=TTL).acquire()
        if keep is not None:
            keep.append(lease)
        raise RuntimeError("it forgets")

    task = asyncio.create_task(job())
    await asyncio.wait([task])
    assert isinstance(task.exception(), RuntimeError)


async def test_a_forgotten_lease_ends_with_its_ttl(
    everywhere: Everywhere, noted: Noted, caplog: pytest.LogCaptureFixture
) -> None:
    """Its task has ended and nothing refers to it: a ResourceWarning and a log line name it, and others get it."""

    async def forget(_: Primitive, make: Make) -> None:
        await ended(make)

    async def get(primitive: Primitive, make: Make) -> None:
        async with asyncio.timeout(30):
            leases = [await make(ttl=TTL).acquire() for _ in range(1 if primitive.alone else 4)]
        for lease in leases:
            await lease.release()

    def all_told() -> bool:
        told = "".join(noted.forgotten())
        return all(f"'{primitive.label}' (fence " in told for primitive in PRIMITIVES)

    with caplog.at_level(logging.WARNING, "redis_sync_aio"):
        await everywhere(forget)
        await wait_until(all_told, OFTEN, timeout=30)
    assert {record.message for record in caplog.records} >= set(noted.forgotten())
    await everywhere(get)


@pytest.mark.parametrize("share", [False, True])
async def test_a_lease_that_was_waited_for_needs_no_collector(
    sync: Coordinator, other: Coordinator, noted: Noted, share: bool
) -> None:
    """No cycle keeps it, of what reports long waits or of an error before: a collection may come much later."""
    lock, blocker = sync.lock("waited-for", ttl=5 * TTL, share=share), await other.lock("waited-for").acquire()
    gave_up = asyncio.Event()

    async def job() -> None:
        with suppress(AcquireTimeout):
            await lock.acquire(timeout=0.01)
        gave_up.set()
        lease = await lock.acquire()
        assert lease.fence > blocker.fence

    gc.disable()
    try:
        async with asyncio.timeout(60):
            task = asyncio.create_task(job())
            await gave_up.wait()
            await wait_until(waits(lock), FAST, timeout=20)
            await blocker.release()
            await task
            del task
            await wait_until(lambda: not sync.statistics().held, FAST, timeout=20)
    finally:
        gc.enable()
    await wait_until(lambda: "'waited-for' (fence " in "".join(noted.forgotten()), FAST, timeout=20)


async def test_a_lease_that_somebody_refers_to_outlives_its_task(everywhere: Everywhere, noted: Noted) -> None:
    """It is renewed, and released as any other; then it may go unnoticed."""

    async def check(primitive: Primitive, make: Make) -> None:
        kept: list[Lease] = []
        await ended(make, kept)
        await asyncio.sleep(1.5 * TTL)
        kept[0].check()
        await kept[0].release()
        kept.clear()
        async with asyncio.timeout(5), make():
            pass

    await everywhere(check)
    assert not noted.forgotten()


async def test_a_living_task_need_not_keep_its_lease(everywhere: Everywhere, noted: Noted) -> None:
    """`await lock.acquire()` … `await lock.release()`: it is renewed meanwhile."""

    async def check(primitive: Primitive, make: Make) -> None:
        it = make(ttl=TTL)
        await it.acquire()
        await asyncio.sleep(1.5 * TTL)
        await it.release()

    await everywhere(check)
    assert not noted.forgotten()


@pytest.mark.parametrize("share", [False, True])
async def test_a_lease_in_a_cycle_is_found_by_the_collector(sync: Coordinator, noted: Noted, share: bool) -> None:
    """As of an object that keeps its lease and its own callbacks."""
    sem = AsyncSemaphore(sync, "it", limit=1, ttl=3 * TTL, share=share)  # a collection may take long

    class Worker:
        def __init__(self) -> None:
            self.me = self

        async def run(self) -> None:
            self.lease = await sem.acquire()

    async def work() -> None:
        await Worker().run()

    await asyncio.create_task(work())
    await wait_until(noted.forgotten, OFTEN, timeout=30)
    async with asyncio.timeout(30), sem:
        pass


async def test_a_lease_of_an_identity_or_of_an_owner_goes_on(sync: Coordinator, noted: Noted) -> None:
    """Any task that knows the name releases it: no task has to live for that."""
    lock, reentrant = AsyncLock(sync, "it", ttl=TTL), AsyncReentrantLock(sync, "that", ttl=TTL)

    async def job() -> None:
        await lock.acquire(identity="worker-7")
        await reentrant.acquire(identity="request 7")

    await asyncio.create_task(job())
    await asyncio.sleep(1.5 * TTL)
    assert await lock.locked()
    assert await reentrant.locked()
    await lock.release(identity="worker-7")
    await reentrant.release(identity="request 7")
    assert not noted.forgotten()
