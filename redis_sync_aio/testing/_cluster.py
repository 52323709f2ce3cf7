"""A Redis Cluster of servers of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from redis.asyncio import RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.crc import key_slot
from redis.exceptions import ResponseError

from .._core import arguments
from .._core.backoff import wait_until
from ..embedded import EmbeddedServer
from ._topology import PATIENCE, SOON, Topology, has_what, link_is_up, start_all, text

SLOTS: Final = 16384
"""Number of hash slots of a cluster."""
OPTIONS: Final = (
    *("--cluster-enabled", "yes", "--repl-diskless-sync-delay", "0"),
    # A shard without a primary is no reason for the others to refuse commands.
    *("--cluster-require-full-coverage", "no"),
)


class ClusterTopology(Topology):
    """A Redis Cluster: primaries that share the hash slots, and optionally a replica of each. It starts in two seconds.

    Args:
        shards: The number of primaries, at least 3: fewer cannot agree on a failover.
        replicas: 0, or 1 for each shard.
        bounds: The first slot of each shard, and 16384. Default: equal shares.
        node_timeout: Seconds of silence after which a node counts as failing. Default: 1 where one can be replaced or
            isolated, else 15, since a busy machine is not a failure.
        isolation: Let nodes take DEBUG commands, which `isolate` needs.
        args: Further options of each server.

    Attributes:
        primaries: The primaries as they were at the start, in the order of the shards.
        replicas: Their replicas, in the same order.
        ids: The id of each node.

    Example:
        ```python
        from redis_sync_aio import Coordinator
        from redis_sync_aio.testing import ClusterTopology

        async with ClusterTopology(replicas=1) as group, group.client() as client, Coordinator(client) as sync:
            async with sync.lock("orders:42"):
                await group.move(group.slot("orders:42"), group.owner("orders:42"), group.primaries[0])
        ```
    """

    def __init__(
        self,
        shards: int = 3,
        replicas: int = 0,
        *,
        bounds: Sequence[int] | None = None,
        node_timeout: float | None = None,
        isolation: bool = False,
        args: Iterable[str] = (),
    ) -> None:
        if arguments.count(replicas, "replicas") > 1:
            raise ValueError(f"replicas must be 0, or 1 for each shard, not {replicas}")
        self._shards, self._with_replicas = arguments.count(shards, "shards", 3), bool(replicas)
        self._isolation = arguments.require_bool(isolation, "isolation")
        self._args = arguments.words(args, "args")
        self._bounds = [-(-SLOTS * number // shards) for number in range(shards + 1)]
        if bounds is not None:
            self._bounds = [arguments.count(bound, "bounds") for bound in bounds]
            if self._bounds != sorted({0, SLOTS, *self._bounds}) or len(self._bounds) != shards + 1:
                raise ValueError(f"bounds must be 0, the first slot of each further shard, and {SLOTS}, not {bounds!r}")
        silence = None if node_timeout is None else arguments.positive_seconds(node_timeout, "node_timeout")
        self._node_timeout = silence or (1.0 if replicas or isolation else 15.0)
        self._forget()

    def _forget(self) -> None:
        self.primaries: list[EmbeddedServer] = []
        self.replicas: list[EmbeddedServer] = []
        self.ids: dict[EmbeddedServer, str] = {}

    @property
    def servers(self) -> tuple[EmbeddedServer, ...]:
        """The primaries and then the replicas; each has `kill`, `pause`, `resume` and `restart`."""
        return *self.primaries, *self.replicas

    def client(self, **options: Any) -> RedisCluster:
        """Return a new client of the cluster; options are those of `redis.asyncio.RedisCluster`."""
        startup = [ClusterNode(node.host, node.port or 0) for node in self.primaries]
        return RedisCluster(startup_nodes=startup, **options)

    def slot(self, name: str) -> int:
        """Return the hash slot of ``name``."""
        return key_slot(name.encode())

    def owner(self, name: str) -> EmbeddedServer:
        """Return the node that has the slot of ``name`` at first."""
        slot = self.slot(name)
        return self.primaries[next(n for n in range(self._shards) if slot < self._bounds[n + 1])]

    def name_at(self, shard: int, like: str = "name") -> str:
        """Return a name that begins with ``like`` and that the shard of this number has at first."""
        return next(name for n in range(1000) if self.owner(name := f"{like}{n}") is self.primaries[shard])

    # -- slots -----------------------------------------------------------------------------------------

    async def begin_move(self, slot: int, source: EmbeddedServer, target: EmbeddedServer) -> None:
        """Begin to migrate a slot; its keys are where they were, and clients get ASK for those that are not there."""
        # Else the target may take the slot over with an epoch that the source has already, and lose it by the next
        # message that the source has sent before.
        await wait_until(lambda: self._knows_epoch(target, source), SOON, timeout=PATIENCE)
        await self.call(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", self.ids[source])
        await self.call(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self.ids[target])

    async def end_move(self, slot: int, source: EmbeddedServer, target: EmbeddedServer) -> None:
        """Migrate the keys of the slot, and then the slot itself."""
        while keys := await self.call(source, "CLUSTER", "GETKEYSINSLOT", slot, 100):
            await self.call(source, "MIGRATE", target.host, target.port, "", 0, 5000, "KEYS", *keys)
        others = [node for node in await self.present_primaries() if node not in (source, target)]
        for node in (target, source, *others):
            await self.call(node, "CLUSTER", "SETSLOT", slot, "NODE", self.ids[target])

    async def stop_move(self, slot: int) -> None:
        """Leave a slot that is being moved where it is."""
        for node in await self.present_primaries():
            await self.call(node, "CLUSTER", "SETSLOT", slot, "STABLE")

    async def move(self, slot: int, source: EmbeddedServer, target: EmbeddedServer) -> None:
        """Migrate a slot with its keys."""
        await self.begin_move(slot, source, target)
        await self.end_move(slot, source, target)

    async def present_primaries(self) -> list[EmbeddedServer]:
        """Return the running nodes that are primaries now."""
        running = [node for node in self.servers if node.running]
        return [node for node in running if text((await self.call(node, "ROLE"))[0]) == "master"]

    async def slots(self, node: EmbeddedServer) -> set[int]:
        """Return the slots that ``node`` has, as it says."""
        found: set[int] = set()
        for first, last, owner, *_ in await self.call(node, "CLUSTER", "SLOTS"):
            if owner[1] == node.port:
                found.update(range(first, last + 1))
        return found

    async def _knows_epoch(self, node: EmbeddedServer, of: EmbeddedServer) -> bool:
        """Return whether ``node`` has heard of the configuration epoch of another one."""

        async def epoch(which: EmbeddedServer, name: str) -> int:
            info = text(await self.call(which, "CLUSTER", "INFO"))
            return int(info.partition(f"{name}:")[2].split()[0])

        return await epoch(node, "cluster_current_epoch") >= await epoch(of, "cluster_my_epoch")

    # -- failures --------------------------------------------------------------------------------------

    async def fail_over(self, primary: EmbeddedServer) -> EmbeddedServer:
        """Let the replica of ``primary`` take its place, as planned: nothing is lost. Return the replica."""
        replica = self._replica_of(primary)
        await wait_until(lambda: has_what(primary, replica), SOON, timeout=PATIENCE)
        await self.call(replica, "CLUSTER", "FAILOVER")
        await self.promoted(primary)

        async def follows() -> bool:
            return text((await self.call(primary, "ROLE"))[0]) == "slave"

        await wait_until(follows, SOON, timeout=PATIENCE)
        return replica

    async def promoted(self, dead: EmbeddedServer) -> EmbeddedServer:
        """Wait until the replica of ``dead`` has taken its place; return the replica."""
        replica = self._replica_of(dead)

        async def is_primary() -> bool:
            return text((await self.call(replica, "ROLE"))[0]) == "master"

        await wait_until(is_primary, SOON, timeout=PATIENCE)
        return replica

    async def isolate(self, node: EmbeddedServer) -> None:
        """Let a node hear nothing from the others any more, while clients still reach it; needs ``isolation``."""
        if not self._isolation:
            raise RuntimeError("isolate() needs ClusterTopology(isolation=True)")
        try:
            await self.call(node, "DEBUG", "DROP-CLUSTER-PACKET-FILTER", "-2")
        except ResponseError:  # Redis before 7, whose nodes do not tell each other whom they forget
            for other in self.servers:
                if other is not node:
                    await self.call(node, "CLUSTER", "FORGET", self.ids[other])

    async def healthy(self) -> None:
        """Wait until every primary considers all nodes healthy."""

        async def said() -> bool:
            found = [text(await self.call(node, "CLUSTER", "NODES")) for node in self.primaries]
            return not any("fail" in it for it in found)

        await wait_until(said, SOON, timeout=PATIENCE)

    def _replica_of(self, primary: EmbeddedServer) -> EmbeddedServer:
        if not self.replicas:
            raise RuntimeError("there are no replicas: ClusterTopology(replicas=1)")
        return self.replicas[self.primaries.index(primary)]

    # -- the start -------------------------------------------------------------------------------------

    async def _start(self) -> None:
        debugging = await _debugging() if self._isolation else ()
        timeout = "--cluster-node-timeout", str(round(self._node_timeout * 1000))
        options = (*OPTIONS, *timeout, *debugging, *self._args)
        self.primaries = [EmbeddedServer(port=0, args=options) for _ in range(self._shards)]
        self.replicas = [EmbeddedServer(port=0, args=options) for _ in range(self._shards * self._with_replicas)]
        await start_all(self.servers)
        for epoch, node in enumerate(self.servers, 1):
            self.ids[node] = text(await self.call(node, "CLUSTER", "MYID"))
            await self.call(node, "CLUSTER", "SET-CONFIG-EPOCH", epoch)
        for number, node in enumerate(self.primaries):
            await self.call(node, "CLUSTER", "ADDSLOTS", *range(self._bounds[number], self._bounds[number + 1]))
        first = self.primaries[0]
        for node in self.servers[1:]:
            await self.call(node, "CLUSTER", "MEET", first.host, first.port)
        await wait_until(self._know_each_other, SOON, timeout=PATIENCE)
        for primary, replica in zip(self.primaries, self.replicas, strict=False):
            await self.call(replica, "CLUSTER", "REPLICATE", self.ids[primary])
        await wait_until(self._agree, SOON, timeout=PATIENCE)

    async def _know_each_other(self) -> bool:
        found = [text(await self.call(node, "CLUSTER", "NODES")) for node in self.servers]
        return all(len(it.splitlines()) == len(found) and "handshake" not in it for it in found)

    async def _agree(self) -> bool:
        for node in self.servers:
            ranges = await self.call(node, "CLUSTER", "SLOTS")  # first, last, the primary, its replicas
            whole = [len(it) for it in ranges] == [3 + self._with_replicas] * self._shards
            if not whole or "cluster_state:ok" not in text(await self.call(node, "CLUSTER", "INFO")):
                return False
        return all([await link_is_up(replica) for replica in self.replicas])


async def _debugging() -> tuple[str, ...]:
    """Return the options that let a server take DEBUG commands; before Redis 7 there were none, and each took them."""
    async with EmbeddedServer() as server, server.client() as client:
        version = (await client.info("server"))["redis_version"]
    return ("--enable-debug-command", "yes") if int(str(version).split(".")[0]) >= 7 else ()
