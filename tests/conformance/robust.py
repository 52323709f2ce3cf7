"""Robust locks for tests."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncRobustLock, Coordinator
from redis_sync_aio.types import Abandoned, BaseLease

from ..support.inside import robust_keys

NAME = "robust"
KEYS = robust_keys(NAME.encode())
RECORD = KEYS.record


# The other ways differ in decoding only, and nothing here is decoded.
@pytest.fixture(params=["link", "polling", "cluster"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lock(sync: Coordinator) -> AsyncRobustLock:
    return AsyncRobustLock(sync, NAME)


async def crash(redis: Redis, lease: BaseLease) -> None:
    """To everybody but its holder the lease is over, as if its process was gone for longer than the ttl."""
    assert await redis.delete(lease.name) == 1
    lease._grant.manager.forget(lease._grant)  # and its holder never hears of it


def is_of(abandoned: Abandoned | None, lease: BaseLease) -> bool:
    return abandoned is not None and (abandoned.token, abandoned.fence) == (lease.token, lease.fence)
