"""Events, latches and barriers: all that wait go on when they open, nobody before; each count counts once."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncBarrier, AsyncCountDownLatch, AsyncEvent, AsyncLock, Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import BrokenBarrierError, LimitMismatch, WaitTimeout
from redis_sync_aio.inspection import inspect
from redis_sync_aio.testing import assert_idle
from redis_sync_aio.testing.faults import FaultProxy

from ..support.body import FAST
from ..support.inside import tuned
from ..support.sweep import Outcome, sweep

NAME = "party"
PATIENCE = 60
"""Seconds after which a test that hangs ends."""


@pytest.fixture(params=["link", "polling", "cluster"])
def way(request: pytest.FixtureRequest) -> str:
    """What may differ is how a waiter is woken."""
    return str(request.param)


@pytest.fixture(params=["auto", "lua"])
def engine(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def event(sync: Coordinator, engine: Any) -> AsyncEvent:
    return sync.event(NAME, engine=engine)


@pytest.fixture
def far_event(other: Coordinator) -> AsyncEvent:
    """The same event in another process."""
    return AsyncEvent(other, NAME)


@pytest.fixture
def latch(sync: Coordinator, engine: Any) -> AsyncCountDownLatch:
    return sync.latch(NAME, 3, engine=engine)


@pytest.fixture
def far_latch(other: Coordinator) -> AsyncCountDownLatch:
    """The same latch in another process."""
    return AsyncCountDownLatch(other, NAME, 3)


def queued(source: Any, number: int) -> Callable[[], Awaitable[bool]]:
    """Return whether so many wait, on the server."""

    async def enough() -> bool:
        return sum(view.waiting for view in await inspect(source, NAME)) == number

    return enough


async def waiting(redis: Redis, *waits: Any, behind: int = 0) -> list[asyncio.Task[Any]]:
    """Start the waits, and return once all of them are in the queue, ``behind`` so many others."""
    tasks = [asyncio.create_task(one) for one in waits]
    await wait_until(queued(redis, behind + len(tasks)), FAST, timeout=PATIENCE)
    return tasks


# -- events ------------------------------------------------------------------------------------------------------------


async def test_whoever_waits_goes_on_when_it_is_set(event: AsyncEvent, far_event: AsyncEvent, redis: Redis) -> None:
    async with asyncio.timeout(PATIENCE):
        assert not await far_event.is_set()
        tasks = await waiting(redis, *(one.wait() for one in (event, far_event) * 3))
        await event.set()
        assert await asyncio.gather(*tasks) == [True] * 6
        assert await far_event.is_set()
        await assert_idle(redis)


async def test_a_set_that_came_before_the_wait_is_seen(event: AsyncEvent, far_event: AsyncEvent) -> None:
    await far_event.set()
    assert await event.wait(timeout=0)
    await far_event.set()  # again: no more than that
    assert await event.wait(timeout=0)


async def test_whoever_waited_goes_on_although_it_is_cleared_again(
    event: AsyncEvent, far_event: AsyncEvent, redis: Redis
) -> None:
    async with asyncio.timeout(PATIENCE):
        tasks = await waiting(redis, *(one.wait() for one in (event, far_event) * 3))
        await asyncio.gather(event.set(), event.clear())
        assert await asyncio.gather(*tasks) == [True] * 6
        assert not await far_event.is_set()
        with pytest.raises(WaitTimeout, match="'party' did not open immediately: it has not been set"):
            await far_event.wait(timeout=0)
        with pytest.raises(WaitTimeout, match=r"did not open within 1\.0 seconds: it has not been set"):
            await event.wait(timeout=1)
        await assert_idle(redis)


async def test_nothing_is_left_wherever_a_waiter_is_cancelled(
    event: AsyncEvent, far_event: AsyncEvent, redis: Redis
) -> None:
    """P5: while it waits, and with the event set meanwhile."""

    async def wait() -> None:
        setting = asyncio.create_task(far_event.set())
        try:
            await event.wait()
        finally:
            await asyncio.shield(setting)

    async def check(outcome: Outcome[None]) -> None:
        await far_event.set()  # the task that sets may have been cancelled before it began
        await far_event.clear()
        await assert_idle(redis)

    assert len((await sweep(wait, check)).outcomes) > 3


async def test_a_set_or_clear_that_is_cancelled_goes_on(event: AsyncEvent, far_event: AsyncEvent) -> None:
    """Unless the task was cancelled before it began."""
    for operation, result in ((event.set, True), (event.clear, False)):

        async def check(outcome: Outcome[None], result: bool = result) -> None:
            async def done() -> bool:
                return await far_event.is_set() == result

            await wait_until(done, FAST, timeout=PATIENCE)
            await (far_event.clear() if result else far_event.set())

        await (far_event.clear() if result else far_event.set())
        await sweep(operation, check)


@pytest.mark.real
async def test_a_waiter_that_was_killed_keeps_nobody_waiting(
    server: EmbeddedServer, redis: Redis, far_event: AsyncEvent
) -> None:
    program = f"""
