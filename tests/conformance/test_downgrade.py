"""A writer that becomes a reader keeps its lease and its permit: there is no gap, and no writer left (P1, P5, P6)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AsyncReadWriteLock, Coordinator, LeaseLost, NotHeld, Unreachable
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import BaseLease

from ..support.inside import load, permit_keys
from ..support.proxy import SWALLOW_REQUEST, FaultProxy, anything, script
from ..support.views import readers_of, writer_of

NAME = "config"


@pytest.fixture(params=[False, True], ids=["own permits", "shared"])
def share(request: pytest.FixtureRequest) -> bool:
    """Whether tasks of a process share what it holds."""
    return bool(request.param)


@pytest_asyncio.fixture
async def other(redis: Redis) -> AsyncIterator[AsyncReadWriteLock]:
    """The same lock, on a connection of somebody else."""
    async with Coordinator(redis) as coordinator:
        yield AsyncReadWriteLock(coordinator, NAME)


async def reads_again(rw: AsyncReadWriteLock, other: AsyncReadWriteLock, reader: BaseLease) -> None:
    """It is a reader, here and on the server."""
    reader.check()
    beside = await other.read().acquire(timeout=15)
    found = await rw.statistics()
    assert (writer_of(found), readers_of(found)) == (None, 2)
    await beside.release()
    await reader.release()


async def test_p1_a_downgrade_ends_the_others_of_that_identity(sync: Coordinator, other: AsyncReadWriteLock) -> None:
    rw = AsyncReadWriteLock(sync, NAME)
    writer, twin = await rw.write().acquire(identity="me"), await rw.write().acquire(identity="me")
    await rw.downgrade(writer)
    with pytest.raises(LeaseLost):
        twin.check()
    await reads_again(rw, other, writer)


async def test_p6_a_downgrade_elsewhere_is_noticed(sync: Coordinator, other: AsyncReadWriteLock) -> None:
    """P1: by the next renewal. What the other process reads by goes on."""
    rw = AsyncReadWriteLock(sync, NAME)
    writer, twin = await rw.write().acquire(identity="me"), await other.write().acquire(identity="me")
    assert twin.fence == writer.fence
    await rw.downgrade(writer)
    with pytest.raises(LeaseLost):
        await twin.extend(30)
    assert twin.lost
    await writer.extend(30)
    await reads_again(rw, other, writer)


async def test_p4_a_renewal_that_was_overtaken_by_the_downgrade(sync: Coordinator, redis: Redis) -> None:
    """P6: it was sent by a writer, and finds a reader. That is no loss."""
    rw = AsyncReadWriteLock(sync, NAME)
    writer = await rw.write().acquire()
    keys = permit_keys(NAME.encode(), "rw").all
    untyped: Any = redis
    assert await untyped.eval(load("permits/downgrade").source, 4, *keys, writer._grant.wire_token) == 1
    extending = asyncio.create_task(writer.extend(30))
    await asyncio.sleep(0)
    writer._grant.become_reader()
    await extending
    writer.check()
    await writer.extend(40)
    assert writer.remaining() > 30
    await writer.release()


@pytest.mark.parametrize("writes", [False, True])
async def test_p6_an_identity_is_released_by_the_other_side(sync: Coordinator, writes: bool) -> None:
    """It has one permit; the lease of this process knows that it is over."""
    rw = AsyncReadWriteLock(sync, NAME)
    own, opposite = (rw.write(), rw.read()) if writes else (rw.read(), rw.write())
    lease = await own.acquire(identity="me")
    await opposite.release(identity="me")
    assert lease.remaining() == 0
    assert not await rw.locked()


@pytest.mark.parametrize("how", ["no answer", "cancelled"])
async def test_p5_a_downgrade_without_an_answer_is_made_good(how: str, share: bool) -> None:
    """Its renewals as a reader do not keep a writer's permit on the server: other readers get in."""
    with EmbeddedServer() as server:
        async with (
            server.client() as direct,
            FaultProxy(upstream=server.unix_socket) as proxy,
            Redis.from_url(proxy.url) as client,
            Coordinator(client, retry_for=0.3, response_timeout=0.3) as sync,
        ):
            rw = AsyncReadWriteLock(sync, NAME, ttl=3, share=share)
            lease = await rw.write().acquire()
            swallowed = proxy.on(script(load("permits/downgrade").sha), SWALLOW_REQUEST, times=None)
            downgrading = asyncio.create_task(rw.downgrade(lease))
            if how == "cancelled":
                await asyncio.wait_for(swallowed.fired.wait(), 5)
                downgrading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await downgrading
            else:
                with pytest.raises(Unreachable):
                    await downgrading
            swallowed.cancel()
            theirs = await AsyncReadWriteLock(direct, NAME).read().acquire(timeout=2.5)
            lease.check()
            assert lease.weight == 1
            await theirs.release()
            await lease.release()


async def test_p1_a_downgrade_without_an_answer_does_not_meet_a_later_writer_of_its_name(redis: Redis) -> None:
    """P1: an identity that was granted the writer's again, elsewhere, is not made a reader by what is sent late."""
    with EmbeddedServer() as server:
        async with (
            server.client() as direct,
            FaultProxy(upstream=server.unix_socket) as proxy,
            Redis.from_url(proxy.url) as client,
            Coordinator(client, retry_for=0.2, response_timeout=0.2) as sync,
        ):
            rw, theirs = AsyncReadWriteLock(sync, NAME, ttl=0.6), AsyncReadWriteLock(direct, NAME, ttl=10)
            lease = await rw.write().acquire(identity="worker-7")
            swallowed = proxy.on(anything, SWALLOW_REQUEST, times=None)
            with pytest.raises(Unreachable):
                await rw.downgrade(lease)
            await asyncio.wait_for(lease.wait_lost(), 5)
            anew = await theirs.write().acquire(identity="worker-7", timeout=5)
            swallowed.cancel()
            assert writer_of(await rw.statistics()) == "worker-7"  # behind whatever is sent late
            await asyncio.sleep(0.3)
            assert writer_of(await rw.statistics()) == "worker-7"
            await anew.release()


async def test_only_a_writer_of_this_lock_becomes_a_reader_and_only_once(
    sync: Coordinator, other: AsyncReadWriteLock, share: bool
) -> None:
    """The error says which lease it takes; a reader's lease goes on, that of a writer of another name too."""
    rw = AsyncReadWriteLock(sync, NAME, share=share)
    writer = await rw.write().acquire()
    await rw.downgrade(writer)
    with pytest.raises(NotHeld, match=r"not a writer's lease .*downgrade\(\) takes one of write\(\)"):
        await rw.downgrade(writer)
    await reads_again(rw, other, writer)
    with pytest.raises(NotHeld, match="released"):
        await rw.downgrade(writer)
    async with AsyncReadWriteLock(sync, "another").write() as elsewhere:
        with pytest.raises(NotHeld, match="not a writer's lease"):
            await rw.downgrade(elsewhere)
        elsewhere.check()
