"""P5, P6, P7, P12 and FAULTS A8-A10: forks, several loops and threads, ends of loops and interpreters."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from redis import Redis as SyncRedis
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReentrantLock,
    AsyncSemaphore,
    Coordinator,
    Lease,
    LeaseLost,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer

from ..conftest import MakeClient
from ..support.body import FAST
from ..support.inside import close_implicit, hubs
from ..support.processes import Scene, play
from ..support.tls import encrypted, make_tls
from .scenes import (
    NAME,
    Use,
    ending,
    fork,
    fork_while_it_connects,
    interpreter_ends,
    look,
    refused,
    run_twice,
    source,
    whole_story,
)

FEW = ("fork: coordinator os._exit", "ending: bare client lease sys.exit")
"""The programs of the default run."""
PLAYS: list[tuple[Scene, str]] = [
    *(
        (fork, f"{it} {end}")
        for it, end in product(("coordinator", "bare client", "polling"), ("os._exit", "sys.exit"))
    ),
    (fork_while_it_connects, "4"),
    (fork_while_it_connects, "1"),
    (run_twice, ""),
    *(
        (ending, " ".join(how))
        for how in product(("coordinator", "bare client"), ("task", "lease"), ("returns", "interrupt", "sys.exit"))
    ),
    (whole_story, "asyncio"),
    (whole_story, "uvloop"),
]
NAMED = {f"{scene.__name__}: {how}": (scene, how) for scene, how in PLAYS}


@pytest.mark.parametrize("which", [pytest.param(it, marks=() if it in FEW else pytest.mark.ci) for it in NAMED])
def test_p5_p12_a8_a9_a10_a_program_ends_well(server: EmbeddedServer, which: str) -> None:
    """It forks, runs loop after loop, or ends with a lock held. Nothing is on stderr, and nothing is held afterwards.

    It runs with warnings as errors, and in Python's development mode or at least with asyncio's debug mode.
    """
    scene, how = NAMED[which]
    if "uvloop" in how:
        pytest.importorskip("uvloop")
    mode = {"PYTHONDEVMODE": ""} if "fork" in which else {"PYTHONASYNCIODEBUG": "1"}
    assert play(scene, server.url, how, **mode) == "done"
    assert look(server) is None


@pytest.mark.ci
@pytest.mark.parametrize("ends", ["os._exit", "sys.exit"])
def test_p12_a8_fork_with_tls(server: EmbeddedServer, tmp_path: Path, ends: str) -> None:
    """The child has a copy of the parent's session, and does not say a word in it."""
    tls = make_tls(tmp_path)
    with encrypted(server.unix_socket, tls) as port:
        assert play(fork, tls.url(port), f"coordinator {ends}", PYTHONDEVMODE="") == "done"
    assert look(server) is None


@pytest.mark.ci
def test_p12_a10_after_the_sudden_end_of_an_interpreter_the_ttl_remains(server: EmbeddedServer) -> None:
    assert play(interpreter_ends, server.url) == "done"
    with SyncRedis.from_url(server.url) as client:
        left: Any = client.pttl(NAME)
        assert 0 < left <= 60_000


def test_a_forked_child_may_close_the_parents_client(server: EmbeddedServer) -> None:
    """It uses it, closes it, and does not touch the parent's connection."""

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


# -- A9: loops and threads -----------------------------------------------------------------------------------------


async def elsewhere(use: Use) -> None:
    """Use it in another thread, in a loop of its own."""
    await asyncio.to_thread(lambda: asyncio.run(asyncio.wait_for(refused(use), 20)))


@pytest.mark.real
async def test_p12_a9_coordinator_and_lease_belong_to_their_loop(sync: Coordinator) -> None:
    """In another loop each call is refused, also a wait for the loss, which would never be woken there."""
    lock = AsyncLock(sync, NAME)
    async with lock as lease:
        for use in (
            lock.acquire, lock.try_acquire, lock.statistics, lock.release, lock.force_release, lease.release,
            lambda: lease.extend(5), lease.wait_lost, sync.__aenter__, sync.aclose,
        ):  # fmt: skip
            await elsewhere(use)
        lease.check()
    assert not await lock.locked()


@pytest.mark.parametrize("linger", [0.0, 60.0])
def test_p12_a9_what_is_shared_in_a_loop_that_is_stopped(server: EmbeddedServer, linger: float) -> None:
    """Another loop of the same thread is refused, whether somebody waits in the loop of the lease or not."""
    loop = asyncio.new_event_loop()
    client = Redis.from_url(server.url)
    sync = Coordinator(client)
    lock = AsyncLock(sync, NAME, share=True, linger=linger)

    async def hold_and_wait() -> tuple[Lease, asyncio.Task[Lease]]:
        lease = await lock.acquire()
        task = asyncio.create_task(lock.acquire())
        await asyncio.sleep(0)
        return lease, task

    async def end(lease: Lease) -> None:
        await lease.release()
        await sync.aclose()
        await client.aclose()

    lease, task = loop.run_until_complete(hold_and_wait())
    asyncio.run(refused(lease.release))
    lease.check()
    loop.run_until_complete(lease.release())
    after = loop.run_until_complete(asyncio.wait_for(task, 5))
    assert after.fence > lease.fence
    asyncio.run(refused(after.release))
    after.check()
    loop.run_until_complete(end(after))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    assert look(server) is None


