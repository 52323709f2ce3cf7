"""The context manager around a body: acquire, guard, release, and the one exception that propagates.

The order of P7: the exception of the body, a cancellation from outside, LeaseLost, the error of the release. The others
are attached to it as notes, so nothing is swallowed.
"""

from __future__ import annotations

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import CoroutineType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeAlias, TypeVar, get_args
from weakref import ReferenceType, ref

import anyio.lowlevel

from .._core.arguments import is_async, one_of
from .._core.cancellation import Cancelling, first_of, redeliver_cancellation
from .._core.clock import now
from .._core.display import called
from .._core.redis_py_words import missing_attribute
from ..errors import CoordinatorClosed, NotHeld, SyncError
from .grant import Grant, TaskRef, current_ref, ended
from .settings import HELD

if TYPE_CHECKING:
    from .lease import BaseLease

# -- The fate of the body of an ``async with`` when its lease is lost, and which exception propagates (P7) -----
#
# The guard cancels the task that entered, as `asyncio.timeout` does: by one ``task.cancel()``, which
# ``task.uncancel()`` withdraws at the exit. So a cancellation from outside is never mistaken for ours, nor ours for
# one from outside. An anyio CancelScope cannot be used here: it must be left in the task that entered it, and
# fixtures, exit stacks and generators are often left in another.
#
# A cancellation that was counted before the loss may come from outside, and the body has yet to meet it, or handles
# it. Or it is never withdrawn: a body swallowed it, or an `asyncio.TaskGroup` that failed left it behind (Python <
# 3.13). The count does not tell these apart. The exception that leaves the body does: by the first cancellation of
# its chain.


class _Reason(str):
    """The message of a guard's cancellation, which tells it from those of others."""

    __slots__ = ("over",)

    def __init__(self, why: str) -> None:
        self.over = False
        """True if the body was left."""


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


P = ParamSpec("P")
R = TypeVar("R")


L = TypeVar("L", bound="BaseLease")
T_co = TypeVar("T_co", bound="BaseLease | None", covariant=True)

OnLost: TypeAlias = Literal["cancel", "event"]
"""The reaction to a loss: the body is cancelled, or only `Lease.lost` becomes True."""


