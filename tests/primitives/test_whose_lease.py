"""How one acquires; whose hold an exit ends, whose lease a release gives back, and who learns of it.

No exit and no release by name ends what another living task has. Each test runs over all primitives that the rule is
about.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any
from weakref import ref

import pytest

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncReentrantLock,
    AsyncRobustLock,
    AsyncSemaphore,
    Coordinator,
    Lease,
    LeaseLost,
    NotHeld,
    WouldDeadlock,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import BaseLease

from ..support.body import FAST, for_ever, lost_in, waits
from ..support.primitives import LOCKS, PRIMITIVES, TOGETHER, Primitive, each
from .conftest import Make

everything = each(PRIMITIVES)
exclusive = each(one for one in LOCKS if not one.reenters)
by_many = each(TOGETHER)


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


# -- one verb: what ``acquire()`` and ``try_acquire()`` return is awaited or entered, once ------------------


@everything
async def test_the_five_forms(primitive: Primitive, make: Make) -> None:
    """Each primitive that is acquired has all of them; a body releases at its end, also that of a lease."""
    it = make()
    for context in (lambda: it, lambda: it.acquire(timeout=5), it.try_acquire):
        async with context() as lease:
            lease.check()
    for acquire in (lambda: it.acquire(timeout=5), it.try_acquire):
        acquired = await acquire()
        acquired.check()
        await acquired.release()
        with pytest.raises(NotHeld):
            acquired.check()
        async with await acquire() as entered:
            entered.check()
        assert not entered.remaining()


async def test_a_body_without_a_lease_gets_none(sync: Coordinator, other: Coordinator) -> None:
    """The end of such a body releases nothing, and its error propagates."""
    async with other.lock("verb"):
        async with sync.lock("verb").try_acquire() as lease:
            assert lease is None
        with pytest.raises(KeyError):
            async with sync.lock("verb").try_acquire() as lease:
                raise KeyError
        assert await other.lock("verb").locked()


async def test_an_acquisition_is_good_for_one_lease(sync: Coordinator) -> None:
    """The second use says to call acquire() again, whichever the first was. One that is dropped warns."""
    acquiring = sync.lock("verb").acquire()
    await (await acquiring).release()
    with pytest.raises(RuntimeError, match="call acquire"):
        await acquiring
    with pytest.raises(RuntimeError, match="call acquire"):
        async with acquiring:
            pass
    entered = sync.lock("verb").acquire()
    async with entered:
        with pytest.raises(RuntimeError, match="call acquire"):
            await entered
    with pytest.raises(ValueError, match="timeout"):
        sync.lock("verb").acquire(timeout=-1)  # at the call, so nothing is left to await
    with pytest.warns(RuntimeWarning, match="was never awaited"):
        sync.lock("verb").acquire()
    assert not await sync.lock("verb").locked()


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
async def test_release_does_not_choose_among_those_of_tasks_that_ended(primitive: Primitive, make: Make) -> None:
    """As after `asyncio.gather(sem.acquire(), sem.acquire())`."""
    shared = make()
    leases = await asyncio.gather(shared.acquire(), shared.acquire())
    with pytest.raises(NotHeld, match=r"a task that has ended.*lease\.release\(\)"):
        await shared.release()
    for lease in leases:
        lease.check()
        await lease.release()


# -- released by another task ------------------------------------------------------------------------------


@everything
@pytest.mark.parametrize("on_lost", ["cancel", "event"])
@pytest.mark.parametrize("enters", ["the primitive", "the lease"])
async def test_a_body_learns_that_another_task_released_its_lease(
    primitive: Primitive, make: Make, on_lost: str, enters: str
) -> None:
    """It is cancelled once, or sees the event, and ends with LeaseLost; nobody's cancellation is left behind."""

    async def body(lease: BaseLease) -> None:
        entered.set_result(lease)
        await (lease.wait_lost() if on_lost == "event" else for_ever())
        with pytest.raises(LeaseLost):
            lease.check()

    entered: asyncio.Future[BaseLease] = asyncio.get_running_loop().create_future()

    async def run() -> tuple[BaseLease, LeaseLost]:
        it = make(on_lost=on_lost)
        return await lost_in(await it.acquire() if enters == "the lease" else it, body)

    task = asyncio.create_task(run())
    async with asyncio.timeout(5):
        await (await entered).release()
        _, error = await task
        assert error.reason == "released"
        assert "another task released it while this body ran" in str(error)
        async with make():  # it is free
            pass


# -- async with lease --------------------------------------------------------------------------------------


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


# -- a task that would wait for the end of its own body is refused immediately -------------------------------


