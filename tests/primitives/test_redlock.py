"""AsyncRedlock on five servers of their own, of which some are down, hung, or forget (E9)."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import pytest_asyncio
import redis as redis_py
from redis.asyncio import Redis

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncRedlock,
    Coordinator,
    LeaseLost,
    NotHeld,
    Unreachable,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import PermissionDenied
from redis_sync_aio.types import RedlockLease

from ..support.body import FAST, for_ever, lost_in
from ..support.inside import hub_of, lock_keys, now, quorum
from ..support.proxy import CUT_AFTER, CUT_BEFORE, CUT_INSIDE_REPLY, DUPLICATE, HOLD, SWALLOW_REPLY, Action, FaultProxy
from ..support.resp import Predicate
from ..support.timed import Timed, assert_within, timed
from ..support.views import holder_of
from ..support.wired import ACQUIRE, RELEASE, RENEW
from ..support.wired import quiet_loop as quiet_loop

pytestmark = pytest.mark.timing

NAME = "everywhere"
KEYS = lock_keys(NAME.encode())
WITHIN = 0.2


def at(server: EmbeddedServer) -> Any:
    """Return a client without asyncio."""
    return redis_py.Redis.from_url(server.url)


@pytest.fixture(scope="module")
def five() -> Iterator[list[EmbeddedServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(EmbeddedServer()) for _ in range(5)]


@pytest_asyncio.fixture
async def servers(five: list[EmbeddedServer]) -> list[EmbeddedServer]:
    """All of them up, and empty."""
    for server in five:
        try:
            server.resume()
        except RuntimeError:  # dead
            server.restart(keep_data=False)
        with at(server) as client:
            client.flushall()
    return five


@asynccontextmanager
async def process(servers: Sequence[EmbeddedServer], response_timeout: float = 0.5) -> AsyncIterator[list[Coordinator]]:
    """As far as the servers can see: a coordinator for each, with a client of its own."""
    async with AsyncExitStack() as stack:
        found = []
        for server in servers:
            client = Redis.from_url(server.url)
            stack.push_async_callback(client.aclose)
            coordinator = Coordinator(client, response_timeout=response_timeout, retry_for=2)
            found.append(await stack.enter_async_context(coordinator))
        yield found


@pytest_asyncio.fixture
async def one(servers: list[EmbeddedServer]) -> AsyncIterator[list[Coordinator]]:
    async with process(servers) as found:
        yield found


@pytest_asyncio.fixture
async def two(servers: list[EmbeddedServer]) -> AsyncIterator[list[Coordinator]]:
    async with process(servers) as found:
        yield found


def redlock(process: list[Coordinator], ttl: float = 10, within: float = 5, **options: Any) -> AsyncRedlock:
    return AsyncRedlock(process, NAME, ttl=ttl, answer_within=within, **options)


def hasty(process: list[Coordinator], ttl: float = 10, **options: Any) -> AsyncRedlock:
    """Return one for servers of which some do not answer."""
    return redlock(process, ttl, within=WITHIN, **options)


def left_on(servers: Sequence[EmbeddedServer]) -> list[bytes]:
    """Who or what holds it, or waits for it."""
    found = []
    for server in servers:
        with at(server) as client:
            found += [key for key in client.keys("*") if key != KEYS.fence]
    return found


@contextmanager
def paused(servers: Sequence[EmbeddedServer]) -> Iterator[None]:
    for server in servers:
        server.pause()
    try:
        yield
    finally:
        for server in servers:
            server.resume()


async def nothing_left(servers: Sequence[EmbeddedServer]) -> None:
    await wait_until(lambda: not left_on(servers), FAST, timeout=30)


async def waiters(process: list[Coordinator], number: int, server: int = 0) -> None:
    lock = AsyncLock(process[server], NAME)

    async def condition() -> bool:
        return (await lock.statistics()).waiting >= number

    await wait_until(condition, FAST, timeout=5)


# -- while all is well ------------------------------------------------------------------------------------


async def test_p1_p8_one_holder_and_rising_fences(one: list[Coordinator], two: list[Coordinator]) -> None:
    fences: list[int] = []
    inside = 0

    async def work(lock: AsyncRedlock) -> None:
        nonlocal inside
        for _ in range(10):
            async with lock as lease:
                inside += 1
                assert inside == 1
                fences.append(lease.fence)
                await asyncio.sleep(0)
                inside -= 1

    await asyncio.gather(*(work(redlock(process)) for process in (one, two) for _ in range(4)))
    assert len(fences) == 80
    assert all(before < after for before, after in pairwise(fences))


async def test_p2_first_come_first_served(one: list[Coordinator], two: list[Coordinator]) -> None:
    """In order over both processes, and nobody barges between a release and the next one in the queue."""
    holder = await redlock(one).acquire()
    order: list[int] = []

    async def wait(number: int) -> None:
        async with redlock((one, two)[number % 2]):
            order.append(number)
            assert await redlock(two).try_acquire() is None

    tasks = []
    for number in range(6):
        tasks.append(asyncio.create_task(wait(number)))
        await waiters(one, number + 1)
    await holder.release()
    assert await redlock(two).try_acquire() is None
    await asyncio.gather(*tasks)
    assert order == list(range(6))


async def test_p3_handed_over_by_a_push(one: list[Coordinator], two: list[Coordinator]) -> None:
    """In both directions a hand-over takes some round trips: it does not wait for a look of the waiter, after 1 s."""

    async def hand_over(holding: AsyncRedlock, waiting_for: AsyncRedlock) -> float:
        holder = await holding.acquire()
        waiting = asyncio.create_task(waiting_for.acquire())
        await waiters(one, 1)
        async with Timed() as took:
            await holder.release()
            lease = await waiting
        await lease.release()
        return took.waited

    async def pair(lock: AsyncRedlock) -> float:
        async with Timed() as took:
            await (await lock.acquire()).release()
        return took.waited

    for first, second in ((redlock(one), redlock(two)), (redlock(two), redlock(one))):
        pairs, took = [], []
        for _ in range(10):  # in turn, so that other load of the machine slows both down
            pairs += [await pair(first), await pair(second)]
            took.append(await hand_over(first, second))
        assert sorted(took)[5] < 10 * sorted(pairs)[10], "a look comes each third of its ttl, or after a second"


async def test_the_lease(one: list[Coordinator], servers: list[EmbeddedServer]) -> None:
    lock = redlock(one, ttl=5)
    assert not await lock.locked()
    lease = await lock.acquire()
    assert lease.held_on == 5
    assert len(lease.token.split()) == 5
    assert 4.5 < lease.remaining() < 5 * 0.99, "less than the ttl, by what clocks may be fast"
    found = await lock.statistics()
    assert await lock.locked()
    assert [holder_of(one) for one in found if one is not None] == lease.token.split()
    await lease.extend(20)
    assert 19 < lease.remaining() < 20
    await lock.release()
    await lease.release()
    await nothing_left(servers)
    with pytest.raises(NotHeld, match="neither does any other task"):
        await lock.release()


async def test_taken_away_by_force(one: list[Coordinator], two: list[Coordinator]) -> None:
    assert await redlock(two).force_release() == 0
    lease = await redlock(one, ttl=0.5).acquire()
    assert await redlock(two).force_release() == 5
    async with redlock(two):
        async with asyncio.timeout(2):
            await lease.wait_lost()
    with pytest.raises(LeaseLost, match="of 5 servers hold it, 3 have to"):
        await lease.release()


async def test_p6_it_is_renewed(one: list[Coordinator], two: list[Coordinator]) -> None:
    async with redlock(one, ttl=0.5) as lease:
        await asyncio.sleep(1.2)
        lease.check()
        assert lease.held_on == 5
        assert await redlock(two).try_acquire() is None


async def test_in_vain(one: list[Coordinator], two: list[Coordinator], servers: list[EmbeddedServer]) -> None:
    lease = await redlock(one).acquire()
    other = redlock(two)
    assert await other.try_acquire() is None
    with pytest.raises(AcquireTimeout, match="not free on 3 of 5 servers immediately"):
        await other.acquire(timeout=0)
    with pytest.raises(AcquireTimeout, match=r"not free on 3 of 5 servers within 0\.1 seconds"):
        await other.acquire(timeout=0.1)
    with pytest.raises(AcquireTimeout):
        async with other.acquire(timeout=0.05):
            pass
    await lease.release()
    await nothing_left(servers)


@pytest.mark.parametrize("number", [*range(1, 14), 20, 40])
@pytest.mark.parametrize("held", [False, True])
async def test_p5_cancelled_after_any_number_of_turns(
    one: list[Coordinator], two: list[Coordinator], servers: list[EmbeddedServer], number: int, held: bool
) -> None:
    """While it asks, raises fences, waits at the gate, or behind it."""
    await redlock(two).locked()
    lock = redlock(one)
    await lock.locked()
    others = await redlock(two).acquire() if held else None
    task, releasing = asyncio.create_task(lock.acquire()), None
    if others is not None:
        await waiters(two, 1)
        releasing = asyncio.create_task(others.release())
    for _ in range(number):
        await asyncio.sleep(0)
    task.cancel()
    try:
        lease = await task
    except asyncio.CancelledError:
        pass
    else:
        await lease.release()
    if releasing is not None:
        await releasing
    await nothing_left(servers)
    async with asyncio.timeout(2), redlock(two):
        pass


async def test_p11_a_redlock_of_another_hand(one: list[Coordinator], servers: list[EmbeddedServer]) -> None:
    """The textbook's, `SET key value NX PX ttl` on each: on a majority it keeps us out, on a minority not."""
    for server in servers[:3]:
        with at(server) as client:
            client.set(NAME, "theirs", nx=True, px=60_000)
    lock = redlock(one)
    assert await lock.try_acquire() is None
    assert await lock.locked()
    for server in servers[:3]:
        with at(server) as client:
            client.pexpire(NAME, 300)
    async with asyncio.timeout(10):
        lease = await lock.acquire()
    await lease.release()
    for server in servers[3:]:
        with at(server) as client:
            client.set(NAME, "theirs", nx=True, px=60_000)
    lease = await lock.acquire()
    assert lease.held_on == 3
    await lease.release()
    for server in servers[3:]:
        with at(server) as client:
            assert client.get(NAME) == b"theirs"


