"""P5: a task may be cancelled at any await, also twice; nothing leaks, nothing is swallowed (FAULTS B1-B7).

One sweep cancels at every suspension point of the operation, in three ways (see tests/support/sweep.py). The other
cancels after 0, 1, 2, … turns of the event loop, so that the cancellation also falls between the sending of a command
and its answer, between answer and push, and into the same turn as either.

Both run for all kinds of primitives that let one in, and for several permits: there a cancelled request may be the
head that the others wait for, and one release may grant a request that is cancelled in the same turn of the loop.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import pytest
from redis.asyncio import ConnectionPool, Redis, UnixDomainSocketConnection

from redis_sync_aio import AcquireTimeout, AsyncSemaphore, Coordinator, Lease, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import BaseLease

from ..support.body import FAST
from ..support.inside import hub_of, lease_groups
from ..support.primitives import ALONE, KINDS, SHARED, WATCHED, Primitive, each, on_one_server
from ..support.sweep import Outcome, sweep

NAME = "cancel"
LEAST = 2
"""Cancellations that each sweep injects at least."""
LIMIT = 5
TURNS = (*range(36), *range(36, 120, 12))


class Finishes(Protocol):
    """What ends an operation that was cancelled, and checks that nothing is left."""

    async def finish(self) -> None:
        """Do so."""


async def sweep_all(
    arena: Finishes, operation: Callable[[], Awaitable[object]], *, twice: bool, turns: Sequence[int]
) -> int:
    """Cancel ``operation`` at every suspension point, and after so many turns of the loop; return how often."""

    async def run() -> object:
        return await operation()

    async def check(outcome: Outcome[object]) -> None:
        await arena.finish()

    result = await sweep(run, check, twice=twice)
    assert not result.swallowed
    cancelled = sum(result.cancellations.values())
    for number in turns:
        task = asyncio.create_task(run())
        for _ in range(number):
            await asyncio.sleep(0)
        if task.cancel():
            cancelled += 1
            await asyncio.wait([task])
            assert task.cancelled(), f"cancelled after {number} turns, and it ended with {task}"
        else:
            await task
        await arena.finish()
    return cancelled


class Arena:
    """A lock that may have a holder, and what must be true after every cancelled operation."""

    def __init__(self, kind: Primitive, sync: Coordinator, other: Coordinator, redis: Redis) -> None:
        self.kind, self.sync, self.redis = kind, sync, redis
        self.lock = kind.make(sync, NAME, ttl=30)
        self.rival = kind.make(other, NAME, ttl=30)
        self.holder: BaseLease | None = None
        self.helpers: list[asyncio.Task[None]] = []

    async def hold(self) -> None:
        """Let a rival hold the lock, and release it as soon as somebody waits; one of the process, if that shares."""
        holder: BaseLease = await (self.lock if self.kind.share else self.rival).acquire(timeout=5)
        self.holder = holder
        self.helpers.append(asyncio.create_task(self._let_go(holder)))

    async def _let_go(self, holder: BaseLease) -> None:
        await wait_until(self._is_awaited, FAST, timeout=5)
        await holder.release()

    def _is_awaited(self) -> bool:
        # Not by the server, which knows nothing of tasks that wait for a lease of their own process.
        return any(view.waiting for view in self.sync.statistics())

    async def finish(self) -> None:
        """End what the operation started, whichever task was cancelled; then everything is free."""
        for helper in self.helpers:
            helper.cancel()
        await asyncio.gather(*self.helpers, return_exceptions=True)
        self.helpers.clear()
        if self.holder is not None:
            await self.holder.release()
            self.holder = None
        await self.check_free()

    async def check_free(self) -> None:
        """Usable immediately: by this process in order, and by others as soon as what was sent has arrived."""
        for lock in (self.lock, self.rival):
            lease = await lock.acquire(timeout=5)
            await lease.release()
        await wait_until(self._is_empty, FAST, timeout=15)
        await hub_of(self.sync).manager.releases.in_flight.drained(5)
        await asyncio.sleep(0)  # those who waited for the answer hear of it a turn later
        assert not [key for key in lease_groups if self.sync in (key if isinstance(key, tuple) else ())]

    async def _is_empty(self) -> bool:
        """Also in the memory of the process: a lock of several has more names than the one that is looked at."""
        forgotten = not hub_of(self.sync).resources and not hub_of(self.sync).acquisitions
        return forgotten and not await self.rival.locked() and await self.kind.empty(self.redis, NAME)


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


async def inside(arena: Arena) -> None:
    """Again in its own body, if it may be."""
    async with arena.lock as lease:
        if arena.kind.reenters:
            async with arena.lock:
                await asyncio.sleep(0)
        await lease.extend(20)


OPERATIONS: dict[str, Callable[[Arena], Awaitable[None]]] = {
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
twice = pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])


@pytest.mark.parametrize("name", OPERATIONS)
@twice
async def test_p5_cancelled_anywhere(
    kind: Primitive, sync: Coordinator, other: Coordinator, redis: Redis, name: str, twice: bool
) -> None:
    arena = Arena(kind, sync, other, redis)
    await arena.check_free()  # connected: the sweeps are not about the first connection
    operation = partial(OPERATIONS[name], arena)
    assert await sweep_all(arena, operation, twice=twice, turns=() if twice else TURNS) >= LEAST


@each((it for it in on_one_server(ALONE) if it not in (*KINDS, *SHARED, *WATCHED)), "kind")
@pytest.mark.parametrize("operation", [whole_body, whole_body_by_hand_over, inside])
@twice
async def test_p5_others_cancelled_anywhere(
    kind: Primitive,
    sync: Coordinator,
    other: Coordinator,
    redis: Redis,
    operation: Callable[[Arena], Awaitable[None]],
    twice: bool,
) -> None:
    """Those that are made of locks and permits."""
    arena = Arena(kind, sync, other, redis)
    await arena.check_free()
    assert await sweep_all(arena, partial(operation, arena), twice=twice, turns=() if twice else TURNS) >= LEAST


# -- several permits -----------------------------------------------------------------------------------------


class Permits:
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
        await wait_until(self._is_awaited, FAST, timeout=5)
        for lease in leases:
            await lease.release()

    async def _is_awaited(self) -> bool:
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


async def weighted(permits: Permits) -> None:
    async with permits.sem.acquire(weight=3) as lease:
        await lease.extend(20)


async def several(permits: Permits) -> None:
    async with permits.sem.acquire(weight=2), permits.sem.acquire(weight=3):
        assert await permits.sem.try_acquire() is None


async def weighted_by_hand_over(permits: Permits) -> None:
    """It gets them from the second release: the first one frees too few."""
    await permits.hold(2, 3)
    async with permits.sem.acquire(weight=4, timeout=20):
        await asyncio.sleep(0)


async def permits_by_identity_and_hand_over(permits: Permits) -> None:
    await permits.hold(5)
    async with permits.sem.acquire(weight=2, identity="worker-7"):
        await permits.sem.acquire(weight=1, identity="worker-7")


async def resized(permits: Permits) -> None:
    await permits.sem.resize(LIMIT)
    await permits.sem.get_limit()


PERMIT_OPERATIONS: dict[str, Callable[[Permits], Awaitable[None]]] = {
    operation.__name__: operation
    for operation in (weighted, several, weighted_by_hand_over, permits_by_identity_and_hand_over, resized)
}


@pytest.mark.parametrize("name", PERMIT_OPERATIONS)
@twice
async def test_p5_permits_cancelled_anywhere(sync: Coordinator, other: Coordinator, name: str, twice: bool) -> None:
    permits = Permits(sync, other)
    await permits.check_free()
    operation = partial(PERMIT_OPERATIONS[name], permits)
    assert await sweep_all(permits, operation, twice=twice, turns=() if twice else TURNS) >= LEAST


async def test_p5_b6_random_cancellations_of_permits(sync: Coordinator, other: Coordinator, way: str) -> None:
    """P1, P5: requests of weights 1 to 5 that are cancelled or time out at random: none leaks a permit."""
    rounds = 20 if way == "link" else 10
    chance = random.Random(4711)
    used = 0
    cancelled = 0
    sems = [AsyncSemaphore(one, NAME, limit=LIMIT, ttl=10) for one in (sync, other)]

    async def section(weight: int, timeout: float | None) -> None:
        nonlocal used
        async with chance.choice(sems).acquire(weight=weight, timeout=timeout):
            used += weight
            assert used <= LIMIT
            try:
                for _ in range(chance.randrange(3)):
                    await asyncio.sleep(0)
            finally:
                used -= weight

    async def contend() -> None:
        nonlocal cancelled
        for _ in range(rounds):
            timeout = chance.random() * 0.01 if chance.random() < 0.3 else None
            task = asyncio.create_task(section(1 + chance.randrange(LIMIT), timeout))
            if chance.random() > 0.5:
                for _ in range(chance.randrange(25)):
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                cancelled += 1
            elif (error := task.exception()) is not None:
                assert isinstance(error, (AcquireTimeout, Unreachable)), error  # the latter: before any answer

    async with asyncio.timeout(100):
        await asyncio.gather(*(contend() for _ in range(20)))
    for sem in sems:
        await (await sem.acquire(weight=LIMIT, timeout=0.2)).release()
    found = await sems[0].statistics()
    assert (found.held, found.waiting) == (0, 0)
    assert cancelled > 4 * rounds
    assert not hub_of(sync).acquisitions
    assert not hub_of(sync).resources


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
