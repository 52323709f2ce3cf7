"""Compensation: on failure all steps run, in reverse, to their end; on success none runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import anyio
import pytest

from redis_sync_aio import Compensation
from redis_sync_aio.errors import UndoFailed
from redis_sync_aio.types import UndoSteps

from ..support.body import assert_undisturbed, for_ever


class Work:
    """Steps that say in `done` that they ran; those that are slow wait until they are let go."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def undo(self, what: object) -> None:
        await asyncio.sleep(0)
        self.done.append(what)

    async def slow(self, what: object) -> None:
        self.begun.set()
        await self.go_on.wait()
        self.done.append(what)

    async def fail(self, error: BaseException) -> None:
        await asyncio.sleep(0)
        self.done.append(error)
        raise error

    async def __call__(self, what: object) -> None:
        self.done.append(what)


@pytest.fixture
async def work() -> Work:
    return Work()


class Stop(BaseException):
    """As what `pytest.fail` raises."""


async def test_a_step_that_raises_no_exception_does_not_keep_the_others_from_running(work: Work) -> None:
    """It is raised after that: the error of the body is its context."""
    stop, error = Stop(), ValueError()

    async def fails() -> None:
        async with Compensation() as undo:
            undo.push(work.undo, 1)
            undo.push(work.fail, stop)
            undo.push(work.undo, 2)
            raise error

    with pytest.raises(Stop) as raised:
        await fails()
    assert work.done == [2, stop, 1]
    assert raised.value is stop
    assert stop.__context__ is error


REQUEST: ContextVar[str] = ContextVar("REQUEST")


async def test_on_failure_all_run_in_reverse_and_the_body_s_error_leaves_bare(work: Work) -> None:
    """On success none runs. Steps have the context of the body."""

    async def look() -> None:
        work.done.append(REQUEST.get())

    async with Compensation() as undo:
        undo.push(work.undo, 1)
    assert (work.done, undo.errors) == ([], None)
    REQUEST.set("mine")
    undo = Compensation()
    error = KeyError("mine")
    with pytest.raises(KeyError) as raised:  # noqa: PT012
        async with undo:
            undo.push(work.undo, 1)
            undo.push(work.undo, what=2)
            undo.push(work, 3)
            undo.push(partial(work.undo, 4))
            undo.push(look)
            raise error
    assert raised.value is error
    assert (error.__cause__, error.__context__, getattr(error, "__notes__", [])) == (None, None, [])
    assert work.done == ["mine", 4, 3, 2, 1]
    assert undo.errors is None


async def test_all_run_although_some_fail(work: Work, caplog: pytest.LogCaptureFixture) -> None:
    undo = Compensation()
    first, second = ValueError("first"), OSError("second")
    with caplog.at_level(logging.ERROR), pytest.raises(KeyError) as raised:  # noqa: PT012
        async with undo:
            undo.push(work.undo, 1)
            undo.push(work.fail, second)
            undo.push(work.undo, 2)
            undo.push(work.fail, first)
            raise KeyError("mine")
    assert work.done == [first, 2, second, 1]
    assert isinstance(undo.errors, UndoFailed)
    assert undo.errors.exceptions == (first, second)
    assert isinstance(undo.errors.subgroup(OSError), UndoFailed)
    assert raised.value.__notes__ == [f"redis_sync_aio: {undo.errors}"]
    assert "2 of 4 undo steps after KeyError failed" in raised.value.__notes__[0]
    [logged] = caplog.records
    assert logged.exc_info is not None
    assert logged.exc_info[1] is undo.errors


async def test_a_step_that_takes_too_long_is_cancelled_and_the_next_has_its_own_time(work: Work) -> None:
    undo = Compensation(timeout=0.02)
    with pytest.raises(KeyError):  # noqa: PT012
        async with undo:
            undo.push(work.undo, 1)
            undo.push(for_ever)
            undo.push(for_ever)
            raise KeyError
    assert work.done == [1]
    assert undo.errors is not None
    assert [type(error) for error in undo.errors.exceptions] == [TimeoutError] * 2


async def test_a_step_that_does_not_let_itself_be_cancelled_is_left_behind(work: Work) -> None:
    async def stubborn() -> None:
        while not work.go_on.is_set():
            try:
                await work.go_on.wait()
            except asyncio.CancelledError:
                work.begun.set()
        work.done.append("late")

    undo = Compensation(timeout=0.02)
    with pytest.raises(KeyError):  # noqa: PT012
        async with undo:
            undo.push(work.undo, 1)
            undo.push(stubborn)
            raise KeyError
    assert work.begun.is_set()
    assert work.done == [1]
    assert undo.errors is not None
    assert "keeps running" in str(undo.errors.exceptions[0])
    work.go_on.set()
    while "late" not in work.done:
        await asyncio.sleep(0)


async def test_a_step_that_is_cancelled_from_elsewhere_counts_as_failed(work: Work) -> None:
    async def cancels_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await for_ever()

    undo = Compensation()
    with pytest.raises(KeyError):  # noqa: PT012
        async with undo:
            undo.push(work.undo, 1)
            undo.push(cancels_itself)
            raise KeyError
    assert work.done == [1]
    assert undo.errors is not None
    assert "was cancelled" in str(undo.errors.exceptions[0])


# -- cancelled ---------------------------------------------------------------------------------------------


async def cancelled_body(work: Work, undo: Compensation) -> None:
    async with undo:
        undo.push(work.undo, 1)
        undo.push(work.slow, 2)
        await for_ever()


