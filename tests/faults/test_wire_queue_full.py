"""P4 for max_waiting: whatever happens to a refused request or its answer, it leaves nothing in the queue."""

from __future__ import annotations

import asyncio

import pytest

from redis_sync_aio import QueueFull, wait_until
from redis_sync_aio.embedded import EmbeddedServer

from ..support.factories import LOCK, SEMAPHORE, Kind
from ..support.wire_sweep import ANSWERS, WIRE, Arm, Case, sweep
from ..support.wired import ACQUIRE, SOON, Wired
from ..support.wired import quiet_loop as quiet_loop


async def refused(w: Wired, arm: Arm) -> int:
    """Ask for what is held, and waited for by as many as may wait."""
    holder = await w.elsewhere().acquire()
    waiting = asyncio.create_task(w.elsewhere().acquire())
    try:
        await w.queued(waiting=waiting)
        arm(ACQUIRE)
        with pytest.raises(QueueFull, match="1 request waits"):
            await w.lock(max_waiting=1).acquire()

        async def alone() -> bool:
            return (await w.elsewhere().statistics()).waiting == 1

        await wait_until(alone, SOON, timeout=15)
        await holder.release()
        lease = await waiting
        await lease.release()
        return lease.fence
    finally:
        waiting.cancel()  # if a step before has failed


@pytest.mark.parametrize("mode", ["link", "plain"])
@pytest.mark.parametrize("kind", [LOCK, SEMAPHORE], ids=str)
async def test_sweep(server: EmbeddedServer, kind: Kind, mode: str) -> None:
    faults = WIRE | ANSWERS
    cases = [Case(refused, mode, fault, faults[fault], kind=kind) for fault in faults]
    assert await sweep(server, cases) == len(cases) == 18
