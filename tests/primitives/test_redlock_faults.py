"""AsyncRedlock on five servers of which some are down, hang, forget or refuse (E9)."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any, cast

import pytest

from redis_sync_aio import (
    AcquireTimeout,
    AsyncRedlock,
    LeaseLost,
    Unreachable,
    wait_until,
)
from redis_sync_aio.errors import PermissionDenied
from redis_sync_aio.testing._resp import Predicate
from redis_sync_aio.testing.faults import Action
from redis_sync_aio.types import RedlockLease

from ..support.body import for_ever, lost_in
from ..support.inside import hub_of, now, quorum
from ..support.wired import ACQUIRE, RELEASE, RENEW
from ..support.wired import quiet_loop as quiet_loop
from .redlocks import (
    KEYS,
    NAME,
    SOMETIMES,
    WITHIN,
    Node,
    Process,
    hasty,
    left_on,
    nothing_left,
    paused,
    process,
    put_ahead,
    redlock,
    seconds_of,
    waiters,
)
from .redlocks import five as five
from .redlocks import nodes as nodes
from .redlocks import one as one
from .redlocks import two as two

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
    await nothing_left(nodes)  # a server that had no script yet is told of the release twice, the second time later
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