import asyncio
from redis.asyncio import Redis
from redis_sync_aio import AsyncEvent
async def main():
    async with Redis.from_url({server.url!r}) as redis:
        await AsyncEvent(redis, {NAME!r}).wait()
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    await wait_until(queued(redis, 1), FAST, timeout=PATIENCE)
    process.kill()
    await process.wait()
    async with asyncio.timeout(PATIENCE):
        (task,) = await waiting(redis, far_event.wait(), behind=1)
        await far_event.set()
        assert await task


async def test_an_event_and_a_lock_of_one_name_are_two_things(
    event: AsyncEvent, sync: Coordinator, redis: Redis
) -> None:
    async with AsyncLock(sync, NAME):
        await event.set()
        assert await event.wait(timeout=0)
    assert {view.kind for view in await inspect(redis, NAME, idle=True)} == {"lock", "event"}


async def test_it_is_remembered_for_as_long_as_it_says(sync: Coordinator, engine: Any, redis: Redis) -> None:
    hour, state = 3600, "{party}:event:state"
    await sync.event(NAME, engine=engine).set()
    assert await redis.ttl(state) > 10 * 365 * 24 * hour
    await sync.event(NAME, keep=24 * hour, engine=engine).set()
    assert 24 * hour <= await redis.ttl(state) <= 2.5 * 24 * hour
    await sync.event(NAME, engine=engine).clear()
    assert hour <= await redis.ttl(state) <= 2.5 * hour


# -- latches -----------------------------------------------------------------------------------------------------------


async def test_whoever_waits_goes_on_with_the_last_count(
    latch: AsyncCountDownLatch, far_latch: AsyncCountDownLatch, redis: Redis
) -> None:
    async with asyncio.timeout(PATIENCE):
        assert await far_latch.count() == 3
        tasks = await waiting(redis, *(one.wait() for one in (latch, far_latch) * 3))
        assert await latch.count_down() == 2
        assert await far_latch.count_down() == 1
        with pytest.raises(WaitTimeout, match="'party' did not open immediately: it was not counted down to 0"):
            await far_latch.wait(timeout=0)
        assert await queued(redis, 6)()
        assert await latch.count_down() == 0
        await asyncio.gather(*tasks)
        await latch.wait(timeout=0)
        assert await far_latch.count_down() == await far_latch.count() == 0
        await assert_idle(redis)


@pytest.mark.parametrize(("first", "second"), [(3, 2), (2, 3), (1, 3), (3, 1)])
async def test_a_latch_whose_count_differs_between_processes_is_refused(
    sync: Coordinator, other: Coordinator, first: int, second: int
) -> None:
    """Whichever comes first, and also when it is open. Nothing is changed."""
    near, far = sync.latch("import", first), other.latch("import", second)
    left = await near.count_down()
    for _ in range(2):
        with pytest.raises(LimitMismatch, match=f"'import': this latch began at {first}, not {second}") as caught:
            await far.count_down()
        assert (caught.value.expected, caught.value.found) == (second, first)
        assert await near.count() == left == first - 1
    left = await near.count_down(first)
    with pytest.raises(LimitMismatch):
        await far.count_down(identity="part")
    assert left == await far.count() == 0


async def test_an_identity_counts_once(latch: AsyncCountDownLatch, far_latch: AsyncCountDownLatch) -> None:
    assert await latch.count_down(identity="one") == 2
    assert await far_latch.count_down(identity=b"one") == 2
    await asyncio.sleep(600)  # longer than the copies of a count are kept apart without an identity
    assert await far_latch.count_down(identity="one") == 2
    assert await far_latch.count_down(7, identity="two") == 0
    assert await latch.count_down(identity="one") == 0


