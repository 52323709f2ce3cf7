"""AsyncReentrantLock: who is the owner, how often it may acquire, and what a loss does to all that are inside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import permutations
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncReentrantLock,
    Coordinator,
    LeaseLost,
    NotHeld,
    Unreachable,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import LossReason, WrongContext
from redis_sync_aio.testing.faults import FaultProxy
from redis_sync_aio.types import BaseLease

from ..support.body import FAST, assert_undisturbed, for_ever, lost_in
from ..support.views import holder_of
from ..support.virtual import stall

NAME = "reentrant"
TTL = 3.0


@pytest.fixture
def lock(sync: Coordinator) -> AsyncReentrantLock:
    return AsyncReentrantLock(sync, NAME)


@pytest_asyncio.fixture
async def rival(redis: Redis) -> AsyncIterator[AsyncLock]:
    """The same lock, as another process sees it."""
    async with Coordinator(redis) as other:
        yield AsyncLock(other, NAME)


async def elsewhere(run: Callable[[], Awaitable[Any]]) -> Any:
    """Run it in a task of its own."""

    async def inside() -> Any:
        return await run()

    return await asyncio.create_task(inside())


def queued(lock: AsyncLock | AsyncReentrantLock, count: int) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        return (await lock.statistics()).waiting == count

    return condition


# -- the same owner ----------------------------------------------------------------------------------------


async def test_p1_p9_the_same_task_acquires_again_without_a_command(
    lock: AsyncReentrantLock, writes: list[bytes]
) -> None:
    async with lock as outer:
        writes.clear()
        async with lock as middle, lock.acquire(timeout=0) as inner:
            assert await lock.try_acquire() is not None
            assert lock.depth() == 4
            await lock.release()
        assert outer.fence == middle.fence == inner.fence
        assert outer.token == middle.token == inner.token
        outer.check()
        for left in (middle, inner):
            with pytest.raises(NotHeld):
                left.check()
        assert writes == []
        assert holder_of(await lock.statistics()) == outer.token
    assert lock.depth() == 0
    assert not await lock.locked()


async def test_p1_any_object_of_that_name_and_coordinator_is_the_same_lock(sync: Coordinator) -> None:
    """Helpers that make their own lock object do not wait for their caller."""

    async def helper(depth: int) -> int:
        async with AsyncReentrantLock(sync, NAME if depth % 2 else NAME.encode()).acquire(timeout=5) as lease:
            return lease.fence if depth == 0 else await helper(depth - 1)

    async with AsyncReentrantLock(sync, NAME) as lease:
        assert await helper(20) == lease.fence


async def test_p1_other_tasks_and_children_wait(lock: AsyncReentrantLock, sync: Coordinator, rival: AsyncLock) -> None:
    """P1: a child task does not inherit; nor does an AsyncLock of that name in this process, or another process."""
    async with lock, lock:
        assert await elsewhere(lock.try_acquire) is None
        with pytest.raises(AcquireTimeout):
            await elsewhere(lambda: lock.acquire(timeout=0))
        with pytest.raises(AcquireTimeout) as caught:
            await elsewhere(lambda: lock.acquire(timeout=0.01))
        assert caught.value.name == NAME
        assert await AsyncLock(sync, NAME).try_acquire() is None
        assert await rival.try_acquire() is None
        child = asyncio.create_task(lock.acquire(timeout=5))
        await wait_until(queued(lock, 1), FAST, timeout=5)
    await (await child).release()


async def test_p2_an_owner_that_released_all_waits_behind_the_others(
    lock: AsyncReentrantLock, rival: AsyncLock
) -> None:
    async with lock:
        waiting = asyncio.create_task(rival.acquire(timeout=5))
        await wait_until(queued(lock, 1), FAST, timeout=5)
        async with lock:
            pass
        assert not waiting.done()
    assert await lock.try_acquire() is None
    await (await waiting).release()


# -- owners by name ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", ["request-7", ("a", 1), 0, False])
async def test_p1_a_named_owner_may_be_many_tasks(lock: AsyncReentrantLock, owner: object) -> None:
    async with lock.acquire(identity=owner) as outer:
        assert lock.depth() == 0, "the task itself is another owner"
        inner = await elsewhere(lambda: lock.acquire(timeout=0, identity=owner))
        assert inner.fence == outer.fence
        assert await lock.try_acquire() is None
        assert await lock.try_acquire(identity="somebody else") is None
        assert lock.depth(identity=owner) == 2
    assert await lock.locked(), "the other task is still inside"
    await elsewhere(lambda: lock.release(identity=owner))
    assert not await lock.locked()


async def test_p1_coordinators_are_different_owners(sync: Coordinator, redis: Redis) -> None:
    """Two coordinators are two processes, as far as a lock is concerned."""
    async with Coordinator(redis) as other, AsyncReentrantLock(sync, NAME).acquire(identity="x"):
        assert await AsyncReentrantLock(other, NAME).try_acquire(identity="x") is None


# -- releasing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(permutations(range(3))))
async def test_p1_released_in_any_order(lock: AsyncReentrantLock, rival: AsyncLock, order: tuple[int, ...]) -> None:
    """Each lease counts once, however often it is released; the last one frees the lock."""
    leases = [await lock.acquire() for _ in range(3)]
    for number, index in enumerate(order, 1):
        assert await rival.try_acquire() is None
        for _ in range(2):
            await leases[index].release()
            assert lock.depth() == 3 - number
        assert [lease.remaining() > 0 for lease in leases].count(True) == 3 - number
    assert not await lock.locked()


async def test_releasing_by_the_lock_goes_from_the_inside_out(lock: AsyncReentrantLock) -> None:
    leases = [await lock.acquire(), await lock.acquire()]
    with pytest.raises(NotHeld, match="this task"):
        await elsewhere(lock.release)
    with pytest.raises(NotHeld, match="'x'"):
        await lock.release(identity="x")
    await lock.release()
    assert [lease.remaining() > 0 for lease in leases] == [True, False]
    await lock.release()
    with pytest.raises(NotHeld):
        await lock.release()
    assert not await lock.locked()


async def test_p1_what_a_named_owner_has_is_not_released_without_the_name(lock: AsyncReentrantLock) -> None:
    """Even when the task that acquired it has ended."""
    lease = await elsewhere(lambda: lock.acquire(identity="job"))
    with pytest.raises(NotHeld):
        await lock.release()
    lease.check()
    await lock.release(identity="job")


async def test_extending_any_lease_extends_all(lock: AsyncReentrantLock, redis: Redis) -> None:
    async with lock.acquire(ttl=5) as outer:
        async with lock as inner:
            await inner.extend(60)
            assert 50 < inner.remaining() <= 60
            assert 50 < outer.remaining() <= 60
        with pytest.raises(NotHeld):
            await inner.extend(60)
        assert 55_000 < await redis.pttl(NAME) < 61_000


# -- leftovers, inputs -------------------------------------------------------------------------------------


def test_a9_an_owner_belongs_to_one_event_loop(server: EmbeddedServer) -> None:
    """A9: what an owner held when its loop ended was released then; in the next loop it begins again."""
    client = server.client()
    lock = AsyncReentrantLock(client, NAME)
    leases: list[BaseLease] = []

    async def forget_to_release() -> None:
        for depth in (1, 2):
            leases.append(await lock.acquire(timeout=5, identity="x"))
            assert lock.depth(identity="x") == depth

    for _ in range(2):
        asyncio.run(forget_to_release())
        assert all(lease.lost for lease in leases)
    with pytest.raises(WrongContext):
        lock.depth()


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


async def test_p6_a_loss_nobody_could_notice_is_found_at_the_inner_end(sync: Coordinator) -> None:
    """A blocked event loop: the inner body's end looks at the clock, so what follows it does not run."""
    lock = AsyncReentrantLock(sync, NAME, ttl=3, auto_renew=False)

    async def body(_: BaseLease) -> None:
        async with lock:
            stall(3.6)
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
