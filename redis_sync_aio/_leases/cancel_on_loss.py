"""The fate of the body of an ``async with`` when its lease is lost, and which exception propagates (P7).

The guard cancels the task that entered, as `asyncio.timeout` does: by one ``task.cancel()``, which ``task.uncancel()``
withdraws at the exit. So a cancellation from outside is never mistaken for ours, nor ours for one from outside. An
anyio CancelScope cannot be used here: it must be left in the task that entered it, and fixtures, exit stacks and
generators are often left in another.

A cancellation that was counted before the loss may come from outside, and the body has yet to meet it, or handles it.
Or it is never withdrawn: a body swallowed it, or an `asyncio.TaskGroup` that failed left it behind (Python < 3.13). The
count does not tell these apart. The exception that leaves the body does: by the first cancellation of its chain.
"""

from __future__ import annotations

import asyncio

from .._core.cancellation import Cancelling, first_of


class _Reason(str):
    """The message of a guard's cancellation, which tells it from those of others."""

    __slots__ = ("over",)

    def __init__(self, why: str) -> None:
        self.over = False
        """Whether the body was left."""


class CancelOnLoss:
    """Cancels one body once, after the loss of its lease and until the body is left."""

    def __init__(self, task: asyncio.Task[object], before: int, why: str) -> None:
        """Guard a body of ``task``; ``before`` is how many cancellations of it were counted when the body began."""
        self._task = task
        self._before = before
        self._at_loss = task.cancelling()
        self._why = _Reason(why)
        self._cancelling = Cancelling(task)
        if self._at_loss > before:
            self._cancelling.cancel_soon(self._why)  # in this turn it would replace a cancellation in flight
        else:
            self._cancelling.cancel(self._why)

    def named(self, error: BaseException) -> bool:
        """Return whether ``error`` is the cancellation that this guard requested."""
        return _reason_of(error) is self._why

    def finish(self, error: BaseException | None) -> bool:
        """Withdraw the cancellation; return whether ``error`` is only the one that this guard requested."""
        self._cancelling.take_back()
        self._why.over = True
        left = self._task.cancelling()
        if self._task is not asyncio.current_task():
            return False  # left in another task than entered: our cancellation did not end the body
        if not isinstance(error, asyncio.CancelledError) or left > self._at_loss:
            return False
        # Requested by this guard, or by that of an inner body.
        return left <= self._before or ((reason := _reason_of(first_of(error))) is not None and reason.over)


def is_by_loss(error: BaseException) -> bool:
    """Return whether ``error`` is the cancellation that a guard requested, and not one from outside."""
    return _reason_of(error) is not None


def _reason_of(error: BaseException) -> _Reason | None:
    is_cancellation = isinstance(error, asyncio.CancelledError) and len(error.args) == 1
    return error.args[0] if is_cancellation and isinstance(error.args[0], _Reason) else None
