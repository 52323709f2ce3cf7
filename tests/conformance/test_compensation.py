"""Compensation: on failure all steps run, in reverse, to their end; on success none runs.

Under a robust lock steps that are recorded can be run by a later holder, and none is forgotten.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import anyio
import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncRobustLock, Compensation, Coordinator, LeaseLost, NotHeld
from redis_sync_aio.errors import StaleWriter, UndoFailed, UnknownStep, WrongKeyType
from redis_sync_aio.types import RobustLease, UndoSteps

from ..support.body import assert_undisturbed, for_ever
from .robust import NAME, RECORD, crash, is_of
from .robust import lock as lock
from .robust import way as way


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


# -- under a robust lock ------------------------------------------------------------------------------------


class Shop:
    """Undo steps: they say in `done` that they ran, and fail for whom is in `broken`."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.broken: set[object] = set()
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.steps = UndoSteps()
        self.steps.step("refund")(self.refund)
        self.steps.step("slow")(self.slow)

    async def refund(self, *, order: object) -> None:
        await asyncio.sleep(0)
        self.done.append(order)
        if order in self.broken:
            raise OSError(f"no refund of {order}")

    async def slow(self, *, order: object) -> None:
        self.begun.set()
        await self.go_on.wait()
        self.done.append(order)


@pytest.fixture
async def shop() -> Shop:
    return Shop()


async def recorded(redis: Redis) -> list[object]:
    """The orders in the steps on the server."""
    found = await redis.hget(RECORD, "undo")
    return [arguments["order"] for _, arguments in json.loads(found)] if found else []


async def crashed_with(
    lock: AsyncRobustLock, redis: Redis, shop: Shop, *orders: object, step: str = "refund"
) -> RobustLease:
    """Somebody pushes steps and is gone."""
    lease = await lock.acquire()
    undo = Compensation(lease, shop.steps)
    await undo.__aenter__()
    for order in orders:
        await undo.push(step, order=order)
    await crash(redis, lease)
    return lease


async def test_a_step_is_recorded_when_push_returns_and_dropped_when_the_work_is_done(
    lock: AsyncRobustLock, redis: Redis, shop: Shop
) -> None:
    async with lock as lease:
        await lease.record({"order": 7})
        async with Compensation(lease, shop.steps) as undo:
            await undo.push("refund", order=1)
            assert await recorded(redis) == [1]
            await undo.push("refund", order=2)
            assert await recorded(redis) == [1, 2]
        assert await recorded(redis) == []
        assert lease.progress == {"order": 7}
    assert shop.done == []
    assert not await redis.exists(RECORD)


async def test_a_later_holder_compensates_and_the_record_is_clear(
    lock: AsyncRobustLock, redis: Redis, shop: Shop
) -> None:
    first = await crashed_with(lock, redis, shop, 1, 2, 3)
    async with lock as second:
        assert is_of(second.abandoned, first)
        assert second.abandoned is not None
        assert second.abandoned.steps == ("refund",) * 3
        await second.compensate(shop.steps)
        assert shop.done == [3, 2, 1]
        assert await recorded(redis) == []
        assert second.progress is None
        await second.compensate(shop.steps)
        assert shop.done == [3, 2, 1]
    async with lock as third:
        assert third.abandoned is None


async def test_a_second_crash_in_the_middle_resumes(lock: AsyncRobustLock, redis: Redis, shop: Shop) -> None:
    await crashed_with(lock, redis, shop, 1, 2)
    second = await lock.acquire()
    shop.broken.add(1)
    with pytest.raises(UndoFailed) as failed:
        await second.compensate(shop.steps)
    assert "1 of 2" in str(failed.value)
    await crash(redis, second)
    shop.broken.clear()
    async with lock as third:
        assert third.abandoned is not None
        assert third.abandoned.steps == ("refund",)
        await third.compensate(shop.steps)
    assert shop.done == [2, 1, 1]


async def test_a_step_that_failed_stays_also_after_a_release(lock: AsyncRobustLock, redis: Redis, shop: Shop) -> None:
    shop.broken.add(2)
    hold = lock.acquire()
    first = await hold.__aenter__()
    undo = Compensation(first, shop.steps)
    error = KeyError("mine")
    with pytest.raises(KeyError):  # noqa: PT012
        async with undo:
            for order in (1, 2, 3):
                await undo.push("refund", order=order)
            raise error
    assert shop.done == [3, 2, 1]
    assert undo.errors is not None
    await hold.__aexit__(KeyError, error, None)
    second = await lock.acquire()
    assert is_of(second.abandoned, first)
    assert await recorded(redis) == [2]
    await second.release()  # without a look at it: as it was found
    async with lock as third:
        assert is_of(third.abandoned, first)
        shop.broken.clear()
        await third.compensate(shop.steps)
    assert not await redis.exists(RECORD)


