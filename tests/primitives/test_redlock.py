"""AsyncRedlock on five servers of their own, of which some are down, hung, or forget (E9).

Each server stands behind a proxy of the test: a server that hangs is a proxy that passes nothing.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any, cast

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncRedlock,
    Backoff,
    Coordinator,
    LeaseLost,
    NotHeld,
    Unreachable,
    WouldDeadlock,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import PermissionDenied
from redis_sync_aio.testing._resp import Predicate
from redis_sync_aio.testing.faults import Action, FaultProxy
from redis_sync_aio.types import RedlockLease

from ..support.body import for_ever, lost_in
from ..support.inside import hub_of, lock_keys, now, quorum
from ..support.views import holder_of
from ..support.virtual import EPOCH
from ..support.wired import ACQUIRE, RELEASE, RENEW
from ..support.wired import quiet_loop as quiet_loop

NAME = "everywhere"
KEYS = lock_keys(NAME.encode())
WITHIN = 0.2
SOMETIMES = Backoff(initial=0.005, cap=0.2)
"""For `wait_until`: each look asks five servers."""


class Node:
    """One of the servers, and the way to it."""

    def __init__(self, server: EmbeddedServer, proxy: FaultProxy, direct: Redis) -> None:
        self.server = server
        self.proxy = proxy
        self.direct: Any = direct

    async def kill(self) -> None:
        """Close all connections, and refuse new ones."""
        self.proxy.refuse = True
        await self.proxy.cut()

    async def start_empty(self) -> None:
        """Be there again, with no key and no script."""
        await self.direct.flushall()
        await self.direct.script_flush()
        self.proxy.refuse = False

    async def restart(self) -> None:
        await self.kill()
        await self.start_empty()

    async def fence(self) -> int:
        return int((await self.direct.get(KEYS.fence)).split()[0])


Process = list[Coordinator]
"""One process, as far as the servers can see: a coordinator for each server."""


@pytest.fixture(scope="session")
def five() -> Iterator[list[EmbeddedServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(EmbeddedServer()) for _ in range(5)]


@pytest_asyncio.fixture
async def nodes(five: list[EmbeddedServer]) -> AsyncIterator[list[Node]]:
    """All of them up, and empty."""
    async with AsyncExitStack() as stack:
        found = []
        for server in five:
            proxy = await stack.enter_async_context(FaultProxy(server))
            node = Node(server, proxy, await stack.enter_async_context(server.client()))
            await node.direct.flushall()
            found.append(node)
        yield found


@asynccontextmanager
async def process(nodes: Sequence[Node], response_timeout: float = 0.5, **client: Any) -> AsyncIterator[Process]:
    async with AsyncExitStack() as stack:
        found = []
        for node in nodes:
            redis = await stack.enter_async_context(node.proxy.client(**client))
            coordinator = Coordinator(redis, response_timeout=response_timeout, retry_for=2)
            found.append(await stack.enter_async_context(coordinator))
        yield found


@pytest_asyncio.fixture
async def one(nodes: list[Node]) -> AsyncIterator[Process]:
    async with process(nodes) as found:
        yield found


@pytest_asyncio.fixture
async def two(nodes: list[Node]) -> AsyncIterator[Process]:
    async with process(nodes) as found:
        yield found


def redlock(process: Process, ttl: float = 10, within: float = 5, **options: Any) -> AsyncRedlock:
    return AsyncRedlock(process, NAME, ttl=ttl, answer_within=within, **options)


def hasty(process: Process, ttl: float = 10, **options: Any) -> AsyncRedlock:
    """Return one for servers of which some do not answer."""
    return redlock(process, ttl, within=WITHIN, **options)


@contextmanager
def paused(nodes: Sequence[Node]) -> Iterator[None]:
    """Let nothing pass to or from them."""
    for node in nodes:
        node.proxy.black_hole = True
    try:
        yield
    finally:
        for node in nodes:
            node.proxy.black_hole = False


async def left_on(nodes: Sequence[Node]) -> list[bytes]:
    """Return the keys of holders and waiters."""
    return [key for node in nodes for key in await node.direct.keys("*") if key != KEYS.fence]


async def nothing_left(nodes: Sequence[Node]) -> None:
    async def empty() -> bool:
        return not await left_on(nodes)

    await wait_until(empty, SOMETIMES, timeout=30)


async def waiters(process: Process, number: int, server: int = 0) -> None:
    lock = AsyncLock(process[server], NAME)

    async def condition() -> bool:
        return (await lock.statistics()).waiting >= number

    await wait_until(condition, SOMETIMES, timeout=5)


async def seconds_of(work: Callable[[], Any]) -> float:
    began = now()
    await work()
    return now() - began


async def joined_by_two(one: Process, nodes: Sequence[Node]) -> RedlockLease:
    """Return a lease that three of five granted, and that the others joined when they answered again."""
    await hasty(one).locked()
    with paused(nodes[3:]):
        lease = await hasty(one).acquire()
        assert lease.held_on == 3
    await wait_until(lambda: lease.held_on == 5, SOMETIMES, timeout=5)
    return lease


# -- while all is well ------------------------------------------------------------------------------------


async def test_p2_first_come_first_served(one: Process, two: Process) -> None:
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


async def test_p3_handed_over_by_a_push(one: Process, two: Process) -> None:
    """In both directions, and not at the next look of the waiter, which comes after a second."""
    for here, there in ((one, two), (two, one)):
        holder = await redlock(here).acquire()
        waiting = asyncio.create_task(redlock(there).acquire())
        await waiters(one, 1)
        released = now()
        await holder.release()
        lease = await waiting
        assert now() - released < 0.1
        await lease.release()


async def test_p1_p3_p8_contended_hand_overs(one: Process, two: Process) -> None:
    """One task of two processes is inside, under a greater fence. None waits for a look, which comes after a second."""
    free_since, gaps, fences, inside = now(), list[float](), list[int](), 0

    async def work(lock: AsyncRedlock) -> None:
        nonlocal free_since, inside
        for turn in range(4):
            async with lock as lease:
                gaps.append(now() - free_since)
                inside += 1
                assert inside == 1
                fences.append(lease.fence)
                await asyncio.sleep(0.1 * (turn % 2))
                inside -= 1
                free_since = now()

    await asyncio.gather(*(work(redlock(process)) for process in (one, two) for _ in range(4)))
    assert len(gaps) == 32
    assert max(gaps) < 0.3
    assert all(before < after for before, after in pairwise(fences))


async def test_one_script_on_each_server_acquires_it(one: Process, nodes: list[Node]) -> None:
    """And one releases it: all servers grant the fence that they are asked for."""
    lock = redlock(one)
    async with lock:
        pass
    await nothing_left(nodes)
    rules = [node.proxy.on(command, Action.PASS) for node in nodes for command in (ACQUIRE, RELEASE, RENEW)]
    async with lock as lease:
        await wait_until(lambda: lease.held_on == 5, SOMETIMES, timeout=5)
        assert {await node.fence() for node in nodes} == {lease.fence}
    await nothing_left(nodes)
    assert [rule.hits for rule in rules] == [1, 1, 0] * 5


async def test_p8_servers_without_scripts_grant_one_fence_too(one: Process, nodes: list[Node]) -> None:
    """The decisions under WATCH take the fence that the request asks for, and grant no lower one afterwards."""
    lock = redlock(one, engine="watch")
    async with lock:
        pass
    await nothing_left(nodes)
    async with lock as lease:
        await wait_until(lambda: lease.held_on == 5, SOMETIMES, timeout=5)
        assert {await node.fence() for node in nodes} == {lease.fence}
    async with redlock(one) as by_script:
        assert by_script.fence > lease.fence


async def test_waits_are_shown_and_reported(one: Process, two: Process, caplog: pytest.LogCaptureFixture) -> None:
    holder = await redlock(one).acquire()
    waiting = asyncio.create_task(redlock(two).acquire(), name="the waiter")
    await asyncio.sleep(15)
    (record,) = [record for record in caplog.records if getattr(record, "event", "") == "waiting_long"]
    assert record.__dict__["lock"] == NAME
    (waiter,) = [waiter for name in two[0].statistics() for waiter in name.waiters]
    assert waiter.task == "the waiter"
    assert waiter.waited is not None
    assert waiter.waited > 14
    await holder.release()
    await (await waiting).release()


async def test_the_lease(one: Process, nodes: list[Node]) -> None:
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
    await nothing_left(nodes)
    with pytest.raises(NotHeld, match="neither does any other task"):
        await lock.release()


@pytest.mark.parametrize(("timeout", "words"), [(0, "immediately"), (3, r"within 3\.0 seconds")])
async def test_a_request_in_vain_says_where_it_was_refused(
    one: Process, two: Process, nodes: list[Node], timeout: float, words: str
) -> None:
    """It takes its time, and leaves nothing behind."""
    lease = await redlock(one).acquire()
    began = now()
    with pytest.raises(AcquireTimeout, match=f"not free on 3 of 5 servers {words}"):
        await redlock(two).acquire(timeout=timeout)
    assert timeout <= now() - began < timeout + 0.1
    with pytest.raises(AcquireTimeout):
        async with redlock(two).acquire(timeout=timeout):
            pytest.fail("entered")
    assert await redlock(two).try_acquire() is None
    await lease.release()
    await nothing_left(nodes)


async def test_p7_a_task_that_waits_for_itself(one: Process, two: Process, nodes: list[Node]) -> None:
    """Its body holds the lock by other clients: found once it has to wait."""
    async with redlock(one):
        with pytest.raises(WouldDeadlock, match="a body of this task holds 'everywhere'"):
            await redlock(two).acquire(timeout=60)
    await nothing_left(nodes)


@pytest.mark.parametrize("held", [False, True])
async def test_p5_cancelled_at_any_turn_of_the_loop(one: Process, two: Process, nodes: list[Node], held: bool) -> None:
    """While it asks, raises fences, waits at the gate, or behind it."""
    lock, rival = redlock(one), redlock(two)
    for process in (lock, rival):
        await process.locked()  # connected
    for turns in (*range(1, 28, 2), 40):
        others = await rival.acquire() if held else None
        task, releasing = asyncio.create_task(lock.acquire()), None
        if others is not None:
            await waiters(two, 1)
            releasing = asyncio.create_task(others.release())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await (await task).release()
        if releasing is not None:
            await releasing
        await nothing_left(nodes)
    async with asyncio.timeout(2), rival:
        pass


async def test_p11_a_redlock_of_another_hand(one: Process, nodes: list[Node]) -> None:
    """The textbook's, `SET key value NX PX ttl` on each: on a majority it keeps us out, on a minority not."""
    lock = redlock(one)
    for node in nodes[:3]:
        await node.direct.set(NAME, "theirs", nx=True, px=60_000)
    assert await lock.try_acquire() is None
    assert await lock.locked()
    for node in nodes[:3]:
        await node.direct.pexpire(NAME, 300)
    async with asyncio.timeout(10):
        await (await lock.acquire()).release()
    for node in nodes[3:]:
        await node.direct.set(NAME, "theirs", nx=True, px=60_000)
    async with lock as lease:
        assert lease.held_on == 3
    for node in nodes[3:]:
        assert await node.direct.get(NAME) == b"theirs"


