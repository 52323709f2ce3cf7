"""Whose hold an exit ends, whose lease a release gives back, and who learns of it.

No exit and no release by name ends what another living task has. Each test runs over all primitives that the rule is
about.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any
from weakref import ref

import pytest

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncReentrantLock,
    AsyncSemaphore,
    Coordinator,
    LeaseLost,
    NotHeld,
)
from redis_sync_aio.types import BaseLease

from ..support.body import assert_undisturbed, for_ever, lost_in
from .conftest import ALONE, PRIMITIVES, TOGETHER, Make, Primitive

everything = pytest.mark.parametrize("primitive", PRIMITIVES, ids=str)
exclusive = pytest.mark.parametrize("primitive", [one for one in ALONE if not one.reenters], ids=str)
by_many = pytest.mark.parametrize("primitive", TOGETHER, ids=str)


class Body:
    """A task that runs a body under a lease until it may leave."""

    def __init__(self, stack: AsyncExitStack, context: Any) -> None:
        self.lease: BaseLease
        self._entered = asyncio.Event()
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(stack, context))

    async def _run(self, stack: AsyncExitStack, context: Any) -> None:
        self.lease = await stack.enter_async_context(context)
        self._entered.set()
        await self._leave.wait()

    async def runs(self) -> BaseLease:
        """Wait until the body runs."""
        async with asyncio.timeout(5):
            await self._entered.wait()
        return self.lease

    async def ends(self) -> None:
        """End the task, but leave its exit stack open."""
        self._leave.set()
        await self.task


async def in_another_task(run: Any) -> Any:
    """Return what it returns in a task of its own."""

    async def inside() -> Any:
        return await run()

    return await asyncio.create_task(inside())


# -- exits -------------------------------------------------------------------------------------------------


@by_many
async def test_an_exit_that_may_be_of_either_of_two_living_tasks_ends_none(primitive: Primitive, make: Make) -> None:
    """A supervisor closes the exit stack of one: it cannot be told which body that ends."""
    shared = make()
    first, second = AsyncExitStack(), AsyncExitStack()
    one, two = Body(first, shared), Body(second, shared)
    leases = [await one.runs(), await two.runs()]
    with pytest.raises(RuntimeError, match=r"enter acquire\(\)"):
        await first.aclose()
    for lease in leases:
        lease.check()
    assert not one.task.done()
    assert not two.task.done()
    await one.ends()
    await two.ends()
    for lease in leases:
        await lease.release()


@by_many
async def test_an_exit_that_ends_nothing_leaves_the_error_of_the_body(primitive: Primitive, make: Make) -> None:
    """P7: what leaves is the body's own error, and says on itself why nothing was released."""
    shared = make()
    bodies = [Body(AsyncExitStack(), shared), Body(AsyncExitStack(), shared)]
    leases = [await body.runs() for body in bodies]
    error = ValueError("of the body")
    await shared.__aexit__(ValueError, error, None)
    assert "enter acquire()" in error.__notes__[0]
    for body, lease in zip(bodies, leases, strict=True):
        lease.check()
        await body.ends()
        await lease.release()


@by_many
async def test_an_exit_in_another_task_ends_the_hold_whose_task_has_ended(primitive: Primitive, make: Make) -> None:
    """Also if the living task entered first, or last."""
    shared = make()
    for first_to_end in (0, 1):
        stacks = AsyncExitStack(), AsyncExitStack()
        bodies = [Body(stack, shared) for stack in stacks]
        leases = [await body.runs() for body in bodies]
        living = 1 - first_to_end
        await bodies[first_to_end].ends()
        await stacks[first_to_end].aclose()
        assert [lease.remaining() > 0 for lease in leases] == [living == 0, living == 1]
        await bodies[living].ends()
        await stacks[living].aclose()


@by_many
async def test_a_generator_that_is_collected_ends_its_own_hold(primitive: Primitive, make: Make) -> None:
    """Its task has ended; another task is in a body of the same object at that moment."""
    shared = make()

    async def held() -> AsyncGenerator[BaseLease, None]:
        async with shared as lease:
            yield lease

    async def take_one() -> BaseLease:
        return await anext(held())

    body = Body(AsyncExitStack(), shared)
    living = await body.runs()
    left = await in_another_task(take_one)
    gc.collect()
    async with asyncio.timeout(5):
        while left.remaining():
            await asyncio.sleep(0)
    living.check()
    await body.ends()
    await living.release()


@everything
async def test_an_exit_in_another_task_ends_the_only_hold(primitive: Primitive, make: Make) -> None:
    """As a fixture is torn down, whose task may live on."""
    stack = AsyncExitStack()
    body = Body(stack, make())
    lease = await body.runs()
    await stack.aclose()
    with pytest.raises(NotHeld):
        lease.check()
    await body.ends()


@everything
async def test_a_hold_keeps_no_ended_task_alive(primitive: Primitive, make: Make) -> None:
    shared = make()
    stack = AsyncExitStack()
    body = Body(stack, shared)
    await body.runs()
    await body.ends()
    task = ref(body.task)
    del body
    await asyncio.sleep(0)  # the loop lets go of the callback that woke us
    gc.collect()
    assert task() is None
    await stack.aclose()


# -- release() of the primitive ----------------------------------------------------------------------------


@exclusive
async def test_release_after_a_timeout_takes_nothing_from_another_task(primitive: Primitive, make: Make) -> None:
    """The `finally: await lock.release()` of a task whose acquire timed out."""
    body = Body(AsyncExitStack(), make())
    lease = await body.runs()
    lock = make()
    with pytest.raises(AcquireTimeout):
        await lock.acquire(timeout=0.1)
    with pytest.raises(NotHeld, match=r"lease\.release\(\)") as refused:
        await lock.release()
    assert body.task.get_name() in str(refused.value)
    lease.check()
    await body.ends()
    await lease.release()


