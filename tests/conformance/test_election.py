"""LeaderElection: one candidate leads at a time, everybody sees which, and the next one takes over.

`LeaderElection.run`: lead, work, and stand again after a loss or an outage, until the work returns.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, AsyncLock, Coordinator, LeaderElection, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed
from redis_sync_aio.inspection import inspect
from redis_sync_aio.instrumentation import observe_all
from redis_sync_aio.types import Client, Leader, Term

from ..support.body import FAST, assert_undisturbed, for_ever, lost_in, waits
from ..support.inside import lock_keys
from ..support.served import served
from ..support.sweep import Outcome, sweep
from ..support.views import holder_of
from ..support.wired import wired

NAME = "scheduler"
SOON = 0.01


@pytest.fixture(params=["link", "polling", "cluster"])
def way(request: pytest.FixtureRequest) -> str:
    """What differs here is only whether a candidate is woken."""
    return str(request.param)


@pytest.fixture
def election(sync: Coordinator) -> LeaderElection:
    return LeaderElection(sync, NAME, label="worker-1")


@pytest.fixture
def rival(other: Coordinator) -> LeaderElection:
    """A candidate in another process."""
    return LeaderElection(other, NAME, label="worker-2")


@pytest_asyncio.fixture
async def seat(other: Coordinator) -> AsyncLock:
    """The lock that the leader holds, as others see it."""
    return AsyncLock(other, NAME)


async def test_everybody_sees_who_leads(election: LeaderElection, rival: LeaderElection) -> None:
    assert await rival.leader() is None
    async with election.lead() as term:
        assert (term.label, term.number) == ("worker-1", term.fence)
        assert await rival.leader() == await election.leader() == Leader("worker-1", term.number)
        first = term.number
    assert await rival.leader() is None
    async with rival.lead() as term:
        assert await election.leader() == Leader("worker-2", term.number)
        assert term.number > first


@pytest.mark.parametrize("label", ["ann@mail.example", "a:1:b", "x y\n|z", "a~"])
async def test_a_label_may_be_any_text(sync: Coordinator, rival: LeaderElection, label: str) -> None:
    async with LeaderElection(sync, NAME, label=label).lead() as term:
        assert await rival.leader() == Leader(label, term.number)
        assert term.label == label


async def test_without_a_label_it_is_called_by_host_and_process(sync: Coordinator, rival: LeaderElection) -> None:
    election = LeaderElection(sync, NAME)
    assert (election.name, repr(election)) == (NAME, "<LeaderElection 'scheduler' ttl=30.0>")
    async with election.lead() as term:
        assert await rival.leader() == Leader(term.label, term.number)
        assert term.token.startswith(f"{term.label}:")


async def test_two_processes_with_one_label_never_lead_together(sync: Coordinator, other: Coordinator) -> None:
    """A label is no token: a process that was restarted does not take over what its predecessor still has."""
    async with LeaderElection(sync, NAME, label="worker").lead():
        with pytest.raises(AcquireTimeout, match="'scheduler'"):
            async with LeaderElection(other, NAME, label="worker").lead(timeout=0):
                raise AssertionError("there are two leaders")


async def test_a_leader_may_have_no_term(election: LeaderElection, redis: Redis) -> None:
    """If its key is another client's, or its fence was deleted."""
    await redis.set(NAME, "somebody", px=60_000)
    assert await election.leader() == Leader("somebody", None)
    await redis.delete(NAME)
    async with election.lead() as term:
        await redis.delete(lock_keys(NAME.encode()).fence)
        assert await election.leader() == Leader(term.label, None)


async def test_an_ordinary_lock_of_that_name_is_a_candidate_too(election: LeaderElection, seat: AsyncLock) -> None:
    async with seat as lease:
        found = await election.leader()
        assert found is not None
        assert found.term == lease.fence
        with pytest.raises(AcquireTimeout):
            async with election.lead(timeout=0):
                raise AssertionError("there are two leaders")


# -- resigning, and losing the leadership ------------------------------------------------------------------------------


async def test_a_body_may_resign_itself(election: LeaderElection, rival: LeaderElection) -> None:
    assert not await election.resign()
    async with election.lead():
        assert not await rival.resign()  # another process leads
        assert await election.resign()
        assert await rival.leader() is None
    await assert_undisturbed()


async def test_a_lost_leadership_cancels_the_body(redis: Redis, sync: Coordinator) -> None:
    async def body(term: Term) -> None:
        await redis.set(NAME, "somebody", px=60_000)
        await for_ever()

    term, error = await lost_in(LeaderElection(sync, NAME, ttl=5).lead(), body)
    assert (error.name, error.fence) == (NAME, term.number)


async def test_a_body_is_cancelled_by_a_resignation_in_another_task(election: LeaderElection) -> None:
    async def resign(term: Term) -> None:
        assert await asyncio.create_task(election.resign())
        await for_ever()

    _, error = await lost_in(election.lead(), resign)
    assert error.reason == "released"
    assert await election.leader() is None


@pytest.mark.parametrize("how", ["lead", "run"])
async def test_p5_nothing_is_left_wherever_a_candidate_is_cancelled(
    election: LeaderElection, seat: AsyncLock, how: str
) -> None:
    """Waiting for its turn, leading, resigning."""

    async def work(term: Term) -> None:
        await asyncio.sleep(0)

    async def stand() -> None:
        if how == "run":
            await election.run(work)
        else:
            async with election.lead() as term:
                await work(term)
                assert await election.resign()

    async def check(outcome: Outcome[None]) -> None:
        await wait_until(partial(free, seat), FAST, timeout=20)

    assert len((await sweep(stand, check)).outcomes) > 3


