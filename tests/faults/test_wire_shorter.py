"""P1, P6: a lease that is made shorter ends by then here, too, whatever becomes of the answer."""

from __future__ import annotations

import asyncio
import time

import pytest

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    CommandRefused,
    Coordinator,
    LeaseLost,
    Unreachable,
)
from redis_sync_aio.embedded import EmbeddedServer

from ..support.factories import KINDS, SHARED_LOCK, SHARED_SEMAPHORE, Kind
from ..support.inside import lock_keys
from ..support.proxy import ERROR, SWALLOW_REPLY
from ..support.sharing import in_line
from ..support.wired import RENEW, wired
from ..support.wired import quiet_loop as quiet_loop

modes = pytest.mark.parametrize("mode", ["link", "plain"])
kinds = pytest.mark.parametrize("kind", [*KINDS, SHARED_LOCK, SHARED_SEMAPHORE], ids=str)


@kinds
@modes
async def test_extended_to_less_without_an_answer(server: EmbeddedServer, mode: str, kind: Kind) -> None:
    async with wired(server, mode, kind=kind) as w:
        lease = await w.lock(ttl=30, auto_renew=False).acquire()
        w.proxy.on(RENEW, SWALLOW_REPLY, times=None)
        shortening = asyncio.create_task(lease.extend(0.4))
        await asyncio.sleep(0)
        assert lease.remaining() <= 0.4
        other = await w.elsewhere().acquire(timeout=5)
        assert lease.lost
        other.check()
        await asyncio.wait([shortening])
        assert shortening.exception() is not None
        await other.release()


async def test_the_next_task_has_a_shorter_ttl(server: EmbeddedServer) -> None:
    async with wired(server, kind=SHARED_LOCK) as w:
        first = await w.lock(ttl=30).acquire()
        waiting = asyncio.create_task(w.lock(ttl=0.4).acquire())
        await in_line(w.sync, 1, lock_keys(w.name.encode()).id)
        w.proxy.on(RENEW, SWALLOW_REPLY, times=None)
        await first.release()
        lease = await waiting
        other = await w.elsewhere().acquire(timeout=5)
        assert lease.lost
        await other.release()


@modes
@pytest.mark.parametrize("ttls", [(0.4,), (0.4, 30)], ids=["shorter", "shorter, longer again"])
async def test_p1_an_older_answer_makes_it_no_longer(
    server: EmbeddedServer, mode: str, ttls: tuple[float, ...]
) -> None:
    """It comes after a shorter ttl was asked for. What would make it longer again may never be executed."""
    async with wired(server, mode) as w:
        lease = await w.lock(ttl=30, auto_renew=False).acquire()
        longer = asyncio.create_task(lease.extend(20))
        await asyncio.sleep(0)
        w.proxy.on(RENEW, SWALLOW_REPLY, times=None, skip=1)
        later = [asyncio.create_task(lease.extend(ttl)) for ttl in ttls]
        await longer
        assert lease.remaining() <= 0.4
        with pytest.raises(LeaseLost):
            await later[0]
        for extending in later[1:]:
            with pytest.raises((LeaseLost, Unreachable)):  # the latter: its time is up in that very turn
                await extending


@kinds
async def test_refused_it_is_renewed_all_the_same(server: EmbeddedServer, kind: Kind) -> None:
    async with wired(server, kind=kind) as w:
        lease = await w.lock(ttl=1).acquire()
        w.proxy.on(RENEW, ERROR("ERR not now"))
        with pytest.raises(CommandRefused):
            await lease.extend(0.3)
        with pytest.raises(AcquireTimeout):
            await w.elsewhere().acquire(timeout=1.2)
        lease.check()
        await lease.release()


@pytest.mark.real
@pytest.mark.timing
async def test_no_body_begins_with_what_is_over(sync: Coordinator) -> None:
    """The loop stood still between the grant and the task that waited for it."""
    lock = AsyncLock(sync, "stalled", ttl=0.1, auto_renew=False, share=True)
    began = False

    async def body() -> None:
        nonlocal began
        async with lock:
            began = True

    lease = await lock.acquire()
    waiting = asyncio.create_task(body())
    await in_line(sync, 1, lock_keys(b"stalled").id)
    await lease.release()
    time.sleep(0.2)  # noqa: ASYNC251 - it is granted, and its task has not run
    with pytest.raises(LeaseLost):
        await waiting
    assert not began


# -- what undoes a request comes before all that follows -----------------------------------------------------


async def test_p5_nothing_is_left_of_it_on_a_fresh_server() -> None:
    """A server that knows no scripts: the clean-up is not what has to be sent twice."""
    with EmbeddedServer() as server:
        async with server.client() as redis, server.client() as client, Coordinator(client) as sync:
            for _ in range(5):
                await redis.script_flush()
                async with Coordinator(redis) as other:
                    held = await AsyncLock(sync, "x").acquire()
                    await AsyncLock(other, "x").statistics()  # this script is known
                    with pytest.raises(AcquireTimeout):
                        await AsyncLock(other, "x").acquire(timeout=0.05)
                    assert (await AsyncLock(other, "x").statistics()).waiting == 0
                    await held.release()
