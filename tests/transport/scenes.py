"""Scenes that tests play in processes of their own: they fork, leave locks held, run loop after loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import pytest
from redis import Redis as SyncRedis
from redis.asyncio import Redis, RedisCluster

from redis_sync_aio import AcquireTimeout, AsyncLock, Coordinator, Lease, LeaseLost, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import WrongContext
from redis_sync_aio.types import Client

from ..support.body import FAST, for_ever, waits
from ..support.inside import tuned
from ..support.views import holder_of

NAME = "scene"
FORKS = {"os._exit": 6, "sys.exit": 3}  # the latter ends a whole interpreter each time
Use = Callable[[], Awaitable[object]]


def look(server: EmbeddedServer, name: str = NAME) -> object:
    """Return the holder, from outside."""
    with SyncRedis.from_url(server.url) as client:
        return client.get(name)


def made_of(client: Client, how: str) -> Coordinator | Client:
    """Return what locks are made from."""
    asyncio.get_running_loop().slow_callback_duration = 60  # not what is tested
    return client if "bare" in how else Coordinator(client, push="never" if "polling" in how else "auto")


@asynccontextmanager
async def source(url: str, how: str) -> AsyncIterator[Coordinator | Client]:
    async with Redis.from_url(url) as client:
        yield made_of(client, how)  # closed by the end of the loop, if it is a coordinator


async def refused(use: Use) -> None:
    """It must raise WrongContext, and immediately."""
    begin = time.monotonic()
    with pytest.raises(WrongContext):
        await use()
    assert time.monotonic() - begin < 5, "it was tried again"


def without_its_log() -> None:
    """A child that runs on with the parent's loop may make it deaf, and a busy machine makes that an outage to log."""
    logging.getLogger("redis_sync_aio").setLevel(logging.CRITICAL)


def fork(url: str, how: str) -> None:
    without_its_log()
    asyncio.run(forking(url, how))


async def forking(url: str, how: str) -> None:
    """Nothing but the lock is entered by ``async with``: a child leaves through all of it with sys.exit."""
    # A child that runs on with the parent's loop may make it deaf for a connection, and that is noticed by timeout.
    client = (RedisCluster if "cluster" in how else Redis).from_url(url, socket_timeout=0.5, socket_connect_timeout=5)
    made_from = made_of(client, how)
    held = AsyncLock(made_from, NAME, ttl=6)
    async with held as lease:
        waiting = asyncio.create_task(held.acquire())
        working = asyncio.create_task(work(AsyncLock(made_from, "busy", ttl=9)))
        await wait_until(waits(held), FAST, timeout=15)
        for _ in range(FORKS[how.split()[-1]]):
            pid = os.fork()
            if pid == 0:
                await in_child(held, lease, how)
            await reap(pid)
            assert not working.done(), working
            lease.check()
            assert holder_of(await held.statistics()) == lease.token
        await wait_until(lambda: lease.remaining() < 4.5, FAST, timeout=15)
        await wait_until(lambda: lease.remaining() > 4.5 or lease.lost, FAST, timeout=15)  # it is renewed
        lease.check()
        assert (await held.statistics()).waiting == 1
    after = await asyncio.wait_for(waiting, 15)
    await after.release()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    if isinstance(made_from, Coordinator):
        await made_from.aclose()
    await client.aclose()
    print("done")


async def work(lock: AsyncLock) -> None:
    """Keep the connection busy, so that a child that reads from it breaks something."""
    while True:
        async with asyncio.timeout(60), lock:
            await asyncio.sleep(0)


async def reap(pid: int) -> None:
    async with asyncio.timeout(100):
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222
            if done:
                assert os.waitstatus_to_exitcode(status) == 0, status
                return
            await asyncio.sleep(0.001)


async def in_child(lock: AsyncLock, lease: Lease, how: str) -> NoReturn:
    for use in (lock.acquire, lock.statistics, lease.release, lambda: lease.extend(5)):
        await refused(use)
    asyncio.run(in_own_loop_of_child(lock, lease, how))
    if "sys.exit" in how:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the sockets of the parent were not closed: never mind
        sys.exit(0)
    os._exit(0)


async def in_own_loop_of_child(lock: AsyncLock, lease: Lease, how: str) -> None:
    asyncio.get_running_loop().slow_callback_duration = 60
    await refused(lease.release)
    await refused(lambda: lease.extend(5))
    if "bare" in how:  # a client makes a new connection in the child; the lock is the parent's
        assert await lock.try_acquire() is None
    else:
        await refused(lock.acquire)


def fork_while_it_connects(url: str, how: str) -> None:
    without_its_log()
    asyncio.run(forking_while_it_connects(url, int(how)))


