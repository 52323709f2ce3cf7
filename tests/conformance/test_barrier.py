"""AsyncBarrier: all parties pass together, or none; a party that dies breaks it for the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncBarrier, AsyncCountDownLatch, AsyncEvent, Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import BrokenBarrierError, LimitMismatch, WaitTimeout
from redis_sync_aio.inspection import inspect
from redis_sync_aio.testing import assert_idle

from ..support.body import FAST
from ..support.inside import tuned
from ..support.proxy import FaultProxy
from ..support.sweep import Outcome, sweep

NAME = "start"
PATIENCE = 60
"""Seconds after which a test that hangs ends."""


@pytest.fixture(params=["auto", "lua"])
def engine(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def barrier(sync: Coordinator, engine: Any) -> AsyncBarrier:
    return sync.barrier(NAME, 3, engine=engine)


@pytest.fixture
def far(other: Coordinator) -> AsyncBarrier:
    """The same barrier in another process."""
    return AsyncBarrier(other, NAME, 3)


def joined(barrier: AsyncBarrier, number: int) -> Callable[[], Awaitable[bool]]:
    async def enough() -> bool:
        return await barrier.n_waiting() == number

    return enough


async def waiting(barrier: AsyncBarrier, *waits: Coroutine[Any, Any, int], behind: int = 0) -> list[asyncio.Task[int]]:
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
            tasks = await waiting(far, far.wait(), barrier.wait())
            assert {view.kind: view.waiting for view in await inspect(redis, NAME)} == {"barrier": 2}
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
    every: list[Any] = [AsyncBarrier(sync, NAME, 1), AsyncEvent(sync, NAME), AsyncCountDownLatch(sync, NAME, 1)]
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
        tasks = await waiting(far, barrier.wait(), far.wait())
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
        tasks = await waiting(far, far.wait(), barrier.wait())
        await barrier.abort()
        for said in await broken(*tasks):
            assert "'start' is broken: it was aborted, or a party died" in said
        assert await far.broken()
        for one in (far, barrier):
            with pytest.raises(BrokenBarrierError, match=r"call reset\(\)"):
                await one.wait()
        await far.reset()
        assert not await barrier.broken()
        tasks = await waiting(far, far.wait(), barrier.wait())
        assert await far.wait() == 2
        await asyncio.gather(*tasks)


async def test_it_stays_broken_for_a_day_at_least(barrier: AsyncBarrier, redis: Redis) -> None:
    await barrier.abort()
    assert await redis.ttl("{start}:barrier:state") >= 24 * 3600


async def test_reset_sends_away_those_that_wait(barrier: AsyncBarrier, far: AsyncBarrier) -> None:
    async with asyncio.timeout(PATIENCE):
        tasks = await waiting(far, far.wait(), barrier.wait())
        await barrier.reset()
        for said in await broken(*tasks):
            assert "'start' was reset while this party waited" in said
        assert (await far.n_waiting(), await far.broken()) == (0, False)
        tasks = await waiting(far, far.wait(), barrier.wait())
        assert await barrier.wait() == 2
        await asyncio.gather(*tasks)


async def test_all_have_to_say_the_same_number_of_parties(sync: Coordinator, far: AsyncBarrier, engine: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        (task,) = await waiting(far, far.wait())
        with pytest.raises(LimitMismatch, match="'start': others wait for 3 parties, and this one for 2") as caught:
            await AsyncBarrier(sync, NAME, 2, engine=engine).wait()
        assert (caught.value.expected, caught.value.found) == (2, 3)
        task.cancel()
        await asyncio.wait([task])
        await wait_until(joined(far, 0), FAST, timeout=PATIENCE)
        assert await AsyncBarrier(sync, NAME, 1, engine=engine).wait() == 0  # nobody waits, so it may be another


async def test_a_party_that_died_breaks_it_within_its_ttl(
    server: EmbeddedServer, sync: Coordinator, other: Coordinator, engine: Any
) -> None:
    """For all that wait, in all processes, and for those that come later."""
    near, far = (AsyncBarrier(one, NAME, 4, ttl=8, engine=engine) for one in (sync, other))
    async with FaultProxy(server) as proxy, proxy.client() as client, tuned(client, retry_for=1) as dying:
        dead = asyncio.create_task(AsyncBarrier(dying, NAME, 4, ttl=8, engine=engine).wait())
        await wait_until(joined(far, 1), FAST, timeout=PATIENCE)
        tasks = await waiting(far, near.wait(), far.wait(), behind=1)
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
    tasks = await waiting(near, near.wait(), far.wait(), near.wait())
    assert await far.wait() == 3
    await asyncio.gather(*tasks)


async def test_parties_that_live_wait_for_longer_than_their_ttl(
    sync: Coordinator, other: Coordinator, engine: Any
) -> None:
    """Several tasks of each process."""
    near, far = (AsyncBarrier(one, NAME, 5, ttl=6, engine=engine) for one in (sync, other))
    tasks = await waiting(far, near.wait(), far.wait(), near.wait(), far.wait())
    _, waiting_still = await asyncio.wait(tasks, timeout=20)
    assert len(waiting_still) == 4
    assert await near.wait() == 4
    assert sorted(await asyncio.gather(*tasks)) == [0, 1, 2, 3]


async def test_a_server_that_lost_its_data_breaks_it(barrier: AsyncBarrier, far: AsyncBarrier, redis: Redis) -> None:
    """The server has forgotten the parties; the next ones begin again."""
    tasks = await waiting(barrier, barrier.wait(), far.wait())
    await redis.flushall()
    async with asyncio.timeout(PATIENCE):
        for said in await broken(*tasks):
            assert "'start' was reset while this party waited" in said
        tasks = await waiting(barrier, barrier.wait(), far.wait())
        assert await barrier.wait() == 2
        await asyncio.gather(*tasks)


@pytest.mark.ci
async def test_parties_are_kept_alive_while_the_server_is_out_of_memory() -> None:
    with EmbeddedServer(port=0) as server:
        async with server.client() as redis, Coordinator(redis) as sync:
            barrier = AsyncBarrier(sync, NAME, 2, ttl=6)
            (task,) = await waiting(barrier, barrier.wait())
            await redis.config_set("maxmemory", 1)
            await asyncio.sleep(60)
            await redis.config_set("maxmemory", 0)
            async with asyncio.timeout(PATIENCE):
                assert {await barrier.wait(), await task} == {0, 1}


@pytest.mark.parametrize("parties", [0, -1, 1001, 1.5, True, None])
def test_a_bad_number_of_parties_is_refused(sync: Coordinator, parties: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="parties must be"):
        AsyncBarrier(sync, NAME, parties)


def test_it_says_what_it_is(sync: Coordinator) -> None:
    assert repr(AsyncBarrier(sync, NAME, 3)) == "<AsyncBarrier 'start' parties=3 ttl=10.0>"
    assert AsyncBarrier(sync, NAME, 3).name == NAME
