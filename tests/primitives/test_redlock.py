"""AsyncRedlock on five servers of their own: what it promises while all of them answer, and its arguments."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncRedlock,
    NotHeld,
    WouldDeadlock,
    wait_until,
)
from redis_sync_aio.testing.faults import Action

from ..support.inside import now
from ..support.views import holder_of
from ..support.wired import ACQUIRE, RELEASE, RENEW
from ..support.wired import quiet_loop as quiet_loop
from .redlocks import (
    NAME,
    SOMETIMES,
    Node,
    Process,
    nothing_left,
    process,
    redlock,
    waiters,
)
from .redlocks import five as five
from .redlocks import nodes as nodes
from .redlocks import one as one
from .redlocks import two as two

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
    for either in (lock, rival):
        await either.locked()  # connected
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
