"""P1-P5, P9: a grant meets a cancellation, a timeout, a lost wake-up; random cancellations; ten thousand waiters.

FAULTS B2, B6, C7, E7.
"""

from __future__ import annotations

import asyncio
import gc
import random
import resource
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, AsyncLock, Coordinator, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import BaseLease

from ..conftest import SELDOM
from ..support.body import FAST, waits
from ..support.factories import KINDS, Kind
from ..support.inside import cohorts_of, hub_of, link_events_of, now, tuned
from ..support.options import OPTIONS
from ..support.proxy import FaultProxy
from ..support.timed import Timed, assert_within

NAME = "race"
AT_ONCE = 0.1
"""FAULTS B6: seconds within which whatever was given up is free again."""

Ends = Literal["cancelled", "times out"]
ends = pytest.mark.parametrize("how", ["cancelled", "times out"])
many = pytest.mark.parametrize("many", [pytest.param(10_000, marks=pytest.mark.ci), 1_000])
only_link = pytest.mark.parametrize("way", ["link"])


@pytest_asyncio.fixture
async def last(redis: Redis) -> AsyncIterator[Coordinator]:
    """And one more: a process that shares may hand on to its own tasks first."""
    async with Coordinator(redis) as coordinator:
        yield coordinator


async def nothing_left(kind: Kind, sync: Coordinator, redis: Redis, name: str = NAME) -> None:
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
    begin = time.monotonic()
    give_up()
    await asyncio.wait([first])
    if not first.cancelled() and first.exception() is None:  # the grant won
        lease = first.result()
        lease.check()
        assert not third.done()
        await lease.release()
    lease = await asyncio.wait_for(third, 15)
    assert time.monotonic() - begin < AT_ONCE * 5  # a round trip; slack for a busy machine
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
    kind: Kind, sync: Coordinator, other: Coordinator, last: Coordinator
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
@pytest.mark.parametrize("order", ["before the grant", "after the grant"])
@only_link
async def test_p5_b2_grant_and_end_in_the_same_turn(
    kind: Kind,
    sync: Coordinator,
    other: Coordinator,
    last: Coordinator,
    redis: Redis,
    monkeypatch: pytest.MonkeyPatch,
    how: Ends,
    order: str,
) -> None:
    """The push is at the door, and the waiter ends right before, or right after it is let in."""
    for _ in range(10):
        holder, first, third = await three(kind, sync, other, last)
        entered, let_in = asyncio.Event(), link_events_of(sync).link_pushed

        def end() -> None:
            if how == "cancelled":
                first.cancel()  # noqa: B023
            else:
                expire(sync)

        def pushed(payload: bytes) -> None:
            if order == "before the grant":
                end()
            let_in(payload)  # noqa: B023
            if order == "after the grant":
                end()
            entered.set()  # noqa: B023

        monkeypatch.setattr(link_events_of(sync), "link_pushed", pushed)
        await holder.release()
        await asyncio.wait_for(entered.wait(), 15)
        monkeypatch.setattr(link_events_of(sync), "link_pushed", let_in)
        lease = await third_gets_it(third, first, lambda: None)
        if how == "cancelled":
            assert first.cancelled()
        else:  # the grant wins: in the same turn, and while a waiter whose time is up asks who has it
            assert first.result().fence < lease.fence
        assert lease.fence > holder.fence
        await lease.release()
    await nothing_left(kind, sync, redis)


@ends
async def test_p5_b2_grant_and_end_any_number_of_turns_apart(
    kind: Kind, sync: Coordinator, other: Coordinator, last: Coordinator, redis: Redis, how: Ends
) -> None:
    """Both orders of release and end, and all the turns of the loop between them."""
    won = 0
    for apart in (*range(-10, 30), *range(30, 90, 6)):
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
    assert won < 50  # in some of them the end came first


@ends
async def test_p5_b2_end_while_it_asks_again(
    kind: Kind, sync: Coordinator, other: Coordinator, last: Coordinator, redis: Redis, how: Ends
) -> None:
    """A queued waiter repeats its request and ends before that has left: its ticket goes all the same."""
    for _ in range(5):
        holder, first, third = await three(kind, sync, other, last)
        [ticket] = hub_of(sync).acquisitions.values()
        await wait_until(lambda: ticket.call is None, FAST, timeout=5)  # noqa: B023
        ticket.ask()
        first.cancel() if how == "cancelled" else expire(sync)
        await wait_until(waits(kind.make(other, NAME)), FAST, timeout=5)
        await holder.release()
        lease = await third_gets_it(third, first, lambda: None)
        await lease.release()
    await nothing_left(kind, sync, redis)


