"""`inspect` reads a cluster, a Sentinel set, and what stays when every process of the application has ended."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from redis_sync_aio import CommandRefused, Coordinator
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.inspection import inspect
from redis_sync_aio.testing.faults import FaultProxy
from redis_sync_aio.testing.servers import QUICKLY, SLOTS, SentinelTopology
from tests.support.inspecting import seen
from tests.support.processes import Crew
from tests.support.topologies import PATIENT, SHARDS, Nodes, moved_back


async def test_all_primaries_of_a_cluster_are_read(nodes: Nodes) -> None:
    """Each name with the address of its shard, and its holder as connected: to that shard."""
    async with nodes.client() as client, Coordinator(client) as sync:
        names = sorted(nodes.name_at(shard, "seen") for shard in range(SHARDS))
        leases = [await sync.lock(name).acquire() for name in names]
        found = await inspect(client, "seen*")
        assert [it.name for it in found] == names
        assert {it.name: it.server for it in found} == {
            name: f"{nodes.owner(name).host}:{nodes.owner(name).port}" for name in names
        }
        assert {it.holders[0].connected for it in found} == {True}
        for name in names:
            assert [it.name for it in await inspect(sync, name)] == [name]
        assert len(await inspect(client, "seen*", limit=2)) == 2
        for lease in leases:
            await lease.release()
        assert await inspect(client, "seen*") == ()


@pytest.mark.timeout(180)
async def test_a_holder_of_a_sentinel_set_is_connected_after_a_failover() -> None:
    """The primary is read; the holder listens to another inbox at the next one, and is not taken for dead there."""
    async with (
        SentinelTopology(down_after=PATIENT) as group,
        group.client() as client,
        Coordinator(client) as sync,
        sync.lock("x", ttl=None),
    ):
        (found,) = await inspect(client)
        assert (found.name, found.held, found.server) == ("x", 1, f"{group.primary.host}:{group.primary.port}")
        await group.fail_over()
        there = f"{group.replica.host}:{group.replica.port}"
        found = await seen(client, "x", lambda it: it.server == there and it.holders[0].connected)
        assert found.problems == ()


async def test_a_holder_whose_slot_was_moved_is_connected(nodes: Nodes) -> None:
    """To the shard that had the slot: it has nothing to ask of the other one, as it renews nothing."""
    name = nodes.name_at(0, "moved-while-held")
    async with (
        moved_back(nodes, name),
        nodes.client() as client,
        Coordinator(client) as sync,
        sync.lock(name, ttl=None),
    ):
        await nodes.move(nodes.slot(name), nodes.primaries[0], nodes.primaries[1])
        there = f"{nodes.primaries[1].host}:{nodes.primaries[1].port}"
        found = await seen(client, name, lambda it: it.server == there)
        assert found.holders[0].connected is True
        assert found.problems == ()


async def test_a_holder_is_not_taken_for_dead_while_its_only_shard_does_not_answer(nodes: Nodes) -> None:
    """It is not known whether it is connected, and no problem is named."""
    name, (home, there, _) = nodes.name_at(0, "moved-in-an-outage"), nodes.primaries
    async with (
        FaultProxy(home) as proxy,
        moved_back(nodes, name),
        nodes.client() as client,
        nodes.client(
            address_remap=lambda address: (proxy.host, proxy.port) if address[1] == home.port else address
        ) as looker,
        Coordinator(client) as sync,
        sync.lock(name, ttl=None),
    ):
        await nodes.move(nodes.slot(name), home, there)
        await seen(looker, name, lambda it: it.server == f"{there.host}:{there.port}" and it.holders[0].connected)
        proxy.refuse = True
        await proxy.cut()
        (found,) = await inspect(looker, name)
        assert found.holders[0].connected is None
        assert found.problems == ()


@pytest.mark.ci
@pytest.mark.real  # it starts nodes, and moves a slot: they agree in real time
@pytest.mark.timeout(180)
async def test_a_holder_whose_only_shard_has_lost_its_slots_is_connected() -> None:
    """A lease without a ttl renews nothing, and the node that it came from may be removed: the holder moves on."""
    slot = key_slot(b"x")
    async with (
        Nodes(SHARDS, bounds=[0, slot, slot + 1, SLOTS], args=["--cluster-allow-replica-migration", "no"]) as nodes,
        nodes.client() as client,
        nodes.client() as looker,  # with slots of its own, so that it tells the holder nothing
        Coordinator(client, response_timeout=1) as sync,
        sync.lock("x", ttl=None) as lease,
    ):
        for node in (nodes.primaries[0], nodes.primaries[2]):  # the holder asked one of them first
            await nodes.call(node, "CLIENT", "KILL", "TYPE", "pubsub")
        await nodes.move(slot, nodes.primaries[1], nodes.primaries[2])
        there = f"{nodes.primaries[2].host}:{nodes.primaries[2].port}"
        found = await seen(looker, "x", lambda it: it.server == there and it.holders[0].connected)
        assert found.problems == ()
        assert found.holders[0].token == lease.token
        lease.check()


@pytest.mark.real  # replication
async def test_a_replica_does_not_tell_who_is_connected() -> None:
    """Its locks are those of its primary, where their processes are connected: nobody is taken for dead."""
    async with (
        EmbeddedServer(port=0, args=QUICKLY) as primary,
        EmbeddedServer(port=0) as copy,
        primary.client() as redis,
        copy.client() as replica,
        Coordinator(redis) as sync,
        sync.lock("x", ttl=None),
    ):
        waiting = asyncio.create_task(sync.lock("x").acquire())
        await seen(redis, "x", lambda it: it.waiting)
        await replica.replicaof(primary.host, str(primary.port))
        found = await seen(replica, "x", lambda it: it.waiting)
        assert found.holders[0].connected is None
        assert found.waiters[0].alive is None
        assert found.problems == ()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_node_of_a_cluster_does_not_deny_what_another_node_has(nodes: Nodes) -> None:
    """A client of one node knows a part of the names: it says so, in place of "nothing is known of it"."""
    name = nodes.name_at(0)
    async with nodes.primaries[1].client() as client:
        with pytest.raises(CommandRefused, match=r"MOVED.* node of a cluster: use a redis\.asyncio\.RedisCluster"):
            await inspect(client, name)
        assert await inspect(client, nodes.name_at(1)) == ()


@pytest.mark.real  # processes
async def test_it_shows_what_killed_processes_left(server: EmbeddedServer, redis: Redis, crew: Crew) -> None:
    """The holder is not connected any more, the ticket is dead, and nobody of the application runs."""
    with crew.children(2) as (holder, waiter):
        await holder.open(server.url)
        await waiter.open(server.url)
        await holder.acquire("x", ttl=600)
        waiting = waiter.acquire("x", ttl=600)
        await seen(redis, "x", lambda it: len(it.waiters) == 1)
        await holder.kill_seen(redis)
        await waiter.kill_seen(redis)
        (found,) = await inspect(redis, "x")
        assert found.holders[0].pid == holder.process.pid
        assert found.holders[0].connected is False
        assert [it.code for it in found.problems] == ["dead_waiters"]
        assert found.waiters[0].pid == waiter.process.pid
        waiting.cancel()
