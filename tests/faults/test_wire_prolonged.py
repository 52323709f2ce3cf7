"""P1, P5, P6: renewals without an answer. The server may have executed them, in the order in which they were sent."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from redis_sync_aio import AsyncReadWriteLock, LeaseLost, SyncError, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import BaseLease

from ..support.factories import KINDS, SHARED_LOCK, SHARED_SEMAPHORE, Kind
from ..support.inside import now
from ..support.proxy import HOLD, HOLD_REPLY, SWALLOW_REPLY
from ..support.rwlocks import both, queued
from ..support.wired import RENEW, SOON, Wired, wired
from ..support.wired import quiet_loop as quiet_loop

pytestmark = pytest.mark.timing
modes = pytest.mark.parametrize("mode", ["link", "plain"])
kinds = pytest.mark.parametrize("kind", [*KINDS, SHARED_LOCK, SHARED_SEMAPHORE], ids=str)
PATIENT: dict[str, Any] = {"response_timeout": 5, "client": {"socket_timeout": 5}}
"""No connection is given up for an answer that is late."""
sharing = pytest.mark.parametrize("share", [False, True])


async def lost_with_an_extension_under_way(w: Wired, identity: str | None = None) -> BaseLease:
    """It was executed, and its answer is late, when the lease ends as far as its holder knows."""
    lease = await w.lock(ttl=0.4, auto_renew=False).acquire(identity=identity)
    late = w.proxy.on(RENEW, HOLD_REPLY)
    extending = asyncio.create_task(lease.extend(30))
    await asyncio.wait_for(lease.wait_lost(), 5)
    late.release.set()
    with pytest.raises(LeaseLost):
        await extending
    return lease


@kinds
@modes
async def test_p5_what_nobody_has_any_more_is_given_back(server: EmbeddedServer, mode: str, kind: Kind) -> None:
    """Else all others would wait for 30 seconds for nobody."""
    async with wired(server, mode, kind=kind, **PATIENT) as w:
        lease = await lost_with_an_extension_under_way(w)
        other = await w.elsewhere().acquire(timeout=5)
        other.check()
        await other.release()
        with pytest.raises(LeaseLost):
            await lease.release()


@modes
async def test_p5_a_release_without_an_answer_behind_an_extension(server: EmbeddedServer, mode: str) -> None:
    async with wired(server, mode) as w:
        lease = await w.lock(ttl=0.4, auto_renew=False).acquire()
        w.proxy.on(RENEW, SWALLOW_REPLY)
        w.proxy.refuse = True  # once the connection is given up there is no other
        extending = asyncio.create_task(lease.extend(30))
        await asyncio.sleep(0)
        with pytest.raises(SyncError):
            await lease.release()
        with suppress(SyncError):
            await extending
        w.proxy.refuse = False
        other = await w.elsewhere().acquire(timeout=5)
        await other.release()


async def test_p5_what_an_identity_has_is_left_alone(server: EmbeddedServer) -> None:
    """Others may go by the same name."""
    async with wired(server, **PATIENT) as w:
        await lost_with_an_extension_under_way(w, identity="me")
        assert await w.elsewhere().try_acquire() is None
        await w.lock().statistics()  # whatever was sent before it has been executed
        assert await w.kind.token(w.direct, w.name) == b"me"
        await w.elsewhere().release(identity="me")


# -- readers that become the writer ------------------------------------------------------------------------


@sharing
async def test_p6_a_reader_that_was_handed_over_lasts_as_its_upgrade(server: EmbeddedServer, share: bool) -> None:
    """It was granted for the claim; the writer for the whole ttl, before the reader's first renewal."""
    async with wired(server, claim=0.5) as w:
        rw = AsyncReadWriteLock(w.sync, w.name, ttl=30, share=share)
        _, theirs = await both(w)
        before = await theirs.write().acquire()
        reading = asyncio.create_task(rw.read().acquire())
        await queued(theirs, 1)
        await before.release()
        began, reader = now(), await reading
        async with rw.upgrade(reader) as writer:
            assert reader.remaining() > 20
            await wait_until(lambda: now() > began + 0.6, SOON, timeout=15)
            reader.check()
            writer.check()
        await reader.release()
        assert not await theirs.locked()


@sharing
async def test_p1_a_shorter_renewal_may_come_after_the_upgrade(server: EmbeddedServer, share: bool) -> None:
    """It was sent before the grant arrived, and nobody knows whether it was executed before."""
    async with wired(server, **PATIENT) as w:
        rw = AsyncReadWriteLock(w.sync, w.name, ttl=30, share=share)
        _, theirs = await both(w)
        reader, beside = await rw.read().acquire(), await theirs.read().acquire()
        hold = rw.upgrade(reader)
        entering = asyncio.create_task(hold.__aenter__())
        await queued(theirs, 1)
        held = w.proxy.on(RENEW, HOLD)
        shorter = asyncio.create_task(reader.extend(2))
        await asyncio.sleep(0)
        await beside.release()
        writer = await entering
        assert 0 < writer.remaining() <= 2
        assert 0 < reader.remaining() <= 2
        held.release.set()
        await shorter
        assert 0 < writer.remaining() <= 2
        await hold.__aexit__(None, None, None)
        await reader.release()


async def test_p1_a_writer_that_is_shorter_than_its_reader_makes_that_shorter(server: EmbeddedServer) -> None:
    """Readers of a process share a permit: that of the one with the longer ttl is renewed with the shorter one."""
    async with wired(server) as w:
        await both(w)
        brief, long = (AsyncReadWriteLock(w.sync, w.name, ttl=ttl, share=True) for ttl in (1, 30))
        reader, beside = await brief.read().acquire(), await long.read().acquire()
        await wait_until(lambda: reader.remaining() > 20, SOON, timeout=15)
        await beside.release()
        hold = brief.upgrade(reader)
        writer = await hold.__aenter__()
        assert reader.remaining() > 20
        w.proxy.on(RENEW, SWALLOW_REPLY, times=None)
        longer = asyncio.create_task(writer.extend(3))
        await asyncio.sleep(0)
        assert reader.remaining() <= 3
        for leaving in (hold.__aexit__(None, None, None), reader.release(), longer):
            with suppress(SyncError):
                await leaving


@sharing
@pytest.mark.parametrize("limit", [{"auto_renew": False}, {"max_hold": 1}], ids=str)
@pytest.mark.parametrize("extended", ["reader", "writer"])
async def test_p6_extended_while_it_writes(
    server: EmbeddedServer, share: bool, limit: dict[str, float], extended: str
) -> None:
    """Both leases say the same. A writer of readers who share a permit ends with its own reader, as it did."""
    async with wired(server) as w:
        await both(w)
        rw = AsyncReadWriteLock(w.sync, w.name, ttl=1, share=share, **limit)  # type: ignore[arg-type]
        reader = await rw.read().acquire()
        async with rw.upgrade(reader) as writer:
            await (reader if extended == "reader" else writer).extend(10)
            longest = 1 if share and extended == "writer" else 10
            for lease in (reader, writer):
                assert longest - 1 < lease.remaining() <= longest
        await reader.release()
