"""P1, P2, P6 and FAULTS A1-A4 for permits over real processes: killed and stopped while they hold or wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AsyncSemaphore, Coordinator, Lease, wait_until
from redis_sync_aio.embedded import EmbeddedServer

from ..support.body import FAST, waits
from ..support.child import Answer, Child, Crew, Failed
from ..support.pairwise import first_of
from ..support.views import tokens

pytestmark = pytest.mark.timing
NAME = "shared"
LIMIT = 4
SLACK = 0.2
"""FAULTS A1: seconds that the next grant may come later than the end of a dead holder's lease."""


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew() as crew:
        yield crew


@pytest_asyncio.fixture
async def sem(sync: Coordinator) -> AsyncIterator[AsyncSemaphore]:
    """The semaphore, from the test's own process."""
    yield AsyncSemaphore(sync, NAME, limit=LIMIT)


async def opened(server: EmbeddedServer, *children: Child) -> None:
    await asyncio.gather(*(child.open(server.url, claim=0.3) for child in children))


async def queue_up(sem: AsyncSemaphore, *wanted: tuple[Child, int]) -> list[asyncio.Future[Answer]]:
    """Let the children ask for so many permits, in this order; return once all of them are queued."""
    grants: list[asyncio.Future[Answer]] = []
    for number, (child, weight) in enumerate(wanted, start=1):
        grants.append(child.permits(NAME, 5.0, weight, LIMIT, slot=str(number)))
        await wait_until(waits(sem, number), FAST, timeout=15)
    return grants


async def assert_free(sem: AsyncSemaphore) -> None:
    found = await sem.statistics()
    assert (found.held, found.waiting) == (0, 0)
    await (await sem.acquire(weight=LIMIT, timeout=0)).release()


async def test_p6_a1_a_killed_holders_permits_come_back(
    server: EmbeddedServer, sem: AsyncSemaphore, crew: Crew
) -> None:
    """At the end of its lease, not before; the waiters have them within 0.2 s, and nobody else was disturbed."""
    ttl = 0.4
    kept = await sem.acquire()
    with crew.children(2) as children:
        await opened(server, *children)
        for child in children:
            dead = await child.permits(NAME, ttl, 3, LIMIT)
            waiting = [asyncio.create_task(sem.acquire(weight=weight)) for weight in (2, 1)]
            await wait_until(waits(sem, 2), FAST, timeout=15)
            child.kill()
            begin = time.monotonic()
            (remaining,) = (one.remaining for one in (await sem.statistics()).holders if one.token == dead["token"])
            assert remaining is not None
            assert remaining <= ttl
            async with asyncio.timeout(20):
                leases = [await task for task in waiting]
            assert remaining - 0.02 < time.monotonic() - begin < remaining + SLACK
            for lease in leases:
                assert lease.fence > dead.fence
                await lease.release()
            kept.check()
    await kept.release()
    await assert_free(sem)


@pytest.mark.parametrize(
    "dead", first_of((0, 2), (0,), (1,), (0, 1)), ids=["every-other", "head", "middle", "first-two"]
)
async def test_p2_a2_killed_waiters_are_skipped(
    server: EmbeddedServer, sem: AsyncSemaphore, redis: Redis, crew: Crew, dead: tuple[int, ...]
) -> None:
    """P2: without delay, whatever they weigh; those behind them get what they would have got."""
    weights = (3, 4, 2, 1)
    holder = await sem.acquire(weight=LIMIT)
    with crew.children(4) as children:
        await opened(server, *children)
        grants = await queue_up(sem, *zip(children, weights, strict=True))
        for number in dead:
            await children[number].kill_seen(redis)
        begin = time.monotonic()
        await holder.release()
        fence = holder.fence
        for number, grant in enumerate(grants):
            if number in dead:
                continue
            granted = await asyncio.wait_for(grant, 20)
            assert granted.at - begin < SLACK
            assert granted.fence > fence
            fence = granted.fence
            begin = (await children[number].release(str(number + 1))).at
    await assert_free(sem)


async def test_p2_a2_a_killed_waiter_that_does_not_fit_keeps_nobody_out(
    server: EmbeddedServer, sem: AsyncSemaphore, redis: Redis, crew: Crew
) -> None:
    """P2: it is the head, too heavy for what is free, and dead: those behind it who fit are let in immediately."""
    kept, gone = await sem.acquire(weight=2), await sem.acquire(weight=2)
    with crew.children(3) as children:
        await opened(server, *children)
        heavy, *light = children
        grants = await queue_up(sem, (heavy, 3), (light[0], 1), (light[1], 1))
        await heavy.kill_seen(redis)
        begin = time.monotonic()
        await gone.release()
        for number, grant in enumerate(grants[1:], start=1):
            granted = await asyncio.wait_for(grant, 20)
            assert granted.at - begin < SLACK
            await children[number].release(str(number + 1))
    kept.check()
    await kept.release()
    await assert_free(sem)


