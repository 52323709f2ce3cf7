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

REPEAT = 1.0 if SWALLOWED else None


class Guard:
    """Cancels one body, from the loss of its lease on until it is left."""

    def __init__(self, task: asyncio.Task[object], before: int, why: str) -> None:
        """``before``: how many cancellations of ``task`` were under way when the body began."""
        self._task = task
        self._before = before
        self._why = why
        self._cancelling = Cancelling(task, REPEAT)
        self._cancelling.cancel(why)

    def named(self, error: BaseException) -> bool:
        """Return whether ``error`` is a cancellation that has our message."""
        return isinstance(error, asyncio.CancelledError) and error.args == (self._why,)

    def finish(self, error: BaseException | None) -> bool:
        """Take it back; return whether ``error`` is nothing but our own cancellation of the body."""
        self._cancelling.take_back()
        left = self._task.cancelling()
        if self._task is not asyncio.current_task():
            return False  # left in another task than entered: what ended the body was not our cancellation
        return isinstance(error, asyncio.CancelledError) and left <= self._before
