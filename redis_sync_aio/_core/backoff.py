"""Exponential back-off with full jitter, and waiting for a condition with it.

Full jitter (each delay is uniform between 0 and the exponential bound) spreads clients that failed at the
same moment best; see M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar, overload

from .arguments import Seconds, count, require_bool, require_function, seconds, timeout_seconds
from .cancellation import cancel_repeatedly
from .display import shown

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Backoff:
    """A sequence of delays that grow exponentially, with jitter and a cap. Pure: it never sleeps.

    Iterate over it to get delays in seconds. Every iteration starts again, and one object may be shared. Full jitter
    spreads clients that failed at the same moment (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog,
    2015).

    Args:
        initial: The bound of the first delay, in seconds, more than 0.
        factor: The growth of the bound from one delay to the next, at least 1.
        cap: The largest bound, in seconds, at least ``initial``.
        deadline: Stop when the delays add up to this many seconds; the last one is cut to fit. None: never.
        attempts: Stop after this many delays. None: never.
        jitter: True (default): each delay is drawn uniformly from 0 to the bound. False: it is the bound.
        random: The source of numbers from 0 to 1 (excluded), for tests.

    Raises:
        TypeError, ValueError: An argument has the wrong type, or is out of range.

    Example:
        ```python
        from redis_sync_aio import Backoff

        delays = list(Backoff(initial=0.1, cap=0.5, attempts=4, jitter=False))
        assert delays == [0.1, 0.2, 0.4, 0.5]
        ```
    """

    initial: float = 0.02
    factor: float = 2.0
    cap: float = 1.0
    deadline: float | None = None
    attempts: int | None = None
    jitter: bool = True
    random: Callable[[], float] = field(default=random.random, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.factor, timedelta):
            raise TypeError(f"factor must be a number, not {shown(self.factor)}")
        for name in ("initial", "factor", "cap"):
            object.__setattr__(self, name, seconds(getattr(self, name), name))
        object.__setattr__(self, "deadline", timeout_seconds(self.deadline, "deadline"))
        if not self.initial > 0:
            raise ValueError(f"initial must be more than 0 seconds, not {shown(self.initial)}")
        if self.factor < 1:
            raise ValueError(f"factor must be at least 1, not {shown(self.factor)}")
        if self.cap < self.initial:
            raise ValueError(f"cap must be at least initial ({self.initial!r} s), not {shown(self.cap)}")
        if self.attempts is not None:
            count(self.attempts, "attempts")
        require_bool(self.jitter, "jitter")
        require_function(self.random, "random")

    def bound(self, attempt: int) -> float:
        """Return the largest delay before retry number ``attempt`` (from 0 on), in seconds."""
        if self.factor == 1:
            return self.initial
        try:
            return min(self.cap, self.initial * self.factor**attempt)
        except OverflowError:  # the cap was reached long before
            return self.cap

    def __iter__(self) -> Iterator[float]:
        spent = 0.0
        attempt = 0
        while self.attempts is None or attempt < self.attempts:
            delay = self.bound(attempt) * (self.random() if self.jitter else 1.0)
            if self.deadline is not None:
                if spent >= self.deadline:
                    return
                delay = min(delay, self.deadline - spent)
            yield delay
            spent += delay
            attempt += 1


@overload
async def wait_until(
    condition: Callable[[], Awaitable[T]], backoff: Backoff = ..., timeout: Seconds | None = ...
) -> T: ...
@overload
async def wait_until(condition: Callable[[], T], backoff: Backoff = ..., timeout: Seconds | None = ...) -> T: ...
async def wait_until(
    condition: Callable[[], object],
    backoff: Backoff = Backoff(),
    timeout: Seconds | None = None,
) -> object:
    """Call ``condition`` until its result is true, and return that result.

    Args:
        condition: A function, or a coroutine function, which is awaited. It is called immediately and then after each
            delay. Its exceptions propagate.
        backoff: The delays between calls.
        timeout: When to give up (seconds), 0 or more. It also ends a call that is in flight. None: never.

    Raises:
        TimeoutError: The time was up, or ``backoff`` ended, and the result was never true.
        TypeError, ValueError: An argument is bad.

    On cancellation nothing is left behind: no task is started.

    Example:
        ```python
        from redis_sync_aio import Backoff, wait_until

        stock = 1
        await wait_until(lambda: stock > 0, Backoff(initial=0.01, cap=0.2), timeout=5)
        ```
    """
    if not callable(condition):
        raise TypeError(f"condition must be a function without arguments, not {shown(condition)}")
    if not isinstance(backoff, Backoff):
        raise TypeError(f"backoff must be a Backoff, not {shown(backoff)}")
    limit = timeout_seconds(timeout)
    delays = iter(backoff)
    # Not anyio.move_on_after: before anyio 4.16 that swallows a cancellation of the turn in which the time is up.
    timer = asyncio.timeout(limit)
    try:
        async with timer:
            with cancel_repeatedly(limit):
                while not timer.expired():  # it can be when the condition swallowed the cancellation
                    result = condition()
                    if inspect.isawaitable(result):
                        result = await result
                    if result:
                        return result
                    delay = next(delays, None)
                    if delay is None:
                        raise TimeoutError("the condition was not met before the back-off ended")
                    await asyncio.sleep(delay)
    except TimeoutError:
        if not timer.expired():
            raise
    raise TimeoutError(f"the condition was not met within {limit} seconds")
