"""P7: losses and cancellations that meet each other, the release, or the constructs inside a body.

FAULTS B7, B8. The table of what leaves a body is in test_exceptions.py; here is what happens in one turn of the loop,
or one after the other.
"""

from __future__ import annotations

import asyncio
import signal
from asyncio import CancelledError
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import NoReturn

import anyio
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import Coordinator, LeaseLost, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import BaseLease

from ..support.body import FAST, assert_undisturbed, for_ever, lost_in
from ..support.exception_races import NAME, later, this_task
from ..support.factories import Kind


class BodyError(Exception):
    """What a body raises by itself."""


@pytest.fixture(params=["link", "polling", "cluster"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def free(kind: Kind, redis: Redis) -> bool:
    return not await kind.held(redis, NAME)


# -- a loss and a cancellation from outside ----------------------------------------------------------------


@pytest.mark.parametrize("waits", [0, 1], ids=["running", "waiting"])
@pytest.mark.parametrize("loss_first", [True, False], ids=["loss first", "scope first"])
async def test_p7_a_loss_in_the_turn_of_a_scopes_cancellation(
    kind: Kind, sync: Coordinator, loss_first: bool, waits: float
) -> None:
    """Both orders: the scope of anyio ends what it has cancelled, and the task is nobody's to cancel."""
    before = this_task().cancelling()
    scope, lost = anyio.CancelScope(), False
    try:
        with scope:
            async with kind.make(sync, NAME).acquire() as lease:

                def both() -> None:
                    if not loss_first:
                        scope.cancel()
                    lease._grant.lose("expired")
                    scope.cancel()

                later(0, both)
                for _ in range(5):
                    await asyncio.sleep(waits)
    except LeaseLost:
        lost = True
    assert lost or scope.cancelled_caught
    assert this_task().cancelling() == before
    await asyncio.sleep(0)


@pytest.mark.parametrize("cancel_after", range(4))
@pytest.mark.parametrize("lose_after", range(4))
@pytest.mark.parametrize("cancel_first", [False, True])
async def test_p7_loss_and_cancel(
    kind: Kind, sync: Coordinator, cancel_first: bool, lose_after: int, cancel_after: int
) -> None:
    """P7: in any order, in the same turn or not: the cancellation is never taken for the loss, nor swallowed."""
    delivered: list[str] = []

    async def holding() -> None:
        try:
            async with kind.make(sync, NAME).acquire() as lease:
                actions = [(lose_after, lambda: lease._grant.lose("taken")), (cancel_after, lambda: task.cancel())]
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


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("scope_first", [False, True])
async def test_p7_loss_and_anyio_scope(kind: Kind, sync: Coordinator, scope_first: bool, turns: int) -> None:
    """P7: whichever is first, the scope keeps its own cancellation and nothing of either is left in the task."""
    with suppress(LeaseLost), anyio.move_on_after(60) as scope:
        async with kind.make(sync, NAME).acquire() as lease:
            first, second = scope.cancel, lambda: lease._grant.lose("taken")
            later(0, first if scope_first else second)
            later(turns, second if scope_first else first)
            await for_ever()
    assert scope.cancelled_caught or not scope_first
    await assert_undisturbed()


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("timeout_first", [False, True])
async def test_p7_loss_and_timeout(kind: Kind, sync: Coordinator, timeout_first: bool, turns: int) -> None:
    """P7: TimeoutError if the timeout came first or in the same turn, LeaseLost if it came later."""
    with pytest.raises((TimeoutError, LeaseLost)) as caught:  # noqa: PT012
        async with asyncio.timeout(60) as timeout, kind.make(sync, NAME).acquire() as lease:
            later(turns + 1 if timeout_first else 0, lambda: lease._grant.lose("taken"))
            # reschedule() takes a turn of its own
            later(0 if timeout_first else turns, lambda: timeout.reschedule(0))
            await for_ever()
    assert caught.type is (TimeoutError if timeout_first else LeaseLost)
    await assert_undisturbed()


async def test_p7_loss_after_a_swallowed_cancellation(kind: Kind, sync: Coordinator) -> None:
    """P7: a cancellation that the task had swallowed before the body began is not taken for a new one."""

    async def holding() -> None:
        with suppress(CancelledError):
            this_task().cancel()
            await asyncio.sleep(0)
        with pytest.raises(LeaseLost):  # noqa: PT012
            async with kind.make(sync, NAME).acquire() as lease:
                later(0, lambda: lease._grant.lose("taken"))
                await for_ever()
        assert this_task().cancelling() == 1
        await asyncio.sleep(0)

    await asyncio.create_task(holding())


async def test_p7_cancelled_error_of_the_body(kind: Kind, sync: Coordinator, redis: Redis) -> None:
    """P7: a CancelledError nobody asked for (of something awaited) is the body's own error."""
    awaited = asyncio.get_running_loop().create_future()
    awaited.cancel()
    with pytest.raises(CancelledError):
        async with kind.make(sync, NAME):
            await awaited
    await assert_undisturbed()
    assert await free(kind, redis)


async def test_p7_loss_of_two_nested_holds(kind: Kind, sync: Coordinator) -> None:
    """P7: both lost in one turn: one LeaseLost leaves, and nothing is left in the task."""
    with pytest.raises(LeaseLost) as caught:  # noqa: PT012
        async with kind.make(sync, NAME).acquire() as outer, kind.make(sync, NAME + "2").acquire() as inner:
            later(0, lambda: outer._grant.lose("taken"))
            later(0, lambda: inner._grant.lose("expired"))
            await for_ever()
    assert caught.value.name == NAME
    await assert_undisturbed()


@pytest.mark.parametrize("which", ["outer", "inner"])
async def test_p7_loss_of_one_of_two_nested_holds(kind: Kind, sync: Coordinator, redis: Redis, which: str) -> None:
    """P7: the loss of one leaves both; the other lock is released."""
    with pytest.raises(LeaseLost) as caught:  # noqa: PT012
        async with kind.make(sync, NAME).acquire() as outer, kind.make(sync, NAME + "2").acquire() as inner:
            lost = outer if which == "outer" else inner
            later(0, lambda: lost._grant.lose("taken"))
            await for_ever()
    assert caught.value.name == (NAME if which == "outer" else NAME + "2")
    assert not getattr(caught.value, "__notes__", [])
    # The lost one, which nobody took in truth. Only what tasks share is given back then.
    assert await kind.held(redis, NAME) + await kind.held(redis, NAME + "2") == (0 if kind.share else 1)
    await assert_undisturbed()


# -- a loss inside other constructs ------------------------------------------------------------------------


async def in_timeout() -> None:
    async with asyncio.timeout(60):
        await for_ever()


async def in_wait_for() -> None:
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


INSIDE = (in_timeout, in_wait_for, in_scope, in_shield, in_task_group, in_anyio_group, in_gather)


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.timing
async def test_p7_loss_inside(
    kind: Kind, sync: Coordinator, redis: Redis, inside: Callable[[], Awaitable[None]]
) -> None:
    """P6, P7: a real loss interrupts whatever the body is in, and leaves as a bare LeaseLost."""

    async def body(lease: BaseLease) -> None:
        await kind.take_over(redis, NAME)
        await inside()

    _, error = await lost_in(kind.make(sync, NAME, ttl=0.4), body)
    assert error.reason == kind.taken


@pytest.mark.parametrize("loss_first", [False, True])
@pytest.mark.parametrize("timeouts", ["anyio", "asyncio"])
async def test_p7_loss_meets_a_timeout_of_the_body(
    kind: Kind, sync: Coordinator, timeouts: str, loss_first: bool
) -> None:
    """P7: a timeout inside the body that ends in the same turn neither hides the loss nor leaves a trace."""

    async def body(lease: BaseLease) -> None:
        if timeouts == "anyio":
            with anyio.move_on_after(60) as scope:
                actions = [lambda: lease._grant.lose("taken"), scope.cancel]
                for action in actions if loss_first else reversed(actions):
                    later(0, action)
                await for_ever()
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(60) as timeout:
                    later(0, lambda: timeout.reschedule(0))
                    later(0 if loss_first else 1, lambda: lease._grant.lose("taken"))
                    await for_ever()
        await asyncio.sleep(0)

    await lost_in(kind.make(sync, NAME).acquire(), body)


# -- a cancellation that meets the release -----------------------------------------------------------------


@pytest.mark.parametrize("error", [None, BodyError], ids=["ends", "raises"])
@pytest.mark.parametrize("turns", range(3))
async def test_p7_cancelled_while_releasing(
    kind: Kind, sync: Coordinator, redis: Redis, turns: int, error: type[Exception] | None
) -> None:
    """P5, P7: the body's error leaves, then the cancellation arrives at the next await; the lock is released."""
    seen: list[object] = []

    async def holding() -> None:
        try:
            async with kind.make(sync, NAME):
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


@pytest.mark.parametrize("timeouts", ["anyio", "asyncio"])
async def test_p7_a_timeout_around_takes_its_cancellation_back(
    kind: Kind, sync: Coordinator, redis: Redis, timeouts: str
) -> None:
    """P7: the body's error passes the timeout that met the release, and later awaits are not disturbed."""
    with pytest.raises(BodyError):  # noqa: PT012
        if timeouts == "anyio":
            with anyio.move_on_after(60) as scope:
                async with kind.make(sync, NAME):
                    later(0, scope.cancel)
                    raise BodyError
        else:
            async with asyncio.timeout(60) as timeout, kind.make(sync, NAME):
                timeout.reschedule(0)
                raise BodyError
    await assert_undisturbed()
    await wait_until(lambda: free(kind, redis), FAST, timeout=5)


@pytest.mark.parametrize("clean_up_in", ["scope", "group"])
async def test_p7_anyio_clean_up_after_a_cancelled_release(kind: Kind, sync: Coordinator, clean_up_in: str) -> None:
    """P7: between the hold and the end of a cancelled scope a shielded clean-up is not torn, nor the error lost."""
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


async def test_p7_cancelled_while_releasing_nested(kind: Kind, sync: Coordinator, redis: Redis) -> None:
    """P5, P7: with two locks the cancellation that met the first release is still due after the second."""

    async def holding() -> None:
        with pytest.raises(BodyError):  # noqa: PT012
            async with kind.make(sync, NAME), kind.make(sync, NAME + "2"):
                later(0, task.cancel)
                raise BodyError
        await for_ever()

    task = asyncio.create_task(holding())
    with pytest.raises(CancelledError):
        await asyncio.wait_for(task, 15)
    assert task.cancelling() == 1
    await wait_until(lambda: free(kind, redis), FAST, timeout=5)


# -- what ends the process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
async def test_p7_base_exceptions_pass(kind: Kind, sync: Coordinator, redis: Redis, error: type[BaseException]) -> None:
    """P7: KeyboardInterrupt and SystemExit of the body pass through, and the lock is released."""
    with pytest.raises(error) as caught:
        async with kind.make(sync, NAME):
            raise error
    assert not getattr(caught.value, "__notes__", [])
    assert await free(kind, redis)


@pytest_asyncio.fixture
async def url(server: EmbeddedServer, redis: Redis) -> AsyncIterator[str]:
    yield server.url


@pytest.mark.parametrize(
    ("error", "how"), [(KeyboardInterrupt, "raised"), (KeyboardInterrupt, "signalled"), (SystemExit, "raised")]
)
@pytest.mark.parametrize("implicit", [False, True])
def test_p7_the_end_of_the_program(kind: Kind, url: str, error: type[BaseException], how: str, implicit: bool) -> None:
    """P7, P12: asyncio.run() ends by what ended the body, and the lock was released."""

    async def main() -> None:
        async with (
            Redis.from_url(url) as client,
            Coordinator(client) as sync,
            kind.make(client if implicit else sync, NAME),
        ):
            if how == "raised":
                raise error
            signal.raise_signal(signal.SIGINT)
            await for_ever()

    async def look() -> bool:
        async with Redis.from_url(url) as client:
            return await free(kind, client)

    with pytest.raises(error):
        asyncio.run(main())
    assert asyncio.run(look())