async def test_all_unknown_names_are_told_before_any_step_runs(lock: AsyncRobustLock, redis: Redis, shop: Shop) -> None:
    await crashed_with(lock, redis, shop, 1, 2)
    async with lock as second:
        with pytest.raises(UnknownStep) as unknown:
            await second.compensate({})
        assert unknown.value.steps == ("refund",)
        assert "nothing" in str(unknown.value)
        assert await recorded(redis) == [1, 2]
        await second.clear_record()
        assert await recorded(redis) == []


async def test_new_steps_go_behind_those_that_were_left(lock: AsyncRobustLock, redis: Redis, shop: Shop) -> None:
    await crashed_with(lock, redis, shop, 1)
    with pytest.raises(KeyError):  # noqa: PT012
        async with lock as lease, Compensation(lease, shop.steps) as undo:
            await undo.push("refund", order=2)
            assert await recorded(redis) == [1, 2]
            raise KeyError
    assert shop.done == [2], "only what this body has done"
    assert await recorded(redis) == [1]


# -- the lease is lost -------------------------------------------------------------------------------------


async def test_a_lost_lease_leaves_recorded_steps_to_the_next_holder(
    lock: AsyncRobustLock, redis: Redis, shop: Shop
) -> None:
    undo: Compensation | None = None
    with pytest.raises(LeaseLost):  # noqa: PT012
        async with lock as lease:
            undo = Compensation(lease, shop.steps)
            async with undo:
                await undo.push("refund", order=1)
                undo.push(shop.refund, order=2)
                await redis.delete(NAME)
                await lease.extend(5)
    assert undo is not None
    assert undo.errors is None
    assert shop.done == [2], "what only this process can undo"
    async with lock as second:
        await second.compensate(shop.steps)
    assert shop.done == [2, 1]


async def test_steps_of_two_leases_of_an_identity_are_not_forgotten(
    lock: AsyncRobustLock, redis: Redis, shop: Shop
) -> None:
    """The later one takes over the steps of the earlier one, which can neither add to them, nor erase, nor run them."""
    first = await lock.acquire(identity="w")
    undoing = Compensation(first, shop.steps)
    with pytest.raises(KeyError) as raised:  # noqa: PT012
        async with undoing:
            await undoing.push("refund", order=1)
            async with Coordinator(redis) as elsewhere:
                second = await AsyncRobustLock(elsewhere, NAME).acquire(identity="w")
                later = Compensation(second, shop.steps)
                await later.__aenter__()
                await later.push("refund", order=2)
                assert await recorded(redis) == [1, 2]
                with pytest.raises(StaleWriter):
                    await first.record({"order": 1})
                with pytest.raises(StaleWriter):
                    await undoing.push("refund", order=3)
                with pytest.raises(StaleWriter):
                    await first.compensate(shop.steps)
                await crash(redis, second)
            raise KeyError
    assert shop.done == [], "they are the later lease's"
    left = f"redis_sync_aio: 1 undo steps of {NAME!r} are left to a later lease of its identity"
    assert raised.value.__notes__ == [left]
    first._grant.manager.forget(first._grant)
    async with lock as lease:
        assert lease.abandoned is not None
        assert lease.abandoned.steps == ("refund", "refund")
        await lease.compensate(shop.steps)
    assert shop.done == [2, 1]


async def test_work_that_is_done_under_the_earlier_lease_says_that_its_steps_are_recorded_still(
    lock: AsyncRobustLock, redis: Redis, shop: Shop
) -> None:
    first = await lock.acquire(identity="w")
    with pytest.raises(StaleWriter):  # noqa: PT012
        async with Compensation(first, shop.steps) as undo:
            await undo.push("refund", order=1)
            second = await lock.acquire(identity="w")
    assert await recorded(redis) == [1]
    await second.compensate(shop.steps)  # pyright: ignore[reportPossiblyUnboundVariable]
    assert shop.done == [1]