@pytest.mark.parametrize("made_from", ["coordinator", "bare client"])
def test_p1_a9_threads_exclude_each_other(server: EmbeddedServer, made_from: str) -> None:
    """Each with a loop and a client of its own; the counter is not protected by anything else."""
    seen: list[int] = []
    shared = [0]

    async def body() -> None:
        async with source(server.url, made_from) as own:
            lock = AsyncLock(own, "threads", ttl=5)
            for _ in range(15):
                async with lock.acquire(timeout=60) as lease:
                    before = shared[0]
                    await asyncio.sleep(0)
                    shared[0] = before + 1
                    seen.append(lease.fence)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(asyncio.run, [body() for _ in range(6)]))
    assert shared == [90]
    assert seen == sorted(set(seen))


async def test_p5_a10_all_tasks_are_cancelled_while_polling(redis: Redis) -> None:
    """As at the end of a loop: a task connects; what is sent afterwards is sent all the same."""
    async with Coordinator(redis, push="never") as sync:
        lock = AsyncLock(sync, NAME, ttl=30)
        under_way = asyncio.create_task(lock.statistics())
        for _ in range(3):
            await asyncio.sleep(0)
        connecting = [task for task in asyncio.all_tasks() if task.get_name() == "redis_sync_aio link"]
        assert connecting
        for task in (under_way, *connecting):
            task.cancel()
        lease = await asyncio.wait_for(lock.acquire(), 15)
        await asyncio.wait_for(lease.release(), 15)
        assert await redis.get(NAME) is None


def connections(server: EmbeddedServer) -> int:
    with SyncRedis.from_url(server.url) as client:
        return len(client.client_list())


@pytest.fixture(params=["plain", pytest.param("encrypted", marks=pytest.mark.ci)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[EmbeddedServer, str]]:
    """A server, and its address."""
    with EmbeddedServer() as server:
        if request.param == "plain":
            yield server, server.url
        else:
            tls = make_tls(tmp_path)
            with encrypted(server.unix_socket, tls) as port:
                yield server, tls.url(port)


# Of transports and connections whose loop nobody ended.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_p12_a_loop_that_is_closed_by_hand_leaves_nothing_for_long(url: tuple[EmbeddedServer, str]) -> None:
    """Its connection and its places in the pool go when the client's lock is used again."""
    use_in_many_loops(*url)
    gc.collect()


def use_in_many_loops(server: EmbeddedServer, address: str) -> None:
    client: Any = Redis.from_url(address, max_connections=20)
    pool = client.connection_pool
    lock = AsyncLock(client, "job", ttl=5)

    async def job() -> None:
        async with lock:
            pass

    async def close() -> None:
        await job()
        await client.aclose()

    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(20):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(job())
        loop.close()  # no shutdown_asyncgens()
        del loop
    gc.collect()
    if before:
        assert len(os.listdir("/proc/self/fd")) < before + 10
    if address == server.url:  # TLS is spoken by a proxy, which may be slow to notice
        assert connections(server) <= 4
    assert (pool.max_connections, len(pool._in_use_connections)) == (20, 0)
    asyncio.run(close())
    assert (pool.max_connections, len(pool._in_use_connections)) == (20, 0)


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
    await wait_until(lambda: len(hubs) <= before, FAST, timeout=5)
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


@pytest.mark.real
async def test_p7_a_body_that_is_told_of_its_loss_is_not_cancelled_as_well(sync: Coordinator) -> None:
    """By LeaseLost of its own release, after the loop was blocked; what it tidies up then is not cut."""
    makes: dict[str, Any] = {
        "lock": AsyncLock(sync, "a", ttl=3),
        "shared lock": AsyncLock(sync, "b", ttl=3, share=True),
        "reentrant lock": AsyncReentrantLock(sync, "c", ttl=3),
        "several locks": AsyncMultiLock(sync, ["d", "e"], ttl=3),
        "semaphore": AsyncSemaphore(sync, "f", limit=1, ttl=3),
    }
    inside, unblocked, tidied_up = asyncio.Semaphore(0), asyncio.Event(), []

    async def use(kind: str) -> None:
        with pytest.raises(LeaseLost):  # noqa: PT012
            async with makes[kind] as lease:
                inside.release()
                await unblocked.wait()
                with pytest.raises(LeaseLost):
                    await lease.release()
                await asyncio.sleep(0.02)
                tidied_up.append(kind)

    using = [asyncio.create_task(use(kind)) for kind in makes]
    for _ in makes:
        await inside.acquire()
    time.sleep(3.2)  # noqa: ASYNC251
    unblocked.set()
    await asyncio.gather(*using)
    assert sorted(tidied_up) == sorted(makes)