@ends
@only_link
async def test_p5_b2_end_while_the_connection_is_down(
    kind: Kind, server: EmbeddedServer, other: Coordinator, last: Coordinator, redis: Redis, how: Ends, way: str
) -> None:
    """As above, and the request waits for a connection. Nobody else would free it in time: ttl=600."""
    assert server.port is not None
    async with (
        FaultProxy((server.host, server.port)) as proxy,
        Redis.from_url(proxy.url) as client,
        tuned(client, poll_cap=0.02) as sync,
    ):
        kept = await kind.make(sync, "kept").acquire()
        holder = await kind.make(other, NAME, ttl=600).acquire()
        first = asyncio.create_task(kind.make(sync, NAME, ttl=600).acquire())
        await wait_until(waits(kind.make(other, NAME)), FAST, timeout=5)
        third = asyncio.create_task(kind.make(last, NAME, ttl=600).acquire())
        await wait_until(waits(kind.make(other, NAME), 2), FAST, timeout=5)
        opened, proxy.refuse = sync.connections, True
        await proxy.cut()
        await wait_until(
            lambda: any(one.call is not None for one in hub_of(sync).acquisitions.values()), FAST, timeout=2
        )
        first.cancel() if how == "cancelled" else expire(sync)
        await asyncio.wait([first])
        proxy.refuse = False
        await wait_until(lambda: sync.connections > opened, FAST, timeout=5)
        await kind.make(sync, "kept").locked()  # what was waiting to be sent is done
        await holder.release()
        lease = await third_gets_it(third, first, lambda: None)
        await lease.release()
        await kept.release()
        await nothing_left(kind, sync, redis)


async def test_p5_b6_random_cancellations(kind: Kind, sync: Coordinator, redis: Redis, way: str) -> None:
    """Acquires that are cancelled or time out at random; nothing but the lock protects the counters."""
    rounds = 100 if (OPTIONS.run_ci or OPTIONS.pairs) and way == "link" else 20
    chance = random.Random(4711)
    names = [f"{NAME}{number}" for number in range(5)]
    counter = dict.fromkeys(names, 0)
    entered = dict.fromkeys(names, 0)
    ended = {"cancelled": 0, "timed out": 0}

    async def section(name: str, timeout: float | None) -> None:
        async with kind.make(sync, name, ttl=10).acquire(timeout=timeout):
            before = counter[name]
            await turns(chance.randrange(3))
            counter[name] = before + 1
            entered[name] += 1

    async def contend() -> None:
        for _ in range(rounds):
            end = chance.random()
            task = asyncio.create_task(section(chance.choice(names), chance.random() * 0.01 if end < 0.3 else None))
            if end > 0.5:
                await turns(chance.randrange(8 if kind.share else 25))
                task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                ended["cancelled"] += 1
            elif (error := task.exception()) is not None:
                assert isinstance(error, (AcquireTimeout, Unreachable)), error  # the latter: before any answer
                ended["timed out"] += 1

    async with asyncio.timeout(100):
        await asyncio.gather(*(contend() for _ in range(25)))

    async def all_again() -> float:
        async with Timed() as took:
            for lease in await asyncio.gather(*(kind.make(sync, name).acquire(timeout=2) for name in names)):
                await lease.release()
        return took.waited

    await assert_within(AT_ONCE * 5, all_again)  # slack for a busy machine
    assert counter == entered
    assert ended["cancelled"] > 5 * rounds
    print(f"\n{way}: {25 * rounds} acquires, {ended}, {sum(entered.values())} sections")
    for name in names:
        await nothing_left(kind, sync, redis, name)


@pytest.mark.parametrize("heal", ["poll_cap", "lease"])
@only_link
async def test_p3_c7_lost_wake_up_is_healed(
    kind: Kind, client: Redis, redis: Redis, other: Coordinator, monkeypatch: pytest.MonkeyPatch, heal: str
) -> None:
    """The grant never arrives. The waiter finds out when the holder's lease should have ended, or at the cap."""
    ttl, cap = (30.0, 0.15) if heal == "poll_cap" else (0.3, 10.0)
    async with tuned(client, poll_cap=cap) as sync:

        async def heals() -> float:
            """Return for how much longer than promised that took."""
            holder = await kind.make(other, NAME, ttl=ttl, auto_renew=False).acquire()
            waiter = asyncio.create_task(kind.make(sync, NAME, ttl=30).acquire())
            await wait_until(waits(kind.make(other, NAME)), FAST, timeout=5)
            let_in, swallowed = link_events_of(sync).link_pushed, asyncio.Event()

            def swallow(payload: bytes) -> None:
                if payload.split()[1] != b"0":
                    swallowed.set()
                    monkeypatch.setattr(link_events_of(sync), "link_pushed", let_in)

            monkeypatch.setattr(link_events_of(sync), "link_pushed", swallow)
            left = holder.remaining()
            await holder.release()
            await asyncio.wait_for(swallowed.wait(), 15)
            began = now()
            lease = await asyncio.wait_for(waiter, 15)
            took = now() - began
            assert lease.fence > holder.fence
            lease.check()
            await lease.release()
            return took - min(left, cap)

        for _ in range(3):
            await assert_within(0.1, heals)
        await nothing_left(kind, sync, redis)


