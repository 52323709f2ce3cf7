"""P1, P3, P8, FAULTS D6: the primary of a Sentinel group is killed, and its replica takes over."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from redis_sync_aio import AsyncLock, Coordinator, wait_until

from ..support.body import FAST, waits
from ..support.inside import now
from ..support.sentinels import DOWN_AFTER, sentinels
from ..support.views import holder_of

pytestmark = pytest.mark.timing
NAME = "failover"
BOUND = 1.0
"""Seconds from when a sentinel names the new primary to the next grant.

FAULTS D6 counts from the death, down-after + 2 s; but with one second of down-after the sentinels themselves take
3.1 s until they name the new one, and no client can be earlier.
"""


async def test_p1_p3_p8_d6_the_primary_dies(tmp_path: Path) -> None:
    """A lock that had reached the replica stays held, its waiter waits on and has it next; a free one is granted."""
    async with (
        sentinels(tmp_path, DOWN_AFTER) as group,
        group.client() as client,
        group.client() as other,
        Coordinator(client) as sync,
        Coordinator(other) as elsewhere,
    ):
        free, held = sync.lock("free"), sync.lock(NAME, ttl=10)
        before = await free.acquire()
        await before.release()
        lease = await held.acquire()
        waiter = asyncio.create_task(AsyncLock(elsewhere, NAME, ttl=10).acquire())
        await wait_until(waits(held), FAST, timeout=15)
        await group.replicated()
        group.primary.kill()
        switched = asyncio.create_task(group.switched())
        after = await asyncio.wait_for(free.acquire(), 10)
        granted = now()
        assert granted - await switched <= BOUND
        assert after.fence > before.fence
        await after.release()
        lease.check()
        assert not waiter.done()
        await lease.extend(10)  # by the new primary
        assert holder_of(await held.statistics()) == lease.token
        await wait_until(waits(held), FAST, timeout=15)
        await lease.release()
        following = await asyncio.wait_for(waiter, 1)
        assert following.fence > lease.fence
        await following.release()


async def test_p8_d4_d6_a_grant_that_was_not_replicated(tmp_path: Path) -> None:
    """It is lost with the primary, as documented: another gets the lock, under a greater fence; the first learns it."""
    async with (
        sentinels(tmp_path, DOWN_AFTER) as group,
        group.client() as client,
        group.client() as other,
        Coordinator(client) as sync,
        Coordinator(other) as elsewhere,
    ):
        lock = sync.lock(NAME, ttl=10)
        await (await lock.acquire()).release()
        await group.replicated()
        await group.cut_replication()
        lease = await lock.acquire()
        group.primary.kill()
        switched = asyncio.create_task(group.switched())
        group.replica.resume()
        following = await asyncio.wait_for(AsyncLock(elsewhere, NAME, ttl=10).acquire(), 10)
        granted = now()
        assert granted - await switched <= BOUND
        assert following.fence > lease.fence
        await asyncio.wait_for(lease.wait_lost(), 10 / 3)
        assert lease._grant.reason in ("expired", "taken")  # looked at before, or after, the other had it
        following.check()
        await following.release()
