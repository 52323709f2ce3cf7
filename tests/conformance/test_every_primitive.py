"""Every primitive that is acquired is acquired, looked at and released by the same calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncRedlock,
    AsyncReentrantLock,
    AsyncRobustLock,
    AsyncSemaphore,
    Coordinator,
    LeaseLost,
    NotHeld,
    wait_until,
)
from redis_sync_aio.types import ReadSide, WriteSide

from ..support.body import FAST
from ..support.primitives import MAKERS

VERBS = ("acquire", "try_acquire", "release", "locked", "statistics", "force_release")
EVERY_CLASS = (
    *(AsyncLock, AsyncRobustLock, AsyncReentrantLock, AsyncMultiLock, AsyncRedlock),
    *(AsyncSemaphore, ReadSide, WriteSide),
)
PATIENCE = 20.0


@pytest.mark.parametrize("kind", [*EVERY_CLASS], ids=lambda kind: kind.__name__)
def test_it_has_the_same_calls(kind: type) -> None:
    assert [verb for verb in VERBS if not callable(getattr(kind, verb, None))] == []


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "redlock"])
async def test_it_is_taken_away_by_force(sync: Coordinator, other: Coordinator, kind: str) -> None:
    """The next caller gets it immediately, and the former holder learns that it has lost it."""
    one, two = MAKERS[kind](sync, "it", ttl=3), MAKERS[kind](other, "it", ttl=3)
    assert not await one.locked()
    assert not await one.force_release()
    first = await one.acquire()
    assert await two.locked() is (kind != "reader")
    assert await two.force_release() >= 1
    assert not await two.locked()
    second = await two.try_acquire()
    assert second is not None
    assert await asyncio.wait_for(first.wait_lost(), PATIENCE)
    with pytest.raises(LeaseLost):
        await first.release()
    second.check()
    await two.release()
    with pytest.raises(NotHeld):
        await two.release()


async def test_force_takes_from_all_holders_of_a_semaphore(sync: Coordinator, other: Coordinator) -> None:
    """Whatever they are called, and more of them than one write has."""
    many = AsyncSemaphore(sync, "it", limit=150)
    leases = [await many.acquire(identity=b"\xff" + b"%d" % number) for number in range(149)]
    leases.append(await many.acquire())
    waiting = asyncio.create_task(AsyncSemaphore(other, "it", limit=150).acquire())
    await wait_until(lambda: _waits(many), FAST, timeout=PATIENCE)
    assert await AsyncSemaphore(other, "it", limit=None).force_release() == 150
    async with await asyncio.wait_for(waiting, PATIENCE):
        assert (await many.statistics()).held == 1


async def _waits(primitive: Any) -> bool:
    return bool((await primitive.statistics()).waiting)


@pytest.mark.parametrize("side", ["read", "write"])
async def test_force_takes_from_its_own_side_alone(sync: Coordinator, other: Coordinator, side: str) -> None:
    """And each side is locked where it cannot be acquired."""
    here, there = AsyncReadWriteLock(sync, "it"), AsyncReadWriteLock(other, "it")
    sides: dict[str, Any] = {"read": here.read(), "write": here.write()}
    own, opposite = there.read(), there.write()
    if side == "write":
        own, opposite = opposite, own  # type: ignore[assignment]
    lease = await sides[side].acquire()
    assert (await there.read().locked(), await there.write().locked()) == (side == "write", True)
    assert await opposite.force_release() == 0
    lease.check()
    await lease.extend(30)
    assert await own.force_release() == 1
    assert not await there.locked()
    with pytest.raises(LeaseLost):
        await lease.extend(30)