# -- ten thousand --------------------------------------------------------------------------------------------


async def commands(redis: Redis) -> dict[str, int]:
    """How often the server has run which commands, scripts' own calls aside."""
    stats: dict[str, Any] = await redis.info("commandstats")
    return {name: one["calls"] for name, one in stats.items() if "evalsha" in name or "eval" in name}


async def connected(redis: Redis) -> int:
    return len(await redis.client_list())


def cpu() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


@pytest_asyncio.fixture
async def patient(redis: Redis) -> AsyncIterator[Coordinator]:
    """A coordinator that does not suspect its connection because the process, busy with very many tasks, is late.

    After each new connection all waiters ask whether they are still in the queue.
    """
    async with tuned(redis, poll_cap=SELDOM, retry_for=120, response_timeout=60) as coordinator:
        yield coordinator


@only_link
@many
@pytest.mark.parametrize("kind", KINDS, ids=str)  # WATCH takes one at a time
async def test_p9_e7_ten_thousand_waiters(kind: Kind, patient: Coordinator, redis: Redis, many: int, way: str) -> None:
    """On one lock: no command but their own, one connection, 8 KiB each; all cancelled in a moment."""
    lock = kind.make(patient, NAME, ttl=60)
    others = await connected(redis)
    holder = await lock.acquire()
    gc.collect()
    tracemalloc.start(1)
    before, _ = tracemalloc.get_traced_memory()
    begin = time.monotonic()
    waiters = [asyncio.create_task(lock.acquire()) for _ in range(many)]
    await wait_until(waits(lock, many), FAST, timeout=60)
    queueing = time.monotonic() - begin
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert await connected(redis) - others <= 2
    assert (after - before) / many < 8192

    handed = 200
    sent, fence, connections = await commands(redis), holder.fence, patient.connections
    begin = time.monotonic()
    await holder.release()
    for waiter in waiters[:handed]:
        lease = await asyncio.wait_for(waiter, 15)
        assert lease.fence > fence
        fence = lease.fence
        await lease.release()
    handing = time.monotonic() - begin
    used = sum((await commands(redis)).values()) - sum(sent.values())
    last = await asyncio.wait_for(waiters[handed], 15)  # the hand-over that the last release began
    assert patient.connections == connections
    assert used / handed <= 5
    await last.extend(60)  # beyond its claim: so many cancellations keep the loop busy

    used_cpu, begin = cpu(), time.monotonic()
    for waiter in waiters[handed + 1 :]:
        waiter.cancel()
    await asyncio.wait(waiters)
    returned = time.monotonic() - begin
    await wait_until(waits(lock, 0), FAST, timeout=60)
    cancelling, used_cpu = time.monotonic() - begin, cpu() - used_cpu
    assert all(waiter.cancelled() for waiter in waiters[handed + 1 :])
    assert used_cpu < 6  # the bar is 2 on a quiet machine
    assert not hub_of(patient).acquisitions
    last.check()
    await last.release()
    await nothing_left(kind, patient, redis)
    print(
        f"\n{many} waiters of one {kind}: queued in {queueing:.2f} s (under tracemalloc), "
        f"{(after - before) / many:.0f} bytes each; "
        f"{used / handed:.2f} commands and {handing / handed * 1e6:.0f} us per hand-over; "
        f"cancelled in {returned:.2f} s, off the server in {cancelling:.2f} s, {used_cpu:.2f} s CPU"
    )


@only_link
@many
async def test_p9_e7_ten_thousand_locks(patient: Coordinator, redis: Redis, many: int, way: str) -> None:
    """Together, of one process: held, renewed and released over one connection. (Leases of permits are the same.)"""
    others = await connected(redis)
    locks = [AsyncLock(patient, f"{NAME}:{number}", ttl=60) for number in range(many)]
    gc.collect()
    tracemalloc.start(1)
    before, _ = tracemalloc.get_traced_memory()
    leases = await asyncio.gather(*(lock.acquire() for lock in locks))
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert await connected(redis) - others <= 2
    assert await redis.dbsize() == 2 * many  # the holders, the fences
    begin = time.monotonic()
    await asyncio.gather(*(lease.extend(60) for lease in leases))
    extending = time.monotonic() - begin
    begin = time.monotonic()
    await asyncio.gather(*(lease.release() for lease in leases))
    releasing = time.monotonic() - begin
    begin = time.monotonic()
    leases = await asyncio.gather(*(lock.acquire() for lock in locks))
    acquiring = time.monotonic() - begin
    await asyncio.gather(*(lease.release() for lease in leases))
    assert not hub_of(patient).acquisitions
    assert not hub_of(patient).resources
    assert await redis.dbsize() == many
    assert (after - before) / many < 8192
    print(
        f"\n{many} locks: acquired in {acquiring:.2f} s, renewed in {extending:.2f} s, released in {releasing:.2f} s, "
        f"{(after - before) / many:.0f} bytes each"
    )
