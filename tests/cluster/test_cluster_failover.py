"""FAULTS D6 and D8: shards of a Redis Cluster fail over, or are out of reach."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest
from redis.asyncio import RedisCluster
from redis.asyncio.cluster import NodesManager

from redis_sync_aio import AcquireTimeout, AsyncLock, Coordinator, LeaseLost, Unreachable, transaction, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import Transaction

from ..support.body import FAST, waits
from ..support.clusters import SHARDS, Nodes, cluster, enough, learn_of_moves, moved_back, processes
from ..support.inside import Cluster, ClusterNodes, Connection, NodeAddress, Range, ShardLink, close_implicit

pytestmark = pytest.mark.timing


@pytest.mark.parametrize("push", ["auto", "never"])
async def test_p6_d8_a_shard_stands_still(nodes: Nodes, push: str) -> None:
    """Its names are out of reach, within bounds; those of the others do not notice. Then it goes on."""
    options = {"push": push, "response_timeout": 0.5, "retry_for": 1.5}
    async with processes(nodes, **options) as (sync, _):
        lock, others = AsyncLock(sync, nodes.name_at(0, "still"), ttl=3), AsyncLock(sync, nodes.name_at(1, "still"))
        lost = asyncio.create_task(hold(lock))
        await wait_until(lock.locked, FAST, timeout=15)
        nodes.primaries[0].pause()
        try:
            begun = time.monotonic()
            with pytest.raises((Unreachable, AcquireTimeout)):
                await AsyncLock(sync, nodes.name_at(0, "else")).acquire(timeout=3)
            assert time.monotonic() - begun < 10
            async with others.acquire(timeout=5):
                pass
            with pytest.raises(LeaseLost, match="could not be reached"):
                await lost
        finally:
            nodes.primaries[0].resume()
        await nodes.healthy()
        async with lock.acquire(timeout=20):
            pass


async def hold(lock: AsyncLock) -> None:
    async with lock:
        await asyncio.Event().wait()


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_p1_p3_p8_d6_a_primary_dies(how: str) -> None:
    """Its replica takes over: what had reached it stays held, waiters wait on, transactions go on."""
    async with cluster(replicas=1) as nodes, processes(nodes, response_timeout=0.5) as (sync, other):
        name = nodes.name_at(0)
        lease = await AsyncLock(sync, name, ttl=10).acquire()
        waiter = asyncio.create_task(AsyncLock(other, name, ttl=10).acquire())
        await wait_until(waits(AsyncLock(other, name)), FAST, timeout=15)
        assert await nodes.say(nodes.primaries[0], "WAIT", 1, 1000) == 1
        if how == "killed":
            nodes.primaries[0].kill()
        else:
            nodes.primaries[0].pause()
        replica = await nodes.promoted(nodes.primaries[0])
        for one in (sync, other):  # a client that connects to one that hangs begins again as soon as this is known
            assert isinstance(one.client, RedisCluster)
            await wait_until(partial(leads_to, Cluster.of(one.client), nodes.slot(name), replica), FAST, timeout=10)
        await asyncio.wait_for(lease.extend(10), 1)
        assert await nodes.say(replica, "GET", name) == lease.token.encode()
        await wait_until(waits(AsyncLock(other, name)), FAST, timeout=15)
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

        await transaction(sync, write, name, timeout=5)
        assert await nodes.say(replica, "GET", name) == b"mine"
        if how == "stopped":
            nodes.primaries[0].resume()


def test_a9_two_loops_in_turn() -> None:
    """In one thread: what one hears while it runs the other one knows when it is its turn again."""
    with asyncio.Runner() as first, asyncio.Runner() as second:
        running = cluster(replicas=1)
        nodes = second.run(running.__aenter__())
        client, name = nodes.client(), nodes.name_at(0)

        async def use() -> None:
            async with AsyncLock(client, name).acquire(timeout=9):
                pass

        async def fail_over() -> None:
            await nodes.say(nodes.replicas[0], "CLUSTER", "FAILOVER")
            await nodes.promoted(nodes.primaries[0])

        first.run(use())
        second.run(use())
        second.run(fail_over())
        second.run(use())
        first.run(use())
        first.run(closed(client))
        second.run(closed(client))
        second.run(client.aclose())
        second.run(running.__aexit__(None, None, None))


async def closed(client: RedisCluster) -> None:
    await close_implicit(client)


async def test_d8_what_a_node_does_not_answer_goes_where_its_slot_is(nodes: Nodes) -> None:
    """The slot had moved, the old node hangs, and the move is learnt of before that is noticed."""
    name = nodes.name_at(0, "stuck")
    slot, (a, b, _) = nodes.slot(name), nodes.primaries
    async with moved_back(nodes, name), nodes.client() as client, Coordinator(client, response_timeout=0.5) as sync:
        async with sync.lock(nodes.name_at(1)):  # the connection is there
            pass
        lease = await sync.lock(name).acquire()
        await nodes.move(slot, a, b)
        a.pause()
        try:
            releasing = asyncio.create_task(lease.release())
            await asyncio.sleep(0)  # it is written in this turn of the loop
            await learn_of_moves(client, f"{b.host}:{b.port}")
            await asyncio.wait_for(releasing, 9)
            assert await nodes.say(b, "GET", name) is None
        finally:
            a.resume()
            await nodes.healthy()


async def test_d6_a_replica_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The primary lives on as a replica, and answers MOVED: no connection stays there, or is opened there meanwhile."""
    async with cluster(replicas=1) as nodes, nodes.client() as client, Coordinator(client) as sync:
        name = nodes.name_at(0)
        async with sync.lock(name):
            pass
        await nodes.say(nodes.replicas[0], "CLUSTER", "FAILOVER")
        replica = await nodes.promoted(nodes.primaries[0])
        async with sync.lock(name).acquire(timeout=9):
            assert sync.connections == 2

        introduced, go_on = asyncio.Event(), asyncio.Event()
        check = ShardLink.check

        async def slowly(link: ShardLink, connection: Connection) -> None:
            introduced.set()
            await go_on.wait()
            await check(link, connection)

        monkeypatch.setattr(ShardLink, "check", slowly)
        async with Coordinator(client) as late:
            acquiring = asyncio.create_task(late.lock(name).acquire())
            await introduced.wait()  # at the replica
            await nodes.follows(nodes.primaries[0])  # else it is not let take over again
            # The others do not vote again so soon after the first time.
            await nodes.say(nodes.primaries[0], "CLUSTER", "FAILOVER", "TAKEOVER")
            await wait_until(lambda: is_replica(nodes, replica), FAST, timeout=20)
            known = await learn_of_moves(client)
            await wait_until(lambda: leads_to(known, nodes.slot(name), nodes.primaries[0]), FAST, timeout=10)
            go_on.set()
            await (await asyncio.wait_for(acquiring, 9)).release()


