"""P1, P6, FAULTS C1, D3: a copy of a command that is executed long after another copy of it was answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import product

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import CommandRefused, LeaseLost, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer

from ..conftest import MakeClient
from ..support.factories import KINDS, SHARED_LOCK, Client, Kind
from ..support.inside import load
from ..support.proxy import CUT_AFTER, ERROR, HOLD, SWALLOW_REQUEST, anything
from ..support.timed import failures
from ..support.wired import ACQUIRE, RELEASE, RENEW, SOON, wired
from ..support.wired import quiet_loop as quiet_loop


@pytest_asyncio.fixture
async def limited(redis: Redis) -> AsyncIterator[dict[str, str]]:
    """A user whose connections cannot end one another: an old one lives on, with what is in its buffers."""
    rights = ("on", ">secret", "~*", "&*", "+@all", "-client|kill")
    client: Client = redis
    await client.execute_command("ACL", "SETUSER", "limited", *rights)
    yield {"username": "limited", "password": "secret"}
    await client.execute_command("ACL", "DELUSER", "limited")


async def test_p1_of_a_shorter_renewal(server: EmbeddedServer, limited: dict[str, str]) -> None:
    """The lease was made longer again since. Until its next renewal it lasts no longer than that copy lets it."""
    cases = [*product(("link", "plain"), (*KINDS, SHARED_LOCK))]
    wrong = await failures(cases, lambda case: of_a_shorter_renewal(server, limited, *case))
    assert not wrong, "\n".join(f"{mode}, {kind}: {error!r}" for (mode, kind), error in wrong)


async def of_a_shorter_renewal(server: EmbeddedServer, limited: dict[str, str], mode: str, kind: Kind) -> None:
    async with wired(server, mode, kind=kind, client=limited, name=f"{mode} {kind}") as w:
        lease = await w.lock(ttl=20).acquire()
        await lease.extend(20)
        rule = w.proxy.on(RENEW, HOLD, times=1)
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


async def test_p5_of_an_acquire_that_was_undone(server: EmbeddedServer, limited: dict[str, str]) -> None:
    """Its undo, which went by the next connection, leaves a tombstone: the copy is granted nothing."""
    cases = [*product(("link", "plain"), KINDS)]
    wrong = await failures(cases, lambda case: of_an_acquire_that_was_undone(server, limited, *case))
    assert not wrong, "\n".join(f"{mode}, {kind}: {error!r}" for (mode, kind), error in wrong)


async def of_an_acquire_that_was_undone(server: EmbeddedServer, limited: dict[str, str], mode: str, kind: Kind) -> None:
    async with wired(server, mode, kind=kind, client=limited, name=f"undone {mode} {kind}") as w:
        await (await w.lock().acquire()).release()
        rule = w.proxy.on(ACQUIRE, HOLD, times=1)
        request = asyncio.create_task(w.lock(ttl=60).acquire())
        await rule.fired.wait()
        w.proxy.refuse = True
        await wait_until(lambda: w.sync.connection_error is not None, SOON, timeout=15)
        request.cancel()
        await asyncio.wait([request])
        w.proxy.refuse = False
        await w.lock().statistics()  # behind the undo
        rule.release.set()
        await asyncio.sleep(0.3)
        lease = await w.elsewhere().try_acquire()
        assert lease is not None
        await lease.release()


async def test_p3_a_lease_that_ends_sooner_here_than_at_the_server_is_given_back(server: EmbeddedServer) -> None:
    """Nobody has it, so nobody is to wait for it."""
    async with wired(server, "plain") as w:
        lease = await w.lock(ttl=5, auto_renew=False).acquire()
        w.proxy.on(RENEW, CUT_AFTER, times=1)
        await lease.extend(1)
        await lease.extend(60)
        assert lease.remaining() <= 1
        following = await w.elsewhere().acquire(timeout=5)
        assert lease.lost
        await following.release()


async def test_a_release_that_failed_and_an_extension_then(server: EmbeddedServer) -> None:
    """It is held for as long as it was extended to."""
    async with wired(server) as w:
        lease = await w.lock(ttl=0.7).acquire()
        w.proxy.on(RELEASE, ERROR("OOM command not allowed when used memory > 'maxmemory'."), times=1)
        with pytest.raises(CommandRefused):
            await lease.release()
        await lease.extend(30)
        await asyncio.sleep(0.9)
        await w.check_held(lease)
        await lease.release()
        await w.check_free(lease.fence)


@pytest.mark.parametrize("monitored", [False, True])
async def test_there_is_none_of_a_connection_that_was_killed(
    server: EmbeddedServer, make_client: MakeClient, monitored: bool
) -> None:
    """With the right to do that, a lease lasts as long as it was extended to; whatever else hears all channels."""
    async with wired(server) as w:
        monitor = make_client().pubsub()
        if monitored:
            await monitor.psubscribe("*")
        lease = await w.lock(ttl=20, auto_renew=False).acquire()
        w.proxy.on(RENEW, HOLD, times=1)
        await lease.extend(1)  # by its second copy
        await lease.extend(20)
        assert lease.remaining() > 15
        await lease.release()
        await w.check_free(lease.fence)
        await monitor.aclose()  # type: ignore[no-untyped-call]


async def test_p8_of_an_acquire_when_the_fence_is_ahead_of_the_clock(server: EmbeddedServer) -> None:
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


async def test_p6_a_release_that_failed_ends_with_its_lease(server: EmbeddedServer) -> None:
    """And a task that waits for the loss hears of it."""
    async with wired(server, retry_for=0.2) as w:
        lease = await w.lock(ttl=1).acquire()
        lost = asyncio.create_task(lease.wait_lost())
        await asyncio.sleep(0)
        w.proxy.on(anything, SWALLOW_REQUEST, times=None)
        with pytest.raises(Unreachable):
            await lease.release()
        assert lease.remaining() > 0
        await asyncio.wait_for(lost, 5)
        with pytest.raises(LeaseLost):
            lease.check()
