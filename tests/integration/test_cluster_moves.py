"""FAULTS D7 and D8: slots of a Redis Cluster move, shards fail over, or are out of reach."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sized
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from redis.asyncio import RedisCluster
from redis.asyncio.cluster import NodesManager

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncSemaphore,
    CommandRefused,
    Coordinator,
    LeaseLost,
    Transaction,
    Unreachable,
    transaction,
    wait_until,
)
from redis_sync_aio._clock import now
from redis_sync_aio._keys import Engine, lock_keys
from redis_sync_aio._link.call import Call
from redis_sync_aio._link.cluster import Cluster
from redis_sync_aio._link.links import Links

from ..support.body import FAST, waits
from ..support.clusters import SHARDS, Nodes, cluster


@asynccontextmanager
async def processes(nodes: Nodes, **options: object) -> AsyncIterator[tuple[Coordinator, Coordinator]]:
    """Two, with a client each."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(nodes.client()) for _ in range(2)]
        first, second = [await stack.enter_async_context(Coordinator(it, **options)) for it in clients]  # type: ignore[arg-type]
        yield first, second


@asynccontextmanager
async def moved_back(nodes: Nodes, name: str) -> AsyncIterator[None]:
    """Take the slot of ``name`` back to where it was."""
    try:
        yield
    finally:
        home = nodes.owner(name)
        await nodes.agree_on(nodes.slot(name))
        for node in nodes.primaries:
            if node is not home and nodes.slot(name) in await nodes.slots(node):
                await nodes.move(nodes.slot(name), node, home)


@pytest.mark.parametrize("way", ["link", "polling", "shared", "at once"])
async def test_p1_p2_p8_d7_contention_while_the_slot_moves(nodes: Nodes, way: str) -> None:
    """It goes round, and back: nobody is let in beside another, fences rise, nobody is left behind."""
    if way == "at once" and not await nodes.can_move_at_once():
        pytest.skip("this server moves slots key by key only")
    name = nodes.name_at(0, f"moving-{way}")
    slot, (a, b, c) = nodes.slot(name), nodes.primaries
    share = way == "shared"
    grants: list[int] = []
    inside, over = 0, False

    async def work(sync: Coordinator) -> None:
        nonlocal inside
        while not over:
            async with AsyncLock(sync, name, ttl=10, share=share).hold(timeout=15) as lease:
                inside += 1
                assert inside == 1
                grants.append(lease.fence)
                await asyncio.sleep(0)
                inside -= 1

    async with moved_back(nodes, name), processes(nodes, push="never" if way == "polling" else "auto") as both:
        tasks = [asyncio.create_task(work(sync)) for sync in both for _ in range(3)]
        for source, target in ((a, b), (b, c), (c, a)):
            await goes_on(grants)
            await (nodes.move_at_once if way == "at once" else nodes.move)(slot, source, target)
        await goes_on(grants)
        over = True
        await asyncio.gather(*tasks)
        assert grants == sorted(set(grants))
        assert not await AsyncLock(both[0], name).locked()


async def goes_on(grants: list[int], count: int = 5) -> None:
    """Return after so many grants more."""
    wanted = len(grants) + count
    await wait_until(lambda: enough(grants, wanted), FAST, timeout=15)


async def enough(found: Sized, wanted: int) -> bool:
    return len(found) >= wanted


@pytest.mark.parametrize("engine", ["lua", "watch"])
@pytest.mark.parametrize("kind", ["lock", "semaphore"])
async def test_p1_p3_a_grant_of_the_new_node_is_not_for_who_listens_at_the_old_one(
    nodes: Nodes, kind: str, engine: Engine
) -> None:
    """What is published at one node is heard at all. Who waits does not know yet that the slot has moved (P3: asks)."""
    name = nodes.name_at(0, f"broadcast-{kind}-{engine}")
    slot, (a, b, _) = nodes.slot(name), nodes.primaries

    def lock(sync: Coordinator) -> AsyncLock | AsyncSemaphore:
        if kind == "lock":
            return AsyncLock(sync, name, ttl=9, engine=engine)
        return AsyncSemaphore(sync, name, limit=1, ttl=9, engine=engine)

    async with moved_back(nodes, name), processes(nodes) as (holds, waiting):
        lease = await lock(holds).acquire()
        waiters = [asyncio.create_task(lock(waiting).acquire()) for _ in range(2)]
        await wait_until(waits(lock(holds), 2), FAST, timeout=5)
        await nodes.move(slot, a, b)
        await lease.release()  # by the node that has it now, which finds nobody of them listening
        other = await lock(holds).try_acquire()
        assert other is not None
        await wait_until(waits(lock(holds), 2), FAST, timeout=2)  # they were told to ask again
        assert not any(waiter.done() for waiter in waiters)
        await other.release()
        for waiter in waiters:
            await (await asyncio.wait_for(waiter, 1)).release()


