"""The sentinels of `redis_sync_aio.testing`, and when things happen by the local clock.

async with sentinels() as group:
    async with group.client() as client:     # of the present primary
        group.primary.kill()
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from redis.asyncio.sentinel import Sentinel

from redis_sync_aio.testing.servers import SentinelTopology

from .inside import now

GROUP = "main"
DOWN_AFTER = 1.0
"""Seconds of silence after which a primary counts as dead, where it is to die."""
PATIENT = 600.0
"""The same where it is not: a busy machine is no death."""


class Group(SentinelTopology):
    """A primary, a replica and three sentinels."""

    @cached_property
    def sentinel(self) -> Any:
        """redis-py's class, which has no types."""
        return Sentinel([(self.primary.host, port) for port in self.ports])  # type: ignore[no-untyped-call]

    async def switched(self) -> float:
        """Return when (local clock) the first sentinel names the replica as the primary."""
        await self.promoted(any_sentinel=True)
        return now()

    async def planned(self) -> float:
        """Let Sentinel make the replica the primary, as planned; return when (local clock) clients are led to it."""
        await self.fail_over()
        return now()


@asynccontextmanager
async def sentinels(_: Path | None = None, down_after: float = PATIENT) -> AsyncIterator[Group]:
    """Start all five; they follow each other when this returns. A test that kills the primary passes `DOWN_AFTER`."""
    async with Group(group=GROUP, down_after=down_after) as group:
        try:
            yield group
        finally:
            for client in group.sentinel.sentinels:
                await client.aclose()
