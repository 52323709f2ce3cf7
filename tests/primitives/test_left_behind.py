"""P5, P12: what nobody has any more is kept neither at the server nor in the process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncMultiLock, AsyncReadWriteLock, AsyncSemaphore, Coordinator, LeaseLost
from redis_sync_aio.embedded import EmbeddedServer

from ..conftest import MakeClient
from ..support.inside import Engine, hub_of
from ..support.proxy import CUT_BEFORE, HOLD
from ..support.wired import RELEASE, RENEW, wired
from ..support.wired import quiet_loop as quiet_loop

NAME = "left"


def closing() -> bool:
    return any(task.get_name() == "redis_sync_aio close" for task in asyncio.all_tasks())


@pytest.mark.parametrize("engine", ["lua", "watch"])
@pytest.mark.parametrize("paused", [False, True])
async def test_p5_a_release_under_way_when_the_client_is_closed(
    make_client: MakeClient, redis: Redis, engine: Engine, paused: bool
) -> None:
    """It goes on, although nothing else is held that would be given back."""
    client: Any = make_client()
    sync = Coordinator(client, exit_timeout=15)
    lease = await AsyncLock(sync, NAME, engine=engine).acquire()
    admin: Any = redis
    if paused:
        await admin.execute_command("CLIENT", "PAUSE", "200", "WRITE")
    releasing = asyncio.create_task(lease.release())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await client.aclose()
    async with asyncio.timeout(15):
        await releasing
    assert not await redis.exists(NAME)
    await sync.aclose()


async def test_p5_a_cancelled_request_when_the_client_is_closed(make_client: MakeClient, redis: Redis) -> None:
    """Whatever it was about."""
    for turns in range(12):
        client = make_client()
        acquiring = asyncio.create_task(AsyncLock(client, NAME, engine="watch").acquire())
        for _ in range(turns):
            await asyncio.sleep(0.0005)
        acquiring.cancel()
        await asyncio.gather(acquiring, return_exceptions=True)
        await client.aclose()
        if not acquiring.cancelled():
            await redis.delete(NAME)
        async with asyncio.timeout(15):
            while await redis.exists(NAME) or closing():
                await asyncio.sleep(0.005)


async def test_p5_a_release_behind_a_renewal_that_was_answered(server: EmbeddedServer) -> None:
    """The server was told to keep it for longer than the first deadline, at which the release is given up."""
    async with wired(server, claim=2.0) as w:  # less than the release is repeated for
        holder = await w.elsewhere().acquire()
        waiting = asyncio.create_task(w.lock(ttl=30).acquire())
        await w.queued()
        renewal = w.proxy.on(RENEW, HOLD)
        release = w.proxy.on(RELEASE, HOLD)
        await holder.release()
        lease = await waiting
        assert lease.remaining() < 10, "for less than the whole ttl at first"
        await asyncio.wait_for(renewal.fired.wait(), 15)
        outage = w.proxy.on("HELLO", CUT_BEFORE, times=None)
        releasing = asyncio.create_task(lease.release())
        await asyncio.sleep(0)
        renewal.release.set()
        await asyncio.wait_for(release.fired.wait(), 15)
        await asyncio.sleep(0.01)  # the renewal is answered
        await w.proxy.cut()
        with pytest.raises(LeaseLost):
            await releasing
        outage.cancel()
        async with asyncio.timeout(5), w.elsewhere() as again:
            assert again.fence > lease.fence


async def test_p12_names_that_were_taken_are_forgotten(sync: Coordinator, other: Coordinator) -> None:
    async with AsyncLock(other, "a"), AsyncLock(other, "b"):
        for names in (["a"], ["x", "b"], ["{t}x", "{t}y", "a"]):
            assert await AsyncMultiLock(sync, names).try_acquire() is None
            with pytest.raises(TimeoutError):
                await AsyncMultiLock(sync, names).acquire(timeout=0)
    async with asyncio.timeout(15):
        while hub_of(sync).resources:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("engine", ["lua", "watch"])
async def test_p12_tickets_of_an_identity_that_holds_already(
    redis: Redis, other: Coordinator, make_client: MakeClient, engine: Engine
) -> None:
    """Several poll by one identity; those who find that it has the lock leave the queue, and what keeps them alive."""
    options: dict[str, Any] = {"engine": engine}
    async with Coordinator(make_client(), push="never") as polling:
        for make, queue in (
            (lambda sync: AsyncLock(sync, NAME, **options), f"{{{NAME}}}:"),
            (lambda sync: AsyncSemaphore(sync, NAME, limit=1, **options), f"{{{NAME}}}:sem:"),
            (lambda sync: AsyncReadWriteLock(sync, NAME).write(), f"{{{NAME}}}:rw:"),
        ):
            held = await make(other).acquire()
            waiting = [asyncio.create_task(make(polling).acquire(identity="w")) for _ in range(3)]
            async with asyncio.timeout(15):
                while await redis.zcard(f"{queue}queue") < 3:
                    await asyncio.sleep(0.001)
            await held.release()
            leases = await asyncio.gather(*waiting)
            await leases[0].release()
            assert await redis.exists(f"{queue}queue", f"{queue}polls") == 0
