"""P1, P5, P6: tasks that share what their process holds: its ends, and theirs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, AsyncLock, Coordinator, Lease, LeaseLost, wait_until

from ..support.body import FAST, for_ever, lost_in
from ..support.inside import hub_of, manager, now
from ..support.inspecting import calls
from ..support.sharing import (
    NAME,
    gets_free,
    in_line,
    in_queue,
    process_grant_of,
    queued,
    shared,
    soon,
    turns,
    waiters,
)
from ..support.virtual import virtual_time

# -- the end of a task's own lease ---------------------------------------------------------------------------


@pytest.mark.parametrize("own", [{"ttl": 3, "auto_renew": False}, {"max_hold": 3}])
async def test_p6_a_task_that_overstays(redis: Redis, sync: Coordinator, own: dict[str, Any]) -> None:
    """P6: its body is cancelled at its own end; then the base goes back, and the waiters get another one.

    The base itself had time: the other tasks want the lock for longer.
    """
    running = asyncio.Event()

    async def body(_: object) -> None:
        running.set()
        await for_ever()

    first = await shared(sync).acquire()  # the base is for 30 seconds, and renewed
    losing = asyncio.create_task(lost_in(shared(sync, **own).acquire(), body))
    await in_line(sync, 1)
    waiting = asyncio.create_task(shared(sync).acquire())
    await in_line(sync, 2)
    await first.release()
    await running.wait()
    began = now()
    lease, error = await losing
    assert error.reason == "expired"
    assert 2.9 < now() - began < 5
    assert process_grant_of(lease) is process_grant_of(first)
    after = await soon(waiting)
    assert after.token != lease.token
    assert after.fence > lease.fence
    await after.release()
    await gets_free(redis)


async def test_p6_it_overstays_and_nobody_waits(redis: Redis, sync: Coordinator) -> None:
    """P6: then the lock is free, also when it might have rested."""
    lock = shared(sync, ttl=3, auto_renew=False, linger=60)
    lease = await lock.acquire()
    await asyncio.wait_for(lease.wait_lost(), 5)
    await gets_free(redis)
    with pytest.raises(LeaseLost):
        await lease.release()


async def test_p6_a_ttl_for_one_acquisition(redis: Redis, sync: Coordinator) -> None:
    """P6: the base is renewed by it immediately, by a longer one and by a shorter one."""
    lock = shared(sync, ttl=30)
    lease = await lock.acquire()
    for ttl in (300, 10):
        waiting = asyncio.create_task(lock.acquire(ttl=ttl))
        await in_line(sync, 1)
        await lease.release()
        following = await soon(waiting)
        assert process_grant_of(following) is process_grant_of(lease)
        lease = following

        async def so_long(ttl: int = ttl) -> bool:
            return ttl * 900 < await redis.pttl(NAME) <= ttl * 1000

        await wait_until(so_long, FAST, timeout=5)
        await wait_until(lambda: ttl * 0.9 < lease.remaining() <= ttl, FAST, timeout=5)  # noqa: B023
    await lease.release()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("timeout", [0, 0.01])
async def test_a_timeout_says_how_long_its_own_process_has_it(sync: Coordinator, share: bool, timeout: float) -> None:
    """Whatever the server said last: the lease was extended since; and None if it has no end."""
    lock = AsyncLock(sync, NAME, share=share)
    lease = await lock.acquire()
    with pytest.raises(AcquireTimeout):
        await lock.acquire(timeout=0.01)
    await lease.extend(300)
    with pytest.raises(AcquireTimeout) as raised:
        await lock.acquire(timeout=timeout)
    assert raised.value.remaining == pytest.approx(300, abs=10)
    await lease.release()
    lease = await AsyncLock(sync, NAME, ttl=None).acquire()
    with pytest.raises(AcquireTimeout) as raised:
        await lock.acquire(timeout=timeout)
    assert raised.value.remaining is None
    await lease.release()


async def test_p6_an_extension_does_not_shorten_max_hold(redis: Redis, sync: Coordinator) -> None:
    """P6: as for a lease that is not shared: renewals go on with the new ttl until then. Not so without renewals."""
    cases: list[tuple[dict[str, Any], float]] = [({"max_hold": 1.0}, 0.8), ({"auto_renew": False}, 0.15)]
    for options, least in cases:
        began = now()
        lease = await shared(sync, **options).acquire()
        await lease.extend(0.2)
        await asyncio.wait_for(lease.wait_lost(), 5)
        assert least < now() - began < least + 1
        await gets_free(redis)


# -- the loss of the base ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["given back", "lost"])
async def test_p2_what_is_left_behind_when_it_has_ended(
    redis: Redis, sync: Coordinator, other: Coordinator, how: str
) -> None:
    """P2: a command of a task that has no lease any more is no reason for one more ticket, nor for one less."""
    lock = shared(sync)
    for _ in range(3):
        lease = await lock.acquire()
        lease._grant.committing(1)
        if how == "lost":
            await redis.delete(NAME)
            process_grant_of(lease).look()
            await asyncio.wait_for(lease.wait_lost(), 5)
        else:
            await lease.release()
    theirs = await shared(other).acquire()
    tasks = await waiters(lock, sync, 5)
    await in_queue(redis, 1)
    await turns()
    assert await queued(redis) == 1
    await theirs.release()
    for task in tasks:
        await (await soon(task)).release()
    await gets_free(redis)


@pytest.mark.parametrize("how", ["deleted", "taken over"])
async def test_p1_p6_the_base_is_lost(redis: Redis, sync: Coordinator, how: str) -> None:
    """P1, P6: who has it loses it; of those who wait nobody gets it, but what the server grants next."""
    lock = shared(sync, ttl=3)
    lease = await lock.acquire()
    waiting = await waiters(lock, sync, 3)
    if how == "deleted":
        await redis.delete(NAME)
    else:
        await redis.set(NAME, "foreign", px=60_000)
    await asyncio.wait_for(lease.wait_lost(), 20)
    if how == "taken over":
        await in_queue(redis, 1)
        assert not any(task.done() for task in waiting)
        assert await redis.get(NAME) == b"foreign"
        await redis.delete(NAME)
    for task in waiting:
        after = await soon(task)
        after.check()
        assert after.token != lease.token
        assert after.fence > lease.fence
        await after.release()
    with pytest.raises(LeaseLost) as lost:
        await lease.release()
    assert lost.value.reason == ("expired" if how == "deleted" else "taken")


async def test_p1_a_process_that_was_stopped(redis: Redis, sync: Coordinator) -> None:
    """P1: when the local deadline has passed nothing is handed on, nor taken from what rests: the server is asked."""
    late = 0.0
    before = now
    with virtual_time(lambda: before() + late):
        for rests in (False, True):
            late = 0.0
            lock = shared(sync, ttl=30, linger=60)
            lease = await lock.acquire()
            waiting = []
            if rests:
                await lease.release()
                late = 40.0  # nothing has run meanwhile
                await redis.set(NAME, "foreign", px=60_000)
                taking = asyncio.create_task(lock.acquire())
                await in_queue(redis, 1)
                waiting.append(taking)
            else:
                waiting = await waiters(lock, sync, 2)
                late = 40.0
                await redis.set(NAME, "foreign", px=60_000)
                with pytest.raises(LeaseLost):
                    await lease.release()
                await in_queue(redis, 1)
            assert not any(task.done() for task in waiting)
            await redis.delete(NAME)
            for task in waiting:
                after = await soon(task)
                assert after.token != lease.token
                assert after.fence > lease.fence
                await after.release()
            hub_of(sync).give_back_resting()
            await gets_free(redis)


# -- who does not wait ---------------------------------------------------------------------------------------


@pytest.mark.real  # counts the commands of the server
async def test_p2_try_acquire(redis: Redis, sync: Coordinator) -> None:
    """P2: None without a command while a task here has it or waits; a lease without a command when a base rests."""
    lock = shared(sync, linger=60)
    lease = await lock.acquire()
    before = await calls(redis)
    assert await lock.try_acquire() is None
    with pytest.raises(AcquireTimeout):
        await lock.acquire(timeout=0)
    waiting = await waiters(lock, sync, 1)
    assert await lock.try_acquire() is None
    await lease.release()
    assert await lock.try_acquire() is None, "it is his who waited"
    await (await soon(waiting[0])).release()
    second = await lock.try_acquire()
    assert second is not None
    assert process_grant_of(second) is process_grant_of(lease)
    await second.release()
    assert await calls(redis) == before


async def test_p2_try_acquire_elsewhere(redis: Redis, sync: Coordinator, other: Coordinator) -> None:
    """P2: None when another process has it; its own tasks that wait come first."""
    theirs = await shared(other).acquire()
    assert await shared(sync).try_acquire() is None
    waiting = await waiters(shared(sync), sync, 1)
    assert await shared(sync).try_acquire() is None
    await theirs.release()
    await (await soon(waiting[0])).release()
    await gets_free(redis)
    assert await queued(redis) == 0


# -- timeouts and cancellation ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancelled", "times out"])
async def test_p5_the_last_one_withdraws_the_ticket(
    redis: Redis, sync: Coordinator, other: Coordinator, how: str
) -> None:
    """P5: there is one ticket for all; it goes when the last one of them has gone."""
    theirs = await shared(other).acquire()
    timeout = 0.3 if how == "times out" else None
    tasks = [asyncio.create_task(shared(sync).acquire(timeout=timeout)) for _ in range(3)]
    staying = asyncio.create_task(shared(sync).acquire())  # in the same turn: it waits behind them, however late it is
    await in_queue(redis, 1)
    if how == "cancelled":
        await in_line(sync, 4)
        for task in tasks:
            task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        assert task.cancelled() if how == "cancelled" else isinstance(task.exception(), AcquireTimeout)
    await in_line(sync, 1)
    assert await queued(redis) == 1
    staying.cancel()
    await in_queue(redis, 0)
    await theirs.release()
    await gets_free(redis)
    await wait_until(lambda: not hub_of(sync).resources, FAST, timeout=5)


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("which", [0, 1, 2])
async def test_p2_p5_one_of_many_leaves(
    redis: Redis, sync: Coordinator, other: Coordinator, which: int, here: bool
) -> None:
    """P2, P5: the others keep their place, and the ticket its, whether this process or another one has the lock."""
    lock = shared(sync)
    held = await (lock if here else shared(other)).acquire()
    tasks = await waiters(lock, sync, 3)
    await in_queue(redis, 0 if here else 1)
    before = await redis.zrange(f"{{{NAME}}}:queue", 0, -1)
    tasks.pop(which).cancel()
    await in_line(sync, 2)
    assert await redis.zrange(f"{{{NAME}}}:queue", 0, -1) == before
    await held.release()
    first = await soon(tasks[0])
    assert not tasks[1].done()
    await first.release()
    await (await soon(tasks[1])).release()
    await gets_free(redis)


@pytest.mark.parametrize("apart", [0, 1, 2])
async def test_p5_cancelled_while_it_is_handed_on(redis: Redis, sync: Coordinator, apart: int) -> None:
    """P5: in the turn in which it is handed on, or just after: the next one has it then."""
    lease = await shared(sync).acquire()
    first, second = await waiters(shared(sync), sync, 2)
    await lease.release()
    await turns(apart)
    first.cancel()
    await asyncio.wait([first])
    if not first.cancelled():
        await first.result().release()
    after = await soon(second)
    assert after.fence > lease.fence
    await after.release()
    await gets_free(redis)
    await wait_until(lambda: not hub_of(sync).resources, FAST, timeout=5)


async def test_p5_all_waiters_are_cancelled_while_it_is_handed_on(redis: Redis, sync: Coordinator) -> None:
    """P5: nobody is left to have it: it is given back, and nothing is left."""
    lease = await shared(sync).acquire()
    tasks = await waiters(shared(sync), sync, 5)
    await lease.release()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    await gets_free(redis)
    await wait_until(
        lambda: not (hub_of(sync).resources or hub_of(sync).listeners or hub_of(sync).acquisitions), FAST, timeout=5
    )


async def test_p5_what_is_granted_to_nobody_may_be_lost(redis: Redis, sync: Coordinator, other: Coordinator) -> None:
    """P5: a grant that met a cancellation has no cohort; that it is lost before it is given back disturbs nobody."""
    theirs = await shared(other).acquire()
    (waiting,) = await waiters(shared(sync), sync, 1)
    (ticket,) = hub_of(sync).acquisitions.values()
    lease = ticket._resource.hold(ticket._request, b"of nobody~", 1, now() + 5, 5.0)
    lease.lose("expired")
    assert lease.is_lost()
    await theirs.release()
    await (await soon(waiting)).release()
    await gets_free(redis)


@pytest.mark.parametrize("share", [False, True])
async def test_p6_time_asleep_counts_for_max_hold(
    sync: Coordinator, monkeypatch: pytest.MonkeyPatch, share: bool
) -> None:
    """It is noticed within a second of waking up, though the timers of the loop stood still."""
    asleep = 0.0
    monkeypatch.setattr(manager, "now", lambda: now() + asleep)
    lock = shared(sync, ttl=60, max_hold=30, share=share)

    async def body(lease: Lease) -> None:
        nonlocal asleep
        if share:
            process_grant_of(lease).deadline += 60  # as if it had been renewed, by somebody else's ttl
        asleep = 31
        await for_ever()

    async with asyncio.timeout(5):
        await lost_in(lock.acquire(), body)
