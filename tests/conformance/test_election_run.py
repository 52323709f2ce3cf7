"""`LeaderElection.run`: lead, work, and stand again after a loss or an outage, until the work returns."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, Coordinator, LeaderElection, Unreachable, wait_until
from redis_sync_aio.errors import CoordinatorClosed
from redis_sync_aio.types import Term

from ..support.body import FAST, assert_undisturbed, for_ever, waits
from ..support.served import served
from ..support.sweep import Outcome, sweep
from ..support.views import holder_of

NAME = "scheduler"


@pytest.fixture(params=["link", "polling"])
def way(request: pytest.FixtureRequest) -> str:
    """The way to the server: a candidate is woken, or polls."""
    return str(request.param)


@pytest.fixture
def election(sync: Coordinator) -> LeaderElection:
    return LeaderElection(sync, NAME, ttl=10)


@pytest_asyncio.fixture
async def seat(other: Coordinator) -> AsyncLock:
    """The lock that the leader holds, as another process sees it."""
    return AsyncLock(other, NAME)


class Work:
    """Work that never ends, and the terms in which it ran."""

    def __init__(self) -> None:
        self.terms: list[Term] = []
        self.cancelled = 0

    async def __call__(self, term: Term) -> None:
        self.terms.append(term)
        try:
            await for_ever()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def in_term(self, number: int) -> None:
        """Wait until it runs in its term number ``number``, counted from 1."""
        await wait_until(lambda: len(self.terms) >= number, FAST, timeout=30)


async def free(seat: AsyncLock) -> bool:
    found = await seat.statistics()
    return not bool(found.held) and found.waiting == 0


# -- the ends of run ---------------------------------------------------------------------------------------------------


async def test_work_that_returns_resigns_and_gives_its_result(election: LeaderElection, seat: AsyncLock) -> None:
    async def work(term: Term) -> int:
        assert holder_of(await seat.statistics()) == term.token
        return term.number

    first = await election.run(work)
    assert await free(seat)
    assert await election.run(work) > first


async def test_work_that_raises_resigns_and_raises(election: LeaderElection, seat: AsyncLock) -> None:
    async def work(term: Term) -> None:
        raise LookupError("no schedule")

    with pytest.raises(LookupError, match="no schedule"):
        await election.run(work)
    assert await free(seat)


async def test_nothing_is_left_wherever_a_run_is_cancelled(election: LeaderElection, seat: AsyncLock) -> None:
    """P5: waiting for its turn, working, resigning."""

    async def work(term: Term) -> None:
        await asyncio.sleep(0)

    async def check(outcome: Outcome[None]) -> None:
        await wait_until(partial(free, seat), FAST, timeout=20)

    assert len((await sweep(partial(election.run, work), check)).outcomes) > 3


@pytest.mark.parametrize("work", [None, "work", 7])
async def test_what_cannot_be_called_is_no_work(election: LeaderElection, seat: AsyncLock, work: Any) -> None:
    """It is refused before the process stands."""
    with pytest.raises(TypeError, match="work must be a coroutine function that takes a Term, not"):
        await election.run(work)
    assert await free(seat)


async def test_a_function_that_is_no_coroutine_function_is_named(election: LeaderElection, seat: AsyncLock) -> None:
    async with asyncio.timeout(20):
        with pytest.raises(TypeError, match=r"work must be a coroutine function: .*no_work.* returned None"):
            await election.run(no_work)  # type: ignore[arg-type]
    assert await free(seat)


def no_work(term: Term) -> None:
    """A plain function."""


# -- standing again ----------------------------------------------------------------------------------------------------


async def test_a_lost_term_cancels_the_work_and_stands_again(
    redis: Redis, sync: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    work = Work()
    async with asyncio.timeout(60):
        running = asyncio.create_task(LeaderElection(sync, NAME, ttl=0.9).run(work))
        await work.in_term(1)
        with caplog.at_level(logging.WARNING, "redis_sync_aio"):
            await redis.set(NAME, "another", px=200)
            await work.in_term(2)
        first, second = work.terms
        assert work.cancelled == 1
        assert first.lost
        assert second.number > first.number
        [said] = [record for record in caplog.records if getattr(record, "event", "") == "stands_again"]
        assert "this process does not lead in 'scheduler', and stands again in 0.0" in said.getMessage()
        assert "LeaseLost: " in said.getMessage()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_a_loss_that_children_of_the_work_report_stands_again(redis: Redis, sync: Coordinator) -> None:
    """A task group raises it in a group."""
    terms: list[Term] = []

    async def look(term: Term) -> None:
        while True:
            await asyncio.sleep(0.005)
            term.check()

    async def work(term: Term) -> str:
        terms.append(term)
        if len(terms) == 2:
            return "done"
        async with asyncio.TaskGroup() as children:
            children.create_task(look(term))
            children.create_task(look(term))
            await redis.set(NAME, "another", px=200)
        raise AssertionError("the term was not lost")

    async with asyncio.timeout(60):
        assert await LeaderElection(sync, NAME, ttl=0.9).run(work) == "done"
    await assert_undisturbed()


async def test_another_error_among_those_of_the_children_is_raised(sync: Coordinator, seat: AsyncLock) -> None:
    async def work(term: Term) -> None:
        raise ExceptionGroup("children", [Unreachable("no Redis"), LookupError("no schedule")])

    with pytest.raises(ExceptionGroup, match="children"):
        await LeaderElection(sync, NAME).run(work)
    assert await free(seat)


async def test_resigning_from_another_task_lets_a_rival_lead_first(
    election: LeaderElection, other: Coordinator, seat: AsyncLock
) -> None:
    """The process stands again behind those who wait."""
    work, rival = Work(), LeaderElection(other, NAME)
    async with asyncio.timeout(60):
        running = asyncio.create_task(election.run(work))
        await work.in_term(1)
        following = asyncio.create_task(rival.lead().__aenter__())
        await wait_until(waits(seat), FAST, timeout=20)
        assert await election.resign()
        between = await following
        await wait_until(waits(seat), FAST, timeout=20)
        assert len(work.terms) == 1
        await rival.resign()
        await work.in_term(2)
        assert work.terms[0].number < between.number < work.terms[1].number
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("mode", ["link", "plain"])
async def test_an_outage_is_survived(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """While it leads the term is lost, and while it stands each attempt ends with Unreachable: it stands again."""

    def unreachable() -> bool:
        return any("Unreachable: " in record.getMessage() for record in caplog.records)

    async with served(mode, retry_for=0.5) as s, asyncio.timeout(120):
        work = Work()
        running = asyncio.create_task(LeaderElection(s.sync, NAME, ttl=1).run(work))
        await work.in_term(1)
        with caplog.at_level(logging.WARNING, "redis_sync_aio"):
            s.server.kill()
            await wait_until(unreachable, FAST, timeout=60)
        await asyncio.to_thread(s.server.restart, False)
        await work.in_term(2)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_result_is_returned_though_the_release_is_not_answered() -> None:
    """The work was done within its term, so it does not run twice."""
    async with served(retry_for=0.5) as s, asyncio.timeout(60):
        calls: list[int] = []

        async def work(term: Term) -> str:
            calls.append(term.number)
            s.server.kill()
            return "done"

        assert await LeaderElection(s.sync, NAME, ttl=10).run(work) == "done"
        assert len(calls) == 1


# -- the end of the coordinator ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drain", [0, 3600])
async def test_the_end_of_the_coordinator_ends_the_work_immediately(
    election: LeaderElection, sync: Coordinator, seat: AsyncLock, drain: int
) -> None:
    """Draining does not wait for work that has no end."""
    work = Work()
    async with asyncio.timeout(30):
        running = asyncio.create_task(election.run(work))
        await work.in_term(1)
        await sync.aclose(drain=drain)
        with pytest.raises(CoordinatorClosed):
            await running
    assert work.cancelled == 1
    assert await free(seat)


async def test_a_candidate_ends_with_its_coordinator(
    election: LeaderElection, sync: Coordinator, seat: AsyncLock
) -> None:
    lease = await seat.acquire()
    async with asyncio.timeout(30):
        running = asyncio.create_task(election.run(Work()))
        await wait_until(waits(seat), FAST, timeout=20)
        await sync.aclose(drain=3600)
        with pytest.raises(CoordinatorClosed):
            await running
    await lease.release()


async def test_a_drain_that_meets_an_election_waits_for_nothing(other: Coordinator, redis: Redis) -> None:
    """However far the process was elected when it began."""
    for turns in range(12):
        lease = await AsyncLock(other, NAME).acquire(timeout=20)
        async with asyncio.timeout(60), Coordinator(redis) as sync:
            running = asyncio.create_task(LeaderElection(sync, NAME).run(Work()))
            await wait_until(waits(AsyncLock(other, NAME)), FAST, timeout=20)
            releasing = asyncio.create_task(lease.release())
            for _ in range(turns):
                await asyncio.sleep(0)
            await sync.aclose(drain=3600)
            await releasing
            with pytest.raises(CoordinatorClosed):
                await running
