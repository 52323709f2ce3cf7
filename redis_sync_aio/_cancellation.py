"""Cancellations that meet something which must be finished first."""

from __future__ import annotations

import asyncio
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TypeVar

import anyio

T = TypeVar("T")

SWALLOWED = sys.version_info < (3, 12)
"""redis-py, with a socket timeout, can swallow a cancellation that meets the end of a wait (by `asyncio.wait_for`)."""
AGAIN = 0.1 if SWALLOWED else None
"""Seconds between cancellations of an attempt whose time is up."""


def undo_in(loop: asyncio.AbstractEventLoop, undo: Callable[[], object]) -> None:
    """Call ``undo`` in ``loop``: now where that runs, else as soon as it runs; never if it is closed.

    What a coroutine began is undone when its await ends, however it ends. That may be by `GeneratorExit`: by
    ``close()``, or in whatever thread the garbage collector finds that nobody awaits it any more.
    """
    if asyncio._get_running_loop() is loop:
        undo()
        return
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(undo)


async def finished(task: asyncio.Task[T]) -> T:
    """Return the result of ``task``. A cancellation is raised when it is over, and does not reach it.

    Of several it is the latest; of one by anyio and one by others, that of the others.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            # anyio repeats its own in every turn of the loop, but for a shield.
            with nullcontext() if cancelled is None else anyio.CancelScope(shield=True):
                await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # looked at
        raise cancelled  # that very one: anyio knows its own by their message
    return task.result()


class Cancelling:
    """Cancels a task, and again every so many seconds (None: not again) while it goes on, until that is taken back."""

    def __init__(self, task: asyncio.Task[object], every: float | None) -> None:
        self._task = task
        self._every = every
        self._count = 0
        self._timer: asyncio.Handle | None = None

    def cancel(self, *why: object) -> None:
        """Cancel it now, for the reason ``why``."""
        if self._task.done():
            return
        if getattr(self._task.get_coro(), "cr_running", False):
            # From an eager task that it just creates. Python < 3.13 would cancel its next await, also when that is
            # behind the body and this was taken back.
            self._timer = self._task.get_loop().call_soon(self.cancel, *why)
            return
        self._count += 1
        self._task.cancel(*why)
        if self._every is not None:
            self._timer = self._task.get_loop().call_later(self._every, self.cancel, *why)

    def take_back(self) -> None:
        """Not again; and what was requested so does not count any more."""
        if self._timer is not None:
            self._timer.cancel()
        for _ in range(self._count):
            self._task.uncancel()


@contextmanager
def insisting(seconds: float | None) -> Iterator[None]:
    """For the block of ``asyncio.timeout(seconds)``: cancel again while it goes on after that (`SWALLOWED`).

    redis-py would go on with all its retries. `asyncio.timeout` finds its own request afterwards, and nothing but that.
    """
    task = asyncio.current_task()
    if seconds is None or task is None or AGAIN is None:
        yield
        return
    again = Cancelling(task, AGAIN)
    timer = task.get_loop().call_later(seconds + AGAIN, again.cancel)
    try:
        yield
    finally:
        timer.cancel()
        again.take_back()


def stay_due(cancelled: asyncio.CancelledError, before: int) -> None:
    """Deliver a cancellation that was caught at the current task's next await, unless it is taken back before.

    A timeout, scope or task group around the body takes its request back (``uncancel``) when the body's error
    passes it; only a request that still counts in the next turn of the loop is due. Asking for it at once would
    leave it behind in the task on Python < 3.13, where ``uncancel`` does not take back what is under way.

    ``before``: how many requests counted when the body began.
    """
    task = asyncio.current_task()
    if task is None or _BY_ANYIO.match(str(cancelled)):
        return  # it is repeated at every await inside the scope, and only there
    inside_cancelled_scope = anyio.current_effective_deadline() == -math.inf
    # A scope of anyio takes back its own requests, which count until then.
    least = before + 1 if inside_cancelled_scope else max(1, task.cancelling())

    def deliver() -> None:
        if not task.done() and task.cancelling() >= least:
            task.uncancel()
            task.cancel(*cancelled.args)

    task.get_loop().call_soon(deliver)


_BY_ANYIO = re.compile("Cancelled (by|via) cancel scope ")
"""How anyio knows its own."""
