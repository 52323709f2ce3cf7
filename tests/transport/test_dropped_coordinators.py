"""P5, P12: a Coordinator that is dropped without aclose() is noticed, and leaves no connection behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import warnings
from collections.abc import Iterator
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
from ..support.clusters import Nodes
from ..support.inside import INBOX_PREFIX, hub_module, hubs

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


async def connections(redis: Redis) -> int:
    return sum(one["name"] == NAMED for one in await redis.client_list())


async def use(client: Any, **options: Any) -> None:
    """As a request handler does that makes a coordinator for itself, and does not close it."""
    coordinator = Coordinator(client, **options)
    async with coordinator.lock("a"), AsyncSemaphore(coordinator, "s", limit=1):
        pass


async def test_thirty_that_are_dropped(redis: Redis, make_client: MakeClient, caplog: pytest.LogCaptureFixture) -> None:
    """Each is warned of, all connections are closed, and the caller's client goes on as it was."""
    client: Any = make_client(max_connections=100, client_name=NAMED)
    await client.ping()
    before = await connections(redis)
    with caught() as warned, caplog.at_level(logging.WARNING, "redis_sync_aio"):
        for _ in range(30):
            await use(client)
        await warned.until(30)

        async def closed() -> bool:
            return await connections(redis) == before

        await wait_until(closed, FAST, timeout=10)
    assert sum(DROPPED in record.getMessage() for record in caplog.records) == 30
    assert client.connection_pool.max_connections == 100
    assert await client.ping()
    async with AsyncLock(client, "a"):
        pass


@pytest.mark.parametrize("push", ["auto", "never"])
async def test_one_that_is_closed_is_not_warned_of(redis: Redis, push: Push) -> None:
    """Whatever closes it: itself, or the client."""
    with caught() as warned:
        for _ in range(3):
            async with Coordinator(redis, push=push) as coordinator, coordinator.lock("a"):
                pass
        del coordinator  # pyright: ignore[reportPossiblyUnboundVariable]
        assert warned.dropped == 0
        await use(redis, push=push)
        await warned.until(1)


async def test_one_whose_client_was_closed_is_not_warned_of(make_client: MakeClient) -> None:
    client = make_client()
    with caught() as warned:
        closed = [Coordinator(client)]
        async with closed[0].lock("a"):
            pass
        await client.aclose()
        await wait_until(lambda: closed[0].why_closed is not None, FAST, timeout=15)
        await closed[0].aclose()
        closed.clear()
        assert warned.dropped == 0


