"""A server of a test's own, and coordinators on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, Coordinator, Lease, wait_until
from redis_sync_aio.embedded import EmbeddedServer

from .inside import tuned
from .views import holder_of
from .wired import MODES, RESPONSE_TIMEOUT, SOON

NAME = "served"
modes = pytest.mark.parametrize("mode", ["link", "plain"])


@dataclass
class Served:
    """A server of our own, the coordinator under test (its client is called "ours"), and others."""

    server: EmbeddedServer
    admin: Redis
    client: Redis
    sync: Coordinator
    other: Coordinator

    def lock(self, **options: Any) -> AsyncLock:
        return AsyncLock(self.sync, NAME, **options)

    def elsewhere(self, **options: Any) -> AsyncLock:
        return AsyncLock(self.other, NAME, **options)

    async def queued(self, number: int = 1) -> None:
        async def enough() -> bool:
            return (await self.elsewhere().statistics()).waiting >= number

        await wait_until(enough, SOON, timeout=15)

    async def ours(self) -> list[str]:
        """Return the ids of our connections."""
        found = await self.admin.client_list()
        return [one["id"] for one in found if one["name"] == "ours" or one["user"] == "someone"]

    async def kill_ours(self) -> None:
        for one in await self.ours():
            await self.admin.client_kill_filter(_id=one)

    async def reconnected(self, opened: int) -> None:
        await wait_until(lambda: self.sync.connections > opened, SOON, timeout=15)

    async def check_held(self, lease: Lease) -> None:
        lease.check()
        assert await self.admin.get(NAME) == lease.token.encode()

    async def check_free(self, last: int) -> None:
        found = await self.elsewhere().statistics()
        assert (holder_of(found), found.waiting) == (None, 0), f"left behind: {found}"
        lease = await self.elsewhere().try_acquire()
        assert lease is not None
        assert lease.fence > last
        await lease.release()


@asynccontextmanager
async def served(
    mode: str = "link",
    *,
    args: tuple[str, ...] = (),
    persistent: bool = False,
    client: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    timeouts: dict[str, Any] = {"socket_timeout": RESPONSE_TIMEOUT, "socket_connect_timeout": RESPONSE_TIMEOUT}
    client_options, coordinator_options = MODES[mode]
    limits: dict[str, Any] = {"response_timeout": RESPONSE_TIMEOUT, "retry_for": 3}
    async with (
        EmbeddedServer(port=0, args=args, persistent=persistent) as server,
        server.client() as admin,
        server.client(**(timeouts | client_options | {"client_name": "ours"} | (client or {}))) as ours,
        Coordinator(admin) as other,
        tuned(ours, **(limits | coordinator_options | options)) as sync,
    ):
        yield Served(server, admin, ours, sync, other)


ORDERS = "orders:42"


async def user(s: Served, *rules: str) -> None:
    """Create the user of our client, or change its rights."""
    await say(s.admin, "ACL SETUSER someone", *rules)


@asynccontextmanager
async def served_to(*rules: str, mode: str = "link", **options: Any) -> AsyncIterator[Served]:
    async with served() as s:
        await user(s, "reset on >secret", *rules)
        client_options, coordinator_options = MODES[mode]
        limits: dict[str, Any] = {"retry_for": 2}
        async with (
            s.server.client(username="someone", password="secret", **client_options) as client,
            tuned(client, **(limits | coordinator_options | options)) as sync,
        ):
            yield Served(s.server, s.admin, client, sync, s.other)


async def everything(*syncs: Coordinator) -> None:
    """All that a lock does: acquire, extend, wait, hand over, look, release."""
    for sync in syncs:
        lock = AsyncLock(sync, ORDERS)
        async with lock.acquire(timeout=2) as lease:
            await lease.extend(20)
            waiting = asyncio.create_task(lock.acquire(timeout=2))
            try:
                await wait_until(lambda: _waits(lock, waiting), SOON, timeout=15)  # noqa: B023  (called immediately)
                await lease.release()
                await (await waiting).release()
            finally:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)


async def say(client: Any, *words: str) -> Any:
    """Send a command, written in words."""
    return await client.execute_command(*" ".join(words).split())


async def _waits(lock: AsyncLock, waiting: asyncio.Task[Lease]) -> bool:
    return waiting.done() or (await lock.statistics()).waiting > 0
