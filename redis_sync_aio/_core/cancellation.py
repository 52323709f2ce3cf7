"""Cancellations that meet something which must be finished first."""

from __future__ import annotations

import asyncio
import gc
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import AsyncGeneratorType, CoroutineType
from typing import Any, TypeAlias, TypeVar

import anyio

from .clock import now

T = TypeVar("T")

SWALLOWED = sys.version_info < (3, 12)
"""`asyncio.wait_for` returns a result that it has, and drops a cancellation that it meets; redis-py writes by it."""
AGAIN = 0.1 if SWALLOWED else None
"""Seconds between cancellations of an attempt whose time is up."""
HEED_EVERY = AGAIN
"""Seconds between repetitions of a cancellation from outside, while redis-py may have swallowed it."""


def undo_in(loop: asyncio.AbstractEventLoop, undo: Callable[[], object]) -> None:
    """Call ``undo`` in ``loop``: now where that runs, else as soon as it runs; never if it is closed.

    The work that a coroutine began is undone when its await ends, however it ends. That may be by `GeneratorExit`: by
    ``close()``, or in whatever thread the garbage collector finds that it is not awaited any more.
    """
    if asyncio._get_running_loop() is loop:
        undo()
        return
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(undo)


async def outcome_of(outcome: asyncio.Future[T]) -> T:
    """Return the result of ``outcome``. If the await is closed by GeneratorExit, a later outcome is not retrieved."""
    try:
        return await outcome
    except GeneratorExit:
        undo_in(outcome.get_loop(), outcome.cancel)
        raise


GOES_ON = "has no answer yet and keeps running"
"""The note on an error that does not wait for a release any longer."""


def leaving() -> BaseException | None:
    """Return the cancellation, or the SystemExit and the like, in whose clean-up this runs, if it does."""
    error = sys.exception()
    return None if error is None or isinstance(error, Exception) else error


def exit_timeout_of(error: BaseException, limit: float) -> float:
    """Return for how long ``error`` waits for a release: ``limit`` seconds, for all that it passes on its way."""
    return 0.0 if any(note.endswith(GOES_ON) for note in getattr(error, "__notes__", ())) else limit


def give_up_on(release: str, error: BaseException) -> None:
    """Note that ``error`` does not wait for a release any longer."""
    error.add_note(f"redis_sync_aio: the release of {release!r} {GOES_ON}")


async def wait_shielded(task: asyncio.Task[T], limit: float = math.inf) -> T:
    """Return the result of ``task``. A cancellation is raised when the task has ended, and does not reach it.

    Of several it is the latest; of one by anyio and one by others, that of the others. After the first, the task has
    ``limit`` seconds more; then it is cancelled.
    """
    cancelled: asyncio.CancelledError | None = None
    ends = math.inf
    while not task.done():
        left = ends - now()
        if left <= 0:
            task.cancel()
        try:
            # anyio repeats its own in every turn of the loop, but for a shield.
            with nullcontext() if cancelled is None else anyio.CancelScope(shield=True):
                await asyncio.wait([task], timeout=left if 0 < left < math.inf else None)
        except asyncio.CancelledError as error:
            if cancelled is None:
                ends = now() + limit
            else:
                error.__context__ = cancelled  # for `first_of`
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # looked at
        raise cancelled  # that very one: anyio knows its own by their message
    return task.result()


