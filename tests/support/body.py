"""Small parts of bodies and conditions that the tests of leases share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from redis_sync_aio import AsyncReadWriteLock, Backoff, LeaseLost
from redis_sync_aio.types import BaseLease

from .inside import behind_tickets
from .primitives import Exclusive

L = TypeVar("L", bound=BaseLease)

FAST = Backoff(initial=0.001, cap=0.005)
"""For `wait_until`: look often."""


async def for_ever() -> None:
    """A body that only ends by being cancelled."""
    await asyncio.Event().wait()


def later(turns: int, action: Callable[[], object]) -> None:
    """Do ``action`` after so many turns of the loop (0: in the next one)."""
    loop = asyncio.get_running_loop()
    if turns:
        loop.call_soon(later, turns - 1, action)
    else:
        loop.call_soon(action)


def waits(lock: Exclusive | AsyncReadWriteLock, count: int = 1) -> Callable[[], Awaitable[bool]]:
    """Return a condition for `wait_until`: so many requests are queued, or tasks of this process behind them."""

    async def condition() -> bool:
        return (await lock.statistics()).waiting + behind_tickets(lock) == count

    return condition


async def assert_undisturbed() -> None:
    """No cancellation is left behind in this task: none is counted, and later awaits work."""
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    for _ in range(3):
        await asyncio.sleep(0)


async def lost_in(hold: AbstractAsyncContextManager[L], body: Callable[[L], Awaitable[object]]) -> tuple[L, LeaseLost]:
    """Run ``body(lease)`` under ``hold``; it has to end with LeaseLost, and without a trace in this task."""
    held: list[L] = []
    try:
        async with asyncio.timeout(20), hold as lease:
            held.append(lease)
            await body(lease)
    except LeaseLost as error:
        await assert_undisturbed()
        return held[0], error
    raise AssertionError("nothing was lost")
