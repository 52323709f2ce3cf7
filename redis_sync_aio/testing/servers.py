"""Groups of servers for tests: independent ones, a primary with sentinels, a cluster. They start and stop together."""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Self

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.sentinel import Sentinel
from redis.crc import key_slot
from redis.exceptions import ResponseError

from .._core import arguments
from .._core.backoff import Backoff, wait_until
from ..embedded import EmbeddedServer, HeldPort, ServerNotStarted, hold_ports

__all__ = ["ClusterTopology", "IndependentServers", "SentinelTopology", "Topology"]

SOON: Final = Backoff(initial=0.01, cap=0.05)
"""The pauses between two checks of servers that are about to change their state."""
PATIENCE: Final = 60.0
"""Seconds that such a change takes at most, on any machine: afterwards it is an error."""


class Topology(ABC):
    """Several servers that belong together. They die with the process that started them, as `EmbeddedServer` does.

    Attributes:
        servers: All servers, in a fixed order; each has `kill`, `pause`, `resume` and `restart`. Empty before the
            start, and after the end.
    """

    servers: tuple[EmbeddedServer, ...] = ()

    @abstractmethod
    async def _start(self) -> None:
        """Start all servers, and return when they know each other."""

    def stop(self) -> None:
        """Kill all servers and remove their directories; no-op if there are none."""
        for server in self.servers:
            server.stop()
        self.servers = ()

    async def call(self, server: EmbeddedServer, *words: Any) -> Any:
        """Run a command on one server, by a connection of its own, and return the reply."""
        async with server.client() as client:
            plain: Any = client
            return await plain.execute_command(*words)

    def __enter__(self) -> Self:
        """Start all servers; RuntimeError where an event loop runs: use ``async with`` there."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:  # and leave the thread's loop alone
                runner.run(self.__aenter__())
            return self
        raise RuntimeError(f"an event loop is running: use `async with {type(self).__name__}(...)`")

    async def __aenter__(self) -> Self:
        """Start all servers."""
        if self.servers:
            raise RuntimeError(f"this {type(self).__name__} is started already")
        try:
            await self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    async def __aexit__(self, *exc_info: object) -> None:
        self.stop()


class IndependentServers(Topology):
    """Servers that know nothing of each other, for a Redlock.

    Args:
        count: How many.
        args: Further options of each server.
        persistent: As of `EmbeddedServer`.

    Example:
        ```python
        from redis_sync_aio import AsyncRedlock
        from redis_sync_aio.testing.servers import IndependentServers

        async with IndependentServers(5) as group:
            clients = group.clients()
            group.servers[0].kill()
            async with AsyncRedlock(clients, "orders:42"):
                ...  # four of five are a majority
        ```
    """

    def __init__(self, count: int = 5, *, args: Iterable[str] = (), persistent: bool = False) -> None:
        self._count, self._args = arguments.count(count, "count", 1), arguments.words(args, "args")
        self._persistent = arguments.require_bool(persistent, "persistent")

    def clients(self, **kwargs: object) -> list[Redis]:
        """Return a new client of each server; options are those of `redis.asyncio.Redis`."""
        return [server.client(**kwargs) for server in self.servers]

    async def _start(self) -> None:
        self.servers: tuple[EmbeddedServer, ...] = tuple(
            EmbeddedServer(port=0, args=self._args, persistent=self._persistent) for _ in range(self._count)
        )
        await start_all(self.servers)


async def start_all(servers: Iterable[EmbeddedServer]) -> None:
    """Start servers at the same time; the caller stops those that run if one does not start."""
    try:
        async with asyncio.TaskGroup() as group:
            for server in servers:
                group.create_task(server.__aenter__())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def text(answer: object) -> str:
    """Return a reply as text."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)


async def link_is_up(replica: EmbeddedServer) -> bool:
    """Return whether a replica follows its primary."""
    async with replica.client() as client:
        return bool((await client.info("replication")).get("master_link_status") == "up")


async def has_what(primary: EmbeddedServer, replica: EmbeddedServer) -> bool:
    """Return whether a replica has what its primary has."""
    async with primary.client() as client, replica.client() as copy:
        wanted = (await client.info("replication"))["master_repl_offset"]
        return bool((await copy.info("replication")).get("slave_repl_offset", 0) >= wanted)


