"""P1, P2, P8: permits: never more than the limit, in the order of arrival, one limit that all agree on.

What a semaphore of one permit has in common with a lock is tested there: test_cancellation.py, test_loss.py and others
run for both. Leases, identities and losses of permits are in test_semaphore_permits.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, AsyncSemaphore, Coordinator, Lease, QueueFull, wait_until
from redis_sync_aio.errors import LimitMismatch

from ..support.body import FAST, waits
from ..support.inside import hub_of

NAME = "permits"
only_link = pytest.mark.parametrize("way", ["link"])


@pytest.fixture(params=["link", "polling", "cluster"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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
            assert sum(holder.weight for holder in found.holders) == found.held
            assert found.available == limit - found.held or not found.limit

    async with asyncio.timeout(100):
        await asyncio.gather(look(), *(work(number) for number in range(40)))
    assert entered == 160
    assert peak == limit
    assert max(seen) <= limit
    await all_free(semaphore(other, None))


@pytest.mark.ci
async def test_p1_ten_thousand_permits(sync: Coordinator, redis: Redis) -> None:
    """P1: 10,000 permits of weight 1 and two of 5,000; all of them expire together, and one takes all that is free."""
    sem = semaphore(sync, 20_000)
    await sem.locked()
    hub_of(sync).retry_for = 60  # so many at the same time, on a busy machine
    heavy = [await sem.acquire(weight=5000), await sem.acquire(weight=5000)]
    light = await asyncio.gather(*(sem.acquire() for _ in range(10_000 if hub_of(sync).pushes else 500)))
    found = await sem.statistics()
    assert found.held == 10_000 + len(light)
    assert len(found.holders) == 100
    assert len({lease.fence for lease in (*light, *heavy)}) == len(light) + 2
    assert await sem.try_acquire(weight=20_000 - found.held + 1) is None
    await light.pop().release()
    rest = await sem.acquire(weight=20_000 - found.held + 1)
    await rest.release()
    await heavy[0].release()
    permits = sem._keys.all[0]
    past: dict[Any, float] = dict.fromkeys(await redis.zrange(permits, 0, -1), 1)
    await redis.zadd(permits, past)
    whole = await sem.try_acquire(weight=20_000)
    assert whole is not None
    found = await sem.statistics()
    assert [(holder.token, holder.weight) for holder in found.holders] == [(whole.token, 20_000)]
    assert await redis.hlen(sem._keys.all[1]) == 5  # limit, used, fence, kept and this permit: nothing piles up
    await whole.release()


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


async def test_p2_a_heavy_request_is_not_starved(sync: Coordinator, other: Coordinator) -> None:
    """P2: what is free is kept for it, also from who does not queue, until enough is free."""
    sem, theirs = semaphore(sync, 3), semaphore(other, 3)
    holder = await theirs.acquire()
    (heavy,) = await line_up(sem, 3)
    light = await line_up(theirs, 1, 1)
    assert await theirs.try_acquire() is None
    await assert_waiting(sem, heavy)
    await assert_waiting(theirs, *light)
    assert (await sem.statistics()).available == 2
    await holder.release()
    (lease,) = await granted(heavy)
    assert lease.weight == 3
    await assert_waiting(theirs, *light)
    await lease.release()
    for lease in await granted(*light):
        await lease.release()
    await all_free(sem)


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
    before = (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"]
    await holder.release()
    leases = await granted(*tasks[:8])
    assert (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"] == before + 1
    await assert_waiting(theirs, *tasks[8:])
    assert [lease.weight for lease in leases] == [*(1,) * 7, 3]
    for lease in leases:
        await lease.release()
    for lease in await granted(*tasks[8:]):
        await lease.release()
    await all_free(sem)


async def test_p2_a_grant_lets_in_the_waiters_that_fit_behind_it(sync: Coordinator) -> None:
    """P2: also when the head took its permits by asking again, not by a push (its holder's key was deleted)."""
    sem = semaphore(sync, 4)
    await sem.acquire(weight=4)
    tasks = await line_up(sem, 2, 1, 1, 1)
    await sem._client.delete(sem._keys.all[0])
    ask_again(sem, most=1)
    leases = await granted(*tasks[:3])
    await assert_waiting(sem, tasks[3])
    await leases[0].release()
    for lease in (*leases[1:], *await granted(tasks[3])):
        await lease.release()
    await all_free(sem)


# -- the limit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["acquire", "try_acquire"])
async def test_a_weight_above_the_limit_is_refused_at_the_call(sync: Coordinator, redis: Redis, method: str) -> None:
    sem = semaphore(sync, 3)
    with pytest.raises(ValueError, match="never fits into the limit 3"):
        await getattr(sem, method)(weight=4)
    assert await redis.exists(*sem._keys.all) == 0


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


async def test_another_limit_is_refused_and_changes_nothing(sync: Coordinator, other: Coordinator) -> None:
    """The error names both limits. Who came first is not disturbed, nor is who takes the server's."""
    first, second, third = semaphore(sync, 3), semaphore(other, 5), semaphore(other, None)
    async with first.acquire(weight=2):
        for use in (second.acquire, second.try_acquire):
            with pytest.raises(LimitMismatch, match="its limit is 3, not 5") as caught:
                await use()
            assert isinstance(caught.value, ValueError)
            assert (caught.value.name, caught.value.expected, caught.value.found) == (NAME, 5, 3)
        assert await third.get_limit() == await second.get_limit() == 3
        async with third.acquire():
            assert await third.try_acquire() is None
    async with second.acquire(weight=5):  # an implied limit gives way when all is free
        with pytest.raises(LimitMismatch, match="its limit is 5, not 3"):
            await first.acquire()
    await all_free(third)


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


async def test_shrinking_takes_nothing_and_gives_nothing_until_it_fits(sync: Coordinator, other: Coordinator) -> None:
    sem, admin = semaphore(sync, 4), semaphore(other, 4)
    leases = [await sem.acquire() for _ in range(4)]
    tasks = await line_up(sem, 1, 1)
    await admin.resize(2)
    assert admin.limit == 2
    found = await admin.statistics()
    assert (found.limit, found.held, found.available) == (2, 4, 0)
    for _ in range(2):
        await leases.pop().release()
        await assert_waiting(sem, *tasks)
    for lease in leases:
        lease.check()
        await lease.extend(20)
    await leases.pop().release()
    leases += await granted(tasks[0])
    await assert_waiting(sem, tasks[1])
    assert await admin.try_acquire() is None
    await leases.pop().release()
    for lease in (*leases, *await granted(tasks[1])):
        await lease.release()
    async with admin.acquire(weight=2):
        assert await admin.locked()
    await all_free(admin)


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


async def test_a_waiter_too_heavy_since_its_own_object_was_resized_is_told(sync: Coordinator) -> None:
    """That it never fits: to ask again would be of no use."""
    sem = semaphore(sync, 4)
    holder = await sem.acquire(weight=3)
    tasks = await line_up(sem, 4)
    await sem.resize(2)
    with pytest.raises(LimitMismatch, match="a weight of 4 never fits into its limit of 2") as caught:
        await asyncio.wait_for(tasks[0], 5)
    assert (caught.value.expected, caught.value.found) == (4, 2)
    await holder.release()
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


async def test_a_waiter_of_a_paused_semaphore_that_is_too_heavy_afterwards_is_told(sync: Coordinator) -> None:
    sem = semaphore(sync, None)
    await sem.resize(0)
    tasks = await line_up(sem, 3, 1)
    with pytest.raises(QueueFull):
        await semaphore(sync, None, max_waiting=2).acquire()
    await sem.resize(2)
    with pytest.raises(LimitMismatch, match="a weight of 3 never fits into its limit of 2"):
        await asyncio.wait_for(tasks[0], 5)
    for lease in await granted(tasks[1]):
        await lease.release()
    await all_free(sem)


async def test_an_object_made_with_limit_0_waits_until_the_limit_is_raised(
    sync: Coordinator, other: Coordinator, redis: Redis
) -> None:
    """While it waits, 0 is the limit on the server, which other limits do not replace."""
    sem = semaphore(sync, 0)
    assert sem.limit == 0
    assert await sem.try_acquire() is None
    async with semaphore(other, 2):  # nobody waited
        pass
    tasks = await line_up(sem, 1, 2)
    with pytest.raises(LimitMismatch, match=r"its limit is 0 \(paused\), not 2: use the same limit everywhere"):
        await semaphore(other, 2).acquire()
    assert await semaphore(other, None).get_limit() == 0
    assert await redis.pttl(sem._keys.all[1]) > 3_600_000
    await semaphore(other, None).resize(2)
    for task in tasks:
        for lease in await granted(task):
            await lease.release()
    await all_free(semaphore(other, None))


async def test_a_request_of_a_paused_semaphore_times_out(sync: Coordinator, other: Coordinator) -> None:
    sem = semaphore(sync, None)
    await semaphore(other, None).resize(0)
    with pytest.raises(AcquireTimeout, match=r"it is paused by a limit of 0, until resize\(\) raises it"):
        await sem.acquire(timeout=0.05)
    with pytest.raises(AcquireTimeout):
        await sem.acquire(timeout=0)
    found = await sem.statistics()
    assert (found.limit, found.waiting) == (0, 0)


async def test_resize_of_a_name_nobody_used(sync: Coordinator, redis: Redis) -> None:
    sem = semaphore(sync, None)
    await sem.resize(3)
    assert await sem.get_limit() == 3
    assert await redis.pttl(sem._keys.all[1]) > 0
    async with sem.acquire(weight=3):
        assert await sem.locked()
