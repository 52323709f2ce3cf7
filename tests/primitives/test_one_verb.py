"""One verb: what ``acquire()`` and ``try_acquire()`` return is awaited or entered, once, wherever a coroutine goes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version
from typing import Any

import anyio
import pytest

from redis_sync_aio import AsyncSemaphore, Coordinator, Lease, NotHeld

MAKERS: Mapping[str, Callable[[Coordinator], Any]] = {
    "lock": lambda sync: sync.lock("verb"),
    "shared lock": lambda sync: sync.lock("verb", share=True),
    "semaphore": lambda sync: sync.semaphore("verb", 1),
    "readers": lambda sync: sync.read_write_lock("verb").read(),
    "writer": lambda sync: sync.read_write_lock("verb").write(),
    "reentrant lock": lambda sync: sync.reentrant_lock("verb"),
    "multi-lock": lambda sync: sync.multi_lock(["verb", "noun"]),
    "robust lock": lambda sync: sync.robust_lock("verb"),
}


_ANYIO_TAKES_IT = tuple(map(int, version("anyio").split(".")[:2])) >= (4, 14)


@pytest.fixture(params=MAKERS)
def it(request: pytest.FixtureRequest, sync: Coordinator) -> Any:
    return MAKERS[request.param](sync)


async def test_the_five_forms(it: Any) -> None:
    """Each primitive that is acquired has all of them; a body releases at its end."""
    async with it as lease:
        lease.check()
    async with it.acquire(timeout=5) as lease:
        lease.check()
    async with it.try_acquire() as lease:
        lease.check()
    for acquire in (lambda: it.acquire(timeout=5), it.try_acquire):
        acquired = await acquire()
        acquired.check()
        await acquired.release()
        with pytest.raises(NotHeld):
            acquired.check()


async def test_a_body_without_a_lease_gets_none(sync: Coordinator, other: Coordinator) -> None:
    """The end of such a body releases nothing, and its error propagates."""
    async with other.lock("verb"):
        async with sync.lock("verb").try_acquire() as lease:
            assert lease is None
        with pytest.raises(KeyError):
            async with sync.lock("verb").try_acquire() as lease:
                raise KeyError
        assert await other.lock("verb").locked()


TASKS: Mapping[str, Callable[[Any], Awaitable[Lease]]] = {
    "create_task": lambda acquiring: asyncio.create_task(acquiring),
    "wait_for": lambda acquiring: asyncio.wait_for(acquiring, 5),
    "gather": lambda acquiring: _first(asyncio.gather(acquiring)),
    "shield": lambda acquiring: asyncio.shield(acquiring),
    "task group": lambda acquiring: _in_group(acquiring),
}


async def _first(several: Awaitable[list[Lease]]) -> Lease:
    (lease,) = await several
    return lease


async def _in_group(acquiring: Any) -> Lease:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(acquiring)
    lease: Lease = task.result()
    return lease


@pytest.mark.parametrize("way", TASKS)
async def test_it_goes_wherever_a_coroutine_goes(sync: Coordinator, way: str) -> None:
    lock = sync.lock("verb")
    lease = await TASKS[way](lock.acquire())
    lease.check()
    assert repr(asyncio.create_task(lock.try_acquire())).startswith("<Task pending")
    await asyncio.sleep(0)
    await lease.release()


@pytest.mark.skipif(not _ANYIO_TAKES_IT, reason="this anyio starts native coroutines only")
async def test_a_task_group_of_anyio_starts_it(sync: Coordinator) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(sync.lock("verb").acquire)
    assert await sync.lock("verb").locked()
    await sync.lock("verb").release()


async def test_it_is_good_for_one_lease(sync: Coordinator) -> None:
    """The second use says to call acquire() again, whichever the first was."""
    acquiring = sync.lock("verb").acquire()
    await (await acquiring).release()
    with pytest.raises(RuntimeError, match="call acquire"):
        await acquiring
    with pytest.raises(RuntimeError, match="call acquire"):
        async with acquiring:
            pass
    entered = sync.lock("verb").acquire()
    async with entered:
        with pytest.raises(RuntimeError, match="call acquire"):
            await entered


async def test_bad_arguments_fail_at_the_call(sync: Coordinator) -> None:
    """Nothing is left to await, so nothing warns."""
    with pytest.raises(ValueError, match="timeout"):
        sync.lock("verb").acquire(timeout=-1)
    with pytest.raises(ValueError, match="weight"):
        AsyncSemaphore(sync, "verb", 2).acquire(weight=3)


async def test_one_that_is_dropped_warns_as_a_coroutine_does(sync: Coordinator) -> None:
    with pytest.warns(RuntimeWarning, match="was never awaited"):
        sync.lock("verb").acquire()
    assert not await sync.lock("verb").locked()
