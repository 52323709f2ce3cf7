"""The base of groups of servers: they start and stop together, by ``with`` or ``async with``."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Final, Self

from redis.asyncio import Redis

from .._core import arguments
from .._core.backoff import Backoff
from ..embedded import EmbeddedServer

SOON: Final = Backoff(initial=0.01, cap=0.05)
"""The pauses between two checks of servers that are about to change their state."""
PATIENCE: Final = 60.0
"""Seconds that such a change takes at most, on any machine: afterwards it is an error."""


class Topology(ABC):
    """Several servers that belong together. They die with the process that started them, as `EmbeddedServer` does."""

    @property
    @abstractmethod
    def servers(self) -> tuple[EmbeddedServer, ...]:
        """All servers, in a fixed order; each has `kill`, `pause`, `resume` and `restart`."""

    @abstractmethod
    async def _start(self) -> None:
        """Start all servers, and return when they know each other."""

    @abstractmethod
    def _forget(self) -> None:
        """Be as before the start. The servers are stopped."""

    def stop(self) -> None:
        """Kill all servers and remove their directories; no-op if there are none."""
        for server in self.servers:
            server.stop()
        self._forget()

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
        from redis_sync_aio.testing import IndependentServers

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
        self._servers: tuple[EmbeddedServer, ...] = ()

    @property
    def servers(self) -> tuple[EmbeddedServer, ...]:
        """All servers; each has `kill`, `pause`, `resume` and `restart`."""
        return self._servers

    def clients(self, **kwargs: object) -> list[Redis]:
        """Return a new client of each server; options are those of `redis.asyncio.Redis`."""
        return [server.client(**kwargs) for server in self._servers]

    async def _start(self) -> None:
        self._servers = tuple(
            EmbeddedServer(port=0, args=self._args, persistent=self._persistent) for _ in range(self._count)
        )
        await start_all(self._servers)

    def _forget(self) -> None:
        self._servers = ()


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
