"""The context manager around a body: acquire, guard, release, and the one exception that leaves.

P7, in this order: the body's own exception, a cancellation from outside, LeaseLost, the error of the release.
What does not leave is attached to what does as a note; nothing is swallowed.
"""

from __future__ import annotations

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from types import CoroutineType, TracebackType
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, get_args
from weakref import ref

import anyio.lowlevel

from .._core.arguments import is_async, one_of
from .._core.cancellation import give_up_on, patience_of, redeliver_cancellation
from .._core.clock import now
from ..errors import NotHeld, SyncError
from .cancel_on_loss import CancelOnLoss
from .grant import Grant
from .tasks import TaskRef, current_ref, ended
from .terms import HELD

P = ParamSpec("P")
R = TypeVar("R")


class Face(Protocol):
    """What a body gets: the face of a grant."""

    _grant: Grant


L = TypeVar("L", bound=Face)

OnLost: TypeAlias = Literal["cancel", "event"]


class Hold(Generic[L]):
    """An ``async with`` over one lease; made by ``hold()``, used once: a second time raises RuntimeError.

    Entering acquires, with the errors and the cancellation of `AsyncLock.acquire`; leaving releases, and raises as
    `AsyncLock.hold` says.

    May be entered in one task and left in another (fixtures, exit stacks, generators).
    """

    _task: TaskRef | None = None
    """The task whose body it is. Weak: a hold that is never left keeps no ended task alive."""
    _grant: Grant | None = None
    _among: Holds[L] | None = None
    """Those of the same object…"""
    _outer: Hold[L] | None = None
    """… of which its task is in this one, too."""
    _guard: CancelOnLoss | None = None
    """There from the loss on."""
    _before = 0
    """How many cancellations of the task were under way when the body began."""
    _entered = False

    def __init__(self, acquire: Callable[[], Awaitable[L]], on_lost: OnLost) -> None:
        self._acquire = acquire
        self._on_lost: OnLost = on_lost

    async def __aenter__(self) -> L:
        if self._entered:
            raise RuntimeError("this hold() was entered before: call hold() again for another lease")
        self._entered = True
        lease = await self._acquire()
        grant = self._grant = lease._grant
        # The grant arrived a turn of the loop ago, or before a stall; a loss since found no guard.
        if now() >= grant.deadline and grant.is_lost():
            grant.lose("expired")
        if grant.state is not HELD:
            grant.check()
        task = asyncio.current_task(grant.manager.loop)  # to ask for the loop takes longer
        if task is not None:
            self._before = task.cancelling()
            by = grant.acquirer
            self._task = grant.body = by if by is not None and by() is task else ref(task)
        if self._on_lost == "cancel":
            grant.on_loss = self._lost
        among = self._among
        if among is not None:
            if self._task in among:
                self._outer = among.pop(self._task)
            among[self._task] = self
        return lease

    def _lost(self) -> None:
        """Cancel the body."""
        task, grant = None if self._task is None else self._task(), self._grant
        if task is None or task.done():
            return  # entered in a task that is gone: nobody to cancel; the exit raises LeaseLost
        assert grant is not None
        if task is asyncio.current_task():
            # By the body itself: release(), extend() or check() raises LeaseLost right there. But not if it ended
            # with another lease, which the body released.
            grant.manager.loop.call_soon(self._unless_told)
            return
        self._guard = CancelOnLoss(task, self._before, f"the lease on {grant.name!r} was lost")

    def _unless_told(self) -> None:
        if self._grant is not None and not self._grant.loss_reported:
            self._lost()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        grant = self._grant
        self._task = None
        if grant is None:
            await _refused(_not_entered("this hold()"), error)
            return
        grant.on_loss = grant.body = None
        own = error if self._guard is None or not self._guard.finish(error) else None
        if own is not None:
            grant.interrupted = True
        given_back = grant.loss() if grant.reason == "released" else None
        leaving = own or given_back
        try:
            if own is None:
                await grant.release()
            else:
                grant.check_context()
                await self._release_after(own, grant)
        except SyncError as trouble:
            if leaving is None:
                raise
            _note(leaving, trouble)
        if given_back is not None:
            if own is None:
                raise given_back
            _note(own, given_back)
        if own is not None and self._guard is not None and self._guard.named(own):
            await _delivered_again(own)

    async def _release_after(self, error: BaseException, grant: Grant) -> None:
        """Release after a body that failed. Its error waits for the answer for ``exit_timeout`` seconds (P5).

        That is for all the bodies that it leaves, one inside the other. A second cancellation must not hide it.
        """
        cancelled = isinstance(error, asyncio.CancelledError)
        try:
            async with asyncio.timeout(patience_of(error, grant.manager.exit_timeout)):
                await grant.release()
        except TimeoutError:
            give_up_on(grant.name, error)
        except asyncio.CancelledError as again:
            # The release itself goes on in the background. The body's error leaves; the cancellation stays due.
            if cancelled or asyncio.current_task() is None:
                raise
            redeliver_cancellation(again, self._before)


