"""Cancellations that meet something which must be finished first."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio

T = TypeVar("T")

AGAIN = 0.1
"""Seconds between cancellations of what did not end."""


async def finished(task: asyncio.Task[T]) -> T:
    """Return the result of ``task``. A cancellation is raised when it is over, and does not reach it."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # looked at
        raise cancelled  # that very one: anyio knows its own by their message
    return task.result()


@contextmanager
def insisting(seconds: float) -> Iterator[None]:
    """For the block of ``asyncio.timeout(seconds)``: cancel again while it goes on after that.

    On Python < 3.12 redis-py (with a socket timeout) can swallow a cancellation that meets the end of a wait, and would
    go on with all its retries. What is asked for here is taken back at the end, so that `asyncio.timeout` still finds
    its own request, and nothing but that.
    """
    task, cancels = asyncio.current_task(), 0
    if task is None or sys.version_info >= (3, 12):
        yield
        return

    loop = task.get_loop()
    timer: asyncio.TimerHandle

    def again() -> None:
        nonlocal cancels, timer
        cancels += 1
        task.cancel()
        timer = loop.call_later(AGAIN, again)

    timer = loop.call_later(seconds + AGAIN, again)
    try:
        yield
    finally:
        timer.cancel()
        for _ in range(cancels):
            task.uncancel()


def stay_due(cancelled: asyncio.CancelledError) -> None:
    """Deliver a cancellation that was caught at the current task's next await, unless it is taken back before.

    A timeout, scope or task group around the body takes its request back (``uncancel``) when the body's error
    passes it; only a request that still counts in the next turn of the loop is due. Asking for it at once would
    leave it behind in the task on Python < 3.13, where ``uncancel`` does not take back what is under way.
    """
    task = asyncio.current_task()
    if task is None or anyio.current_effective_deadline() == -math.inf:
        return  # inside a cancelled anyio scope: anyio repeats it at every await, and only there
    requests = task.cancelling()

    def deliver() -> None:
        if not task.done() and task.cancelling() >= requests > 0:
            task.uncancel()
            task.cancel(*cancelled.args)

    task.get_loop().call_soon(deliver)
