"""What the tests of local sharing have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, Coordinator, Lease, wait_until
from redis_sync_aio.types import BaseLease

from .body import FAST
from .inside import CONTENDED, ProcessGrant, TaskGrant, cohorts_of, hub_of, link_events_of, lock_keys, read_push

L = TypeVar("L", bound=BaseLease)
NAME = "shared"
KEYS = lock_keys(NAME.encode())


def shared(sync: Coordinator | Redis, name: str = NAME, **options: Any) -> AsyncLock:
    """Return a lock that is shared."""
    return AsyncLock(sync, name, **{"ttl": 30, "share": True, **options})


def process_grant_of(lease: BaseLease) -> ProcessGrant:
    """Return the lease on the server that ``lease`` is a part of."""
    grant = lease._grant
    assert isinstance(grant, TaskGrant)
    return grant.process_grant


async def queued(redis: Any) -> int:
    """Return how many tickets there are."""
    return int(await redis.zcard(KEYS.queue))


async def in_queue(redis: Redis, number: int) -> None:
    """Wait until there are so many tickets."""

    async def so_many() -> bool:
        return await queued(redis) == number

    await wait_until(so_many, FAST, timeout=15)


async def in_line(sync: Coordinator, number: int, name: bytes = KEYS.id) -> None:
    """Wait until so many tasks of ``sync`` wait."""

    async def so_many() -> bool:
        local = hub_of(sync).resources.get(name)
        return number == (0 if local is None else sum(cohort.waiting for cohort in cohorts_of(local).values()))

    await wait_until(so_many, FAST, timeout=15)


async def waiters(lock: AsyncLock, sync: Coordinator, number: int, **options: Any) -> list[asyncio.Task[Lease]]:
    """Start so many tasks that acquire, in order; return when all of them wait."""
    tasks = [asyncio.create_task(lock.acquire(**options), name=f"waiter {n}") for n in range(number)]
    await in_line(sync, number)
    return tasks


async def told(base: ProcessGrant) -> None:
    """Wait until its process knows that others wait."""
    await wait_until(lambda: base.contended, FAST, timeout=15)


async def soon(task: asyncio.Future[L]) -> L:
    """Return the lease that is granted now."""
    return await asyncio.wait_for(task, 5)


async def gets_free(redis: Redis) -> None:
    """Wait until nobody holds it: what others waited for is given back in the background."""

    async def free() -> bool:
        return not await redis.exists(NAME)

    await wait_until(free, FAST, timeout=15)


async def nothing_kept(sync: Coordinator) -> None:
    """Wait until ``sync`` knows of nothing that it shares: a moment after the server does."""
    await wait_until(lambda: not hub_of(sync).listeners, FAST, timeout=15)


async def turns(number: int = 5) -> None:
    """Let the loop turn so often."""
    for _ in range(number):
        await asyncio.sleep(0)


def on_wanted(sync: Coordinator, act: Callable[[Callable[[], None]], None]) -> None:
    """Let ``act(deliver)`` decide when the word that others wait is delivered to ``sync``, if at all."""
    let_in = link_events_of(sync).link_pushed

    def pushed(payload: bytes) -> None:
        if payload and read_push(payload).fence == CONTENDED:
            act(lambda: let_in(payload))
        else:
            let_in(payload)

    link_events_of(sync).link_pushed = pushed  # type: ignore[method-assign]


@asynccontextmanager
async def busy(lock: AsyncLock, number: int) -> AsyncIterator[list[Lease]]:
    """So many tasks that have the lock one after the other; yields their leases so far. They end in good order."""
    leases: list[Lease] = []
    ends = False

    async def one() -> None:
        while not ends:
            async with lock as lease:
                leases.append(lease)
                await asyncio.sleep(0)

    tasks = [asyncio.create_task(one()) for _ in range(number)]
    await wait_until(lambda: len(leases) > number, FAST, timeout=15)
    try:
        yield leases
    finally:
        ends = True
        await asyncio.gather(*tasks)