async def test_p2_try_acquire_does_not_pass_a_waiter(
    one: list[Coordinator], two: list[Coordinator], servers: list[EmbeddedServer]
) -> None:
    """As just after a release that only some servers have executed: the others are free, and the waiter gets them."""
    await redlock(one).acquire()
    waiting = asyncio.create_task(redlock(two).acquire())
    await waiters(one, 1)
    for server in servers[1:]:
        with at(server) as client:
            client.delete(NAME)
    assert await redlock(one).try_acquire() is None
    with pytest.raises(AcquireTimeout):
        await redlock(one).acquire(timeout=0.05)
    with at(servers[0]) as client:
        client.delete(NAME)
    await AsyncLock(one[0], NAME).locked()
    await AsyncLock(one[0], NAME).try_acquire()  # the next request settles whose turn it is
    async with asyncio.timeout(3):
        await (await waiting).release()


async def test_a_stale_lock_on_the_first_server(
    one: list[Coordinator], two: list[Coordinator], servers: list[EmbeddedServer]
) -> None:
    """It keeps nobody out: neither who comes, nor who stands behind it."""
    holder = await redlock(one).acquire()
    waiting = asyncio.create_task(redlock(two, ttl=0.9).acquire())
    await waiters(one, 1)
    with at(servers[0]) as client:
        client.set(NAME, "of one who crashed")
    await holder.release()
    async with asyncio.timeout(3):
        lease = await waiting
    assert lease.held_on == 4
    await lease.release()
    lease = await redlock(one).acquire()
    assert lease.held_on == 4
    await lease.release()


