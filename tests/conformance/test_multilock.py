"""AsyncMultiLock: all or none, no deadlock, each name the lock of that name; losses, errors, cancellation (P1-P12)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncMultiLock,
    Coordinator,
    LeaseLost,
    NotHeld,
    wait_until,
)
from redis_sync_aio.errors import LossReason, WrongKeyType
from redis_sync_aio.types import MultiLease

from ..support.body import FAST, for_ever, lost_in
from ..support.inside import hub_of, lock_keys, now
from ..support.views import holder_of

TTL = 4.0
SLOTS: dict[str, tuple[str, ...]] = {
    "one slot": ("{m}:1", "{m}:2", "{m}:3"),  # one script
    "three slots": ("m:1", "m:2", "m:3"),  # a command for each
}


@pytest.fixture(params=SLOTS)
def names(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Three names, in the order in which they are acquired."""
    return SLOTS[request.param]


def queued(lock: AsyncLock, count: int = 1) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        return (await lock.statistics()).waiting == count

    return condition


async def holders(lock: AsyncMultiLock) -> list[str | None]:
    return [holder_of(one) for one in await lock.statistics()]


async def all_free(lock: AsyncMultiLock) -> bool:
    """Nobody holds any of them, nobody waits."""
    return all((holder_of(one), one.waiting) == (None, 0) for one in await lock.statistics())


@pytest.fixture
def lock(sync: Coordinator, names: tuple[str, ...]) -> AsyncMultiLock:
    return AsyncMultiLock(sync, reversed(names))


# -- all or none -------------------------------------------------------------------------------------------


async def test_p1_one_lease_over_all(lock: AsyncMultiLock, names: tuple[str, ...], other: Coordinator) -> None:
    """Each name is the lock an AsyncLock of that name is: same holder, same fence, excluded while held."""
    async with lock as lease:
        found = await lock.statistics()
        assert tuple(one.name for one in found) == lock.names == lease.names == tuple(lease.fences) == names
        assert " ".join(str(holder_of(one)) for one in found) == lease.token
        assert [one.fence for one in found] == list(lease.fences.values())
        assert lease.fence == max(lease.fences.values())
        for name in names:
            assert await AsyncLock(other, name).try_acquire() is None
        lease.check()
        assert 20 < lease.remaining() <= 30
        assert await lock.locked()
    assert await all_free(lock)
    for name in names:
        async with AsyncLock(other, name) as single:
            assert single.fence > lease.fences[name]


@pytest.mark.parametrize("taken", range(3))
async def test_p1_none_if_one_is_taken(
    lock: AsyncMultiLock, names: tuple[str, ...], other: Coordinator, taken: int
) -> None:
    async with lock:  # so the server knows the scripts: what it does not know is sent again, behind the next request
        pass
    rest = [AsyncLock(other, name) for number, name in enumerate(names) if number != taken]
    holder = await AsyncLock(other, names[taken]).acquire(ttl=20)
    assert await lock.try_acquire() is None
    for timeout in (0, 0.2):
        with pytest.raises(AcquireTimeout) as caught:
            await lock.acquire(timeout=timeout)
        assert caught.value.name == names[taken]
        assert caught.value.remaining is not None
        assert 15 < caught.value.remaining < 21
        for single in rest:  # free again when that is raised, for the next one
            await (await single.acquire(timeout=5)).release()
    holder.check()
    await holder.release()
    async with lock.acquire(timeout=5):
        pass
    assert await all_free(lock)


async def test_p9_one_round_trip(lock: AsyncMultiLock, names: tuple[str, ...], writes: list[bytes]) -> None:
    """Free locks: one script of one slot, else one each, in one write; all are released in two at most."""
    for _ in range(2):  # then the server knows the scripts
        await (await lock.acquire()).release()
    writes.clear()
    lease = await lock.acquire()
    (asked,) = writes
    assert asked.count(b"EVALSHA") == (1 if names == SLOTS["one slot"] else 3)
    await lease.release()
    assert len(writes) <= 3


async def test_p2_nobody_barges(lock: AsyncMultiLock, names: tuple[str, ...], other: Coordinator) -> None:
    """A waiter for any of the names gets it first, although the others are free all the time."""
    single = AsyncLock(other, names[1])
    holder = await single.acquire()
    first = asyncio.create_task(single.acquire(timeout=5))
    await wait_until(queued(single, 1), FAST, timeout=5)
    several = asyncio.create_task(lock.acquire(timeout=5))
    await wait_until(queued(single, 2), FAST, timeout=5)
    last = asyncio.create_task(single.acquire(timeout=5))
    await wait_until(queued(single, 3), FAST, timeout=5)
    await holder.release()
    lease = await first
    assert await lock.try_acquire() is None
    await lease.release()
    together = await several
    assert not last.done()
    assert together.fences[names[1]] > lease.fence
    await together.release()
    assert (await last).fence > together.fences[names[1]]
    await last.result().release()
    assert await all_free(lock)


