"""P12, FAULTS A9: loops that are closed without a word, clients that live for one request, children that go on."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis as SyncRedis
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncMultiLock, AsyncReentrantLock, AsyncSemaphore, Coordinator, LeaseLost
from redis_sync_aio.embedded import EmbeddedServer

from ..conftest import MakeClient
from ..support.inside import close_implicit, hubs

pytestmark = pytest.mark.real


def connections(server: EmbeddedServer) -> int:
    with SyncRedis.from_url(server.url) as client:
        return len(client.client_list())


# Of transports and connections whose loop nobody ended.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_p12_a_loop_that_is_closed_by_hand_leaves_nothing_for_long() -> None:
    """Its connection and its places in the pool go when the client's lock is used again."""
    with EmbeddedServer() as server:
        _many_loops(server)
    gc.collect()


def _many_loops(server: EmbeddedServer) -> None:
    client: Any = Redis.from_url(server.url, max_connections=20)
    lock = AsyncLock(client, "job", ttl=5)

    async def job() -> None:
        async with lock:
            pass

    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(30):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(job())
        loop.close()  # no shutdown_asyncgens()
        del loop
    gc.collect()
    assert connections(server) <= 4
    pool = client.connection_pool
    assert pool.max_connections == 20
    assert len(pool._in_use_connections) == 0
    if before:
        assert len(os.listdir("/proc/self/fd")) < before + 10

    async def close() -> None:
        async with lock:
            pass
        await client.aclose()

    asyncio.run(close())
    assert len(pool._in_use_connections) == 0
    assert pool.max_connections == 20


async def test_p12_a_client_for_each_request_is_freed_with_it(redis: Redis, make_client: MakeClient) -> None:
    """Not only when it would have been idle for long enough."""
    loop: Any = asyncio.get_running_loop()

    def later() -> int:
        """Return how many timers there are that would keep something for a while."""
        return sum(not it.cancelled() and it.when() > loop.time() + 1 for it in loop._scheduled)

    before, timers = len(hubs), later()
    for number in range(20):
        client = make_client()
        async with AsyncLock(client, f"name{number}"):
            assert len(hubs) == before + 1
        await client.aclose()
    async with asyncio.timeout(5):
        while len(hubs) > before:
            await asyncio.sleep(0.01)
    assert later() <= timers


async def test_p12_the_end_of_a_coordinator_does_not_make_the_next_one_forgotten(redis: Redis) -> None:
    """It ends in the background while the client is used again: that use's coordinator stays the client's."""
    lock, loop = AsyncLock(redis, "again"), asyncio.get_running_loop()
    async with lock:
        pass
    first = hubs[id(redis), id(loop)]
    first.closing.begin("for a test")
    async with lock:
        second = hubs[id(redis), id(loop)]
    await close_implicit(first)
    assert second is not first
    assert hubs[id(redis), id(loop)] is second


def test_a_forked_child_may_close_the_parents_client(server: EmbeddedServer) -> None:
    """It goes on with it, closes it, and does not touch the parent's connection."""

    async def child(client: Redis) -> int:
        async with AsyncLock(client, "child's"):
            pass
        await client.aclose()
        return 0

    async def parent() -> None:
        client: Any = Redis.from_url(server.url)
        async with AsyncLock(client, "parent's", ttl=5) as lease:
            pid = os.fork()
            if pid == 0:
                os._exit(_run_in_child(client, child))
            _, status = await asyncio.to_thread(os.waitpid, pid, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            await lease.extend(5)
        await client.aclose()

    asyncio.run(parent())


def _run_in_child(client: Redis, child: Any) -> int:
    try:
        asyncio.events._set_running_loop(None)  # as multiprocessing does
        return int(asyncio.new_event_loop().run_until_complete(child(client)))
    except BaseException as error:
        print("child:", repr(error), flush=True)
        return 1


async def test_a_body_that_ends_another_lease_of_its_identity_is_cancelled(redis: Redis) -> None:
    """P7: by its inner body the task itself released what the outer one holds, too."""
    lock = AsyncLock(redis, "twice")
    hold = lock.acquire(identity="me")
    went_on = False
    with pytest.raises(LeaseLost):  # noqa: PT012
        async with hold:
            inner = await lock.acquire(identity="me")
            await inner.release()
            await asyncio.sleep(5)
            went_on = True
    assert not went_on
    assert hold._grant is not None
    assert hold._grant.is_lost()


Makes: dict[str, Callable[[Coordinator], Any]] = {
    "lock": lambda sync: AsyncLock(sync, "gone", ttl=0.1),
    "shared lock": lambda sync: AsyncLock(sync, "gone", ttl=0.1, share=True),
    "reentrant lock": lambda sync: AsyncReentrantLock(sync, "gone", ttl=0.1),
    "several locks": lambda sync: AsyncMultiLock(sync, ["gone", "too"], ttl=0.1),
    "semaphore": lambda sync: AsyncSemaphore(sync, "gone", limit=1, ttl=0.1),
}


@pytest.mark.parametrize("make", Makes.values(), ids=Makes)
async def test_a_body_that_is_told_of_its_loss_is_not_cancelled_as_well(
    sync: Coordinator, make: Callable[[Coordinator], Any]
) -> None:
    """P7: by LeaseLost of its own release, after the loop stood still; what it tidies up then is not cut."""
    tidied_up = False
    with pytest.raises(LeaseLost):  # noqa: PT012
        async with make(sync) as lease:
            time.sleep(0.15)  # noqa: ASYNC251
            with pytest.raises(LeaseLost):
                await lease.release()
            await asyncio.sleep(0.02)
            tidied_up = True
    assert tidied_up
