"""P5, P12: a Coordinator that is dropped without aclose() is noticed, and leaves no connection behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from redis import Redis as SyncRedis
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncSemaphore, Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import Push

from ..conftest import MakeClient
from ..support.body import FAST, waits
from ..support.inside import INBOX_PREFIX, hub_module, hubs
from ..support.topologies import Nodes

pytestmark = pytest.mark.real
DROPPED = "was dropped without aclose()"


class Caught(list[warnings.WarningMessage]):
    """Warnings."""

    @property
    def dropped(self) -> int:
        """How many say that a coordinator was dropped."""
        gc.collect()
        found = [it for it in self if DROPPED in str(it.message)]
        assert all(it.category is ResourceWarning for it in found)
        return len(found)

    async def until(self, number: int) -> None:
        await wait_until(lambda: self.dropped == number, FAST, timeout=10)


@contextmanager
def caught() -> Iterator[Caught]:
    found = Caught()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *args, **options: found.append(warnings.WarningMessage(*args, **options))
        yield found
        gc.collect()


NAMED = "dropped"
"""The name of the clients whose connections are counted: others of the server may come and go."""


def there(server: EmbeddedServer) -> int:
    """Return how many connections of that name the server has."""
    with SyncRedis.from_url(server.url) as admin:
        clients: Any = admin.client_list()
        return sum(one["name"] == NAMED for one in clients)


async def use(client: Any, **options: Any) -> None:
    """As a request handler does that makes a coordinator for itself, and does not close it."""
    coordinator = Coordinator(client, **options)
    async with coordinator.lock("a"), AsyncSemaphore(coordinator, "s", limit=1):
        pass


@pytest.mark.parametrize("push", ["auto", "never"])
async def test_many_that_are_dropped(
    server: EmbeddedServer, make_client: MakeClient, caplog: pytest.LogCaptureFixture, push: Push
) -> None:
    """Each is warned of, all connections are closed, and the caller's client works as before."""
    client: Any = make_client(max_connections=100, client_name=NAMED)
    await client.ping()
    before = there(server)
    with caught() as warned, caplog.at_level(logging.WARNING, "redis_sync_aio"):
        for _ in range(10):
            await use(client, push=push)
        await warned.until(10)
        await wait_until(lambda: there(server) <= before, FAST, timeout=10)
    assert sum(DROPPED in record.getMessage() for record in caplog.records) == 10
    assert client.connection_pool.max_connections == 100
    assert await client.ping()
    async with AsyncLock(client, "a"):
        pass


