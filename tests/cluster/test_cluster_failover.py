"""FAULTS D6, D8, F12: primaries fail over, shards are unreachable, nodes are replaced; clusters and Sentinel groups."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest
from redis.asyncio import RedisCluster
from redis.asyncio.cluster import ClusterNode, NodesManager

from redis_sync_aio import AsyncLock, Backoff, Coordinator, Lease, LeaseLost, Unreachable, transaction, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.servers import SLOTS, SentinelTopology, link_is_up
from redis_sync_aio.types import Transaction

from ..support.body import FAST, waits
from ..support.callbacks import callbacks
from ..support.inside import (
    Cluster,
    ClusterNodes,
    Connection,
    NodeAddress,
    Range,
    Shard,
    ShardLink,
    close_implicit,
    now,
)
from ..support.topologies import SHARDS, Nodes, enough, learn_of_moves, moved_back, processes

TTL = 60.0
"""Longer than any failover takes here."""
NAMED = 1.0
"""Seconds from when a sentinel names the new primary to the next grant, as docs/guarantees.md says (D6)."""
SELDOM = Backoff(initial=0.2)
"""For conditions that look at every object."""
LONGEST = 0.06
"""Seconds of processor time in one callback; to read the answer of 16,384 ranges took 0.16."""


async def leads_to(known: Cluster, slot: int, node: EmbeddedServer) -> bool:
    known.moved("")
    await known.refresh()
    address = known.shard_at(slot).address
    return address is not None and address.port == node.port


@pytest.mark.real
async def test_p6_d8_a_shard_hangs(nodes: Nodes) -> None:
    """Its names are unreachable, and its leases end; those of others are served meanwhile. Then all is as before."""
    options = {"response_timeout": 0.5, "retry_for": 8}
    async with processes(nodes, **options) as (sync, _), processes(nodes, push="never", **options) as (polling, _):
        ready, paused = asyncio.Semaphore(0), asyncio.Event()

        async def use(source: Coordinator, like: str) -> AsyncLock:
            lock, elsewhere = source.lock(nodes.name_at(0, like), ttl=6), source.lock(nodes.name_at(1, like))
            lease = await lock.acquire()
            ready.release()
            await paused.wait()
            asking = asyncio.create_task(source.lock(nodes.name_at(0, f"not {like}")).acquire())
            async with elsewhere:
                assert not asking.done()
            with pytest.raises(LeaseLost, match="could not be reached"):
                async with lease:
                    await asyncio.Event().wait()
            with pytest.raises(Unreachable):
                await asking
            return lock

        both = [asyncio.create_task(use(*case)) for case in ((sync, "pushed"), (polling, "polled"))]
        for _ in both:
            await ready.acquire()
        nodes.primaries[0].pause()
        paused.set()
        try:
            locks = await asyncio.gather(*both)
        finally:
            nodes.primaries[0].resume()
        await nodes.healthy()
        for lock in locks:
            async with lock.acquire(timeout=60):
                pass


@pytest.mark.real
@pytest.mark.parametrize("how", ["killed", pytest.param("stopped", marks=pytest.mark.ci)])
async def test_p1_p3_p8_d6_a_primary_dies(how: str) -> None:
    """Its replica takes over: what had reached it stays held, waiters wait on, transactions continue."""
    async with Nodes(replicas=1) as nodes, processes(nodes, response_timeout=0.5) as (sync, other):
        name = nodes.name_at(0)
        lease = await AsyncLock(sync, name, ttl=TTL).acquire()
        waiter = asyncio.create_task(AsyncLock(other, name, ttl=TTL).acquire())
        await wait_until(waits(AsyncLock(other, name)), FAST, timeout=15)
        assert await nodes.call(nodes.primaries[0], "WAIT", 1, 1000) == 1
        if how == "killed":
            nodes.primaries[0].kill()
        else:
            nodes.primaries[0].pause()
        replica = await nodes.promoted(nodes.primaries[0])
        for one in (sync, other):  # a client that connects to one that hangs begins again as soon as this is known
            assert isinstance(one.client, RedisCluster)
            await wait_until(partial(leads_to, Cluster.of(one.client), nodes.slot(name), replica), FAST, timeout=30)
        await asyncio.wait_for(lease.extend(TTL), 15)
        assert await nodes.call(replica, "GET", name) == lease.token.encode()
        await wait_until(waits(AsyncLock(other, name)), FAST, timeout=15)
        await lease.release()
        following = await asyncio.wait_for(waiter, 15)
        assert following.fence > lease.fence
        assert isinstance(sync.client, RedisCluster)
        assert len(Cluster.of(sync.client).shards) == SHARDS  # it is the same one, with another primary
        await following.release()

        async def write(tx: Transaction) -> None:
            await tx.watch()
            tx.multi()
            tx.set(name, "mine")

        await transaction(sync, write, name, timeout=30)
        assert await nodes.call(replica, "GET", name) == b"mine"
        if how == "stopped":
            nodes.primaries[0].resume()


async def when_promoted(group: SentinelTopology) -> float:
    """Return when the first sentinel named the replica as the primary."""
    await group.promoted(any_sentinel=True)
    return now()


@pytest.mark.real
@pytest.mark.parametrize("replicated", [True, pytest.param(False, marks=pytest.mark.ci)])
async def test_p1_p3_p8_d4_d6_the_primary_of_a_sentinel_group_dies(replicated: bool) -> None:
    """A lock that had reached the replica stays held, and its waiter has it next. One that had not is lost with it.

    Then the waiter gets it under a greater fence, and the first holder learns of that.
    """
    async with (
        SentinelTopology() as group,
        group.client() as client,
        group.client() as other,
        Coordinator(client) as sync,
        Coordinator(other) as elsewhere,
    ):
        free, lock, its = sync.lock("free"), sync.lock("held", ttl=TTL), elsewhere.lock("held", ttl=TTL)
        before = await free.acquire()
        await before.release()
        await (await lock.acquire()).release()
        await group.replicated()
        if not replicated:
            await group.cut_replication()
        lease = await lock.acquire()
        waiter: asyncio.Task[Lease] | None = None
        if replicated:
            waiter = asyncio.create_task(its.acquire())
            await wait_until(waits(lock), FAST, timeout=15)
            await group.replicated()
        group.primary.kill()
        switched = asyncio.create_task(when_promoted(group))
        if waiter is None:
            group.replica.resume()
            waiter = asyncio.create_task(its.acquire(timeout=TTL))
        async with free.acquire(timeout=TTL) as after:
            granted = now()
            assert after.fence > before.fence
        assert granted - await switched <= NAMED
        if replicated:
            lease.check()
            assert not waiter.done()
            await lease.extend(TTL)  # by the new primary
            await wait_until(waits(lock), FAST, timeout=15)
            await lease.release()
        following = await asyncio.wait_for(waiter, TTL)
        assert following.fence > lease.fence
        if not replicated:
            await asyncio.wait_for(lease.wait_lost(), TTL)
            with pytest.raises(LeaseLost) as caught:
                lease.check()
            assert caught.value.reason in ("expired", "taken")  # looked at before, or after, the other had it
        following.check()
        await following.release()


@pytest.mark.ci
def test_a9_two_loops_in_turn() -> None:
    """In one thread: what one hears while it runs the other one knows when it is its turn again."""
    with Nodes(replicas=1) as nodes, asyncio.Runner() as first, asyncio.Runner() as second:
        client, name = nodes.client(), nodes.name_at(0)

        async def use() -> None:
            async with AsyncLock(client, name).acquire(timeout=60):
                pass

        async def fail_over() -> None:
            await nodes.call(nodes.replicas[0], "CLUSTER", "FAILOVER")
            await nodes.promoted(nodes.primaries[0])

        first.run(use())
        second.run(use())
        second.run(fail_over())
        second.run(use())
        first.run(use())
        first.run(close_implicit(client))
        second.run(close_implicit(client))
        second.run(client.aclose())


@pytest.mark.real
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
            await asyncio.wait_for(releasing, 30)
            assert await nodes.call(b, "GET", name) is None
        finally:
            a.resume()
            await nodes.healthy()


@pytest.mark.ci
@pytest.mark.real
async def test_d6_a_replica_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The primary lives on as a replica, and answers MOVED: no connection stays there, or is opened there meanwhile."""
    async with Nodes(replicas=1) as nodes, nodes.client() as client, Coordinator(client) as sync:
        name = nodes.name_at(0)
        async with sync.lock(name):
            pass
        await nodes.call(nodes.replicas[0], "CLUSTER", "FAILOVER")
        replica = await nodes.promoted(nodes.primaries[0])
        async with sync.lock(name).acquire(timeout=60):
            assert sync.connections == 2

        introduced, go_on = asyncio.Event(), asyncio.Event()
        check = ShardLink.check

        async def slowly(link: ShardLink, connection: Connection) -> None:
            introduced.set()
            await go_on.wait()
            await check(link, connection)

        async def is_replica() -> bool:
            return (await nodes.call(replica, "ROLE"))[0] in (b"slave", "slave")

        monkeypatch.setattr(ShardLink, "check", slowly)
        async with Coordinator(client) as late:
            acquiring = asyncio.create_task(late.lock(name).acquire())
            await introduced.wait()  # at the replica
            # Else it is not let take over again.
            await wait_until(lambda: link_is_up(nodes.primaries[0]), FAST, timeout=60)
            # The others do not vote again so soon after the first time.
            await nodes.call(nodes.primaries[0], "CLUSTER", "FAILOVER", "TAKEOVER")
            await wait_until(is_replica, FAST, timeout=60)
            known = await learn_of_moves(client)
            await wait_until(lambda: leads_to(known, nodes.slot(name), nodes.primaries[0]), FAST, timeout=60)
            go_on.set()
            await (await asyncio.wait_for(acquiring, 60)).release()


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