def _note(error: BaseException, trouble: Exception) -> None:
    """Attach what does not leave to what does, unless a body inside this one did that already."""
    note = f"redis_sync_aio: {trouble}"
    if str(trouble) != str(error) and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


async def _delivered_again(error: BaseException) -> None:
    """For what leaves with our message, as ours met another cancellation in one turn of the loop.

    If the other one was by a scope of anyio, which knows its own by their message, it comes again and leaves instead.
    """
    try:
        await anyio.lowlevel.checkpoint_if_cancelled()
    except asyncio.CancelledError as again:
        for note in getattr(error, "__notes__", ()):
            again.add_note(note)
        raise


async def _refused(refusal: Exception, error: BaseException | None) -> None:
    """Raise ``refusal`` of an exit, or attach it to what leaves already (P7)."""
    if error is None:
        raise refusal
    _note(error, refusal)


def _not_entered(what: str) -> NotHeld:
    return NotHeld(
        f"{what} was not entered, so there is nothing to leave: use `async with`, or enter_async_context() of an exit "
        "stack; for a lease from acquire() use enter_async_context(lease)"
    )


async def leave_unentered(what: str, error: BaseException | None) -> None:
    """Raise NotHeld for the exit of ``what``, which was not entered, or attach it to what leaves already (P7)."""
    await _refused(_not_entered(what), error)


def _ambiguous(what: str) -> RuntimeError:
    return RuntimeError(
        f"several bodies run under {what}, none of them began in this task, and this exit does not say which one it "
        "ends: it ends none. To leave a body in another task, enter hold(), which stands for one body"
    )


class LeaseContext(ABC, Generic[L]):
    """What every primitive is itself: an ``async with`` over one lease, any number at a time, and a decorator."""

    def __init__(self, on_lost: OnLost) -> None:
        self._on_lost: OnLost = check_on_lost(on_lost)
        # Bodies entered by `async with` on the primitive itself: each task's innermost, the latest task last.
        self._holds: Holds[L] = {}

    @abstractmethod
    async def acquire(self) -> L:
        """Wait for the turn and return the lease."""

    def _hold_by(self, acquire: Callable[[], Awaitable[L]], on_lost: OnLost | None) -> Hold[L]:
        """Return a hold that enters by ``acquire``; ``on_lost``: instead of this object's own."""
        return Hold(acquire, self._on_lost if on_lost is None else check_on_lost(on_lost))

    # Functions that return the coroutines of a hold: one of their own around each would be felt. (What a coroutine
    # function returns is a CoroutineType, also for those who type context managers; mypy calls it a Coroutine.)

    def __aenter__(self) -> CoroutineType[Any, Any, L]:
        hold = Hold(self.acquire, self._on_lost)
        hold._among = self._holds
        return hold.__aenter__()  # type: ignore[return-value]

    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> CoroutineType[Any, Any, None]:
        holds = self._holds
        if len(holds) == 1:
            task, hold = holds.popitem()
            if hold._outer is None:  # the only body, whoever ends it
                return hold.__aexit__(kind, error, trace)  # type: ignore[return-value]
            holds[task] = hold
        return self._exit_one_of_several(kind, error, trace)

    def _exit_one_of_several(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> CoroutineType[Any, Any, None]:
        holds = self._holds
        hold = holds.get(current_ref()) or self._left_by_another_task()
        if hold is None:
            return _refused(_ambiguous(repr(self)) if holds else _not_entered(repr(self)), error)  # type: ignore[return-value]
        task, outer = hold._task, hold._outer
        del holds[task]
        if outer is not None:
            holds[task] = outer
        return hold.__aexit__(kind, error, trace)  # type: ignore[return-value]

    def _left_by_another_task(self) -> Hold[L] | None:
        """Return the hold that an exit ends whose own task has none. None if that is not certain.

        It is the latest of the one task that has ended: a living task's hold is not ended while it may have been
        another one's.
        """
        left_behind = [hold for hold in self._holds.values() if hold._task is None or ended(hold._task)]
        return left_behind[0] if len(left_behind) == 1 else None

    def wrap(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        """Decorate a coroutine function: each call runs in an ``async with`` of its own over this.

        Raises TypeError at decoration for anything else (an object whose ``__call__`` is one will do, too). Errors and
        cancellation of a call are those of the ``async with``.

        Example:
            @lock.wrap
            async def refill(stock): ...
        """
        if not is_async(function):
            raise TypeError(f"{function!r} is not a coroutine function")

        @functools.wraps(function)
        async def holding(*args: P.args, **kwargs: P.kwargs) -> R:
            async with Hold(self.acquire, self._on_lost):
                return await function(*args, **kwargs)

        return holding


Holds: TypeAlias = dict[TaskRef | None, Hold[L]]


def check_on_lost(value: OnLost) -> OnLost:
    """Return ``value``, or raise ValueError."""
    one_of(value, get_args(OnLost), "on_lost")
    return value