async def test_p2_try_acquire_does_not_pass_a_waiter(one: Process, two: Process, nodes: list[Node]) -> None:
    """As just after a release that only some servers have executed: the others are free, and the waiter gets them."""
    await redlock(one).acquire()
    waiting = asyncio.create_task(redlock(two).acquire())
    await waiters(one, 1)
    for node in nodes[1:]:
        await node.direct.delete(NAME)
    assert await redlock(one).try_acquire() is None
    with pytest.raises(AcquireTimeout):
        await redlock(one).acquire(timeout=0.05)
    await nodes[0].direct.delete(NAME)
    await AsyncLock(one[0], NAME).locked()
    await AsyncLock(one[0], NAME).try_acquire()  # the next request settles whose turn it is
    async with asyncio.timeout(3):
        await (await waiting).release()


async def test_a_stale_lock_on_the_first_server(one: Process, two: Process, nodes: list[Node]) -> None:
    """It keeps nobody out: neither who comes, nor who stands behind it."""
    holder = await redlock(one).acquire()
    waiting = asyncio.create_task(redlock(two, ttl=3).acquire())
    await waiters(one, 1)
    await nodes[0].direct.set(NAME, "of one who crashed")
    await holder.release()
    async with asyncio.timeout(10), await waiting as lease:
        assert lease.held_on == 4
    async with redlock(one) as lease:
        assert lease.held_on == 4


