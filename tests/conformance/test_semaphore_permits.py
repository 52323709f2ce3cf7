"""P1, P4, P6, P12: what a permit is: whose, for how long, lost how, and what is left on the server.

FAULTS D2 (a key deleted or evicted), D10 (out of memory). The order of grants and the limit: test_semaphore.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncSemaphore, Coordinator, Lease, LeaseLost, NotHeld, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import OutOfMemory

from ..support.body import FAST, for_ever, lost_in, waits
from ..support.factories import Exclusive
from ..support.inside import hub_of
from ..support.timed import Timed
from ..support.views import tokens

NAME = "permits"
only_link = pytest.mark.parametrize("way", ["link"])


@pytest.fixture(params=["link", "polling", "cluster"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def semaphore(sync: Coordinator, limit: int | None, **options: Any) -> AsyncSemaphore:
    return AsyncSemaphore(sync, NAME, limit=limit, **options)


async def capacity(sem: AsyncSemaphore, limit: int) -> None:
    """Exactly so many permits can be had, and then they are all free again."""
    leases = [await sem.acquire(timeout=5) for _ in range(limit)]
    assert await sem.try_acquire() is None
    assert (await sem.statistics()).held == limit
    for lease in leases:
        await lease.release()
    found = await sem.statistics()
    assert (found.held, found.waiting) == (0, 0)


# -- looking -----------------------------------------------------------------------------------------------


async def test_statistics(sync: Coordinator, other: Coordinator) -> None:
    """Who holds what, those whose lease ends first at the front; the waiters, in order."""
    sem = semaphore(sync, 5)
    one = await sem.acquire(weight=2, identity="worker-7", ttl=20)
    two = await sem.acquire(ttl=10)
    found = await sem.statistics()
    assert (found.limit, found.held, found.available, found.fence) == (5, 3, 2, two.fence)
    for holder, lease, ttl in zip(found.holders, (two, one), (10, 20), strict=True):
        assert (holder.token, holder.weight, holder.fence) == (lease.token, lease.weight, lease.fence)
        assert holder.identity == ("worker-7" if lease is one else None)
        assert holder.remaining is not None
        assert ttl - 1 < holder.remaining <= ttl
    assert not await sem.locked()
    theirs = semaphore(other, 5)
    waiting = [asyncio.create_task(theirs.acquire(weight=4, identity=f"waiter-{n}")) for n in range(3)]
    await wait_until(waits(sem, 3), FAST, timeout=5)
    assert tokens((await sem.statistics()).waiters) == ("waiter-0", "waiter-1", "waiter-2")
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    await wait_until(waits(sem, 0), FAST, timeout=5)
    await sem.resize(3)
    assert await sem.locked()
    await sem.resize(2)
    assert await sem.locked()
    found = await sem.statistics()
    assert (found.limit, found.held, found.available) == (2, 3, 0)
    await one.release()
    await two.release()
    await capacity(sem, 2)


async def test_p9_get_limit_is_cheap_however_many_wait(sync: Coordinator) -> None:
    """P9: neither holders nor waiters come with the limit."""
    sem = semaphore(sync, 1)
    async with sem:
        waiting = asyncio.create_task(sem.acquire())
        await wait_until(waits(sem), FAST, timeout=5)
        assert await sem.get_limit() == 1
        assert await sem._limit_and_queue() == (1, 1)
    await (await waiting).release()


@only_link
@pytest.mark.real
async def test_statistics_behind_tombstones(sync: Coordinator, redis: Redis) -> None:
    """P12: requests that were undone leave a mark for a minute. It is nobody's permit, and hides nobody's."""
    sem = semaphore(sync, 2)
    await capacity(sem, 2)
    for _ in range(120):
        task = asyncio.create_task(sem.acquire())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    await capacity(sem, 2)
    assert await redis.zcard(sem._keys.all[0]) > 100, "they do leave one"
    async with sem.acquire(ttl=300) as lease:
        found = await sem.statistics()
        assert [*tokens(found.holders)] == [lease.token]
        assert (found.held, found.available) == (1, 1)
        assert not await sem.locked()
    await capacity(sem, 2)


# -- identities --------------------------------------------------------------------------------------------


async def test_the_same_identity_is_the_same_permit(sync: Coordinator, other: Coordinator) -> None:
    """Not a second one, and of the same weight, whatever it asks for; another connection may release it."""
    sem, theirs = semaphore(sync, 3), semaphore(other, None)
    first = await sem.acquire(weight=2, identity="worker-7")
    for one in (sem, theirs):
        for weight in (1, 2, 3):
            again = await one.acquire(weight=weight, identity="worker-7", timeout=15)
            assert (again.token, again.identity, again.fence) == ("worker-7", "worker-7", first.fence)
            assert again.weight == first.weight == 2
    assert (await sem.statistics()).held == 2
    async with sem.acquire(identity="worker-8"):
        assert await sem.try_acquire(identity="worker-9") is None
        assert (await theirs.acquire(identity="worker-7", timeout=0)).fence == first.fence
    await theirs.release(identity="worker-7")
    assert (await sem.statistics()).held == 0
    with pytest.raises(LeaseLost):
        await first.release()
    async with sem.acquire(identity="worker-7") as lease:
        assert lease.fence > first.fence
        assert lease.weight == 1
    await capacity(sem, 3)


async def test_a_wrong_identity_is_refused_and_changes_nothing(sync: Coordinator, other: Coordinator) -> None:
    sem, theirs = semaphore(sync, 2), semaphore(other, None)
    lease = await sem.acquire(identity="worker-7")
    before = await sem.statistics()
    for one in (sem, theirs):
        with pytest.raises(NotHeld, match=r"'worker-8'.*'worker-7'"):
            await one.release(identity="worker-8")
        with pytest.raises(NotHeld):
            await theirs.release()
    after = await sem.statistics()
    assert [*tokens(after.holders)] == ["worker-7"]
    assert (after.held, after.fence) == (before.held, before.fence)
    await lease.release()
    with pytest.raises(NotHeld, match="nor by anybody else"):
        await sem.release(identity="worker-7")


@pytest.mark.parametrize("share", [False, True], ids=["own permits", "shared"])
async def test_p1_release_leaves_the_leases_of_other_tasks_alone(sync: Coordinator, share: bool) -> None:
    """It ends the latest that the current task acquired; else what one task left behind that has ended."""
    sem = AsyncSemaphore(sync, NAME, limit=5, share=share)
    first = await sem.acquire()

    async def another() -> list[Lease]:
        leases = [await sem.acquire(), await sem.acquire()]
        await sem.release()
        return leases

    kept, ended = await asyncio.create_task(another())
    for lease in (first, kept):
        lease.check()
    with pytest.raises(NotHeld):
        ended.check()
    last = await sem.acquire()
    await asyncio.create_task(sem.release())
    assert [lease.remaining() > 0 for lease in (first, kept, last)] == [True, False, True]
    with pytest.raises(NotHeld):
        await asyncio.create_task(sem.release())
    for _ in range(2):
        await sem.release()
    assert (await sem.statistics()).held == 0
    with pytest.raises(NotHeld):
        await sem.release()


async def test_p1_an_identity_that_waits_twice_gets_one_permit(sync: Coordinator, other: Coordinator) -> None:
    """P1: the second request finds what the first was granted: the same fence, and the same weight."""
    sem, theirs = semaphore(sync, 2), semaphore(other, 2)
    holder = await sem.acquire(weight=2)
    first = asyncio.create_task(sem.acquire(weight=2, identity="worker-7"))
    await wait_until(waits(sem, 1), FAST, timeout=5)
    second = asyncio.create_task(theirs.acquire(weight=1, identity="worker-7"))
    await wait_until(waits(sem, 2), FAST, timeout=5)
    await holder.release()
    async with asyncio.timeout(5):
        one, same = await first, await second
    assert (one.fence, one.weight) == (same.fence, same.weight) == (one.fence, 2)
    assert (await sem.statistics()).held == 2
    await same.release()
    await capacity(sem, 2)


@only_link
async def test_p5_an_identity_that_waited_twice_and_gave_up_once(sync: Coordinator, other: Coordinator) -> None:
    """P5: the second request is cancelled when its turn comes; the first one's permit stays."""
    sem, theirs = semaphore(sync, 2), semaphore(other, 2)
    for turns in range(12):
        holder = await sem.acquire(weight=2)
        first = asyncio.create_task(sem.acquire(identity="worker-7"))
        await wait_until(waits(sem, 1), FAST, timeout=5)
        second = asyncio.create_task(theirs.acquire(identity="worker-7"))
        await wait_until(waits(sem, 2), FAST, timeout=5)
        await holder.release()
        for _ in range(turns):
            await asyncio.sleep(0)
        second.cancel()
        lease = await asyncio.wait_for(first, 5)
        await asyncio.wait([second])
        await theirs.statistics()  # whatever the cancelled request sends has arrived
        await theirs.statistics()
        assert (await sem.statistics()).held == 1
        await lease.release()
    await capacity(sem, 2)


