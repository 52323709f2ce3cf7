"""P1, P4, P5, P6: one identity has one lease, from how many tasks and processes it may be used."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncReadWriteLock,
    AsyncSemaphore,
    Coordinator,
    Lease,
    LeaseLost,
    NotHeld,
    WouldDeadlock,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action
from redis_sync_aio.types import BaseLease, Push

from ..conftest import MakeClient
from ..support.body import FAST, waits
from ..support.inside import Engine, now
from ..support.primitives import (
    KINDS,
    LOCK,
    ROBUST,
    SEMAPHORE,
    WATCHED,
    WATCHED_LOCK,
    WATCHED_SEMAPHORE,
    WRITER,
    Exclusive,
    Primitive,
    each,
)
from ..support.sweep import Outcome, sweep
from ..support.wired import ACQUIRE, RELEASE, wired
from ..support.wired import quiet_loop as quiet_loop

NAME = "named"
ME: dict[str, Any] = {"identity": "w"}
engines = pytest.mark.parametrize("engine", ["lua", "watch"])
modes = pytest.mark.parametrize("mode", ["link", "plain"])
kinds = pytest.mark.parametrize("kind", KINDS, ids=str)
all_kinds = pytest.mark.parametrize("kind", [*KINDS, *WATCHED], ids=str)


@pytest_asyncio.fixture(params=["auto", "never"])
async def mine(request: pytest.FixtureRequest, make_client: MakeClient) -> AsyncIterator[Coordinator]:
    """A coordinator that is notified, or one that polls."""
    push: Push = request.param
    async with Coordinator(make_client(), push=push) as coordinator:
        yield coordinator


# -- joining what the identity has -------------------------------------------------------------------------


@engines
@pytest.mark.parametrize("max_hold", [None, 0.3])
async def test_joining_a_lease_without_an_end(
    sync: Coordinator, other: Coordinator, redis: Redis, engine: Engine, max_hold: float | None
) -> None:
    """It is the same lease, and stays without an end on the server; who joins may have set one for itself."""
    first = await AsyncLock(sync, NAME, ttl=None).acquire(**ME)
    lock = AsyncLock(other, NAME, ttl=30, engine=engine, max_hold=max_hold)
    for timeout in (0, 5):
        joined = await lock.acquire(timeout=timeout, **ME)
        assert joined.fence == first.fence
        if max_hold is None:
            assert joined.remaining() == math.inf
            with pytest.raises(ValueError, match="nothing to extend"):
                await joined.extend(5)
        else:
            assert 0 < joined.remaining() <= max_hold
            await asyncio.wait_for(joined.wait_lost(), 5)
        first.check()
        assert await redis.pttl(NAME) == -1


@engines
async def test_joining_without_a_ttl_what_has_an_end(sync: Coordinator, other: Coordinator, engine: Engine) -> None:
    """P1: it ends when the server lets it end."""
    await AsyncLock(sync, NAME, ttl=3, auto_renew=False).acquire(**ME)
    joined = await AsyncLock(other, NAME, ttl=None, engine=engine).acquire(**ME)
    assert 0 < joined.remaining() < 3.5
    async with AsyncLock(other, NAME).acquire(timeout=10):
        assert joined.lost
        with pytest.raises(LeaseLost):
            joined.check()


async def test_p6_joining_a_lease_that_lasts_longer_than_the_ttl(sync: Coordinator, other: Coordinator) -> None:
    """It is renewed by the own ttl in time, and ended by the own ``max_hold`` in time."""
    await AsyncLock(sync, NAME, ttl=20, auto_renew=False).acquire(**ME)
    joined = await AsyncLock(other, NAME, ttl=4).acquire(**ME)
    began = now()
    brief = await AsyncLock(other, NAME, ttl=30, max_hold=2).acquire(**ME)
    await brief.wait_lost()
    assert now() - began == pytest.approx(2, abs=0.1)
    await asyncio.sleep(22)
    joined.check()
    await joined.release()


@all_kinds
async def test_a_waiter_with_an_identity_gets_the_grant_as_soon_as_another_one_does(
    sync: Coordinator, other: Coordinator, kind: Primitive
) -> None:
    """As who asks while it is held; not when they look again, 2 seconds later."""
    lock, elsewhere = kind.make(sync, NAME), kind.make(other, NAME)
    holder = await elsewhere.acquire()
    tasks = [asyncio.create_task(lock.acquire(**ME)) for _ in range(3)]
    await queued(elsewhere, 3)
    await holder.release()
    leases = await asyncio.wait_for(asyncio.gather(*tasks), 1)
    assert len({lease.fence for lease in leases}) == 1
    await leases[0].release()
    assert not await elsewhere.locked()


async def queued(lock: Any, number: int) -> None:
    async def condition() -> bool:
        found: int = (await lock.statistics()).waiting
        return found >= number

    await wait_until(condition, FAST, timeout=5)


# -- what was released is released -------------------------------------------------------------------------


async def test_a_cancelled_release_is_executed_before_the_next_acquire(make_client: MakeClient, redis: Redis) -> None:
    """P1: also when the server does not know its script yet."""
    await redis.script_flush()
    async with Coordinator(make_client()) as sync:
        lock = AsyncLock(sync, NAME)
        first = await lock.acquire(**ME)
        releasing = asyncio.create_task(first.release())
        await asyncio.sleep(0)
        releasing.cancel()
        second = await lock.acquire(**ME)
        assert second.fence > first.fence
        assert await AsyncLock(redis, NAME).try_acquire() is None
        second.check()
        await second.release()


@kinds
async def test_a_release_that_was_refused_for_now_is_executed_before_the_next_acquire(
    server: EmbeddedServer, kind: Primitive
) -> None:
    """P1: what is sent about a name while an earlier command waits to be sent again stays behind it."""
    async with wired(server, kind=kind, retry_for=60) as w:
        first = await w.lock().acquire(**ME)
        refused = w.proxy.on(RELEASE, Action.answer_error("BUSY Redis is busy running a script."), times=None)
        releasing = asyncio.create_task(first.release())
        await wait_until(lambda: refused.acted >= 2, FAST, timeout=15)
        acquiring = asyncio.create_task(w.lock().acquire(**ME))
        await asyncio.sleep(0)
        refused.cancel()
        second = await acquiring
        await releasing
        assert second.fence > first.fence
        await w.check_held(second)
        await second.release()
        await w.check_free(second.fence)


async def test_a_reconnect_keeps_the_order_behind_what_was_refused(server: EmbeddedServer) -> None:
    """P1: the release is refused for now, and the acquire behind it loses its connection, and so is sent again."""
    async with wired(server) as w:
        first = await w.lock().acquire(**ME)
        w.proxy.on(RELEASE, Action.answer_error("LOADING Redis is loading the dataset in memory"), times=1)
        cut = w.proxy.on(ACQUIRE, Action.CUT_BEFORE, times=1)
        releasing = asyncio.create_task(first.release())
        acquiring = asyncio.create_task(w.lock().acquire(**ME))
        await cut.fired.wait()
        w.proxy.refuse = True
        await asyncio.sleep(0.05)  # longer than the pause before the release is sent again
        w.proxy.refuse = False
        await releasing
        second = await acquiring
        assert second.fence > first.fence
        await w.check_held(second)
        await second.release()
        await w.check_free(second.fence)


@kinds
@modes
async def test_p4_a_release_by_identity_without_an_answer(server: EmbeddedServer, mode: str, kind: Primitive) -> None:
    async with wired(server, mode, kind=kind) as w:
        lease = await w.elsewhere().acquire(**ME)
        rule = w.proxy.on(RELEASE, Action.CUT_AFTER, times=1)
        await w.lock().release(**ME)
        assert rule.acted == 1
        await w.check_free(lease.fence)
        with pytest.raises(NotHeld):
            await w.lock().release(**ME)


# -- a request that is cancelled takes nothing from others of the identity ---------------------------------


class Named:
    """A primitive of a kind, and what the server has of it."""

    def __init__(self, kind: Primitive, sync: Coordinator, redis: Redis) -> None:
        self.lock: Exclusive = kind.make(sync, NAME, auto_renew=False)
        self._kind, self._redis = kind, redis

    async def acquire(self) -> BaseLease:
        return await self.lock.acquire(**ME)

    def ask(self) -> asyncio.Task[BaseLease]:
        return asyncio.create_task(self.acquire())

    async def vanish(self) -> None:
        await self._kind.vanish(self._redis, NAME)

    async def check_held(self, lease: BaseLease) -> None:
        """It is held, also when all that is in flight has arrived; release it."""
        await self.lock.statistics()
        lease.check()
        assert await self._kind.token(self._redis, NAME) == b"w"
        await lease.release()
        await self.check_nothing_left()

    async def check_nothing_left(self) -> None:
        async def empty() -> bool:
            return await self._kind.empty(self._redis, NAME)

        await wait_until(empty, FAST, timeout=5)


@pytest.fixture
def named(kind: Primitive, mine: Coordinator, redis: Redis) -> Named:
    return Named(kind, mine, redis)


@all_kinds
async def test_cancelled_beside_another(named: Named) -> None:
    """The other one may have joined it, or be about to."""
    beside: list[asyncio.Task[BaseLease]] = []

    async def both() -> BaseLease:
        beside.append(named.ask())
        return await named.acquire()

    async def check(_: Outcome[BaseLease]) -> None:
        await named.check_held(await beside.pop())

    await sweep(both, check)


@all_kinds
async def test_all_cancelled(named: Named) -> None:
    """Then nobody has it, and nobody keeps it."""
    beside: list[asyncio.Task[BaseLease]] = []

    async def three() -> BaseLease:
        beside.extend(named.ask() for _ in range(2))
        return await named.acquire()

    async def check(outcome: Outcome[BaseLease]) -> None:
        for task in beside:
            task.cancel()
        ends: list[Any] = await asyncio.gather(*beside, return_exceptions=True)
        beside.clear()
        got = [it for it in (*ends, outcome.value) if it is not None and not isinstance(it, BaseException)]
        for lease in got[:1]:
            await lease.release()
        await named.check_nothing_left()

    await sweep(three, check)


@all_kinds
async def test_cancelled_around_the_hand_over(named: Named, kind: Primitive, other: Coordinator) -> None:
    """Two wait by one identity; either leaves when it is handed over."""
    elsewhere = kind.make(other, NAME)
    others: list[asyncio.Task[Any]] = []

    async def hand_over(holder: BaseLease) -> None:
        await queued(elsewhere, 1)
        await holder.release()

    for first in (False, True):

        async def both(first: bool = first) -> BaseLease:
            if first:
                others.append(named.ask())
                await asyncio.sleep(0)
                return await named.acquire()
            acquiring = named.acquire()
            others.append(named.ask())
            return await acquiring

        async def check(_: Outcome[BaseLease]) -> None:
            releasing, beside = others
            others.clear()
            await releasing
            await named.check_held(await asyncio.wait_for(beside, 5))
            await begin()

        async def begin() -> None:
            others.append(asyncio.create_task(hand_over(await elsewhere.acquire())))

        await begin()
        await sweep(both, check)
        others.pop().cancel()
        await elsewhere.force_release()


async def test_what_was_cancelled_decides_nothing(mine: Coordinator) -> None:
    """Neither how many permits the next request gets nor on which side of a read/write lock."""
    semaphore, rw = AsyncSemaphore(mine, NAME, limit=5), AsyncReadWriteLock(mine, NAME)
    cases: list[tuple[Callable[[], Awaitable[BaseLease]], Callable[[], Awaitable[Any]], int | None]] = [
        (lambda: semaphore.acquire(weight=1, **ME), lambda: semaphore.acquire(weight=3, **ME), 3),
        (lambda: rw.read().acquire(**ME), lambda: rw.write().acquire(**ME), None),
    ]
    for first, second, weight in cases:

        async def ask(first: Callable[[], Awaitable[BaseLease]] = first) -> BaseLease:
            return await first()

        async def check(outcome: Outcome[BaseLease]) -> None:
            if outcome.value is not None:
                await outcome.value.release()
            lease = await second()  # noqa: B023
            assert weight in (lease.weight, None)  # noqa: B023
            await lease.release()

        await sweep(ask, check)
    assert (await semaphore.statistics()).held == 0


@all_kinds
async def test_a_lease_that_is_gone_inherits_nothing(named: Named) -> None:
    """Others may have been in between; nobody here knows yet that it is gone."""
    gone: list[BaseLease] = []

    async def begin() -> None:
        gone.append(await named.acquire())
        await named.vanish()

    async def check(outcome: Outcome[BaseLease]) -> None:
        if outcome.value is not None:
            await outcome.value.release()
        await named.check_nothing_left()
        with suppress(LeaseLost):
            await gone.pop().release()
        await begin()

    await begin()
    await sweep(named.acquire, check)


# -- in the order in which the server executes requests and releases ---------------------------------------

each_one = each([LOCK, WATCHED_LOCK, ROBUST, SEMAPHORE, WATCHED_SEMAPHORE, WRITER], "kind")


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def waiting(kind: Primitive, rival: Coordinator) -> asyncio.Task[Lease]:
    """Let the rival wait."""
    asked = kind.make(rival, NAME)
    task = asyncio.create_task(asked.acquire())
    await wait_until(waits(asked), FAST, timeout=5)
    return task


@each_one
async def test_p1_asked_before_a_release_and_answered_behind_it(
    mine: Coordinator, other: Coordinator, kind: Primitive
) -> None:
    """The request was sent first, so the server let it join what the release behind it gave to somebody else."""
    lock = kind.make(mine, NAME)
    for number in range(6):
        first = await lock.acquire(**ME)
        their = await waiting(kind, other)
        asking = asyncio.create_task(lock.acquire(**ME))
        await turns(number)
        await first.release()
        holder = await asyncio.wait_for(their, 5)
        await turns(3)
        if asking.done():  # it had it before the release, and so it ended with that; a robust lock's was still adopting
            assert isinstance(asking.exception(), LeaseLost) or asking.result().lost
            await holder.release()
            continue
        holder.check()
        await holder.release()
        second: Lease = await asyncio.wait_for(asking, 5)
        assert second.fence > holder.fence
        second.check()
        await second.release()


@each_one
async def test_p1_asked_before_a_release_from_elsewhere(
    mine: Coordinator, other: Coordinator, make_client: MakeClient, kind: Primitive
) -> None:
    """What another process acquired for the identity is released by this one, which is joining it."""
    lock = kind.make(mine, NAME)
    async with Coordinator(make_client()) as third:
        await kind.make(third, NAME).acquire(**ME)
        their = await waiting(kind, other)
        asking = asyncio.create_task(lock.acquire(**ME))
        await asyncio.sleep(0)
        await lock.release(**ME)
        holder = await asyncio.wait_for(their, 5)
        await turns(3)
        assert not asking.done()
        holder.check()
        await holder.release()
        second: Lease = await asyncio.wait_for(asking, 5)
        assert second.fence > holder.fence
        await second.release()


async def test_p1_asked_for_the_writer_before_a_downgrade(mine: Coordinator, other: Coordinator) -> None:
    """The identity reads by the time of the answer: to write it would wait for itself."""
    rw = AsyncReadWriteLock(mine, NAME)
    writer = await rw.write().acquire(**ME)
    again = asyncio.create_task(rw.write().acquire(**ME))
    await asyncio.sleep(0)
    await rw.downgrade(writer)
    async with AsyncReadWriteLock(other, NAME).read().acquire(timeout=5):
        with pytest.raises(WouldDeadlock):
            await asyncio.wait_for(again, 5)
    await writer.release()


MANY = 8000


@pytest.mark.ci
@pytest.mark.real
@pytest.mark.parametrize("one_name", [False, True])
async def test_p9_a_release_of_an_identity_costs_the_same_however_many_there_are(
    other: Coordinator, one_name: bool
) -> None:
    """By the time that the process needs, against the same without identities."""

    def primitive(number: int) -> AsyncSemaphore:
        return AsyncSemaphore(other, "one" if one_name else f"name {number}", limit=2 * MANY)

    async def work(identity: str | None) -> float:
        leases = []
        for begin in range(0, MANY, 1000):
            numbers = range(begin, begin + 1000)
            acquired = (primitive(number).acquire(identity=identity and f"{identity}{number}") for number in numbers)
            leases += await asyncio.gather(*acquired)
        before = time.process_time()
        await asyncio.gather(*(lease.release() for lease in leases))
        return time.process_time() - before

    await work(None)
    # The best of three, as the time of one may have a collection of the garbage in it.
    without = min([await work(None) for _ in range(3)])
    assert min([await work(f"w{number} ") for number in range(3)]) < 3 * without
