"""LeaderElection: one candidate leads at a time, everybody sees which, and the next one takes over."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, AsyncLock, Coordinator, LeaderElection, LeaseLost, wait_until
from redis_sync_aio.inspection import inspect
from redis_sync_aio.instrumentation import observe_all
from redis_sync_aio.types import Client, Leader, Term

from ..support.body import FAST, assert_undisturbed, for_ever, lost_in, waits
from ..support.inside import lock_keys
from ..support.sweep import Outcome, sweep

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


async def test_without_a_label_it_is_called_by_host_and_process(sync: Coordinator, rival: LeaderElection) -> None:
    async with LeaderElection(sync, NAME).lead() as term:
        assert await rival.leader() == Leader(term.label, term.number)
        assert term.token.startswith(f"{term.label}:")


@pytest.mark.parametrize("label", ["ann@mail.example", "a:1:b", "x y\n|z", "a~"])
async def test_a_label_may_be_any_text(sync: Coordinator, rival: LeaderElection, label: str) -> None:
    async with LeaderElection(sync, NAME, label=label).lead() as term:
        assert await rival.leader() == Leader(label, term.number)
        assert term.label == label


async def test_two_processes_with_one_label_never_lead_together(sync: Coordinator, other: Coordinator) -> None:
    """A label is no token: a process that was restarted does not take over what its predecessor still has."""
    async with LeaderElection(sync, NAME, label="worker").lead():
        with pytest.raises(AcquireTimeout, match="'scheduler'"):
            async with LeaderElection(other, NAME, label="worker").lead(timeout=0):
                raise AssertionError("there are two leaders")


async def test_an_ordinary_lock_of_that_name_is_a_candidate_too(election: LeaderElection, seat: AsyncLock) -> None:
    async with seat as lease:
        found = await election.leader()
        assert found is not None
        assert found.term == lease.fence
        with pytest.raises(AcquireTimeout):
            async with election.lead(timeout=0):
                raise AssertionError("there are two leaders")


async def test_a_key_of_another_client_has_no_term(election: LeaderElection, redis: Redis) -> None:
    await redis.set(NAME, "somebody", px=60_000)
    assert await election.leader() == Leader("somebody", None)


async def test_a_leader_whose_fence_was_deleted_has_no_term(election: LeaderElection, redis: Redis) -> None:
    async with election.lead() as term:
        await redis.delete(lock_keys(NAME.encode()).fence)
        assert await election.leader() == Leader(term.label, None)


# -- resigning, and losing the leadership ------------------------------------------------------------------------------


async def test_a_leader_that_resigns_is_followed_by_the_next_candidate(
    election: LeaderElection, rival: LeaderElection, seat: AsyncLock
) -> None:
    """The body of another task is cancelled, and the hand-over is done when ``resign()`` returns."""
    leads, go = asyncio.Event(), asyncio.Event()

    async def lead() -> None:
        async with election.lead():
            leads.set()
            await for_ever()

    async def follow() -> Term:
        async with rival.lead() as term:
            await go.wait()
            return term

    async with asyncio.timeout(30):
        leading = asyncio.create_task(lead())
        await leads.wait()
        following = asyncio.create_task(follow())
        await wait_until(waits(seat), FAST, timeout=20)
        assert await election.resign()
        with pytest.raises(LeaseLost) as caught:
            await leading
        assert caught.value.reason == "released"

        async def followed() -> bool:
            return (await election.leader() or Leader("", 0)).label == "worker-2"

        await wait_until(followed, FAST, timeout=20)
        go.set()
        assert (await following).label == "worker-2"


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

    term, error = await lost_in(LeaderElection(sync, NAME, ttl=0.5).lead(), body)
    assert (error.name, error.fence) == (NAME, term.number)


async def test_nothing_is_left_wherever_a_candidate_is_cancelled(election: LeaderElection, seat: AsyncLock) -> None:
    """P5: waiting for its turn, leading, resigning."""

    async def stand() -> None:
        async with election.lead():
            await asyncio.sleep(0)

    async def check(outcome: Outcome[None]) -> None:
        async def free() -> bool:
            found = await seat.statistics()
            return not bool(found.held) and found.waiting == 0

        await wait_until(free, FAST, timeout=20)

    assert len((await sweep(stand, check)).outcomes) > 3


# -- watching ----------------------------------------------------------------------------------------------------------


async def test_a_watcher_sees_each_leader(election: LeaderElection, rival: LeaderElection) -> None:
    async with asyncio.timeout(30), aclosing(rival.watch(every=SOON)) as leaders:
        assert await anext(leaders) is None
        async with election.lead() as term:
            assert await anext(leaders) == Leader("worker-1", term.number)
        assert await anext(leaders) is None
        async with rival.lead() as term:
            assert await anext(leaders) == Leader("worker-2", term.number)


async def test_a_watcher_sees_a_new_term_of_the_same_leader(election: LeaderElection, rival: LeaderElection) -> None:
    async with asyncio.timeout(30), aclosing(rival.watch(every=SOON)) as leaders:
        async with election.lead() as term:
            assert await anext(leaders) == Leader("worker-1", term.number)
        async with election.lead() as term:
            assert await anext(leaders) == Leader("worker-1", term.number)


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


async def test_a_watcher_needs_an_interval(election: LeaderElection) -> None:
    """It is refused when it is given, not when the iteration begins."""
    with pytest.raises(ValueError, match="every must be more than 0"):
        election.watch(every=0)
    assert (election.name, repr(election)) == (NAME, "<LeaderElection 'scheduler' ttl=30.0>")