# -- the end of a lease ------------------------------------------------------------------------------------


async def test_p6_permits_come_back_when_a_lease_ends(sync: Coordinator, other: Coordinator) -> None:
    """P6: the waiter has them within 0.2 s of that; the old holder is told, and takes nothing back."""
    sem, theirs = semaphore(sync, 3), semaphore(other, 3)
    kept = await sem.acquire()
    gone = await AsyncSemaphore(sync, NAME, limit=3, auto_renew=False, ttl=0.3).acquire(weight=2)
    waiting = [asyncio.create_task(theirs.acquire()), asyncio.create_task(sem.acquire())]
    remaining = gone.remaining()
    async with asyncio.timeout(5), Timed() as took:
        leases = [await task for task in waiting]
    assert took.seconds > remaining - 0.01
    assert took.waited < remaining + 0.2
    for _ in range(2):
        with pytest.raises(LeaseLost):
            await gone.release()
    assert (await sem.statistics()).held == 3
    for lease in (kept, *leases):
        lease.check()
        await lease.release()
    await capacity(sem, 3)


@only_link
async def test_p3_a_renewal_gives_away_what_is_over(sync: Coordinator, other: Coordinator, redis: Redis) -> None:
    """P3: the waiter was told of half a minute; another client ended a permit since, and the other one is renewed."""
    sem, theirs = semaphore(sync, 2), semaphore(other, 2)
    kept = await sem.acquire()
    gone = await AsyncSemaphore(sync, NAME, limit=2, auto_renew=False).acquire()
    waiting = asyncio.create_task(theirs.acquire())
    await wait_until(waits(sem), FAST, timeout=5)
    await redis.zadd(sem._keys.all[0], {gone.token: 1})
    assert not waiting.done()
    await kept.extend(20)
    lease = await asyncio.wait_for(waiting, 15)
    assert (await sem.statistics()).held == 2
    with pytest.raises(LeaseLost):
        await gone.release()
    await lease.release()
    await kept.release()
    await capacity(sem, 2)


