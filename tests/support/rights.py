"""Users with few rights: those that docs/operations/servers.md gives, and tenants of one prefix of a shared server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from redis_sync_aio import AsyncReadWriteLock, AsyncSemaphore, Coordinator, LeaseLost, wait_until
from redis_sync_aio.types import BaseLease

from .inside import permit_keys
from .served import ORDERS
from .wired import SOON

KEYS = "~orders:* ~{orders:*"
CHANNELS = "resetchannels &rsa:*"
LOCKS = "+get +set +del +pttl +pexpire +time +zadd +zrem +zrange +zscore +zcard"  # what the scripts use
SHARDED_TOO = "+ssubscribe +spublish"  # of a cluster
PERMITS_TOO = "+hmget +hget +hset +hdel +zrangebyscore +zremrangebyrank"
PREFIX = "app1:"
OF_A_TENANT = (
    *("-@all", "+evalsha", "+eval", "+subscribe", "+publish", "+get", "+set", "+del", "+pttl", "+pexpire", "+time"),
    *("+zadd", "+zrem", "+zrange", "+zscore", "+zcard", "+hmget", "+hget", "+hset", "+hdel", "+zrangebyscore"),
    *("+zremrangebyrank", "+watch", "+unwatch", "+multi", "+exec", "+zmscore", "+exists", "+incrby"),
    *("+pubsub|numsub", "+scan", "+command", "+cluster|slots"),
)
TENANT = ("reset", "on", ">secret", f"~{PREFIX}*", "resetchannels", f"&{PREFIX}*", *OF_A_TENANT)
CREDENTIALS = {"username": "tenant", "password": "secret"}


async def every_permit(admin: Any, *syncs: Coordinator, scripts: bool = True) -> None:
    """All that semaphores and, by ``scripts``, read/write locks do, and what they do when their keys were evicted."""
    for sync in syncs:
        semaphore = AsyncSemaphore(sync, ORDERS, limit=1)
        async with semaphore.acquire(timeout=2) as lease:
            await lease.extend(20)
            await _hand_over(lease, semaphore.acquire(timeout=2), partial(_queued, semaphore))
        await semaphore.resize(2)
        assert await semaphore.get_limit() == 2
        for lost in permit_keys(ORDERS.encode(), "sem").all[:2]:
            heavy = await semaphore.acquire(weight=2, timeout=2)
            await admin.delete(lost)
            await (await semaphore.acquire(timeout=2)).release()
            with pytest.raises(LeaseLost):
                await heavy.release()

        if not scripts:
            continue
        both = AsyncReadWriteLock(sync, ORDERS)
        async with both.read().acquire(timeout=2) as reader:
            await reader.extend(20)
            await _hand_over(reader, both.write().acquire(timeout=2), partial(_queued, both))
        writer = await both.write().acquire(timeout=2)
        await both.downgrade(writer)
        await writer.release()


PAGE = Path(__file__).parents[2] / "docs" / "operations" / "servers.md"


async def _queued(primitive: AsyncSemaphore | AsyncReadWriteLock) -> bool:
    return (await primitive.statistics()).waiting > 0


async def _hand_over(lease: BaseLease, acquire: Any, queued: Callable[[], Awaitable[bool]]) -> None:
    waiting: asyncio.Task[BaseLease] = asyncio.create_task(acquire)

    async def reached() -> bool:
        return waiting.done() or await queued()

    try:
        await wait_until(reached, SOON, timeout=15)
        await lease.release()
        await (await waiting).release()
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