# -- faults -----------------------------------------------------------------------------------------------


FAULTS = {
    "cut before": Action.CUT_BEFORE,
    "cut after": Action.CUT_AFTER,
    "cut inside the reply": Action.CUT_INSIDE_REPLY,
    "swallowed": Action.SWALLOW_REPLY,
    "twice": Action.DUPLICATE,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("command", [ACQUIRE, RENEW, RELEASE], ids=["acquire", "raise the fence", "release"])
async def test_p4_a_fault_at_one_server(nodes: list[Node], command: Predicate, fault: Action) -> None:
    """At each command of which two servers have to answer: one of them loses the request, or its reply."""
    ahead = await put_ahead(nodes[1], 9)  # so the fence has to be raised on the first one
    async with process(nodes[:1]) as first, process(nodes[1:3]) as others:
        lock = redlock([*first, *others], ttl=20)
        rule = nodes[0].proxy.on(command, fault)
        async with asyncio.timeout(20), lock as lease:
            lease.check()
            assert lease.fence > ahead
        await asyncio.wait_for(rule.fired.wait(), 5)
        await nothing_left(nodes)
        async with asyncio.timeout(20), lock as second:
            assert second.fence > lease.fence
    await nothing_left(nodes)


async def test_e9_two_of_five_hang(one: Process, two: Process, nodes: list[Node]) -> None:
    """Also the first one, which is asked in turn: each step takes the time of one answer at most."""
    async with hasty(one):
        pass
    with paused([nodes[0], nodes[3]]):
        began = now()
        lease = await hasty(one).acquire()
        assert now() - began < 0.02
        assert lease.held_on == 3
        assert await hasty(two).try_acquire() is None
        waiting = asyncio.create_task(hasty(two).acquire())
        await waiters(two, 1, server=1)
        assert await seconds_of(lease.release) < 0.01
        async with asyncio.timeout(3):
            second = await waiting
        assert second.fence > lease.fence
        await second.release()
    await nothing_left(nodes)


async def test_e9_servers_that_owe_an_answer_are_not_awaited(nodes: list[Node]) -> None:
    """Two that hang, also the first, cost nothing while the others are a majority. They count again afterwards."""
    async with process(nodes, response_timeout=30) as patient:
        lock = hasty(patient, ttl=20)

        async def pair() -> None:
            async with lock as lease:
                assert lease.held_on == 3

        async def all_hold_it() -> bool:
            async with lock as lease:
                return lease.held_on == 5

        assert await all_hold_it()
        with paused([nodes[0], nodes[3]]):
            for _ in range(3):
                assert await seconds_of(pair) < 0.01
            holder = await lock.acquire()
            waiting = asyncio.create_task(hasty(patient, ttl=20).acquire())
            await waiters(patient, 1, server=1)
            assert await seconds_of(holder.release) < WITHIN / 2
            async with asyncio.timeout(WITHIN * 5):
                await (await waiting).release()
        await wait_until(all_hold_it, SOMETIMES, timeout=5)
    await nothing_left(nodes)


async def test_e9_a_silent_minority_is_asked_once_a_second(nodes: list[Node]) -> None:
    """And nothing waits for it."""
    async with process(nodes, response_timeout=30) as patient:
        lock = hasty(patient)
        async with lock:
            pass
        await nothing_left(nodes)
        asked = nodes[4].proxy.on(ACQUIRE, Action.PASS)
        with paused(nodes[4:]):
            async with lock:
                await asyncio.sleep(WITHIN * 2)
            for _ in range(50):
                began = now()
                lease = await lock.acquire()
                await lease.release()
                assert now() - began < 0.01
                await asyncio.sleep(0.05)
        await nothing_left(nodes)
        assert 3 <= asked.hits <= 5


async def test_p5_released_before_a_server_has_answered(one: Process, two: Process, nodes: list[Node]) -> None:
    """Its request is undone by a release that is behind it. The release of the lease does not wait for that."""
    lock = hasty(one)
    async with lock:
        pass
    with paused(nodes[3:]):
        lease = await lock.acquire()
        assert await seconds_of(lease.release) < 0.01
        async with hasty(two):
            pass
    await nothing_left(nodes)


async def test_the_first_server_is_not_awaited_after_it_was_late_three_times(nodes: list[Node]) -> None:
    """Until then it is, half as long again as a majority took: it has the queue."""
    for node in nodes[1:]:
        node.proxy.latency = 0.01
    nodes[0].proxy.latency = 0.1
    async with process(nodes, response_timeout=30) as far:
        lock = redlock(far)
        await lock.locked()  # connected
        took = []
        for _ in range(8):
            began = now()
            lease = await lock.acquire()
            took.append(now() - began)
            await lease.release()
            await nothing_left(nodes)
    assert max(took[1:]) < 0.04
    assert min(took[1:3]) > max(took[3:])


async def test_e9_two_of_five_are_gone(one: Process, nodes: list[Node]) -> None:
    """The waits for them end as soon as it is known that they are away."""
    lease = await hasty(one).acquire()
    for node in (nodes[0], nodes[4]):
        await node.kill()
    lease.check()
    await lease.release()

    async def held_on_three() -> None:
        async with hasty(one) as lease:
            assert lease.held_on == 3

    for _ in range(3):
        await held_on_three()
    await wait_until(lambda: None not in (one[0].connection_error, one[4].connection_error), SOMETIMES, timeout=3)
    assert await seconds_of(held_on_three) < 0.05


async def test_e9_no_majority_answers(one: Process, nodes: list[Node]) -> None:
    lock = hasty(one)
    await lock.locked()
    for node in nodes[:3]:
        await node.kill()
    with pytest.raises(Unreachable, match=r"2 of 5 servers answered about 'everywhere' within 0\.2 seconds, 3 have to"):
        await lock.try_acquire()
    for timeout, least, most in ((None, 1.5, 4), (0.5, 0, 1)):  # by default for `retry_for`
        began = now()
        with pytest.raises(Unreachable, match=r"No\. 1: .*; 2: .*; 3: "):
            await lock.acquire(timeout=timeout)
        assert least <= now() - began < most
    for look in (lock.locked, lock.force_release):
        with pytest.raises(Unreachable, match="2 of 5 servers answered about 'everywhere'"):
            await look()
    assert [one is None for one in await lock.statistics()] == [True, True, True, False, False]
    for node in nodes[:3]:
        await node.start_empty()
    async with asyncio.timeout(5), lock:
        pass
    await nothing_left(nodes)


@pytest.mark.parametrize("dies", [True, False])
async def test_a_waiter_at_a_server_that_fails_goes_to_another(one: Process, nodes: list[Node], dies: bool) -> None:
    """It dies, or hangs: then the waiter looks from time to time, as a lease is renewed, each third of a ttl."""
    async with process(nodes, response_timeout=5) as patient:
        holder = await hasty(one).acquire()
        waiting = asyncio.create_task(hasty(patient, ttl=30 if dies else 1.5).acquire())
        await waiters(one, 1)
        if dies:
            await nodes[0].kill()
        with paused(nodes[:1]):
            await waiters(one, 1, server=1)
            await holder.release()
            async with asyncio.timeout(3):
                await (await waiting).release()
    await nothing_left(nodes[1:])


async def take_from(nodes: Sequence[Node]) -> None:
    """Take it as another client would; these servers do not come back then."""
    for node in nodes:
        await node.direct.set(NAME, "theirs", px=60_000)


async def test_a_second_outage_has_its_own_time(one: Process, two: Process, nodes: list[Node]) -> None:
    """A request survives two outages that are shorter than ``retry_for`` (2 s), and farther apart."""
    await hasty(one).locked()
    holder = await redlock(two, ttl=60).acquire()
    with paused(nodes):
        waiting = asyncio.create_task(hasty(one).acquire(timeout=60))
        await asyncio.sleep(1)
    await waiters(two, 1)
    await asyncio.sleep(8)
    with paused(nodes[1:]):
        releasing = asyncio.create_task(holder.release())
        await asyncio.sleep(1)
        assert not waiting.done()
    await releasing
    await (await waiting).release()
    await nothing_left(nodes)


async def test_p6_a_minority_is_no_loss_and_a_majority_is(one: Process, nodes: list[Node]) -> None:
    async def body(lease: RedlockLease) -> None:
        await take_from(nodes[:2])
        await wait_until(lambda: lease.held_on == 3, SOMETIMES, timeout=5)
        await asyncio.sleep(4)
        lease.check()
        await take_from(nodes[2:3])
        await for_ever()

    lease, error = await lost_in(redlock(one, ttl=3).acquire(), body)
    assert "2 of 5 servers hold it, 3 have to" in str(error)
    assert error.reason == "taken"
    assert lease.lost

    async def only_theirs() -> bool:
        return await left_on(nodes) == [KEYS.name] * 3

    await wait_until(only_theirs, SOMETIMES, timeout=5)


async def test_p6_a_server_that_forgot_or_came_back_holds_it_again(
    one: Process, two: Process, nodes: list[Node]
) -> None:
    """It is renewed. So it outlives others that fail later, one after the other; and the fence is known there."""
    async with redlock(one, ttl=3) as lease:

        async def held_again(node: Node) -> bool:
            return await node.direct.get(NAME) is not None and lease.held_on == 5

        for number, node in enumerate(nodes):  # in the end none of those that granted it knows it
            if number < 3:
                await node.restart()
            else:
                await node.direct.delete(NAME)
            await wait_until(partial(held_again, node), SOMETIMES, timeout=30)
        await asyncio.sleep(15)  # for several times the ttl
        lease.check()
        assert lease.held_on == 5
        assert await redlock(two).try_acquire() is None
        assert [await node.fence() >= lease.fence for node in nodes] == [True] * 5
    await nothing_left(nodes)


async def test_p1_what_ends_before_it_is_had_is_not_had(
    one: Process, nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given back, and nobody asks for it again in its name."""
    monkeypatch.setattr(quorum, "DRIFT", 1.0)  # as if all of the ttl had passed meanwhile
    assert await redlock(one, ttl=3).try_acquire() is None
    await nothing_left(nodes)
    await asyncio.sleep(5)
    assert not any(hub_of(coordinator).resources for coordinator in one)
    assert not await left_on(nodes)


@pytest.mark.parametrize("options", [{"auto_renew": False}, {"max_hold": 1}], ids=str)
async def test_p6_what_is_to_end_is_not_prolonged_so(one: Process, nodes: list[Node], options: dict[str, Any]) -> None:
    """A server that joins later would end it later."""
    lease = await redlock(one, ttl=1, **options).acquire()
    ends = now() + lease.remaining()
    for node in nodes[:2]:
        await node.direct.delete(NAME)
    await asyncio.sleep(ends + 0.01 - now())
    assert lease.lost
    await lease.wait_lost()
    await nothing_left(nodes)


async def test_a_check_before_the_end_is_noticed_says_that_the_time_is_up(
    one: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is blocked until then."""
    monkeypatch.setattr(quorum, "DRIFT", 0.5)  # a check between its end and those of its members
    lease = await redlock(one, ttl=2, auto_renew=False).acquire()
    cast(Any, asyncio.get_running_loop()).pass_time(lease.remaining())
    with pytest.raises(LeaseLost, match="the last loss: its time was up") as caught:
        lease.check()
    assert (caught.value.reason, caught.value.time_is_up) == ("expired", True)


@pytest.mark.parametrize("gone", [False, True])
async def test_p6_a_redlock_whose_servers_fail_is_lost_when_a_majority_may_have_ended(
    one: Process, nodes: list[Node], gone: bool
) -> None:
    """And not before."""
    due: list[float] = []

    async def body(lease: RedlockLease) -> None:
        due.append(now() + lease.remaining())
        if gone:
            for node in nodes[:3]:
                await node.kill()
        with paused(nodes[:3]):
            await for_ever()

    _, error = await lost_in(hasty(one, ttl=1).acquire(), body)
    assert (error.reason, error.time_is_up) == ("unreachable", True)
    assert "servers hold it, 3 have to; the last loss: Redis could not be reached before the deadline" in str(error)
    assert -0.001 < now() - due[0] < 1


async def test_p5_released_while_a_server_is_asked_again(one: Process, nodes: list[Node]) -> None:
    """At any turn of the loop after that."""
    for turns in range(0, 20, 2):
        lease = await redlock(one, ttl=3).acquire()
        await nodes[0].direct.delete(NAME)
        again = nodes[0].proxy.on(ACQUIRE, Action.PASS)
        async with asyncio.timeout(5):
            await nodes[0].proxy.until(lambda: again.hits > 0)  # noqa: B023
        for _ in range(turns):
            await asyncio.sleep(0)
        await lease.release()
        await nothing_left(nodes)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="there are no eager tasks")
async def test_p5_eager_tasks_that_ask_servers_again(one: Process, nodes: list[Node]) -> None:
    """It ends immediately when all coordinators that it asks are closed. Nothing is asked after the release."""
    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined, unused-ignore]
    lease = await redlock(one, ttl=6).acquire()
    for coordinator in one[3:]:
        await coordinator.aclose()
    await asyncio.sleep(5)  # they are asked twice
    await lease.release()
    for _ in range(20):
        assert not await left_on(nodes[:3])
        await asyncio.sleep(0.2)


