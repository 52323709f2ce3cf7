"""A lease that nobody has any more is not renewed, and says so. A lease that may still be released is renewed."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import sys
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncReentrantLock,
    AsyncSemaphore,
    Backoff,
    Coordinator,
    wait_until,
)

from ..support.body import FAST, waits
from ..support.primitives import PRIMITIVES, Primitive, each
from .conftest import Make

TTL = 5.0
SECTION = 1.5 * TTL
OFTEN = Backoff(initial=0.05, cap=0.05)
everything = each(PRIMITIVES)
shared_or_not = pytest.mark.parametrize("share", [False, True])


class Noted:
    """Reads the warnings that were caught."""

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


# -- forgotten ---------------------------------------------------------------------------------------------


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


@everything
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("forgets", [acquires, enters, enters_an_acquisition, enters_its_lease, enters_by_a_stack])
async def test_a_forgotten_lease_ends_with_its_ttl(
    primitive: Primitive,
    make: Make,
    noted: Noted,
    caplog: pytest.LogCaptureFixture,
    forgets: Callable[[Any], Coroutine[Any, Any, None]],
) -> None:
    """Its task has ended, and nothing could release it: a ResourceWarning and a log line name it, and others get it.

    No garbage collection is needed for that: no cycle keeps it, whatever was entered and never left.
    """

    async def job() -> None:
        await forgets(make(ttl=TTL))

    with caplog.at_level(logging.WARNING, "redis_sync_aio"):
        await asyncio.create_task(job())
        await wait_until(lambda: "the lease on 'it" in "".join(noted.forgotten()), OFTEN, timeout=30)
    assert {record.message for record in caplog.records} >= set(noted.forgotten())
    async with asyncio.timeout(30):
        leases = [await make(ttl=TTL).acquire() for _ in range(1 if primitive.alone else 4)]
    for lease in leases:
        await lease.release()


@shared_or_not
@pytest.mark.usefixtures("no_collector")
async def test_a_lease_that_was_waited_for_needs_no_collector(
    sync: Coordinator, other: Coordinator, noted: Noted, share: bool
) -> None:
    """No cycle keeps it, of what reports long waits or of an error before: a collection may come much later."""
    blocker = await other.lock("waited-for").acquire()
    gave_up = asyncio.Event()

    async def job() -> None:
        lock = sync.lock("waited-for", ttl=TTL, share=share)
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
        await wait_until(lambda: "'waited-for' (fence " in "".join(noted.forgotten()), OFTEN, timeout=20)
        await wait_until(lambda: sync.statistics() == (), FAST, timeout=20)


@shared_or_not
async def test_a_lease_in_a_cycle_is_found_by_the_collector(sync: Coordinator, noted: Noted, share: bool) -> None:
    """As of an object that keeps its lease and its own callbacks."""

    class Worker:
        def __init__(self) -> None:
            self.me = self
            self.sem = AsyncSemaphore(sync, "it", limit=1, ttl=TTL, share=share)

        async def run(self) -> None:
            self.lease = await self.sem.acquire()

    async def work() -> None:
        await Worker().run()

    await asyncio.create_task(work())
    gc.collect()
    await wait_until(lambda: bool(noted.forgotten()), OFTEN, timeout=30)
    async with asyncio.timeout(30), AsyncSemaphore(sync, "it", limit=1):
        pass


# -- kept --------------------------------------------------------------------------------------------------


@everything
@pytest.mark.parametrize("keeps", ["the lease", "the primitive", "the task"])
async def test_a_lease_that_may_be_released_is_renewed(
    primitive: Primitive, make: Make, noted: Noted, keeps: str
) -> None:
    """It outlives its task if the lease is referred to, or the primitive, as by a fixture. Its own task suffices."""
    it = make(ttl=TTL)

    async def job() -> Any:
        return await it.acquire()

    lease: Any = await (job() if keeps == "the task" else asyncio.create_task(job()))
    if keeps == "the lease":
        del it
        await asyncio.sleep(SECTION)
        lease.check()
        await lease.release()
    else:
        del lease
        await asyncio.sleep(SECTION)
        await it.release()
    async with asyncio.timeout(20), make():
        pass
    assert not noted.forgotten()


async def test_a_lease_of_an_identity_or_of_an_owner_is_renewed(sync: Coordinator, noted: Noted) -> None:
    """Any task that knows the name releases it: no task has to live for that."""
    lock, reentrant = AsyncLock(sync, "it", ttl=TTL), AsyncReentrantLock(sync, "that", ttl=TTL)

    async def job() -> None:
        await lock.acquire(identity="worker-7")
        await reentrant.acquire(identity="request 7")

    await asyncio.create_task(job())
    await asyncio.sleep(SECTION)
    assert await lock.locked()
    assert await reentrant.locked()
    await lock.release(identity="worker-7")
    await reentrant.release(identity="request 7")
    assert not noted.forgotten()


# -- acquired by a task of its own -------------------------------------------------------------------------
# `asyncio.wait_for` makes such a task until Python 3.11; `asyncio.gather` and others always do. The lease is often
# dropped, as with `asyncio.Lock`: the section ends by a ``release()`` of the lock. Until then it is renewed.

Acquire = Callable[[], Coroutine[Any, Any, Any]]


async def wait_for(acquire: Acquire) -> None:
    await asyncio.wait_for(acquire(), 30)


async def gather(acquire: Acquire) -> None:
    await asyncio.gather(acquire(), asyncio.sleep(0))


async def create_task(acquire: Acquire) -> None:
    await asyncio.create_task(acquire())


async def shield(acquire: Acquire) -> None:
    await asyncio.shield(acquire())


async def wait(acquire: Acquire) -> None:
    await asyncio.wait([asyncio.ensure_future(acquire())])


async def as_completed(acquire: Acquire) -> None:
    for first in asyncio.as_completed([acquire()]):
        await first


async def task_group(acquire: Acquire) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(acquire())


async def partial(acquire: Acquire) -> None:
    await asyncio.gather(functools.partial(acquire)())


async def from_another_thread(acquire: Acquire) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(acquire(), loop).result(30))


async def eager(acquire: Acquire) -> None:
    if sys.version_info >= (3, 12):
        await asyncio.Task(acquire(), loop=asyncio.get_running_loop(), eager_start=True)
    else:
        await create_task(acquire)


ROOTS = [wait_for, gather, create_task, shield, wait, as_completed, task_group, partial, from_another_thread, eager]
"""Ways to let the acquire be a task: it has nothing else to do, and the lease is its result."""


async def helper(acquire: Acquire) -> None:
    async def enter() -> None:
        await acquire()

    await asyncio.create_task(enter())


async def anyio_group(acquire: Acquire) -> None:
    async def start() -> None:  # older versions start native coroutines only
        await acquire()

    async with anyio.create_task_group() as group:
        group.start_soon(start)


async def anyio_thread(acquire: Acquire) -> None:
    await anyio.to_thread.run_sync(lambda: anyio.from_thread.run(acquire))


async def fixture(acquire: Acquire) -> None:
    async def generator() -> AsyncGenerator[None, None]:
        await acquire()
        yield

    steps = generator()

    async def setup() -> None:
        await anext(steps)

    await asyncio.create_task(setup())
    await steps.aclose()


INSIDE = [helper, anyio_group, anyio_thread, fixture]
"""Ways to let another task acquire, among other things."""
Wrap = Callable[[Acquire], Awaitable[None]]


@everything
async def test_a_lease_from_a_wrapped_acquire_is_renewed_until_the_lock_releases_it(
    primitive: Primitive, make: Make
) -> None:
    """Whatever wraps it, while the object is kept."""
    made = [(wrap, make(name=wrap.__name__, ttl=TTL)) for wrap in (*ROOTS, *INSIDE)]
    for wrap, it in made:
        await wrap(it.acquire)
    await asyncio.sleep(SECTION)
    for _, it in made:
        await it.release()


@everything
async def test_a_lease_that_is_the_result_of_a_task_is_renewed_until_any_object_of_its_name_releases_it(
    primitive: Primitive, make: Make
) -> None:
    """`wait_for(sync.lock(name).acquire(), 5)` ... `sync.lock(name).release()`; and of `try_acquire`."""
    ways: list[tuple[Wrap, str]] = [*((wrap, "acquire") for wrap in ROOTS), (gather, "try_acquire")]
    for wrap, how in ways:

        def acquire(wrap: Wrap = wrap, how: str = how) -> Any:
            return getattr(make(name=f"{wrap.__name__} {how}", ttl=TTL), how)()

        await wrap(acquire)
    await asyncio.sleep(SECTION)
    for wrap, how in ways:
        await make(name=f"{wrap.__name__} {how}").release()
