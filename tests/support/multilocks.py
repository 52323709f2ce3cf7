"""Multi-locks for the tests of conformance."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from redis_sync_aio import AsyncLock, AsyncMultiLock

from .views import holder_of

SLOTS: dict[str, tuple[str, ...]] = {
    "one slot": ("{m}:1", "{m}:2", "{m}:3"),  # one script
    "three slots": ("m:1", "m:2", "m:3"),  # a command for each
}


@pytest.fixture(params=["link", "polling", "cluster"])
def way(request: pytest.FixtureRequest) -> str:
    """What differs here is whether a waiter is woken, and whether one script takes all."""
    return str(request.param)


@pytest.fixture(params=SLOTS)
def names(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Three names, in the order in which they are acquired."""
    return SLOTS[request.param]


def queued(lock: AsyncLock, count: int = 1) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        return (await lock.statistics()).waiting == count

    return condition


async def holders(lock: AsyncMultiLock) -> list[str | None]:
    return [holder_of(one) for one in await lock.statistics()]


async def all_free(lock: AsyncMultiLock) -> bool:
    """Nobody holds any of them, nobody waits."""
    return all((holder_of(one), one.waiting) == (None, 0) for one in await lock.statistics())