@by_many
async def test_release_gives_back_the_latest_of_the_current_task(primitive: Primitive, make: Make) -> None:
    shared = make()
    mine = [await shared.acquire() for _ in range(2)]
    theirs = await in_another_task(shared.acquire)
    await shared.release()
    assert [lease.remaining() > 0 for lease in (*mine, theirs)] == [True, False, True]
    await shared.release()
    await shared.release()
    assert not theirs.remaining()  # its task has ended, and it is the only one of those
    with pytest.raises(NotHeld):
        await shared.release()


@by_many
async def test_release_does_not_choose_among_those_of_tasks_that_ended(primitive: Primitive, make: Make) -> None:
    """As after `asyncio.gather(sem.acquire(), sem.acquire())`."""
    shared = make()
    leases = await asyncio.gather(shared.acquire(), shared.acquire())
    with pytest.raises(NotHeld, match=r"a task that has ended.*lease\.release\(\)"):
        await shared.release()
    for lease in leases:
        lease.check()
        await lease.release()


async def test_release_of_a_lock_takes_nothing_from_the_owner_of_a_reentrant_one(sync: Coordinator) -> None:
    lease = await AsyncReentrantLock(sync, "it").acquire()
    with pytest.raises(NotHeld, match="reenter"):
        await AsyncLock(sync, "it").release()
    lease.check()
    await lease.release()


# -- released by another task ------------------------------------------------------------------------------


@everything
@pytest.mark.parametrize("on_lost", ["cancel", "event"])
async def test_a_body_learns_that_another_task_released_its_lease(
    primitive: Primitive, make: Make, on_lost: str
) -> None:
    """It is cancelled once, or sees the event, and ends with LeaseLost; nobody's cancellation is left behind."""

    async def body(lease: BaseLease) -> None:
        entered.set_result(lease)
        await (lease.wait_lost() if on_lost == "event" else for_ever())
        with pytest.raises(LeaseLost):
            lease.check()

    entered: asyncio.Future[BaseLease] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(lost_in(make(on_lost=on_lost), body))
    async with asyncio.timeout(5):
        await (await entered).release()
        _, error = await task
        assert error.reason == "released"
        async with make():  # it is free
            pass


@everything
async def test_a_body_that_releases_its_own_lease_ends_as_any_other(primitive: Primitive, make: Make) -> None:
    async with make() as lease:
        await lease.release()
        await asyncio.sleep(0)


async def test_a_body_that_failed_leaves_its_error_when_its_lease_was_given_back(sync: Coordinator) -> None:
    """P7: the loss is a note on the body's error."""

    async def body() -> None:
        async with AsyncLock(sync, "it") as lease:
            try:
                await asyncio.gather(in_another_task(lease.release), for_ever())
            except asyncio.CancelledError:
                raise ValueError("mine") from None

    with pytest.raises(ValueError, match="mine") as raised:
        await body()
    assert "another task released it" in raised.value.__notes__[0]
    await assert_undisturbed()


# -- async with lease --------------------------------------------------------------------------------------


@everything
async def test_every_lease_is_a_context_manager(primitive: Primitive, make: Make) -> None:
    async with await make().acquire(timeout=5) as lease:
        lease.check()
    with pytest.raises(NotHeld):
        lease.check()
    if (tried := await make().try_acquire()) is not None:
        async with tried:
            tried.check()
    assert tried is not None
    assert not tried.remaining()


@everything
async def test_a_lease_is_entered_once(primitive: Primitive, make: Make) -> None:
    async with make() as lease:
        with pytest.raises(RuntimeError, match="another lease"):
            async with lease:
                pass
        lease.check()
    with pytest.raises(NotHeld):
        async with lease:
            pass


@everything
async def test_the_loss_of_an_entered_lease_cancels_its_body(primitive: Primitive, make: Make) -> None:
    lease = await make().acquire()

    async def body(entered: BaseLease) -> None:
        asyncio.get_running_loop().call_soon(partial(entered._grant.lose, "taken"))
        await for_ever()

    entered, _ = await lost_in(lease, body)
    assert entered is lease


async def test_an_exit_of_a_lease_that_was_not_entered_is_refused(sync: Coordinator) -> None:
    lease = await AsyncLock(sync, "it").acquire()
    with pytest.raises(NotHeld, match="was not entered"):
        await lease.__aexit__(None, None, None)
    await lease.release()


@by_many
async def test_two_stacks_of_one_task_end_its_latest_hold_first(primitive: Primitive, make: Make) -> None:
    """An exit does not say which of them it ends: the latest goes, whatever stack is closed."""
    shared = make()
    first, second = AsyncExitStack(), AsyncExitStack()
    leases = [await stack.enter_async_context(shared) for stack in (first, second)]
    await first.aclose()
    assert [lease.remaining() > 0 for lease in leases] == [True, False]
    await second.aclose()
    assert not leases[0].remaining()


async def test_hold_says_which_body_an_exit_ends(sync: Coordinator) -> None:
    """What the refusal advises: closed first-in-first-out, by anybody, each stack ends its own."""
    sem = AsyncSemaphore(sync, "it", limit=2)
    stacks = AsyncExitStack(), AsyncExitStack()
    bodies = [Body(stack, sem.acquire()) for stack in stacks]
    leases = [await body.runs() for body in bodies]
    await stacks[0].aclose()
    assert [lease.remaining() > 0 for lease in leases] == [False, True]
    await stacks[1].aclose()
    for body in bodies:
        await body.ends()
