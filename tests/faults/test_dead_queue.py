"""Very many waiters that died together: no script drops more than 500 of their tickets, and a request gets its turn."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncSemaphore, Coordinator

from ..support.inside import lock_keys, permit_keys

DEAD = 1200
"""More tickets than two scripts drop."""


@pytest.mark.parametrize("kind", ["lock", "semaphore"])
async def test_p2_a_script_drops_at_most_500_of_the_dead(kind: str, redis: Redis, sync: Coordinator) -> None:
    """The server serves others between two of them, and a request that waits is granted when all are gone."""
    primitive: AsyncLock | AsyncSemaphore
    if kind == "lock":
        primitive, queue = AsyncLock(sync, "x", ttl=10), lock_keys(b"x").queue
    else:
        primitive, queue = AsyncSemaphore(sync, "x", 1, ttl=10), permit_keys(b"x", "sem").all[2]
    async with primitive:
        await redis.zadd(queue, {f"rsa:dead|{number}|5000|1|token{number}": number for number in range(1, DEAD + 1)})
    assert await redis.zcard(queue) == DEAD - 500
    assert await primitive.try_acquire() is None
    assert await redis.zcard(queue) == DEAD - 1000
    async with primitive.acquire(timeout=10):
        assert await redis.zcard(queue) == 0