# -- faults -----------------------------------------------------------------------------------------------


FAULTS = {
    "cut before": CUT_BEFORE,
    "cut after": CUT_AFTER,
    "cut inside the reply": CUT_INSIDE_REPLY,
    "swallowed": SWALLOW_REPLY,
    "twice": DUPLICATE,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("command", [ACQUIRE, RENEW, RELEASE], ids=["acquire", "raise the fence", "release"])
async def test_p4_a_fault_at_one_server(servers: list[EmbeddedServer], command: Predicate, fault: Action) -> None:
    """At each command of which two servers have to answer: one of them loses the request, or its reply."""
    with at(servers[1]) as client:
        ahead = in_microseconds(9)
        client.set(KEYS.fence, b"%d whose" % ahead)  # so the fence has to be raised on the first one
    async with FaultProxy(servers[0].unix_socket) as proxy, process(servers[1:3]) as others:
        client = Redis.from_url(proxy.url)
        async with Coordinator(client, response_timeout=0.5, retry_for=5) as first:
            lock = AsyncRedlock([first, *others], NAME, ttl=20, answer_within=5)
            rule = proxy.on(command, fault)
            async with asyncio.timeout(20), lock as lease:
                lease.check()
                assert lease.fence > ahead
            await asyncio.wait_for(rule.fired.wait(), 5)
            await nothing_left(servers)
            async with asyncio.timeout(20), lock as second:
                assert second.fence > lease.fence
        await client.aclose()
    await nothing_left(servers)


async def test_e9_two_of_five_hang(
    one: list[Coordinator], two: list[Coordinator], servers: list[EmbeddedServer]
) -> None:
    """Also the first one, which is asked in turn: each step takes the time of one answer at most."""
    async with hasty(one):
        pass
    for number in (0, 3):
        servers[number].pause()
    try:
        lock = hasty(one)
        took, lease = await timed(lock.acquire, again=0)
        assert took < WITHIN + 0.05
        assert lease.held_on == 3
        assert await hasty(two).try_acquire() is None
        waiting = asyncio.create_task(hasty(two).acquire())
        await waiters(two, 1, server=1)
        released, _ = await timed(lease.release, again=0)
        assert released < WITHIN + 0.05
        async with asyncio.timeout(3):
            second = await waiting
        assert second.fence > lease.fence
        await second.release()
    finally:
        for number in (0, 3):
            servers[number].resume()
    await nothing_left(servers)


async def test_e9_servers_that_owe_an_answer_are_not_awaited(servers: list[EmbeddedServer]) -> None:
    """Two that hang, also the first, cost one `answer_within`, not one for each lease. They count again afterwards."""
    async with process(servers, response_timeout=30) as patient:
        lock = hasty(patient, ttl=20)
        await (await lock.acquire()).release()

        async def pair() -> float:
            async with Timed() as took, lock as lease:
                assert lease.held_on == 3
            return took.seconds

        async def all_hold_it() -> bool:
            async with lock as lease:
                return lease.held_on == 5

        with paused((servers[0], servers[3])):
            assert await pair() > WITHIN - 0.01
            await assert_within(WITHIN / 2, pair)
            holder = await lock.acquire()
            waiting = asyncio.create_task(hasty(patient, ttl=20).acquire())
            await waiters(patient, 1, server=1)
            took, _ = await timed(holder.release, again=0)
            assert took < WITHIN / 2
            async with asyncio.timeout(WITHIN * 5):
                await (await waiting).release()
        await wait_until(all_hold_it, FAST, timeout=5)
    await nothing_left(servers)


async def test_e9_two_of_five_are_gone(one: list[Coordinator], servers: list[EmbeddedServer]) -> None:
    lease = await hasty(one).acquire()
    for number in (0, 4):
        servers[number].kill()
    lease.check()
    await lease.release()
    lock = hasty(one)
    for _ in range(3):
        async with lock as lease:
            assert lease.held_on == 3
    await wait_until(
        lambda: one[0].connection_error is not None and one[4].connection_error is not None, FAST, timeout=3
    )

    async def acquired() -> float:
        async with Timed() as took:
            lease = await lock.acquire()
        await lease.release()
        return took.seconds

    await assert_within(0.05, acquired)  # nobody waits for what is known to be out of reach


async def test_e9_no_majority_answers(one: list[Coordinator], servers: list[EmbeddedServer]) -> None:
    lock = hasty(one)
    await lock.locked()
    for server in servers[:3]:
        server.kill()
    with pytest.raises(Unreachable, match=r"2 of 5 servers answered about 'everywhere' within 0\.2 seconds, 3 have to"):
        await lock.try_acquire()
    async with Timed() as took:
        with pytest.raises(Unreachable, match=r"No\. 1: .*; 2: .*; 3: "):
            await lock.acquire()
    assert 1.5 < took.seconds < 4, "retry_for"
    async with Timed() as took:
        with pytest.raises(Unreachable):
            await lock.acquire(timeout=0.5)
    assert took.waited < 1
    for look in (lock.locked, lock.force_release):
        with pytest.raises(Unreachable, match="2 of 5 servers answered about 'everywhere'"):
            await look()
    assert [one is None for one in await lock.statistics()] == [True, True, True, False, False]
    for server in servers[:3]:
        server.restart(keep_data=False)
    async with asyncio.timeout(5), lock:
        pass
    await nothing_left(servers)


async def test_a_waiter_at_a_server_that_dies_goes_to_another(
    one: list[Coordinator], two: list[Coordinator], servers: list[EmbeddedServer]
) -> None:
    holder = await hasty(one).acquire()
    waiting = asyncio.create_task(hasty(two, ttl=30).acquire())
    await waiters(one, 1)
    servers[0].kill()
    await waiters(one, 1, server=1)
    await holder.release()
    async with asyncio.timeout(3):
        await (await waiting).release()


async def test_a_waiter_at_a_server_that_hangs_goes_to_another(
    one: list[Coordinator], servers: list[EmbeddedServer]
) -> None:
    """It looks from time to time, as a lease is renewed: each third of a ttl."""
    async with process(servers, response_timeout=5) as patient:
        holder = await hasty(one).acquire()
        waiting = asyncio.create_task(hasty(patient, ttl=1.5).acquire())
        await waiters(one, 1)
        servers[0].pause()
        try:
            await waiters(one, 1, server=1)
            await holder.release()
            async with asyncio.timeout(3):
                await (await waiting).release()
        finally:
            servers[0].resume()
        await nothing_left(servers)


def take_from(servers: Sequence[EmbeddedServer]) -> None:
    """As another client would; they do not come back then."""
    for server in servers:
        with at(server) as client:
            client.set(NAME, "theirs", px=60_000)


async def test_p6_a_minority_is_no_loss_and_a_majority_is(
    one: list[Coordinator], servers: list[EmbeddedServer]
) -> None:
    lock = redlock(one, ttl=0.6)

    async def body(lease: RedlockLease) -> None:
        take_from(servers[:2])
        await wait_until(lambda: lease.held_on == 3, FAST, timeout=5)
        await asyncio.sleep(0.7)
        lease.check()
        take_from(servers[2:3])
        await for_ever()

    lease, error = await lost_in(lock.acquire(), body)
    assert "2 of 5 servers hold it, 3 have to" in str(error)
    assert error.reason == "taken"
    assert lease.lost
    assert lease.lost
    await wait_until(lambda: left_on(servers) == [KEYS.name] * 3, FAST, timeout=5)


async def test_p6_a_server_that_forgot_or_came_back_holds_it_again(
    one: list[Coordinator], servers: list[EmbeddedServer]
) -> None:
    """So that it outlives others that fail later, one after the other; and the fence is known there."""

    def held_again(server: EmbeddedServer) -> bool:
        with at(server) as client:
            return client.get(NAME) is not None and lease.held_on == 5

    async with redlock(one, ttl=3) as lease:
        for number, server in enumerate(servers):  # in the end none of those that granted it knows it
            if number < 3:
                server.restart(keep_data=False)
            else:
                with at(server) as client:
                    client.delete(NAME)
            await wait_until(partial(held_again, server), FAST, timeout=30)
        lease.check()
        for server in servers:
            with at(server) as client:
                assert int(client.get(KEYS.fence).split()[0]) >= lease.fence
    await nothing_left(servers)


async def test_a_server_that_failed_at_first_joins(one: list[Coordinator], servers: list[EmbeddedServer]) -> None:
    await hasty(one).locked()
    with paused(servers[3:]):
        lease = await hasty(one, ttl=0.9).acquire()
        assert lease.held_on == 3
    await wait_until(lambda: lease.held_on == 5, FAST, timeout=5)
    await lease.release()
    await nothing_left(servers)


async def test_p1_what_ends_before_it_is_had_is_not_had(
    one: list[Coordinator], servers: list[EmbeddedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given back, and nobody asks for it again in its name."""
    monkeypatch.setattr(quorum, "DRIFT", 1.0)  # as if all of the ttl had passed meanwhile
    assert await redlock(one, ttl=0.3).try_acquire() is None
    await nothing_left(servers)
    await asyncio.sleep(0.3)
    assert not any(hub_of(coordinator).resources for coordinator in one)
    assert not left_on(servers)


@pytest.mark.parametrize("options", [{"auto_renew": False}, {"max_hold": 1}], ids=str)
async def test_p6_what_is_to_end_is_not_prolonged_so(
    one: list[Coordinator], servers: list[EmbeddedServer], options: dict[str, Any]
) -> None:
    """A server that joins later would end it later."""
    lease = await redlock(one, ttl=1, **options).acquire()
    ends = now() + lease.remaining()
    for server in servers[:2]:
        with at(server) as client:
            client.delete(NAME)
    await asyncio.sleep(ends + 0.01 - now())
    assert lease.lost
    await lease.wait_lost()
    await nothing_left(servers)


async def test_a_redlock_whose_time_is_up_says_so(one: list[Coordinator]) -> None:
    """It ends a little before its members do, whose servers still have it: it is not gone from them."""
    lease = await redlock(one, ttl=0.5, auto_renew=False).acquire()
    await lease.wait_lost()
    with pytest.raises(
        LeaseLost, match=r"\d of 5 servers hold it, 3 have to; the last loss: its time was up"
    ) as caught:
        lease.check()
    assert (caught.value.reason, caught.value.time_is_up, caught.value.stalled) == ("expired", True, 0.0)


async def test_a_check_before_the_end_is_noticed_says_that_the_time_is_up(
    one: list[Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quorum, "DRIFT", 0.5)  # a check between its end and those of its members
    lease = await redlock(one, ttl=2, auto_renew=False).acquire()
    time.sleep(lease.remaining())  # noqa: ASYNC251
    with pytest.raises(LeaseLost, match="the last loss: its time was up") as caught:
        lease.check()
    assert (caught.value.reason, caught.value.time_is_up) == ("expired", True)


async def test_a_redlock_whose_servers_hang_says_that_they_are_out_of_reach(
    one: list[Coordinator], servers: list[EmbeddedServer]
) -> None:
    async def body(lease: RedlockLease) -> None:
        with paused(servers[:3]):
            await for_ever()

    _, error = await lost_in(hasty(one, ttl=1).acquire(), body)
    assert (error.reason, error.time_is_up) == ("unreachable", True)
    assert "servers hold it, 3 have to; the last loss: Redis could not be reached before the deadline" in str(error)


@pytest.mark.parametrize("number", range(8))
async def test_p5_released_while_a_server_is_asked_again(
    one: list[Coordinator], servers: list[EmbeddedServer], number: int
) -> None:
    lease = await redlock(one, ttl=0.3).acquire()
    group = lease._group
    with at(servers[0]) as client:
        client.delete(NAME)
    async with asyncio.timeout(3):
        while not isinstance(group._rejoining, asyncio.Task):
            await asyncio.sleep(0)
    for _ in range(number):
        await asyncio.sleep(0)
    await lease.release()
    await nothing_left(servers)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="there are no eager tasks")
async def test_p5_eager_tasks_that_ask_servers_again(one: list[Coordinator], servers: list[EmbeddedServer]) -> None:
    """It ends immediately when all coordinators that it asks are closed. Nothing is asked after the release."""
    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined, unused-ignore]
    lease = await redlock(one, ttl=0.6).acquire()
    for coordinator in one[3:]:
        await coordinator.aclose()
    await asyncio.sleep(0.5)  # they are asked twice
    await lease.release()
    for _ in range(20):
        assert not left_on(servers[:3])
        await asyncio.sleep(0.02)


async def test_p6_servers_that_are_gone(one: list[Coordinator], servers: list[EmbeddedServer]) -> None:
    """The body is cancelled when a majority may have ended, and not before."""
    due: list[float] = []

    async def body(lease: RedlockLease) -> None:
        for server in servers[2:]:
            server.kill()
        due.append(now() + lease.remaining())
        await for_ever()

    _, error = await lost_in(hasty(one, ttl=1).acquire(), body)
    assert "3 have to" in str(error)
    assert -0.01 < now() - due[0] < 1


def in_microseconds(seconds: float) -> int:
    """Return the fence of a server whose clock is so many seconds ahead."""
    return int((time.time() + seconds) * 1_000_000)


def put_ahead(server: EmbeddedServer, seconds: float) -> int:
    """Let it grant fences from there on, as one does whose clock is ahead; return the last one."""
    fence = in_microseconds(seconds)
    with at(server) as client:
        client.set(KEYS.fence, b"%d whose" % fence)
    return fence


async def test_p8_a_server_whose_clock_is_somewhat_ahead(
    one: list[Coordinator], two: list[Coordinator], servers: list[EmbeddedServer]
) -> None:
    """It grants a fence that is ahead, and is gone then: the others know of it."""
    ahead = put_ahead(servers[2], 9)
    lease = await hasty(one).acquire()
    assert lease.fence == ahead + 1
    await lease.release()
    servers[2].kill()
    servers[1].pause()
    try:
        async with hasty(two) as second:
            assert second.fence > lease.fence
    finally:
        servers[1].resume()


async def test_p8_a_server_whose_clock_is_an_hour_ahead(
    one: list[Coordinator], servers: list[EmbeddedServer], caplog: pytest.LogCaptureFixture
) -> None:
    """No lease has its fence, and no other server learns it; it holds the lock all the same. It is logged once."""
    ahead = put_ahead(servers[1], 3600)
    fences = []
    for _ in range(3):
        async with redlock(one) as lease:
            assert lease.held_on == 5
            fences.append(lease.fence)
        for server in (*servers[:1], *servers[2:]):
            with at(server) as client:
                assert int(client.get(KEYS.fence).split()[0]) < in_microseconds(60)
    assert fences == sorted(set(fences))
    assert fences[-1] < in_microseconds(60) < ahead
    (record,) = [record for record in caplog.records if getattr(record, "event", "") == "fence_ahead"]
    assert (record.__dict__["server"], record.__dict__["servers"]) == (2, 5)
    assert 3500 < record.__dict__["seconds"] <= 3600


async def test_p8_fences_rise_when_the_one_that_is_ahead_is_all_that_remembers(
    servers: list[EmbeddedServer],
) -> None:
    """Three servers. The first one, an hour ahead, and the second one answer; then the second one forgets, and the
    first one hangs. What the second and the third grant is more than what was granted before."""
    three = servers[:3]
    put_ahead(three[0], 3600)
    fences: list[int] = []
    async with process(three) as coordinators:
        lock = hasty(coordinators, ttl=1)
        three[2].kill()
        with pytest.raises(
            Unreachable, match=r"differ by more than 10 seconds \(no\. 1: \+3[56]\d\d s, no\. 2: \+0 s\)"
        ):
            fences += [(await lock.acquire(timeout=3)).fence]  # held no more once the second one has forgotten it
        three[1].kill()
        three[1].restart(keep_data=False)
        three[2].restart(keep_data=False)
        with paused(three[:1]):
            async with lock.acquire(timeout=10) as lease:
                fences.append(lease.fence)
    assert fences == sorted(set(fences))


async def test_p8_a_server_that_joins_knows_the_fence(one: list[Coordinator], servers: list[EmbeddedServer]) -> None:
    """Three of five grant a fence, and two join later. Of the next majority only one of these remembers the fence."""
    await hasty(one).locked()
    for server in servers[:3]:
        put_ahead(server, 9)  # else the clocks of the others would pass the fence by themselves
    with paused(servers[3:]):
        lease = await hasty(one, ttl=0.9).acquire()
        assert lease.held_on == 3
    await wait_until(lambda: lease.held_on == 5, FAST, timeout=5)
    await lease.release()
    await nothing_left(servers)
    for server in servers[:2]:
        with at(server) as client:
            client.flushall()
    servers[2].kill()
    servers[4].kill()
    async with hasty(one).acquire(timeout=5) as second:
        assert second.held_on == 3
        assert second.fence > lease.fence


async def test_p8_one_that_is_ahead_does_not_stand_for_one_that_was_not_told(servers: list[EmbeddedServer]) -> None:
    """All three hold it, but the fence could be raised on one of two only: nobody has it, all is given back."""
    put_ahead(servers[1], 3600)
    put_ahead(servers[2], 5)
    async with (
        FaultProxy(servers[0].unix_socket) as proxy,
        process(servers[1:3]) as others,
        Redis.from_url(proxy.url) as client,
        Coordinator(client, response_timeout=5) as first,
    ):
        lock = AsyncRedlock([first, *others], NAME, ttl=5, answer_within=WITHIN)
        rule = proxy.on(RENEW, HOLD)
        assert await lock.try_acquire() is None
        assert rule.fired.is_set()
        rule.cancel()
        rule.release.set()
        await nothing_left(servers[:3])
        async with lock as lease:
            assert lease.held_on == 3


async def test_a_grant_that_no_lease_uses_is_not_reported_as_lost(
    servers: list[EmbeddedServer], caplog: pytest.LogCaptureFixture
) -> None:
    """One server grants it and hangs before it knows the fence. What it granted ends unreleased, and no task had it."""
    put_ahead(servers[1], 5)
    async with (
        FaultProxy(servers[0].unix_socket) as proxy,
        process(servers[1:3]) as others,
        Redis.from_url(proxy.url) as client,
        Coordinator(client, response_timeout=5) as first,
    ):
        rule = proxy.on(RENEW, HOLD)
        lock = AsyncRedlock([first, *others], NAME, ttl=1, answer_within=WITHIN)
        acquiring = asyncio.create_task(lock.acquire())
        await asyncio.wait_for(rule.fired.wait(), 5)
        with paused(servers[:1]):
            lease = await acquiring
            assert lease.held_on == 2
            await asyncio.sleep(1.5)  # until the grant of the first server has certainly ended
            assert "was lost" not in caplog.text
            await lease.release()
        rule.cancel()
        rule.release.set()
    await nothing_left(servers[:3])


async def test_p8_two_contend_while_a_clock_is_an_hour_ahead(
    one: list[Coordinator], two: list[Coordinator], servers: list[EmbeddedServer]
) -> None:
    """Fences rise, and nobody is refused because others hold it on the servers that would agree."""
    put_ahead(servers[0], 3600)
    fences: list[int] = []

    async def work(process: list[Coordinator]) -> None:
        for _ in range(15):
            async with redlock(process).acquire(timeout=20) as lease:
                fences.append(lease.fence)

    await asyncio.gather(work(one), work(two))
    assert len(fences) == 30
    assert fences == sorted(set(fences))


async def test_p5_a_release_that_a_minority_does_not_answer(
    one: list[Coordinator], two: list[Coordinator], servers: list[EmbeddedServer]
) -> None:
    """It takes the time of an answer, and goes on."""
    lease = await hasty(one).acquire()
    with paused(servers[:2]):
        took, _ = await timed(lease.release, again=0)
        assert WITHIN - 0.01 < took < WITHIN + 0.1
        async with hasty(two) as second:
            assert second.held_on == 3
    await nothing_left(servers)


@pytest.mark.parametrize("number", [4, 5])
async def test_p5_a_release_that_no_majority_answers(
    one: list[Coordinator], servers: list[EmbeddedServer], number: int
) -> None:
    """It may be repeated. Of four servers two that do not answer are enough for that."""
    lease = await hasty(one[:number], ttl=20).acquire()
    with paused(servers[: number - 2]):
        with pytest.raises(Unreachable):
            await lease.release()
        assert not lease.lost
    await lease.release()
    await nothing_left(servers)


async def test_p4_a_release_that_is_repeated_after_one_of_them_forgot(
    one: list[Coordinator], servers: list[EmbeddedServer]
) -> None:
    """It was held when it was released first, so this is no loss."""
    lease = await hasty(one[:3], ttl=20).acquire()
    with paused(servers[:2]), pytest.raises(Unreachable):
        await lease.release()
    with at(servers[0]) as client:
        client.set(NAME, "theirs", px=60_000)
    await lease.release()


async def test_p6_a_release_of_what_was_lost_unnoticed(one: list[Coordinator], servers: list[EmbeddedServer]) -> None:
    lease = await redlock(one, ttl=20).acquire()
    for server in servers[1:4]:
        with at(server) as client:
            client.set(NAME, "theirs", px=60_000)
    with pytest.raises(LeaseLost, match="2 of 5 servers hold it"):
        await lease.release()
    assert lease.lost


async def test_p6_it_ends_before_a_clock_that_is_fast(one: list[Coordinator]) -> None:
    """By 1 % of the ttl and 2 ms; and that is noticed then, not when the first server ends it."""

    async def lost() -> float:
        before = now()
        lease = await redlock(one, ttl=2, auto_renew=False).acquire()
        remaining = lease.remaining()
        # Raising a fence renews by what is left, in whole milliseconds.
        assert 1.978 - 0.001 - (now() - before) < remaining < 1.978
        first = min(member.deadline for member in lease._group.members)
        await lease.wait_lost()
        return first - now()

    _, left = await timed(lost)
    assert 0 < left < 0.022


def left_at(server: EmbeddedServer) -> int:
    """Return for how many milliseconds the server still holds it."""
    with at(server) as client:
        left: int = client.pttl(NAME)
        return left


async def test_p6_an_extension_that_no_majority_answers(one: list[Coordinator], servers: list[EmbeddedServer]) -> None:
    lease = await hasty(one, ttl=5).acquire()
    with paused(servers[:2]):
        await lease.extend(20)
        assert lease.remaining() > 15
    before = [left_at(server) for server in servers[3:]]
    with paused(servers[:3]):
        with pytest.raises(Unreachable, match=r"2 of 5 servers extended .* within 0\.2 seconds, 3 have to"):
            await lease.extend(40)
        lease.check()
    for server, most in zip(servers[3:], before, strict=True):
        assert 0 < left_at(server) <= most, "what was extended without success is taken back"
    with at(servers[0]) as client:
        client.delete(NAME)
    with paused(servers[1:3]):  # one lost it: no reason to say that all is lost
        with pytest.raises(Unreachable, match="2 of 5 servers extended"):
            await lease.extend(40)
        lease.check()
    await lease.release()
    await nothing_left(servers)


@asynccontextmanager
async def refused_by(servers: Sequence[EmbeddedServer], number: int) -> AsyncIterator[list[Coordinator]]:
    """As `process`; the first ``number`` servers refuse all commands of a lock."""
    async with AsyncExitStack() as stack:
        found = []
        for index, server in enumerate(servers):
            with at(server) as admin:
                admin.acl_setuser("nobody", enabled=True, passwords=["+x"], commands=["+ping", "+hello", "+client"])
            url = server.url.replace("://", "://nobody:x@") if index < number else server.url
            client = Redis.from_url(url)
            stack.push_async_callback(client.aclose)
            found.append(await stack.enter_async_context(Coordinator(client, response_timeout=0.5, retry_for=2)))
        yield found


async def test_refused_by_a_majority(servers: list[EmbeddedServer]) -> None:
    """It is no use to ask again, as for one lock: `acquire` raises after one attempt, too."""
    async with refused_by(servers, 3) as process:
        lock = redlock(process)
        with pytest.raises(PermissionDenied):
            await lock.try_acquire()
        async with Timed() as took:
            for timeout in (None, 30, 0):
                with pytest.raises(PermissionDenied):
                    await lock.acquire(timeout=timeout)
        assert took.waited < 2, "retry_for"
    await nothing_left(servers)


async def test_refused_by_a_minority(servers: list[EmbeddedServer]) -> None:
    """Two refuse and three are silent: these may grant it later, so the majority is unreachable, not refusing."""
    async with refused_by(servers, 2) as process:
        await hasty(process).locked()
        with paused(servers[2:]):
            with pytest.raises(Unreachable, match=r"0 of 5 servers answered .*, 3 have to.* No\. 1: .*NOPERM"):
                await hasty(process).try_acquire()
            async with Timed() as took:
                with pytest.raises(Unreachable, match="0 of 5 servers answered"):
                    await hasty(process).acquire()
            assert took.seconds > 1.5, "retry_for: they may come back"
        async with hasty(process).acquire(timeout=20) as lease:
            assert lease.held_on == 3
    await nothing_left(servers)


async def test_e9_at_random(one: list[Coordinator], two: list[Coordinator], servers: list[EmbeddedServer]) -> None:
    """P1, P8: two of five hang again and again, in turn, for longer and for less than an answer may take."""
    fences: list[int] = []
    inside = 0
    over = False

    async def work(lock: AsyncRedlock) -> None:
        nonlocal inside
        while not over:
            with suppress(LeaseLost, Unreachable, AcquireTimeout):
                async with lock.acquire(timeout=3) as lease:
                    assert not inside
                    inside += 1
                    try:
                        fences.append(lease.fence)
                        await asyncio.sleep(random.random() / 100)
                    finally:
                        inside -= 1

    workers = [asyncio.create_task(work(hasty(process, ttl=2))) for process in (one, two) for _ in range(3)]
    paused: list[EmbeddedServer] = []
    for _ in range(12):
        paused = random.sample(servers, 2)
        for server in paused:
            server.pause()
        await asyncio.sleep(random.random() * 0.6)
        for server in paused:
            server.resume()
        await asyncio.sleep(random.random() * 0.1)
    over = True
    await asyncio.gather(*workers)
    assert len(fences) > 5
    assert all(before < after for before, after in pairwise(fences))
    await nothing_left(servers)


# -- inputs -----------------------------------------------------------------------------------------------


async def test_bad_input(redis: Redis, make_client: Any) -> None:
    """E1, E2: a clear error, and nothing was sent."""
    for clients, error, message in (
        (redis, TypeError, "one for each server"),
        ([], ValueError, "clients is empty"),
        ([redis, redis], ValueError, "one of them twice"),
        ([redis, "redis://"], TypeError, "takes a client, not an address"),
        (3, TypeError, "one for each server"),
    ):
        bad: Any = clients
        with pytest.raises(error, match=message):
            AsyncRedlock(bad, NAME)
    options: list[dict[str, Any]] = [{"ttl": None}, {"ttl": 0}, {"answer_within": 0}, {"answer_within": -1}]
    for option in [*options, {"ttl": "5"}, {"on_lost": "ignore"}, {"engine": "other"}]:
        with pytest.raises((TypeError, ValueError)):
            AsyncRedlock([redis], NAME, **option)
    lock = AsyncRedlock([redis, make_client()], NAME)
    for bad in (-1, "5", float("nan")):
        with pytest.raises((TypeError, ValueError)):
            await lock.acquire(timeout=bad)
        with pytest.raises((TypeError, ValueError)):
            lock.acquire(ttl=bad)
    assert repr(lock) == "<AsyncRedlock 'everywhere' on 2 servers>"


async def test_one_server_is_no_majority(redis: Redis) -> None:
    with pytest.raises(
        ValueError, match="one server, and its failure would be everybody's: give three, or use AsyncLock"
    ):
        AsyncRedlock([redis], NAME)


@pytest.mark.parametrize("as_another", [False, True])
async def test_several_clients_of_one_server(servers: list[EmbeddedServer], as_another: bool) -> None:
    """Refused at the first use, also where they use other databases of it; and nothing was acquired."""
    async with AsyncExitStack() as stack:
        clients = [Redis.from_url(servers[number].url) for number in (0, 1)]
        clients.append(Redis.from_url(servers[0].url, db=int(as_another)))
        for client in clients:
            await stack.enter_async_context(client)
        lock = AsyncRedlock(clients, NAME, answer_within=5)
        for use in (lock.acquire, lock.try_acquire, partial(lock.acquire, timeout=0), lock.__aenter__):
            with pytest.raises(ValueError, match=r"clients no\. 1 and 3 of 'everywhere' lead to one server"):
                await use()
        for client in clients:
            assert await client.get(NAME) is None


async def test_a_server_that_does_not_say_who_it_is(servers: list[EmbeddedServer]) -> None:
    """Without the right to ask, and with a server that is away, the lock works."""
    with at(servers[0]) as admin:
        admin.execute_command("ACL", "SETUSER", "mute", "on", "nopass", "~*", "&*", "+@all", "-info")
    servers[2].kill()
    async with AsyncExitStack() as stack:
        clients = [Redis.from_url(server.url) for server in servers[1:3]]
        clients += [Redis.from_url(servers[0].url, username="mute", password="x")]
        for client in clients:
            await stack.enter_async_context(client)
        lease = await AsyncRedlock(clients, NAME, answer_within=2).acquire(timeout=10)
        assert lease.held_on == 2
        await lease.release()