async def test_lost_while_compensating_leaves_the_rest(lock: AsyncRobustLock, redis: Redis, shop: Shop) -> None:
    await crashed_with(lock, redis, shop, 1, 2, 3)
    second = await lock.acquire()

    async def losing(*, order: object) -> None:
        shop.done.append(order)
        if order == 2:
            await redis.delete(NAME)

    with pytest.raises(LeaseLost):
        await second.compensate({"refund": losing})
    assert shop.done == [3, 2]
    async with lock as third:
        await third.compensate(shop.steps)
    assert shop.done == [3, 2, 2, 1], "the second one ran, and could not say so"


# -- cancellation ------------------------------------------------------------------------------------------


async def test_p5_cancelled_while_compensating_the_step_under_way_ends(
    lock: AsyncRobustLock, redis: Redis, shop: Shop
) -> None:
    await crashed_with(lock, redis, shop, 1, 2, step="slow")
    second = await lock.acquire()
    task = asyncio.create_task(second.compensate(shop.steps))
    await shop.begun.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    shop.go_on.set()
    await asyncio.wait([task])
    assert task.cancelled()
    assert shop.done == [2]
    assert await recorded(redis) == [1]


async def test_p5_a_push_that_is_cancelled_counts(lock: AsyncRobustLock, redis: Redis, shop: Shop) -> None:
    async def body() -> None:
        async with lock as lease, Compensation(lease, shop.steps) as undo:
            pushing = undo.push("refund", order=1)
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await pushing

    task = asyncio.create_task(body())
    await asyncio.wait([task])
    assert task.cancelled()
    assert shop.done == [1]
    assert not await redis.exists(RECORD)


# -- what is refused ---------------------------------------------------------------------------------------


async def test_what_can_not_be_recorded_is_refused_and_not_run(lock: AsyncRobustLock, redis: Redis, shop: Shop) -> None:
    with pytest.raises(KeyError):  # noqa: PT012
        async with lock as lease, Compensation(lease, shop.steps) as undo:
            with pytest.raises(UnknownStep):
                await undo.push("restock", order=1)
            with pytest.raises(TypeError, match="set"):
                await undo.push("refund", order={1})
            with pytest.raises(TypeError, match=r"refund cannot be called like this: missing .*'order'"):
                await undo.push("refund", orders=1)
            with pytest.raises(ValueError, match="65,536"):
                await undo.push("refund", order="x" * 65_536)
            assert await recorded(redis) == []
            raise KeyError
    assert shop.done == []


async def test_a_step_that_was_not_awaited_is_told(lock: AsyncRobustLock, redis: Redis, shop: Shop) -> None:
    """Nothing was recorded, so the work is undone as after any other error."""
    forgotten = []
    with pytest.raises(RuntimeError, match="undo steps pushed and not recorded: 1"):  # noqa: PT012
        async with lock as lease, Compensation(lease, shop.steps) as undo:
            await undo.push("refund", order=1)
            forgotten.append(undo.push("refund", order=2))
    forgotten[0].close()
    assert shop.done == [1]
    assert await recorded(redis) == []


async def test_a_compensation_needs_a_robust_lease_that_is_held(
    lock: AsyncRobustLock, sync: Coordinator, shop: Shop
) -> None:
    async with AsyncLock(sync, "plain") as plain:
        with pytest.raises(TypeError, match="must be a RobustLease, from an AsyncRobustLock"):
            Compensation(plain, shop.steps)  # type: ignore[arg-type]
    async with lock as lease:
        with pytest.raises(TypeError, match="async def"):
            Compensation(lease, {"refund": print})  # type: ignore[dict-item]
        with pytest.raises(TypeError, match="UndoSteps"):
            await lease.compensate([])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="timeout"):
            await lease.compensate({}, timeout=0)
    with pytest.raises(NotHeld):
        Compensation(lease, shop.steps)
    with pytest.raises(NotHeld):
        await lease.compensate({})


async def test_a_server_that_refuses_the_end_of_a_step_is_told(lock: AsyncRobustLock, redis: Redis, shop: Shop) -> None:
    undo: Compensation | None = None
    with pytest.raises(KeyError):  # noqa: PT012
        async with lock as lease:
            undo = Compensation(lease, shop.steps)
            async with undo:
                await undo.push("refund", order=1)
                await redis.delete(RECORD)
                await redis.set(RECORD, "foreign")
                raise KeyError
    assert shop.done == [1]
    assert undo is not None
    assert undo.errors is not None
    assert isinstance(undo.errors.exceptions[0], WrongKeyType)