# -- fences -----------------------------------------------------------------------------------------------


def in_microseconds(seconds: float) -> int:
    """Return the fence of a server whose clock is so many seconds ahead."""
    return int((EPOCH + now() + seconds) * 1_000_000)


async def put_ahead(node: Node, seconds: float) -> int:
    """Let it grant fences from there on, as one does whose clock is ahead; return the last one."""
    fence = in_microseconds(seconds)
    await node.direct.set(KEYS.fence, b"%d whose" % fence)
    return fence


async def test_p8_a_server_whose_clock_is_an_hour_ahead(
    one: Process, nodes: list[Node], caplog: pytest.LogCaptureFixture
) -> None:
    """No lease has its fence, and no other server learns it; it holds the lock all the same. It is logged once."""
    ahead = await put_ahead(nodes[1], 3600)
    fences = []
    for _ in range(3):
        async with redlock(one) as lease:
            assert lease.held_on == 5
            fences.append(lease.fence)
        for node in (*nodes[:1], *nodes[2:]):
            assert await node.fence() < in_microseconds(60)
    assert fences == sorted(set(fences))
    assert fences[-1] < in_microseconds(60) < ahead
    (record,) = [record for record in caplog.records if getattr(record, "event", "") == "fence_ahead"]
    assert (record.__dict__["server"], record.__dict__["servers"]) == (2, 5)
    assert 3500 < record.__dict__["seconds"] <= 3600