@pytest.mark.parametrize("how", ["closed", "closed, polling", "its client was closed", "implicit and idle"])
async def test_one_that_was_closed_is_not_warned_of(
    redis: Redis, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(hub_module, "IDLE", 0.05)
    client = make_client()
    with caught() as warned:
        if how == "implicit and idle":
            async with AsyncLock(client, "a"):
                assert hubs
            await wait_until(lambda: not hubs, FAST, timeout=15)
        else:
            made = [Coordinator(client, push="never" if "polling" in how else "auto")]
            async with made[0].lock("a"):
                pass
            if how == "its client was closed":
                await client.aclose()
                await wait_until(lambda: made[0].why_closed is not None, FAST, timeout=15)
            await made[0].aclose()
            made.clear()
        assert warned.dropped == 0


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_an_implicit_one_that_is_closing_is_kept_until_the_program_ends(server: EmbeddedServer, turns: int) -> None:
    """It closes with its client. The end of the program cancels that, and garbage is collected before it goes on."""

    def collect(loop: asyncio.AbstractEventLoop, more: int) -> None:
        gc.collect()
        if more:  # in the next turn, too, whatever runs the loop then
            loop.call_soon(collect, loop, more - 1)

    async def main() -> None:
        client = Redis.from_url(server.url)
        async with AsyncLock(client, "a"):
            pass
        await client.aclose()
        del client
        for _ in range(turns):
            await asyncio.sleep(0)
        collect(asyncio.get_running_loop(), 20)
        raise SystemExit

    with caught() as warned:
        with pytest.raises(SystemExit):
            asyncio.run(main())
        assert warned.dropped == 0


async def a_lease(source: Redis, other: Coordinator) -> AsyncIterator[None]:
    """It is renewed, and released, also when nothing else refers to its coordinator."""
    lease = await Coordinator(source).lock("a", ttl=3).acquire()
    yield
    await wait_until(lambda: lease.remaining() < 2.4, FAST, timeout=15)
    await wait_until(lambda: lease.remaining() > 2.4 or lease.lost, FAST, timeout=15)
    yield
    await lease.release()


async def a_waiter(source: Redis, other: Coordinator) -> AsyncIterator[None]:
    async def wait() -> None:
        await (await Coordinator(source).lock("a").acquire()).release()

    async with other.lock("a"):
        waiting = asyncio.create_task(wait())
        await wait_until(waits(other.lock("a")), FAST, timeout=15)
        yield
    async with asyncio.timeout(15):
        await waiting


async def a_lock(source: Redis, other: Coordinator) -> AsyncIterator[None]:
    """Locks are made from it, and used later."""
    lock = Coordinator(source).lock("a")
    for _ in range(3):
        async with lock:
            pass
        yield


@pytest.mark.parametrize("keeper", [a_lease, a_waiter, a_lock])
async def test_what_keeps_one(
    redis: Redis, other: Coordinator, keeper: Callable[[Redis, Coordinator], AsyncIterator[None]]
) -> None:
    """Only after that it is dropped."""
    with caught() as warned:
        async for _ in keeper(redis, other):
            assert warned.dropped == 0
        await warned.until(1)
    assert not await redis.exists("a")


async def test_one_of_a_cluster(nodes: Nodes) -> None:
    """Its connections to all shards are closed."""

    def listening() -> int:
        found = 0
        for node in nodes.primaries:
            with SyncRedis.from_url(node.url) as admin:
                channels: Any = admin.pubsub_channels()
                found += sum(channel.startswith(INBOX_PREFIX) for channel in channels)
        return found

    async def spread() -> None:
        coordinator = Coordinator(client)
        for name in ("a", "b", "c", "d"):
            async with coordinator.lock(name):
                pass
        assert listening() == 2 * coordinator.connections > 2  # the inbox, and the channel that shows the process

    await wait_until(lambda: listening() == 0, FAST, timeout=15)  # what tests before this one have closed
    async with nodes.client() as client:
        with caught() as warned:
            await spread()
            await warned.until(1)
            await wait_until(lambda: listening() == 0, FAST, timeout=10)


@pytest.mark.parametrize("own_client", [False, True])
def test_the_end_of_the_loop_closes_it(server: EmbeddedServer, own_client: bool) -> None:
    """And the client, if it was made for an address: as `aclose` does. redis-py would warn of its connection."""
    kept: list[Coordinator] = []

    async def main() -> None:
        if own_client:
            kept.append(Coordinator.from_url(server.url))
            await kept[0].client.ping()
        else:
            async with Redis.from_url(server.url) as client:
                kept.append(Coordinator(client))
                async with kept[0].lock("a"):
                    pass
                return
        async with kept[0].lock("a"):
            pass

    with caught() as warned:
        gc.disable()
        try:
            asyncio.run(main())
        finally:
            gc.enable()
        assert kept[0].why_closed is not None
        kept.clear()
        gc.collect()
        assert [str(it.message) for it in warned] == []


def test_one_whose_loop_was_closed_by_hand(server: EmbeddedServer) -> None:
    """Its connection is closed all the same, without the loop."""
    client = Redis.from_url(server.url, client_name=NAMED)
    with caught() as warned:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(use(client))
        loop.close()
        assert warned.dropped == 1
        assert there(server) == 0


@pytest.mark.parametrize("stopped", [False, True], ids=["running loop", "stopped loop"])
def test_all_connections_of_one_from_an_address(server: EmbeddedServer, stopped: bool) -> None:
    """Its link is closed, also if its loop never runs again; and so is its client, if that loop runs."""

    async def use_both() -> None:
        coordinator = Coordinator.from_url(server.url, client_options={"client_name": NAMED})
        async with coordinator.lock("a"):
            await coordinator.client.ping()

    async def main() -> None:
        await use_both()
        assert there(server) == 2
        await warned.until(1)
        await wait_until(lambda: there(server) == 0, FAST, timeout=10)

    loop = asyncio.new_event_loop()
    client = Redis.from_url(server.url, client_name=NAMED)
    try:
        with caught() as warned:
            if stopped:
                gc.disable()  # else it may be collected while the loop runs
                loop.run_until_complete(use(client))
                while not warned.dropped:  # its timers keep it for a moment
                    loop.run_until_complete(asyncio.sleep(0.05))
                assert there(server) == 0
                for _ in range(5):  # it reads the end of the connection, and closes the transport
                    loop.run_until_complete(asyncio.sleep(0))
            else:
                loop.run_until_complete(main())
            assert [it for it in warned if DROPPED not in str(it.message)] == []
    finally:
        gc.enable()
        loop.close()


async def test_one_that_is_collected_in_another_thread(server: EmbeddedServer, make_client: MakeClient) -> None:
    """Its connection is closed in its loop."""
    client = make_client(client_name=NAMED)
    await client.ping()
    before = there(server)
    with caught() as warned:
        gc.disable()
        try:
            await use(client)
            assert there(server) == before + 1
            async with asyncio.timeout(10):
                while not any(DROPPED in str(it.message) for it in warned):
                    await asyncio.to_thread(gc.collect)
        finally:
            gc.enable()
        await wait_until(lambda: there(server) == before, FAST, timeout=10)
