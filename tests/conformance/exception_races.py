"""An exception, and what happens at the same time."""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from contextlib import suppress
from typing import NoReturn

from redis_sync_aio.errors import LossReason
from redis_sync_aio.types import BaseLease

NAME = "races"


def this_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task


def lose_now(lease: BaseLease, reason: LossReason = "taken") -> None:
    """Lose the lease in this turn of the loop; the server knows nothing of it."""
    lease._grant.lose(reason)


class ChildError(Exception):
    """Raised by a child of a group."""


async def group_that_fails() -> None:
    """Catch the failure of a group, whose exit is waiting for the child. It leaves a count on Python < 3.13."""

    async def fail() -> NoReturn:
        await asyncio.sleep(0)
        raise ChildError

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
    except* ChildError:
        pass


async def swallowed_cancellation() -> None:
    """Leave a count of one in this task."""
    with suppress(CancelledError):
        this_task().cancel()
        await asyncio.sleep(0)
