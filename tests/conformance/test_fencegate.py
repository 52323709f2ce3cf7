"""The gate for fences: what came later stays ahead, on every way to the server."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncReentrantLock,
    AsyncRobustLock,
    AsyncSemaphore,
    Coordinator,
    FenceGate,
)
from redis_sync_aio.errors import StaleFence, WrongKeyType
from redis_sync_aio.types import GuardingLease

from ..support.inside import gate_keys

NAME = "gate"
KEY = gate_keys(NAME.encode()).all[0]


@pytest.fixture(params=["link", "polling-resp2-decoded", "cluster"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def gate(sync: Coordinator) -> FenceGate:
    return FenceGate(sync, NAME)


async def test_an_older_fence_is_refused_and_the_same_is_not(gate: FenceGate, redis: Redis) -> None:
    assert await gate.highest() is None
    await gate.accept(5)
    await gate.accept(7)
    await gate.accept(7)
    with pytest.raises(StaleFence) as stale:
        await gate.accept(6)
    assert (stale.value.name, stale.value.fence, stale.value.highest) == (NAME, 6, 7)
    assert await gate.highest() == 7
    assert 6.9 < (await redis.pttl(KEY)) / 86_400_000 <= 7


async def test_leases_pass_in_their_order(gate: FenceGate, sync: Coordinator) -> None:
    lock = AsyncLock(sync, NAME)  # the name may be the same
    async with lock as older:
        await gate.accept(older)
    async with lock as newer:
        await gate.accept(older)
        await gate.accept(newer)
        with pytest.raises(StaleFence):
            await gate.accept(older)


@pytest.mark.parametrize("fence", [2**53, 2**53 + 1, 9_007_199_254_740_993, 10**16 - 2, 9])
async def test_fences_that_differ_by_one_are_told_apart(gate: FenceGate, fence: int) -> None:
    """As doubles, 2^53 and 2^53 + 1 would be equal; as text of different lengths, 10 would be less than 9."""
    await gate.accept(fence)
    await gate.accept(fence + 1)
    with pytest.raises(StaleFence):
        await gate.accept(fence)
    assert await gate.highest() == fence + 1


async def test_of_many_fences_at_the_same_time_none_passes_behind_a_later_one(gate: FenceGate) -> None:
    fences = list(range(1, 101))
    random.Random(7).shuffle(fences)
    results = await asyncio.gather(*(gate.accept(fence) for fence in fences), return_exceptions=True)
    highest = 0
    for fence, result in zip(fences, results, strict=True):
        assert (result is None) == (fence >= highest), fence
        assert result is None or isinstance(result, StaleFence)
        highest = max(highest, fence)
    assert await gate.highest() == 100


async def test_a_pass_keeps_the_gate_and_a_refusal_does_not(gate: FenceGate, redis: Redis) -> None:
    await gate.accept(7)
    await redis.pexpire(KEY, 60_000)
    with pytest.raises(StaleFence):
        await gate.accept(6)
    assert await gate.highest() == 7
    assert await redis.pttl(KEY) <= 60_000
    await gate.accept(7)
    assert await redis.pttl(KEY) > 60_000


async def test_a_ttl_of_its_own(sync: Coordinator, redis: Redis) -> None:
    await FenceGate(sync, NAME, keep=timedelta(minutes=1)).accept(1)
    assert 50_000 < await redis.pttl(KEY) <= 60_000


@pytest.mark.parametrize("spoilt", ["mine", "12", "0000000000000001x"])
async def test_a_foreign_key_is_reported_and_stays(gate: FenceGate, redis: Redis, spoilt: str) -> None:
    await redis.set(KEY, spoilt)
    for _ in range(2):
        with pytest.raises(WrongKeyType):
            await gate.accept(5)
        with pytest.raises(WrongKeyType):
            await gate.highest()
    assert await redis.get(KEY) == spoilt.encode()
    await redis.delete(KEY)
    await redis.rpush(KEY, "a", "list")
    with pytest.raises(WrongKeyType):
        await gate.accept(5)


@pytest.mark.parametrize(
    ("bad", "error"),
    [(0, ValueError), (-1, ValueError), (10**16, ValueError), (True, TypeError), (1.0, TypeError), ("1", TypeError)],
)
async def test_what_is_no_fence_is_refused_at_the_call(redis: Redis, bad: Any, error: type[Exception]) -> None:
    gate = FenceGate(redis, NAME)
    with pytest.raises(error, match="fence must be"):
        await gate.accept(bad)
    assert not await redis.exists(KEY)


async def test_a_lease_over_several_locks_says_which_fence_to_pass(gate: FenceGate, sync: Coordinator) -> None:
    """Its own fence is the greatest of several: another name's, behind which every holder of this one was too late."""
    async with AsyncMultiLock(sync, ["{g}a", "{g}b"]) as both:
        with pytest.raises(TypeError, match=r"one for each of '{g}a', '{g}b'.*lease\.fences"):
            await gate.accept(both)
        assert await gate.highest() is None
        await gate.accept(both.fences["{g}a"])
    async with AsyncMultiLock(sync, ["{g}a"]) as one:
        with pytest.raises(TypeError, match=r"lease\.fences"):
            await gate.accept(one)


@pytest.mark.parametrize("kind", ["robust", "reentrant", "writer", "permit"])
async def test_a_lease_of_one_name_passes_whatever_its_kind(gate: FenceGate, sync: Coordinator, kind: str) -> None:
    rw = AsyncReadWriteLock(sync, "rw")
    async with AsyncExitStack() as stack:
        make: dict[str, Callable[[], Awaitable[GuardingLease]]] = {
            "robust": lambda: AsyncRobustLock(sync, NAME).acquire(),
            "reentrant": lambda: stack.enter_async_context(AsyncReentrantLock(sync, NAME)),
            "writer": lambda: rw.write().acquire(),
            "permit": lambda: AsyncSemaphore(sync, NAME, limit=1).acquire(),
        }
        lease = await make[kind]()
        await gate.accept(lease)
        assert await gate.highest() == lease.fence


async def test_bad_arguments_fail_immediately(redis: Redis) -> None:
    with pytest.raises(TypeError):
        FenceGate("redis://", NAME)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        FenceGate(redis, 7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty"):
        FenceGate(redis, "")
    with pytest.raises(ValueError, match="keep"):
        FenceGate(redis, NAME, keep=0)
    assert repr(FenceGate(redis, NAME, keep=5)) == "<FenceGate 'gate' keep=5.0>"


# -- the same in SQL (docs/guides/fencing.md) ---------------------------------------------------------------------

WRITE = "UPDATE orders SET state = :state, fence = :fence WHERE id = :id AND fence <= :fence"


async def test_a_row_that_keeps_its_fence_is_not_changed_by_a_stale_holder(sync: Coordinator, redis: Redis) -> None:
    table = sqlite3.connect(":memory:")
    try:
        table.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, state TEXT, fence INTEGER NOT NULL DEFAULT 0)")
        table.execute("INSERT INTO orders (id, state) VALUES (42, 'new')")

        def write(state: str, fence: int) -> int:
            return table.execute(WRITE, {"id": 42, "state": state, "fence": fence}).rowcount

        lock = AsyncLock(sync, "orders:42")
        paused = await lock.acquire()
        assert write("begun", paused.fence) == 1
        await redis.delete("orders:42")  # its lease ends while its process is stopped
        async with lock as later:
            assert write("done", later.fence) == 1
            assert write("done twice", later.fence) == 1
            assert write("late", paused.fence) == 0
        assert table.execute("SELECT state, fence FROM orders").fetchall() == [("done twice", later.fence)]
    finally:
        table.close()
