"""P1-P5, P9: a grant meets a cancellation, a timeout, a lost wake-up; random cancellations; ten thousand waiters.

FAULTS B2, B6, C7, E7.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Literal, Self

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, AsyncLock, Coordinator, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action, FaultProxy
from redis_sync_aio.types import BaseLease

from ..conftest import SELDOM
from ..support.body import FAST, waits
from ..support.inside import cohorts_of, hub_of, now, tuned
from ..support.inspecting import calls
from ..support.options import OPTIONS
from ..support.primitives import KINDS, Primitive

NAME = "race"
AT_ONCE = 0.1
"""FAULTS B6: seconds within which whatever was given up is free again."""

Ends = Literal["cancelled", "times out"]
ends = pytest.mark.parametrize("how", ["cancelled", "times out"])
many = pytest.mark.parametrize("many", [pytest.param(10_000, marks=pytest.mark.ci), 300])


@pytest_asyncio.fixture
async def last(redis: Redis) -> AsyncIterator[Coordinator]:
    """And one more: a process that shares may hand on to its own tasks first."""
    async with Coordinator(redis) as coordinator:
        yield coordinator


async def nothing_left(kind: Primitive, sync: Coordinator, redis: Redis, name: str = NAME) -> None:
    """Nobody holds it, nobody is queued, and the process has forgotten it."""
    assert await kind.empty(redis, name)
    assert not hub_of(sync).acquisitions
    await wait_until(lambda: not hub_of(sync).resources, FAST, timeout=5)


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def third_gets_it(
    third: asyncio.Task[BaseLease], first: asyncio.Task[BaseLease], give_up: Callable[[], object]
) -> BaseLease:
    """The third has the lock immediately when the first is gone; never both."""
    begin = now()
    give_up()
    await asyncio.wait([first])
    if not first.cancelled() and first.exception() is None:  # the grant won
        lease = first.result()
        lease.check()
        assert not third.done()
        await lease.release()
    lease = await asyncio.wait_for(third, 15)
    assert now() - begin < AT_ONCE
    lease.check()
    return lease


def expire(sync: Coordinator, number: int = 0) -> None:
    """Let the time of a waiter be up, now: what its timer does."""
    for local in hub_of(sync).resources.values():
        for cohort in cohorts_of(local).values():
            if cohort.waiting:
                waiting = [future for future, _, _ in cohort.line if not future.done()]
                cohort._time_out(waiting[number], 1.0)
                return
    acquisitions = list(hub_of(sync).acquisitions.values())
    if acquisitions:
        acquisitions[number]._time_out()


async def three(
    kind: Primitive, sync: Coordinator, other: Coordinator, last: Coordinator
) -> tuple[BaseLease, asyncio.Task[BaseLease], asyncio.Task[BaseLease]]:
    """A holder on another connection; a first waiter, whose race it is; and a third."""
    holder = await kind.make(other, NAME, ttl=30).acquire()
    lock = kind.make(sync, NAME, ttl=30)
    first = asyncio.create_task(lock.acquire(timeout=20))
    await wait_until(waits(lock, 1), FAST, timeout=5)
    third = asyncio.create_task(kind.make(last, NAME, ttl=30).acquire(timeout=20))
    await wait_until(waits(lock, 2), FAST, timeout=5)
    return holder, first, third


@ends
async def test_p5_b2_grant_and_end_any_number_of_turns_apart(
    kind: Primitive, sync: Coordinator, other: Coordinator, last: Coordinator, redis: Redis, how: Ends
) -> None:
    """Both orders of release and end, and all the turns of the loop between them."""
    won = 0
    for apart in (*range(-5, 20), *range(20, 60, 8)):
        holder, first, third = await three(kind, sync, other, last)

        def end(first: asyncio.Task[BaseLease] = first) -> None:
            if how == "cancelled":
                first.cancel()
            elif not first.done():
                expire(sync)

        if apart < 0:
            end()
            await turns(-apart)
        release = asyncio.create_task(holder.release())
        await turns(max(apart, 0))
        lease = await third_gets_it(third, first, end if apart >= 0 else lambda: None)
        won += not first.cancelled() and first.exception() is None
        await release
        await lease.release()
    await nothing_left(kind, sync, redis)
    assert won <= 25  # in some of them the end came first


async def test_p5_b6_random_cancellations(kind: Primitive, sync: Coordinator, redis: Redis, way: str) -> None:
    """Acquires that are cancelled or time out at random; nothing but the lock protects the counters."""
    rounds = 100 if (OPTIONS.run_ci or OPTIONS.pairs) and way == "link" else 20
    chance = random.Random(4711)
    names = [f"{NAME}{number}" for number in range(5)]
    counter = dict.fromkeys(names, 0)
    entered = dict.fromkeys(names, 0)
    cancelled = 0

    async def section(name: str, timeout: float | None) -> None:
        async with kind.make(sync, name, ttl=10).acquire(timeout=timeout):
            before = counter[name]
            await turns(chance.randrange(3))
            counter[name] = before + 1
            entered[name] += 1

    async def contend() -> None:
        nonlocal cancelled
        for _ in range(rounds):
            end = chance.random()
            task = asyncio.create_task(section(chance.choice(names), chance.random() * 0.01 if end < 0.3 else None))
            if end > 0.5:
                await turns(chance.randrange(8 if kind.share else 25))
                task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                cancelled += 1
            elif (error := task.exception()) is not None:
                assert isinstance(error, (AcquireTimeout, Unreachable)), error  # the latter: before any answer

    async with asyncio.timeout(100):
        await asyncio.gather(*(contend() for _ in range(25)))

    for lease in await asyncio.gather(*(kind.make(sync, name).acquire(timeout=AT_ONCE) for name in names)):
        await lease.release()
    assert counter == entered
    assert cancelled > 5 * rounds
    for name in names:
        await nothing_left(kind, sync, redis, name)


@pytest.mark.parametrize("heal", ["poll_cap", "lease"])
async def test_p3_c7_lost_wake_up_is_healed(
    kind: Primitive, server: EmbeddedServer, redis: Redis, other: Coordinator, heal: str
) -> None:
    """The grant never arrives. The waiter finds out when the holder's lease should have ended, or at the cap."""
    ttl, cap = (30.0, 0.15) if heal == "poll_cap" else (3.0, 100.0)
    async with FaultProxy(server) as proxy, proxy.client() as client, tuned(client, poll_cap=cap) as sync:
        holder = await kind.make(other, NAME, ttl=ttl, auto_renew=False).acquire()
        waiter = asyncio.create_task(kind.make(sync, NAME, ttl=30).acquire())
        await wait_until(waits(kind.make(other, NAME)), FAST, timeout=5)
        lost = proxy.on_push(lambda args: args[-1].split()[1] != b"0", Action.DROP)
        left = holder.remaining()
        began = now()
        await holder.release()
        lease = await asyncio.wait_for(waiter, 15)
        assert lost.acted == 1
        assert now() - began < min(left, cap) + 0.1
        assert lease.fence > holder.fence
        lease.check()
        await lease.release()
        await nothing_left(kind, sync, redis)


