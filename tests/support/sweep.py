"""The cancellation sweep: cancel an operation at each of its suspension points in turn.

    result = await sweep(lambda: lock.acquire(), check)

A suspension point is a moment when the operation's task gives the event loop its turn. The ways to cancel:

- ``task``: ``task.cancel()`` in the loop turn right after the suspension;
- ``same_turn``: in the very turn in which the future that the task waits for becomes done, before the task
  wakes up: result and cancellation meet;
- ``scope``: the anyio scope around the operation is cancelled in the turn right after the suspension.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import anyio

T = TypeVar("T")

Way = Literal["task", "same_turn", "scope"]
Waiting = asyncio.Future[Any] | None
"""What a task waits for at a suspension point; None: for its next turn."""

WAYS: tuple[Way, ...] = ("task", "same_turn", "scope")


class Stepper(Generic[T]):
    """Awaits a coroutine, and reports each of its suspension points before the event loop gets its turn."""

    def __init__(self, inner: Coroutine[Any, Any, T], suspended: Callable[[int, Waiting], object]) -> None:
        self._inner = inner
        self._suspended = suspended
        self.points = 0
        self.cancelled_at: int | None = None
        """The suspension point at which a first CancelledError was thrown in."""

    def __await__(self) -> Generator[Any, Any, T]:
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                waiting = self._inner.send(value) if error is None else self._inner.throw(error)
            except StopIteration as stop:
                result: T = stop.value
                return result
            self.points += 1
            self._suspended(self.points, waiting)
            value, error = None, None
            try:
                value = yield waiting
            except BaseException as thrown:
                error = thrown
                if isinstance(thrown, asyncio.CancelledError) and self.cancelled_at is None:
                    self.cancelled_at = self.points


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """One run of the operation."""

    way: Way
    n: int
    """The suspension point it was to be cancelled at."""
    requested: bool
    """It got that far."""
    cancelled: bool
    """It ended with the cancellation."""
    twice: bool = False
    """It was cancelled again, while it cleaned up."""
    missed: bool = False
    """It was over before the scope's cancellation could reach it; only with ``scope``."""
    value: T | None = None
    """What it returned, if it did."""
    error: BaseException | None = None
    """What it raised, other than the cancellation."""

    @property
    def swallowed(self) -> bool:
        """It was cancelled, but returned a value."""
        return self.requested and not (self.cancelled or self.missed or self.error)

    def __str__(self) -> str:
        return f"way {self.way!r}, suspension point n={self.n}{', cancelled twice' if self.twice else ''}"


@dataclass
class SweepResult(Generic[T]):
    outcomes: list[Outcome[T]] = field(default_factory=list)

    @property
    def cancellations(self) -> Counter[Way]:
        """Runs that were cancelled, by way."""
        return Counter(one.way for one in self.outcomes if one.requested and not one.missed)

    @property
    def swallowed(self) -> list[Outcome[T]]:
        return [one for one in self.outcomes if one.swallowed]


class _Run(Generic[T]):
    """The operation in a task of its own, cancelled at its n-th suspension point."""

    def __init__(self, inner: Coroutine[Any, Any, T], way: Way, n: int, twice: bool) -> None:
        self._way: Way = way
        self._n, self._twice = n, twice
        self._stepper = Stepper(inner, self._suspended)
        self._scope = anyio.CancelScope()
        self._requested = self._again = self._met = False

    async def outcome(self) -> Outcome[T]:
        self._task = asyncio.create_task(self._main())
        try:
            await asyncio.wait([self._task])
        finally:
            self._task.cancel()  # if somebody else got tired of it
        cancelled = self._task.cancelled() or self._scope.cancelled_caught
        error = None if self._task.cancelled() else self._task.exception()
        value = None if cancelled or error else self._task.result()
        # A CancelledError of that turn is a timeout's own: the scope's would be thrown in at the next suspension.
        missed = self._met and (self._stepper.cancelled_at is None or self._stepper.points == self._n)
        return Outcome(self._way, self._n, self._requested, cancelled, self._again, missed, value=value, error=error)

    async def _main(self) -> T | None:
        if self._way != "scope":
            return await self._stepper
        with self._scope:
            return await self._stepper
        return None

    def _suspended(self, point: int, waiting: Waiting) -> None:
        if point == self._n:
            self._requested = True
            self._at(waiting, self._cancel_scope if self._way == "scope" else self._cancel_task)
        elif self._twice and not self._again and self._stepper.cancelled_at is not None:
            self._again = True
            self._at(waiting, self._cancel_task)

    def _at(self, waiting: Waiting, cancel: Callable[[Waiting], object]) -> None:
        if self._way == "same_turn" and waiting is not None:
            waiting.add_done_callback(cancel)  # before the task adds the one that wakes it
        else:
            asyncio.get_running_loop().call_soon(cancel, waiting)

    def _cancel_task(self, _: Waiting) -> None:
        self._task.cancel()

    def _cancel_scope(self, waiting: Waiting) -> None:
        self._met = waiting is not None and waiting.done()  # anyio leaves such a task to its next suspension
        self._scope.cancel()


async def sweep(
    operation: Callable[[], Coroutine[Any, Any, T]],
    check: Callable[[Outcome[T]], Awaitable[object]],
    *,
    ways: Iterable[Way] = WAYS,
    limit: int = 200,
    twice: bool = False,
    strict: bool = True,
) -> SweepResult[T]:
    """Cancel ``operation()`` at its 1st, 2nd, … suspension point until it completes undisturbed, in each way.

    After each run ``check(outcome)`` looks for what may be left behind. With ``twice``, the task is cancelled
    again at the next suspension point, while the operation cleans up. A swallowed cancellation is an
    AssertionError, or, if not ``strict``, only counted. An error of the operation itself is always one.
    """
    result: SweepResult[T] = SweepResult()
    for way in ways:
        for n in range(1, limit + 2):
            outcome = await _Run(operation(), way, n, twice).outcome()
            result.outcomes.append(outcome)
            await _judge(outcome, check, strict)
            if not outcome.requested:
                break
            if n > limit:
                raise AssertionError(f"still not undisturbed after {limit} suspension points: {outcome}")
    return result


async def _judge(outcome: Outcome[T], check: Callable[[Outcome[T]], Awaitable[object]], strict: bool) -> None:
    if outcome.error is not None:
        raise AssertionError(f"the operation raised {outcome.error!r}: {outcome}") from outcome.error
    if outcome.swallowed and strict:
        raise AssertionError(f"cancellation swallowed: {outcome}; it returned {outcome.value!r}")
    try:
        await check(outcome)
    except BaseException as error:
        error.add_note(f"in the check after: {outcome}")
        raise
