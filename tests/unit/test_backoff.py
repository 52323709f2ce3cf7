"""`Backoff` is pure: bounds, jitter, limits. `wait_until` is `Backoff` put to use."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redis_sync_aio import Backoff, wait_until

from ..support.body import FAST

SOME = 40
"""As many delays of an endless back-off as a test looks at."""


def first(backoff: Backoff, count: int = SOME) -> list[float]:
    return list(itertools.islice(backoff, count))


@st.composite
def backoffs(draw: st.DrawFn, /, **fixed: Any) -> Backoff:
    initial = draw(st.floats(1e-6, 10))
    chosen: dict[str, Any] = {
        "initial": initial,
        "factor": draw(st.floats(1, 100)),
        "cap": draw(st.floats(initial, 1e6)),
        "deadline": draw(st.none() | st.floats(0, 1e3)),
        "attempts": draw(st.none() | st.integers(0, SOME)),
        "jitter": draw(st.booleans()),
        "random": random.Random(draw(st.integers(0, 1 << 32))).random,
    }
    return Backoff(**{**chosen, **fixed})


# -- bounds and jitter -----------------------------------------------------------------------------------


@given(backoffs())
def test_bounds_start_at_initial_never_shrink_and_never_exceed_the_cap(backoff: Backoff) -> None:
    bounds = [backoff.bound(attempt) for attempt in range(SOME)]
    assert bounds[0] == backoff.initial
    assert bounds == sorted(bounds)
    assert bounds[-1] <= backoff.cap


@given(backoffs(jitter=True, deadline=None))
def test_each_delay_lies_between_0_and_its_bound(backoff: Backoff) -> None:
    for attempt, delay in enumerate(first(backoff)):
        assert 0 <= delay <= backoff.bound(attempt)


@given(backoffs(jitter=False, deadline=None, attempts=None))
def test_without_jitter_each_delay_is_its_bound(backoff: Backoff) -> None:
    assert first(backoff) == [backoff.bound(attempt) for attempt in range(SOME)]


def test_jitter_spreads_over_the_whole_interval() -> None:
    delays = first(Backoff(initial=1.0, factor=1.0, cap=1.0, random=random.Random(7).random), 1000)
    assert min(delays) < 0.01
    assert max(delays) > 0.99
    assert 0.45 < sum(delays) / len(delays) < 0.55


@pytest.mark.parametrize("factor", [2.0, 3.0, 1e4, 1e300])
@pytest.mark.parametrize("attempt", [100, 101, 10_000, 10**9, 10**400], ids=["100", "101", "1e4", "1e9", "1e400"])
def test_huge_attempts_do_not_overflow(factor: float, attempt: int) -> None:
    assert Backoff(initial=0.01, factor=factor, cap=5.0).bound(attempt) == 5.0


# -- limits ----------------------------------------------------------------------------------------------


@given(st.floats(0, 100), st.floats(0.5, 5), st.floats(1, 3))
def test_without_jitter_the_delays_add_up_to_the_deadline(deadline: float, initial: float, factor: float) -> None:
    delays = list(Backoff(initial=initial, factor=factor, cap=initial * 4, deadline=deadline, jitter=False))
    assert math.isclose(math.fsum(delays), deadline, abs_tol=1e-9)
    assert all(delay > 0 for delay in delays)


@given(backoffs())
def test_the_deadline_is_never_exceeded(backoff: Backoff) -> None:
    if backoff.deadline is not None:
        assert math.fsum(first(backoff)) <= backoff.deadline * (1 + 1e-12)


def test_every_iteration_starts_again_and_iterations_do_not_meet() -> None:
    shared = Backoff(initial=1.0, cap=4.0, attempts=4, jitter=False)
    one, other = iter(shared), iter(shared)
    assert [next(one), next(one), next(other), next(one), next(other)] == [1.0, 2.0, 1.0, 4.0, 2.0]
    assert list(shared) == list(shared) == [1.0, 2.0, 4.0, 4.0]


def test_a_backoff_is_a_value() -> None:
    assert Backoff(cap=2.0, random=lambda: 0.5) == Backoff(cap=2.0)
    assert hash(Backoff()) == hash(Backoff())
    with pytest.raises(AttributeError):
        Backoff().cap = 3.0  # type: ignore[misc]


# -- bad arguments ---------------------------------------------------------------------------------------

NOT_NUMBERS: tuple[object, ...] = ("5", True, None, Decimal(1), [1.0], object())
OUT_OF_RANGE: tuple[object, ...] = (-1, -0.001, math.nan, math.inf, -math.inf, 10**400)


@pytest.mark.parametrize("field", ["initial", "factor", "cap"])
@pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda value: repr(value).split(" at 0x")[0])
def test_what_is_not_a_number_is_a_type_error(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=field):
        Backoff(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["initial", "factor", "cap", "deadline"])
@pytest.mark.parametrize("value", OUT_OF_RANGE, ids=lambda value: f"{value!r:.9}")
def test_what_is_out_of_range_is_a_value_error(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        Backoff(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"initial": 0}, ValueError, "initial"),
        ({"factor": 0.99}, ValueError, "factor"),
        ({"initial": 2.0, "cap": 1.9}, ValueError, "cap"),
        ({"deadline": "5"}, TypeError, "deadline"),
        ({"deadline": True}, TypeError, "deadline"),
        ({"attempts": -1}, ValueError, "attempts"),
        ({"attempts": 1.0}, TypeError, "attempts"),
        ({"attempts": True}, TypeError, "attempts"),
        ({"attempts": "3"}, TypeError, "attempts"),
    ],
)
def test_bad_arguments_fail_at_construction(arguments: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        Backoff(**arguments)


@pytest.mark.parametrize("field", ["initial", "factor", "cap", "deadline"])
def test_a_timedelta_is_refused_at_construction_or_works(field: str) -> None:
    """What construction admits must not fail at the first delay."""
    arguments: dict[str, Any] = {field: timedelta(seconds=2), "attempts": 3}
    try:
        backoff = Backoff(**{"cap": 4.0, **arguments})
    except TypeError:
        return
    assert len(list(backoff)) <= 3


# -- wait_until ------------------------------------------------------------------------------------------


def true_after(calls: int, result: object = True) -> Callable[[], object]:
    """Return a condition that is false for so many calls."""
    counter = itertools.count()
    return lambda: result if next(counter) >= calls else None


def as_coroutine(function: Callable[[], object]) -> Callable[[], Awaitable[object]]:
    async def condition() -> object:
        await asyncio.sleep(0)
        return function()

    return condition


@pytest.mark.parametrize("wrap", [lambda function: function, as_coroutine], ids=["function", "coroutine function"])
@pytest.mark.parametrize("calls", [0, 1, 5])
async def test_the_first_true_result_is_returned(wrap: Callable[[Any], Any], calls: int) -> None:
    result = [calls]
    assert await wait_until(wrap(true_after(calls, result)), FAST, timeout=5) is result


@pytest.mark.parametrize("error", [KeyError("x"), TimeoutError("mine"), asyncio.CancelledError()], ids=repr)
@pytest.mark.parametrize("wrap", [lambda function: function, as_coroutine], ids=["function", "coroutine function"])
async def test_exceptions_of_the_condition_come_out_as_they_are(
    wrap: Callable[[Any], Any], error: BaseException
) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await wait_until(wrap(fails), FAST, timeout=5)
    assert caught.value is error


@pytest.mark.parametrize("timeout", [0, 0.02, timedelta(milliseconds=20)])
async def test_a_timeout_says_so(timeout: float | timedelta) -> None:
    with pytest.raises(TimeoutError, match="within"):
        await wait_until(lambda: False, FAST, timeout=timeout)


async def test_an_exhausted_backoff_says_so_after_its_last_call() -> None:
    calls = itertools.count()
    with pytest.raises(TimeoutError, match="back-off ended"):
        await wait_until(lambda: next(calls) < 0, Backoff(initial=0.001, attempts=3))
    assert next(calls) == 4, "immediately, and after each of three delays"


async def test_a_timeout_cuts_a_call_that_is_under_way() -> None:
    ended = asyncio.Event()

    async def hangs() -> bool:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return True

    with pytest.raises(TimeoutError):
        await wait_until(hangs, timeout=0.02)
    assert ended.is_set()


async def test_cancellation_comes_out_and_leaves_nothing() -> None:
    calls = asyncio.Event()
    task = asyncio.ensure_future(wait_until(calls.set, Backoff(initial=60, cap=60)))
    await calls.wait()
    before = asyncio.all_tasks()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before - {task}


@pytest.mark.real
@pytest.mark.parametrize("ahead", [0.01, -0.01], ids=["cancelled first", "timed out first"])
async def test_a_cancellation_in_the_turn_of_the_timeout_is_not_taken_for_it(ahead: float) -> None:
    """P5. anyio before 4.16 swallows it."""
    loop, limit = asyncio.get_running_loop(), 0.02
    task = asyncio.ensure_future(wait_until(lambda: False, Backoff(initial=60, cap=60, jitter=False), limit))
    await asyncio.sleep(0)
    due = loop.time() + limit
    loop.call_at(due - ahead, task.cancel)
    while loop.time() < due + abs(ahead):
        pass  # both are due in the next turn
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_condition_that_swallows_the_end_of_its_time_is_not_called_again() -> None:
    calls = []

    async def swallows() -> bool:
        calls.append(1)
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return False

    with pytest.raises(TimeoutError, match="within"):
        await wait_until(swallows, FAST, timeout=0.02)
    assert len(calls) == 1


async def test_an_outer_scope_is_not_mistaken_for_the_timeout() -> None:
    with anyio.move_on_after(0.01) as scope:
        await wait_until(lambda: False, FAST, timeout=30)
    assert scope.cancelled_caught
