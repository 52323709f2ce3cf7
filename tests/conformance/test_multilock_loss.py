"""AsyncMultiLock: losing one of the locks, failing half-way, and being cancelled anywhere (P4, P5, P6, P7)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncMultiLock, Coordinator, LeaseLost, NotHeld, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed, LossReason, WrongKeyType
from redis_sync_aio.types import MultiLease

from ..support.arena import Arena, sweep_all
from ..support.body import FAST, for_ever, lost_in
from ..support.inside import Grant, hub_of, lock_keys, try_acquire_all
from ..support.multilocks import all_free, holders, names, queued, way
from ..support.proxy import FaultProxy

__all__ = ["names", "way"]  # fixtures
TTL = 0.4


# -- losing one of them ------------------------------------------------------------------------------------

Fault = Callable[[Redis, str], Awaitable[object]]
FAULTS: dict[str, tuple[Fault, LossReason]] = {
    "deleted": (lambda redis, name: redis.delete(name), "expired"),
    "overwritten": (lambda redis, name: redis.set(name, "other", px=60_000), "taken"),
    "flushed": (lambda redis, _: redis.flushall(), "expired"),
}
faults = pytest.mark.parametrize(("fault", "reason"), FAULTS.values(), ids=FAULTS)


async def only_the_foreign_is_left(lock: AsyncMultiLock) -> bool:
    return set(await holders(lock)) <= {None, "other"}


@faults
@pytest.mark.parametrize("which", range(3))
async def test_p6_one_is_lost(
    sync: Coordinator, redis: Redis, names: tuple[str, ...], which: int, fault: Fault, reason: LossReason
) -> None:
    """P6: the body is cancelled, the others are given back, LeaseLost names the one that was lost."""
    lock = AsyncMultiLock(sync, names, ttl=TTL)

    async def body(_: MultiLease) -> None:
        await fault(redis, names[which])
        await for_ever()

    lease, error = await lost_in(lock, body)
    assert error.reason == reason
    assert error.name == names[which] or fault is FAULTS["flushed"][0]
    assert all(repr(name) in str(error) for name in names)
    assert lease.lost
    await wait_until(lambda: only_the_foreign_is_left(lock), FAST, timeout=5)
    for ask in (lease.release, lambda: lease.extend(5)):
        with pytest.raises(LeaseLost) as caught:
            await ask()
        assert caught.value.name == error.name
    await wait_until(lambda: forgotten(sync), FAST, timeout=5)


async def forgotten(sync: Coordinator) -> bool:
    return not hub_of(sync).resources and not hub_of(sync).acquisitions


@faults
async def test_p6_a_loss_found_by_the_release(
    sync: Coordinator, redis: Redis, names: tuple[str, ...], fault: Fault, reason: LossReason
) -> None:
    lock = AsyncMultiLock(sync, names)
    lease, error = await lost_in(lock, lambda _: fault(redis, names[1]))
    assert error.reason == reason
    assert error.name == names[1] or fault is FAULTS["flushed"][0]
    assert lease.lost
    await wait_until(lambda: only_the_foreign_is_left(lock), FAST, timeout=5)


async def test_one_of_them_is_not_released_by_its_own_name(sync: Coordinator, names: tuple[str, ...]) -> None:
    """What stands under a multi-lock is given back by that only."""
    lock = AsyncMultiLock(sync, names)
    async with lock as lease:
        with pytest.raises(NotHeld, match="stands on several"):
            await AsyncLock(sync, names[2]).release()
        lease.check()
    await wait_until(lambda: all_free(lock), FAST, timeout=5)


async def test_p6_one_deadline_the_earliest(sync: Coordinator, redis: Redis, names: tuple[str, ...]) -> None:
    async with AsyncMultiLock(sync, names, auto_renew=False) as lease:
        await next(iter(hub_of(sync).resources[lock_keys(names[1].encode()).id].leases)).extend(5000)
        assert lease.remaining() <= 5


async def test_p6_one_is_lost_while_the_next_is_waited_for(
    sync: Coordinator, other: Coordinator, redis: Redis, names: tuple[str, ...]
) -> None:
    """Nobody relied on it yet: all are acquired again."""
    lock = AsyncMultiLock(sync, names, ttl=TTL)
    single = AsyncLock(other, names[1])
    holder = await single.acquire()
    waiting = asyncio.create_task(lock.acquire(timeout=10))
    await wait_until(queued(single), FAST, timeout=5)
    (early,) = hub_of(sync).resources[lock_keys(names[0].encode()).id].leases
    await redis.delete(names[0])
    await asyncio.wait_for(early.wait_ended(), 5)
    await holder.release()
    lease = await waiting
    assert lease.fences[names[0]] > early.fence
    lease.check()
    await lease.release()
    assert await all_free(lock)


@pytest.mark.parametrize("which", range(3))
async def test_p6_one_is_lost_while_the_others_are_still_under_way(
    sync: Coordinator, names: tuple[str, ...], which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as taken: a try gives up, a wait goes on, and what was granted is given back or kept in order."""
    lock = AsyncMultiLock(sync, names)
    losses = 0

    async def lose_one(*arguments: Any) -> tuple[list[Grant | None], list[bool]]:
        nonlocal losses
        found, free = await try_acquire_all(*arguments)
        lost = found[which] if which < len(found) and losses % 2 == 0 else None
        losses += 1
        if lost is not None:
            lost.give_back()
            lost.lose("taken")
        return found, free

    monkeypatch.setattr("redis_sync_aio._primitives.multilock.try_acquire_all", lose_one)
    assert await lock.try_acquire() is None
    await wait_until(lambda: all_free(lock), FAST, timeout=5)
    losses = 0
    async with lock.acquire(timeout=5) as lease:
        lease.check()
        assert None not in await holders(lock)
    assert losses >= 1
    assert await all_free(lock)