# -- F12: nodes that are replaced over the months, and slots that lie scattered ------------------------------------


async def assign(nodes: Nodes, owners: Mapping[int, EmbeddedServer]) -> None:
    """Let other primaries have these slots, which have no keys."""
    for _ in range(2):  # in the first round a node may still hear the claim of another one
        for node in nodes.primaries:
            async with node.client() as client, client.pipeline(transaction=False) as pipe:
                for slot, owner in owners.items():
                    pipe.execute_command("CLUSTER", "SETSLOT", slot, "NODE", nodes.ids[owner])
                await pipe.execute(raise_on_error=False)  # a node without slots may have become a replica


@asynccontextmanager
async def seed(target: list[EmbeddedServer]) -> AsyncIterator[int]:
    """Listen at a port that leads to the first of ``target``, whatever that is; as a name or a balancer does."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(target[0].host, target[0].port)
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer), return_exceptions=True)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1")
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def alive(kind: type[object]) -> int:
    """Return how many objects of a class there are."""
    gc.collect()
    return sum(isinstance(found, kind) for found in gc.get_objects())


def opened(sync: Coordinator, connections: int) -> bool:
    """Return whether ``sync`` has opened so many."""
    return sync.connections >= connections


@pytest.mark.ci
@pytest.mark.real
async def test_a_node_that_was_removed_for_good_is_forgotten() -> None:
    """It is not in `trouble`, and its shard and its link are collected, though nobody asks for its slots."""
    async with Nodes() as nodes, nodes.client() as client, Coordinator(client) as sync:
        shards, links = alive(Shard), alive(ShardLink)
        removed, heir, _ = nodes.primaries
        for shard in range(3):
            async with sync.lock(nodes.name_at(shard)):
                pass
        assert (alive(Shard), alive(ShardLink)) == (shards + 2, links + 3), "one was there before any node was asked"
        await nodes.call(removed, "FLUSHALL")  # what has keys is not given away
        await assign(nodes, {slot: heir for slot in range(SLOTS) if nodes.primaries[slot * 3 // SLOTS] is removed})
        removed.stop()
        for shard in (1, 2):
            async with sync.lock(nodes.name_at(shard)):
                pass
        await wait_until(lambda: sync.connection_error is None and alive(ShardLink) == links + 2, SELDOM, timeout=60)
        await wait_until(lambda: alive(Shard) == shards + 1, SELDOM, timeout=60)
        async with sync.lock(nodes.name_at(0)):
            assert sync.connection_error is None


@pytest.mark.ci
@pytest.mark.real
async def test_all_nodes_may_have_new_addresses_while_the_seed_answers() -> None:
    """The client itself forgets its seed as soon as it knows the nodes."""
    async with AsyncExitStack() as stack:
        old = AsyncExitStack()
        nodes = await old.enter_async_context(Nodes())
        target = [nodes.primaries[0]]
        port = await stack.enter_async_context(seed(target))
        client = await stack.enter_async_context(RedisCluster(startup_nodes=[ClusterNode("127.0.0.1", port)]))
        if not hasattr(client, "startup_nodes"):
            await old.aclose()
            pytest.skip("redis-py before 7.0 forgets the first nodes before anyone can see them")
        sync = await stack.enter_async_context(Coordinator(client))
        async with sync.lock("x"):
            await client.initialize()
        new = await stack.enter_async_context(Nodes())
        await old.aclose()
        target[0] = new.primaries[0]
        async with sync.lock("x").acquire(timeout=60):
            assert sync.connection_error is None


@pytest.mark.ci
@pytest.mark.real
async def test_scattered_slots_do_not_stall_the_loop() -> None:
    """Each of the 16,384 is a range of its own in the answer of the nodes, which is asked for with each connection."""
    async with Nodes() as nodes, nodes.client() as client, Coordinator(client) as sync:
        await assign(nodes, {slot: nodes.primaries[slot % 3] for slot in range(SLOTS)})
        with callbacks() as first:
            async with sync.lock("x"):
                pass
        with callbacks() as again:
            for _ in range(3):
                before = sync.connections
                async with sync.lock("x"):
                    for node in nodes.primaries:
                        await nodes.call(node, "CLIENT", "KILL", "TYPE", "pubsub")
                    await wait_until(partial(opened, sync, before + 1), FAST, timeout=10)
        assert first.longest < LONGEST, first.which
        assert again.longest < LONGEST, again.which
