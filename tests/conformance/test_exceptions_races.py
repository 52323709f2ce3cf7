"""P7: losses and cancellations that meet each other, the release, or the constructs inside a body.

``task.cancelling()`` also counts what nobody will ever take back: what a body swallowed, and what a failing
`asyncio.TaskGroup` leaves behind on Python < 3.13. And on Python < 3.12 `asyncio.wait_for` drops a cancellation that
meets its result; redis-py writes every command by it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio import CancelledError
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any, NoReturn, TypeAlias

import anyio
import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncReentrantLock, Coordinator, LeaseLost, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import BaseLease

from ..conftest import MakeClient
from ..support.body import FAST, assert_undisturbed, for_ever, later, lost_in
from ..support.one_server import one_server_for_all as one_server_for_all
from ..support.primitives import EVERY, Primitive, each, on_one_server
from .exception_races import NAME, group_that_fails, lose_now, swallowed_cancellation, this_task

Before: TypeAlias = Callable[[], Awaitable[None]]
BEFORE: tuple[Before, ...] = (group_that_fails, swallowed_cancellation)


class BodyError(Exception):
    """Raised by a body itself."""


@pytest.fixture(params=["link", "polling"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def free(kind: Primitive, redis: Redis) -> bool:
    return not await kind.held(redis, NAME)


# -- a count of cancellations that was there before ---------------------------------------------------------


@asynccontextmanager
async def nested(sync: Coordinator, name: str, **options: Any) -> AsyncIterator[object]:
    lock = AsyncReentrantLock(sync, name, **options)
    async with lock, lock as inner:
        yield inner


@each([*on_one_server(EVERY), Primitive("nested reentrant lock", nested)])
@pytest.mark.parametrize("before", BEFORE)
async def test_a_count_that_was_left_behind_does_not_hide_the_loss(
    sync: Coordinator, redis: Redis, primitive: Primitive, before: Before
) -> None:
    """The body is cancelled and LeaseLost leaves, bare; the count stays as it was."""
    interrupted: list[BaseException] = []
    hold: AbstractAsyncContextManager[object] = primitive.make(sync, NAME, ttl=3)

    async def holding() -> None:
        async with hold:
            await before()
            await redis.flushall()
            try:
                await for_ever()
            except BaseException as error:
                interrupted.append(error)
                raise

    async def run() -> None:
        with pytest.raises(LeaseLost):
            await holding()
        assert this_task().cancelling() <= 1
        await asyncio.sleep(0)

    await asyncio.wait_for(asyncio.create_task(run()), 30)
    assert [type(error) for error in interrupted] == [CancelledError]


@pytest.mark.parametrize("awaits", [for_ever, lambda: asyncio.create_task(for_ever())], ids=["itself", "a task"])
@pytest.mark.parametrize("before", [*BEFORE, None])
async def test_a_loss_in_the_clean_up_of_a_cancelled_body(
    kind: Primitive, sync: Coordinator, before: Before | None, awaits: Callable[[], Awaitable[None]]
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
                later(2, lambda: lose_now(lease))
                await awaits()

    task = asyncio.create_task(holding())
    await running.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(CancelledError):
        await asyncio.wait_for(task, 15)
    assert cleaning.is_set()
    assert task.cancelled()


@pytest.mark.real
@pytest.mark.parametrize("way", ["link"], indirect=True)
async def test_a_body_is_cancelled_once(sync: Coordinator, redis: Redis) -> None:
    """A clean-up that takes long runs to its end, and a body that swallows the cancellation gets no second one.

    In virtual time no cancellation is repeated, as it is on Python < 3.12 while redis-py may have dropped one.
    """
    cleaned: list[bool] = []

    async def cleans_up(_: object) -> None:
        await redis.set(NAME, "other", px=60_000)
        try:
            await for_ever()
        finally:
            await asyncio.sleep(1.3)
            cleaned.append(True)

    async def continues(_: object) -> None:
        await redis.set(f"{NAME}2", "other", px=60_000)
        with suppress(CancelledError):
            await for_ever()
        await asyncio.sleep(1.3)
        assert this_task().cancelling() == 1

    async with asyncio.TaskGroup() as both:
        both.create_task(lost_in(AsyncLock(sync, NAME, ttl=3), cleans_up))
        both.create_task(lost_in(AsyncLock(sync, f"{NAME}2", ttl=3), continues))
    assert cleaned == [True]


async def command(client: Redis) -> None:
    await client.ping()


async def in_a_task(client: Redis) -> None:
    await asyncio.create_task(command(client))


async def in_wait_for(client: Redis) -> None:
    await asyncio.wait_for(command(client), 5)


async def pipelined(client: Redis) -> None:
    async with client.pipeline() as pipe:
        pipe.execute_command("PING")
        await pipe.execute()


async def in_timeouts(client: Redis) -> None:
    """Do as redis-py before 8.0, which looks for unread data before each command."""
    await command(client)
    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            await for_ever()


@pytest.mark.real
@pytest.mark.parametrize("run", [command, in_a_task, in_wait_for, pipelined, in_timeouts])
@pytest.mark.parametrize("way", ["link"], indirect=True)
async def test_a_loss_that_meets_commands_of_redis_py(
    sync: Coordinator, make_client: MakeClient, run: Callable[[Redis], Awaitable[None]]
) -> None:
    """P6: in whatever turn of the loop it comes, the body gets one cancellation, soon."""
    client = make_client(socket_timeout=5)
    await client.ping()

    async def body(turn: int, seen: list[type[BaseException]]) -> None:
        async with AsyncLock(sync, NAME) as lease:
            later(turn, lambda: lose_now(lease))
            try:
                while True:
                    await run(client)
            except BaseException as error:
                seen.append(type(error))
                raise

    for turn in range(25):
        seen: list[type[BaseException]] = []
        with pytest.raises(LeaseLost):
            await asyncio.wait_for(body(turn, seen), 10)
        assert seen == [CancelledError], turn
        await assert_undisturbed()
        await client.flushall()  # another owner was only pretended


# -- a loss and a cancellation from outside ----------------------------------------------------------------


@pytest.mark.parametrize("cancel_after", range(4))
@pytest.mark.parametrize("lose_after", range(4))
@pytest.mark.parametrize("cancel_first", [False, True])
async def test_a_cancellation_is_neither_taken_for_the_loss_nor_swallowed(
    kind: Primitive, sync: Coordinator, cancel_first: bool, lose_after: int, cancel_after: int
) -> None:
    """In any order, in the same turn or not."""
    delivered: list[str] = []

    async def holding() -> None:
        try:
            async with kind.make(sync, NAME).acquire() as lease:
                actions = [(lose_after, lambda: lose_now(lease)), (cancel_after, lambda: task.cancel())]
                for turns, action in reversed(actions) if cancel_first else actions:
                    later(turns, action)
                await for_ever()
        except CancelledError as error:
            delivered.append("cancelled, lost" if getattr(error, "__notes__", []) else "cancelled")
            raise
        except LeaseLost:
            delivered.append("lost")
            await for_ever()  # the cancellation has yet to come

    task = asyncio.create_task(holding())
    with pytest.raises(CancelledError):
        await asyncio.wait_for(task, 15)
    assert task.cancelling() == 1
    if lose_after + cancel_first < cancel_after:
        assert delivered == ["lost"]
    elif lose_after <= cancel_after:  # both before the body runs again
        assert delivered == ["cancelled, lost"]
    else:
        assert delivered in (["cancelled"], ["cancelled, lost"])


async def test_a_cancelled_error_that_nobody_asked_for_is_the_bodys_own(
    kind: Primitive, sync: Coordinator, redis: Redis
) -> None:
    awaited = asyncio.get_running_loop().create_future()
    awaited.cancel()
    with pytest.raises(CancelledError):
        async with kind.make(sync, NAME):
            await awaited
    await assert_undisturbed()
    assert await free(kind, redis)


@pytest.mark.parametrize("lost", [["outer"], ["inner"], ["outer", "inner"], ["inner", "outer"]], ids=str)
@pytest.mark.parametrize("before", [None, group_that_fails])
async def test_losses_of_nested_holds(
    kind: Primitive, sync: Coordinator, redis: Redis, lost: list[str], before: Before | None
) -> None:
    """A LeaseLost leaves both, the first one if both are lost in one turn. A hold that was not lost is released."""
    names = {"outer": NAME, "inner": NAME + "2"}
    # The count that a group leaves is taken for a second cancellation: the outer loss may leave, though it came second.
    counts_more = before is not None and sys.version_info < (3, 13)

    async def holding() -> None:
        async with kind.make(sync, NAME).acquire() as outer, kind.make(sync, NAME + "2").acquire() as inner:
            if before is not None:
                await before()
            for which in lost:
                later(0, partial(lose_now, outer if which == "outer" else inner))
            await for_ever()

    async def run() -> None:
        with pytest.raises(LeaseLost) as caught:
            await holding()
        assert caught.value.name in [names[which] for which in (lost if counts_more else lost[:1])]
        if before is None:
            await assert_undisturbed()

    await asyncio.create_task(run())
    if not kind.share:  # what tasks share is given back, the rest waits for its end: nobody took it in truth
        held = [which for which in names if await kind.held(redis, names[which])]
        assert held == sorted(lost, reverse=True)


# -- a loss inside other constructs ------------------------------------------------------------------------


async def in_timeout() -> None:
    async with asyncio.timeout(60):
        await for_ever()


async def waited_for() -> None:
    await asyncio.wait_for(for_ever(), 60)


async def in_scope() -> None:
    with anyio.move_on_after(60):
        await for_ever()


async def in_shield() -> None:
    with anyio.CancelScope(shield=True):
        await for_ever()


async def in_task_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(for_ever())


async def in_anyio_group() -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(for_ever)


async def in_gather() -> None:
    await asyncio.gather(for_ever(), for_ever())


@pytest.mark.parametrize(
    "inside", [in_timeout, waited_for, in_scope, in_shield, in_task_group, in_anyio_group, in_gather]
)
async def test_a_real_loss_interrupts_whatever_the_body_is_in(
    kind: Primitive, sync: Coordinator, redis: Redis, inside: Callable[[], Awaitable[None]]
) -> None:
    """P6: it leaves as a bare LeaseLost."""

    async def body(lease: BaseLease) -> None:
        await kind.take_over(redis, NAME)
        await inside()

    _, error = await lost_in(kind.make(sync, NAME, ttl=3), body)
    assert error.reason == kind.taken


@pytest.mark.parametrize("loss_first", [True, False])
@pytest.mark.parametrize("timeouts", ["anyio", "asyncio"])
async def test_a_timeout_of_the_body_in_the_same_turn_does_not_hide_the_loss(
    kind: Primitive, sync: Coordinator, timeouts: str, loss_first: bool
) -> None:
    async def body(lease: BaseLease) -> None:
        if timeouts == "anyio":
            with anyio.move_on_after(60) as scope:
                actions = [lambda: lose_now(lease), scope.cancel]
                for action in actions if loss_first else reversed(actions):
                    later(0, action)
                await for_ever()
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(60) as timeout:
                    later(0, lambda: timeout.reschedule(0))
                    later(0 if loss_first else 1, lambda: lose_now(lease))
                    await for_ever()
        await asyncio.sleep(0)

    await lost_in(kind.make(sync, NAME).acquire(), body)


# -- a cancellation that meets the release -----------------------------------------------------------------


@pytest.mark.parametrize("names", [[NAME], [NAME, NAME + "2"]], ids=["one", "nested"])
@pytest.mark.parametrize("error", [None, BodyError], ids=["ends", "raises"])
@pytest.mark.parametrize("turns", range(3))
async def test_a_cancellation_that_meets_the_release_is_due_after_the_bodys_error(
    kind: Primitive, sync: Coordinator, redis: Redis, turns: int, error: type[Exception] | None, names: list[str]
) -> None:
    """P5: the body's error leaves, then the cancellation arrives at the next await; the locks are released."""
    seen: list[object] = []

    async def holding() -> None:
        try:
            async with AsyncExitStack() as stack:
                for name in names:
                    await stack.enter_async_context(kind.make(sync, name))
                later(turns, task.cancel)
                if error is not None:
                    raise error
        except BodyError as caught:
            seen.append(type(caught))
        assert this_task().cancelling() <= 1
        await for_ever()

    task = asyncio.create_task(holding())
    with pytest.raises(CancelledError):
        await asyncio.wait_for(task, 15)
    assert task.cancelling() == 1
    assert seen == ([] if error is None else [error])
    await wait_until(lambda: free(kind, redis), FAST, timeout=5)