async def test_an_implicit_one_is_not_warned_of(
    redis: Redis, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes when it is idle, or with its client."""
    monkeypatch.setattr(hub_module, "IDLE", 0.05)
    with caught() as warned:
        async with AsyncLock(make_client(), "a"):
            assert hubs
        await wait_until(lambda: not hubs, FAST, timeout=15)
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


async def test_what_is_held_keeps_it(redis: Redis) -> None:
    """A lease is renewed and released also when nothing else refers to its coordinator; only then it is dropped."""
    with caught() as warned:
        lease = await Coordinator(redis).lock("a", ttl=6).acquire()
        first = lease._grant.deadline
        assert warned.dropped == 0
        async with asyncio.timeout(60):
            while lease._grant.deadline == first:  # it is renewed after a third of that
                await asyncio.sleep(0.01)
        assert warned.dropped == 0
        await lease.release()
        del lease
        await warned.until(1)
    assert not await redis.exists("a")


async def test_a_waiter_keeps_its_coordinator(redis: Redis, other: Coordinator) -> None:
    async def wait() -> None:
        await (await Coordinator(redis).lock("a").acquire()).release()

    with caught() as warned:
        async with other.lock("a"):
            waiting = asyncio.create_task(wait())
            await wait_until(waits(other.lock("a")), FAST, timeout=15)
            assert warned.dropped == 0
        async with asyncio.timeout(15):
            await waiting
        del waiting
        await warned.until(1)


async def test_a_lock_keeps_it(redis: Redis) -> None:
    """Locks are made from it, and used later."""
    with caught() as warned:
        lock = Coordinator(redis).lock("a")
        for _ in range(3):
            async with lock:
                pass
            assert warned.dropped == 0
        del lock
        await warned.until(1)


async def test_one_of_a_cluster(nodes: Nodes) -> None:
    """Its connections to all shards are closed."""

    def there() -> int:
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
        assert there() == 2 * coordinator.connections > 2  # the inbox, and the channel that shows the process

    await wait_until(lambda: there() == 0, FAST, timeout=15)  # what tests before this one have closed
    async with nodes.client() as client:
        with caught() as warned:
            await spread()
            await warned.until(1)
            await wait_until(lambda: there() == 0, FAST, timeout=10)


def test_the_end_of_the_loop_closes_it(server: EmbeddedServer) -> None:
    """As it ends what else was started in it; nobody has to be told."""

    async def main() -> None:
        async with Redis.from_url(server.url) as client:
            kept.append(Coordinator(client))
            await use(client)
            async with kept[0].lock("a"):
                pass

    kept: list[Coordinator] = []
    with caught() as warned:
        gc.disable()
        try:
            asyncio.run(main())
        finally:
            gc.enable()
        assert kept[0].why_closed is not None
        kept.clear()
        assert warned.dropped == 0


def test_one_whose_loop_was_closed_by_hand(server: EmbeddedServer) -> None:
    """Its connection is closed all the same, without the loop."""
    client = Redis.from_url(server.url, client_name=NAMED)
    with SyncRedis.from_url(server.url) as admin:

        def there() -> int:
            found: Any = admin.client_list()
            return sum(one["name"] == NAMED for one in found)

        with caught() as warned:
            loop = asyncio.new_event_loop()
            loop.run_until_complete(use(client))
            loop.close()
            assert warned.dropped == 1
            assert there() == 0


@pytest.mark.parametrize("stopped", [False, True], ids=["running loop", "stopped loop"])
def test_all_connections_of_one_from_an_address(server: EmbeddedServer, stopped: bool) -> None:
    """Its link is closed, also if its loop never runs again; and so is its client, if that loop runs."""

    async def use_both() -> None:
        coordinator = Coordinator.from_url(server.url, client_options={"client_name": NAMED})
        async with coordinator.lock("a"):
            await coordinator.client.ping()

    with SyncRedis.from_url(server.url) as admin:

        def there() -> int:
            found: Any = admin.client_list()
            return sum(one["name"] == NAMED for one in found)

        async def main() -> None:
            await use_both()
            assert there() == 2
            await warned.until(1)
            await wait_until(lambda: there() == 0, FAST, timeout=10)

        loop = asyncio.new_event_loop()
        client = Redis.from_url(server.url, client_name=NAMED)
        try:
            with caught() as warned:
                if stopped:
                    gc.disable()  # else it may be collected while the loop runs
                    loop.run_until_complete(use(client))
                    while not warned.dropped:  # its timers keep it for a moment
                        loop.run_until_complete(asyncio.sleep(0.05))
                    assert there() == 0
                    for _ in range(5):  # it reads the end of the connection, and closes the transport
                        loop.run_until_complete(asyncio.sleep(0))
                else:
                    loop.run_until_complete(main())
                assert [it for it in warned if DROPPED not in str(it.message)] == []
        finally:
            gc.enable()
            loop.close()


def test_the_end_of_the_loop_closes_the_client_of_one_from_an_address(server: EmbeddedServer) -> None:
    """As `aclose` does. redis-py would warn of its connection."""

    async def main() -> None:
        kept.append(Coordinator.from_url(server.url))
        async with kept[0].lock("a"):
            await kept[0].client.ping()

    kept: list[Coordinator] = []
    with caught() as warned:
        asyncio.run(main())
        kept.clear()
        gc.collect()
        assert [str(it.message) for it in warned] == []


async def test_one_that_is_collected_in_another_thread(redis: Redis, make_client: MakeClient) -> None:
    """Its connection is closed in its loop."""
    client = make_client(client_name=NAMED)
    await client.ping()
    before = await connections(redis)
    with caught() as warned:
        gc.disable()
        try:
            await use(client)
            assert await connections(redis) == before + 1
            async with asyncio.timeout(10):
                while not any(DROPPED in str(it.message) for it in warned):
                    await asyncio.to_thread(gc.collect)
        finally:
            gc.enable()

        async def closed() -> bool:
            return await connections(redis) == before

        await wait_until(closed, FAST, timeout=10)