@exclusive
@pytest.mark.parametrize("timeout", [None, 60])
async def test_acquiring_what_the_own_body_holds_is_refused(
    primitive: Primitive, make: Make, timeout: float | None
) -> None:
    """Whatever object of the same name asks; and nothing is left in the queue."""
    async with asyncio.timeout(5), make() as lease:
        with pytest.raises(WouldDeadlock, match="wait for itself"):
            await make().acquire(timeout=timeout)
        with pytest.raises(WouldDeadlock):
            async with make():
                pass
        assert await make().try_acquire() is None  # it does not wait
        lease.check()
    async with asyncio.timeout(5), make():
        pass


async def release_when_it_waits(lock: AsyncLock, lease: Lease) -> None:
    await wait_until(waits(lock), FAST, timeout=5)
    await asyncio.sleep(1)  # the waiter has its answers
    await lease.release()


async def test_it_waits_in_a_body_that_runs_on_without_its_lease(sync: Coordinator) -> None:
    lock = AsyncLock(sync, "it", on_lost="event")

    async def body(lease: Lease) -> None:
        releasing = asyncio.create_task(release_when_it_waits(lock, lease))
        again = await lock.acquire()
        await releasing
        await again.release()

    _, error = await lost_in(lock.acquire(), body)
    assert error.reason == "released"


async def test_the_same_name_on_another_server_is_another_lock(
    sync: Coordinator, independent_servers: list[EmbeddedServer]
) -> None:
    """The task may wait there for what others hold."""
    async with independent_servers[0].client() as elsewhere, Coordinator(elsewhere) as there:
        await elsewhere.flushall()
        lock = AsyncLock(there, "it")
        blocker = await lock.acquire()
        async with asyncio.timeout(30), sync.lock("it"):
            releasing = asyncio.create_task(release_when_it_waits(lock, blocker))
            async with lock:
                await releasing


HOLDS: dict[str, Callable[[Coordinator], Any]] = {
    "plain": lambda sync: sync.lock("it"),
    "shared": lambda sync: sync.lock("it", share=True),
    "reentrant": lambda sync: sync.reentrant_lock("it"),
    "multi": lambda sync: AsyncMultiLock(sync, ["it", "that"]),
}
ASKS: dict[str, Callable[[Coordinator, Coordinator], Any]] = {
    "another engine": lambda second, other: second.lock("it", engine="lua"),
    "the bare client": lambda second, other: AsyncLock(second.client, "it"),
    "a second coordinator of the client": lambda second, other: second.lock("it"),
    "another client": lambda second, other: other.lock("it"),
    "tasks that share": lambda second, other: other.lock("it", share=True),
    "WATCH": lambda second, other: other.lock("it", engine="watch"),
    "a robust lock": lambda second, other: AsyncRobustLock(other, "it"),
    "a reentrant lock": lambda second, other: AsyncReentrantLock(other, "it"),
    "a reentrant lock of the coordinator": lambda second, other: AsyncReentrantLock(second, "it"),
    "a multi-lock": lambda second, other: AsyncMultiLock(other, ["and that", "it"]),
}


@pytest.mark.parametrize("outer", HOLDS)
@pytest.mark.parametrize("inner", ASKS)
async def test_another_object_of_the_name_is_refused_whatever_it_is_made_of(
    sync: Coordinator, other: Coordinator, outer: str, inner: str
) -> None:
    """The server says that it is the same lock: it has the token of the body's lease. Nothing is left in the queue."""
    async with asyncio.timeout(30), Coordinator(sync.client) as second:
        asks = ASKS[inner](second, other)
        async with HOLDS[outer](sync) as lease:
            with pytest.raises(WouldDeadlock, match=r"a body of this task holds 'it' \(fence .*wait for itself"):
                await asks.acquire()
            with pytest.raises(WouldDeadlock):
                async with asks:
                    pass
            lease.check()
            await wait_until(waits(sync.lock("it"), 0), FAST, timeout=20)
        async with asks:
            pass


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
async def test_both_sides_of_a_read_write_lock(
    sync: Coordinator, other: Coordinator, share: bool, elsewhere: bool
) -> None:
    """Reading twice is no wait for itself."""
    here = AsyncReadWriteLock(sync, "it", share=share)
    there = AsyncReadWriteLock(other if elsewhere else sync, "it", share=share)
    async with asyncio.timeout(30):
        async with here.read():
            async with there.read():
                pass
            with pytest.raises(WouldDeadlock, match="release that lease before you acquire the write side"):
                await there.write().acquire()
        async with here.write():
            for side in (there.read(), there.write()):
                with pytest.raises(WouldDeadlock, match=r"downgrade\(\) it"):
                    await side.acquire()
        async with there.write():
            pass
