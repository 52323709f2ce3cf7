"""The gate for fences: what came later stays ahead, on every way to the server."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncMultiLock,
    Coordinator,
    FenceGate,
)
from redis_sync_aio.errors import StaleFence, WrongKeyType

from ..support.inside import gate_keys
from ..support.primitives import LOCK, REENTRANT, ROBUST, SEMAPHORE, WRITER, Primitive, each

NAME = "gate"
KEY = gate_keys(NAME.encode()).all[0]


@pytest.fixture(params=["link", "polling-resp2-decoded", "cluster"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def gate(sync: Coordinator) -> FenceGate:
    return FenceGate(sync, NAME)


async def test_an_older_fence_is_refused_and_the_same_is_not(gate: FenceGate, redis: Redis) -> None:
    """A pass keeps the gate for a week, and a refusal does not."""
    assert await gate.highest() is None
    for fence in (5, 7, 7):
        await gate.accept(fence)
        assert 6.9 < (await redis.pttl(KEY)) / 86_400_000 < 7.1
        await redis.pexpire(KEY, 60_000)
    with pytest.raises(StaleFence) as stale:
        await gate.accept(6)
    assert (stale.value.name, stale.value.fence, stale.value.highest) == (NAME, 6, 7)
    assert await gate.highest() == 7
    assert await redis.pttl(KEY) <= 60_050  # a key may be younger than the virtual time


async def test_a_ttl_of_its_own(sync: Coordinator, redis: Redis) -> None:
    await FenceGate(sync, NAME, keep=timedelta(minutes=1)).accept(1)
    assert 50_000 < await redis.pttl(KEY) <= 60_050  # a key may be younger than the virtual time


@each([LOCK, ROBUST, REENTRANT, WRITER, SEMAPHORE], "kind")
async def test_leases_pass_in_their_order_whatever_their_kind(
    gate: FenceGate, sync: Coordinator, kind: Primitive
) -> None:
    """The name may be the same."""
    async with kind.make(sync, NAME) as older:
        await gate.accept(older)
    async with kind.make(sync, NAME) as newer:
        await gate.accept(older)
        await gate.accept(newer)
        with pytest.raises(StaleFence):
            await gate.accept(older)
        assert await gate.highest() == newer.fence


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
