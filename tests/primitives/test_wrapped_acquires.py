"""An acquire that runs in a task of its own: that task ends with it, and the section begins after that.

`asyncio.wait_for` makes such a task until Python 3.11; `asyncio.gather` and others always do. The lease is often
dropped, as with `asyncio.Lock`: the section ends by a ``release()`` of the lock. Until then it is renewed.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread

from .conftest import Everywhere, Make, Primitive

TTL = 3.0
SECTION = 1.5 * TTL

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


async def test_a_lease_from_a_wrapped_acquire_is_renewed_until_the_lock_releases_it(everywhere: Everywhere) -> None:
    """Whatever wraps it, of any primitive, while the object is kept."""

    async def check(primitive: Primitive, make: Make) -> None:
        async def one(wrap: Callable[[Acquire], Awaitable[None]]) -> None:
            it = make(name=f"{primitive.label} {wrap.__name__}", ttl=TTL)
            await wrap(it.acquire)
            await asyncio.sleep(SECTION)
            await it.release()

        await asyncio.gather(*map(one, [*ROOTS, *INSIDE]))

    await everywhere(check)


async def test_a_lease_that_is_the_result_of_a_task_is_renewed_until_any_object_of_its_name_releases_it(
    everywhere: Everywhere,
) -> None:
    """`wait_for(sync.lock(name).acquire(), 5)` ... `sync.lock(name).release()`; and of `try_acquire`."""

    async def check(primitive: Primitive, make: Make) -> None:
        async def one(wrap: Callable[[Acquire], Awaitable[None]], how: str) -> None:
            name = f"{primitive.label} {wrap.__name__} {how}"
            await wrap(lambda: getattr(make(name=name, ttl=TTL), how)())
            await asyncio.sleep(SECTION)
            await make(name=name).release()

        await asyncio.gather(*(one(wrap, "acquire") for wrap in ROOTS), one(gather, "try_acquire"))

    await everywhere(check)
