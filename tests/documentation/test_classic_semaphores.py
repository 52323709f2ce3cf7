"""Semaphores as books and blogs show them: where each fails, and that ours does not (docs/classic-patterns.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar, copy_context
from pathlib import Path

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, AsyncSemaphore, Coordinator, LeaseLost, NotHeld, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import LimitMismatch
from redis_sync_aio.types import Push

from ..conftest import MakeClient
from ..support import textbook
from ..support.body import FAST, waits
from ..support.child import Child, Crew
from ..support.crews import crew as crew
from ..support.crews import plain as plain
from ..support.factories import Client
from ..support.faketime import FakeClock
from ..support.inside import permit_keys
from ..support.textbook import ClockSemaphore, Crash, FairSemaphore, LockedFairSemaphore, NamedSemaphore, crash

NAME = "semaphore"
SKEWS = (0.0, 10.0, -10.0)
"""Seconds by which the clocks of three clients are apart from the server's."""
TIMEOUT = 5.0

Clock = Callable[[], float]


def clock(skew: float) -> Clock:
    """A client's clock that is so many seconds ahead."""
    return lambda: 1_000_000_000.0 + skew


# -- counting semaphore by identities with a settable greatest size ------------------------------------------------


async def test_textbook_no_size_set(plain: Client) -> None:
    with pytest.raises(TypeError):  # int(None)
        await NamedSemaphore(plain, NAME).acquire("worker-1")


async def test_textbook_two_see_the_last_place(plain: Client) -> None:
    semaphore = NamedSemaphore(plain, NAME)
    await semaphore.set_max(3)
    for who in ("worker-1", "worker-2"):
        assert await semaphore.acquire(who)

    async def meanwhile() -> None:
        assert await semaphore.acquire("worker-3")

    assert await semaphore.acquire("worker-4", meanwhile)
    assert await semaphore.size() == 4


async def test_textbook_a_crashed_holder_keeps_its_place(plain: Client) -> None:
    semaphore = NamedSemaphore(plain, NAME)
    await semaphore.set_max(1)
    assert await semaphore.acquire("crashed")
    assert not await semaphore.acquire("next")
    assert await plain.ttl(NAME) == -1


async def test_p1_counting_semaphore_by_identities(redis: Redis, sync: Coordinator) -> None:
    """P1: no size: a clear error; 3 of 3 and no fourth; one leaves by name; sizes are told, and changed for all."""
    workers = AsyncSemaphore(sync, NAME, limit=None)
    with pytest.raises(
        LimitMismatch, match=r"knows no limit of it yet, and limit=None takes the server's: create"
    ) as e:
        await workers.acquire(identity="worker-1", timeout=0)
    assert (e.value.expected, e.value.found) == (None, None)
    with pytest.raises(LimitMismatch, match="knows no limit"):
        await workers.get_limit()
    await workers.resize(3)
    for who in ("worker-7", "worker-8", "worker-9"):
        await workers.acquire(identity=who, timeout=0)
    with pytest.raises(AcquireTimeout):
        await workers.acquire(identity="worker-10", timeout=0)
    seen = await workers.statistics()
    assert (seen.held, seen.limit, seen.available) == (3, 3, 0)
    assert [one.token for one in seen.holders] == ["worker-7", "worker-8", "worker-9"]
    with pytest.raises(NotHeld):
        await workers.release(identity="worker-10")
    await workers.release(identity="worker-8")
    await workers.acquire(identity="worker-10", timeout=0)
    waiting = asyncio.create_task(workers.acquire(identity="worker-11"))
    await wait_until(waits(workers), FAST, timeout=15)
    await workers.resize(4)
    await waiting
    assert await workers.get_limit() == (await workers.statistics()).held == 4
    await workers.resize(2)  # nobody is put out, and nobody gets in until two have left
    for who in ("worker-7", "worker-9"):
        await workers.release(identity=who)
        assert await workers.try_acquire() is None
    await workers.release(identity="worker-10")
    last = await workers.try_acquire()
    assert last is not None
    await workers.release(identity="worker-11")
    await last.release()
    assert (await workers.statistics()).held == 0


async def test_p1_few_of_many_that_see_a_free_place_get_in(sync: Coordinator, make_client: MakeClient) -> None:
    """P1: 40 ask at the same moment over two connections; 3 get in."""
    async with Coordinator(make_client()) as other:
        both = [AsyncSemaphore(one, NAME, limit=3) for one in (sync, other)]
        got = await asyncio.gather(*(both[number % 2].try_acquire(identity=f"worker-{number}") for number in range(40)))
        leases = [lease for lease in got if lease is not None]
        assert len(leases) == (await both[0].statistics()).held == 3
        for lease in leases:
            await lease.release()