async def forking_while_it_connects(url: str, step: int) -> None:
    """A child that runs on with the parent's loop goes on connecting where that was: it must not say a word."""
    asyncio.get_running_loop().slow_callback_duration = 60
    for turns in range(0, 24, step):
        client = Redis.from_url(url, socket_timeout=0.5, socket_connect_timeout=5)  # see above
        sync = Coordinator(client)
        lock = AsyncLock(sync, NAME, ttl=5)
        acquiring = asyncio.create_task(lock.acquire())
        for _ in range(turns):
            await asyncio.sleep(0)
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            sys.exit(0)
        await reap(pid)
        async with asyncio.timeout(60):  # no answer was taken away for good
            await (await acquiring).release()
            for _ in range(5):  # nor one added
                async with lock:
                    pass
        await sync.aclose()
        await client.aclose()
    print("done")


def run_twice(url: str, how: str) -> None:
    """The same objects in one loop after the other; the first leaves a lease and a waiter behind."""
    client = Redis.from_url(url)
    lock = AsyncLock(client, NAME, ttl=5)
    leases: list[Lease] = []

    async def once(leave: bool) -> None:
        asyncio.get_running_loop().slow_callback_duration = 60  # not what is tested
        async with lock as lease:
            lease.check()
        assert await lock.try_acquire(ttl=1) is not None
        with contextlib.suppress(AcquireTimeout):
            await lock.acquire(timeout=0.01)
        await lock.release()
        if leases:
            await refused(leases[-1].release)
        if leave:
            leases.append(await lock.acquire())
            asyncio.create_task(lock.acquire())
            await wait_until(waits(lock), FAST, timeout=15)
        else:
            await client.aclose()

    for leave in (True, True, True, False):
        asyncio.run(once(leave))
    print("done")


def ending(url: str, how: str) -> None:
    """End a loop, or all, while locks are held and waited for, and nothing is closed."""
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        asyncio.run(left_open(url, how))
    print("done")


async def left_open(url: str, how: str) -> None:
    client = Redis.from_url(url)
    made_from = made_of(client, how)
    lock = AsyncLock(made_from, NAME, ttl=5)
    entered = asyncio.Event()

    async def background() -> None:
        async with lock:
            entered.set()
            await for_ever()

    tasks: list[asyncio.Task[Any]] = []
    if "task" in how:
        tasks.append(asyncio.create_task(background()))
        await entered.wait()
    else:
        await lock.acquire()
    tasks.append(asyncio.create_task(lock.acquire()))
    await wait_until(waits(lock), FAST, timeout=15)
    tasks.append(asyncio.create_task(lock.statistics()))  # in flight when all tasks are cancelled
    await asyncio.sleep(0)
    if "interrupt" in how:
        raise KeyboardInterrupt
    if "sys.exit" in how:
        sys.exit(0)


def interpreter_ends(url: str, how: str) -> None:
    """The loop is never ended: the key stays for its ttl."""
    loop = asyncio.new_event_loop()
    loop.slow_callback_duration = 60  # not what is tested
    loop.run_until_complete(AsyncLock(Redis.from_url(url), NAME, ttl=60).acquire())
    print("done", flush=True)
    os._exit(0)


def whole_story(url: str, how: str) -> None:
    logged: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        logged.append(vars(record)["event"])
        return False

    logging.getLogger("redis_sync_aio").addFilter(note)
    if how == "uvloop":
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(story(url))
    else:
        asyncio.run(story(url))
    assert logged == ["lease_lost"], logged
    print("done")


async def story(url: str) -> None:
    """Acquire, contend, lose, extend, time out; cancel after any number of turns."""
    asyncio.get_running_loop().slow_callback_duration = 60  # not what is tested
    async with Redis.from_url(url) as client, Redis.from_url(url) as other:
        sync = tuned(client, poll_cap=300)  # a waiter hears of its turn, or times out
        lock = AsyncLock(sync, NAME, ttl=6)
        counter = [0]

        async def contend() -> None:
            for _ in range(20):
                async with lock.acquire(timeout=60):
                    before = counter[0]
                    await asyncio.sleep(0)
                    counter[0] = before + 1

        await asyncio.gather(*(contend() for _ in range(5)))
        assert counter == [100]
        with contextlib.suppress(LeaseLost):
            async with asyncio.timeout(20), lock as lease:
                await lease.extend(6)
                await other.delete(NAME)
                await for_ever()
            raise AssertionError("nothing was lost")
        for turns in range(60):
            await cancelled_after(lock, turns)
        assert (await lock.statistics()).waiting == 0


async def cancelled_after(lock: AsyncLock, turns: int) -> None:
    """A holder releases and a waiter is cancelled, so many turns later: the next one has the lock immediately."""
    holder = await lock.acquire()
    waiter = asyncio.create_task(lock.acquire(), name="waiter")
    third = asyncio.create_task(lock.acquire(timeout=20), name="third")
    await wait_until(waits(lock, 2), FAST, timeout=15)
    release = asyncio.create_task(holder.release())
    for _ in range(turns):
        await asyncio.sleep(0)
    if waiter.cancel():
        await asyncio.gather(waiter, return_exceptions=True)
        assert waiter.cancelled(), waiter
    else:
        await waiter.result().release()
    await release
    await (await third).release()
