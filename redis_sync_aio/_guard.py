"""What happens to the body of an ``async with`` when its lease is lost, and which exception leaves (P7).

The guard cancels the task that entered, the way `asyncio.timeout` does: one ``task.cancel()``, taken back by
``task.uncancel()`` at the exit, so that a cancellation from outside is never mistaken for ours, nor ours
for one from outside. An anyio CancelScope would not do: it must be left in the task that entered it, and
fixtures, exit stacks and generators are often left in another.

On Python < 3.12 redis-py (with a socket timeout) can swallow a cancellation that meets its reply. There the
cancel is repeated once a second while the body runs on.
"""

from __future__ import annotations

import asyncio
import sys

from .lease import Lease

REPEAT = 1.0 if sys.version_info < (3, 12) else None


class Guard:
    """Watches over one body. Armed at entry, finished at exit."""

    _cancels = 0
    """Ours, not taken back yet."""
    _repeat: asyncio.TimerHandle | None = None

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
        self._cancels += 1
        task.cancel(f"the lease on {self._lease.name!r} was lost")
        if REPEAT is not None:
            self._repeat = task.get_loop().call_later(REPEAT, self._cancel)

    def finish(self, error: BaseException | None) -> bool:
        """Disarm; return whether ``error`` is nothing but our own cancellation of the body."""
        self._lease.on_loss = None
        if self._repeat is not None:
            self._repeat.cancel()
        ours = self._cancels
        if not ours or self._task is None or self._task.done():
            return False
        left = self._task.cancelling()
        for _ in range(ours):
            left = self._task.uncancel()
        if self._task is not asyncio.current_task():
            return False  # left in another task than entered: what ended the body was not our cancellation
        return isinstance(error, asyncio.CancelledError) and left <= self._before