# -- sorted sets, and the clients' clocks ---------------------------------------------------------------------------


async def test_textbook_the_earlier_clock_gets_in_next_to_the_holders(plain: Client) -> None:
    semaphore = ClockSemaphore(plain, NAME, 1, TIMEOUT)
    assert await semaphore.acquire("right", clock(0))
    assert not await semaphore.acquire("ahead", clock(1))
    assert await semaphore.acquire("behind", clock(-1))
    assert await semaphore.holders() == {"right", "behind"}


@pytest.mark.parametrize("kind", [ClockSemaphore, FairSemaphore, LockedFairSemaphore])
async def test_textbook_a_clock_that_is_ahead_expels_a_holder(plain: Client, kind: type[ClockSemaphore]) -> None:
    """Neither the counter nor the lock around it helps: timeouts are still told by the clients' clocks."""
    semaphore = kind(plain, NAME, 1, TIMEOUT)
    assert await semaphore.acquire("right", clock(0))
    assert not await semaphore.acquire("right, too", clock(0))
    assert await semaphore.acquire("ahead", clock(10)), "and `right` still works"


async def test_textbook_a_counter_is_not_the_order_of_arrival(plain: Client) -> None:
    """It counts first and enters second: who counted first enters before those who are in already."""
    semaphore = FairSemaphore(plain, NAME, 1, TIMEOUT)

    async def meanwhile() -> None:
        assert await semaphore.acquire("second", clock(0))

    assert await semaphore.acquire("first", clock(0), meanwhile), "both are in"
    assert await semaphore.holders() == {"first", "second"}


async def test_textbook_a_lock_around_it_has_an_end_of_its_own(plain: Client) -> None:
    """The lock ends while its holder counts (it was stopped for a moment), and all is as without it."""
    semaphore = LockedFairSemaphore(plain, NAME, 1, TIMEOUT)

    async def meanwhile() -> None:
        assert not await semaphore.acquire("second", clock(0)), "the lock keeps it out"
        await plain.pexpire(f"{NAME}:lock", 0)
        assert await semaphore.acquire("second", clock(0))

    assert await semaphore.acquire("first", clock(0), meanwhile), "both are in"


async def test_textbook_a_refresh_by_a_clock_that_is_behind_is_none(plain: Client) -> None:
    semaphore = FairSemaphore(plain, NAME, 1, TIMEOUT)
    assert await semaphore.acquire("behind", clock(-4))
    assert await semaphore.refresh("behind", clock(-4)), "it is told that all is well"
    assert await semaphore.acquire("right", clock(2)), "2 seconds later it is put out"


SKEW = ContextVar("SKEW", default=0.0)


