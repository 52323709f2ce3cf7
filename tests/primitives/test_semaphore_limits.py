"""A limit that changes in the code: who comes with another one than the server's, and whose limit counts meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, AsyncSemaphore, Backoff, Coordinator, wait_until
from redis_sync_aio.errors import LimitMismatch

from ..support.inside import tuned

NAME = "limited"
FAST = Backoff(initial=0.001, cap=0.01)
WAYS: dict[str, dict[str, Any]] = {"lua": {}, "watch": {"engine": "watch"}, "shared": {"share": True}}


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """How the semaphores of a test decide."""
    return WAYS[request.param]


def semaphore(sync: Coordinator, limit: int | None, way: dict[str, Any], **options: Any) -> AsyncSemaphore:
    return AsyncSemaphore(sync, NAME, limit=limit, **way, **options)


async def test_a_deployment_may_change_a_limit_that_nobody_uses(
    sync: Coordinator, other: Coordinator, way: dict[str, Any]
) -> None:
    """Up and down; but not while somebody holds a permit."""
    four, six = semaphore(sync, 4, way), semaphore(other, 6, way)
    async with four:
        with pytest.raises(LimitMismatch, match="its limit is 4, not 6: use the same limit everywhere") as caught:
            await six.acquire()
        assert (caught.value.expected, caught.value.found) == (6, 4)
    async with six.acquire(weight=6):
        with pytest.raises(LimitMismatch, match="its limit is 6, not 4"):
            await four.try_acquire()
    async with four:
        assert await six.get_limit() == 4


async def test_a_limit_that_somebody_waits_for_does_not_give_way(
    sync: Coordinator, redis: Redis, way: dict[str, Any]
) -> None:
    """The permits are free, and belong to a waiter that polls and has not looked yet."""
    polls = Backoff(initial=0.4, cap=0.4, jitter=False)
    async with tuned(redis, push="never", poll=polls) as polling:
        holder, waits = semaphore(sync, 1, way), semaphore(polling, 1, {})
        lease = await holder.acquire()
        waiter = asyncio.create_task(waits.acquire())

        async def queued() -> bool:
            return (await holder.statistics()).waiting == 1

        await wait_until(queued, FAST, timeout=5)
        await lease.release()
        with pytest.raises(LimitMismatch, match="its limit is 1, not 2"):
            await semaphore(sync, 2, way).acquire()
        await (await asyncio.wait_for(waiter, 5)).release()
        async with semaphore(sync, 2, way).acquire(weight=2):
            pass


async def test_keep_goes_by_the_limit_of_the_server_until_nobody_uses_it(
    sync: Coordinator, other: Coordinator, way: dict[str, Any]
) -> None:
    old, new = semaphore(sync, 2, way), semaphore(other, 3, way, on_mismatch="keep")
    async with old.acquire():
        async with new.acquire():
            assert await new.try_acquire() is None
            assert await new.get_limit() == 2
        with pytest.raises(LimitMismatch, match="a weight of 3 never fits into its limit of 2"):
            await new.acquire(weight=3)
    async with new.acquire(weight=3):
        assert await new.get_limit() == 3


async def test_set_makes_its_limit_that_of_the_server_and_grants_the_waiters_that_fit(
    sync: Coordinator, other: Coordinator, way: dict[str, Any]
) -> None:
    old, new = semaphore(sync, 1, way | {"share": False}), semaphore(other, 3, way, on_mismatch="set")
    holder = await old.acquire()
    waiter = asyncio.create_task(old.acquire())

    async def queued() -> bool:
        return (await old.statistics()).waiting == 1

    await wait_until(queued, FAST, timeout=5)
    mine = await new.acquire()
    theirs = await asyncio.wait_for(waiter, 5)
    assert await new.get_limit() == 3
    assert (await new.statistics()).held == 3
    with pytest.raises(LimitMismatch, match="its limit is 3, not 1"):
        await semaphore(sync, 1, {}).acquire()
    for lease in (holder, theirs, mine):
        await lease.release()


async def test_a_limit_that_resize_has_set_stays_until_the_next_resize(
    sync: Coordinator, redis: Redis, way: dict[str, Any]
) -> None:
    """Also when nobody holds or waits, for years, and whatever a request says of its own limit."""
    old = semaphore(sync, 4, way)
    async with old:
        pass
    await old.resize(2)
    async with old:
        pass
    for options in ({}, {"on_mismatch": "set"}):
        with pytest.raises(
            LimitMismatch, match=r"its limit is 2, not 4: resize\(\) set it, and only resize\(\) changes"
        ):
            await semaphore(sync, 4, way, **options).acquire()
    async with semaphore(sync, 4, way, on_mismatch="keep").acquire(weight=2):
        assert await old.get_limit() == 2
    year_ms = 365 * 24 * 3_600_000
    assert await redis.pttl(old._keys.all[1]) > 10 * year_ms
    await semaphore(sync, None, {}).resize(4)
    async with semaphore(sync, 4, way).acquire(weight=4):
        pass


async def test_a_refusal_names_the_limit_that_this_object_set_last(
    sync: Coordinator, other: Coordinator, way: dict[str, Any]
) -> None:
    mine, theirs = semaphore(sync, 3, way), semaphore(other, None, {})
    async with mine:
        await mine.resize(5)
        await theirs.resize(7)
        with pytest.raises(LimitMismatch, match="its limit is 7, not 5") as caught:
            await mine.try_acquire()
    assert (caught.value.expected, caught.value.found) == (5, 7)


async def test_set_pauses_for_all_and_limit_0_gives_way_when_nobody_holds_or_waits(
    sync: Coordinator, other: Coordinator, way: dict[str, Any]
) -> None:
    paused = semaphore(other, 0, way, on_mismatch="set")
    async with semaphore(sync, 2, way):
        assert await paused.try_acquire() is None
        assert await paused.get_limit() == 0
        with pytest.raises(LimitMismatch, match=r"its limit is 0 \(paused\), not 3"):
            await semaphore(other, 3, way).acquire()
        assert await semaphore(other, 3, way, on_mismatch="keep").try_acquire() is None
    async with semaphore(sync, 3, way).acquire(weight=3):
        assert await paused.get_limit() == 3
        with pytest.raises(AcquireTimeout) as caught:
            await semaphore(other, 0, way, on_mismatch="keep").acquire(timeout=0.05)
        assert "paused" not in str(caught.value)


async def test_on_mismatch_is_checked(sync: Coordinator) -> None:
    with pytest.raises(ValueError, match="on_mismatch"):
        AsyncSemaphore(sync, NAME, limit=2, on_mismatch=cast(Any, "ours"))
    with pytest.raises(ValueError, match="limit=None takes the server's"):
        AsyncSemaphore(sync, NAME, limit=None, on_mismatch="keep")
