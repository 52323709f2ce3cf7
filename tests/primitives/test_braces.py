"""Names whose braces break a hash tag: a cluster refuses them, as it needs one slot for their keys."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis, RedisCluster

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncRobustLock,
    AsyncSemaphore,
    Coordinator,
    FenceGate,
    transaction,
    wait_until,
)
from redis_sync_aio.compat import Lock
from redis_sync_aio.inspection import inspect
from redis_sync_aio.types import Transaction

from ..support.body import FAST, waits

TORN = ("a}b", "a}", "}", "{}", "a}{b", "{}a")


@pytest.mark.parametrize("name", TORN)
async def test_one_server_takes_any_name(sync: Coordinator, other: Coordinator, name: str) -> None:
    """All primitives and both engines; what they leave behind is found under that name."""
    for engine in ("lua", "watch"):
        held = await sync.lock(name, engine=engine).acquire()
        waiting = asyncio.create_task(other.lock(name, engine=engine).acquire())
        await wait_until(waits(sync.lock(name)), FAST, timeout=30)
        assert [(it.name, it.waiting) for it in await inspect(other)] == [(name, 1)]
        assert [(it.name, it.waiting) for it in await inspect(other, name)] == [(name, 1)]
        await held.release()
        async with asyncio.timeout(30):
            await (await waiting).release()
    async with AsyncSemaphore(sync, name, limit=1), AsyncReadWriteLock(sync, name).write(), AsyncRobustLock(sync, name):
        assert {it.kind for it in await inspect(sync)} == {"robust", "semaphore", "read_write"}
    async with AsyncMultiLock(sync, [name, "a", "{a}"]) as several:
        await FenceGate(sync, name).accept(several.fences[name])


async def test_transactions_take_turns_on_any_key_of_one_server(redis: Redis, sync: Coordinator) -> None:
    async def write(tx: Transaction) -> None:
        await tx.get("a}b")
        tx.multi()
        tx.set("a}b", "1")

    await transaction(sync, write, "a}b", exactly_once=True)
    await transaction(sync, write, "a}b", escalate_after=1)
    assert await redis.get("a}b") == b"1"


@pytest.mark.parametrize("name", TORN)
async def test_a_cluster_refuses_them_before_anything_is_sent(name: str) -> None:
    client = RedisCluster(host="127.0.0.1", port=1)
    with pytest.raises(ValueError, match="braces"):
        AsyncLock(client, name)
    with pytest.raises(ValueError, match="braces"):
        AsyncSemaphore(client, name, limit=1)
    with pytest.raises(ValueError, match="braces"):
        FenceGate(Coordinator(client), name)
    with pytest.raises(ValueError, match="braces"):
        Lock(client, name)
    with pytest.raises(ValueError, match="braces"):
        await inspect(client, name)
    await client.aclose()