class Acquiring(Coroutine[Any, Any, T_co]):
    """A request for a lease: await it, or enter it with ``async with``, once.

    ``lease = await lock.acquire(timeout=5)`` gives a lease to release yourself. ``async with lock.acquire(timeout=5) as
    lease`` releases it at the end of the body, which raises the first that applies: the exception of the body, a
    cancellation from outside, LeaseLost, the error of the release. The others are attached to it as notes. A body that
    was entered without a lease (``try_acquire()`` of a lock that is taken) gets None, and its end does nothing.

    It is a coroutine, so `asyncio.create_task`, `asyncio.wait_for`, `asyncio.gather` and task groups take it; those of
    anyio from 4.14 on (before, start a coroutine function of your own that awaits it). It may be entered in one task
    and left in another (fixtures, exit stacks, generators).
    """

    _task: TaskRef | None = None
    """The task of the body, weakly: a body that is never left keeps no ended task alive."""
    _grant: Grant | None = None
    _among: Bodies | None = None
    """Open bodies of the same primitive, by task, until this is one of them."""
    _outer: Acquiring[Any] | None = None
    """The enclosing body of the same task, if any."""
    _guard: CancelOnLoss | None = None
    """Set once the lease has been lost."""
    _before = 0
    """Number of cancellations of the task when the body began."""
    _used = False
    """True if it was awaited or entered."""
    _empty = False
    """True if it was entered without a lease."""

    def __init__(self, coroutine: Coroutine[Any, Any, T_co], on_lost: OnLost) -> None:
        self._coroutine = coroutine
        self._cancels: bool = on_lost == "cancel"
        """True if a loss cancels the body."""

    def __await__(self) -> Generator[Any, Any, T_co]:
        if self._used:
            raise RuntimeError("this acquisition was awaited or entered before: call acquire() again for another lease")
        self._used = True
        try:
            return (yield from self._coroutine.__await__())
        except CoordinatorClosed as error:
            if error._held_back is not None:
                yield from error._held_back().__await__()
            raise

    # -- as a coroutine: the root of a task ------------------------------------------------------------

    def send(self, value: Any) -> Any:
        """Resume the acquisition, as a task does."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception in it, as a cancelled task does."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """End the acquisition; the effects of the request on the server are undone."""
        self._coroutine.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Return an attribute that tools read of a coroutine, such as ``cr_frame``."""
            if name.startswith("cr_") or name in ("__name__", "__qualname__"):
                return getattr(self._coroutine, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    # -- as a context manager --------------------------------------------------------------------------

    async def __aenter__(self) -> T_co:
        lease = await self
        if lease is None:
            self._empty = True
            return lease
        grant = self._grant = lease._grant
        # The grant arrived a turn of the loop ago, or before a stall, and a loss since then met no guard.
        if now() >= grant.deadline and grant.is_lost():
            grant.lose("expired")
        if grant.state is not HELD:
            grant.check()
        task = asyncio.current_task(grant.manager.loop)  # finding the running loop takes longer
        if task is not None:
            self._before = task.cancelling()
            by = grant.acquirer
            self._task = grant.body = by if by is not None and by() is task else ref(task)
        grant.hold = ref(self)
        among, self._among = self._among, None
        if among is not None:
            if self._task in among:
                self._outer = among.pop(self._task)
            among[self._task] = self
        return lease

    def _lost(self) -> None:
        """Cancel the body, unless a loss only makes `Lease.lost` True."""
        task, grant = None if self._task is None else self._task(), self._grant
        if not self._cancels or task is None or task.done():
            return  # the task that entered has ended and cannot be cancelled; the exit raises LeaseLost
        assert grant is not None
        if task is asyncio.current_task():
            # The body noticed it itself: its release(), extend() or check() raises LeaseLost. That does not happen if
            # the lease ended with another one, which the body released.
            grant.manager.loop.call_soon(self._unless_reported)
            return
        self._guard = CancelOnLoss(task, self._before, f"the lease on {grant.name!r} was lost")

    def _unless_reported(self) -> None:
        if self._grant is not None and not self._grant.loss_reported:
            self._lost()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        grant = self._grant
        self._task = None
        if grant is None:
            if not self._empty:
                if not self._used:
                    self._coroutine.close()
                await leave_unentered("this acquisition", error)
            return
        grant.hold = grant.body = None
        own = error if self._guard is None or not self._guard.finish(error) else None
        if own is not None:
            grant.body_failed = True
        given_back = grant.loss() if grant.reason == "released" else None
        leaving = own or given_back
        try:
            if own is None:
                await grant.release()
            else:
                grant.check_context()
                await self._release_after(own, grant)
        except SyncError as other:
            if leaving is None:
                raise
            _note(leaving, other)
        if given_back is not None:
            if own is None:
                raise given_back
            _note(own, given_back)
        if own is not None and self._guard is not None and self._guard.named(own):
            await _deliver_again(own)

    async def _release_after(self, error: BaseException, grant: Grant) -> None:
        """Release after a failed body, whose error waits for the answer for ``exit_timeout`` seconds (P5).

        All bodies that end meanwhile share this time. A second cancellation must not hide the error.
        """
        cancelled, exits = isinstance(error, asyncio.CancelledError), grant.manager.hub.exits
        try:
            async with asyncio.timeout(exits.timeout_for(error)):
                await grant.release()
        except TimeoutError:
            exits.give_up_on(grant.name, grant.is_releasing, error)
        except asyncio.CancelledError as again:
            # The release continues in the background. The error of the body propagates; the cancellation stays due.
            if cancelled or asyncio.current_task() is None:
                raise
            redeliver_cancellation(again, self._before)


def _note(error: BaseException, other: Exception) -> None:
    """Attach ``other`` to ``error``, which propagates, unless an inner body has done so."""
    note = f"redis_sync_aio: {other}"
    if str(other) != str(error) and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


async def _deliver_again(error: BaseException) -> None:
    """Let a cancellation by anyio propagate instead of ours, if both came in one turn of the loop.

    A scope of anyio knows its own cancellation by the message, and delivers it again.
    """
    try:
        await anyio.lowlevel.checkpoint_if_cancelled()
    except asyncio.CancelledError as again:
        for note in getattr(error, "__notes__", ()):
            again.add_note(note)
        raise


async def _refused(refusal: Exception, error: BaseException | None) -> None:
    """Raise ``refusal`` of an exit, or attach it to the error that propagates (P7)."""
    if error is None:
        raise refusal
    _note(error, refusal)


async def leave_unentered(what: str, error: BaseException | None) -> None:
    """Raise NotHeld for leaving ``what``, which was not entered, or attach it to the error that propagates (P7)."""
    unentered = NotHeld(
        f"{what} was not entered, so there is nothing to leave: use `async with`, or enter_async_context() of an exit "
        "stack; for a lease from acquire() use enter_async_context(lease)"
    )
    await _refused(unentered, error)


class LeaseContext(ABC, Generic[L]):
    """An ``async with`` over one lease, any number of times in parallel, and a decorator: every primitive is one."""

    def __init__(self, on_lost: OnLost) -> None:
        one_of(on_lost, get_args(OnLost), "on_lost")
        self._on_lost: OnLost = on_lost
        self._itself: ReferenceType[object] = ref(self)  # made once, for all its leases
        # The innermost body of each task that entered the primitive itself; the latest task is last.
        self._bodies: Bodies = {}

    @abstractmethod
    def acquire(self) -> Acquiring[L]:
        """Wait for the turn and return the lease."""

    if not TYPE_CHECKING:  # a type checker knows the attributes that there are

        def __getattr__(self, name: str) -> object:
            return missing_attribute(self, name)

    # These functions return the coroutines of a body, as another coroutine around each would cost time. (A coroutine
    # function returns a CoroutineType, and so do typed context managers; mypy calls it a Coroutine.)

    def __aenter__(self) -> CoroutineType[Any, Any, L]:
        body = self.acquire()
        body._among = self._bodies
        return body.__aenter__()  # type: ignore[return-value]

    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> CoroutineType[Any, Any, None]:
        bodies = self._bodies
        if len(bodies) == 1:
            task, body = bodies.popitem()
            if body._outer is None:  # the only body, whichever task ends it
                return body.__aexit__(kind, error, trace)  # type: ignore[return-value]
            bodies[task] = body
        return self._exit_one_of_several(kind, error, trace)

    def _exit_one_of_several(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> CoroutineType[Any, Any, None]:
        bodies = self._bodies
        body = bodies.get(current_ref()) or self._left_by_another_task()
        if body is None:
            if not bodies:
                return leave_unentered(repr(self), error)  # type: ignore[return-value]
            ambiguous = RuntimeError(
                f"several bodies run under {self!r}, none of them began in this task, and this exit does not say which "
                "one it ends: it ends none. To leave a body in another task, enter acquire(), which stands for one body"
            )
            return _refused(ambiguous, error)  # type: ignore[return-value]
        task, outer = body._task, body._outer
        del bodies[task]
        if outer is not None:
            bodies[task] = outer
        return body.__aexit__(kind, error, trace)  # type: ignore[return-value]

    def _left_by_another_task(self) -> Acquiring[Any] | None:
        """Return the body that an exit ends if its own task has none; None if that is not certain.

        It is the body of the only task that has ended. The body of a living task is never ended on a guess.
        """
        left_behind = [body for body in self._bodies.values() if body._task is None or ended(body._task)]
        return left_behind[0] if len(left_behind) == 1 else None

    def wrap(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        """Decorate a coroutine function: each call runs in an ``async with`` of its own over this object.

        Errors and cancellation of a call are those of the ``async with``. An object whose ``__call__`` is a coroutine
        function is accepted, too.

        Raises:
            TypeError: At decoration: the argument is not a coroutine function.

        Example:
            ```python
            @lock.wrap
            async def refill(stock): ...
            ```
        """
        if not is_async(function):
            raise TypeError(f"{called(function)} is not a coroutine function")

        @functools.wraps(function)
        async def holding(*args: P.args, **kwargs: P.kwargs) -> R:
            async with self.acquire():
                return await function(*args, **kwargs)

        return holding


Bodies: TypeAlias = "dict[TaskRef | None, Acquiring[Any]]"
