"""A primary, a replica and three sentinels, all from the embedded server's executable.

    async with sentinels(directory) as group:
        async with group.client() as client:     # of the present primary
            group.primary.kill()

Who is who is written into the sentinels' configuration before they start, so nothing has to be discovered.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from redis.asyncio import Redis
from redis.asyncio.sentinel import Sentinel

from redis_sync_aio import Backoff, wait_until
from redis_sync_aio.embedded import EmbeddedServer, find_server

from .embedded import free_port
from .inside import now

GROUP = "main"
DOWN_AFTER = 1.0
"""Seconds of silence after which the primary counts as dead."""
QUICKLY = ("--repl-diskless-sync-delay", "0")
SOON = Backoff(initial=0.01, cap=0.05)


@dataclass
class Group:
    """See the top of this module."""

    primary: EmbeddedServer
    replica: EmbeddedServer
    sentinel: Any  # redis-py's; it has no types
    ports: list[int]  # of the sentinels

    def client(self) -> Redis:
        """Return a client of the primary, whichever that is."""
        client: Redis = self.sentinel.master_for(GROUP)
        return client

    async def replicated(self) -> None:
        """Return when the replica has all that was written to the primary so far."""
        async with self.primary.client() as client, self.replica.client() as copy:
            wanted = (await client.info("replication"))["master_repl_offset"]

            async def caught_up() -> bool:
                return bool((await copy.info("replication")).get("slave_repl_offset", 0) >= wanted)

            await wait_until(caught_up, SOON, timeout=10)

    async def switched(self) -> float:
        """Return when (local clock) the first sentinel names the replica as the primary."""

        async def named() -> bool:
            answers = [await one.sentinel_get_master_addr_by_name(GROUP) for one in self.sentinel.sentinels]
            return self.replica.port in [int(port) for _, port in answers]

        await wait_until(named, SOON, timeout=10)
        return now()

    async def fail_over(self) -> float:
        """Let Sentinel make the replica the primary, as planned; return when (local clock) clients are led to it.

        The old primary takes writes for about eight seconds more.
        """
        await self.replicated()
        await self.sentinel.sentinels[0].sentinel_failover(GROUP)

        async def named() -> bool:
            _, port = await self.sentinel.discover_master(GROUP)
            return bool(port == self.replica.port)

        await wait_until(named, SOON, timeout=10)
        return now()


@asynccontextmanager
async def sentinels(directory: Path) -> AsyncIterator[Group]:
    """Start all five; they follow each other when this returns."""
    async with AsyncExitStack() as stack:
        primary = await stack.enter_async_context(EmbeddedServer(port=0, args=QUICKLY))
        replica = await stack.enter_async_context(EmbeddedServer(port=0, args=QUICKLY))
        async with replica.client() as client:
            await client.replicaof(primary.host, primary.port)

            async def follows() -> bool:
                return bool((await client.info("replication"))["master_link_status"] == "up")

            await wait_until(follows, SOON, timeout=10)
        ports = [free_port() for _ in range(3)]
        ids = [secrets.token_hex(20) for _ in ports]
        for port, own in zip(ports, ids, strict=True):
            lines = [
                f"sentinel myid {own}",
                f"sentinel monitor {GROUP} {primary.host} {primary.port} 2",
                f"sentinel down-after-milliseconds {GROUP} {DOWN_AFTER * 1000:.0f}",
                f"sentinel failover-timeout {GROUP} 10000",
                f"sentinel known-replica {GROUP} {replica.host} {replica.port}",
            ]
            others = [(other, of) for other, of in zip(ports, ids, strict=True) if of != own]
            lines += [f"sentinel known-sentinel {GROUP} {primary.host} {other} {of}" for other, of in others]
            configuration, program = directory / f"{port}.conf", directory / f"{port}.sh"
            configuration.write_text("\n".join(lines) + "\n")
            program.write_text(f"#!/bin/sh\nexec '{find_server()}' '{configuration}' \"$@\" --sentinel\n")
            program.chmod(0o755)
            one = EmbeddedServer(port=port)
            with patch.dict(os.environ, REDIS_SYNC_AIO_SERVER=str(program)):
                one.start()
            stack.callback(one.stop)
        sentinel: Any = Sentinel([(primary.host, port) for port in ports])  # type: ignore[no-untyped-call]
        for client in sentinel.sentinels:
            stack.push_async_callback(client.aclose)

            async def agrees(client: Any = client) -> bool:
                found = (await client.sentinel_master(GROUP)) or {}
                return found["num-other-sentinels"] == 2 and found["num-slaves"] == 1 and not found["is_disconnected"]

            await wait_until(agrees, SOON, timeout=10)
        yield Group(primary, replica, sentinel, ports)
