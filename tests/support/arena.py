"""A place for cancellation sweeps of primitives that hold one lock or several: a rival, and what must be true after."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, Coordinator, Lease, wait_until

from .body import FAST
from .inside import hub_of, lease_groups
from .sweep import Outcome, sweep


class Arena:
    """Locks that a rival in another process may hold, as far as Redis can tell."""

    def __init__(self, sync: Coordinator, rival: Coordinator, redis: Redis, names: Sequence[str]) -> None:
        self.sync = sync
        self.redis = redis
        self.rivals = [AsyncLock(rival, name, ttl=30) for name in names]
        self._held: list[Lease] = []
        self._helpers: list[asyncio.Task[None]] = []

    async def hold(self, number: int = 0) -> None:
        """The rival holds one of the locks, and lets it go as soon as somebody waits for it."""
        lease = await self.rivals[number].acquire(timeout=5)
        self._held.append(lease)
        self._helpers.append(asyncio.create_task(self._let_go(self.rivals[number], lease)))

    async def _let_go(self, lock: AsyncLock, lease: Lease) -> None:
        async def somebody_waits() -> bool:
            return (await lock.statistics()).waiting > 0

        await wait_until(somebody_waits, FAST, timeout=15)
        await lease.release()

    async def finish(self) -> None:
        """End what the scenario started, whichever task was cancelled; then nothing may be left anywhere."""
        for helper in self._helpers:
            helper.cancel()
        await asyncio.gather(*self._helpers, return_exceptions=True)
        for lease in self._held:
            await lease.release()
        self._helpers.clear()
        self._held.clear()
        await self.check_free()

    async def check_free(self) -> None:
        """Anybody gets all of them, nobody waits, and the process has forgotten all about it.

        A cancelled request is undone in the background. Through the pool both may come after the rival's first visit.
        So may the answer to a release whose waiter was cancelled: until then the bundle is there.
        """
        async with AsyncExitStack() as stack:
            for lock in self.rivals:
                await stack.enter_async_context(lock.acquire(timeout=5))

        async def free() -> bool:
            found = [await lock.statistics() for lock in self.rivals]
            nobody = not any(one.held or one.waiting for one in found)
            return nobody and not hub_of(self.sync).resources and not hub_of(self.sync).acquisitions

        await wait_until(free, FAST, timeout=15)
        await hub_of(self.sync).manager.releases.in_flight.drained(5)
        await asyncio.sleep(0)  # those who waited for the answer hear of it a turn later
        assert not [key for key in lease_groups if self.sync in (key if isinstance(key, tuple) else ())]


Operation = Callable[[], Awaitable[object]]


class Finishes(Protocol):
    """What ends an operation that was cancelled, and checks that nothing is left."""

    async def finish(self) -> None:
        """Do so."""


async def sweep_all(arena: Finishes, operation: Operation, *, twice: bool, turns: Sequence[int]) -> int:
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