@pytest.mark.parametrize("times", [1, 2, 5])
async def test_p5_cancelled_again_and_again_the_steps_end_before_the_cancellation_goes_on(
    work: Work, times: int
) -> None:
    undo = Compensation()
    task = asyncio.create_task(cancelled_body(work, undo))
    await asyncio.sleep(0)
    task.cancel()
    await work.begun.wait()
    for _ in range(times):
        task.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not task.done()
    work.go_on.set()
    await asyncio.wait([task])
    assert task.cancelled()
    assert work.done == [2, 1]
    assert undo.errors is None


@asynccontextmanager
async def asyncio_timeout(seconds: float) -> AsyncIterator[None]:
    async with asyncio.timeout(seconds):
        yield


@asynccontextmanager
async def scope_of_anyio(seconds: float) -> AsyncIterator[None]:
    with anyio.fail_after(seconds):
        yield


@pytest.mark.parametrize("within", [asyncio_timeout, scope_of_anyio])
async def test_p5_a_timeout_is_one_after_the_steps(
    work: Work, within: Callable[[float], AbstractAsyncContextManager[None]]
) -> None:
    """If it comes while an error is undone, the error of the body leaves. The loop is not kept busy meanwhile."""
    asyncio.get_running_loop().call_later(3, work.go_on.set)
    with pytest.raises(TimeoutError):
        async with within(1):
            await cancelled_body(work, Compensation())
    assert work.done == [2, 1]
    await assert_undisturbed()
    work.go_on.clear()
    asyncio.get_running_loop().call_later(3, work.go_on.set)
    with pytest.raises(KeyError):  # noqa: PT012
        async with within(1), Compensation() as undo:
            undo.push(work.slow, 3)
            raise KeyError
    assert work.done == [2, 1, 3]
    await assert_undisturbed()


async def test_p5_cancelled_while_undoing_after_an_error_the_cancellation_stays_due(work: Work) -> None:
    seen: list[str] = []

    async def body() -> None:
        try:
            async with Compensation() as undo:
                undo.push(work.slow, 1)
                raise KeyError
        except KeyError:
            seen.append("the error")
        try:
            await for_ever()
        except asyncio.CancelledError:
            seen.append("the cancellation")
            raise

    task = asyncio.create_task(body())
    await work.begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    work.go_on.set()
    await asyncio.wait([task])
    assert task.cancelled()
    assert seen == ["the error", "the cancellation"]
    assert work.done == [1]


# -- entered here, left there ------------------------------------------------------------------------------


async def test_entered_and_left_in_different_tasks(work: Work) -> None:
    stack = AsyncExitStack()
    undo = await asyncio.create_task(stack.enter_async_context(Compensation()))
    undo.push(work.undo, 1)
    leaving = asyncio.create_task(stack.__aexit__(KeyError, KeyError("mine"), None))
    assert not await leaving
    assert work.done == [1]


# -- what is refused ---------------------------------------------------------------------------------------


def not_async() -> None:
    """A step has to be asynchronous."""


async def one_argument(number: int) -> None:
    """A step that has to be given something."""


BAD: dict[str, Callable[[Compensation], object]] = {
    "a function that is not asynchronous": lambda undo: undo.push(not_async),  # type: ignore[call-overload]
    "a coroutine": lambda undo: undo.push(7),  # type: ignore[call-overload]
    "too few arguments": lambda undo: undo.push(one_argument),  # type: ignore[call-overload]
    "too many arguments": lambda undo: undo.push(one_argument, 1, 2),  # type: ignore[call-overload]
    "an argument of another name": lambda undo: undo.push(one_argument, order=1),  # type: ignore[call-overload]
    "a name without a lease": lambda undo: undo.push("refund"),
    "positional arguments of a recorded step": lambda undo: undo.push("refund", 7),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
async def test_what_is_no_step_is_refused(work: Work, bad: Callable[[Compensation], object]) -> None:
    async with Compensation() as undo:
        with pytest.raises(TypeError):
            bad(undo)


async def test_it_is_used_once_and_inside(work: Work) -> None:
    undo = Compensation()
    with pytest.raises(RuntimeError, match="body"):
        undo.push(work.undo, 1)
    async with undo:
        with pytest.raises(RuntimeError, match="before"):
            await undo.__aenter__()
    with pytest.raises(RuntimeError, match="body"):
        undo.push(work.undo, 1)
    with pytest.raises(RuntimeError, match="before"):
        await undo.__aenter__()


@pytest.mark.parametrize(
    ("arguments", "options"),
    [((None, {}), {}), (("lease", {}), {}), ((), {"timeout": "5"}), ((), {"timeout": 0}), ((), {"timeout": -1})],
    ids=str,
)
async def test_bad_arguments_fail_immediately(arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Compensation(*arguments, **options)


async def test_a_registry_takes_coroutine_functions_under_new_names() -> None:
    steps = UndoSteps()

    @steps.step("refund")
    async def refund(*, order: int) -> int:
        return order

    assert dict(steps) == {"refund": refund}
    assert len(steps) == 1
    assert await refund(order=7) == 7
    with pytest.raises(ValueError, match="new"):
        steps.step("refund")
    with pytest.raises(ValueError, match="empty"):
        steps.step("")
    with pytest.raises(TypeError, match="name"):
        steps.step(refund)  # type: ignore[arg-type]
    bad: Callable[[], Awaitable[object]] = not_async  # type: ignore[assignment]
    with pytest.raises(TypeError, match="async def"):
        steps.step("sync")(bad)
    assert list(steps) == ["refund"]
