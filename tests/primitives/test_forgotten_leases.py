"""A lease that nobody has any more is not renewed, and says so."""

from __future__ import annotations

import asyncio
import gc
import logging
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

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

TTL = 1.0
OFTEN = Backoff(initial=0.05, cap=0.05)
"""For `wait_until`: a collection takes its time."""


class Noted:
    """Reads what was caught."""

    def __init__(self, caught: list[warnings.WarningMessage]) -> None:
        self._caught = caught

    def forgotten(self) -> list[str]:
        """Return the texts about forgotten leases."""
        return [
            str(one.message)
            for one in self._caught
            if one.category is ResourceWarning and "was forgotten" in str(one.message)
        ]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """A process that never collects garbage."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


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


async def acquires(it: Any) -> None:
    await it.acquire()


async def enters(it: Any) -> None:
    await it.__aenter__()


async def enters_an_acquisition(it: Any) -> None:
    await it.acquire().__aenter__()


async def enters_its_lease(it: Any) -> None:
    lease = await it.acquire()
    await lease.__aenter__()


async def enters_by_a_stack(it: Any) -> None:
    stack = AsyncExitStack()
    await stack.enter_async_context(it.acquire())


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("forgets", [acquires, enters, enters_an_acquisition, enters_its_lease, enters_by_a_stack])
async def test_a_forgotten_lease_ends_with_its_ttl(
    everywhere: Everywhere,
    noted: Noted,
    caplog: pytest.LogCaptureFixture,
    forgets: Callable[[Any], Coroutine[Any, Any, None]],
) -> None:
    """Its task has ended, and nothing could release it: a ResourceWarning and a log line name it, and others get it.

    No garbage collection is needed for that: no cycle keeps it, whatever was entered and never left.
    """

    async def forget(_: Primitive, make: Make) -> None:
        async def job() -> None:
            await forgets(make(ttl=TTL))

        await asyncio.create_task(job())

    async def get(primitive: Primitive, make: Make) -> None:
        async with asyncio.timeout(30):
            leases = [await make(ttl=TTL).acquire() for _ in range(1 if primitive.alone else 4)]
        for lease in leases:
            await lease.release()

    def all_told() -> bool:
        told = "".join(noted.forgotten())
        return all(f"the lease on '{primitive.label}" in told for primitive in PRIMITIVES)

    with caplog.at_level(logging.WARNING, "redis_sync_aio"):
        await everywhere(forget)
        await wait_until(all_told, OFTEN, timeout=30)
    assert {record.message for record in caplog.records} >= set(noted.forgotten())
    await everywhere(get)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("share", [False, True])
async def test_a_lease_that_was_waited_for_needs_no_collector(
    sync: Coordinator, other: Coordinator, noted: Noted, share: bool
) -> None:
    """No cycle keeps it, of what reports long waits or of an error before: a collection may come much later."""
    blocker = await other.lock("waited-for").acquire()
    gave_up = asyncio.Event()

    async def job() -> None:
        lock = sync.lock("waited-for", ttl=5 * TTL, share=share)
        with suppress(AcquireTimeout):
            await lock.acquire(timeout=0.01)
        gave_up.set()
        lease = await lock.acquire()
        assert lease.fence > blocker.fence

    async with asyncio.timeout(60):
        task = asyncio.create_task(job())
        await gave_up.wait()
        await wait_until(waits(other.lock("waited-for")), FAST, timeout=20)
        await blocker.release()
        await task
        del task
        await wait_until(lambda: "'waited-for' (fence " in "".join(noted.forgotten()), FAST, timeout=20)
        await wait_until(lambda: sync.statistics() == (), FAST, timeout=20)


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

    class Worker:
        def __init__(self) -> None:
            self.me = self
            self.sem = AsyncSemaphore(sync, "it", limit=1, ttl=3 * TTL, share=share)  # a collection may take long

        async def run(self) -> None:
            self.lease = await self.sem.acquire()

    async def work() -> None:
        await Worker().run()

    def told() -> bool:
        gc.collect()
        return bool(noted.forgotten())

    await asyncio.create_task(work())
    await wait_until(told, OFTEN, timeout=30)
    async with asyncio.timeout(30), AsyncSemaphore(sync, "it", limit=1):
        pass


async def test_the_lease_of_an_ended_task_is_renewed_while_its_primitive_may_release_it(
    everywhere: Everywhere, noted: Noted
) -> None:
    """As in a fixture: what begins a test runs in one task, what ends it in another, and both know the lock."""

    async def check(primitive: Primitive, make: Make) -> None:
        it = make(ttl=TTL)

        async def begin() -> None:
            await it.acquire()

        await asyncio.create_task(begin())
        await asyncio.sleep(2.5 * TTL)
        await it.release()
        async with asyncio.timeout(20), make():
            pass

    await everywhere(check)
    assert not noted.forgotten()


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