QUICKLY: Final = ("--repl-diskless-sync-delay", "0")
ATTEMPTS: Final = 5
PEER: Final = "group_peer"
"""User of the sentinels and of replicas, which loses its rights in a partition; clients are other users."""


class SentinelServer(EmbeddedServer):
    """A sentinel whose configuration says who is who, so that it has nothing to discover."""

    def __init__(self, port: HeldPort, lines: Iterable[str]) -> None:
        super().__init__(port=port.number, args=["--sentinel"])
        self._held = port
        self._lines = tuple(lines)

    def _program(self, data: Path) -> list[str]:
        configuration = data / "sentinel.conf"  # which the sentinel goes on writing
        if not configuration.exists():
            configuration.write_text("\n".join(self._lines) + "\n")
        return [*super()._program(data), str(configuration)]


class PrimaryClient(Redis):
    """A client of the present primary, with connections to the sentinels of its own."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close the topology, and the clients that ask the sentinels."""
        await super().aclose(close_connection_pool)
        pool: Any = self.connection_pool
        for one in pool.sentinel_manager.sentinels:
            await one.aclose()


class SentinelTopology(Topology):
    """A primary, a replica and sentinels: a highly available Redis. It starts in a second.

    Args:
        sentinels: The number of sentinels. More than half of them decide.
        group: The name of the primary at the sentinels.
        down_after: Seconds of silence after which the primary counts as dead. Less than one is too short for a busy
            machine.
        args: Further options of the primary and the replica.

    Attributes:
        primary: The primary as it was at the start.
        replica: The replica as it was at the start.

    Example:
        ```python
        from redis_sync_aio import Coordinator
        from redis_sync_aio.testing.servers import SentinelTopology

        async with SentinelTopology() as group, group.client() as client, Coordinator(client) as sync:
            async with sync.lock("orders:42"):
                await group.fail_over()
        ```
    """

    primary: EmbeddedServer
    replica: EmbeddedServer

    def __init__(
        self, sentinels: int = 3, *, group: str = "main", down_after: float = 1.0, args: Iterable[str] = ()
    ) -> None:
        self._count, self._password = arguments.count(sentinels, "sentinels", 1), secrets.token_hex(16)
        self._down_after = arguments.positive_seconds(down_after, "down_after")
        peer = "--user", PEER, "on", f">{self._password}", "~*", "&*", "+@all"
        self._args = (
            *QUICKLY,
            *peer,
            "--masteruser",
            PEER,
            "--masterauth",
            self._password,
            *arguments.words(args, "args"),
        )
        self.group: str = arguments.require_text(group, "group")

    @property
    def sentinels(self) -> tuple[EmbeddedServer, ...]:
        """The sentinels, as servers."""
        return self.servers[2:]

    @property
    def ports(self) -> list[int]:
        """The ports of the sentinels, at 127.0.0.1."""
        return [sentinel.port or 0 for sentinel in self.sentinels]

    def client(self, **options: Any) -> Redis:
        """Return a new client of the primary, whichever server that is; options are those of `master_for`."""
        sentinel: Any = Sentinel([(self.primary.host, port) for port in self.ports])  # type: ignore[no-untyped-call]
        client: Redis = sentinel.master_for(self.group, redis_class=PrimaryClient, **options)
        return client

    async def replicated(self) -> None:
        """Wait until the replica has all that was written to the primary so far."""
        await wait_until(lambda: has_what(self.primary, self.replica), SOON, timeout=PATIENCE)

    async def cut_replication(self) -> None:
        """Pause the replica and drop its connection: the primary keeps running, and its writes are not replicated.

        Kill the primary and `resume` the replica, and all that was written meanwhile is lost.
        """
        self.replica.pause()
        await self.call(self.primary, "CLIENT", "KILL", "TYPE", "replica")

    async def partition(self, primary: EmbeddedServer | None = None) -> None:
        """Cut a primary (default: `primary`) off from the sentinels and its replica, while clients still reach it.

        `promoted` waits until the others have another primary. Clients that are connected stay: both primaries take
        writes, unless the servers have ``min-replicas-to-write``.
        """
        parted = primary or self.primary
        await self.call(parted, "ACL", "SETUSER", PEER, "resetkeys", "resetchannels", "-@all")
        await self.call(parted, "CLIENT", "KILL", "USER", PEER)

    async def heal(self, primary: EmbeddedServer | None = None) -> None:
        """End a partition. If there is another primary, this one becomes its replica within about ten seconds."""
        await self.call(primary or self.primary, "ACL", "SETUSER", PEER, "~*", "&*", "+@all")

    async def fail_over(self) -> EmbeddedServer:
        """Let the sentinels make the replica the primary, as planned: nothing is lost. Return the replica.

        The old primary takes writes for about eight seconds more, from clients that still ask it.
        """
        await self.replicated()
        await self.call(self.sentinels[0], "SENTINEL", "FAILOVER", self.group)
        return await self.promoted()

    async def promoted(self, *, any_sentinel: bool = False) -> EmbeddedServer:
        """Wait until the first sentinel (or any) names the replica as the primary; return the replica."""

        async def named() -> bool:
            asked = self.sentinels if any_sentinel else self.sentinels[:1]
            return any([int((await self._primary_at(one))[1]) == self.replica.port for one in asked])

        await wait_until(named, SOON, timeout=PATIENCE)
        return self.replica

    async def _primary_at(self, sentinel: EmbeddedServer) -> Any:
        return await self.call(sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.group)

    # -- the start -------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self.servers = tuple(EmbeddedServer(port=0, args=self._args) for _ in range(2))
        self.primary, self.replica = self.servers
        await start_all(self.servers)
        async with self.replica.client() as client:
            await client.replicaof(self.primary.host, str(self.primary.port))
        await wait_until(lambda: link_is_up(self.replica), SOON, timeout=PATIENCE)
        await self._start_sentinels()
        for one in self.sentinels:
            await wait_until(lambda one=one: self._agrees(one), SOON, timeout=PATIENCE)  # type: ignore[misc]

    async def _start_sentinels(self) -> None:
        # Each has to know the ports of the others before it starts, so they are chosen here, and others may be faster.
        for attempt in range(1, ATTEMPTS + 1):
            ports = hold_ports(self._count)
            ids = [secrets.token_hex(20) for _ in ports]
            by_id = {own: port.number for own, port in zip(ids, ports, strict=True)}
            made = (SentinelServer(port, self._configuration(own, by_id)) for own, port in zip(ids, ports, strict=True))
            self.servers: tuple[EmbeddedServer, ...] = self.primary, self.replica, *made
            try:
                return await start_all(self.sentinels)
            except ServerNotStarted as error:
                for one in self.sentinels:
                    one.stop()
                if attempt == ATTEMPTS or "Address already in use" not in str(error):
                    raise

    def _configuration(self, own: str, ports: dict[str, int]) -> list[str]:
        host, group = self.primary.host, self.group
        lines = [
            f"sentinel myid {own}",
            f"sentinel monitor {group} {host} {self.primary.port} {self._count // 2 + 1}",
            f"sentinel down-after-milliseconds {group} {self._down_after * 1000:.0f}",
            f"sentinel failover-timeout {group} 10000",
            f"sentinel auth-user {group} {PEER}",
            f"sentinel auth-pass {group} {self._password}",
            f"sentinel known-replica {group} {host} {self.replica.port}",
        ]
        return lines + [
            f"sentinel known-sentinel {group} {host} {port} {of}" for of, port in ports.items() if of != own
        ]

    async def _agrees(self, sentinel: EmbeddedServer) -> bool:
        """Return whether a sentinel sees the others, the primary and the replica."""
        found = await self.call(sentinel, "SENTINEL", "MASTER", self.group)
        known = found if isinstance(found, dict) else dict(zip(found[::2], found[1::2], strict=True))
        about = {text(key): text(value) for key, value in known.items()}
        others = int(about["num-other-sentinels"]) == self._count - 1 and int(about["num-slaves"]) == 1
        return others and "disconnected" not in about["flags"]


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
        ids: The id of each node.

    Example:
        ```python
        from redis_sync_aio import Coordinator
        from redis_sync_aio.testing.servers import ClusterTopology

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
        self.ids: dict[EmbeddedServer, str] = {}

    @property
    def primaries(self) -> tuple[EmbeddedServer, ...]:
        """The primaries as they were at the start, in the order of the shards."""
        return self.servers[: self._shards]

    @property
    def replicas(self) -> tuple[EmbeddedServer, ...]:
        """The replicas of the primaries, in the same order."""
        return self.servers[self._shards :]

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
        count = self._shards * (1 + self._with_replicas)
        self.servers: tuple[EmbeddedServer, ...] = tuple(EmbeddedServer(port=0, args=options) for _ in range(count))
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
