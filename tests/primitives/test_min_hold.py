"""A lock with ``min_hold`` stays taken for that time, however early it is released, and goes on to its waiters then."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, Coordinator, LeaseLost, wait_until
from redis_sync_aio.coordinator import Push
from redis_sync_aio.types import Engine

from ..conftest import MakeClient
from ..support.body import FAST, waits


@pytest.mark.parametrize("engine", ["auto", "watch"])
@pytest.mark.parametrize("push", ["auto", "never"])
@pytest.mark.usefixtures("redis")
async def test_the_next_waiter_has_it_when_the_time_is_over(
    make_client: MakeClient, engine: Engine, push: Push
) -> None:
    """The waiter is notified that it ends sooner than after the ttl, or polls; it does not hang."""
    async with (
        Coordinator(make_client(), push=push) as sync,
        Coordinator(make_client(), push=push) as other,
    ):
        lock = AsyncLock(sync, "m", ttl=3600, min_hold=1.5, engine=engine)
        before = time.monotonic()
        lease = await lock.acquire()
        waiter = asyncio.create_task(AsyncLock(other, "m", engine=engine).acquire())
        await wait_until(waits(lock), FAST, timeout=20)
        await lease.release()
        async with asyncio.timeout(60):
            granted = await waiter
        assert time.monotonic() - before >= 1.5
        assert granted.fence > lease.fence
        await granted.release()


async def test_it_stays_taken_after_the_release(sync: Coordinator, other: Coordinator, redis: Redis) -> None:
    """Which is confirmed, and ends the lease in this process. It is not renewed any more."""
    lock = sync.lock("m", ttl=600, min_hold=300)
    async with lock as lease:
        pass
    assert 200_000 < await redis.pttl("m") <= 300_000
    assert lease.remaining() == 0
    assert await other.lock("m").try_acquire() is None
    assert await lock.try_acquire() is None
    await lease.release()  # once more
    assert await other.lock("m").force_release()
    assert await other.lock("m").try_acquire() is not None


async def test_closing_the_coordinator_keeps_it(make_client: MakeClient, redis: Redis) -> None:
    async with Coordinator(make_client()) as sync:
        lease = await sync.lock("m", ttl=600, min_hold=300).acquire()
    assert 200_000 < await redis.pttl("m") <= 300_000
    assert lease.is_lost()


async def test_what_was_held_for_longer_is_released_immediately(sync: Coordinator, redis: Redis) -> None:
    started = time.monotonic()
    lease = await sync.lock("m", ttl=600, min_hold=0.2).acquire()
    await wait_until(lambda: time.monotonic() - started > 0.4 + 0.1, FAST, timeout=20)
    await lease.release()
    assert await redis.exists("m") == 0


async def test_a_request_that_is_cancelled_keeps_nothing(sync: Coordinator, other: Coordinator, redis: Redis) -> None:
    holder = await other.lock("m").acquire()
    waiter = asyncio.create_task(sync.lock("m", ttl=600, min_hold=300).acquire())
    await wait_until(waits(sync.lock("m")), FAST, timeout=20)
    releasing = asyncio.create_task(holder.release())
    await asyncio.sleep(0)
    waiter.cancel()
    await releasing
    with pytest.raises(asyncio.CancelledError):
        await waiter

    async def free() -> bool:
        return await redis.exists("m") == 0

    await wait_until(free, FAST, timeout=20)


async def test_a_request_that_is_closed_after_it_was_granted_keeps_nothing(sync: Coordinator, redis: Redis) -> None:
    """No task ever had the lease."""
    asking: Any = sync.lock("m", ttl=600, min_hold=300).acquire()
    answer = asking.send(None)
    await wait_until(answer.done, FAST, timeout=20)
    assert await redis.exists("m") == 1
    asking.close()

    async def free() -> bool:
        return await redis.exists("m") == 0

    await wait_until(free, FAST, timeout=20)


async def test_a_loss_is_found_at_the_release(sync: Coordinator, redis: Redis) -> None:
    lease = await sync.lock("m", ttl=600, min_hold=300).acquire()
    await redis.set("m", "somebody else", px=100_000)
    with pytest.raises(LeaseLost) as lost:
        await lease.release()
    assert lost.value.reason == "taken"
    await redis.delete("m")
    lease = await sync.lock("m", ttl=600, min_hold=300).acquire()
    await redis.delete("m")
    with pytest.raises(LeaseLost):
        await lease.release()
    assert await redis.exists("m") == 0


async def test_bad_arguments(sync: Coordinator) -> None:
    with pytest.raises(ValueError, match="min_hold cannot be combined with share=True: leave one of them out"):
        sync.lock("m", share=True, min_hold=1)
    with pytest.raises(ValueError, match="must not exceed the ttl"):
        sync.lock("m", ttl=10, min_hold=11)
    with pytest.raises(ValueError, match="must not exceed the ttl"):
        await sync.lock("m", ttl=30, min_hold=20).acquire(ttl=10)
    with pytest.raises(ValueError, match="min_hold cannot be combined with an identity"):
        await sync.lock("m", min_hold=1).acquire(identity="me")
    with pytest.raises(ValueError, match="cannot be detached"):
        await (await sync.lock("m", min_hold=1).acquire()).detach()