async def test_p6_a_lost_permit_cancels_its_body_and_no_other(sync: Coordinator, redis: Redis) -> None:
    """P6: somebody who knows its identity released it; the others' permits are renewed as before."""
    sem = semaphore(sync, 3, ttl=0.5)
    others = [await sem.acquire() for _ in range(2)]

    async def body(lease: Lease) -> None:
        async with Coordinator(redis) as admin:
            await semaphore(admin, None).release(identity="worker-7")
        await for_ever()

    _, error = await lost_in(sem.acquire(identity="worker-7"), body)
    assert error.reason == "expired"
    await asyncio.sleep(0.7)  # longer than the ttl: renewed meanwhile
    for lease in others:
        lease.check()
        await lease.release()
    await capacity(semaphore(sync, 3), 3)


@pytest.mark.parametrize("lost", ["state", "permits"])
@pytest.mark.parametrize("waiters", [0, 3])
async def test_p6_d2_one_of_its_keys_is_lost(sync: Coordinator, redis: Redis, lost: str, waiters: int) -> None:
    """P6, D2: evicted or deleted: the holders are told, nobody is stuck, and the limit holds again."""
    sem = semaphore(sync, 2, ttl=0.3)
    before = [await sem.acquire() for _ in range(2)]
    tasks = [asyncio.create_task(sem.acquire()) for _ in range(waiters)]
    await wait_until(waits(sem, waiters), FAST, timeout=5)
    permits, state, *_ = sem._keys.all
    await redis.delete(state if lost == "state" else permits)
    if waiters:
        async with asyncio.timeout(5):
            leases = [await task for task in tasks[:2]]
        assert (await sem.statistics()).held == 2
        assert min(lease.fence for lease in leases) > max(lease.fence for lease in before)
        assert not tasks[2].done()
        await leases[0].release()
        leases.append(await asyncio.wait_for(tasks[2], 5))
        for lease in leases[1:]:
            await lease.release()
    for lease in before:
        await asyncio.wait_for(lease.wait_lost(), 15)
        with pytest.raises(LeaseLost) as caught:
            await lease.release()
        assert caught.value.reason == "expired"
    await capacity(sem, 2)
    assert await redis.pttl(state) > 0


