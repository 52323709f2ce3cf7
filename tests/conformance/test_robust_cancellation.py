"""P5 for robust locks: whichever task is cancelled, the lock is free, and nothing that was recorded is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncRobustLock, Coordinator, Lease, wait_until
from redis_sync_aio.types import RobustLease

from ..support.body import FAST, waits
from ..support.inside import hub_of
from ..support.robust import NAME, RECORD, crash, is_of, lock, way
from ..support.sweep import Outcome, sweep
from ..support.views import holder_of

__all__ = ["lock", "way"]  # fixtures

OLD, NEW = b'{"step":1}', b'{"step":2}'
TURNS = (*range(24), *range(24, 60, 12))
LEAST = 2
"""So often at least each operation can be cancelled; all tests together cancel about 400 times."""


class Arena:
    """A robust lock that somebody has abandoned, and maybe a rival who holds it and lets go when somebody waits."""

    def __init__(self, lock: AsyncRobustLock, redis: Redis) -> None:
        self.lock = lock
        self.redis = redis
        self.helpers: list[asyncio.Task[None]] = []

    async def abandon(self) -> None:
        lease = await self.lock.acquire()
        await lease.record({"step": 1})
        await crash(self.redis, lease)
        self.record = await self.redis.hgetall(RECORD)
        self.left_by = lease

    async def hold(self) -> None:
        """A holder that is not robust, so the record stays as it is."""
        plain = AsyncLock(self.lock._source, NAME)
        lease = await plain.acquire(timeout=5)
        self.helpers.append(asyncio.create_task(self._let_go(plain, lease)))

    async def _let_go(self, plain: AsyncLock, lease: Lease) -> None:
        try:
            await wait_until(waits(plain), FAST, timeout=5)
        finally:
            lease._grant.give_back()

    async def settle(self) -> None:
        """End what helps, release what this process holds, and see that the lock is free and forgotten."""
        for helper in self.helpers:
            helper.cancel()
        await asyncio.gather(*self.helpers, return_exceptions=True)
        self.helpers.clear()

        async def free() -> bool:
            found = await self.lock.statistics()
            return (holder_of(found), found.waiting) == (None, 0)

        await wait_until(free, FAST, timeout=5)
        assert not self.lock._held()


Operation = Callable[[Arena], Coroutine[Any, Any, object]]


async def acquires(arena: Arena) -> object:
    return await arena.lock.acquire()


async def tries(arena: Arena) -> object:
    return await arena.lock.try_acquire()


async def identifies(arena: Arena) -> object:
    return await arena.lock.acquire(identity="w")


async def is_handed_over(arena: Arena) -> object:
    return await arena.lock.acquire(timeout=5)


@pytest.fixture
async def arena(lock: AsyncRobustLock, redis: Redis) -> Arena:
    arena = Arena(lock, redis)
    await arena.abandon()
    return arena


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("operation", [acquires, tries, identifies, is_handed_over])
async def test_p5_a_cancelled_acquire_puts_the_record_back(arena: Arena, operation: Operation, twice: bool) -> None:
    async def run() -> object:
        if operation is is_handed_over:
            await arena.hold()
        return await operation(arena)

    async def check(outcome: Outcome[object] | None, lease: object) -> None:
        if isinstance(lease, RobustLease):
            assert is_of(lease.abandoned, arena.left_by)
            lease._grant.body_failed = True
            await lease.release()
        await arena.settle()
        assert await arena.redis.hgetall(RECORD) == {**arena.record, b"seq": b"0", b"writers": b""} or (
            await arena.redis.hgetall(RECORD) == arena.record
        ), outcome

    result = await sweep(run, lambda outcome: check(outcome, outcome.value), twice=twice)
    assert result.cancellations.total() >= LEAST
    if twice:
        return
    for turns in TURNS:
        task = asyncio.create_task(run())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await check(None, None if task.cancelled() else task.result())


async def test_p5_a_cancelled_record_is_written_or_not_and_the_lease_lives(lock: AsyncRobustLock, redis: Redis) -> None:
    lease = await lock.acquire()

    async def check(outcome: Outcome[None]) -> None:
        lease.check()
        await lease.record({"step": 1})  # behind the one that was cancelled, and so the last word
        assert await redis.hget(RECORD, "progress") == OLD

    await lease.record({"step": 1})
    result = await sweep(lambda: lease.record({"step": 2}), check, twice=True)
    assert result.cancellations.total() >= LEAST
    await lease.release()
    assert not await redis.exists(RECORD)


async def body(arena: Arena) -> None:
    async with arena.lock as lease:
        assert lease.progress == {"step": 1}
        await lease.record({"step": 2})


async def test_p5_a_cancelled_body_never_loses_what_was_recorded(arena: Arena) -> None:
    done = 0

    async def check(cancelled: bool) -> None:
        nonlocal done
        await arena.settle()
        progress = await arena.redis.hget(RECORD, "progress")
        if not cancelled or progress is None:  # at its end: cancelled while it was released, the body was done
            assert progress is None
            done += 1
        else:
            assert progress in (OLD, NEW)
        await arena.redis.delete(RECORD)
        await arena.abandon()

    result = await sweep(lambda: body(arena), lambda outcome: check(outcome.cancelled))
    assert result.cancellations.total() >= LEAST
    for turns in TURNS:
        task = asyncio.create_task(body(arena))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await check(task.cancelled())
    assert done >= 3


async def test_p5_a_cancelled_twin_of_an_identity_leaves_the_lease_alone(
    lock: AsyncRobustLock, redis: Redis, sync: Coordinator
) -> None:
    lease = await lock.acquire(identity="w")
    await lease.record({"step": 1})

    async def check(outcome: Outcome[object]) -> None:
        nonlocal lease
        if isinstance(outcome.value, RobustLease):  # that one records from now on
            hub_of(sync).resource(lease._grant.keys).decline(lease._grant)
            lease = outcome.value
        await lease.record({"step": 1})  # the adoption of one that was cancelled is withdrawn
        await lease.extend(30)
        assert await redis.hget(RECORD, "progress") == OLD

    result = await sweep(lambda: lock.acquire(identity="w"), check)
    assert result.cancellations.total() >= LEAST
    await lease.release()
