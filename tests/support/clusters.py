"""A Redis Cluster of three shards, all from the embedded server's executable.

async with cluster(replicas=1) as it:
    async with it.client() as client:
        await it.move(it.slot("name"), it.owner("name"), it.primaries[1])
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence, Sized
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.crc import key_slot
from redis.exceptions import ResponseError

from redis_sync_aio import Backoff, Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer

from .inside import Cluster

NODE_TIMEOUT = 1000
"""Milliseconds of silence after which a node counts as failing, where one is to fail."""
PATIENT = 15000
"""The same where none is: a busy machine is no failure."""
SOON = Backoff(initial=0.01, cap=0.05)
SLOTS = 16384
SHARDS = 3
EVEN = [-(-SLOTS * number // SHARDS) for number in range(SHARDS + 1)]
OPTIONS = (
    *("--cluster-enabled", "yes", "--repl-diskless-sync-delay", "0"),
    # A shard without a primary is no reason for the others to refuse commands.
    *("--cluster-require-full-coverage", "no"),
)


@dataclass
class Nodes:
    """See the top of this module."""

    primaries: list[EmbeddedServer] = field(default_factory=list)
    replicas: list[EmbeddedServer] = field(default_factory=list)
    ids: dict[EmbeddedServer, str] = field(default_factory=dict)

    def client(self, **options: Any) -> RedisCluster:
        """Return a client of the cluster."""
        startup = [ClusterNode(node.host, node.port or 0) for node in self.primaries]
        return RedisCluster(startup_nodes=startup, **options)

    def slot(self, name: str) -> int:
        """Return the slot of ``name``."""
        return key_slot(name.encode())

    def owner(self, name: str) -> EmbeddedServer:
        """Return who has ``name`` at first."""
        return self.primaries[self.slot(name) * SHARDS // SLOTS]

    def name_at(self, shard: int, like: str = "name") -> str:
        """Return a name that one of the shards has at first."""
        return next(name for n in range(1000) if self.owner(name := f"{like}{n}") is self.primaries[shard])

    async def say(self, node: EmbeddedServer, *words: Any) -> Any:
        """Run a command on one node."""
        async with node.client() as plain:
            client: Any = plain
            return await client.execute_command(*words)

    async def cut_off(self, node: EmbeddedServer) -> None:
        """Let a node hear nothing of the others any more; needs ``debug`` of `cluster`."""
        try:
            await self.say(node, "DEBUG", "DROP-CLUSTER-PACKET-FILTER", "-2")
        except ResponseError:  # Redis before 7, whose nodes do not tell each other whom they forget
            for other in self.ids:
                if other is not node:
                    await self.say(node, "CLUSTER", "FORGET", self.ids[other])

    async def _knows_epoch(self, node: EmbeddedServer, of: EmbeddedServer) -> bool:
        """Return whether ``node`` has heard of the configuration epoch of another one."""

        async def epoch(which: EmbeddedServer, name: str) -> int:
            info = _text(await self.say(which, "CLUSTER", "INFO"))
            return int(info.partition(f"{name}:")[2].split()[0])

        return await epoch(node, "cluster_current_epoch") >= await epoch(of, "cluster_my_epoch")

    async def begin_move(self, slot: int, source: EmbeddedServer, target: EmbeddedServer) -> None:
        """Begin to migrate a slot; its keys are where they were."""
        # Else the target may take the slot over with an epoch that the source has already, and lose it by the next
        # message that the source has sent before.
        await wait_until(lambda: self._knows_epoch(target, source), SOON, timeout=10)
        await self.say(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", self.ids[source])
        await self.say(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self.ids[target])

    async def end_move(self, slot: int, source: EmbeddedServer, target: EmbeddedServer) -> None:
        """Migrate the keys of the slot, and then the slot itself."""
        while keys := await self.say(source, "CLUSTER", "GETKEYSINSLOT", slot, 100):
            await self.say(source, "MIGRATE", target.host, target.port, "", 0, 5000, "KEYS", *keys)
        for node in (target, source, *(it for it in self.primaries if it not in (source, target))):
            await self.say(node, "CLUSTER", "SETSLOT", slot, "NODE", self.ids[target])

    async def stop_moves(self, slot: int) -> None:
        """Leave a slot that is being moved where it is."""
        for node in self.primaries:
            await self.say(node, "CLUSTER", "SETSLOT", slot, "STABLE")

    async def move(self, slot: int, source: EmbeddedServer, target: EmbeddedServer) -> None:
        """Migrate a slot."""
        await self.begin_move(slot, source, target)
        await self.end_move(slot, source, target)

    async def can_move_at_once(self) -> bool:
        """Return whether the server moves a slot with all its keys in one step."""
        return "MIGRATESLOTS" in str(await self.say(self.primaries[0], "CLUSTER", "HELP"))

    async def move_at_once(self, slot: int, source: EmbeddedServer, target: EmbeddedServer) -> None:
        """Migrate a slot in one step."""
        await self.say(source, "CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", self.ids[target])

        async def is_there() -> bool:
            return slot in await self.slots(target)

        await wait_until(is_there, SOON, timeout=10)

    async def slots(self, node: EmbeddedServer) -> set[int]:
        """Return the slots that ``node`` has, as it says."""
        found: set[int] = set()
        for first, last, owner, *_ in await self.say(node, "CLUSTER", "SLOTS"):
            if owner[1] == node.port:
                found.update(range(first, last + 1))
        return found

    async def agree_on(self, slot: int) -> None:
        """Return when no two nodes think that they have the slot."""

        async def one_has_it() -> bool:
            return sum([slot in await self.slots(node) for node in self.primaries]) == 1

        await wait_until(one_has_it, SOON, timeout=10)

    async def healthy(self) -> None:
        """Return when every node holds all others for healthy."""

        async def said() -> bool:
            found = [_text(await self.say(node, "CLUSTER", "NODES")) for node in self.primaries]
            return not any("fail" in it for it in found)

        await wait_until(said, SOON, timeout=20)

    async def follows(self, replica: EmbeddedServer) -> None:
        """Return when it has the data of its primary."""
        await wait_until(lambda: _follows(replica), SOON, timeout=20)

    async def promoted(self, dead: EmbeddedServer) -> EmbeddedServer:
        """Return which replica has become the primary instead of ``dead``, when that is so."""
        (replica,) = (it for it in self.replicas if self.replicas.index(it) == self.primaries.index(dead))

        async def is_primary() -> bool:
            return (await self.say(replica, "ROLE"))[0] in (b"master", "master")

        await wait_until(is_primary, SOON, timeout=20)
        return replica


@asynccontextmanager
async def cluster(replicas: int = 0, bounds: Sequence[int] = EVEN, *, debug: bool = False) -> AsyncIterator[Nodes]:
    """Start the nodes; they agree with each other when this returns. ``replicas``: 0, or 1 for each shard.

    ``bounds``: the first slot of each shard, and `SLOTS`. `Nodes.owner` knows the usual ones. ``debug``: let the nodes
    take DEBUG commands. Only with one of the two a node that is silent for a second counts as failing.
    """
    patience = NODE_TIMEOUT if replicas or debug else PATIENT
    options = (*OPTIONS, "--cluster-node-timeout", str(patience), *(await _debugging() if debug else ()))
    async with AsyncExitStack() as stack:
        nodes = Nodes()
        for group, number in ((nodes.primaries, SHARDS), (nodes.replicas, SHARDS * replicas)):
            for _ in range(number):
                group.append(await stack.enter_async_context(EmbeddedServer(port=0, args=options)))
        every = [*nodes.primaries, *nodes.replicas]
        for epoch, node in enumerate(every, 1):
            nodes.ids[node] = _text(await nodes.say(node, "CLUSTER", "MYID"))
            await nodes.say(node, "CLUSTER", "SET-CONFIG-EPOCH", epoch)
        for number, node in enumerate(nodes.primaries):
            await nodes.say(node, "CLUSTER", "ADDSLOTS", *range(bounds[number], bounds[number + 1]))
        first = every[0]
        for node in every[1:]:
            await nodes.say(node, "CLUSTER", "MEET", first.host, first.port)

        async def know_each_other() -> bool:
            found = [_text(await nodes.say(node, "CLUSTER", "NODES")) for node in every]
            return all(len(it.splitlines()) == len(every) and "handshake" not in it for it in found)

        await wait_until(know_each_other, SOON, timeout=20)
        for primary, replica in zip(nodes.primaries, nodes.replicas, strict=False):
            await nodes.say(replica, "CLUSTER", "REPLICATE", nodes.ids[primary])

        async def agree() -> bool:
            for node in every:
                ranges = await nodes.say(node, "CLUSTER", "SLOTS")  # first, last, the primary, its replicas
                whole = [len(it) for it in ranges] == [3 + replicas] * SHARDS
                if not whole or "cluster_state:ok" not in _text(await nodes.say(node, "CLUSTER", "INFO")):
                    return False
            return all([await _follows(replica) for replica in nodes.replicas])

        await wait_until(agree, SOON, timeout=20)
        yield nodes


async def _debugging() -> tuple[str, ...]:
    """Return the options that let a server take DEBUG commands; before Redis 7 there were none, and each took them."""
    async with EmbeddedServer() as server, server.client() as client:
        version = (await client.info("server"))["redis_version"]
    return ("--enable-debug-command", "yes") if int(str(version).split(".")[0]) >= 7 else ()


async def _follows(replica: EmbeddedServer) -> bool:
    async with replica.client() as client:
        return bool((await client.info("replication")).get("master_link_status") == "up")


def _text(answer: Any) -> str:
    return answer.decode() if isinstance(answer, bytes) else str(answer)


@asynccontextmanager
async def processes(nodes: Nodes, **options: object) -> AsyncIterator[tuple[Coordinator, Coordinator]]:
    """Two, with a client each."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(nodes.client()) for _ in range(2)]
        first, second = [await stack.enter_async_context(Coordinator(it, **options)) for it in clients]  # type: ignore[arg-type]
        yield first, second


@asynccontextmanager
async def moved_back(nodes: Nodes, name: str) -> AsyncIterator[None]:
    """Take the slot of ``name`` back to where it was, also in the middle of a move."""
    try:
        yield
    finally:
        home = nodes.owner(name)
        await nodes.stop_moves(nodes.slot(name))
        await nodes.agree_on(nodes.slot(name))
        for node in nodes.primaries:
            if node is not home and nodes.slot(name) in await nodes.slots(node):
                await nodes.move(nodes.slot(name), node, home)


async def learn_of_moves(client: RedisCluster, answer: str = "") -> Cluster:
    """Let all that use ``client`` know where the slots are now; ``answer``: whom to ask first."""
    known = Cluster.of(client)
    known.moved(answer)
    await known.refresh()
    return known


async def enough(found: Sized, wanted: int) -> bool:
    """A condition for `wait_until`: there are so many."""
    return len(found) >= wanted