async def test_p8_fences_rise_when_the_one_that_is_ahead_is_all_that_remembers(nodes: list[Node]) -> None:
    """Three servers. The first one, an hour ahead, and the second one answer; then the second one forgets, and the
    first one hangs. What the second and the third grant is more than what was granted before."""
    three = nodes[:3]
    await put_ahead(three[0], 3600)
    fences: list[int] = []
    async with process(three) as coordinators:
        lock = hasty(coordinators, ttl=1)
        await three[2].kill()
        with pytest.raises(
            Unreachable, match=r"differ by more than 10 seconds \(no\. 1: \+3[56]\d\d s, no\. 2: \+0 s\)"
        ):
            fences += [(await lock.acquire(timeout=3)).fence]  # held no more once the second one has forgotten it
        await three[1].restart()
        await three[2].start_empty()
        with paused(three[:1]):
            async with lock.acquire(timeout=10) as lease:
                fences.append(lease.fence)
    assert fences == sorted(set(fences))


@pytest.mark.parametrize("forgets", ["flushed", "restarted"])
async def test_p8_servers_that_join_stand_in_for_those_that_forget(
    one: Process, nodes: list[Node], forgets: str
) -> None:
    """Three of five grant a fence, two join, and two of the first forget all. The next majority has one that knows."""
    for node in nodes[:3]:
        await put_ahead(node, 9)  # else the clocks of the others would pass the fence by themselves
    lease = await joined_by_two(one, nodes)
    assert [await node.fence() >= lease.fence for node in nodes] == [True] * 5
    await lease.release()
    await nothing_left(nodes)
    for node in nodes[:2]:
        await (node.restart() if forgets == "restarted" else node.direct.flushall())
    for node in (nodes[2], nodes[4]):
        await node.kill()
    async with hasty(one).acquire(timeout=5) as second:
        assert second.held_on == 3
        assert second.fence > lease.fence


