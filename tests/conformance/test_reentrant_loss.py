"""AsyncReentrantLock: what a loss, a cancellation and a server out of reach do to all that are inside (P5, P6, P7)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncReentrantLock, Coordinator, LeaseLost, NotHeld, Unreachable
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import LossReason
from redis_sync_aio.types import BaseLease

from ..support.arena import Arena, sweep_all
from ..support.body import assert_undisturbed, for_ever, lost_in
from ..support.proxy import FaultProxy
from ..support.virtual import stall

NAME = "reentrant"
TTL = 0.4


@pytest.fixture(params=["link", "polling", "cluster"])
def way(request: pytest.FixtureRequest) -> str:
    """What differs here is only whether a waiter is woken: two ways will do."""
    return str(request.param)


@pytest.fixture
def lock(sync: Coordinator) -> AsyncReentrantLock:
    return AsyncReentrantLock(sync, NAME)


# -- losing it ---------------------------------------------------------------------------------------------

Fault = Callable[[Redis], Awaitable[object]]
FAULTS: dict[str, tuple[Fault, LossReason]] = {
    "deleted": (lambda redis: redis.delete(NAME), "expired"),
    "overwritten": (lambda redis: redis.set(NAME, "other", px=60_000), "taken"),
    "flushed": (lambda redis: redis.flushall(), "expired"),
}
faults = pytest.mark.parametrize(("fault", "reason"), FAULTS.values(), ids=FAULTS)


@faults
async def test_p6_a_loss_cancels_the_outermost_body(
    sync: Coordinator, redis: Redis, fault: Fault, reason: LossReason
) -> None:
    """P6, P7: one cancellation takes all bodies of the task along; the outermost turns it into LeaseLost."""
    lock = AsyncReentrantLock(sync, NAME, ttl=TTL)
    seen: list[type[BaseException]] = []
    leases: list[BaseLease] = []

    async def nested(depth: int) -> None:
        try:
            async with lock as lease:
                leases.append(lease)
                if depth:
                    await nested(depth - 1)
                else:
                    await fault(redis)
                    await for_ever()
        except BaseException as error:
            seen.append(type(error))
            raise

    with pytest.raises(LeaseLost) as caught:
        async with asyncio.timeout(5):
            await nested(2)
    assert (caught.value.name, caught.value.reason) == (NAME, reason)
    assert seen == [asyncio.CancelledError, asyncio.CancelledError, LeaseLost]
    assert all(lease.lost for lease in leases)
    await assert_undisturbed()
    assert lock.depth() == 0
    await redis.delete(NAME)
    async with lock as lease:
        assert lease.fence > leases[0].fence


@faults
async def test_p6_a_loss_found_by_the_last_release(
    lock: AsyncReentrantLock, redis: Redis, fault: Fault, reason: LossReason
) -> None:
    with pytest.raises(LeaseLost) as caught:
        async with lock, lock:
            await fault(redis)
    assert caught.value.reason == reason
    await assert_undisturbed()
    assert lock.depth() == 0


async def test_p6_an_acquisition_does_not_count_on_a_dead_lease(sync: Coordinator, redis: Redis) -> None:
    lock = AsyncReentrantLock(sync, NAME, ttl=TTL, on_lost="event")

    async def body(outer: BaseLease) -> None:
        inner = await lock.acquire()
        await redis.delete(NAME)
        await asyncio.wait_for(inner.wait_lost(), 5)
        asks: list[Callable[[], Awaitable[object]]] = [lock.acquire, lock.try_acquire, lock.acquire().__aenter__]
        for ask in (*asks, inner.release, lock.release):
            with pytest.raises(LeaseLost):
                await ask()
        with pytest.raises(LeaseLost):
            outer.check()

    outer, _ = await lost_in(lock, body)
    async with lock as fresh:
        assert fresh.fence > outer.fence
        assert lock.depth() == 1


async def test_p6_lost_in_the_very_turn_of_its_grant(
    lock: AsyncReentrantLock, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is inside of what never began: the owner may try again immediately."""
    acquire = lock._on._grant

    async def acquire_and_lose(*request: Any) -> Any:
        grant = await acquire(*request)
        grant.lose("taken")
        return grant

    with monkeypatch.context() as patch:
        patch.setattr(lock._on, "_grant", acquire_and_lose)
        with pytest.raises(LeaseLost) as caught:
            await lock.acquire()
    assert caught.value.reason == "taken"
    assert lock.depth() == 0
    await redis.delete(NAME)
    async with lock.acquire(timeout=5):
        assert lock.depth() == 1


async def test_p6_leaving_a_lost_lease_of_acquire(sync: Coordinator, redis: Redis) -> None:
    """Without bodies: each release says LeaseLost, and then the owner may begin again."""
    lock = AsyncReentrantLock(sync, NAME, ttl=TTL)
    leases = [await lock.acquire(), await lock.acquire()]
    await redis.delete(NAME)
    await asyncio.wait_for(leases[0].wait_lost(), 5)
    for left in (1, 0):
        with pytest.raises(LeaseLost):
            await lock.acquire()
        with pytest.raises(LeaseLost):
            await lock.release()
        assert lock.depth() == left
    await (await lock.acquire(timeout=5)).release()