async def test_p4_p5_a_slot_on_its_way(nodes: Nodes) -> None:
    """Its names are refused for now: what is asked waits, within its time, and what is cancelled leaves nothing."""
    name = nodes.name_at(1, "on-its-way")
    slot, (_, b, c) = nodes.slot(name), nodes.primaries
    async with moved_back(nodes, name), processes(nodes) as (sync, other):
        lock = AsyncLock(sync, name)
        lease = await lock.acquire()
        await nodes.begin_move(slot, b, c)
        with pytest.raises(CommandRefused, match="TRYAGAIN"):
            await AsyncLock(other, name).acquire(timeout=0.2)
        cancelled = asyncio.create_task(AsyncLock(other, name).acquire())
        releasing = asyncio.create_task(lease.release())
        assert isinstance(other._link, Links)
        link = other._link.link_of(lock_keys(name.encode()))
        await wait_until(lambda: enough(link._retries.delayed, 1), FAST, timeout=5)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert not releasing.done()
        await nodes.end_move(slot, b, c)
        await asyncio.wait_for(releasing, 5)

        async def nothing_left() -> bool:
            return not any([await nodes.say(c, "EXISTS", key) for key in (name, f"{{{name}}}:queue")])

        await wait_until(nothing_left, FAST, timeout=5)
        async with AsyncLock(other, name).hold(timeout=5):
            pass


async def test_p6_a_lease_is_renewed_where_its_slot_is(nodes: Nodes) -> None:
    name = nodes.name_at(2, "renewed")
    slot, (a, _, c) = nodes.slot(name), nodes.primaries
    async with moved_back(nodes, name), processes(nodes) as (sync, _), AsyncLock(sync, name, ttl=2) as lease:
        await nodes.move(slot, c, a)
        for _ in range(2):
            before = lease.deadline

            async def renewed(before: float = before) -> bool:
                return lease.deadline > before

            await wait_until(renewed, FAST, timeout=3)
        assert await nodes.say(a, "GET", name) == lease.token.encode()


async def test_transactions_follow_the_slot(nodes: Nodes) -> None:
    key = nodes.name_at(0, "followed")
    slot, (a, b, _) = nodes.slot(key), nodes.primaries

    async def add(tx: Transaction) -> int:
        count = int(await tx.get(key) or 0) + 1
        tx.multi()
        tx.set(key, count)
        return count

    async with moved_back(nodes, key), nodes.client() as client:
        assert (await transaction(client, add, key)).value == 1
        await nodes.move(slot, a, b)
        assert (await transaction(client, add, key)).value == 2
        async with AsyncLock(client, f"{{{key}}}:lock") as lease:
            await nodes.move(slot, b, a)
            async with lease.transaction() as tx:
                count = int(await tx.get(key) or 0)
                tx.multi()
                tx.set(key, count + 1)
        assert await nodes.say(a, "GET", key) == b"3"


@pytest.mark.parametrize("push", ["auto", "never"])
async def test_p6_d8_a_shard_stands_still(nodes: Nodes, push: str) -> None:
    """Its names are out of reach, within bounds; those of the others do not notice. Then it goes on."""
    options = {"push": push, "response_timeout": 0.5, "retry_for": 1.5}
    async with processes(nodes, **options) as (sync, _):
        lock, others = AsyncLock(sync, nodes.name_at(0, "still"), ttl=1), AsyncLock(sync, nodes.name_at(1, "still"))
        lost = asyncio.create_task(hold(lock))
        await wait_until(lock.locked, FAST, timeout=5)
        nodes.primaries[0].pause()
        try:
            begun = time.monotonic()
            with pytest.raises((Unreachable, AcquireTimeout)):
                await AsyncLock(sync, nodes.name_at(0, "else")).acquire(timeout=3)
            assert time.monotonic() - begun < 3.2
            async with others.hold(timeout=1):
                pass
            with pytest.raises(LeaseLost, match="could not be reached"):
                await lost
        finally:
            nodes.primaries[0].resume()
        await nodes.healthy()
        async with lock.hold(timeout=5):
            pass


async def hold(lock: AsyncLock) -> None:
    async with lock:
        await asyncio.Event().wait()


async def test_p1_p3_p8_d6_a_primary_dies() -> None:
    """Its replica takes over: what had reached it stays held, who waits waits on, transactions go on."""
    async with cluster(replicas=1) as nodes, processes(nodes) as (sync, other):
        name = nodes.name_at(0)
        lease = await AsyncLock(sync, name, ttl=10).acquire()
        waiter = asyncio.create_task(AsyncLock(other, name, ttl=10).acquire())
        await wait_until(waits(AsyncLock(other, name)), FAST, timeout=2)
        assert await nodes.say(nodes.primaries[0], "WAIT", 1, 1000) == 1
        nodes.primaries[0].kill()
        replica = await nodes.promoted(nodes.primaries[0])
        await asyncio.wait_for(lease.extend(10), 5)
        assert await nodes.say(replica, "GET", name) == lease.token.encode()
        await wait_until(waits(AsyncLock(other, name)), FAST, timeout=2)
        await lease.release()
        following = await asyncio.wait_for(waiter, 2)
        assert following.fence > lease.fence
        assert isinstance(sync.client, RedisCluster)
        assert len(Cluster.of(sync.client).shards) == SHARDS  # it is the same one, with another primary
        await following.release()

        async def write(tx: Transaction) -> None:
            await tx.watch()
            tx.multi()
            tx.set(name, "mine")

        await transaction(sync, write, name, deadline=5)
        assert await nodes.say(replica, "GET", name) == b"mine"