async def test_a_timeout_is_for_all_of_them_together(sync: Coordinator, other: Coordinator) -> None:
    """Each is free before ten seconds of its own have passed, and the last one is not free after ten in all."""
    names = ["m:1", "m:2", "m:3"]
    held = [await AsyncLock(other, name, ttl=60).acquire() for name in names]
    began = now()
    waiting = asyncio.create_task(AsyncMultiLock(sync, names).acquire(timeout=10))
    for lease in held[:2]:
        await asyncio.sleep(4)
        await lease.release()
    with pytest.raises(AcquireTimeout):
        await waiting
    assert 10 <= now() - began < 11
    await held[2].release()


# -- no deadlock -------------------------------------------------------------------------------------------


async def test_p1_random_orders_of_random_names(sync: Coordinator, other: Coordinator) -> None:
    """Many tasks on two coordinators, single locks and multi-locks, of one slot and of several."""
    pool = [*SLOTS["one slot"], *SLOTS["three slots"]]
    inside: set[str] = set()
    done = 0
    choice = random.Random(7)

    async def work(wanted: list[str], coordinator: Coordinator) -> None:
        nonlocal done
        single = len(wanted) == 1
        made = AsyncLock(coordinator, wanted[0]) if single else AsyncMultiLock(coordinator, wanted)
        async with made.acquire(timeout=40):
            assert not inside.intersection(wanted)
            inside.update(wanted)
            await asyncio.sleep(0)
            inside.difference_update(wanted)
            done += 1

    async def worker(jobs: list[list[str]], coordinator: Coordinator) -> None:
        for job in jobs:
            await work(job, coordinator)

    async with asyncio.TaskGroup() as group:
        for number in range(20):
            jobs = [choice.sample(pool, choice.choice((1, 2, 3, 6))) for _ in range(4)]
            group.create_task(worker(jobs, (sync, other)[number % 2]))
    assert done == 20 * 4
    assert await all_free(AsyncMultiLock(sync, pool))
    assert not hub_of(sync).resources
    assert not hub_of(other).resources


# -- releasing ---------------------------------------------------------------------------------------------


async def test_release_by_the_lock(lock: AsyncMultiLock, sync: Coordinator, names: tuple[str, ...]) -> None:
    """By any object of the same names, in the task that acquired it; not by one of other names, nor by another task."""
    lease = await lock.acquire()
    with pytest.raises(NotHeld):
        await AsyncMultiLock(sync, names[:2]).release()
    with pytest.raises(NotHeld, match=r"lease\.release\(\)"):
        await asyncio.create_task(AsyncMultiLock(sync, names).release())
    lease.check()
    await AsyncMultiLock(sync, names).release()
    assert lease.remaining() == 0
    assert await all_free(lock)


# -- inputs ------------------------------------------------------------------------------------------------


async def test_names_in_any_form(sync: Coordinator) -> None:
    """Duplicates collapse, also of text and bytes; the order is that of the keys as bytes."""
    lock = AsyncMultiLock(sync, ["b", b"a", "b", "a", "é", "z"])
    assert lock.names == ("a", "b", "z", "é")
    assert AsyncMultiLock(sync, {"x"}).names == ("x",)
    assert AsyncMultiLock(sync, (name for name in "yx")).names == ("x", "y")
    async with lock as lease, AsyncMultiLock(sync, ["x"]) as single:
        assert set(lease.fences) == {"a", "b", "z", "é"}
        assert single.fence == single.fences["x"]
    assert "'a', 'b', 'z', 'é'" in repr(lock)
    assert "a, b, z, é" in repr(lease)


async def test_bad_names_fail_at_the_call(sync: Coordinator, redis: Redis) -> None:
    bad: list[Any] = [[], (), "user:1", b"user:1", None, 7, [""], ["a", None], [["a"]], ["x" * 9000]]
    for bad_names in bad:
        with pytest.raises((TypeError, ValueError)):
            AsyncMultiLock(sync, bad_names)
    with pytest.raises(ValueError, match="not text"):
        AsyncMultiLock(sync, [b"\xff", "\\xff"])
    assert await redis.keys() == []


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


async def test_one_of_them_is_not_released_by_its_own_name(sync: Coordinator, names: tuple[str, ...]) -> None:
    """What stands under a multi-lock is given back by that only."""
    lock = AsyncMultiLock(sync, names)
    async with lock as lease:
        with pytest.raises(NotHeld, match="stands on several"):
            await AsyncLock(sync, names[2]).release()
        lease.check()
    await wait_until(lambda: all_free(lock), FAST, timeout=5)


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
