"""P4, P5: the connection is lost with a request in flight, and the next one is refused: the waiters poll from then on.

What the request may have done under its first token is undone, or its owner would wait for itself, for a whole ttl.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncMultiLock, AsyncReentrantLock, Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer

from ..support.body import FAST, waits
from ..support.inside import load
from ..support.proxy import CUT_AFTER, ERROR, FaultProxy, script
from ..support.views import tokens

NAME = "{fall}:1"
LOCKS: dict[str, Callable[[Coordinator], AsyncLock | AsyncReentrantLock | AsyncMultiLock]] = {
    "lock": lambda sync: AsyncLock(sync, NAME),
    "reentrant": lambda sync: AsyncReentrantLock(sync, NAME),
    "multi": lambda sync: AsyncMultiLock(sync, [NAME, "{fall}:2"]),
    "multi of several slots": lambda sync: AsyncMultiLock(sync, [NAME, "other"]),
}


@pytest_asyncio.fixture
async def proxy(server: EmbeddedServer, redis: Redis) -> AsyncIterator[FaultProxy]:
    assert server.port is not None
    async with FaultProxy((server.host, server.port)) as running:
        yield running


@pytest_asyncio.fixture
async def sync(proxy: FaultProxy) -> AsyncIterator[Coordinator]:
    async with (
        Redis(host=proxy.host, port=proxy.port) as client,
        Coordinator(client, response_timeout=1) as coordinator,
    ):
        yield coordinator


def no_more_pushes(proxy: FaultProxy) -> None:
    proxy.on("SUBSCRIBE", ERROR("NOPERM this user has no permissions to run the 'subscribe' command"), times=None)


@pytest.mark.parametrize("kind", LOCKS)
@pytest.mark.parametrize("timeout", [0, 5])
async def test_p4_granted_and_the_answer_lost(proxy: FaultProxy, sync: Coordinator, kind: str, timeout: float) -> None:
    lock = LOCKS[kind](sync)
    await (await lock.acquire()).release()
    for name in ("lock/acquire", "lock/acquire_all"):
        proxy.on(script(load(name).sha), CUT_AFTER)
    no_more_pushes(proxy)
    lease = await lock.acquire(timeout=timeout)
    lease.check()
    await lease.release()
    assert not await lock.locked()


async def test_p2_queued_and_the_connection_lost(proxy: FaultProxy, sync: Coordinator, redis: Redis) -> None:
    """The ticket of the lost connection does not stay behind."""
    lock = AsyncLock(sync, NAME)
    async with Coordinator(redis) as other:
        rival = AsyncLock(other, NAME)
        holder = await rival.acquire()
        waiting = asyncio.create_task(lock.acquire(timeout=10))
        await wait_until(waits(rival), FAST, timeout=15)
        (before,) = tokens((await rival.statistics()).waiters)
        no_more_pushes(proxy)
        await proxy.cut()

        async def queued_anew() -> bool:
            waiters = tokens((await rival.statistics()).waiters)
            return len(waiters) == 1 and waiters[0] != before

        await wait_until(queued_anew, FAST, timeout=15)
        await holder.release()
        await (await waiting).release()
        assert not await rival.locked()
