"""P2: what a cut costs a waiter. It is passed over while nobody listens, and then it has its place again.

Two processes: one behind a proxy that cuts its connection, and one with a wire of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest

from redis_sync_aio import AsyncLock, AsyncReadWriteLock, AsyncSemaphore, Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action
from redis_sync_aio.types import BaseLease

from ..support.wired import ACQUIRE, SOON, Wired, wired
from ..support.wired import quiet_loop as quiet_loop

engines = pytest.mark.parametrize("engine", ["lua", "watch"])
Engine = Literal["lua", "watch"]
LIMIT = 3


def permits(sync: Coordinator, engine: Engine) -> AsyncSemaphore:
    return AsyncSemaphore(sync, "n", limit=LIMIT, engine=engine)


async def waiters(it: Any, number: int) -> None:
    """Wait until so many wait."""

    async def are() -> bool:
        return bool((await it.statistics()).waiting == number)

    await wait_until(are, SOON, timeout=15)


@asynccontextmanager
async def cut(w: Wired) -> AsyncIterator[None]:
    """Let the process behind the proxy be cut off."""
    opened = w.sync.connections
    w.proxy.refuse = True
    await w.proxy.cut()
    yield
    w.proxy.refuse = False
    await wait_until(lambda: w.sync.connections > opened, SOON, timeout=15)


async def first_of(task: asyncio.Task[BaseLease], *others: asyncio.Task[BaseLease]) -> BaseLease:
    """Return the lease of the task, which gets it before the others get theirs."""
    async with asyncio.timeout(15):
        lease = await task
    assert not any(other.done() for other in others)
    return lease


@engines
@pytest.mark.parametrize(
    "coming_back", [Action.PASS, Action.CUT_BEFORE, Action.CUT_AFTER], ids=["back", "request lost", "reply lost"]
)
async def test_a_heavy_waiter_that_is_cut_while_others_settle_is_ahead_of_those_that_came_later(
    server: EmbeddedServer, engine: Engine, coming_back: Any
) -> None:
    """It was first, and nothing was handed to it. Those behind it that fit did not wait for what seemed dead."""
    async with wired(server, retry_for=15.0) as w:
        theirs = permits(w.other, engine)
        one = await theirs.acquire()
        heavy = asyncio.create_task(permits(w.sync, engine).acquire(weight=LIMIT))
        await waiters(theirs, 1)
        opened = w.sync.connections
        async with cut(w):
            two = await theirs.acquire(timeout=15)  # it fits behind the first, of which nobody knows whether it lives
            late = asyncio.create_task(theirs.acquire(weight=LIMIT))
            await waiters(theirs, 1)
            rule = w.proxy.on(ACQUIRE, coming_back) if engine == "lua" else None
        await waiters(theirs, 2)
        if rule is not None and coming_back is not Action.PASS:
            assert rule.acted
            await wait_until(lambda: w.sync.connections > opened + 1, SOON, timeout=15)
        await one.release()
        await two.release()
        lease = await first_of(heavy, late)
        await lease.release()
        await (await first_of(late)).release()
        assert (await theirs.statistics()).held == 0


@engines
async def test_a_heavy_waiter_that_is_back_before_others_settle_keeps_its_place(
    server: EmbeddedServer, engine: Engine
) -> None:
    """The other order of the race: nobody got in meanwhile."""
    async with wired(server, retry_for=15.0) as w:
        theirs = permits(w.other, engine)
        one = await theirs.acquire()
        heavy = asyncio.create_task(permits(w.sync, engine).acquire(weight=LIMIT))
        await waiters(theirs, 1)
        async with cut(w):
            pass
        light = asyncio.create_task(theirs.acquire())
        await waiters(theirs, 2)
        await one.extend(30)  # settles: the first is told to wait on
        await one.release()
        await (await first_of(heavy, light)).release()
        await (await first_of(light)).release()


async def test_a_writer_that_is_cut_while_readers_come_is_ahead_of_later_writers(server: EmbeddedServer) -> None:
    async with wired(server, retry_for=15.0) as w:
        theirs = AsyncReadWriteLock(w.other, "n")
        reader = await theirs.read().acquire()
        writer = asyncio.create_task(AsyncReadWriteLock(w.sync, "n").write().acquire())
        await waiters(theirs, 1)
        async with cut(w):
            second = await theirs.read().acquire(timeout=15)
            late = asyncio.create_task(theirs.write().acquire())
            await waiters(theirs, 1)
        await waiters(theirs, 2)
        await reader.release()
        await second.release()
        await (await first_of(writer, late)).release()
        await (await first_of(late)).release()


@engines
async def test_a_waiter_whose_turn_comes_while_it_is_cut_is_next(server: EmbeddedServer, engine: Engine) -> None:
    """One lease passes it by; those that wait for their turn do not."""
    async with wired(server, retry_for=15.0) as w:
        theirs = AsyncLock(w.other, "n", engine=engine)
        holder = await theirs.acquire()
        first = asyncio.create_task(AsyncLock(w.sync, "n", engine=engine).acquire())
        await waiters(theirs, 1)
        second, third = (asyncio.create_task(theirs.acquire()) for _ in range(2))
        await waiters(theirs, 3)
        async with cut(w):
            await holder.release()
            lease = await first_of(second, third)
            await waiters(theirs, 1)
        await waiters(theirs, 2)
        await lease.release()
        await (await first_of(first, third)).release()
        await (await first_of(third)).release()


@engines
async def test_a_waiter_that_comes_back_gets_what_is_free_before_those_that_wait_behind_it(
    server: EmbeddedServer, engine: Engine
) -> None:
    """Its turn came while it was cut, and the next one is too heavy for what is free. It does not wait for that one."""
    async with wired(server, retry_for=15.0) as w:
        theirs = permits(w.other, engine)
        one, two = await theirs.acquire(), await theirs.acquire(weight=2)
        light = asyncio.create_task(permits(w.sync, engine).acquire())
        await waiters(theirs, 1)
        heavy = asyncio.create_task(theirs.acquire(weight=LIMIT))
        await waiters(theirs, 2)
        async with cut(w):
            await one.release()
            await waiters(theirs, 1)
        lease = await first_of(light, heavy)
        await lease.release()
        await two.release()
        await (await first_of(heavy)).release()


@engines
async def test_a_waiter_that_was_passed_over_and_is_cancelled_leaves_nothing(
    server: EmbeddedServer, engine: Engine
) -> None:
    """P5: whether it is cancelled while it is cut, or after it has its place again."""
    async with wired(server, retry_for=15.0) as w:
        theirs = permits(w.other, engine)
        one = await theirs.acquire()
        tasks = [asyncio.create_task(permits(w.sync, engine).acquire(weight=LIMIT)) for _ in range(2)]
        await waiters(theirs, 2)
        async with cut(w):
            await (await theirs.acquire(timeout=15)).release()
            await waiters(theirs, 0)
            tasks[0].cancel()
            await asyncio.gather(tasks[0], return_exceptions=True)
        await waiters(theirs, 1)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await waiters(theirs, 0)
        await one.release()
        async with theirs.acquire(weight=LIMIT, timeout=15):
            pass
