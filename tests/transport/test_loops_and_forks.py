"""P5, P6, P12 and FAULTS A8-A10: forks, several loops and threads, ends of loops and interpreters.

A scene is a small program of its own, run with warnings as errors in Python's development mode (which
switches asyncio's debug mode on, too). It must end well, and nothing may appear on its standard error.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, Coordinator, Lease
from redis_sync_aio.embedded import EmbeddedServer

from ..support.scenes import (
    NAME,
    Use,
    look,
    play,
    refused,
    source,
)
from ..support.timed import Timed
from ..support.tls import encrypted, make_tls

pytestmark = pytest.mark.real


# -- A8: forks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made_from", "ends"),
    [
        ("coordinator", "os._exit"),
        pytest.param("coordinator", "sys.exit", marks=pytest.mark.ci),
        pytest.param("bare client", "os._exit", marks=pytest.mark.ci),
        ("bare client", "sys.exit"),
        pytest.param("polling", "os._exit", marks=pytest.mark.ci),
        pytest.param("polling", "sys.exit", marks=pytest.mark.ci),
    ],
)
def test_p12_a8_fork(server: EmbeddedServer, made_from: str, ends: str) -> None:
    play(server, "fork", f"{made_from} {ends}", PYTHONDEVMODE="")
    assert look(server) is None


@pytest.mark.ci
@pytest.mark.parametrize("step", ["4", "1"])
def test_p12_a8_fork_while_it_connects(server: EmbeddedServer, step: str) -> None:
    play(server, "fork_while_it_connects", step, PYTHONDEVMODE="")
    assert look(server) is None


@pytest.mark.ci
@pytest.mark.parametrize("ends", ["os._exit", "sys.exit"])
def test_p12_a8_fork_with_tls(server: EmbeddedServer, tmp_path: Path, ends: str) -> None:
    """The child has a copy of the parent's session, and does not say a word in it."""
    tls = make_tls(tmp_path)
    with encrypted(server.unix_socket, tls) as port:
        play(server, "fork", f"coordinator {ends}", url=tls.url(port), PYTHONDEVMODE="")
    assert look(server) is None


# -- A9: loops and threads -----------------------------------------------------------------------------------


def test_p12_a9_one_loop_after_the_other(server: EmbeddedServer) -> None:
    play(server, "run_twice")
    assert look(server) is None


async def elsewhere(use: Use) -> None:
    """Use it in another thread, in a loop of its own."""
    await asyncio.to_thread(lambda: asyncio.run(asyncio.wait_for(refused(use), 20)))


async def test_p12_a9_coordinator_and_lease_belong_to_their_loop(sync: Coordinator) -> None:
    lock = AsyncLock(sync, NAME)
    async with lock as lease:
        for use in (
            lock.acquire, lock.try_acquire, lock.statistics, lock.release, lock.force_release,
            lease.release, lambda: lease.extend(5), sync.__aenter__,
        ):  # fmt: skip
            await elsewhere(use)
        lease.check()
    assert not await lock.locked()


async def test_p12_a9_lost_wait_in_another_loop(sync: Coordinator) -> None:
    """It would never be woken there."""
    async with AsyncLock(sync, NAME) as lease:
        await elsewhere(lease.wait_lost)


async def test_p12_a9_close_in_another_loop(sync: Coordinator) -> None:
    async with AsyncLock(sync, NAME) as lease:
        await elsewhere(sync.aclose)
        lease.check()


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
            for _ in range(40):
                async with lock.acquire(timeout=60) as lease:
                    before = shared[0]
                    await asyncio.sleep(0)
                    shared[0] = before + 1
                    seen.append(lease.fence)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(asyncio.run, [body() for _ in range(6)]))
    assert shared == [240]
    assert seen == sorted(set(seen))


# -- A10: the end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["returns", "interrupt", "sys.exit"])
@pytest.mark.parametrize("left", ["task", "lease"])
@pytest.mark.parametrize("made_from", ["coordinator", "bare client"])
def test_p12_a10_the_loop_ends_with_a_lock_held(server: EmbeddedServer, made_from: str, left: str, end: str) -> None:
    """Nothing on stderr, and the key is gone immediately."""
    play(server, "ending", f"{made_from} {left} {end}")
    assert look(server) is None


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


async def test_p12_a10_interpreter_ends_in_the_middle(server: EmbeddedServer, redis: Redis) -> None:
    await asyncio.to_thread(play, server, "interpreter_ends")

    async with asyncio.timeout(5), Timed() as took:
        while await redis.get(NAME) is not None:
            pass
    assert took.waited < 0.2 + 0.1


# -- other loops ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", [pytest.param("asyncio", marks=pytest.mark.ci), "uvloop"])
def test_p5_p12_debug_mode_and_uvloop(server: EmbeddedServer, loop: str) -> None:
    pytest.importorskip(loop)
    play(server, "whole_story", loop, PYTHONASYNCIODEBUG="1")
