"""What every primitive promises: the same calls, one at a time, in order, rising fences, and an end that others notice.

Its losses are in test_loss.py, its exceptions in test_exceptions.py, its cancellations in test_cancellation.py.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncReadWriteLock, AsyncRedlock, AsyncSemaphore, Coordinator, LeaseLost, NotHeld, wait_until
from redis_sync_aio.errors import CoordinatorClosed

from ..conftest import MakeClient
from ..support.body import FAST, for_ever, lost_in
from ..support.inside import behind_tickets
from ..support.primitives import ALONE, EVERY, PRIMITIVES, Primitive, each, on_one_server

VERBS = ("acquire", "try_acquire", "release", "locked", "statistics", "force_release")
PATIENCE = 20.0
every = each(on_one_server(EVERY))
alone = each(on_one_server(ALONE))


async def waiting(lock: Any) -> int:
    """Count the requests in its queues."""
    found = await lock.statistics()
    return max(one.waiting for one in found) if isinstance(found, tuple) else int(found.waiting)


async def free(lock: Any) -> None:
    """Wait until it is free: one that lingers is kept for a moment."""

    async def condition() -> bool:
        return not await lock.locked()

    await wait_until(condition, FAST, timeout=PATIENCE)


@each(PRIMITIVES)
async def test_it_has_the_same_calls(sync: Coordinator, primitive: Primitive) -> None:
    made = AsyncRedlock if primitive.servers > 1 else primitive.make(sync)
    assert [verb for verb in VERBS if not callable(getattr(made, verb, None))] == []


# -- one at a time -----------------------------------------------------------------------------------------------------


@alone
async def test_p1_p8_one_is_inside_and_fences_rise(sync: Coordinator, other: Coordinator, primitive: Primitive) -> None:
    """Of many tasks of two processes, whether they share an object or make their own."""
    inside: list[int] = []
    fences: list[int] = []
    objects = [primitive.make(one) for one in (sync, other)]

    async def work(number: int) -> None:
        lock = objects[number % 2] if number < 6 else primitive.make((sync, other)[number % 2])
        for _ in range(2):
            async with lock.acquire(timeout=60) as lease:
                inside.append(number)
                await asyncio.sleep(0)
                assert inside == [number]
                inside.clear()
                fences.append(lease.fence)

    await asyncio.gather(*map(work, range(10)))
    assert len(fences) == 20
    assert fences == sorted(set(fences))
    await free(objects[0])


@each(it for it in on_one_server(ALONE) if not it.share)
async def test_p2_it_is_granted_in_the_order_of_the_requests(
    sync: Coordinator, other: Coordinator, primitive: Primitive
) -> None:
    """P3: pushed, one after the other; a request that does not wait gets nothing meanwhile."""
    lock = primitive.make(sync)
    held = await lock.acquire()
    order: list[int] = []

    async def take_turn(number: int) -> None:
        async with primitive.make((sync, other)[number % 2]).acquire(timeout=60):
            order.append(number)

    tasks = []
    for number in range(4):
        tasks.append(asyncio.create_task(take_turn(number)))

        async def queued(number: int = number) -> bool:
            return await waiting(lock) == number + 1

        await wait_until(queued, FAST, timeout=PATIENCE)
    await held.release()
    assert await primitive.make(other).try_acquire() is None
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3]


@every
async def test_p8_fences_rise_after_everything_was_lost(sync: Coordinator, redis: Redis, primitive: Primitive) -> None:
    async with primitive.make(sync) as before:
        pass
    await redis.flushall()
    async with primitive.make(sync) as after:
        assert after.fence > before.fence


# -- ends --------------------------------------------------------------------------------------------------------------


@every
async def test_it_is_taken_away_by_force(sync: Coordinator, other: Coordinator, primitive: Primitive) -> None:
    """The next caller gets it immediately, and the former holder learns that it has lost it."""
    one, two = primitive.make(sync, ttl=3), primitive.make(other, ttl=3)
    assert not await one.locked()
    assert not await one.force_release()
    first = await one.acquire()
    assert await two.locked() is primitive.alone
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
    task = asyncio.create_task(AsyncSemaphore(other, "it", limit=150).acquire())
    await wait_until(lambda: waiting(many), FAST, timeout=PATIENCE)
    assert await AsyncSemaphore(other, "it", limit=None).force_release() == 150
    async with await asyncio.wait_for(task, PATIENCE):
        assert (await many.statistics()).held == 1


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


@every
async def test_it_is_left_in_another_task(sync: Coordinator, primitive: Primitive) -> None:
    """P7, P12: as a fixture is torn down: the lock is free, and the lease says so."""
    lock = primitive.make(sync)
    for way_in in (lock, lock.acquire()):
        stack = AsyncExitStack()
        lease = await stack.enter_async_context(way_in)
        await asyncio.create_task(stack.aclose())
        await free(lock)
        with pytest.raises(NotHeld):
            lease.check()


@alone
async def test_p12_the_end_of_its_coordinator(
    make_client: MakeClient, other: Coordinator, primitive: Primitive
) -> None:
    """Who holds it loses it, a waiter is told, and a process that waits has it."""
    async with Coordinator(make_client()) as sync:
        lock = primitive.make(sync)
        held: asyncio.Future[object] = asyncio.get_running_loop().create_future()

        async def body(lease: object) -> None:
            held.set_result(lease)
            await for_ever()

        losing = asyncio.create_task(lost_in(lock.acquire(), body))
        await held
        theirs = asyncio.create_task(primitive.make(other).acquire())

        async def queued(number: int) -> bool:
            return await waiting(lock) == number

        await wait_until(lambda: queued(1), FAST, timeout=PATIENCE)
        own = asyncio.create_task(lock.acquire())
        if primitive.share:
            await wait_until(lambda: behind_tickets(lock) == 1, FAST, timeout=PATIENCE)
        else:
            await wait_until(lambda: queued(2), FAST, timeout=PATIENCE)
        await sync.aclose()
        _, error = await losing
        assert error.reason == "closed"
        with pytest.raises(CoordinatorClosed, match="'it"):
            await own
    async with asyncio.timeout(PATIENCE):
        await (await theirs).release()
    await free(primitive.make(other))


@every
async def test_f8_an_exit_without_an_entry(sync: Coordinator, primitive: Primitive) -> None:
    """The error says what to do, and the lease is left alone."""
    lock = primitive.make(sync)
    lease = await lock.acquire()
    with pytest.raises(NotHeld, match=r"'it.*'.* was not entered.*enter_async_context\(lease\)"):
        async with AsyncExitStack() as stack:
            stack.push_async_exit(lock)
    lease.check()
    await lease.release()
