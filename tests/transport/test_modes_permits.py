"""However a client is configured, its semaphores and read/write locks work alike (E3)."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncReadWriteLock, AsyncSemaphore, Coordinator, NotHeld, wait_until

from ..conftest import MakeClient
from ..support.body import FAST, waits
from ..support.connecting import NAME, wire_of
from ..support.connecting import client as client
from ..support.connecting import source as source
from ..support.inside import permit_keys, text
from ..support.views import readers_of, tokens, writer_of


async def permits_work(source: Redis | Coordinator, client: Redis, observer: Redis) -> None:
    """A semaphore and a read/write lock: acquire, contend, hand over, look, downgrade, resize, release by identity."""
    name, identity = wire_of(client, NAME), wire_of(client, "\u00e9mile")
    semaphore, both = AsyncSemaphore(source, NAME, limit=2, ttl=20), AsyncReadWriteLock(source, NAME, ttl=20)
    sem, rw = permit_keys(name, "sem"), permit_keys(name, "rw")
    lease = await semaphore.acquire(weight=2, timeout=5)
    assert await observer.zrange(sem.all[0], 0, -1) == [lease._grant.wire_token]
    assert await semaphore.try_acquire() is None
    waiting = asyncio.create_task(semaphore.acquire(timeout=20, identity="\u00e9mile"))
    await wait_until(waits(semaphore), FAST, timeout=15)
    seen = await semaphore.statistics()
    assert (seen.limit, seen.held, seen.available, seen.waiting) == (2, 2, 0, 1)
    assert tokens(seen.waiters) == (text(identity),)
    assert [(holder.token, holder.weight, holder.fence) for holder in seen.holders] == [(lease.token, 2, lease.fence)]
    await lease.release()
    async with asyncio.timeout(5):
        named = await waiting
    assert named.fence > lease.fence
    assert identity in await observer.zrange(sem.all[0], 0, -1)
    await semaphore.resize(1)
    assert await semaphore.get_limit() == 1
    with pytest.raises(NotHeld):
        await semaphore.release(identity="somebody")
    await semaphore.release(identity="\u00e9mile")

    reader, other = await both.read().acquire(timeout=5), await both.read().acquire(timeout=5)
    writing = asyncio.create_task(both.write().acquire(timeout=20))
    await wait_until(waits(both), FAST, timeout=15)
    await other.release()
    seen_too = await both.statistics()
    assert (writer_of(seen_too), readers_of(seen_too), seen_too.waiting) == (None, 1, 1)
    await reader.release()
    async with asyncio.timeout(5):
        later = await writing
    assert later.fence > reader.fence
    await both.downgrade(later)
    assert tokens((await both.statistics()).holders) == (later.token,)
    await later.release()
    assert not await both.locked()
    assert not await semaphore.locked()
    assert set(await observer.keys()) <= {*sem.all, *rw.all}


async def test_e3_every_mode_works_alike_for_permits(
    source: Redis | Coordinator, client: Redis, make_client: MakeClient
) -> None:
    observer = make_client(db=client.connection_pool.connection_kwargs.get("db", 0))
    await permits_work(source, client, observer)
