"""P12: implicit coordinators: one for each client, closed when idle or with the loop, nothing left pending."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed

from ..support.body import FAST, waits
from ..support.contexts import connections, nothing_left, observer, our_tasks, same
from ..support.factories import Kind, holder
from ..support.inside import close_implicit, hub_module, hub_of, hubs

__all__ = ["nothing_left", "observer"]  # fixtures

NAME = "life"


async def test_p12_one_implicit_coordinator_for_each_client(kind: Kind, redis: Redis, observer: Redis) -> None:
    """P9: all locks of a client share one connection, next to the client's pool; another client has its own."""
    await wait_until(lambda: same(connections(observer), 1), FAST, timeout=5)  # the client's; others may end late
    locks = [kind.make(redis, f"{NAME}{n}") for n in range(5)]
    leases = await asyncio.gather(*(lock.acquire() for lock in locks))
    assert await connections(observer) == 2
    for lease in leases:
        await lease.release()
    assert hub_of(redis) is locks[0]._hub
    await close_implicit(redis)
    await wait_until(lambda: same(connections(observer), 1), FAST, timeout=5)


async def test_p12_an_idle_implicit_coordinator_closes(
    kind: Kind, redis: Redis, observer: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: it closes its connection when nothing was used for IDLE, not before, and starts again when needed."""
    monkeypatch.setattr(hub_module, "IDLE", 0.05)
    lock = kind.make(redis, NAME)
    for _ in range(2):
        lease = await lock.acquire()
        first = hub_of(redis)
        await asyncio.sleep(0.15)
        lease.check()
        assert hub_of(redis) is first  # held: not idle
        await lease.release()
        await wait_until(lambda: not hubs, FAST, timeout=5)
        await wait_until(lambda: same(connections(observer), 1), FAST, timeout=5)  # the client's own
        await wait_until(lambda: our_tasks() == [], FAST, timeout=5)
        with pytest.raises(CoordinatorClosed):
            first.check()


async def test_p12_an_implicit_coordinator_in_use_does_not_close(
    kind: Kind, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: short uses in quick succession, and statistics(), keep it; never does a use meet the closing."""
    monkeypatch.setattr(hub_module, "IDLE", 0.01)
    lock = kind.make(redis, NAME)
    for pause in (0, 0.004, 0.009, 0.01, 0.011, 0.02) * 5:
        async with lock:
            pass
        await asyncio.sleep(pause)
        assert await holder(lock) is None
        await asyncio.sleep(pause)
    await wait_until(lambda: not hubs, FAST, timeout=5)
    await wait_until(lambda: our_tasks() == [], FAST, timeout=5)


@pytest.mark.parametrize("ends", ["idle", "held", "waiting"])
def test_p12_nothing_is_pending_when_the_loop_closes(
    kind: Kind, url: str, ends: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """P12: asyncio.run() with an implicit coordinator: the lock is released at the end, and nothing complains."""

    async def main() -> None:
        client = Redis.from_url(url)
        lock = kind.make(client, NAME)
        lease = await lock.acquire()
        if ends == "idle":
            await lease.release()
        elif ends == "waiting":
            task = asyncio.create_task(lock.acquire())
            await wait_until(waits(lock), FAST, timeout=5)
            assert not task.done()
        if ends != "held":
            await client.aclose(close_connection_pool=False)

    async def look() -> bool:
        async with Redis.from_url(url) as client:
            return await kind.empty(client, NAME)

    with suppress(CoordinatorClosed):
        asyncio.run(main())
    gc.collect()
    assert asyncio.run(look())
    assert capfd.readouterr().err == ""


@pytest_asyncio.fixture
async def url(redis: Redis, server: EmbeddedServer) -> AsyncIterator[str]:
    """The address of a server that is empty."""
    yield server.url


@pytest.mark.parametrize("timeout", [0, 0.1])
@pytest.mark.timing
async def test_p12_a_name_that_could_not_be_had_is_forgotten(
    kind: Kind, redis: Redis, sync: Coordinator, timeout: float
) -> None:
    """The coordinator is idle then, and closes."""
    held = await kind.make(sync, NAME).acquire()
    with pytest.raises(AcquireTimeout) as caught:
        await kind.make(redis, NAME).acquire(timeout=timeout)
    assert 0 < (caught.value.remaining or 0) <= 30
    coordinator = hub_of(redis)
    await wait_until(lambda: not (coordinator.resources or coordinator.acquisitions), FAST, timeout=5)
    await held.release()
