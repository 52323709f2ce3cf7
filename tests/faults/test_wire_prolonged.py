"""P1, P5, P6: renewals without an answer. The server may have executed them, in the order in which they were sent."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from redis_sync_aio import LeaseLost, SyncError
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import BaseLease

from ..support.factories import KINDS, SHARED_LOCK, SHARED_SEMAPHORE, Kind
from ..support.proxy import HOLD_REPLY, SWALLOW_REPLY
from ..support.wired import RENEW, Wired, wired
from ..support.wired import quiet_loop as quiet_loop

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