@pytest.mark.parametrize("at_zero", [False, True])
async def test_a_latch_and_its_identities_are_remembered_from_the_latest_count_on(
    sync: Coordinator, engine: Any, redis: Redis, at_zero: bool
) -> None:
    """A repeated count counts, too. A process with a shorter ``keep`` does not take from what another one asked for.

    A latch is remembered for an hour at least.
    """
    day, keys = 86_400, ("{party}:latch", "{party}:latch:state")
    left = 0 if at_zero else 2

    async def remembered(seconds: float) -> bool:
        return all([seconds <= await redis.ttl(key) <= 2.5 * seconds for key in keys])

    async def a_long_time_ago() -> None:
        seconds, _ = await redis.time()
        await redis.hset(keys[1], "kept", int(seconds + day / 4) * 1000)
        for key in keys:
            await redis.expire(key, day // 4)

    short = AsyncCountDownLatch(sync, NAME, 3, keep=0.01, engine=engine)
    assert await short.count_down(3 if at_zero else 1, identity="one") == left
    assert await remembered(3600)
    await asyncio.sleep(10)
    latch = AsyncCountDownLatch(sync, NAME, 3, keep=day, engine=engine)
    for _ in range(2):
        assert await latch.count_down(identity="one") == await short.count_down(identity="one") == left
        assert await remembered(day)
        await a_long_time_ago()


async def test_each_count_counts_once_wherever_its_task_is_cancelled(sync: Coordinator, engine: Any) -> None:
    """P5: a count that was sent counts; one that was not does not."""
    counted = AsyncCountDownLatch(sync, f"{NAME} of many", 1000, engine=engine)

    async def check(outcome: Outcome[int]) -> None:
        async def settled() -> bool:
            return await counted.count() in (before[0], before[0] - 1)

        await wait_until(settled, FAST, timeout=PATIENCE)
        before[0] = await counted.count()

    before = [1000]
    results = await sweep(counted.count_down, check)
    undisturbed = [one.value for one in results.outcomes if one.value is not None]
    assert undisturbed
    assert 1000 - len(results.outcomes) <= await counted.count() <= 1000 - len(undisturbed)


async def test_bad_arguments_are_refused(latch: AsyncCountDownLatch, sync: Coordinator) -> None:
    bad: Any
    for bad in (0, -1, 10**9 + 1, 1.5, True, None):
        with pytest.raises((TypeError, ValueError), match="count must be"):
            AsyncCountDownLatch(sync, NAME, bad)
    with pytest.raises(ValueError, match="n must be"):
        await latch.count_down(0)
    with pytest.raises(TypeError, match="identity"):
        await latch.count_down(identity=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep"):
        AsyncEvent(sync, NAME, keep=-1)


def test_they_say_what_they_are(sync: Coordinator) -> None:
    assert repr(AsyncEvent(sync, b"a\xff")) == r"<AsyncEvent 'a\\xff'>"
    assert repr(AsyncCountDownLatch(sync, NAME, 3)) == "<AsyncCountDownLatch 'party' count=3>"


# -- the server --------------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.ci
@pytest.mark.parametrize("keep", [True, False])
async def test_a_restart_of_the_server(keep: bool) -> None:
    """What was set is set still if the server kept its data; waiters wait on in any case, and hear of the next set."""
    with EmbeddedServer(port=0, persistent=True) as server:
        async with server.client() as redis, Coordinator(redis, retry_for=PATIENCE) as sync:
            event, latch = AsyncEvent(sync, "set before"), AsyncCountDownLatch(sync, NAME, 2)
            await event.set()
            await latch.count_down()
            (task,) = await waiting(redis, latch.wait())
            await asyncio.to_thread(server.restart, keep)
            async with asyncio.timeout(PATIENCE):
                assert await event.is_set() == keep
                await wait_until(queued(redis, 1), FAST, timeout=PATIENCE)
                assert await latch.count_down() == (0 if keep else 1)
                await latch.count_down()
                await task


# -- barriers: all parties pass together, or none; a party that dies breaks it for the others -------------------

BARRIER = "start"


@pytest.fixture
def barrier(sync: Coordinator, engine: Any) -> AsyncBarrier:
    return sync.barrier(BARRIER, 3, engine=engine)


@pytest.fixture
def far(other: Coordinator) -> AsyncBarrier:
    """The same barrier in another process."""
    return AsyncBarrier(other, BARRIER, 3)


def joined(barrier: AsyncBarrier, number: int) -> Callable[[], Awaitable[bool]]:
    async def enough() -> bool:
        return await barrier.n_waiting() == number

    return enough


async def joining(barrier: AsyncBarrier, *waits: Coroutine[Any, Any, int], behind: int = 0) -> list[asyncio.Task[int]]:
    """Start the waits, and return once all of them have joined, ``behind`` so many others."""
    tasks = [asyncio.create_task(one) for one in waits]
    await wait_until(joined(barrier, behind + len(tasks)), FAST, timeout=PATIENCE)
    return tasks


async def broken(*tasks: asyncio.Task[int]) -> list[str]:
    """Return what the tasks, all of which find the barrier broken, say of it."""
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(type(end) is BrokenBarrierError for end in ends), ends
    return [str(end) for end in ends]


async def test_all_pass_together_again_and_again(barrier: AsyncBarrier, far: AsyncBarrier, redis: Redis) -> None:
    async with asyncio.timeout(PATIENCE):
        for _ in range(3):
            tasks = await joining(far, far.wait(), barrier.wait())
            assert {view.kind: view.waiting for view in await inspect(redis, BARRIER)} == {"barrier": 2}
            last = await barrier.wait()
            assert last == 2
            assert sorted(await asyncio.gather(*tasks)) == [0, 1]
            assert (await far.n_waiting(), await far.broken(), far.parties) == (0, False, 3)
            await assert_idle(redis)


async def test_tasks_go_round_without_waiting_for_each_other_in_between(
    barrier: AsyncBarrier, far: AsyncBarrier
) -> None:
    """Nobody is a round ahead: a party passes its n-th time when all have come so often."""
    rounds = [0, 0, 0]

    async def go(number: int, one: AsyncBarrier) -> list[int]:
        ranks = []
        for turn in range(1, 6):
            rounds[number] = turn
            ranks.append(await one.wait())
            assert min(rounds) >= turn
        return ranks

    async with asyncio.timeout(PATIENCE):
        found = await asyncio.gather(go(0, barrier), go(1, far), go(2, barrier))
    assert all(sorted(ranks) == [0, 1, 2] for ranks in zip(*found, strict=True))


async def test_what_acquires_nothing_is_no_context(sync: Coordinator) -> None:
    """A body would suggest that something is held in it."""
    every: list[Any] = [
        AsyncBarrier(sync, BARRIER, 1),
        AsyncEvent(sync, BARRIER),
        AsyncCountDownLatch(sync, BARRIER, 1),
    ]
    for waited in every:
        with pytest.raises(TypeError, match="asynchronous context manager"):
            async with waited:
                pass


async def test_a_party_whose_time_is_up_leaves(barrier: AsyncBarrier, far: AsyncBarrier, redis: Redis) -> None:
    with pytest.raises(WaitTimeout, match="'start' did not open immediately: not all of its parties have come"):
        await barrier.wait(timeout=0)
    with pytest.raises(WaitTimeout, match=r"within 1\.0 seconds: not all of its parties have come"):
        await barrier.wait(timeout=1)
    await wait_until(joined(far, 0), FAST, timeout=PATIENCE)
    assert not await far.broken()
    async with asyncio.timeout(PATIENCE):
        tasks = await joining(far, barrier.wait(), far.wait())
        assert await far.wait(timeout=0) == 2
        await asyncio.gather(*tasks)
    await assert_idle(redis)


async def test_a_party_that_is_cancelled_leaves_nothing(barrier: AsyncBarrier, far: AsyncBarrier, redis: Redis) -> None:
    """P5: whether it was counted or not, the others need as many as before."""

    async def wait() -> None:
        others = [asyncio.create_task(far.wait()) for _ in range(2)]
        try:
            await barrier.wait()
        finally:
            for task in others:
                task.cancel()
            await asyncio.shield(asyncio.wait(others))

    async def check(outcome: Outcome[None]) -> None:
        await wait_until(joined(far, 0), FAST, timeout=PATIENCE)
        assert not await far.broken()
        await assert_idle(redis)

    assert len((await sweep(wait, check)).outcomes) > 3


async def test_abort_breaks_it_until_it_is_reset(barrier: AsyncBarrier, far: AsyncBarrier) -> None:
    async with asyncio.timeout(PATIENCE):
        tasks = await joining(far, far.wait(), barrier.wait())
        await barrier.abort()
        for said in await broken(*tasks):
            assert "'start' is broken: it was aborted, or a party died" in said
        assert await far.broken()
        for one in (far, barrier):
            with pytest.raises(BrokenBarrierError, match=r"call reset\(\)"):
                await one.wait()
        await far.reset()
        assert not await barrier.broken()
        tasks = await joining(far, far.wait(), barrier.wait())
        assert await far.wait() == 2
        await asyncio.gather(*tasks)


async def test_it_stays_broken_for_a_day_at_least(barrier: AsyncBarrier, redis: Redis) -> None:
    await barrier.abort()
    assert await redis.ttl("{start}:barrier:state") >= 24 * 3600


async def test_reset_sends_away_those_that_wait(barrier: AsyncBarrier, far: AsyncBarrier) -> None:
    async with asyncio.timeout(PATIENCE):
        tasks = await joining(far, far.wait(), barrier.wait())
        await barrier.reset()
        for said in await broken(*tasks):
            assert "'start' was reset while this party waited" in said
        assert (await far.n_waiting(), await far.broken()) == (0, False)
        tasks = await joining(far, far.wait(), barrier.wait())
        assert await barrier.wait() == 2
        await asyncio.gather(*tasks)


async def test_all_have_to_say_the_same_number_of_parties(sync: Coordinator, far: AsyncBarrier, engine: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        (task,) = await joining(far, far.wait())
        with pytest.raises(LimitMismatch, match="'start': others wait for 3 parties, and this one for 2") as caught:
            await AsyncBarrier(sync, BARRIER, 2, engine=engine).wait()
        assert (caught.value.expected, caught.value.found) == (2, 3)
        task.cancel()
        await asyncio.wait([task])
        await wait_until(joined(far, 0), FAST, timeout=PATIENCE)
        assert await AsyncBarrier(sync, BARRIER, 1, engine=engine).wait() == 0  # nobody waits, so it may be another


async def test_a_party_that_died_breaks_it_within_its_ttl(
    server: EmbeddedServer, sync: Coordinator, other: Coordinator, engine: Any
) -> None:
    """For all that wait, in all processes, and for those that come later."""
    near, far = (AsyncBarrier(one, BARRIER, 4, ttl=8, engine=engine) for one in (sync, other))
    async with FaultProxy(server) as proxy, proxy.client() as client, tuned(client, retry_for=1) as dying:
        dead = asyncio.create_task(AsyncBarrier(dying, BARRIER, 4, ttl=8, engine=engine).wait())
        await wait_until(joined(far, 1), FAST, timeout=PATIENCE)
        tasks = await joining(far, near.wait(), far.wait(), behind=1)
        proxy.black_hole = True
        async with asyncio.timeout(8 + 0.2):
            for said in await broken(*tasks):
                assert "a party died" in said
        with pytest.raises(BrokenBarrierError):
            await near.wait()
        dead.cancel()
        await asyncio.wait([dead])
        proxy.black_hole = False
    await near.reset()
    tasks = await joining(near, near.wait(), far.wait(), near.wait())
    assert await far.wait() == 3
    await asyncio.gather(*tasks)


async def test_parties_that_live_wait_for_longer_than_their_ttl(
    sync: Coordinator, other: Coordinator, engine: Any
) -> None:
    """Several tasks of each process."""
    near, far = (AsyncBarrier(one, BARRIER, 5, ttl=6, engine=engine) for one in (sync, other))
    tasks = await joining(far, near.wait(), far.wait(), near.wait(), far.wait())
    _, waiting_still = await asyncio.wait(tasks, timeout=20)
    assert len(waiting_still) == 4
    assert await near.wait() == 4
    assert sorted(await asyncio.gather(*tasks)) == [0, 1, 2, 3]


async def test_a_server_that_lost_its_data_breaks_it(barrier: AsyncBarrier, far: AsyncBarrier, redis: Redis) -> None:
    """The server has forgotten the parties; the next ones begin again."""
    tasks = await joining(barrier, barrier.wait(), far.wait())
    await redis.flushall()
    async with asyncio.timeout(PATIENCE):
        for said in await broken(*tasks):
            assert "'start' was reset while this party waited" in said
        tasks = await joining(barrier, barrier.wait(), far.wait())
        assert await barrier.wait() == 2
        await asyncio.gather(*tasks)


@pytest.mark.ci
async def test_parties_are_kept_alive_while_the_server_is_out_of_memory() -> None:
    with EmbeddedServer(port=0) as server:
        async with server.client() as redis, Coordinator(redis) as sync:
            barrier = AsyncBarrier(sync, BARRIER, 2, ttl=6)
            (task,) = await joining(barrier, barrier.wait())
            await redis.config_set("maxmemory", 1)
            await asyncio.sleep(60)
            await redis.config_set("maxmemory", 0)
            async with asyncio.timeout(PATIENCE):
                assert {await barrier.wait(), await task} == {0, 1}


@pytest.mark.parametrize("parties", [0, -1, 1001, 1.5, True, None])
def test_a_bad_number_of_parties_is_refused(sync: Coordinator, parties: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="parties must be"):
        AsyncBarrier(sync, BARRIER, parties)


def test_it_says_what_it_is(sync: Coordinator) -> None:
    assert repr(AsyncBarrier(sync, BARRIER, 3)) == "<AsyncBarrier 'start' parties=3 ttl=10.0>"
    assert AsyncBarrier(sync, BARRIER, 3).name == BARRIER
