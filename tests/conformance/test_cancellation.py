"""P5: a task may be cancelled at any await, also twice; nothing leaks, nothing is swallowed (FAULTS B1-B7).

Two sweeps. One cancels at every suspension point of the operation, in three ways (see tests/support/sweep.py).
The other cancels after 0, 1, 2, … turns of the event loop, so that the cancellation also falls between the
sending of a command and its answer, between answer and push, and into the same turn as either.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import ConnectionPool, Redis, UnixDomainSocketConnection

from redis_sync_aio import AcquireTimeout, Backoff, Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import BaseLease

from ..support.body import FAST
from ..support.factories import Kind, holder
from ..support.sweep import Outcome, sweep

NAME = "cancel"
LEAST = 3
"""Cancellations that each sweep injects at least. The bar is 300 for this module: its 320 sweeps make 960 at least."""


class Arena:
    """A lock that may have a holder, and what must be true after every cancelled operation."""

    def __init__(self, kind: Kind, sync: Coordinator, redis: Redis) -> None:
        self.kind = kind
        self.lock = kind.make(sync, NAME, ttl=30)
        self.sync = sync
        self.redis = redis
        self.holder: BaseLease | None = None
        self.helpers: list[asyncio.Task[None]] = []

    async def hold(self) -> None:
        """Somebody holds the lock, and lets it go as soon as somebody waits."""
        self.holder = await self.lock.acquire(timeout=5)
        self.helpers.append(asyncio.create_task(self._let_go(self.holder)))

    async def _let_go(self, holder: BaseLease) -> None:
        fast = Backoff(initial=0.001, cap=0.002)
        await wait_until(self._somebody_waits, fast, timeout=5)
        await holder.release()

    def _somebody_waits(self) -> bool:
        # Not by the server, which knows nothing of tasks that wait for a lease of their own process.
        return any(view.waiting for view in self.sync.statistics())

    async def settle(self) -> None:
        """End what the scenario started, whichever task was cancelled."""
        for helper in self.helpers:
            helper.cancel()
        await asyncio.gather(*self.helpers, return_exceptions=True)
        self.helpers.clear()
        if self.holder is not None:
            await self.holder.release()
            self.holder = None

    async def check_free(self) -> None:
        """Usable immediately: by this process in order, and by anybody as soon as what was sent has arrived."""
        lease = await self.lock.acquire(timeout=5)
        await lease.release()
        if self.kind.share:  # that sent nothing if it lingers, or if word that the cancelled task waits came first
            await wait_until(lambda: self.kind.empty(self.redis, NAME), FAST, timeout=5)
        after = await self.lock.statistics()
        assert (await holder(self.lock), after.waiting) == (None, 0), after
        assert await self.kind.empty(self.redis, NAME)


Operation = Callable[[Arena], Coroutine[None, None, object]]


async def acquire_and_release(arena: Arena) -> None:
    lease = await arena.lock.acquire()
    await lease.release()


async def acquire_by_hand_over(arena: Arena) -> None:
    await arena.hold()
    lease = await arena.lock.acquire(timeout=20)
    await lease.release()


async def try_and_release(arena: Arena) -> None:
    lease = await arena.lock.try_acquire()
    assert lease is not None
    await lease.release()


async def whole_body(arena: Arena) -> None:
    async with arena.lock:
        await asyncio.sleep(0)


async def whole_body_by_hand_over(arena: Arena) -> None:
    await arena.hold()
    async with arena.lock.acquire(timeout=20) as lease:
        await lease.extend(20)


async def by_identity(arena: Arena) -> None:
    lease = await arena.lock.acquire(identity="worker-7")
    await lease.release()


async def by_identity_and_hand_over(arena: Arena) -> None:
    await arena.hold()
    lease = await arena.lock.acquire(identity="worker-7")
    await lease.release()


async def extended(arena: Arena) -> None:
    async with arena.lock as lease:
        await lease.extend(10)
        await lease.extend(20)


async def timed_out(arena: Arena) -> None:
    holder = await arena.lock.acquire()
    try:
        with pytest.raises(AcquireTimeout):
            await arena.lock.acquire(timeout=0.01)
    finally:
        holder._grant.give_back()


OPERATIONS: dict[str, Operation] = {
    operation.__name__: operation
    for operation in (
        acquire_and_release,
        acquire_by_hand_over,
        try_and_release,
        whole_body,
        whole_body_by_hand_over,
        by_identity,
        by_identity_and_hand_over,
        extended,
        timed_out,
    )
}


@pytest_asyncio.fixture
async def arena(kind: Kind, sync: Coordinator, redis: Redis) -> AsyncIterator[Arena]:
    arena = Arena(kind, sync, redis)
    await arena.check_free()  # connected: the sweeps are not about the first connection
    yield arena


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
async def test_p5_cancelled_at_every_suspension_point(arena: Arena, name: str, twice: bool) -> None:
    async def check(outcome: Outcome[object]) -> None:
        await finish(arena)

    result = await sweep(lambda: OPERATIONS[name](arena), check, twice=twice)
    assert not result.swallowed
    assert result.cancellations.total() >= LEAST


@pytest.mark.parametrize("name", OPERATIONS)
async def test_p5_cancelled_after_any_number_of_turns(arena: Arena, name: str) -> None:
    injected = 0
    for turns in (*range(36), *range(36, 120, 12)):
        task = asyncio.create_task(coroutine(OPERATIONS[name], arena))
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.cancel():
            injected += 1
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await task
        await finish(arena)
    assert injected >= LEAST


async def coroutine(operation: Operation, arena: Arena) -> object:
    return await operation(arena)


async def finish(arena: Arena) -> None:
    """The operations release only when they are not cancelled in between: do it for them, then look."""
    await arena.settle()
    local = arena.lock._resource()
    for lease in local.held():
        await lease.release()
    local.forget_if_idle()
    await arena.check_free()


@pytest.mark.real
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="there redis-py swallows no cancellation")
@pytest.mark.parametrize("push", ["never", "always"])
async def test_a10_a_cancellation_that_redis_py_swallows_while_it_connects_is_heeded(push: Any) -> None:
    """At its end `asyncio.run` cancels each task once and waits for it: none may go on until its time is up.

    A connection whose opening drops a cancellation stands for `asyncio.wait_for`, which does so on Python 3.11 when it
    has a result. The server answers nothing after that.
    """
    opened = asyncio.Event()

    class Drops(UnixDomainSocketConnection):
        async def connect(self) -> None:
            await super().connect()  # type: ignore[no-untyped-call]
            if not opened.is_set():
                opened.set()
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()

    with EmbeddedServer() as server:
        pool = ConnectionPool(connection_class=Drops, path=server.unix_socket)
        async with Redis.from_pool(pool) as client:
            sync = Coordinator(client, push=push, retry_for=30, response_timeout=30)
            locked = asyncio.create_task(sync.lock("x").locked())
            await opened.wait()
            server.pause()
            try:
                (task,) = (it for it in asyncio.all_tasks() if it.get_name() == "redis_sync_aio link")
                task.cancel()
                await asyncio.wait([task], timeout=5)
                assert task.done()
            finally:
                server.resume()
                locked.cancel()
                await sync.aclose()
