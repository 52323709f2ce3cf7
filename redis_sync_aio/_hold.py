"""The context manager around a body: acquire, guard, release, and the one exception that leaves.

P7, in this order: the body's own exception, a cancellation from outside, LeaseLost, the error of the release.
What does not leave is attached to what does as a note; nothing is swallowed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Literal, TypeAlias

from ._guard import Guard
from .errors import SyncError
from .lease import Lease

OnLost: TypeAlias = Literal["cancel", "event"]


class Hold:
    """An ``async with`` over one lease; made by ``hold()``, used once.

    May be entered in one task and left in another (fixtures, exit stacks, generators).
    """

    __slots__ = ("_acquire", "_entered", "_guard", "_on_lost", "lease", "task")

    def __init__(self, acquire: Callable[[], Awaitable[Lease]], on_lost: OnLost) -> None:
        self._acquire = acquire
        self._on_lost: OnLost = on_lost
        self._guard: Guard
        self._entered = False
        self.lease: Lease
        self.task: asyncio.Task[object] | None = None

    async def __aenter__(self) -> Lease:
        if self._entered:
            raise RuntimeError("this hold() was entered before: call hold() again for another lease")
        self._entered = True
        self.lease = await self._acquire()
        # No await between the grant and the guard: a loss in between is found right here.
        self.task = asyncio.current_task()
        self._guard = Guard(self.lease, self._on_lost == "cancel")
        return self.lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost_us = self._guard.finish(error)
        own = None if lost_us else error
        try:
            await self._release(own)
        except SyncError as trouble:
            if own is None:
                raise trouble from None
            own.add_note(f"redis_sync_aio: {trouble}")

    async def _release(self, error: BaseException | None) -> None:
        """Release; when the body failed, do not let a second cancellation hide its error."""
        try:
            await self.lease.release()
        except asyncio.CancelledError:
            # The release itself goes on in the background. The body's error leaves, and the cancellation
            # stays due: taken back and asked for anew, it is delivered at the task's next await.
            task = asyncio.current_task()
            if error is None or isinstance(error, asyncio.CancelledError) or task is None:
                raise
            if task.cancelling():
                task.uncancel()
            task.cancel()


class Holds:
    """The bodies that entered by ``async with lock`` itself, so that each is left with its own lease.

    One lock object may be shared by many tasks, and a body may end in another task than it began in. The one
    that ends is this task's latest; else the latest whose task has ended; else the latest.
    """

    __slots__ = ("_holds",)

    def __init__(self) -> None:
        self._holds: list[Hold] = []

    async def enter(self, hold: Hold) -> Lease:
        """Enter ``hold`` and remember it."""
        lease = await hold.__aenter__()
        self._holds.append(hold)
        return lease

    async def leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the body that ends here."""
        await self._holds.pop(self._ending()).__aexit__(kind, error, trace)

    def _ending(self) -> int:
        task = asyncio.current_task()
        newest_first = range(len(self._holds) - 1, -1, -1)
        for index in newest_first:
            if self._holds[index].task is task:
                return index
        for index in newest_first:
            entered_by = self._holds[index].task
            if entered_by is None or entered_by.done():
                return index
        return -1


def check_on_lost(value: OnLost) -> OnLost:
    """Return ``value``, or raise ValueError."""
    if value not in ("cancel", "event"):
        raise ValueError(f'on_lost must be "cancel" or "event", not {value!r}')
    return value
