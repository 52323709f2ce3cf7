"""A primary and its replica that sentinels watch."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.sentinel import Sentinel

from .._core import arguments
from .._core.backoff import wait_until
from ..embedded import EmbeddedServer, HeldPort, ServerNotStarted, hold_ports
from ._topology import PATIENCE, SOON, Topology, has_what, link_is_up, start_all

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
        """Close it, and what it asks the sentinels with."""
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
        sentinels: The sentinels, as servers.

    Example:
        ```python
        from redis_sync_aio import Coordinator
        from redis_sync_aio.testing import SentinelTopology

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
        self._forget()

    def _forget(self) -> None:
        self._servers: tuple[EmbeddedServer, ...] = ()
        self.sentinels: tuple[EmbeddedServer, ...] = ()

    @property
    def servers(self) -> tuple[EmbeddedServer, ...]:
        """The primary, the replica and the sentinels; each has `kill`, `pause`, `resume` and `restart`."""
        return *self._servers, *self.sentinels

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
        """Pause the replica and drop its connection: the primary goes on, and what it writes now is not replicated.

        Kill the primary and `resume` the replica, and all that was written meanwhile is lost.
        """
        self.replica.pause()
        await self.call(self.primary, "CLIENT", "KILL", "TYPE", "replica")

    async def partition(self, primary: EmbeddedServer | None = None) -> None:
        """Cut a primary (default: `primary`) off from the sentinels and its replica, while clients still reach it.

        The others hear nothing from it and get nothing of what it writes from now on. `promoted` waits until they have
        another primary. Clients that are connected stay where they are: both primaries take writes, unless the servers
        have ``min-replicas-to-write``, as a group that has locks should.
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
        self.primary, self.replica = self._servers = (
            EmbeddedServer(port=0, args=self._args),
            EmbeddedServer(port=0, args=self._args),
        )
        await start_all(self._servers)
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
            self.sentinels = tuple(
                SentinelServer(port, self._configuration(own, by_id)) for port, own in zip(ports, ids, strict=True)
            )
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
        about = {_word(key): _word(value) for key, value in known.items()}
        others = int(about["num-other-sentinels"]) == self._count - 1 and int(about["num-slaves"]) == 1
        return others and "disconnected" not in about["flags"]


def _word(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