@pytest.fixture
def wall_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the wall clock says depends on the task that looks."""
    seconds, nanoseconds = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: seconds() + SKEW.get())
    monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + int(SKEW.get() * 1e9))


@pytest.mark.usefixtures("wall_clocks")
@pytest.mark.parametrize("push", ["always", "never"])
async def test_p1_p2_clocks_that_are_10_seconds_apart(redis: Redis, make_client: MakeClient, push: Push) -> None:
    """P1, P2: never more than the limit, in the order of arrival; a refresh, which is a renewal, keeps what it says.

    Three clients, each with a clock of its own. The ttl is shorter than their clocks are apart.
    """
    watch, inside, may_leave = AsyncSemaphore(redis, NAME, limit=2), set[str](), asyncio.Event()

    async def work(semaphore: AsyncSemaphore, who: str) -> int:
        lease = await semaphore.acquire(identity=who)
        inside.add(who)
        assert len(inside) <= 2, inside
        await lease.extend(TIMEOUT)
        assert TIMEOUT - 4 < lease.remaining() <= TIMEOUT
        holders = {one.token: one.remaining or 0.0 for one in (await watch.statistics()).holders}
        assert TIMEOUT - 4 < holders[who] <= TIMEOUT
        await may_leave.wait()
        inside.remove(who)
        await lease.release()
        return lease.fence

    clients = []
    for skew in SKEWS:
        context = copy_context()
        context.run(SKEW.set, skew)
        clients.append((context, context.run(Coordinator, make_client(), push=push)))
    working: list[asyncio.Task[int]] = []
    for number in range(9):
        context, sync = clients[number % len(clients)]
        asking = work(AsyncSemaphore(sync, NAME, limit=2, ttl=TIMEOUT), str(number))
        working.append(asyncio.create_task(asking, context=context))
        await wait_until(arrived(watch, number + 1), FAST, timeout=15)
    assert (await watch.statistics()).held == 2
    may_leave.set()
    fences = await asyncio.gather(*working)
    assert fences == sorted(fences), "P2"
    for _, sync in clients:
        await sync.aclose()


def arrived(semaphore: AsyncSemaphore, count: int) -> Callable[[], Awaitable[bool]]:
    """Return a condition for `wait_until`: so many hold or wait."""

    async def condition() -> bool:
        seen = await semaphore.statistics()
        return seen.held + seen.waiting == count

    return condition


@pytest.mark.timing
async def test_p1_d14_processes_whose_clocks_are_10_seconds_apart(
    server: EmbeddedServer, redis: Redis, tmp_path: Path
) -> None:
    """P1, P2: as above with real processes, each under libfaketime."""
    children: list[Child] = []
    try:
        for number, skew in enumerate(SKEWS):
            (place := tmp_path / str(number)).mkdir()
            fake = FakeClock(place)
            fake.jump(skew)
            children.append(Child(fake.environment))
    except LookupError as error:
        pytest.skip(str(error))
    watch = AsyncSemaphore(redis, NAME, limit=2)
    try:
        for child in children:
            child.attach()
        await asyncio.gather(*(child.open(server.url) for child in children))
        for child, skew in zip(children, SKEWS, strict=True):
            assert abs((await child.ask("wall"))["wall"] - time.time() - skew) < 2
        grants = []
        for number, child in enumerate(children * 2):
            grants.append((child, child.permits(NAME, TIMEOUT, 1, 2, slot=str(number))))
            if number >= 2:
                await wait_until(waits(watch, number - 1), FAST, timeout=15)
            else:
                await grants[-1][1]
        fence = 0
        for number, (child, grant) in enumerate(grants):
            granted = await grant
            assert granted.fence > fence
            fence = granted.fence
            assert (await watch.statistics()).held <= 2
            await child.release(str(number))
    finally:
        for child in children:
            child.detach()
            child.end()


async def test_p6_a_refresh_is_a_renewal(redis: Client, sync: Coordinator) -> None:
    """P6: it says how long by the server's clock, and a permit that is over is not put back next to another one's."""
    semaphore = AsyncSemaphore(sync, NAME, limit=1, ttl=TIMEOUT, auto_renew=False)
    lease = await semaphore.acquire()
    await lease.extend(60)
    [seen] = (await semaphore.statistics()).holders
    assert 55 < (seen.remaining or 0) <= 60
    assert 55 < lease.remaining() <= 60
    await redis.zadd(permit_keys(NAME.encode(), "sem").all[0], {lease.token: 1})  # over since long ago
    other = await semaphore.acquire(timeout=0)
    with pytest.raises(LeaseLost):
        await lease.extend(60)
    [seen] = (await semaphore.statistics()).holders
    assert seen.token == other.token
    await other.release()


# -- INCRBY ---------------------------------------------------------------------------------------------------------


async def test_textbook_a_crash_after_incrby_leaks_forever(plain: Client) -> None:
    assert await textbook.take_some(plain, NAME, 2, limit=3)  # and dies while it works
    with pytest.raises(Crash):
        await textbook.take_some(plain, NAME, 2, 3, crash)  # dies before it has given back what was too much
    assert not await textbook.take_some(plain, NAME, 1, limit=3)
    assert (await plain.get(NAME), await plain.ttl(NAME)) == ("4", -1)


async def test_textbook_what_is_too_much_keeps_others_out_meanwhile(plain: Client) -> None:
    async def meanwhile() -> None:
        assert not await textbook.take_some(plain, NAME, 1, limit=3), "all 3 are free"

    assert not await textbook.take_some(plain, NAME, 4, 3, meanwhile)


@pytest.mark.timing
async def test_p6_a_crash_leaks_no_permits(server: EmbeddedServer, sync: Coordinator, crew: Crew) -> None:
    """P6: killed while it holds, and while it waits: all permits can be had when the lease is over."""
    semaphore = AsyncSemaphore(sync, NAME, limit=3)
    with crew.children(2) as children:
        await asyncio.gather(*(child.open(server.url, claim=0.3) for child in children))
        holder, waiter = children
        await holder.permits(NAME, 0.4, 2, 3)
        waiter.permits(NAME, 0.4, 2, 3)
        await wait_until(waits(semaphore), FAST, timeout=15)
        for child in children:
            child.kill()
        lease = await semaphore.acquire(weight=3, timeout=3)
        assert (await semaphore.statistics()).held == 3
        await lease.release()
    assert ((await semaphore.statistics()).held, (await semaphore.statistics()).waiting) == (0, 0)
