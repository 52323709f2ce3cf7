"""The cluster of `redis_sync_aio.testing`, and what only this suite does with it; how patient its sentinels are.

async with Nodes(replicas=1) as it:
    async with it.client() as client:
        await it.move(it.slot("name"), it.owner("name"), it.primaries[1])
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sized
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from redis import Redis as BlockingRedis
from redis.asyncio import RedisCluster

from redis_sync_aio import Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.servers import SLOTS, SOON, ClusterTopology

from .inside import Cluster, tuned

SHARDS = 3
PATIENT = 600.0
"""Seconds of silence after which sentinels count a primary as dead that is not to die: a busy machine is no death."""
EVEN = [-(-SLOTS * number // SHARDS) for number in range(SHARDS + 1)]


class Nodes(ClusterTopology):
    """A cluster of three shards."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._admins: dict[EmbeddedServer, Any] = {}

    async def call(self, server: EmbeddedServer, *words: Any) -> Any:
        """Run a command on a node, by a connection that is kept. It blocks the loop, as it takes no time."""
        if server not in self._admins:
            self._admins[server] = BlockingRedis(unix_socket_path=server.unix_socket)
        return self._admins[server].execute_command(*words)

    def stop(self) -> None:
        for admin in self._admins.values():
            admin.close()
        self._admins.clear()
        super().stop()

    async def can_move_at_once(self) -> bool:
        """Return whether the server moves a slot with all its keys in one step."""
        return "MIGRATESLOTS" in str(await self.call(self.primaries[0], "CLUSTER", "HELP"))

    async def move_at_once(self, slot: int, source: EmbeddedServer, target: EmbeddedServer) -> None:
        """Migrate a slot in one step."""
        await self.call(source, "CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", self.ids[target])

        async def is_there() -> bool:
            return slot in await self.slots(target)

        await wait_until(is_there, SOON, timeout=60)

    async def agree_on(self, slot: int) -> None:
        """Return when no two nodes think that they have the slot."""
        while sum([slot in await self.slots(node) for node in self.primaries]) != 1:
            await asyncio.to_thread(time.sleep, 0.01)  # in real time, wherever: nodes talk to each other


@asynccontextmanager
async def processes(nodes: Nodes, **options: object) -> AsyncIterator[tuple[Coordinator, Coordinator]]:
    """Two, with a client each."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(nodes.client()) for _ in range(2)]
        first, second = [await stack.enter_async_context(tuned(it, **options)) for it in clients]
        yield first, second


@asynccontextmanager
async def moved_back(nodes: Nodes, name: str) -> AsyncIterator[None]:
    """Take the slot of ``name`` back to where it was, also in the middle of a move."""
    try:
        yield
    finally:
        home = nodes.owner(name)
        await nodes.stop_move(nodes.slot(name))
        await nodes.agree_on(nodes.slot(name))
        for node in nodes.primaries:
            if node is not home and nodes.slot(name) in await nodes.slots(node):
                await nodes.move(nodes.slot(name), node, home)


@asynccontextmanager
async def user(nodes: Nodes, *rights: str, at: tuple[int, ...] = tuple(range(SHARDS))) -> AsyncIterator[RedisCluster]:
    """Yield a client of a user who has these rights, and is known to some shards only."""
    for number, node in enumerate(nodes.primaries):
        await nodes.call(node, "ACL", "DELUSER", "some")
        if number in at:
            await nodes.call(node, "ACL", "SETUSER", "some", "on", ">x", "+@all", "~*", "&*", *rights)
    client = nodes.client(username="some", password="x")
    yield client
    await client.aclose()
    for node in nodes.primaries:
        await nodes.call(node, "ACL", "DELUSER", "some")


async def learn_of_moves(client: RedisCluster, answer: str = "") -> Cluster:
    """Let all that use ``client`` know where the slots are now; ``answer``: whom to ask first."""
    known = Cluster.of(client)
    known.moved(answer)
    await known.refresh()
    return known


async def enough(found: Sized, wanted: int) -> bool:
    """A condition for `wait_until`: there are so many."""
    return len(found) >= wanted
