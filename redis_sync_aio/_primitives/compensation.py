"""Compensation: undo steps that run when the work they belong to does not come to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, Self, overload

from .._core.arguments import Seconds, positive_seconds
from .._core.cancellation import redeliver_cancellation
from .._core.display import shown
from .._recovery.record import (
    RobustLease,
    Step,
    UndoRunner,
    UndoStep,
    check_arguments,
    check_function,
    check_names,
    check_registry,
    checked,
    robust_grant_of,
)
from ..errors import UndoFailed

__all__ = ["Compensation"]

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class _Pushed:
    """A step of this body; ``recorded`` if a later holder could run it."""

    what: str
    run: Callable[[], Coroutine[Any, Any, object]]
    recorded: Step | None = None


class Compensation:
    """An async context in which undo steps are pushed as the work proceeds: a saga.

    If the body raises or is cancelled, all steps run in reverse order, even if some fail. If it ends normally, none
    runs. A cancellation waits for their end. A step that takes longer than ``timeout`` is cancelled and counts as
    failed.

    The exception of the body propagates unchanged. If steps failed, it has a note, and their errors are in
    ``undo.errors`` and in the log. The idea is that of Garcia-Molina and Salem, "Sagas" (1987).

    **With a lease of an [`AsyncRobustLock`][redis_sync_aio.AsyncRobustLock]**, steps that are pushed by name are
    recorded on the server before `push` returns. If this process dies, the next holder can run them
    ([`RobustLease.compensate`][redis_sync_aio.types.RobustLease.compensate]).

    - Push a step *before* the action that it undoes, since a crash may come in between. A step must do no harm if the
      action did not happen, or if the step runs twice.
    - The work counts as done when the ``async with`` is left, which drops its steps from the record in one command.
    - If the lease is lost, or another lease of the same identity has adopted the record, recorded steps are not run
      here: they are left to that holder.
    - A step that failed stays recorded for the next holder, even when the lease is released.

    Args:
        lease: A lease of an `AsyncRobustLock`. None: nothing is recorded.
        registry: `UndoSteps`, or another mapping of names to coroutine functions, for steps that are pushed by name.
        timeout: How long each step may take (seconds). With n steps, undoing takes at most n times that.

    Raises:
        TypeError, ValueError: An argument is bad, such as the lease of a lock that keeps no record.
        LeaseLost, NotHeld: The lease is lost, or was released. At the end of a body that ended normally: the recorded
            steps could not be dropped.
        StaleWriter, Unreachable, CommandRefused: At the end of a body that ended normally: the recorded steps could not
            be dropped and are still recorded (after Unreachable perhaps not until something else is).
        WrongContext: The lease belongs to another event loop or process.

    Example:
        ```python
        from redis_sync_aio import Compensation

        async with Compensation() as undo:
            undo.push(refund, order_id)
            await charge(order_id)
            undo.push(restock, order_id)
            await take_from_stock(order_id)
        ```
    """

    errors: UndoFailed | None = None
    """The errors of the steps that failed, as a group, in the order in which they ran. None: none failed,
    or none has run."""

    def __init__(
        self,
        lease: RobustLease | None = None,
        registry: Mapping[str, UndoStep] | None = None,
        *,
        timeout: Seconds = 10.0,
    ) -> None:
        if (lease is None) != (registry is None):
            raise TypeError("give both a lease and a registry of undo steps (to record steps), or neither")
        if lease is not None and not isinstance(lease, RobustLease):
            raise TypeError(f"lease must be a RobustLease, from an AsyncRobustLock, not {shown(lease)}")
        self._grant = None if lease is None else robust_grant_of(lease)
        if self._grant is not None:
            self._grant.check_writer()
        self._registry = {} if registry is None else check_registry(registry)
        self._timeout = positive_seconds(timeout, "timeout")
        self._pushed: list[_Pushed] = []
        self._open: bool | None = None  # None: not entered yet
        self._waiting = 0  # steps to be recorded that were not awaited

    async def __aenter__(self) -> Self:
        if self._open is not None:
            raise RuntimeError("this Compensation was entered before: make another one")
        self._open = True
        task = asyncio.current_task()
        self._cancelling = 0 if task is None else task.cancelling()
        return self

    @overload
    def push(self, step: str, /, **arguments: object) -> Coroutine[Any, Any, None]: ...
    @overload
    def push(self, step: Callable[P, Awaitable[object]], /, *args: P.args, **kwargs: P.kwargs) -> None: ...
    def push(self, step: Any, /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, None] | None:
        """Add an undo step: a coroutine function with its arguments, or the name of a recorded one.

        ``undo.push(refund, 7)`` is known in this process only. ``await undo.push("refund", order_id=7)`` has recorded
        the step when it returns. It takes one round trip and renews the lease. Arguments of a recorded step are given
        by name and have to be values that JSON can represent; all steps together have at most 65,536 bytes.

        Raises:
            TypeError, ValueError: The step is not a coroutine function, does not take the arguments, or JSON cannot
                represent them. Nothing was added.
            UnknownStep: The registry does not have the name.
            RuntimeError: The call is outside the ``async with``.
            LeaseLost, NotHeld, StaleWriter: The step was not recorded.
            Unreachable, CommandRefused: The step may have been recorded, so it was added, too.

        On cancellation a recorded step is added, and the recording continues in the background.
        """
        if not self._open:
            raise RuntimeError("push() belongs into the body of `async with Compensation() as undo`")
        if isinstance(step, str):
            if args:
                raise TypeError(f"a recorded step takes arguments by name only: push({step!r}, order_id=7)")
            return self._push_recorded(step, kwargs)
        function = check_function(step, repr(step))
        check_arguments(function, repr(step), *args, **kwargs)
        what = getattr(step, "__qualname__", type(step).__name__)

        async def run() -> None:
            await function(*args, **kwargs)

        self._pushed.append(_Pushed(what, run))
        return None

    def _push_recorded(self, name: str, arguments: dict[str, object]) -> Coroutine[Any, Any, None]:
        grant = self._grant
        if grant is None:
            raise TypeError(f"the step {name!r} can be recorded only with a lease: Compensation(lease, registry)")
        check_names((name,), self._registry, grant.name)
        check_arguments(self._registry[name], name, **arguments)
        step = Step(name, checked(arguments, f"arguments of {name!r}"))
        run = partial(grant.undo_step, self._registry[name], step)

        async def pushed() -> None:
            self._waiting -= 1
            grant.check_writer()
            writing = grant.add_step(step)
            # It may be on the server from now on, whatever becomes of this task.
            self._pushed.append(_Pushed(name, run, step))
            await writing

        self._waiting += 1
        return pushed()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        if error is None and self._waiting:
            error = RuntimeError(
                f"undo steps pushed and not recorded: {self._waiting}. Await them: `await undo.push(...)`"
            )
            await self._undo(error)
            raise error
        recorded = [pushed.recorded for pushed in self._pushed if pushed.recorded is not None]
        if error is not None:
            await self._undo(error)
        elif recorded and self._grant is not None:  # the work is done once its record has no undo steps
            self._grant.check_writer()
            await self._grant.drop_steps(recorded)

    async def _undo(self, error: BaseException) -> None:
        undoing, left = UndoRunner(self._timeout), 0
        while self._pushed:
            pushed = self._pushed.pop()
            if pushed.recorded is not None and not self._may_undo():
                left += 1
                continue
            await undoing.run(pushed.what, pushed.run())
        self.errors = undoing.failure(after=type(error).__name__)
        if self.errors is not None:
            error.add_note(f"redis_sync_aio: {self.errors}")
        if left and self._grant is not None:
            whom = "a later lease of its identity" if self._grant.superseded else "the next holder"
            error.add_note(f"redis_sync_aio: {left} undo steps of {self._grant.name!r} are left to {whom}")
        if undoing.cancelled is not None and not isinstance(error, asyncio.CancelledError):
            # The body's error propagates; the cancellation stays due.
            redeliver_cancellation(undoing.cancelled, self._cancelling)
        if undoing.stop is not None:
            raise undoing.stop

    def _may_undo(self) -> bool:
        """Return whether recorded steps are ours to run, and not another holder's."""
        grant = self._grant
        return grant is not None and grant.remaining() > 0 and not grant.superseded
