"""Upgrades of readers that share their permit with other tasks, and what ends with what (P1, P5, P6)."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AcquireTimeout,
    AsyncReadWriteLock,
    Coordinator,
    LeaseLost,
    NotHeld,
    WouldDeadlock,
    wait_until,
)
from redis_sync_aio.types import GuardingLease

from ..support.body import FAST
from ..support.inside import TaskGrant, now
from ..support.sharing import turns

NAME = "shared"


def upgrading(rw: AsyncReadWriteLock, lease: GuardingLease) -> asyncio.Task[GuardingLease]:
    return asyncio.create_task(rw.upgrade(lease).__aenter__())


async def test_an_upgrade_waits_for_the_readers_beside_it(sync: Coordinator) -> None:
    """P1: those that share its permit have to leave first; a second upgrade is a deadlock, and told so."""
    rw = AsyncReadWriteLock(sync, NAME, share=True)
    first, second = await rw.read().acquire(), await rw.read().acquire()
    entered = asyncio.Event()

    async def upgrade() -> GuardingLease:
        async with rw.upgrade(first) as writing:
            entered.set()
            writing.check()
        return writing

    task = asyncio.create_task(upgrade())
    await asyncio.sleep(0)
    with pytest.raises(WouldDeadlock):
        async with rw.upgrade(second):
            pass
    assert not entered.is_set()
    await second.release()
    await asyncio.wait_for(task, 15)
    first.check()
    await first.release()
    assert not await rw.locked()


@pytest.mark.parametrize("timeout", [0, 0.02])
async def test_an_upgrade_that_ends_early_reads_on(sync: Coordinator, timeout: float) -> None:
    """P5: the reader's lease is as it was, and later readers get in."""
    rw = AsyncReadWriteLock(sync, NAME, share=True)
    mine, beside = await rw.read().acquire(), await rw.read().acquire()
    with pytest.raises(AcquireTimeout):
        async with rw.upgrade(mine, timeout=timeout):
            raise AssertionError
    later = await rw.read().acquire(timeout=15)
    for lease in (mine, beside, later):
        lease.check()
        await lease.release()
    assert not await rw.locked()


@pytest.mark.parametrize("how", ["lost", "expired", "released"])
@pytest.mark.timing
async def test_p1_an_upgrade_of_what_ended_meanwhile(sync: Coordinator, redis: Redis, how: str) -> None:
    """P1: while it waits for the other readers the permit is lost, or only its own lease ends: it never writes."""
    rw = AsyncReadWriteLock(sync, NAME, ttl=0.3 if how == "lost" else 30, share=True)
    brief = AsyncReadWriteLock(sync, NAME, ttl=0.1, auto_renew=False, share=True)
    beside = await rw.read().acquire()
    mine = await (brief if how == "expired" else rw).read().acquire()
    assert isinstance(mine._grant, TaskGrant)
    assert isinstance(beside._grant, TaskGrant)
    assert mine._grant.process_grant is beside._grant.process_grant
    entering = upgrading(rw, mine)
    await turns()
    if how == "lost":
        await redis.delete(*rw.read()._keys.all)
    elif how == "released":
        await mine.release()
    with pytest.raises(NotHeld if how == "released" else LeaseLost):
        await asyncio.wait_for(entering, 5)
    if how == "lost":
        assert beside.lost
        return
    beside.check()
    assert (await rw.statistics()).readers == 1
    await beside.release()
    assert not await rw.locked()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.timing
async def test_p1_a_writer_is_lost_with_the_reader_it_was(sync: Coordinator, share: bool) -> None:
    """P1, P6: the reader's lease is not renewed. What its upgrade was extended to does not outlast the permit."""
    rw = AsyncReadWriteLock(sync, NAME, ttl=0.3, auto_renew=False, share=share)
    mine = await rw.read().acquire()
    await wait_until(lambda: mine.remaining() < 0.25, FAST, timeout=5)
    writer = await asyncio.wait_for(upgrading(rw, mine), 5)
    left = mine.remaining()
    assert 0 < writer.remaining() <= left + 0.001
    if share:
        await writer.extend(30)
    await asyncio.wait_for(mine.wait_lost(), 5)
    assert writer.lost
    assert not writer.remaining()

    async def is_free() -> bool:
        return not await rw.locked()

    await wait_until(is_free, FAST, timeout=5)


@pytest.mark.timing
async def test_p6_a_writer_that_is_renewed_ends_with_max_hold(sync: Coordinator) -> None:
    """P6: of the reader that it was, which has a permit together with one that has no such limit."""
    rw = AsyncReadWriteLock(sync, NAME, ttl=0.5, share=True)
    brief = AsyncReadWriteLock(sync, NAME, ttl=0.5, max_hold=1, share=True)
    beside, began = await rw.read().acquire(), now()
    mine = await brief.read().acquire()
    entering = upgrading(brief, mine)
    await turns()
    await beside.release()
    writer = await asyncio.wait_for(entering, 5)
    await asyncio.wait_for(writer.wait_lost(), 5)
    assert 0.9 < now() - began < 3
    await asyncio.wait_for(mine.wait_lost(), 5)


async def test_p5_a_reader_that_ends_late_lets_an_upgrade_go_on(sync: Coordinator) -> None:
    """P5: it is given back after its own end, before that was noticed: no longer next to one that waits to write."""
    rw = AsyncReadWriteLock(sync, NAME, share=True)
    mine, beside = await rw.read().acquire(), await rw.read().acquire()
    assert isinstance(beside._grant, TaskGrant)
    entering = upgrading(rw, mine)
    await turns()
    beside._grant.deadline = now()
    beside._grant.give_back()
    await (await asyncio.wait_for(entering, 5)).release()
    await mine.release()
    assert not await rw.locked()