async def test_p8_a_late_grant_with_a_lower_fence_does_not_join(one: Process, nodes: list[Node]) -> None:
    """That server does not know the fence. It is given back, and asked again until its clock is near the fence."""
    for node in nodes[:4]:
        await put_ahead(node, 15)
    await redlock(one).locked()
    with paused(nodes[4:]):
        lease = await redlock(one, ttl=6).acquire()
        assert lease.fence > in_microseconds(14)
    await asyncio.sleep(4)
    assert lease.held_on == 4
    assert await nodes[4].direct.get(NAME) is None
    await wait_until(lambda: lease.held_on == 5, SOMETIMES, timeout=30)
    assert await nodes[4].fence() >= lease.fence
    await lease.release()
    await nothing_left(nodes)


async def test_p8_one_that_is_ahead_does_not_stand_for_one_that_was_not_told(nodes: list[Node]) -> None:
    """All three hold it, but the fence could be raised on one of two only: nobody has it, all is given back."""
    await put_ahead(nodes[1], 3600)
    await put_ahead(nodes[2], 5)
    async with process(nodes[:3], response_timeout=5) as coordinators:
        lock = hasty(coordinators, ttl=5)
        rule = nodes[0].proxy.on(RENEW, Action.HOLD)
        assert await lock.try_acquire() is None
        assert rule.fired.is_set()
        rule.cancel()
        rule.release.set()
        await nothing_left(nodes)
        async with lock as lease:
            assert lease.held_on == 3


