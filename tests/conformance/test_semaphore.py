"""Permits: never more than the limit, in the order of arrival, one limit that all agree on; whose, how long, how lost.

P1, P2, P4, P6, P8, P12; FAULTS D2 (a key deleted or evicted), D10 (out of memory). What a semaphore of one permit has
in common with a lock is tested there: test_cancellation.py, test_loss.py and others run for both.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, AsyncSemaphore, Coordinator, Lease, LeaseLost, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import LimitMismatch, OutOfMemory

from ..support.body import FAST, waits
from ..support.inside import hub_of
from ..support.inspecting import calls
from ..support.views import tokens

NAME = "permits"
only_link = pytest.mark.parametrize("way", ["link"])


def semaphore(sync: Coordinator, limit: int | None, **options: Any) -> AsyncSemaphore:
    return AsyncSemaphore(sync, NAME, limit=limit, **options)


async def line_up(sem: AsyncSemaphore, *weights: int) -> list[asyncio.Task[Lease]]:
    """Let requests of these weights queue in this order; return once all of them are queued."""
    before = (await sem.statistics()).waiting
    tasks: list[asyncio.Task[Lease]] = []
    for number, weight in enumerate(weights, start=before + 1):
        tasks.append(asyncio.create_task(sem.acquire(weight=weight)))
        await wait_until(waits(sem, number), FAST, timeout=5)
    return tasks


async def granted(*tasks: asyncio.Task[Lease]) -> list[Lease]:
    async with asyncio.timeout(5):
        return [await task for task in tasks]


def ask_again(sem: AsyncSemaphore, most: int | None = None) -> None:
    """Let the first ``most`` requests ask again, but for those whose poll is in flight: each asks once at a time."""
    for ticket in list(sem._resource().acquisitions.values())[:most]:
        if ticket.call is None:
            ticket.ask()


async def assert_waiting(sem: AsyncSemaphore, *tasks: asyncio.Task[Lease]) -> None:
    """They are queued, and stay so when they ask again."""
    ask_again(sem)
    await sem.statistics()  # answered after that: one round trip
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    assert (await sem.statistics()).waiting >= len(tasks)


async def all_free(sem: AsyncSemaphore) -> None:
    found = await sem.statistics()
    assert (found.held, found.waiting, found.holders) == (0, 0, ())


async def capacity(sem: AsyncSemaphore, limit: int) -> None:
    """Exactly so many permits can be had, and then they are all free again."""
    leases = [await sem.acquire(timeout=5) for _ in range(limit)]
    assert await sem.try_acquire() is None
    assert (await sem.statistics()).held == limit
    for lease in leases:
        await lease.release()
    found = await sem.statistics()
    assert (found.held, found.waiting) == (0, 0)


# -- capacity ----------------------------------------------------------------------------------------------


async def test_p1_never_more_than_the_limit(sync: Coordinator, other: Coordinator) -> None:
    """P1: 40 tasks on two connections, weights 1 to 3: neither the tasks nor the server ever count more than 4."""
    limit, inside, peak, entered, running = 4, 0, 0, 0, 40
    seen: list[int] = []

    async def work(number: int) -> None:
        nonlocal inside, peak, entered, running
        sem = semaphore(sync if number % 2 else other, limit)
        for turn in range(4):
            weight = 1 + (number + turn) % 3
            async with sem.acquire(weight=weight, timeout=20) as lease:
                assert lease.weight == weight
                inside += weight
                peak = max(peak, inside)
                entered += 1
                assert inside <= limit
                for _ in range(number % 4):
                    await asyncio.sleep(0)
                inside -= weight
        running -= 1

    async def look() -> None:
        watcher = semaphore(other, None)
        while running:
            found = await watcher.statistics()
            seen.append(found.held)
            await asyncio.sleep(0.01)
            assert sum(holder.weight for holder in found.holders) == found.held
            assert found.available == limit - found.held or not found.limit

    async with asyncio.timeout(100):
        await asyncio.gather(look(), *(work(number) for number in range(40)))
    assert entered == 160
    assert peak == limit
    assert max(seen) <= limit
    await all_free(semaphore(other, None))


# -- order -------------------------------------------------------------------------------------------------


async def test_p2_grants_follow_arrival_whatever_their_weights(sync: Coordinator, other: Coordinator) -> None:
    """P2, P8: fences rise in the order in which the requests arrived."""
    sem, theirs = semaphore(sync, 3), semaphore(other, 3)
    holder = await sem.acquire(weight=3)
    fences: dict[int, int] = {}

    async def use(number: int, one: AsyncSemaphore, weight: int) -> None:
        async with one.acquire(weight=weight) as lease:
            fences[number] = lease.fence

    weights = (1, 3, 1, 1, 2, 1, 3, 2, 2, 1)
    jobs = []
    for number, weight in enumerate(weights):
        jobs.append(asyncio.create_task(use(number, theirs if number % 2 else sem, weight)))
        await wait_until(waits(theirs, number + 1), FAST, timeout=5)
    await holder.release()
    async with asyncio.timeout(5):
        await asyncio.gather(*jobs)
    in_order = [fences[number] for number in range(len(weights))]
    assert in_order == sorted(set(in_order))
    assert min(in_order) > holder.fence


async def test_p2_a_heavy_request_that_gives_up_lets_the_others_in(sync: Coordinator, other: Coordinator) -> None:
    """P2, P5: its withdrawal itself grants those behind it who fit."""
    sem, theirs = semaphore(sync, 3), semaphore(other, 3)
    holder = await theirs.acquire()
    (heavy,) = await line_up(sem, 3)
    light = await line_up(theirs, 1, 1, 1)
    heavy.cancel()
    leases = await granted(*light[:2])
    await assert_waiting(theirs, light[2])
    await holder.release()
    for lease in (*leases, *await granted(light[2])):
        await lease.release()
    await all_free(sem)


@only_link
async def test_p9_one_release_grants_as_many_as_fit(sync: Coordinator, other: Coordinator, redis: Redis) -> None:
    """P2, P9: ten waiters get what one release frees, with one command and none of their own."""
    sem, theirs = semaphore(sync, 10), semaphore(other, 10)
    holder = await sem.acquire(weight=10)
    tasks = await line_up(theirs, *(1,) * 7, 3, 2, 1)
    before = await calls(redis, "evalsha")
    await holder.release()
    leases = await granted(*tasks[:8])
    assert await calls(redis, "evalsha") == before + 1
    await assert_waiting(theirs, *tasks[8:])
    assert [lease.weight for lease in leases] == [*(1,) * 7, 3]
    for lease in leases:
        await lease.release()
    for lease in await granted(*tasks[8:]):
        await lease.release()
    await all_free(sem)


# -- the limit ---------------------------------------------------------------------------------------------


async def test_a_weight_above_the_servers_limit_is_refused_by_it(sync: Coordinator, redis: Redis) -> None:
    """With limit=None only the server knows: nobody queues forever."""
    await (await semaphore(sync, 3).acquire()).release()
    sem = semaphore(sync, None)
    for use in (sem.acquire, sem.try_acquire):
        with pytest.raises(LimitMismatch, match="a weight of 4 never fits into its limit of 3") as caught:
            await use(weight=4)
        assert (caught.value.name, caught.value.expected, caught.value.found) == (NAME, None, 3)
    await all_free(sem)
    assert not hub_of(sync).resources


@pytest.mark.parametrize("share", [False, True])
async def test_a_timeout_says_how_many_of_how_many(sync: Coordinator, other: Coordinator, share: bool) -> None:
    expected = {3: "did not have 2 of its 3 permits free", None: "did not have 2 of its permits free"}
    sems = [semaphore(sync, limit, share=share) for limit in expected]
    async with semaphore(other, 3).acquire(weight=2):
        errors = await asyncio.gather(*(sem.acquire(weight=2, timeout=2) for sem in sems), return_exceptions=True)
    for error, words in zip(errors, expected.values(), strict=True):
        assert isinstance(error, AcquireTimeout)
        assert f"{NAME!r} {words} within 2.0 seconds: held by " in str(error)
    await all_free(sems[0])


async def test_the_servers_limit_before_there_is_one(sync: Coordinator, redis: Redis) -> None:
    sem = semaphore(sync, None)
    for use in (sem.acquire, sem.try_acquire, sem.get_limit):
        with pytest.raises(LimitMismatch, match="knows no limit of it yet") as caught:
            await use()
        assert (caught.value.expected, caught.value.found) == (None, None)
    found = await sem.statistics()
    assert (found.limit, found.held, found.available, found.fence) == (None, 0, None, None)
    assert not await sem.locked()
    assert await redis.exists(*sem._keys.all) == 0
    assert sem.limit is None


# -- resize ------------------------------------------------------------------------------------------------


async def test_growing_grants_waiting_heads_immediately(sync: Coordinator, other: Coordinator) -> None:
    sem, admin = semaphore(sync, 2), semaphore(other, None)
    holder = await sem.acquire(weight=2)
    tasks = await line_up(sem, 1, 2, 2, 1)
    await admin.resize(5)
    leases = await granted(*tasks[:2])
    assert (await admin.statistics()).held == 5
    await assert_waiting(sem, *tasks[2:])  # admitted under the old limit, and not refused when they ask again
    await holder.release()
    leases += await granted(tasks[2])
    for lease in leases:
        await lease.release()
    for lease in await granted(tasks[3]):
        await lease.release()
    with pytest.raises(LimitMismatch, match="its limit is 5, not 2"):
        await sem.acquire()
    assert admin.limit is None
    await all_free(sem)


async def test_a_waiter_heavier_than_the_new_limit_is_told(sync: Coordinator, other: Coordinator) -> None:
    """LimitMismatch; the request behind it goes on waiting, and gets what fits."""
    sem, admin = semaphore(sync, 4), semaphore(other, None)
    holder = await sem.acquire(weight=3)
    tasks = await line_up(sem, 4, 1, 3, 2)
    await admin.resize(2)
    await holder.release()
    for task in (tasks[0], tasks[2]):
        with pytest.raises(LimitMismatch) as caught:
            await asyncio.wait_for(task, 5)
        assert (caught.value.expected, caught.value.found) == (4, 2)
    (lease,) = await granted(tasks[1])
    await assert_waiting(sem, tasks[3])
    await lease.release()
    (lease,) = await granted(tasks[3])
    await lease.release()
    await all_free(sem)


async def test_a_limit_of_0_grants_nothing_and_takes_nothing(sync: Coordinator, other: Coordinator) -> None:
    """Holders renew and release; waiters of any weight stay in line, from before and since, until it is raised."""
    sem, admin = semaphore(sync, 4), semaphore(other, None)
    holder, leaver = await sem.acquire(weight=2), await sem.acquire(weight=2)
    tasks = await line_up(sem, 3)
    for _ in range(2):  # as when the reply to the first was lost
        await admin.resize(0)
    found = await admin.statistics()
    assert (found.limit, found.held, found.available, found.problems) == (0, 4, 0, ())
    assert (await admin.get_limit(), await admin.locked()) == (0, True)
    tasks += await line_up(admin, 1, 2)
    await leaver.release()
    await holder.extend(20)
    assert await admin.try_acquire() is None
    await assert_waiting(sem, tasks[0])
    await assert_waiting(admin, *tasks[1:])
    with pytest.raises(LimitMismatch, match=r"its limit is 0 \(paused\), not 4: resize\(\) set it"):
        await semaphore(other, 4).acquire()
    await admin.resize(5)
    leases = await granted(*tasks[:1])
    await assert_waiting(admin, *tasks[1:])  # 5 are held: the first in line had to come first
    await holder.release()
    leases += await granted(*tasks[1:2])
    await leases.pop(0).release()
    leases += await granted(*tasks[2:])
    assert leases[0].fence < leases[1].fence
    for lease in leases:
        await lease.release()
    await all_free(admin)


async def test_a_request_of_a_paused_semaphore_times_out(sync: Coordinator, other: Coordinator) -> None:
    sem = semaphore(sync, None)
    await semaphore(other, None).resize(0)
    with pytest.raises(AcquireTimeout, match=r"it is paused by a limit of 0, until resize\(\) raises it"):
        await sem.acquire(timeout=0.05)
    with pytest.raises(AcquireTimeout):
        await sem.acquire(timeout=0)
    found = await sem.statistics()
    assert (found.limit, found.waiting) == (0, 0)


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
        assert ttl - 1 < holder.remaining < ttl + 1
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


# -- the end of a lease ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["state", "permits"])
@pytest.mark.parametrize("waiters", [0, 3])
async def test_p6_d2_one_of_its_keys_is_lost(sync: Coordinator, redis: Redis, lost: str, waiters: int) -> None:
    """P6, D2: evicted or deleted: the holders are told, nobody is stuck, and the limit holds again."""
    sem = semaphore(sync, 2, ttl=3)
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


# -- what is left ------------------------------------------------------------------------------------------


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


async def test_d10_out_of_memory() -> None:
    """P6, D10: nothing new is granted, and says why. What is held is renewed, released, and handed over."""
    async with (
        EmbeddedServer(port=0) as server,
        server.client() as client,
        Coordinator(client) as sync,
        Coordinator(client) as other,
    ):
        sem, theirs = semaphore(sync, 3), semaphore(other, 3)
        held = [await sem.acquire(), await sem.acquire(weight=2)]
        waiting = await line_up(theirs, 2, 1)
        await client.config_set("maxmemory", 1)
        for one in (sem, theirs):
            with pytest.raises(OutOfMemory):
                await one.acquire()
        assert await sem.try_acquire() is None
        await held[0].extend(9)
        await held[0].release()
        await held[1].release()
        leases = await granted(*waiting)
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
