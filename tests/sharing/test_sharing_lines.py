"""P2, P3, P5, P12: who is in the line of local sharing, who left it, and what ends while others still have theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncReadWriteLock,
    AsyncSemaphore,
    Coordinator,
    Lease,
    LeaseLost,
    Unreachable,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed

from ..support.body import FAST, waits
from ..support.inside import IN_ONE_TURN, cohorts_of, hub_of, link_events_of, tuned
from ..support.primitives import SHARED_LOCK, SHARED_SEMAPHORE, Primitive
from ..support.sharing import (
    KEYS,
    NAME,
    gets_free,
    in_line,
    nothing_kept,
    process_grant_of,
    shared,
    soon,
    told,
    turns,
    waiters,
)
from ..support.wired import wired


async def leaves(task: asyncio.Task[Lease], how: str) -> None:
    """Wait until ``task`` has left the line."""
    if how == "cancelled":
        task.cancel()
    with pytest.raises(asyncio.CancelledError if how == "cancelled" else AcquireTimeout):
        await asyncio.wait_for(task, 5)


@pytest.mark.parametrize("kind", [SHARED_LOCK, SHARED_SEMAPHORE], ids=str)
async def test_p3_a_task_that_asks_late_in_an_outage_has_its_own_time(server: EmbeddedServer, kind: Primitive) -> None:
    """P3: the ticket was asked for by an earlier task, whose time is up before the server is back."""
    async with wired(server, kind=kind, retry_for=3, response_timeout=1) as w:
        await (await w.lock().acquire()).release()
        w.proxy.black_hole = True
        early = asyncio.create_task(w.lock().acquire())
        await asyncio.sleep(2.5)
        late = asyncio.create_task(w.lock().acquire())
        await asyncio.sleep(1.4)
        assert (early.done(), late.done()) == (True, False)
        w.proxy.black_hole = False
        with pytest.raises(Unreachable):
            await early
        await (await late).release()


# -- who left the line ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
async def test_p3_a_task_that_left_the_line_takes_nothing(redis: Redis, sync: Coordinator, how: str) -> None:
    """P3, P5: one that does not wait gets a free lock, whatever task left the line behind the last waiter."""
    lock, brief = shared(sync), shared(sync, ttl=3, auto_renew=False)
    holder = await lock.acquire()
    following = asyncio.create_task(brief.acquire())
    await in_line(sync, 1)
    leaver = asyncio.create_task(lock.acquire(timeout=0.05 if how == "timed out" else None))
    await in_line(sync, 2)
    await leaves(leaver, how)
    await holder.release()
    overstays = await soon(following)
    await asyncio.wait_for(overstays.wait_lost(), 5)  # what it had is given back, and handed to nobody
    await gets_free(redis)
    for _ in range(2):
        lease = await lock.try_acquire()
        assert lease is not None
        await lease.release()
        await (await lock.acquire(timeout=0)).release()


async def test_p3_a_task_that_left_the_line_keeps_no_limit(redis: Redis, sync: Coordinator, other: Coordinator) -> None:
    """P3: a task that waits when the limit is changed goes on under the new one, whatever task left a line of that."""
    few = AsyncSemaphore(sync, NAME, limit=4, share=True)
    brief = AsyncSemaphore(sync, NAME, limit=4, ttl=3, auto_renew=False, share=True)
    apart = await AsyncSemaphore(sync, NAME, limit=4).acquire()  # the name is not forgotten here
    holder, line = await few.acquire(weight=3), few._keys.id
    following = asyncio.create_task(brief.acquire(weight=3))
    await in_line(sync, 1, line)
    leaver = asyncio.create_task(few.acquire(weight=3))
    await in_line(sync, 2, line)
    await leaves(leaver, "cancelled")
    await holder.release()
    overstays = await soon(following)
    await asyncio.wait_for(overstays.wait_lost(), 5)

    await AsyncSemaphore(other, NAME, limit=None).resize(5)
    more = AsyncSemaphore(sync, NAME, limit=5, share=True)
    holder = await more.acquire(weight=3)
    waiter = asyncio.create_task(more.acquire(weight=3))
    await in_line(sync, 1, line)
    await more.resize(4)
    await holder.release()
    await (await soon(waiter)).release()
    await apart.release()


# -- who is in the line --------------------------------------------------------------------------------------


@pytest.mark.parametrize("trying", [1, 2])
async def test_p3_a_task_that_waits_while_another_tries_gets_a_permit(
    redis: Redis, sync: Coordinator, trying: int
) -> None:
    """P3: a task that does not wait has a ticket of its own; one that waits needs another, and permits are free."""
    semaphore = AsyncSemaphore(sync, NAME, limit=4, share=True)
    tries = [asyncio.create_task(semaphore.try_acquire()) for _ in range(trying)]
    waits = [asyncio.create_task(semaphore.acquire()) for _ in range(4 - trying)]
    leases = [await soon(waiter) for waiter in waits]
    for one in tries:
        lease = await asyncio.wait_for(one, 5)
        assert lease is not None
        leases.append(lease)
    assert (await semaphore.statistics()).available == 0
    for lease in leases:
        await lease.release()
    assert (await semaphore.statistics()).held == 0


# -- what ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("linger", [0, 60])
async def test_p12_nothing_is_handed_on_while_it_closes(redis: Redis, sync: Coordinator, linger: float) -> None:
    """P12: a waiter gets an error that says so, not a lease that is lost immediately."""
    lock = shared(sync, linger=linger)
    holder = await lock.acquire()
    waiting = await waiters(lock, sync, 3)
    closing = asyncio.create_task(sync.aclose())
    await turns(1)
    with suppress(LeaseLost):  # if the closing has come as far as this lease
        await holder.release()
    for waiter in waiting:
        with pytest.raises(CoordinatorClosed):
            await soon(waiter)
    await asyncio.wait_for(closing, 5)
    await gets_free(redis)
    assert not hub_of(sync).listeners
    assert not hub_of(sync).acquisitions
    assert not await redis.zcard(KEYS.queue)


async def test_p2_a_pushed_grant_is_known_to_be_contended(sync: Coordinator, other: Coordinator) -> None:
    """P2: the grant says that others wait behind it, although they came before it and so do not say so themselves."""
    holder = await shared(other).acquire()
    first = asyncio.create_task(shared(sync).acquire())
    await wait_until(waits(shared(sync)), FAST, timeout=15)
    behind = asyncio.create_task(AsyncLock(other, NAME, ttl=30, share=False).acquire())
    await wait_until(waits(shared(sync), 2), FAST, timeout=15)
    await holder.release()
    lease = await soon(first)
    assert process_grant_of(lease).contended
    await lease.release()
    await (await soon(behind)).release()


async def test_p1_what_rests_is_taken_by_one_task(sync: Coordinator) -> None:
    lock = shared(sync, linger=60)
    async with lock:
        pass
    lease = await lock.acquire()
    (waiting,) = await waiters(lock, sync, 1)
    await lease.release()
    await (await soon(waiting)).release()


async def test_p2_nothing_rests_while_others_wait(redis: Redis, other: Coordinator) -> None:
    async with tuned(redis, slice=1000) as sync:
        lease = await shared(sync, linger=60).acquire()
        theirs = asyncio.create_task(shared(other).acquire())
        await told(process_grant_of(lease))
        await lease.release()
        await (await soon(theirs)).release()


async def test_p5_a_grant_for_a_task_that_just_left_goes_back(
    redis: Redis, sync: Coordinator, other: Coordinator
) -> None:
    held = await shared(other).acquire()
    (waiting,) = await waiters(shared(sync), sync, 1)
    let_in = link_events_of(sync).link_pushed

    def pushed(payload: bytes) -> None:
        waiting.cancel()
        let_in(payload)

    link_events_of(sync).link_pushed = pushed  # type: ignore[method-assign]
    await held.release()
    await asyncio.wait([waiting])
    await gets_free(redis)


async def test_p3_each_lease_has_its_own_linger(redis: Redis, sync: Coordinator) -> None:
    """P3: a shorter one ends the rest earlier, although a timer for a longer one runs."""
    async with shared(sync, linger=60):
        pass
    async with shared(sync, linger=0.02) as lease:
        base = process_grant_of(lease)
    await gets_free(redis)
    assert base.rest is None
    await nothing_kept(sync)


async def test_p2_a_longer_linger_is_kept(redis: Redis, sync: Coordinator) -> None:
    """P2: it does not go back when the timer of a shorter one fires; and a third lease ends both."""
    async with shared(sync, linger=0.05):
        pass
    async with shared(sync, linger=60) as lease:
        base = process_grant_of(lease)
    assert base.rest is not None
    assert base.rest.when() - asyncio.get_running_loop().time() > 50  # the timer of the first is gone
    async with shared(sync, linger=0.02) as lease:
        assert process_grant_of(lease) is base
    await gets_free(redis)


async def test_p3_a_crowd_of_readers_gets_in_within_a_turn(redis: Redis, sync: Coordinator) -> None:
    """P3: however many read by one permit, none is put off for longer than a turn of the loop."""
    reading = AsyncReadWriteLock(sync, NAME, share=True).read()
    first = await reading.acquire()
    crowd = [asyncio.create_task(reading.acquire()) for _ in range(20 * IN_ONE_TURN)]
    await turns(4)
    assert all(task.done() for task in crowd)
    assert len({process_grant_of(task.result()) for task in crowd} | {process_grant_of(first)}) == 1
    for lease in [first, *(task.result() for task in reversed(crowd))]:
        await lease.release()
    await gets_free(redis)


async def test_p3_a_crowd_of_readers_lets_a_writer_in(redis: Redis, sync: Coordinator, other: Coordinator) -> None:
    """P2, P3: those that were put off for a turn are behind a writer that the server heard of meanwhile."""
    reading = AsyncReadWriteLock(sync, NAME, share=True).read()
    first = await reading.acquire()
    crowd = [asyncio.create_task(reading.acquire()) for _ in range(2 * IN_ONE_TURN)]
    await turns(1)
    assert any(task.done() for task in crowd)
    assert not all(task.done() for task in crowd)
    process_grant_of(first).on_contention()
    writing = asyncio.create_task(AsyncReadWriteLock(other, NAME).write().acquire())
    early = [task.result() for task in crowd if task.done()]
    for lease in [first, *early]:
        await lease.release()
    late = [await soon(task) for task in crowd[len(early) :]]
    assert not {process_grant_of(lease) for lease in late} & {process_grant_of(first)}
    for lease in late:
        await lease.release()
    await (await soon(writing)).release()
    await gets_free(redis)


SHARED: dict[str, Callable[[Coordinator], Any]] = {
    "lock": lambda sync: shared(sync, linger=60),
    "semaphore": lambda sync: AsyncSemaphore(sync, NAME, limit=1, share=True, linger=60),
    "writers": lambda sync: AsyncReadWriteLock(sync, NAME, share=True, linger=60).write(),
}


@pytest.mark.parametrize("what", SHARED)
async def test_p2_sections_that_do_not_suspend_keep_nobody_out(sync: Coordinator, what: str) -> None:
    """P2, P5: a task that takes what rests again and again, within one turn of the loop, is not ahead forever."""
    lock = SHARED[what](sync)
    passed, inside = 0, list[int]()

    async def take_often() -> None:
        nonlocal passed
        while len(inside) < 3 and passed < 100 * IN_ONE_TURN:
            async with lock:
                passed += 1

    async def once(timeout: float | None) -> None:
        async with lock.acquire(timeout=timeout):
            inside.append(passed)

    async def tried() -> None:
        lease = await lock.try_acquire()
        inside.append(passed)
        if lease is not None:
            await lease.release()

    async with lock as lease:
        process_grant_of(lease)._reserved(lease.fence + 1, 1_000_000)  # as many as if it had been renewed meanwhile
    await asyncio.gather(take_often(), once(5), once(None), tried())
    assert max(inside) <= 3 * IN_ONE_TURN


async def test_p2_a_task_that_tries_again_gets_in_between_busy_turns(sync: Coordinator) -> None:
    lock, passed, tried = shared(sync, linger=600), 0, False
    async with lock as lease:
        process_grant_of(lease)._reserved(lease.fence + 1, 1_000_000)

    async def take_often() -> None:
        nonlocal passed
        while not tried and passed < 20 * IN_ONE_TURN:
            async with lock:
                passed += 1
            if passed % IN_ONE_TURN == 0:
                await asyncio.sleep(0)

    async def look() -> None:
        nonlocal tried
        lease = await lock.try_acquire()
        tried = True
        if lease is not None:
            await lease.release()

    await asyncio.gather(take_often(), look())
    assert passed <= 2 * IN_ONE_TURN


async def test_p2_p5_a_task_that_leaves_in_the_turn_in_which_it_rests_loses_nothing(
    redis: Redis, sync: Coordinator
) -> None:
    """The one who was put off is cancelled before the turn ends: it rests on, and is not lost."""
    lock = shared(sync, linger=60)
    async with lock as lease:
        base = process_grant_of(lease)
    waiting = asyncio.create_task(lock.acquire())
    asyncio.get_running_loop().call_soon(waiting.cancel)
    for _ in range(IN_ONE_TURN):  # in this very turn; those two are next
        async with lock:
            pass
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    await turns(3)
    (cohort,) = cohorts_of(next(iter(hub_of(sync).resources.values()))).values()
    assert (list(cohort.resting), cohort.waiting) == ([base], 0)
    async with lock as lease:
        assert process_grant_of(lease) is base


async def test_a_task_that_does_not_wait_gets_a_free_permit_in_a_busy_turn(sync: Coordinator) -> None:
    """Permits that are free are had by all who try in a turn in which one was taken often."""
    semaphore = AsyncSemaphore(sync, NAME, limit=5, share=True, linger=60)
    async with semaphore:
        pass

    async def often() -> None:
        for _ in range(IN_ONE_TURN):
            async with semaphore:
                pass

    _, *leases = await asyncio.gather(often(), *(semaphore.try_acquire() for _ in range(3)))
    assert all(lease is not None for lease in leases)
    for lease in leases:
        assert lease is not None
        await lease.release()


async def test_p12_weights_that_were_asked_for_once(sync: Coordinator) -> None:
    """What is known of the tasks that asked for so many does not outlast them, however long the name is in use."""
    semaphore = AsyncSemaphore(sync, NAME, limit=1_000_000, share=True)
    async with semaphore, semaphore.acquire(weight=3):
        for weight in range(4, 300):
            async with semaphore.acquire(weight=weight):
                pass
        (local,) = hub_of(sync).resources.values()
        assert len(cohorts_of(local)) < 20
        async with semaphore.acquire(weight=3) as again:
            assert again.weight == 3
        assert (await semaphore.statistics()).held == 4


async def test_a_cohort_has_no_more_attributes_than_cpython_reads_fast(sync: Coordinator) -> None:
    """With more than 29 an object of CPython (3.11 to 3.13) gets a dict: each read and each call costs a lookup."""
    async with shared(sync):
        (cohort,) = cohorts_of(next(iter(hub_of(sync).resources.values()))).values()
        assert len(vars(cohort)) <= 29
