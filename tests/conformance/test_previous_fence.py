"""A writer learns the fence of the writer before it, so it knows whether what it read before is still true (P8)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AsyncReadWriteLock, Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import WriteLease

from ..support.body import FAST, waits
from ..support.inside import load
from ..support.proxy import CUT_AFTER, script
from ..support.wired import wired

NAME = "config"


@pytest.fixture(params=[False, True], ids=["own permits", "shared"])
def share(request: pytest.FixtureRequest) -> bool:
    """Whether tasks of a process share what it holds."""
    return bool(request.param)


@pytest.fixture
def rw(sync: Coordinator, share: bool) -> AsyncReadWriteLock:
    return AsyncReadWriteLock(sync, NAME, share=share)


@pytest.fixture(params=["link", "polling"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture
async def other(redis: Redis) -> AsyncIterator[AsyncReadWriteLock]:
    """The same lock, on a connection of another process."""
    async with Coordinator(redis) as coordinator:
        yield AsyncReadWriteLock(coordinator, NAME)


async def read(rw: AsyncReadWriteLock) -> int:
    async with rw.read() as reader:
        return reader.fence


async def write(rw: AsyncReadWriteLock) -> WriteLease:
    async with rw.write() as writer:
        return writer


@pytest.mark.parametrize("written_before", [False, True])
async def test_nobody_wrote_between_the_read_and_the_write(
    rw: AsyncReadWriteLock, other: AsyncReadWriteLock, written_before: bool
) -> None:
    """Also where the reader was the first to use the name, and others read meanwhile, here and elsewhere."""
    if written_before:
        await write(other)
    fence = await read(rw)
    assert await read(rw) == await read(other) == fence
    assert (await write(rw)).previous_fence == fence


@pytest.mark.parametrize("here", [False, True], ids=["elsewhere", "in this process"])
async def test_another_wrote_between_the_read_and_the_write(
    rw: AsyncReadWriteLock, other: AsyncReadWriteLock, here: bool
) -> None:
    """And what is read after it has its fence."""
    fence = await read(rw)
    between = await write(rw if here else other)
    writer = await write(rw)
    assert writer.previous_fence is not None
    assert writer.previous_fence >= between.fence > fence
    assert await read(rw) >= writer.fence


async def test_another_wrote_while_this_one_waited(rw: AsyncReadWriteLock, other: AsyncReadWriteLock) -> None:
    """The grant is pushed, by a writer or by a reader, and says it, too."""
    fence = await read(rw)
    for side in (other.write(), other.read()):
        between = await side.acquire()
        waiting = asyncio.create_task(rw.write().acquire())
        await wait_until(waits(other), FAST, timeout=30)
        await between.release()
        writer = await asyncio.wait_for(waiting, 30)
        assert writer.previous_fence == between.fence > fence
        await writer.release()
        fence = writer.previous_fence or 0


async def test_tasks_that_share_know_each_others_fences(rw: AsyncReadWriteLock, share: bool) -> None:
    """Each writer has the fence of the one before it as its previous one, across many ranges of fences."""
    fences: list[tuple[int | None, int]] = []

    async def change() -> None:
        for _ in range(40):
            async with rw.write() as writer:
                fences.append((writer.previous_fence, writer.fence))

    async with asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(change())
    for (_, earlier), (previous, fence) in itertools.pairwise(fences):
        assert previous is not None
        assert earlier <= previous < fence
        assert share or previous == earlier


async def test_a_downgraded_writer_that_wrote_again_alone(sync: Coordinator) -> None:
    rw = AsyncReadWriteLock(sync, NAME)
    lease = await rw.write().acquire()
    await rw.downgrade(lease)
    await lease.release()
    assert (await write(rw)).previous_fence == lease.fence


async def test_an_identity_that_joins_knows_it_too(sync: Coordinator, other: AsyncReadWriteLock) -> None:
    fence = (await write(other)).fence
    first = await AsyncReadWriteLock(sync, NAME).write().acquire(identity="me")
    again = await other.write().acquire(identity="me")
    assert first.previous_fence == again.previous_fence == fence
    await again.release()


async def test_a_server_that_lost_its_keys_knows_of_no_writer(rw: AsyncReadWriteLock, redis: Redis) -> None:
    for _ in range(2):
        assert (await write(rw)).previous_fence is None
        await redis.flushall()


async def test_p3_a_repeated_request_is_answered_with_the_same_fences(server: EmbeddedServer) -> None:
    async with wired(server) as w:
        rw = AsyncReadWriteLock(w.sync, NAME)
        before = await write(AsyncReadWriteLock(w.other, NAME))
        lost = w.proxy.on(script(load("permits/acquire").sha), CUT_AFTER, times=1)
        async with rw.write() as writer:
            assert lost.fired.is_set()
            assert writer.previous_fence == before.fence < writer.fence
