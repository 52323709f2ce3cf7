"""The context manager around a body: acquire, guard, release, and the one exception that leaves.

P7, in this order: the body's own exception, a cancellation from outside, LeaseLost, the error of the release.
What does not leave is attached to what does as a note; nothing is swallowed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Literal, TypeAlias

import anyio

from ._guard import Guard
from .errors import SyncError
from .lease import HELD, Lease

OnLost: TypeAlias = Literal["cancel", "event"]


class Hold:
    """An ``async with`` over one lease; made by ``hold()``, used once.

    May be entered in one task and left in another (fixtures, exit stacks, generators).
    """

    task: asyncio.Task[object] | None = None
    lease: Lease | None = None
    _guard: Guard
    _entered = False

    def __init__(self, acquire: Callable[[], Awaitable[Lease]], on_lost: OnLost) -> None:
        self._acquire = acquire
        self._on_lost: OnLost = on_lost

    async def __aenter__(self) -> Lease:
        if self._entered:
            raise RuntimeError("this hold() was entered before: call hold() again for another lease")
        self._entered = True
        lease = self.lease = await self._acquire()
        if lease.state is not HELD:  # the grant arrived a turn of the loop ago; a loss since found no guard
            raise lease.loss()
        task = self.task = asyncio.current_task()
        self._guard = Guard(lease, task, self._on_lost == "cancel")
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.lease is not None
        own = None if self._guard.finish(error) else error
        try:
            self.lease.check_place()
            if own is None:
                await self.lease.release()
            else:
                await self._release_after(own, self.lease)
        except SyncError as trouble:
            if own is None:
                raise
            _note(own, trouble)

    async def _release_after(self, error: BaseException, lease: Lease) -> None:
        """Release after a body that failed: a second cancellation must not hide its error.

        A cancellation waits for the answer no longer than an answer may take (P5).
        """
        cancelled = isinstance(error, asyncio.CancelledError)
        try:
            async with asyncio.timeout(lease.patience if cancelled else None):
                await lease.release()
        except TimeoutError:
            error.add_note(f"redis_sync_aio: the release of {lease.name!r} has no answer yet and goes on")
        except asyncio.CancelledError as again:
            # The release itself goes on in the background. The body's error leaves; the cancellation stays due.
            task = asyncio.current_task()
            if cancelled or task is None:
                raise
            if anyio.current_effective_deadline() == -math.inf:
                return  # inside a cancelled anyio scope: anyio repeats it at every await, and only there
            _deliver_again(task, again)


def _note(error: BaseException, trouble: SyncError) -> None:
    """Attach what does not leave to what does, unless a body inside this one did that already."""
    note = f"redis_sync_aio: {trouble}"
    if str(trouble) != str(error) and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _deliver_again(task: asyncio.Task[object], cancelled: asyncio.CancelledError) -> None:
    """Deliver a cancellation that was caught at the task's next await, unless it is taken back before.

    A timeout, scope or task group around the body takes its request back (``uncancel``) when the body's error
    passes it; only a request that still counts in the next turn of the loop is due. Asking for it at once would
    leave it behind in the task on Python < 3.13, where ``uncancel`` does not take back what is under way.
    """
    requests = task.cancelling()

    def deliver() -> None:
        if not task.done() and task.cancelling() >= requests > 0:
            task.uncancel()
            task.cancel(*cancelled.args)

    task.get_loop().call_soon(deliver)


def ending(holds: list[Hold]) -> int:
    """Return the index of the hold whose body ends here, among those entered by one shared lock object.

    It is this task's latest; else the latest whose task has ended (a body may end in another task than it began
    in); else the latest whose lease is lost (nothing more can be lost with it); else the latest.
    """
    last = len(holds) - 1
    if last == 0:
        return 0
    task = asyncio.current_task()
    for index in range(last, -1, -1):
        if holds[index].task is task:
            return index
    for index in range(last, -1, -1):
        entered_by = holds[index].task
        if entered_by is None or entered_by.done():
            return index
    for index in range(last, -1, -1):
        lease = holds[index].lease
        if lease is not None and lease.is_lost():
            return index
    return last


def check_on_lost(value: OnLost) -> OnLost:
    """Return ``value``, or raise ValueError."""
    if value not in ("cancel", "event"):
        raise ValueError(f'on_lost must be "cancel" or "event", not {value!r}')
    return value
