"""What happens to the body of an ``async with`` when its lease is lost, and which exception leaves (P7).

The guard cancels the task that entered, the way `asyncio.timeout` does: one ``task.cancel()``, taken back by
``task.uncancel()`` at the exit, so that a cancellation from outside is never mistaken for ours, nor ours
for one from outside. An anyio CancelScope would not do: it must be left in the task that entered it, and
fixtures, exit stacks and generators are often left in another.

A request that counted before the loss may be a cancellation from outside that the body has yet to meet, or handles.
Or nobody will ever take it back: a body swallowed it, or an `asyncio.TaskGroup` that failed left it behind (Python <
3.13). The count does not tell these apart, what leaves the body does: the first cancellation of its chain.
"""

from __future__ import annotations

import asyncio

from .._core.cancellation import Cancelling, first_of


class _Reason(str):
    """Why a guard cancelled its body: the message, which tells its cancellations from those of others."""

    __slots__ = ("over",)

    def __init__(self, why: str) -> None:
        self.over = False
        """The body was left."""


class CancelOnLoss:
    """Cancels one body, once, from the loss of its lease on until it is left."""

    def __init__(self, task: asyncio.Task[object], before: int, why: str) -> None:
        """``before``: how many cancellations of ``task`` counted when the body began."""
        self._task = task
        self._before = before
        self._at_loss = task.cancelling()
        self._why = _Reason(why)
        self._cancelling = Cancelling(task)
        if self._at_loss > before:
            self._cancelling.cancel_soon(self._why)  # in the same turn it would take the place of one that is under way
        else:
            self._cancelling.cancel(self._why)

    def named(self, error: BaseException) -> bool:
        """Return whether ``error`` is the cancellation that this guard requested."""
        return _reason_of(error) is self._why

    def finish(self, error: BaseException | None) -> bool:
        """Take it back; return whether ``error`` is nothing but our own cancellation of the body."""
        self._cancelling.take_back()
        self._why.over = True
        left = self._task.cancelling()
        if self._task is not asyncio.current_task():
            return False  # left in another task than entered: what ended the body was not our cancellation
        if not isinstance(error, asyncio.CancelledError) or left > self._at_loss:
            return False
        # By this guard, or by that of a body inside of this one.
        return left <= self._before or ((reason := _reason_of(first_of(error))) is not None and reason.over)


def _reason_of(error: BaseException) -> _Reason | None:
    is_cancellation = isinstance(error, asyncio.CancelledError) and len(error.args) == 1
    return error.args[0] if is_cancellation and isinstance(error.args[0], _Reason) else None