async def is_replica(nodes: Nodes, node: EmbeddedServer) -> bool:
    return (await nodes.say(node, "ROLE"))[0] in (b"slave", "slave")


async def leads_to(known: Cluster, slot: int, node: EmbeddedServer) -> bool:
    known.moved("")
    await known.refresh()
    address = known.shard_at(slot).address
    return address is not None and address.port == node.port


async def test_an_answer_that_is_older_than_another_counts_for_nothing(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nodes.client() as client:
        known = await learn_of_moves(client)
        slot = nodes.slot(nodes.name_at(0))
        ask, answers = ClusterNodes.ask, asyncio.Event()
        late: list[int] = []

        async def slowly(cluster: ClusterNodes, node: NodeAddress) -> list[Range]:
            found = await ask(cluster, node)
            if not late:  # the first one is the last to answer, and has it as it was
                late.append(1)
                await answers.wait()
                return [Range(0, 16383, [NodeAddress("127.0.0.1", 1)])]
            return found

        monkeypatch.setattr(ClusterNodes, "ask", slowly)
        known.moved("")
        first = asyncio.create_task(known.refresh())
        await wait_until(lambda: enough(late, 1), FAST, timeout=15)
        await known.refresh()
        answers.set()
        await first
        address = known.shard_at(slot).address
        assert address is not None
        assert address.port == nodes.primaries[0].port


async def test_a_client_of_redis_py_that_begins_again_is_not_closed(
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
        other = await AsyncLock(sync, nodes.name_at(1)).acquire(timeout=9)
        await other.release()
        assert sync.why_closed is None
        await client.initialize()  # else its end closes nothing of what it has opened since