# -- watching ----------------------------------------------------------------------------------------------------------


async def test_a_watcher_sees_each_term_of_each_leader(election: LeaderElection, rival: LeaderElection) -> None:
    """It is told when it begins, or within its interval. A bad interval is refused before the iteration begins."""
    async with asyncio.timeout(30), aclosing(rival.watch(every=SOON)) as leaders:
        assert await anext(leaders) is None
        async with election.lead() as term:
            assert await anext(leaders) == Leader("worker-1", term.number)
        async with election.lead() as term:
            assert await anext(leaders) == Leader("worker-1", term.number)
        assert await anext(leaders) is None
        async with rival.lead() as term:
            assert await anext(leaders) == Leader("worker-2", term.number)
    with pytest.raises(ValueError, match="every must be more than 0"):
        election.watch(every=0)


async def test_a_watcher_looks_when_the_lease_should_end(rival: LeaderElection, redis: Redis) -> None:
    """However rarely it looks otherwise."""
    await redis.set(NAME, "somebody", px=300)
    async with asyncio.timeout(30), aclosing(rival.watch(every=3600)) as leaders:
        assert await anext(leaders) == Leader("somebody", None)
        assert await anext(leaders) is None


# -- what else shows it ------------------------------------------------------------------------------------------------


async def test_an_inspection_shows_the_identities_and_the_processes(
    election: LeaderElection, rival: LeaderElection, client: Client, seat: AsyncLock
) -> None:
    async with election.lead() as term:
        waiting = asyncio.create_task(rival.lead(timeout=60).__aenter__())
        await wait_until(waits(seat), FAST, timeout=20)
        [view] = await inspect(client, NAME)
        [holder], [waiter] = view.holders, view.waiters
        assert (holder.label, waiter.label) == ("worker-1", "worker-2")
        assert holder.token == term.token == f"worker-1@{holder.host}:{term.token.split(':', 1)[1]}"
        assert holder.pid == waiter.pid is not None
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_its_events_say_that_it_is_an_election(election: LeaderElection) -> None:
    kinds: list[str] = []
    with observe_all(lambda event: kinds.append(event.kind)):
        async with election.lead():
            pass
    assert set(kinds) == {"election"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ttl": None}, TypeError, "an election needs a ttl"),
        ({"ttl": 0}, ValueError, "ttl must be between"),
        ({"label": ""}, ValueError, "label must not be empty"),
        ({"label": 7}, TypeError, "label must be str"),
        ({"label": "x" * 513}, ValueError, "label must have at most 512 bytes, not 513"),
        ({"engine": "fast"}, ValueError, "engine"),
    ],
)
async def test_bad_arguments_are_refused(
    sync: Coordinator, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LeaderElection(sync, NAME, **options)


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


async def test_work_that_returns_resigns_and_gives_its_result(election: LeaderElection, seat: AsyncLock) -> None:
    async def work(term: Term) -> int:
        assert holder_of(await seat.statistics()) == term.token
        return term.number

    first = await election.run(work)
    assert await free(seat)
    assert await election.run(work) > first


NO_SCHEDULE = LookupError("no schedule")


@pytest.mark.parametrize("error", [NO_SCHEDULE, ExceptionGroup("children", [Unreachable("no Redis"), NO_SCHEDULE])])
async def test_work_that_raises_resigns_and_raises(election: LeaderElection, seat: AsyncLock, error: Exception) -> None:
    async def work(term: Term) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await election.run(work)
    assert caught.value is error
    assert await free(seat)


def no_work(term: Term) -> None:
    """A plain function."""


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (None, "work must be a coroutine function that takes a Term, not"),
        (7, "work must be a coroutine function that takes a Term, not"),
        (no_work, "work must be a coroutine function: .*no_work.* returned None"),
    ],
)
async def test_work_has_to_be_a_coroutine_function(
    election: LeaderElection, seat: AsyncLock, work: Any, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        await asyncio.wait_for(election.run(work), 20)
    assert await free(seat)


async def test_a_result_is_returned_though_the_release_is_not_answered(server: EmbeddedServer) -> None:
    """The work was done within its term, so it does not run twice."""
    async with wired(server, retry_for=0.5) as w, asyncio.timeout(60):
        calls: list[int] = []

        async def work(term: Term) -> str:
            calls.append(term.number)
            w.proxy.black_hole = True
            return "done"

        assert await LeaderElection(w.sync, NAME, ttl=10).run(work) == "done"
        assert len(calls) == 1


# -- standing again ----------------------------------------------------------------------------------------------------


async def test_a_lost_term_cancels_the_work_and_stands_again(
    redis: Redis, sync: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    work = Work()
    async with asyncio.timeout(60):
        running = asyncio.create_task(LeaderElection(sync, NAME, ttl=9).run(work))
        await work.in_term(1)
        with caplog.at_level(logging.WARNING, "redis_sync_aio"):
            await redis.set(NAME, "another", px=2000)
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
            await redis.set(NAME, "another", px=2000)
        raise AssertionError("the term was not lost")

    async with asyncio.timeout(60):
        assert await LeaderElection(sync, NAME, ttl=9).run(work) == "done"
    await assert_undisturbed()


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
