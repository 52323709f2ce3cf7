"""P7: the end of an ``async with`` that did not begin: the error says what to do, and never hides the body's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReentrantLock,
    AsyncSemaphore,
    Coordinator,
    NotHeld,
)

MAKE: dict[str, Callable[[Coordinator], Any]] = {
    "lock": lambda sync: AsyncLock(sync, "job"),
    "semaphore": lambda sync: AsyncSemaphore(sync, "job", limit=2),
    "reentrant": lambda sync: AsyncReentrantLock(sync, "job"),
    "multi": lambda sync: AsyncMultiLock(sync, ["job", "other"]),
}


@pytest.mark.parametrize("make", MAKE)
async def test_an_exit_without_an_entry(sync: Coordinator, make: str) -> None:
    """The lock is named, and its lease is left alone."""
    lock = MAKE[make](sync)
    lease = await lock.acquire()
    with pytest.raises(NotHeld, match=r"'job'.* was not entered.*enter_async_context\(lease\)"):
        async with AsyncExitStack() as stack:
            stack.push_async_exit(lock)
    lease.check()
    await lease.release()
    async with lock:  # is not disturbed by that
        pass


async def test_the_bodys_error_comes_first(sync: Coordinator) -> None:
    for exits in (sync.lock("job"), sync.lock("job").acquire()):

        async def body(exits: Any = exits) -> None:
            async with AsyncExitStack() as stack:
                stack.push_async_exit(exits)
                raise KeyError

        with pytest.raises(KeyError) as caught:
            await body()
        assert "was not entered" in caught.value.__notes__[0]


async def test_an_exit_of_an_acquisition_without_an_entry(sync: Coordinator) -> None:
    with pytest.raises(NotHeld, match="this acquisition was not entered"):
        async with AsyncExitStack() as stack:
            stack.push_async_exit(sync.lock("job").acquire())


async def test_what_it_says_to_do(sync: Coordinator) -> None:
    lock = sync.lock("job")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(await lock.acquire())
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(lock)
    assert not await lock.locked()