# -- ten thousand --------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def patient(redis: Redis) -> AsyncIterator[Coordinator]:
    """A coordinator that does not suspect its connection because the process, busy with very many tasks, is late.

    After each new connection all waiters ask whether they are still in the queue.
    """
    async with tuned(redis, poll_cap=SELDOM, retry_for=120, response_timeout=60) as coordinator:
        yield coordinator


class Grown:
    """``with grown``: the memory that is taken in it, in bytes."""

    def __enter__(self) -> Self:
        gc.collect()
        tracemalloc.start(1)
        self._before, _ = tracemalloc.get_traced_memory()
        return self

    def __exit__(self, *_: object) -> None:
        gc.collect()
        self.bytes = tracemalloc.get_traced_memory()[0] - self._before
        tracemalloc.stop()


@many
@pytest.mark.parametrize("kind", KINDS, ids=str)  # WATCH takes one at a time
async def test_p9_e7_ten_thousand_waiters(kind: Primitive, patient: Coordinator, redis: Redis, many: int) -> None:
    """On one lock: no command but their own, one connection, 8 KiB each; all cancelled in a moment."""
    lock = kind.make(patient, NAME, ttl=60)
    others = len(await redis.client_list())
    holder = await lock.acquire()
    with Grown() as grown:
        waiters = [asyncio.create_task(lock.acquire()) for _ in range(many)]
        await wait_until(waits(lock, many), FAST, timeout=60)
    assert len(await redis.client_list()) - others <= 2
    assert grown.bytes / many < 8192

    handed = 200
    sent, fence, connections = await calls(redis, "evalsha"), holder.fence, patient.connections
    await holder.release()
    for waiter in waiters[:handed]:
        lease = await asyncio.wait_for(waiter, 15)
        assert lease.fence > fence
        fence = lease.fence
        await lease.release()
    assert (await calls(redis, "evalsha") - sent) / handed <= 5
    last = await asyncio.wait_for(waiters[handed], 15)  # the hand-over that the last release began
    assert patient.connections == connections
    await last.extend(60)  # beyond its claim: so many cancellations keep the loop busy

    used = time.process_time()
    for waiter in waiters[handed + 1 :]:
        waiter.cancel()
    await asyncio.wait(waiters)
    await wait_until(waits(lock, 0), FAST, timeout=60)
    assert time.process_time() - used < 6  # the bar is 2 on a quiet machine
    assert all(waiter.cancelled() for waiter in waiters[handed + 1 :])
    assert not hub_of(patient).acquisitions
    last.check()
    await last.release()
    await nothing_left(kind, patient, redis)


@many
async def test_p9_e7_ten_thousand_locks(patient: Coordinator, redis: Redis, many: int) -> None:
    """Together, of one process: held, renewed and released over one connection. (Leases of permits are the same.)"""
    others = len(await redis.client_list())
    locks = [AsyncLock(patient, f"{NAME}:{number}", ttl=60) for number in range(many)]
    with Grown() as grown:
        leases = await asyncio.gather(*(lock.acquire() for lock in locks))
    assert grown.bytes / many < 8192
    assert len(await redis.client_list()) - others <= 2
    assert await redis.dbsize() == 2 * many  # the holders, the fences
    await asyncio.gather(*(lease.extend(60) for lease in leases))
    await asyncio.gather(*(lease.release() for lease in leases))
    await asyncio.gather(*(lock.acquire() for lock in locks))
    await asyncio.gather(*(lock.release() for lock in locks))
    assert not hub_of(patient).acquisitions
    assert not hub_of(patient).resources
    assert await redis.dbsize() == many