@pytest.mark.parametrize("clean_up_in", ["scope", "group"])
async def test_a_shielded_clean_up_between_the_hold_and_the_end_of_its_scope_is_not_torn(
    kind: Primitive, sync: Coordinator, clean_up_in: str
) -> None:
    """Nor is the body's error lost."""
    cleaned: list[bool] = []

    async def fail(scope: anyio.CancelScope) -> NoReturn:
        try:
            async with kind.make(sync, NAME):
                later(0, scope.cancel)
                raise BodyError
        finally:
            with anyio.CancelScope(shield=True):
                for _ in range(4):
                    await asyncio.sleep(0)
            cleaned.append(True)

    with pytest.RaisesGroup(BodyError, allow_unwrapped=True, flatten_subgroups=True):
        if clean_up_in == "scope":
            with anyio.CancelScope() as scope:
                await fail(scope)
        else:
            async with anyio.create_task_group() as group:
                await fail(group.cancel_scope)
    assert cleaned == [True]
    await assert_undisturbed()


# -- the end of the process --------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
async def test_base_exceptions_pass_and_the_lock_is_released(
    kind: Primitive, sync: Coordinator, redis: Redis, error: type[BaseException]
) -> None:
    with pytest.raises(error) as caught:
        async with kind.make(sync, NAME):
            raise error
    assert not getattr(caught.value, "__notes__", [])
    assert await free(kind, redis)


@pytest.mark.real
@pytest.mark.parametrize(
    ("error", "how"), [(KeyboardInterrupt, "raised"), (KeyboardInterrupt, "signalled"), (SystemExit, "raised")]
)
@pytest.mark.parametrize("implicit", [False, True])
def test_the_end_of_the_program_releases_the_lock(
    kind: Primitive, server: EmbeddedServer, error: type[BaseException], how: str, implicit: bool
) -> None:
    """P12: asyncio.run() ends by what ended the body."""

    async def main() -> None:
        async with (
            server.client() as client,
            Coordinator(client) as sync,
            kind.make(client if implicit else sync, NAME),
        ):
            if how == "raised":
                raise error
            signal.raise_signal(signal.SIGINT)
            await for_ever()

    async def look() -> bool:
        async with server.client() as client:
            return await free(kind, client)

    with pytest.raises(error):
        asyncio.run(main())
    assert asyncio.run(look())
