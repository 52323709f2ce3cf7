"""P1, P5: a request by an identity that is cancelled takes nothing from others of this process that go by the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AsyncReadWriteLock, AsyncSemaphore, Coordinator, LeaseLost, WouldDeadlock, wait_until
from redis_sync_aio.types import BaseLease, Push

from ..conftest import MakeClient
from ..support.body import FAST
from ..support.factories import KINDS, WATCHED, Exclusive, Kind
from ..support.views import readers_of, writer_of
from ..support.wired import quiet_loop as quiet_loop

NAME = "named"
WHO: dict[str, Any] = {"identity": "w"}
kinds = pytest.mark.parametrize("kind", [*KINDS, *WATCHED], ids=str)
Acquire = Callable[[], Coroutine[Any, Any, BaseLease]]
TURNS = 14
"""Of the loop: more than an acquire takes."""


@pytest_asyncio.fixture(params=["auto", "never"])
async def sync(request: pytest.FixtureRequest, make_client: MakeClient) -> AsyncIterator[Coordinator]:
    push: Push = request.param
    async with Coordinator(make_client(), push=push) as coordinator:
        yield coordinator


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def cancel(*tasks: asyncio.Task[BaseLease]) -> list[BaseLease]:
    """Cancel them; return what those got that were over."""
    for task in tasks:
        task.cancel()
    got = []
    for task in tasks:
        with suppress(asyncio.CancelledError):
            got.append(await task)
    return got


async def check_held(kind: Kind, lock: Exclusive, redis: Redis, lease: BaseLease) -> None:
    """Also when all that is in flight has arrived."""
    await lock.statistics()
    lease.check()
    assert await kind.token(redis, NAME) == b"w"
    await lease.release()


async def check_nothing_left(kind: Kind, redis: Redis) -> None:
    async def empty() -> bool:
        return await kind.empty(redis, NAME)

    await wait_until(empty, FAST, timeout=5)


@kinds
@pytest.mark.parametrize("number", range(TURNS))
async def test_cancelled_and_again(sync: Coordinator, redis: Redis, kind: Kind, number: int) -> None:
    """As a task does that tries again after a timeout of its own."""
    lock = kind.make(sync, NAME)
    await lock.locked()  # connected
    first = asyncio.create_task(lock.acquire(**WHO))
    await turns(number)
    await cancel(first)
    second = await lock.acquire(**WHO)
    await check_held(kind, lock, redis, second)
    await check_nothing_left(kind, redis)


@kinds
@pytest.mark.parametrize("number", range(TURNS))
async def test_cancelled_beside_another(sync: Coordinator, redis: Redis, kind: Kind, number: int) -> None:
    """The other one may have joined it, or be about to."""
    lock = kind.make(sync, NAME)
    await lock.locked()
    first, second = (asyncio.create_task(lock.acquire(**WHO)) for _ in range(2))
    await turns(number)
    await cancel(first)
    await check_held(kind, lock, redis, await second)
    await check_nothing_left(kind, redis)


@kinds
@pytest.mark.parametrize("number", range(TURNS))
async def test_all_cancelled(sync: Coordinator, redis: Redis, kind: Kind, number: int) -> None:
    """Then nobody has it, and nobody keeps it."""
    lock = kind.make(sync, NAME)
    await lock.locked()
    tasks = [asyncio.create_task(lock.acquire(**WHO)) for _ in range(3)]
    await turns(number)
    got = await cancel(*tasks)
    for lease in got[:1]:
        await lease.release()
    await check_nothing_left(kind, redis)


@kinds
@pytest.mark.parametrize("number", range(0, TURNS, 2))
@pytest.mark.parametrize("cancelled", [0, 1])
async def test_cancelled_around_the_hand_over(
    sync: Coordinator, other: Coordinator, redis: Redis, kind: Kind, number: int, cancelled: int
) -> None:
    """Two wait by one identity; either leaves when it is handed over."""
    lock, elsewhere = kind.make(sync, NAME), kind.make(other, NAME)
    holder = await elsewhere.acquire()
    tasks = [asyncio.create_task(lock.acquire(**WHO)) for _ in range(2)]

    async def queued() -> bool:
        return (await elsewhere.statistics()).waiting >= 2

    await wait_until(queued, FAST, timeout=5)
    releasing = asyncio.create_task(holder.release())
    await turns(number)
    await cancel(tasks[cancelled])
    lease = await asyncio.wait_for(tasks[1 - cancelled], 5)
    await releasing
    await check_held(kind, lock, redis, lease)
    await check_nothing_left(kind, redis)


@pytest.mark.parametrize("number", range(0, TURNS, 2))
async def test_what_was_cancelled_decides_nothing(sync: Coordinator, redis: Redis, number: int) -> None:
    """Neither how many permits the next request gets nor on which side of a read/write lock."""
    semaphore, rw = AsyncSemaphore(sync, NAME, limit=5), AsyncReadWriteLock(sync, NAME)
    cases: list[tuple[Acquire, Acquire, int | None]] = [
        (lambda: semaphore.acquire(weight=1, **WHO), lambda: semaphore.acquire(weight=3, **WHO), 3),
        (lambda: rw.read().acquire(**WHO), lambda: rw.write().acquire(**WHO), None),
    ]
    for first, second, weight in cases:
        task = asyncio.create_task(first())
        await turns(number)
        for got in await cancel(task):
            await got.release()
        lease = await second()
        assert weight in (lease.weight, None)
        await lease.release()
    assert (await semaphore.statistics()).held == 0


async def test_the_other_side_was_joined_by_nobody(sync: Coordinator, redis: Redis) -> None:
    """Who asks for the other side at the same time is told so; what the cancelled one got is given back."""
    rw = AsyncReadWriteLock(sync, NAME)
    for number in range(TURNS):
        read = asyncio.create_task(rw.read().acquire(**WHO))
        write = asyncio.create_task(rw.write().acquire(**WHO))
        await turns(number)
        got = await cancel(read)
        try:
            got.append(await write)
        except WouldDeadlock:
            pass
        for lease in got:
            await lease.release()

        async def free() -> bool:
            found = await rw.statistics()
            return writer_of(found) is None and readers_of(found) == 0

        await wait_until(free, FAST, timeout=5)


@kinds
@pytest.mark.parametrize("number", range(0, TURNS, 2))
async def test_a_lease_that_is_gone_inherits_nothing(sync: Coordinator, redis: Redis, kind: Kind, number: int) -> None:
    """Others may have been in between; nobody here knows yet that it is gone."""
    lock = kind.make(sync, NAME, auto_renew=False)
    gone = await lock.acquire(**WHO)
    await kind.vanish(redis, NAME)
    again = asyncio.create_task(lock.acquire(**WHO))
    await turns(number)
    for lease in await cancel(again):
        await lease.release()
    await check_nothing_left(kind, redis)
    with suppress(LeaseLost):
        await gone.release()
