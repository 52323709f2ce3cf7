"""P7: one loss is one cancellation, and LeaseLost leaves, whatever became of the cancellations before it.

``task.cancelling()`` also counts what nobody will ever take back: what a body swallowed, and what a failing
`asyncio.TaskGroup` leaves behind on Python < 3.13. And on Python < 3.12 `asyncio.wait_for` drops a cancellation that
meets its result; redis-py writes every command by it.
"""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, NoReturn, cast

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncReentrantLock,
    Coordinator,
    LeaseLost,
)

from ..conftest import MakeClient
from ..support.body import assert_undisturbed, for_ever, lost_in
from ..support.exception_races import NAME, later, this_task
from ..support.factories import Kind
from ..support.one_server import one_server_for_all as one_server_for_all
from ..support.primitives import MAKERS, Maker

TTL = 0.6

Enter = Callable[[Coordinator], AbstractAsyncContextManager[Any]]


@pytest.fixture(params=["link", "polling"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def nested(sync: Coordinator) -> AsyncIterator[object]:
    lock = AsyncReentrantLock(sync, NAME, ttl=TTL)
    async with lock, lock as inner:
        yield inner


def entered(make: Maker, sync: Coordinator) -> AbstractAsyncContextManager[object]:
    return cast(AbstractAsyncContextManager[object], make(sync, NAME, ttl=TTL))


PRIMITIVES: dict[str, Enter] = {label: partial(entered, make) for label, make in MAKERS.items()}
PRIMITIVES["nested reentrant lock"] = nested


class ChildError(Exception):
    """What a child of a group raises."""


async def group_that_fails() -> None:
    """Catch the failure of a group, whose exit is waiting for the child. It leaves a count on Python < 3.13."""

    async def fail() -> NoReturn:
        await asyncio.sleep(0)
        raise ChildError

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
    except* ChildError:
        pass


async def swallowed_cancellation() -> None:
    with suppress(CancelledError):
        this_task().cancel()
        await asyncio.sleep(0)


BEFORE: tuple[Callable[[], Awaitable[None]], ...] = (group_that_fails, swallowed_cancellation)


# -- what counted before the loss --------------------------------------------------------------------------


@pytest.mark.parametrize("enter", PRIMITIVES.values(), ids=PRIMITIVES)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.timing
async def test_p7_a_count_that_was_left_behind_does_not_hide_the_loss(
    sync: Coordinator, redis: Redis, enter: Enter, before: Callable[[], Awaitable[None]]
) -> None:
    """The body is cancelled and LeaseLost leaves, bare; the count stays as it was."""
    interrupted: list[BaseException] = []

    async def holding() -> int:
        async with enter(sync):
            await before()
            await redis.flushall()
            count = this_task().cancelling()
            try:
                await for_ever()
            except BaseException as error:
                interrupted.append(error)
                raise
        return count

    async def run() -> None:
        with pytest.raises(LeaseLost):
            await holding()
        assert this_task().cancelling() <= 1
        await asyncio.sleep(0)

    await asyncio.wait_for(asyncio.create_task(run()), 10)
    assert [type(error) for error in interrupted] == [CancelledError]


@pytest.mark.parametrize("stays", [True, False], ids=["same await", "other await"])
@pytest.mark.parametrize("before", [*BEFORE, None])
async def test_p7_a_cancellation_under_way_at_the_loss_wins(
    kind: Kind, sync: Coordinator, before: Callable[[], Awaitable[None]] | None, stays: bool
) -> None:
    """It was requested in the same turn of the loop, before the loss, and the body has yet to meet it."""
    left: list[BaseException] = []

    async def holding() -> None:
        try:
            async with kind.make(sync, NAME) as lease:
                if before is not None:
                    await before()

                def both() -> None:
                    task.cancel("from outside")
                    lease._grant.lose("taken")

                later(0, both)
                while True:
                    await (for_ever() if stays else asyncio.sleep(0))
        except BaseException as error:
            left.append(error)
            raise

    task = asyncio.create_task(holding())
    with pytest.raises(CancelledError):
        await asyncio.wait_for(task, 5)
    assert [error.args for error in left] == [("from outside",)]
    assert any("was lost" in note for note in left[0].__notes__)


@pytest.mark.parametrize("awaits", [for_ever, lambda: asyncio.create_task(for_ever())], ids=["itself", "a task"])
@pytest.mark.parametrize("before", [*BEFORE, None])
async def test_p7_a_loss_in_the_clean_up_of_a_cancelled_body(
    kind: Kind, sync: Coordinator, before: Callable[[], Awaitable[None]] | None, awaits: Callable[[], Awaitable[None]]
) -> None:
    """The body was cancelled from outside; the loss interrupts its clean-up. The cancellation leaves."""
    running, cleaning = asyncio.Event(), asyncio.Event()

    async def holding() -> None:
        async with kind.make(sync, NAME) as lease:
            if before is not None:
                await before()
            running.set()
            try:
                await awaits()
            finally:
                cleaning.set()
                later(2, lambda: lease._grant.lose("taken"))
                await awaits()

    task = asyncio.create_task(holding())
    await running.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(CancelledError):
        await asyncio.wait_for(task, 5)
    assert cleaning.is_set()
    assert task.cancelled()


@pytest.mark.parametrize("first", [0, 1], ids=["outer first", "inner first"])
async def test_p7_nested_losses_while_a_count_is_left_behind(kind: Kind, sync: Coordinator, first: int) -> None:
    """Both leases are lost in one turn, in either order: LeaseLost leaves both."""

    async def holding() -> None:
        async with kind.make(sync, NAME) as outer, kind.make(sync, NAME + "2") as inner:
            await group_that_fails()
            leases = [outer, inner]
            later(0, lambda: leases[first]._grant.lose("taken"))
            later(0, lambda: leases[1 - first]._grant.lose("taken"))
            await for_ever()

    with pytest.raises(LeaseLost):
        await asyncio.wait_for(asyncio.create_task(holding()), 5)


# -- one cancellation --------------------------------------------------------------------------------------


@pytest.mark.timing
async def test_p7_a_body_is_cancelled_once(kind: Kind, sync: Coordinator, redis: Redis) -> None:
    """Neither a clean-up that takes longer than a second after the loss, nor a body that swallows it, is again.

    The clean-up runs to its end, and the body that goes on hears of the loss at its end.
    """
    cleaned: list[bool] = []

    async def cleans_up(_: object) -> None:
        await kind.take_over(redis, NAME)
        try:
            await for_ever()
        finally:
            await asyncio.sleep(1.3)
            cleaned.append(True)

    async def goes_on(_: object) -> None:
        await kind.take_over(redis, f"{NAME}2")
        with suppress(CancelledError):
            await for_ever()
        assert this_task().cancelling() == 1
        await asyncio.sleep(1.3)
        assert this_task().cancelling() == 1

    async with asyncio.TaskGroup() as both:
        both.create_task(lost_in(kind.make(sync, NAME, ttl=TTL), cleans_up))
        both.create_task(lost_in(kind.make(sync, f"{NAME}2", ttl=TTL), goes_on))
    assert cleaned == [True]


async def command(client: Redis) -> None:
    await client.ping()


async def in_a_task(client: Redis) -> None:
    await asyncio.create_task(command(client))


async def in_wait_for(client: Redis) -> None:
    await asyncio.wait_for(command(client), 5)


async def generated(client: Redis) -> AsyncIterator[None]:
    while True:
        await client.ping()
        yield


async def in_a_generator(client: Redis) -> None:
    async for _ in generated(client):
        pass


async def pipelined(client: Redis) -> None:
    async with client.pipeline() as pipe:
        pipe.execute_command("PING")
        await pipe.execute()


async def in_timeouts(client: Redis) -> None:
    """As redis-py before 8.0 looks for unread data before each command."""
    await command(client)
    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            await for_ever()


COMMANDS = (command, in_a_task, in_wait_for, in_a_generator, pipelined, in_timeouts)


@pytest.mark.parametrize("run", COMMANDS)
@pytest.mark.parametrize("way", ["link"], indirect=True)
async def test_p7_a_loss_that_meets_commands_of_redis_py(
    sync: Coordinator, make_client: MakeClient, run: Callable[[Redis], Awaitable[None]]
) -> None:
    """P6: in whatever turn of the loop it comes, the body gets one cancellation, soon."""
    client = make_client(socket_timeout=5)
    await client.ping()

    async def body(turn: int, seen: list[type[BaseException]]) -> None:
        async with AsyncLock(sync, NAME) as lease:
            later(turn, lambda: lease._grant.lose("taken"))
            try:
                while True:
                    await run(client)
            except BaseException as error:
                seen.append(type(error))
                raise

    for turn in range(25):
        seen: list[type[BaseException]] = []
        with pytest.raises(LeaseLost):
            await asyncio.wait_for(body(turn, seen), 5)
        assert seen == [CancelledError], turn
        await assert_undisturbed()
        await client.flushall()  # nobody took it in truth