async def cancelled(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel ``tasks`` until all have ended: redis-py may swallow a cancellation (`SWALLOWED`)."""
    while left := [task for task in tasks if task is not None and not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=AGAIN)


class Cancelling:
    """Requests a cancellation of a task, until that is taken back.

    The task gets one CancelledError, also where `asyncio.wait_for` drops the first (`SWALLOWED`). ``every``: seconds
    after which it gets another one, again and again.
    """

    def __init__(self, task: asyncio.Task[object], every: float | None = None) -> None:
        self._task = task
        self._every = every
        self._count = 0
        self._timer: asyncio.Handle | None = None

    def cancel(self, *why: object) -> None:
        """Cancel the task now, for the reason ``why``."""
        if self._task.done():
            return
        if getattr(self._task.get_coro(), "cr_running", False):
            # From an eager task that it just creates. Python < 3.13 would cancel its next await, also when that is
            # behind the body and this was taken back.
            self.cancel_soon(*why)
            return
        wait = _wait_for_in(self._task) if SWALLOWED else None
        self._count += 1
        self._task.cancel(*why)
        if self._every is not None:
            self._timer = self._task.get_loop().call_later(self._every, self.cancel, *why)
        elif wait is not None:
            self._timer = self._task.get_loop().call_soon(self._cancel_if_dropped, wait, why)

    def cancel_soon(self, *why: object) -> None:
        """Cancel the task in the next turn of the loop, when it has met earlier cancellations."""
        self._timer = self._task.get_loop().call_soon(self.cancel, *why)

    def _cancel_if_dropped(self, wait: _WaitFor, why: tuple[object, ...]) -> None:
        """Cancel the task again if ``wait`` returned a result instead; the task has run since.

        The dropped one stays counted until both are taken back: an `asyncio.timeout` that the task has entered since
        has counted it, too, and would take the second one for its own.
        """
        waiter, result = wait
        if waiter.cr_frame is None and result.done() and not result.cancelled():
            self.cancel(*why)

    def take_back(self) -> None:
        """Stop cancelling, and take back the request, which counts no more."""
        if self._timer is not None:
            self._timer.cancel()
        for _ in range(self._count):
            self._task.uncancel()


_WaitFor: TypeAlias = tuple["CoroutineType[Any, Any, Any]", "asyncio.Future[Any]"]
"""A call of `asyncio.wait_for` that has not returned, and what it waits for."""
_OPAQUE = ("async_generator_asend", "async_generator_athrow", "coroutine_wrapper", "FutureIter")
"""Types of CPython that await one object and have no attribute for it; the garbage collector sees it."""


def _wait_for_in(task: asyncio.Task[object]) -> _WaitFor | None:
    """Return the `asyncio.wait_for` that ``task`` would resume first, if there is one."""
    awaits: Any = task.get_coro()
    while awaits is not None:
        if isinstance(awaits, CoroutineType):
            frame = awaits.cr_frame
            if awaits.cr_code is asyncio.wait_for.__code__ and frame is not None and "waiter" in frame.f_locals:
                return awaits, frame.f_locals["fut"]
            awaits = awaits.cr_await
        elif isinstance(awaits, AsyncGeneratorType):
            awaits = awaits.ag_await
        elif isinstance(awaits, asyncio.Task):
            awaits = awaits.get_coro()
        elif type(awaits).__name__ in _OPAQUE:
            kinds = (CoroutineType, AsyncGeneratorType, asyncio.Task)
            awaits = next((it for it in gc.get_referents(awaits) if isinstance(it, kinds)), None)
        else:
            return None
    return None


def first_of(error: BaseException) -> BaseException:
    """Return the cancellation that was being handled when ``error`` came, or ``error`` if there was none."""
    first, seen = error, {id(error)}
    while not error.__suppress_context__ and (before := error.__context__) is not None and id(before) not in seen:
        error = before
        seen.add(id(error))
        if isinstance(error, asyncio.CancelledError):
            first = error
    return first


@contextmanager
def cancel_repeatedly(seconds: float | None) -> Iterator[None]:
    """Cancel the block of ``asyncio.timeout(seconds)`` again while it keeps running after that (`SWALLOWED`).

    redis-py would go on with all its retries. `asyncio.timeout` finds its own request afterwards, and nothing but that.
    """
    task = asyncio.current_task()
    if seconds is None or task is None or AGAIN is None:
        yield
        return
    again = Cancelling(task, AGAIN)
    timer = task.get_loop().call_later(seconds + AGAIN, again.cancel)
    try:
        yield
    finally:
        timer.cancel()
        again.take_back()


def cancellations() -> int:
    """Return the number of cancellations of the current task that were requested and not taken back."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


@contextmanager
def heeded() -> Iterator[None]:
    """Repeat a cancellation from outside that redis-py may swallow in the block, until the block ends.

    At its end `asyncio.run` cancels each task once, and waits for it (`SWALLOWED`).
    """
    task = asyncio.current_task()
    if task is None or HEED_EVERY is None:
        yield
        return
    timer: asyncio.TimerHandle
    before, again, loop = task.cancelling(), HEED_EVERY, task.get_loop()

    def look() -> None:
        nonlocal timer
        if task.cancelling() > before:
            task.cancel()
            task.uncancel()  # it was counted when it was requested
        timer = loop.call_later(again, look)

    timer = loop.call_later(again, look)
    try:
        yield
    finally:
        timer.cancel()


def redeliver_cancellation(cancelled: asyncio.CancelledError, before: int) -> None:
    """Deliver a cancellation that was caught at the current task's next await, unless it is taken back before.

    A timeout, scope or task group around the body takes its request back (``uncancel``) when the body's error
    passes it; only a request that still counts in the next turn of the loop is due. Asking for it immediately would
    leave it behind in the task on Python < 3.13, where ``uncancel`` does not take back what is in flight.

    ``before``: how many requests counted when the body began.
    """
    task = asyncio.current_task()
    if task is None or _BY_ANYIO.match(str(cancelled)):
        return  # it is repeated at every await inside the scope, and only there
    inside_cancelled_scope = anyio.current_effective_deadline() == -math.inf
    # A scope of anyio takes back its own requests, which count until then.
    least = before + 1 if inside_cancelled_scope else max(1, task.cancelling())

    def deliver() -> None:
        if not task.done() and task.cancelling() >= least:
            task.uncancel()
            task.cancel(*cancelled.args)

    task.get_loop().call_soon(deliver)


_BY_ANYIO = re.compile("Cancelled (by|via) cancel scope ")
"""The message by which anyio recognizes its own cancellations."""
