"""P5 for robust locks: whichever task is cancelled, the lock is free, and nothing that was recorded is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncRobustLock, wait_until
from redis_sync_aio.types import RobustLease

from ..support.body import FAST, waits
from ..support.robust import NAME, RECORD, crash, is_of, lock, way
from ..support.sweep import sweep

__all__ = ["lock", "way"]  # fixtures

OLD, NEW = b'{"step":1}', b'{"step":2}'
TURNS = (*range(24), *range(24, 60, 12))
"""After so many turns of the loop a task is cancelled, too: also where something else happens meanwhile."""

Operation: TypeAlias = Callable[[], Coroutine[Any, Any, object]]
Check: TypeAlias = Callable[[bool, object], Coroutine[Any, Any, None]]


async def cancelled_everywhere(operation: Operation, check: Check, *, twice: bool = False) -> None:
    """Cancel it at each of its suspension points, and after each number of turns, and check what is left then."""
    result = await sweep(operation, lambda outcome: check(outcome.cancelled, outcome.value), twice=twice)
    assert result.cancellations.total() >= 2
    for turns in TURNS:
        task = asyncio.create_task(operation())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await check(task.cancelled(), None if task.cancelled() else task.result())


async def abandoned(lock: AsyncRobustLock, redis: Redis) -> RobustLease:
    """Leave a record behind."""
    lease = await lock.acquire()
    await lease.record({"step": 1})
    await crash(redis, lease)
    return lease


async def freed(lock: AsyncRobustLock) -> None:
    async def free() -> bool:
        found = await lock.statistics()
        return (found.held, found.waiting) == (0, 0)

    await wait_until(free, FAST, timeout=5)


async def acquires(lock: AsyncRobustLock) -> object:
    return await lock.acquire()


async def tries(lock: AsyncRobustLock) -> object:
    return await lock.try_acquire()


async def identifies(lock: AsyncRobustLock) -> object:
    return await lock.acquire(identity="w")


async def is_handed_over(lock: AsyncRobustLock) -> object:
    """Get it from a holder that is not robust, so the record stays as it is."""
    plain = AsyncLock(lock._source, NAME)
    theirs = await plain.acquire(timeout=5)

    async def let_go() -> None:
        try:
            await wait_until(waits(plain), FAST, timeout=5)
        finally:
            await theirs.release()

    helper = asyncio.create_task(let_go())
    try:
        return await lock.acquire(timeout=5)
    finally:
        helper.cancel()


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("acquire", [acquires, tries, identifies, is_handed_over])
async def test_a_cancelled_acquire_puts_the_record_back(
    lock: AsyncRobustLock, redis: Redis, acquire: Callable[[AsyncRobustLock], Coroutine[Any, Any, object]], twice: bool
) -> None:
    left_by = await abandoned(lock, redis)
    record = await redis.hgetall(RECORD)

    async def check(cancelled: bool, lease: object) -> None:
        if isinstance(lease, RobustLease):
            assert is_of(lease.abandoned, left_by)
            with pytest.raises(KeyError):
                async with lease:
                    raise KeyError  # a body that fails leaves the record as it found it
        await freed(lock)
        assert await redis.hgetall(RECORD) in (record, {**record, b"seq": b"0", b"writers": b""})

    await cancelled_everywhere(lambda: acquire(lock), check, twice=twice)


async def test_a_cancelled_record_is_written_or_not_and_the_lease_lives(lock: AsyncRobustLock, redis: Redis) -> None:
    async def check(cancelled: bool, _: object) -> None:
        lease.check()
        await lease.record({"step": 1})  # behind the one that was cancelled, and so the last word
        assert await redis.hget(RECORD, "progress") == OLD

    async with lock as lease:
        await lease.record({"step": 1})
        await cancelled_everywhere(lambda: lease.record({"step": 2}), check, twice=True)
    assert not await redis.exists(RECORD)


async def test_a_cancelled_body_never_loses_what_was_recorded(lock: AsyncRobustLock, redis: Redis) -> None:
    done = 0

    async def body() -> None:
        async with lock as lease:
            assert lease.progress == {"step": 1}
            await lease.record({"step": 2})

    async def check(cancelled: bool, _: object) -> None:
        nonlocal done
        await freed(lock)
        progress = await redis.hget(RECORD, "progress")
        if not cancelled or progress is None:  # at its end: cancelled while it was released, the body was done
            assert progress is None
            done += 1
        else:
            assert progress in (OLD, NEW)
        await redis.delete(RECORD)
        await abandoned(lock, redis)

    await abandoned(lock, redis)
    await cancelled_everywhere(body, check)
    assert done >= 3


async def test_a_cancelled_twin_of_an_identity_leaves_the_lease_alone(lock: AsyncRobustLock, redis: Redis) -> None:
    lease = await lock.acquire(identity="w")
    await lease.record({"step": 1})

    async def check(cancelled: bool, twin: object) -> None:
        nonlocal lease
        if isinstance(twin, RobustLease):  # that one records from now on
            lease = twin
        await lease.record({"step": 1})  # the adoption of one that was cancelled is withdrawn
        await lease.extend(30)
        assert await redis.hget(RECORD, "progress") == OLD

    await cancelled_everywhere(lambda: lock.acquire(identity="w"), check)
    await lease.release()