async def learn_of_moves(client: RedisCluster, answer: str = "") -> Cluster:
    """Let all that use ``client`` know where the slots are now; ``answer``: whom to ask first."""
    known = Cluster.of(client)
    known.moved(answer)
    await known.look()
    return known


@pytest.mark.parametrize("state", ["under way", "refused"])
async def test_p4_a_call_stays_behind_what_the_old_node_has_of_its_name(nodes: Nodes, state: str) -> None:
    """The slot moves while calls about it are at the old node, without an answer, or refused there for now."""
    name = nodes.name_at(0, f"behind-{state[0]}")
    slot, (a, b, c) = nodes.slot(name), nodes.primaries
    async with moved_back(nodes, name), nodes.client() as client, Coordinator(client) as sync:
        for at in (name, nodes.name_at(1)):  # both connections are there
            async with sync.lock(at):
                pass
        answers: list[bytes] = []

        def send(token: bytes) -> Call:
            def noted(call: Call) -> None:
                assert call.error is None
                answers.append(token)

            sent = now()
            return sync.engine.acquire(lock_keys(name.encode()), token, 9, b"", 0, (0,), sent, sent + 20, noted)

        if state == "under way":
            a.pause()
        else:
            await nodes.begin_move(slot, a, b)
        first = send(b"first")
        if state == "refused":
            await wait_until(lambda: refused(first), FAST, timeout=5)
        else:
            await asyncio.sleep(0)  # it is written in this turn of the loop
        for node in (b, c):
            await nodes.say(node, "CLUSTER", "SETSLOT", slot, "NODE", nodes.ids[b])
        known = await learn_of_moves(client, f"{b.host}:{b.port}")
        shard = known.shard_at(slot)
        assert shard.address is not None
        assert shard.address.port == b.port
        send(b"second")
        async with sync.lock(nodes.name_at(1)):  # the new node has answered what was sent behind
            assert answers == []
        if state == "under way":
            a.resume()
        else:
            await nodes.end_move(slot, a, b)
        send(b"third")
        await wait_until(lambda: enough(answers, 3), FAST, timeout=10)
        assert answers == [b"first", b"second", b"third"]
        assert isinstance(sync._link, Links)
        send(b"fourth")
        assert not sync._link._left
        await wait_until(lambda: enough(answers, 4), FAST, timeout=10)


async def refused(call: Call) -> bool:
    return call.trouble is not None


async def test_p9_a_grant_is_heard_once(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although what is published at one node is heard at all of them, and a process listens at each."""
    heard: list[bytes] = []
    pushed = Coordinator.link_pushed

    def noted(sync: Coordinator, payload: bytes) -> None:
        heard.append(payload)
        pushed(sync, payload)

    monkeypatch.setattr(Coordinator, "link_pushed", noted)
    async with processes(nodes) as (sync, other):
        for shard in range(SHARDS):
            async with other.lock(nodes.name_at(shard)):
                pass
        lock = AsyncLock(sync, nodes.name_at(0, "once"))
        lease = await lock.acquire()
        waiter = asyncio.create_task(AsyncLock(other, nodes.name_at(0, "once")).acquire())
        await wait_until(waits(lock), FAST, timeout=5)
        await lease.release()
        granted = await waiter
        for _ in range(2):
            for shard in range(SHARDS):  # behind what was heard there
                await other.lock(nodes.name_at(shard)).locked()
        assert len(heard) == 1
        await granted.release()


async def test_a_client_of_redis_py_that_begins_anew_is_not_closed(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes itself after some MOVED. That is not the end of our locks."""
    keys, held = [nodes.name_at(0, like) for like in ("anew", "again")], nodes.name_at(2)
    a, b, _ = nodes.primaries
    closed: list[str] = []
    close = NodesManager.aclose

    async def noted(manager: NodesManager, attr: str = "nodes_cache") -> None:
        closed.append(attr)
        await close(manager, attr)

    monkeypatch.setattr(NodesManager, "aclose", noted)
    async with (
        moved_back(nodes, keys[0]),
        moved_back(nodes, keys[1]),
        nodes.client(reinitialize_steps=2) as client,
        Coordinator(client) as sync,
        AsyncLock(sync, held) as lease,
    ):
        for key in keys:
            await client.set(key, "1")
            await nodes.move(nodes.slot(key), a, b)
        assert [await client.get(key) for key in keys] == [b"1", b"1"]
        assert closed
        lease.check()
        other = await AsyncLock(sync, nodes.name_at(1)).acquire(timeout=1)
        await other.release()
        assert sync.why_closed is None
        await client.initialize()  # else its end closes nothing of what it has opened since
