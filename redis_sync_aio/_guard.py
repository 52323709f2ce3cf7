"""What happens to the body of an ``async with`` when its lease is lost, and which exception leaves (P7).

The guard cancels the task that entered, the way `asyncio.timeout` does: one ``task.cancel()``, taken back by
``task.uncancel()`` at the exit, so that a cancellation from outside is never mistaken for ours, nor ours
for one from outside. An anyio CancelScope would not do: it must be left in the task that entered it, and
fixtures, exit stacks and generators are often left in another.

Where redis-py can swallow a cancellation (`SWALLOWED`) the cancel is repeated once a second while the body runs on.
"""

from __future__ import annotations

import asyncio

from ._cancellation import SWALLOWED, Cancelling
from .lease import Lease

REPEAT = 1.0 if SWALLOWED else None


class Guard:
    """Watches over one body. Armed at entry, finished at exit."""

    _cancelling: Cancelling | None = None
    """There from the loss on."""

    def __init__(self, lease: Lease, task: asyncio.Task[object] | None, cancel: bool) -> None:
        self._lease = lease
        self._task = task
        self._before = task.cancelling() if task is not None else 0
        if cancel:
            lease.on_loss = self._cancel

    def _cancel(self) -> None:
        task = self._task
        if task is None or task.done():
            return  # entered in a task that is gone: nobody to cancel; the exit raises LeaseLost
        if task is asyncio.current_task():
            return  # found by the body itself, in release() or extend(): it gets LeaseLost right there
        self._cancelling = Cancelling(task, REPEAT)
        self._cancelling.cancel(f"the lease on {self._lease.name!r} was lost")

    def finish(self, error: BaseException | None) -> bool:
        """Disarm; return whether ``error`` is nothing but our own cancellation of the body."""
        self._lease.on_loss = None
        task = self._task
        if self._cancelling is None or task is None:
            return False
        self._cancelling.take_back()
        left = task.cancelling()
        if task is not asyncio.current_task():
            return False  # left in another task than entered: what ended the body was not our cancellation
        return isinstance(error, asyncio.CancelledError) and left <= self._before