async def test_a_grant_that_no_lease_uses_is_not_reported_as_lost(
    nodes: list[Node], caplog: pytest.LogCaptureFixture
) -> None:
    """One server grants it and hangs before it knows the fence. What it granted ends unreleased, and no task had it."""
    await put_ahead(nodes[1], 5)
    async with process(nodes[:3], response_timeout=5) as coordinators:
        rule = nodes[0].proxy.on(RENEW, Action.HOLD)
        acquiring = asyncio.create_task(hasty(coordinators, ttl=1).acquire())
        await asyncio.wait_for(rule.fired.wait(), 5)
        with paused(nodes[:1]):
            lease = await acquiring
            assert lease.held_on == 2
            await asyncio.sleep(1.5)  # until the grant of the first server has certainly ended
            assert "was lost" not in caplog.text
            await lease.release()
        rule.cancel()
        rule.release.set()
    await nothing_left(nodes)


# -- release and extension without answers ----------------------------------------------------------------


@pytest.mark.parametrize("number", [4, 5])
async def test_p5_a_release_that_no_majority_answers(one: Process, nodes: list[Node], number: int) -> None:
    """It may be repeated. Of four servers two that do not answer are enough for that."""
    lease = await hasty(one[:number], ttl=20).acquire()
    with paused(nodes[: number - 2]):
        with pytest.raises(Unreachable):
            await lease.release()
        assert not lease.lost
    await lease.release()
    await nothing_left(nodes)


async def test_p4_a_release_that_is_repeated_after_one_of_them_forgot(one: Process, nodes: list[Node]) -> None:
    """It was held when it was released first, so this is no loss."""
    lease = await hasty(one[:3], ttl=20).acquire()
    with paused(nodes[:2]), pytest.raises(Unreachable):
        await lease.release()
    await take_from(nodes[:1])
    await lease.release()


async def test_p6_a_release_of_what_was_lost_unnoticed(one: Process, nodes: list[Node]) -> None:
    lease = await redlock(one, ttl=20).acquire()
    await take_from(nodes[1:4])
    with pytest.raises(LeaseLost, match="2 of 5 servers hold it"):
        await lease.release()
    assert lease.lost


async def test_p6_it_ends_before_a_clock_that_is_fast(one: Process) -> None:
    """By 1 % of the ttl and 2 ms; and that is noticed then, not when the first server ends it."""
    before = now()
    lease = await redlock(one, ttl=2, auto_renew=False).acquire()
    # Raising a fence renews by what is left, in whole milliseconds.
    assert 1.978 - 0.001 - (now() - before) < lease.remaining() < 1.978
    await lease.wait_lost()
    assert 1.977 < now() - before < 1.99


async def test_p6_an_extension_that_no_majority_answers(one: Process, nodes: list[Node]) -> None:
    lease = await hasty(one, ttl=5).acquire()
    with paused(nodes[:2]):
        await lease.extend(20)
        assert lease.remaining() > 15
    before = [await node.direct.pttl(NAME) for node in nodes[3:]]
    with paused(nodes[:3]):
        with pytest.raises(Unreachable, match=r"2 of 5 servers extended .* within 0\.2 seconds, 3 have to"):
            await lease.extend(40)
        lease.check()
    for node, most in zip(nodes[3:], before, strict=True):
        assert 0 < await node.direct.pttl(NAME) < most + 1000, "what was extended without success is taken back"
    await nodes[0].direct.delete(NAME)
    with paused(nodes[1:3]):  # one lost it: no reason to say that all is lost
        with pytest.raises(Unreachable, match="2 of 5 servers extended"):
            await lease.extend(40)
        lease.check()
    await lease.release()
    await nothing_left(nodes)


@asynccontextmanager
async def refused_by(nodes: Sequence[Node], number: int) -> AsyncIterator[Process]:
    """As `process`; the first ``number`` servers refuse all commands of a lock."""
    for node in nodes[:number]:
        await node.direct.acl_setuser("nobody", enabled=True, passwords=["+x"], commands=["+ping", "+hello", "+client"])
    async with process(nodes[:number], username="nobody", password="x") as refusing, process(nodes[number:]) as others:
        yield [*refusing, *others]