async def test_p6_a_loss_nobody_could_notice_is_found_at_the_inner_end(sync: Coordinator) -> None:
    """A blocked event loop: the inner body's end looks at the clock, so what follows it does not run."""
    lock = AsyncReentrantLock(sync, NAME, ttl=0.05, auto_renew=False)

    async def body(_: BaseLease) -> None:
        async with lock:
            stall(0.06)
        raise AssertionError("the lock was not held any more")

    await lost_in(lock, body)


async def test_p6_a_loss_cancels_every_task_that_is_inside(sync: Coordinator, redis: Redis) -> None:
    lock = AsyncReentrantLock(sync, NAME, ttl=TTL)
    inside = asyncio.Semaphore(0)

    async def task() -> None:
        async with lock.acquire(identity="job"), lock.acquire(identity="job"):
            inside.release()
            await for_ever()

    async def body(lease: BaseLease) -> None:
        tasks = [asyncio.create_task(task()) for _ in range(3)]
        for _ in tasks:
            await inside.acquire()
        await redis.delete(NAME)
        await asyncio.wait(tasks, timeout=5)
        assert [type(one.exception()) for one in tasks] == [LeaseLost] * 3

    watched = AsyncReentrantLock(sync, NAME, ttl=TTL, on_lost="event")
    await lost_in(watched.acquire(identity="job"), body)


async def test_p6_the_outer_body_ended_first(sync: Coordinator, redis: Redis) -> None:
    """Then the next one is the outermost."""
    lock = AsyncReentrantLock(sync, NAME, ttl=TTL)
    outer, inner = lock.acquire(), lock.acquire()
    await outer.__aenter__()

    async def body(_: BaseLease) -> None:
        await outer.__aexit__(None, None, None)
        await redis.delete(NAME)
        await for_ever()

    await lost_in(inner, body)


async def test_p12_closing_the_coordinator_ends_all_levels(redis: Redis) -> None:
    async with Coordinator(redis) as sync:
        lock = AsyncReentrantLock(sync, NAME)

        async def body(_: BaseLease) -> None:
            async with lock:
                await asyncio.create_task(sync.aclose())

        _, error = await lost_in(lock, body)
        assert error.reason == "closed"
    assert await redis.get(NAME) is None


async def test_the_lock_underneath_is_not_released_by_its_name(lock: AsyncReentrantLock, sync: Coordinator) -> None:
    """What stands under a reentrant lock is given back by its owner only."""
    async with lock as lease:
        with pytest.raises(NotHeld, match="its owner may reenter"):
            await AsyncLock(sync, NAME).release()
        lease.check()


async def test_a_release_without_an_answer_may_be_repeated(server: EmbeddedServer) -> None:
    async with (
        FaultProxy(server) as proxy,
        proxy.client() as client,
        Coordinator(client, retry_for=0.3, response_timeout=0.2) as sync,
    ):
        lock = AsyncReentrantLock(sync, NAME)
        inner = [await lock.acquire(), await lock.acquire()]
        proxy.black_hole = True
        await inner[0].release()
        with pytest.raises(Unreachable):
            await inner[1].release()
        proxy.black_hole = False
        assert lock.depth() == 0, "it is not renewed any more: nobody may build on it"
        await inner[1].release()
        assert not await lock.locked()
        assert lock.depth() == 0


async def test_p5_acquired_again_while_the_release_is_under_way(lock: AsyncReentrantLock, redis: Redis) -> None:
    """A release that was cancelled goes on: what its owner acquires next is a new lease, not a share of that one."""
    lease = await lock.acquire()
    releasing = asyncio.create_task(lease.release())
    await asyncio.sleep(0)
    releasing.cancel()
    async with lock.acquire(timeout=5) as again:
        assert again.fence > lease.fence
        assert await redis.get(NAME) == again.token.encode()
        assert lock.depth() == 1
    await asyncio.wait([releasing])
    assert releasing.cancelled()


# -- cancellation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("contended", [False, True], ids=["free", "handed over"])
async def test_p5_cancelled_anywhere(sync: Coordinator, redis: Redis, contended: bool, twice: bool) -> None:
    """P5: at every suspension point, and after any number of turns; nothing is left, nothing swallowed."""
    async with Coordinator(redis) as other:
        arena = Arena(sync, other, redis, [NAME])
        await arena.check_free()
        lock = AsyncReentrantLock(sync, NAME)

        async def operation() -> None:
            if contended:
                await arena.hold()
            async with lock.acquire(timeout=20) as lease:
                async with lock:
                    await asyncio.sleep(0)
                    await lease.extend(20)
                await asyncio.sleep(0)

        assert await sweep_all(arena, operation, twice=twice, turns=range(0, 60, 2)) > 10
