"""P1, P5, P6, FAULTS C1, D3: extensions, releases and acquires without an answer, and copies that are executed late.

The server may have executed what it did not answer, in the order in which it was sent. A lease that is made shorter
ends by then here, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, CommandRefused, Coordinator, LeaseLost, SyncError, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action, anything
from redis_sync_aio.types import BaseLease

from ..conftest import MakeClient
from ..support.inside import load, lock_keys
from ..support.primitives import KINDS, SHARED_LOCK, SHARED_SEMAPHORE, Client, Primitive
from ..support.sharing import in_line
from ..support.virtual import stall
from ..support.wired import ACQUIRE, RELEASE, RENEW, SOON, Wired, wired
from ..support.wired import quiet_loop as quiet_loop

modes = pytest.mark.parametrize("mode", ["link", "plain"])
kinds = pytest.mark.parametrize("kind", [*KINDS, SHARED_LOCK, SHARED_SEMAPHORE], ids=str)
PATIENT: dict[str, Any] = {"response_timeout": 5, "client": {"socket_timeout": 5}}
"""No connection is given up for an answer that is late."""
MARGIN = 0.3
"""Seconds by which the keys of a server may be too old, as real time has passed there."""


# -- longer ----------------------------------------------------------------------------------------------------


async def lost_with_an_extension_under_way(w: Wired, identity: str | None = None) -> BaseLease:
    """It was executed, and its answer is late, when the lease ends as far as its holder knows."""
    lease = await w.lock(ttl=3, auto_renew=False).acquire(identity=identity)
    late = w.proxy.on(RENEW, Action.HOLD_REPLY)
    extending = asyncio.create_task(lease.extend(30))
    await asyncio.wait_for(lease.wait_lost(), 5)
    late.release.set()
    with pytest.raises(LeaseLost):
        await extending
    return lease


@kinds
@modes
async def test_p5_a_lease_without_a_holder_is_given_back(server: EmbeddedServer, mode: str, kind: Primitive) -> None:
    """Else all others would wait for 30 seconds for nothing."""
    async with wired(server, mode, kind=kind, **PATIENT) as w:
        lease = await lost_with_an_extension_under_way(w)
        other = await w.elsewhere().acquire(timeout=5)
        other.check()
        await other.release()
        with pytest.raises(LeaseLost):
            await lease.release()


async def test_p5_what_an_identity_has_is_left_alone(server: EmbeddedServer) -> None:
    """Others may go by the same name."""
    async with wired(server, **PATIENT) as w:
        await lost_with_an_extension_under_way(w, identity="me")
        assert await w.elsewhere().try_acquire() is None
        await w.lock().statistics()  # whatever was sent before it has been executed
        assert await w.kind.token(w.direct, w.name) == b"me"
        await w.elsewhere().release(identity="me")


@modes
async def test_p5_a_release_without_an_answer_behind_an_extension(server: EmbeddedServer, mode: str) -> None:
    async with wired(server, mode, retry_for=30) as w:
        lease = await w.lock(ttl=4, auto_renew=False).acquire()
        w.proxy.on(RENEW, Action.SWALLOW_REPLY)
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


# -- shorter ---------------------------------------------------------------------------------------------------


@kinds
@modes
async def test_extended_to_less_without_an_answer(server: EmbeddedServer, mode: str, kind: Primitive) -> None:
    async with wired(server, mode, kind=kind, retry_for=30) as w:
        lease = await w.lock(ttl=30, auto_renew=False).acquire()
        w.proxy.on(RENEW, Action.SWALLOW_REPLY, times=None)
        shortening = asyncio.create_task(lease.extend(4))
        await asyncio.sleep(0)
        assert lease.remaining() <= 4
        other = await w.elsewhere().acquire(timeout=10)
        assert lease.remaining() < MARGIN
        other.check()
        await asyncio.wait([shortening])
        assert shortening.exception() is not None
        await other.release()


async def test_the_next_task_has_a_shorter_ttl(server: EmbeddedServer) -> None:
    async with wired(server, kind=SHARED_LOCK, retry_for=30) as w:
        first = await w.lock(ttl=30).acquire()
        waiting = asyncio.create_task(w.lock(ttl=4).acquire())
        await in_line(w.sync, 1, lock_keys(w.name.encode()).id)
        w.proxy.on(RENEW, Action.SWALLOW_REPLY, times=None)
        await first.release()
        lease = await waiting
        other = await w.elsewhere().acquire(timeout=10)
        assert lease.remaining() < MARGIN
        await other.release()


@modes
@pytest.mark.parametrize("ttls", [(4,), (4, 30)], ids=["shorter", "shorter, longer again"])
async def test_p1_an_older_answer_makes_it_no_longer(
    server: EmbeddedServer, mode: str, ttls: tuple[float, ...]
) -> None:
    """It comes after a shorter ttl was asked for. What would make it longer again may never be executed."""
    async with wired(server, mode, retry_for=30) as w:
        lease = await w.lock(ttl=30, auto_renew=False).acquire()
        longer = asyncio.create_task(lease.extend(20))
        await asyncio.sleep(0)
        w.proxy.on(RENEW, Action.SWALLOW_REPLY, times=None, skip=1)
        later = [asyncio.create_task(lease.extend(ttl)) for ttl in ttls]
        await longer
        assert lease.remaining() <= 4
        with pytest.raises(LeaseLost):
            await later[0]
        for extending in later[1:]:
            with pytest.raises((LeaseLost, Unreachable)):  # the latter: its time is up in that very turn
                await extending


async def test_no_body_begins_with_an_expired_lease(sync: Coordinator) -> None:
    """The loop was blocked between the grant and the task that waited for it."""
    lock = AsyncLock(sync, "stalled", ttl=3, auto_renew=False, share=True)
    began = False

    async def body() -> None:
        nonlocal began
        async with lock:
            began = True

    lease = await lock.acquire()
    waiting = asyncio.create_task(body())
    await in_line(sync, 1, lock_keys(b"stalled").id)
    await lease.release()
    stall(4)  # it is granted, and its task has not run
    with pytest.raises(LeaseLost):
        await waiting
    assert not began


# -- copies that are executed late -----------------------------------------------------------------------------


@pytest_asyncio.fixture
async def limited(redis: Redis) -> AsyncIterator[dict[str, str]]:
    """A user whose connections cannot end one another: an old one lives on, with what is in its buffers."""
    rights = ("on", ">secret", "~*", "&*", "+@all", "-client|kill")
    client: Client = redis
    await client.execute_command("ACL", "SETUSER", "limited", *rights)
    yield {"username": "limited", "password": "secret"}
    await client.execute_command("ACL", "DELUSER", "limited")


@modes
@pytest.mark.parametrize("kind", [*KINDS, SHARED_LOCK], ids=str)
async def test_p1_a_late_copy_of_a_shorter_renewal(
    server: EmbeddedServer, limited: dict[str, str], mode: str, kind: Primitive
) -> None:
    """The lease was made longer again since. Until its next renewal it lasts no longer than that copy lets it."""
    async with wired(server, mode, kind=kind, client=limited) as w:
        lease = await w.lock(ttl=20).acquire()
        await lease.extend(20)
        rule = w.proxy.on(RENEW, Action.HOLD, times=1)
        await lease.extend(1)  # by its second copy
        await lease.extend(20)
        assert lease.remaining() <= 1
        rule.release.set()
        for _ in range(20):
            await asyncio.sleep(0.1)
            assert await w.elsewhere().try_acquire() is None
            await w.check_held(lease)
        await lease.release()
        await w.check_free(lease.fence)


def is_cut_off(w: Wired) -> bool:
    return w.sync.connection_error is not None


async def test_p5_a_late_copy_of_an_acquire_that_was_undone(server: EmbeddedServer, limited: dict[str, str]) -> None:
    """Its undo, which went by the next connection, leaves a tombstone: the copy is granted nothing."""
    for mode, kind in product(("link", "plain"), KINDS):
        async with wired(server, mode, kind=kind, client=limited, name=f"undone {mode} {kind}") as w:
            await (await w.lock().acquire()).release()
            rule = w.proxy.on(ACQUIRE, Action.HOLD, times=1)
            request = asyncio.create_task(w.lock(ttl=60).acquire())
            await rule.fired.wait()
            w.proxy.refuse = True
            await wait_until(partial(is_cut_off, w), SOON, timeout=15)
            request.cancel()
            await asyncio.wait([request])
            w.proxy.refuse = False
            await w.lock().statistics()  # behind the undo
            rule.release.set()
            await asyncio.sleep(0.3)
            lease = await w.elsewhere().try_acquire()
            assert lease is not None, (mode, kind)
            await lease.release()


async def test_p4_a_late_release_does_not_free_the_lock_of_the_next_holder(server: EmbeddedServer) -> None:
    """Sent in good time, in flight for longer than the ttl: the server looks at its token."""
    async with wired(server, **PATIENT) as w:
        lease = await w.lock(ttl=2).acquire()
        late = w.proxy.on(RELEASE, Action.HOLD)
        releasing = asyncio.create_task(lease.release())
        await late.fired.wait()
        other = await w.elsewhere().acquire(timeout=5)
        late.release.set()
        with pytest.raises((LeaseLost, Unreachable)):
            await releasing
        await w.lock().statistics()  # behind the release
        await w.check_held(other)
        await other.release()
        await w.check_free(other.fence)


async def test_p3_a_lease_that_ends_sooner_here_than_at_the_server_is_given_back(server: EmbeddedServer) -> None:
    async with wired(server, "plain") as w:
        lease = await w.lock(ttl=5, auto_renew=False).acquire()
        w.proxy.on(RENEW, Action.CUT_AFTER, times=1)
        await lease.extend(1)
        await lease.extend(60)
        assert lease.remaining() <= 1
        following = await w.elsewhere().acquire(timeout=5)
        assert lease.lost
        await following.release()


async def test_a_release_that_failed_and_an_extension_then(server: EmbeddedServer) -> None:
    """It is held for as long as it was extended to."""
    async with wired(server) as w:
        lease = await w.lock(ttl=7).acquire()
        w.proxy.on(RELEASE, Action.answer_error("OOM command not allowed when used memory > 'maxmemory'."), times=1)
        with pytest.raises(CommandRefused):
            await lease.release()
        await lease.extend(30)
        await asyncio.sleep(9)
        await w.check_held(lease)
        await lease.release()
        await w.check_free(lease.fence)


async def test_p6_a_release_that_failed_ends_with_its_lease(server: EmbeddedServer) -> None:
    """And a task that waits for the loss hears of it."""
    async with wired(server, retry_for=0.2) as w:
        lease = await w.lock(ttl=1).acquire()
        lost = asyncio.create_task(lease.wait_lost())
        await asyncio.sleep(0)
        w.proxy.on(anything, Action.SWALLOW_REQUEST, times=None)
        with pytest.raises(Unreachable):
            await lease.release()
        assert lease.remaining() > 0
        await asyncio.wait_for(lost, 5)
        with pytest.raises(LeaseLost):
            lease.check()


@pytest.mark.parametrize("monitored", [False, True])
async def test_there_is_no_copy_of_a_connection_that_was_killed(
    server: EmbeddedServer, make_client: MakeClient, monitored: bool
) -> None:
    """With the right to do that, a lease lasts as long as it was extended to; whatever else hears all channels."""
    async with wired(server) as w:
        monitor = make_client().pubsub()
        if monitored:
            await monitor.psubscribe("*")
        lease = await w.lock(ttl=20, auto_renew=False).acquire()
        w.proxy.on(RENEW, Action.HOLD, times=1)
        await lease.extend(1)  # by its second copy
        await lease.extend(20)
        assert lease.remaining() > 15
        await lease.release()
        await w.check_free(lease.fence)
        await monitor.aclose()  # type: ignore[no-untyped-call]


async def test_p8_a_late_acquire_when_the_fence_is_ahead_of_the_clock(server: EmbeddedServer) -> None:
    """The fence is remembered until the clock has caught up, also behind a copy that was refused as spent."""
    async with wired(server) as w:
        seconds, micros = await w.direct.time()
        fence = w.kind.keys(w.name).all[2]
        hours = 3_600_000
        ahead = seconds * 1_000_000 + micros + 5 * hours * 1000
        await w.direct.set(fence, b"%016d before" % ahead, px=6 * hours)
        lease = await w.lock(ttl=30).acquire()
        assert lease.fence == ahead + 1
        await lease.release()
        assert await w.direct.pttl(fence) > 5.9 * hours
        client: Client = w.direct
        words = (*w.kind.keys(w.name).all, lease.token, 30000, "", 0, 0)
        late = await client.eval(load("lock/acquire").source, 4, *words)
        assert late[0] == 4, "SPENT"
        assert await w.direct.pttl(fence) > 5.9 * hours
        again = await w.lock().acquire()
        assert again.fence > lease.fence
        await again.release()
