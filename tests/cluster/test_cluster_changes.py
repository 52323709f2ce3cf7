"""FAULTS F12: a cluster whose nodes are replaced over the months, and one whose slots lie scattered."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest
from redis.asyncio import RedisCluster
from redis.asyncio.cluster import ClusterNode

from redis_sync_aio import Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer

from ..support.body import FAST
from ..support.callbacks import callbacks
from ..support.clusters import SLOTS, Nodes, cluster
from ..support.inside import Shard, ShardLink

pytestmark = pytest.mark.timing
LONGEST = 0.06
"""Seconds; to read the answer took 0.16 in one callback."""


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
async def test_a_node_that_was_removed_for_good_is_forgotten() -> None:
    """It is not in `trouble`, and its shard and its link are collected, though nobody asks for its slots."""
    async with cluster() as nodes, nodes.client() as client, Coordinator(client) as sync:
        shards, links = alive(Shard), alive(ShardLink)
        removed, heir, _ = nodes.primaries
        for shard in range(3):
            async with sync.lock(nodes.name_at(shard)):
                pass
        assert (alive(Shard), alive(ShardLink)) == (shards + 2, links + 3), "one was there before any node was asked"
        await nodes.say(removed, "FLUSHALL")  # what has keys is not given away
        await assign(nodes, {slot: heir for slot in range(SLOTS) if nodes.primaries[slot * 3 // SLOTS] is removed})
        removed.stop()
        for shard in (1, 2):
            async with sync.lock(nodes.name_at(shard)):
                pass
        await wait_until(lambda: sync.connection_error is None and alive(ShardLink) == links + 2, FAST, timeout=10)
        await wait_until(lambda: alive(Shard) == shards + 1, FAST, timeout=10)
        async with sync.lock(nodes.name_at(0)):
            assert sync.connection_error is None


async def test_all_nodes_may_have_new_addresses_while_the_seed_answers() -> None:
    """The client itself forgets its seed as soon as it knows the nodes."""
    async with AsyncExitStack() as stack:
        old = AsyncExitStack()
        nodes = await old.enter_async_context(cluster())
        target = [nodes.primaries[0]]
        port = await stack.enter_async_context(seed(target))
        client = await stack.enter_async_context(RedisCluster(startup_nodes=[ClusterNode("127.0.0.1", port)]))
        if not hasattr(client, "startup_nodes"):
            await old.aclose()
            pytest.skip("redis-py before 7.0 forgets the first nodes before anyone can see them")
        sync = await stack.enter_async_context(Coordinator(client))
        async with sync.lock("x"):
            await client.initialize()
        new = await stack.enter_async_context(cluster())
        await old.aclose()
        target[0] = new.primaries[0]
        async with sync.lock("x").acquire(timeout=10):
            assert sync.connection_error is None


@pytest.mark.ci
async def test_scattered_slots_do_not_stall_the_loop() -> None:
    """Each of the 16,384 is a range of its own in the answer of the nodes, which is asked for with each connection."""
    async with cluster() as nodes, nodes.client() as client, Coordinator(client) as sync:
        await assign(nodes, {slot: nodes.primaries[slot % 3] for slot in range(SLOTS)})
        with callbacks() as first:
            async with sync.lock("x"):
                pass
        with callbacks() as again:
            for _ in range(3):
                before = sync.connections
                async with sync.lock("x"):
                    for node in nodes.primaries:
                        await nodes.say(node, "CLIENT", "KILL", "TYPE", "pubsub")
                    await wait_until(partial(opened, sync, before + 1), FAST, timeout=10)
        assert first.longest < LONGEST, first.which
        assert again.longest < LONGEST, again.which
