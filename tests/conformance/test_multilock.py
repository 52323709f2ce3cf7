"""AsyncMultiLock: all or none, no deadlock, and each name the same lock as an AsyncLock of that name."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, AsyncLock, AsyncMultiLock, Coordinator, NotHeld, WouldDeadlock, wait_until
from redis_sync_aio.types import MultiLease

from ..support.body import FAST
from ..support.inside import hub_of, lease_groups
from ..support.multilocks import SLOTS, all_free, holders, queued
from ..support.multilocks import names as names
from ..support.multilocks import way as way
from ..support.views import holder_of


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
    rest = [AsyncLock(other, name) for number, name in enumerate(names) if number != taken]
    holder = await AsyncLock(other, names[taken]).acquire(ttl=20)
    assert await lock.try_acquire() is None
    for timeout in (0, 0.2):
        with pytest.raises(AcquireTimeout) as caught:
            await lock.acquire(timeout=timeout)
        assert caught.value.name == names[taken]
        assert caught.value.remaining is not None
        assert 15 < caught.value.remaining <= 20
        for single in rest:  # free again when that is raised, for the next one
            await (await single.acquire(timeout=5)).release()
    holder.check()
    await holder.release()
    async with lock.acquire(timeout=5):
        pass
    assert await all_free(lock)


@pytest.mark.real
async def test_p9_one_round_trip(lock: AsyncMultiLock, names: tuple[str, ...], redis: Redis) -> None:
    """Free locks: one script of one slot, else one each, in one write; the releases leave in one write, too."""
    await (await lock.acquire()).release()
    done: list[int] = []
    for _ in range(5):  # the server reads a write in parts on a busy machine, and ends of connections of other tests
        before, reads = await scripts_run(redis), await reads_done(redis)
        lease = await lock.acquire()
        asked = await scripts_run(redis) - before
        await lease.release()
        assert asked == (1 if names == SLOTS["one slot"] else 3)
        done.append(await reads_done(redis) - reads)
    assert min(done) <= 2 + 3  # ours, and those of the INFO commands in between


async def scripts_run(redis: Redis) -> int:
    stats = await redis.info("commandstats")
    return int(stats["cmdstat_evalsha"]["calls"])


async def reads_done(redis: Redis) -> int:
    return int((await redis.info("stats"))["total_reads_processed"])


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


async def test_while_waiting_only_what_comes_before_is_held(
    lock: AsyncMultiLock, names: tuple[str, ...], other: Coordinator
) -> None:
    """The reason why nobody deadlocks."""
    async with AsyncLock(other, names[1]):
        waiting = asyncio.create_task(lock.acquire(timeout=5))
        await wait_until(queued(AsyncLock(other, names[1])), FAST, timeout=5)
        first, _, last = await holders(lock)
        assert first is not None
        assert last is None
    await (await waiting).release()


# -- no deadlock -------------------------------------------------------------------------------------------


async def test_p1_abba(sync: Coordinator, other: Coordinator, names: tuple[str, ...]) -> None:
    a, b, _ = names
    count = 0

    async def transfer(coordinator: Coordinator, order: list[str]) -> None:
        nonlocal count
        for _ in range(10):
            async with AsyncMultiLock(coordinator, order).acquire(timeout=30):
                before = count
                await asyncio.sleep(0)
                count = before + 1

    async with asyncio.TaskGroup() as group:
        for coordinator in (sync, other):
            for order in ([a, b], [b, a]):
                group.create_task(transfer(coordinator, order))
    assert count == 40


async def test_p1_random_orders_of_random_names(sync: Coordinator, other: Coordinator, way: str) -> None:
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

    each = 10 if way == "link" else 4
    async with asyncio.TaskGroup() as group:
        for number in range(20):
            jobs = [choice.sample(pool, choice.choice((1, 2, 3, 6))) for _ in range(each)]
            group.create_task(worker(jobs, (sync, other)[number % 2]))
    assert done == 20 * each
    assert await all_free(AsyncMultiLock(sync, pool))
    assert not hub_of(sync).resources
    assert not hub_of(other).resources


@pytest.mark.parametrize("way", ["link"], indirect=True)
async def test_p1_tries_of_one_slot_do_not_spoil_each_other(sync: Coordinator, other: Coordinator) -> None:
    """One script takes all or none: of those who try together exactly one succeeds, in any order of names."""
    names = list(SLOTS["one slot"])
    for _ in range(20):
        tries = [AsyncMultiLock(sync, names).try_acquire(), AsyncMultiLock(other, names[::-1]).try_acquire()]
        (lease,) = [found for found in await asyncio.gather(*tries) if found is not None]
        await lease.release()


# -- releasing ---------------------------------------------------------------------------------------------


async def test_released_as_a_whole_and_once(lock: AsyncMultiLock, other: Coordinator, names: tuple[str, ...]) -> None:
    lease = await lock.acquire()
    await lease.release()
    async with AsyncLock(other, names[0]):
        await lease.release()
        with pytest.raises(NotHeld):
            lease.check()
        with pytest.raises(NotHeld):
            await lock.release()
    assert await all_free(lock)


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


async def test_entered_and_left_in_different_tasks(lock: AsyncMultiLock) -> None:
    stack = AsyncExitStack()
    for way_in in (lock, lock.acquire()):
        lease: Any = await stack.enter_async_context(way_in)
        assert isinstance(lease, MultiLease)
        await asyncio.create_task(stack.aclose())
        assert await all_free(lock)


async def test_one_object_shared_by_many_tasks(lock: AsyncMultiLock) -> None:
    running = 0

    @lock.wrap
    async def section() -> None:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0)
        running -= 1

    async def entered() -> None:
        async with lock:
            await section.__wrapped__()  # type: ignore[attr-defined]

    await asyncio.gather(*(section() for _ in range(4)), *(entered() for _ in range(4)))
    assert await all_free(lock)
    assert not [key for key in lease_groups if isinstance(key, tuple) and key[1] is lock._client]


async def test_extended_as_a_whole(lock: AsyncMultiLock, redis: Redis, names: tuple[str, ...]) -> None:
    async with lock.acquire(ttl=5) as lease:
        await lease.extend(60)
        assert 50 < lease.remaining() <= 60
        for name in names:
            assert 55_000 < await redis.pttl(name) < 61_000


async def test_it_is_not_reentrant(lock: AsyncMultiLock, sync: Coordinator, names: tuple[str, ...]) -> None:
    async with AsyncLock(sync, names[2]):
        with pytest.raises(WouldDeadlock):
            await lock.acquire()


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


async def test_e1_e2_bad_arguments_fail_at_the_call(sync: Coordinator, redis: Redis) -> None:
    bad: list[Any] = [[], (), "user:1", b"user:1", None, 7, [""], ["a", None], [["a"]], ["x" * 9000]]
    for bad_names in bad:
        with pytest.raises((TypeError, ValueError)):
            AsyncMultiLock(sync, bad_names)
    with pytest.raises(ValueError, match="not text"):
        AsyncMultiLock(sync, [b"\xff", "\\xff"])
    lock = AsyncMultiLock(sync, ["a", "b"])
    values: list[Any] = [-1, "5", float("nan"), True]
    for value in values:
        with pytest.raises((TypeError, ValueError)):
            await lock.acquire(timeout=value)
        with pytest.raises((TypeError, ValueError)):
            await lock.try_acquire(ttl=value)
        for option in ("timeout", "ttl", "on_lost"):
            options: dict[str, Any] = {option: value}
            with pytest.raises((TypeError, ValueError)):
                lock.acquire(**options)
        with pytest.raises((TypeError, ValueError)):
            AsyncMultiLock(sync, ["a"], ttl=value)
    assert await redis.keys() == []