@pytest.mark.parametrize("use", ["acquire again", "release", "extend", "statistics", "resize"])
async def test_d2_permits_are_lost_while_their_weights_are_not(sync: Coordinator, redis: Redis, use: str) -> None:
    """D2: no command fails in a strange way, and none takes the lost permit for one that is held."""
    sem = semaphore(sync, 2)
    lease = await sem.acquire(weight=2, identity="worker-7")
    await redis.delete(sem._keys.all[0])
    if use == "acquire again":
        again = await sem.acquire(identity="worker-7")
        assert again.fence > lease.fence
        assert again.weight == 1
        await again.release()
    elif use == "statistics":
        found = await sem.statistics()
        assert (found.limit, found.held, found.available, found.holders) == (2, 0, 2, ())
    elif use == "resize":
        await sem.resize(2)
    else:
        with pytest.raises(LeaseLost):
            await (lease.release() if use == "release" else lease.extend(5))
    await capacity(sem, 2)


# -- what is left ------------------------------------------------------------------------------------------


async def test_names_do_not_touch_each_other(sync: Coordinator, redis: Redis) -> None:
    """Two locks and two semaphores, of one name and of that name in braces: each is held on its own."""
    locks = [AsyncLock(sync, "x"), AsyncLock(sync, "{x}")]
    sems = [AsyncSemaphore(sync, "x", limit=1), AsyncSemaphore(sync, "{x}", limit=1)]
    everything: list[Exclusive] = [*locks, *sems]
    leases = [await one.acquire(timeout=15) for one in everything]
    waiting = [asyncio.create_task(one.acquire()) for one in everything]
    for one in everything:
        await wait_until(waits(one), FAST, timeout=5)
    for lease, task in zip(leases, waiting, strict=True):
        await lease.release()
        next_lease = await asyncio.wait_for(task, 15)
        assert sum(not other.done() for other in waiting) == 3 - waiting.index(task)
        await next_lease.release()
    for sem in sems:
        assert (await sem.statistics()).held == 0
    await sems[0].acquire()
    await locks[0].acquire()
    assert await locks[0].force_release()
    assert (await sems[0].statistics()).held == 1


async def test_p12_all_keys_end_by_themselves(sync: Coordinator, redis: Redis) -> None:
    """P12: while held, while waited for, after a cancellation, a resize and the last release; no inbox stays behind."""

    async def check() -> set[bytes | str]:
        keys = set(await redis.keys())
        for key in keys:
            assert await redis.pttl(key) > 0, key
        return keys

    sem = semaphore(sync, 3)
    permits, state, queue, polls = sem._keys.all
    leases = [await sem.acquire(ttl=ttl) for ttl in (1, 30, 86_400)]
    assert await check() == {permits, state}
    assert await redis.pttl(permits) > 86_400_000
    tasks = [asyncio.create_task(sem.acquire()) for _ in range(3)]
    await wait_until(waits(sem, 3), FAST, timeout=5)
    assert await check() == {permits, state, queue} | (set() if hub_of(sync).pushes else {polls})
    tasks[0].cancel()
    await wait_until(waits(sem, 2), FAST, timeout=5)
    await sem.resize(2)
    await check()
    for lease in leases:
        await lease.release()
    async with asyncio.timeout(5):
        for task in tasks[1:]:
            await (await task).release()
    await sem.statistics()
    assert await check() <= {permits, state}  # the first: the mark of the cancelled request
    await redis.zremrangebyrank(permits, 0, -1)
    await capacity(sem, 2)
    assert await check() == {state}


@only_link
async def test_d10_out_of_memory(way: str) -> None:
    """P6, D10: nothing new is granted, and says why. What is held is renewed, released, and handed over."""
    async with (
        EmbeddedServer(port=0) as server,
        server.client() as client,
        Coordinator(client) as sync,
        Coordinator(client) as other,
    ):
        sem, theirs = semaphore(sync, 3, ttl=0.6), semaphore(other, 3)
        for _ in range(20):
            held = [await sem.acquire(), await sem.acquire(weight=2)]
            waiting = [asyncio.create_task(theirs.acquire(weight=weight)) for weight in (2, 1)]
            await wait_until(waits(sem, 2), FAST, timeout=5)
            await client.config_set("maxmemory", 1)
            for one in (sem, theirs):
                with pytest.raises(OutOfMemory):
                    await one.acquire()
            assert await sem.try_acquire() is None
            await held[0].extend(0.9)
            await held[0].release()
            await held[1].release()
            async with asyncio.timeout(15):
                leases = [await task for task in waiting]
            assert (await sem.statistics()).held == 3
            for lease in leases:
                await lease.extend(10)
                await lease.release()
            with pytest.raises(OutOfMemory):
                await sem.try_acquire()
            with pytest.raises(OutOfMemory):
                await theirs.resize(7)
            assert await theirs.get_limit() == 3
            await client.config_set("maxmemory", 0)
        await capacity(sem, 3)