async def test_refused_by_a_majority(nodes: list[Node]) -> None:
    """It is no use to ask again, as for one lock: `acquire` raises after one attempt, too."""
    async with refused_by(nodes, 3) as process:
        lock = redlock(process)
        began = now()
        with pytest.raises(PermissionDenied):
            await lock.try_acquire()
        for timeout in (None, 30, 0):
            with pytest.raises(PermissionDenied):
                await lock.acquire(timeout=timeout)
        assert now() - began < 1, "retry_for is two"
    await nothing_left(nodes)


async def test_refused_by_a_minority(nodes: list[Node]) -> None:
    """Two refuse and three are silent: these may grant it later, so the majority is unreachable, not refusing."""
    async with refused_by(nodes, 2) as process:
        await hasty(process).locked()
        with paused(nodes[2:]):
            with pytest.raises(Unreachable, match=r"0 of 5 servers answered .*, 3 have to.* No\. 1: .*NOPERM"):
                await hasty(process).try_acquire()
            began = now()
            with pytest.raises(Unreachable, match="0 of 5 servers answered"):
                await hasty(process).acquire()
            assert now() - began > 1.5, "retry_for: they may come back"
        async with hasty(process).acquire(timeout=20) as lease:
            assert lease.held_on == 3
    await nothing_left(nodes)


async def test_e9_at_random(one: Process, two: Process, nodes: list[Node]) -> None:
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
                        await asyncio.sleep(random.random() / 10)
                    finally:
                        inside -= 1

    workers = [asyncio.create_task(work(hasty(process, ttl=2))) for process in (one, two) for _ in range(3)]
    for _ in range(8):
        with paused(random.sample(nodes, 2)):
            await asyncio.sleep(random.random() * 0.6)
        await asyncio.sleep(random.random() * 0.1)
    over = True
    await asyncio.gather(*workers)
    assert len(fences) > 5
    assert all(before < after for before, after in pairwise(fences))
    await nothing_left(nodes)


# -- inputs -----------------------------------------------------------------------------------------------


async def test_bad_input(redis: Redis, make_client: Any) -> None:
    """E1, E2: a clear error, and nothing was sent."""
    for clients, error, message in (
        (redis, TypeError, "one for each server"),
        ([], ValueError, "clients is empty"),
        ([redis], ValueError, "one server, and its failure would be that of all: give three, or use AsyncLock"),
        ([redis, redis], ValueError, "one of them twice"),
        ([redis, "redis://"], TypeError, "takes a client, not an address"),
        (3, TypeError, "one for each server"),
    ):
        bad: Any = clients
        with pytest.raises(error, match=message):
            AsyncRedlock(bad, NAME)
    lock = AsyncRedlock([redis, make_client()], NAME)
    options: list[dict[str, Any]] = [{"ttl": None}, {"ttl": 0}, {"answer_within": 0}, {"answer_within": -1}]
    for option in [*options, {"ttl": "5"}, {"on_lost": "ignore"}, {"engine": "other"}]:
        with pytest.raises((TypeError, ValueError)):
            AsyncRedlock([redis, make_client()], NAME, **option)
    for bad in (-1, "5", float("nan")):
        with pytest.raises((TypeError, ValueError)):
            await lock.acquire(timeout=bad)
        with pytest.raises((TypeError, ValueError)):
            lock.acquire(ttl=bad)
    assert repr(lock) == "<AsyncRedlock 'everywhere' on 2 servers>"


@pytest.mark.parametrize("db", [0, 1])
async def test_several_clients_of_one_server(nodes: list[Node], db: int) -> None:
    """Refused at the first use, also where they use other databases of it; and nothing was acquired."""
    async with nodes[0].server.client(db=db) as again:
        clients = [nodes[0].direct, nodes[1].direct, again]
        lock = AsyncRedlock(clients, NAME, answer_within=5)
        for use in (lock.acquire, lock.try_acquire, partial(lock.acquire, timeout=0), lock.__aenter__):
            with pytest.raises(ValueError, match=r"clients no\. 1 and 3 of 'everywhere' lead to one server"):
                await use()

        async def nothing_there() -> bool:
            return not any([await client.get(NAME) for client in clients])

        await wait_until(nothing_there, SOMETIMES, timeout=5)


async def test_a_server_that_does_not_say_who_it_is(nodes: list[Node]) -> None:
    """Without the right to ask, and with a server that is away, the lock works."""
    await nodes[0].direct.execute_command("ACL", "SETUSER", "mute", "on", "nopass", "~*", "&*", "+@all", "-info")
    await nodes[2].kill()
    async with (
        process(nodes[1:3]) as others,
        process(nodes[:1], username="mute", password="x") as mute,
        redlock([*others, *mute], within=2).acquire(timeout=10) as lease,
    ):
        assert lease.held_on == 2