async def test_p12_the_coordinator_is_closed(redis: Redis, other: Coordinator, names: tuple[str, ...]) -> None:
    """While held: LeaseLost. While waiting: CoordinatorClosed. Nothing stays behind."""
    lock = AsyncMultiLock(other, names)
    async with Coordinator(redis) as sync:
        _, error = await lost_in(AsyncMultiLock(sync, names), lambda _: asyncio.create_task(sync.aclose()))
        assert error.reason == "closed"
    await wait_until(lambda: all_free(lock), FAST, timeout=5)
    single = AsyncLock(other, names[2])
    async with Coordinator(redis) as sync, single:
        waiting = asyncio.create_task(AsyncMultiLock(sync, names).acquire())
        await wait_until(queued(single), FAST, timeout=5)
        await sync.aclose()
        with pytest.raises(CoordinatorClosed):
            await waiting
    await wait_until(lambda: all_free(lock), FAST, timeout=5)


# -- half-way ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", range(3))
async def test_p5_an_error_gives_back_all(
    sync: Coordinator, other: Coordinator, redis: Redis, names: tuple[str, ...], which: int
) -> None:
    await redis.hset(names[which], "a", "hash")
    lock = AsyncMultiLock(sync, names)
    for ask in (lock.acquire, lock.try_acquire, lambda: lock.acquire(timeout=0)):
        with pytest.raises(WrongKeyType):
            await ask()
    await redis.delete(names[which])
    await wait_until(lambda: all_free(AsyncMultiLock(other, names)), FAST, timeout=5)
    await wait_until(lambda: forgotten(sync), FAST, timeout=5)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("how", ["times out", "cancelled"])
async def test_p5_giving_up_the_wait_gives_back_all(
    sync: Coordinator, other: Coordinator, names: tuple[str, ...], which: int, how: str
) -> None:
    lock = AsyncMultiLock(sync, names)
    single = AsyncLock(other, names[which])
    async with single:
        waiting = asyncio.create_task(lock.acquire(timeout=0.05 if how == "times out" else None))
        if how == "cancelled":
            await wait_until(queued(single), FAST, timeout=5)
            waiting.cancel()
        await asyncio.wait([waiting], timeout=5)
        assert waiting.cancelled() if how == "cancelled" else isinstance(waiting.exception(), TimeoutError)
        for name in names:
            if name != single.name:
                await (await AsyncLock(other, name).acquire(timeout=5)).release()
        await wait_until(queued(single, 0), FAST, timeout=5)
    await wait_until(lambda: all_free(lock), FAST, timeout=5)


async def test_a_release_without_an_answer_may_be_repeated(server: EmbeddedServer, names: tuple[str, ...]) -> None:
    async with (
        FaultProxy(server) as proxy,
        proxy.client() as client,
        Coordinator(client, retry_for=0.3, response_timeout=0.2) as sync,
    ):
        lock = AsyncMultiLock(sync, names)
        lease = await lock.acquire()
        proxy.black_hole = True
        with pytest.raises(Unreachable):
            await lease.release()
        proxy.black_hole = False
        await lease.release()
        assert await all_free(lock)


# -- cancellation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("contended", [None, 0, 2], ids=["free", "the first is taken", "the last is taken"])
async def test_p5_cancelled_anywhere(
    sync: Coordinator, other: Coordinator, redis: Redis, names: tuple[str, ...], contended: int | None, twice: bool
) -> None:
    """P5: at every suspension point, and after any number of turns; nothing is left, nothing swallowed."""
    arena = Arena(sync, other, redis, names)
    await arena.check_free()
    lock = AsyncMultiLock(sync, names)

    async def operation() -> None:
        if contended is not None:
            await arena.hold(contended)
        async with lock.acquire(timeout=20) as lease:
            assert isinstance(lease, MultiLease)
            await lease.extend(20)

    assert await sweep_all(arena, operation, twice=twice, turns=range(0, 60, 3)) > 10


async def test_p5_a_try_is_cancelled_anywhere(
    sync: Coordinator, other: Coordinator, redis: Redis, names: tuple[str, ...]
) -> None:
    arena = Arena(sync, other, redis, names)
    await arena.check_free()
    lock = AsyncMultiLock(sync, names)

    async def operation() -> None:
        lease = await lock.try_acquire()
        assert lease is not None
        await lease.release()

    assert await sweep_all(arena, operation, twice=False, turns=range(20)) > 10