@pytest.mark.parametrize("room", ["when they come", "later"])
async def test_p3_a2_a_waiter_that_does_not_fit_is_killed_later(
    server: EmbeddedServer, sem: AsyncSemaphore, redis: Redis, crew: Crew, room: str
) -> None:
    """P2, P3: there was room for those behind it, and it was alive then. Somebody looks, within a claim (0.3 s)."""
    kept, gone = await sem.acquire(weight=2), await sem.acquire(weight=2)
    with crew.children(3) as children:
        await opened(server, *children)
        heavy, *light = children
        if room == "when they come":
            await gone.release()
        grants = await queue_up(sem, (heavy, 3), (light[0], 1), (light[1], 1))
        if room == "later":
            await gone.release()
        assert not any(grant.done() for grant in grants)
        await heavy.kill_seen(redis)
        begin = time.monotonic()
        for number, grant in enumerate(grants[1:], start=1):
            granted = await asyncio.wait_for(grant, 20)
            assert granted.at - begin < 0.3 + SLACK
            await children[number].release(str(number + 1))
    kept.check()
    await kept.release()
    await assert_free(sem)


async def test_p6_a4_stopped_beyond_the_ttl(server: EmbeddedServer, sem: AsyncSemaphore, crew: Crew) -> None:
    """P1, P6: after SIGCONT it knows that its permits went to others, and takes nothing from them."""
    with crew.children(1) as children:
        await opened(server, *children)
        child = children[0]
        await child.permits(NAME, 0.3, 3, LIMIT)
        child.stop()
        leases = [await sem.acquire(weight=weight, timeout=3) for weight in (1, 3)]
        child.go_on()
        with pytest.raises(Failed) as caught:
            await child.release()
        assert caught.value.kind == "LeaseLost"
        found = await sem.statistics()
        assert set(tokens(found.holders)) == {lease.token for lease in leases}
        for lease in leases:
            lease.check()
            await lease.release()
    await assert_free(sem)


async def test_p1_an_identity_over_processes(server: EmbeddedServer, sem: AsyncSemaphore, crew: Crew) -> None:
    """P1: the same permits in any process; they outlive the first of them, and any of them may release."""
    with crew.children(2) as children:
        await opened(server, *children)
        first, second = children
        one = await first.permits(NAME, 5, 2, LIMIT, identity="worker-7")
        same = await second.permits(NAME, 5, 1, LIMIT, identity="worker-7")
        assert (one.fence, one["token"]) == (same.fence, same["token"]) == (one.fence, "worker-7")
        first.kill()
        again = await sem.acquire(identity="worker-7", timeout=0)
        assert (again.fence, again.weight) == (one.fence, 2)
        assert (await sem.statistics()).held == 2
        await second.release()
        assert (await sem.statistics()).held == 0
        two = await second.permits(NAME, 5, 1, LIMIT, identity="worker-8")
        await sem.release(identity="worker-8")
        with pytest.raises(Failed, match="was lost"):
            await second.release()
        assert two.fence > one.fence
    await assert_free(sem)


async def test_p1_contending_processes_one_dies_now_and_then(
    server: EmbeddedServer, sem: AsyncSemaphore, redis: Redis, crew: Crew
) -> None:
    """P1, P8: by the times of grants and releases there are never more than the limit, and fences are unique."""
    events: list[tuple[float, int]] = []
    fences: list[int] = []

    async def work(child: Child, number: int, die_at: int) -> None:
        for turn in range(10):
            weight = 1 + (number + turn) % 3
            granted = await asyncio.wait_for(child.permits(NAME, 0.3, weight, LIMIT), 10)
            fences.append(granted.fence)
            if turn == die_at:
                events.extend([(granted.at, weight), (granted.at, -weight)])
                child.kill()
                return
            checked = await child.ask("check", "it")
            events.extend([(granted.at, weight), (checked.at, -weight)])
            await child.release()

    with crew.children(4) as children:
        await opened(server, *children)
        await asyncio.gather(*(work(child, number, 3 * number + 2) for number, child in enumerate(children)))
    used = peak = 0
    for _, change in sorted(events):
        used += change
        peak = max(peak, used)
    assert used == 0
    assert 1 < peak <= LIMIT
    assert len(fences) == len(set(fences))
    lease: Lease = await sem.acquire(weight=LIMIT, timeout=2)
    assert lease.fence > max(fences)
    await lease.release()
