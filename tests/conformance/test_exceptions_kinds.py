"""P7 for the primitives that stand on locks: the table of test_exceptions.py, over their holds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncMultiLock, AsyncRedlock, AsyncReentrantLock, Coordinator, wait_until
from redis_sync_aio.types import BaseLease

from ..support.body import FAST
from ..support.factories import LockKind
from ..support.inside import OnLost
from ..support.one_server import one_server_for_all as one_server_for_all
from . import test_exceptions as suite


class Nested:
    """A reentrant lock whose body is inside another body of the same task."""

    def __init__(self, sync: Coordinator, on_lost: OnLost) -> None:
        self._lock = AsyncReentrantLock(sync, suite.NAME, on_lost=on_lost)

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[BaseLease]:
        async with self._lock.acquire(), self._lock.acquire() as inner:
            yield inner


Build: TypeAlias = Callable[[Coordinator, OnLost], object]

KINDS: dict[str, Build] = {
    "reentrant": lambda sync, on_lost: AsyncReentrantLock(sync, suite.NAME, on_lost=on_lost),
    "nested": Nested,
    "multi": lambda sync, on_lost: AsyncMultiLock(sync, ["other-1", suite.NAME, "other-2"], on_lost=on_lost),
    "redlock": lambda sync, on_lost: AsyncRedlock([sync], suite.NAME, on_lost=on_lost),
    "multi in one slot": lambda sync, on_lost: AsyncMultiLock(
        sync, [f"{{{suite.NAME}}}:other", suite.NAME], on_lost=on_lost
    ),
}


@dataclass(frozen=True)
class StandsOnLocks(LockKind):
    """One of those, in the place of the lock that it stands on."""

    build: Build | None = None

    def make(self, sync: Coordinator | Redis, name: str | bytes, **options: Any) -> AsyncLock:
        assert name == suite.NAME
        assert self.build is not None
        assert isinstance(sync, Coordinator)
        return cast(AsyncLock, self.build(sync, options["on_lost"]))


@pytest.mark.parametrize("way", ["link"], indirect=True)
@pytest.mark.parametrize("outer", suite.OUTERS, ids=suite.named)
@pytest.mark.parametrize("lease", suite.LEASES)
@pytest.mark.parametrize("body", suite.BODIES, ids=suite.named)
@pytest.mark.parametrize("stands", KINDS)
async def test_p7(
    sync: Coordinator, redis: Redis, stands: str, body: suite.Body, lease: str, outer: suite.Outer
) -> None:
    """P7: the right exception leaves, bare, with the rest as a note, and the task is as it should be afterwards."""
    await suite.test_p7(StandsOnLocks(stands, "", "taken", build=KINDS[stands]), sync, redis, body, lease, outer)

    async def others_are_free() -> bool:
        return await redis.exists("other-1", "other-2", f"{{{suite.NAME}}}:other") == 0

    await wait_until(others_are_free, FAST, timeout=5)  # a loss gives them back in the background
