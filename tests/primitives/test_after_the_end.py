"""P5, P12: what is asked of leases and objects when their coordinator is closed, or its tasks were cancelled."""

from __future__ import annotations

import asyncio
import time

import pytest
from redis import Redis as SyncRedis
from redis.asyncio import Redis

from redis_sync_aio import AsyncSemaphore, Coordinator, FenceGate, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed

from ..support.body import FAST
from ..support.clusters import Nodes
from ..support.inside import Call, hub_module, hub_of, lock_keys, now
from ..support.wired import MODES, wired
from ..support.wired import quiet_loop as quiet_loop


@pytest.mark.parametrize("mode", MODES)
async def test_a_lease_whose_release_failed(server: EmbeddedServer, mode: str) -> None:
    """It may be released again until it ends; behind the end of its coordinator that is told, and does not hang."""
    async with wired(server, mode, retry_for=0.3) as w:
        lease = await w.lock(ttl=10).acquire()
        w.proxy.refuse = True
        await w.proxy.cut()
        with pytest.raises(Unreachable):
            await lease.release()
        lease.check()
        await w.sync.aclose()
        for use in (lease.release, lambda: lease.extend(5), lease.release):
            with pytest.raises(CoordinatorClosed):
                await asyncio.wait_for(use(), 15)
        await w.direct.delete(w.name)


async def test_a_call_behind_the_end_in_a_cluster(nodes: Nodes) -> None:
    """It opens no connection to a shard that nobody was connected to."""
    async with nodes.client() as client:
        sync = Coordinator(client)
        async with sync.lock(nodes.name_at(0)):
            pass
        await sync.aclose()
        over = asyncio.get_running_loop().create_future()
        sent = now()
        keys = lock_keys(nodes.name_at(1).encode())
        hub_of(sync).commands.acquire(
            keys, b"late", Call(sent, sent + 20, over.set_result), ttl_ms=9, ticket=b"", poll_ms=0, more=(0,)
        )
        assert not over.done()  # not before `send` has returned
        call: Call = await asyncio.wait_for(over, 15)
        assert isinstance(call.error, CoordinatorClosed)
        assert sync.connections == 1


def test_a_closing_that_was_cancelled_is_finished(server: EmbeddedServer) -> None:
    """`asyncio.run` cancels it, too, while it waits for what is in flight."""

    async def main() -> None:
        async with server.client() as direct:
            sync = Coordinator(server.client())
            lease = await sync.lock("closing").acquire()
            await direct.execute_command("CLIENT", "PAUSE", 500, "WRITE")  # type: ignore[no-untyped-call]
            releasing = asyncio.create_task(lease.release())
            await asyncio.sleep(0)
            closing = asyncio.create_task(sync.aclose())
            await asyncio.sleep(0.05)
            assert not releasing.done()
            assert not closing.done()

    asyncio.run(main())
    with SyncRedis.from_url(server.url) as client:
        assert not client.exists("closing")
        until = now() + 10
        while len(client.client_list()) > 1:  # the server may hear late of those that were closed
            assert now() < until
            time.sleep(0.01)


async def test_what_is_only_asked_is_no_idleness(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """P12: gates and statistics use a connection as well."""
    monkeypatch.setattr(hub_module, "IDLE", 0.05)
    gate = FenceGate(redis, "only asked")
    first = hub_of(redis)
    for fence in range(1, 31):
        await gate.accept(fence)
        assert hub_of(redis) is first, fence
        await asyncio.sleep(0.01)


async def test_a_cancelled_resize_is_heard_of(server: EmbeddedServer) -> None:
    """P5: the server has the new limit, so this object does, too."""
    async with wired(server) as w:
        semaphore = AsyncSemaphore(w.sync, "resized", limit=2)
        async with semaphore:
            pass
        resizing = asyncio.create_task(semaphore.resize(3))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        resizing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resizing

        async def heard() -> bool:
            return semaphore.limit == 3

        await wait_until(heard, FAST, timeout=5)
        async with semaphore.acquire(timeout=5):
            assert (await semaphore.statistics()).limit == 3
