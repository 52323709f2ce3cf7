"""One lock, many tasks and contexts: where a lease is entered, left, released and named (P1, P7, P12; E6, F8).

Set-up and tear-down may run in different tasks; the lock object may be shared; all that know the identity
may release. The life of coordinators and clients is in test_contexts_life.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, Coordinator, LeaseLost, NotHeld, wait_until
from redis_sync_aio.errors import WrongKeyType
from redis_sync_aio.testing import lose
from redis_sync_aio.types import BaseLease

from ..conftest import MakeClient
from ..support.body import FAST, assert_undisturbed, for_ever, waits
from ..support.exception_races import lose_now
from ..support.factories import Exclusive, Kind, holder
from ..support.primitives import MAKERS, Maker

NAME = "contexts"


@pytest.fixture
def lock(kind: Kind, sync: Coordinator) -> Exclusive:
    """One object, shared by everybody in a test."""
    return kind.make(sync, NAME)


async def in_other_task(run: Callable[[], Awaitable[object]]) -> None:
    """Run it in a task of its own."""

    async def inside() -> None:
        await run()

    await asyncio.create_task(inside())


# -- left in another task than entered ---------------------------------------------------------------------


@pytest.mark.parametrize("way_in", ["lock", "hold"])
async def test_p7_exit_stack_closed_in_another_task(lock: Exclusive, way_in: str) -> None:
    stack = AsyncExitStack()
    lease = await stack.enter_async_context(lock if way_in == "lock" else lock.acquire())
    await in_other_task(stack.aclose)
    assert await holder(lock) is None
    with pytest.raises(NotHeld):
        lease.check()


async def test_p7_exit_stack_entered_in_a_task_that_is_gone(lock: Exclusive) -> None:
    """P7: a loss when the entering task is gone cancels nobody; closing the stack raises LeaseLost."""
    stack = AsyncExitStack()
    lease = await asyncio.create_task(stack.enter_async_context(lock))
    await lose(lease, "expired")
    await assert_undisturbed()
    with pytest.raises(LeaseLost) as caught:
        await stack.aclose()
    assert caught.value.reason == "expired"
    await assert_undisturbed()


async def test_p7_cancelled_where_it_is_left_and_lost(lock: Exclusive) -> None:
    """P7: the loss cancels the task that entered. A cancellation of the task that leaves is another matter."""
    entered: asyncio.Future[BaseLease] = asyncio.get_running_loop().create_future()
    leaving = asyncio.Event()
    stack = AsyncExitStack()

    async def enter() -> None:
        entered.set_result(await stack.enter_async_context(lock.acquire()))
        await for_ever()

    async def leave() -> None:
        async with stack:
            leaving.set()
            await for_ever()

    entering = asyncio.create_task(enter())
    lease = await entered
    left = asyncio.create_task(leave())
    await leaving.wait()
    left.cancel()
    lose_now(lease)
    for task in (left, entering):
        with pytest.raises(asyncio.CancelledError):
            await task


# -- one object, many tasks --------------------------------------------------------------------------------


async def test_p1_one_object_shared_by_many_tasks(lock: Exclusive) -> None:
    """P1: `async with lock` in every task gives each its own lease, one after the other."""
    inside: list[BaseLease] = []
    fences: list[int] = []

    async def work() -> None:
        for _ in range(3):
            async with lock as lease:
                inside.append(lease)
                await asyncio.sleep(0)
                assert inside == [lease]
                inside.clear()
                fences.append(lease.fence)

    await asyncio.gather(*(work() for _ in range(10)))
    assert len(fences) == 30
    assert fences == sorted(set(fences))
    assert await holder(lock) is None


@pytest.mark.parametrize("first_out", ["loser", "holder"])
async def test_p1_the_right_lease_for_the_right_task(kind: Kind, lock: Exclusive, redis: Redis, first_out: str) -> None:
    """P1, P7: a loser that still runs and the next holder, both in `async with` of one object."""
    go = {"loser": asyncio.Event(), "holder": asyncio.Event()}
    leases: dict[str, BaseLease] = {}

    async def work(who: str) -> None:
        async with lock as lease:
            leases[who] = lease
            try:
                await go[who].wait()
            except asyncio.CancelledError:
                await go[who].wait()  # it takes its time
                raise

    tasks: dict[str, asyncio.Task[None]] = {}
    for who in ("loser", "holder"):
        tasks[who] = asyncio.create_task(work(who))
        await wait_until(partial(leases.get, who), FAST, timeout=5)
        if who == "loser":
            await kind.vanish(redis, NAME)
            lose_now(leases[who], "expired")
    order = ["loser", "holder"] if first_out == "loser" else ["holder", "loser"]
    for who in order:
        assert (await holder(lock) is not None) == ("holder" in order[order.index(who) :])
        go[who].set()
        await asyncio.wait([tasks[who]])
    assert isinstance(tasks["loser"].exception(), LeaseLost)
    assert tasks["holder"].exception() is None
    assert await holder(lock) is None


async def test_p1_left_by_a_stranger_nothing_is_ended(kind: Kind, lock: Exclusive, redis: Redis) -> None:
    """P1: both tasks live, and whose body ends is unknown: the lease that is still held must not be given away."""
    stack = AsyncExitStack()
    entered: asyncio.Future[BaseLease] = asyncio.get_running_loop().create_future()

    async def enter_and_stay() -> None:
        entered.set_result(await stack.enter_async_context(lock))
        try:
            await for_ever()
        except asyncio.CancelledError:
            await for_ever()

    staying = asyncio.create_task(enter_and_stay())
    await entered
    await kind.vanish(redis, NAME)
    lose_now(entered.result(), "expired")

    async def hold() -> BaseLease:
        async with lock as lease:
            with pytest.raises(RuntimeError, match=r"enter acquire\(\)"):
                await asyncio.create_task(stack.aclose())
            assert await holder(lock) == lease.token
            return lease

    try:
        await asyncio.create_task(hold())
    finally:
        staying.cancel()
        await asyncio.wait([staying])


async def test_hold_is_used_once(lock: Exclusive) -> None:
    hold = lock.acquire()
    async with hold:
        with pytest.raises(RuntimeError):
            await hold.__aenter__()
    with pytest.raises(RuntimeError):
        async with hold:
            pass
    assert await holder(lock) is None


async def test_e6_a_task_that_acquires_twice_without_a_body_times_out(lock: Exclusive) -> None:
    """E6: not reentrant; a timeout tells. (With a body it is refused: primitives/test_waiting_for_itself.py.)"""
    lease = await lock.acquire()
    with pytest.raises(AcquireTimeout):
        await lock.acquire(timeout=0.03)
    with pytest.raises(AcquireTimeout):
        async with lock.acquire(timeout=0):
            pass
    assert await lock.try_acquire() is None
    lease.check()
    await wait_until(waits(lock, 0), FAST, timeout=5)
    await lease.release()


# -- release() of the lock ---------------------------------------------------------------------------------


async def test_release_of_the_lock(kind: Kind, lock: Exclusive, make_client: MakeClient) -> None:
    """Releases this process's lease; without one NotHeld, also when somebody else holds it."""
    with pytest.raises(NotHeld):
        await lock.release()
    lease = await lock.acquire()
    await lock.release()
    with pytest.raises(NotHeld):
        lease.check()
    with pytest.raises(NotHeld):
        await lock.release()
    await lease.release()
    async with Coordinator(make_client()) as other:
        theirs = await kind.make(other, NAME).acquire()
        with pytest.raises(NotHeld):
            await lock.release()
        assert await holder(lock) == theirs.token
        await theirs.release()


@pytest.mark.asks_on_release
async def test_release_again_after_a_refused_release(kind: Kind, lock: Exclusive, redis: Redis) -> None:
    """House rule 6: a release that failed leaves the lease held; it may be tried again."""
    lease = await lock.acquire()
    await redis.rename(kind.key(NAME), f"{{{NAME}}}away")
    await redis.hset(kind.key(NAME), "a", "hash")
    with pytest.raises(WrongKeyType):
        await lock.release()
    await redis.rename(f"{{{NAME}}}away", kind.key(NAME))
    lease.check()
    await lease.release()
    assert await holder(lock) is None


async def test_identity_is_released_from_anywhere(kind: Kind, lock: Exclusive, make_client: MakeClient) -> None:
    """The next waiter gets it, and the former holder's lease is lost."""
    lease = await lock.acquire(identity="worker-7")
    assert (lease.token, lease.identity) == ("worker-7", "worker-7")
    waiting = asyncio.create_task(lock.acquire())
    await wait_until(waits(lock), FAST, timeout=5)
    async with Coordinator(make_client()) as other:
        await kind.make(other, NAME).release(identity="worker-7")
    successor = await asyncio.wait_for(waiting, 15)
    assert successor.fence > lease.fence
    with pytest.raises(LeaseLost):
        await lease.release()
    successor.check()
    assert await holder(lock) == successor.token
    await successor.release()


@pytest.mark.parametrize("held_by", ["worker-7", None])
async def test_wrong_identity_changes_nothing(
    kind: Kind, lock: Exclusive, redis: Redis, make_client: MakeClient, held_by: str | None
) -> None:
    lease = await lock.acquire(identity=held_by)
    before = await kind.token(redis, NAME), await redis.keys("*")
    async with Coordinator(make_client()) as other:
        for one in (lock, kind.make(other, NAME)):
            with pytest.raises(NotHeld) as caught:
                await one.release(identity="worker-8")
            assert lease.token in str(caught.value)
    assert (await kind.token(redis, NAME), await redis.keys("*")) == before
    lease.check()
    await lease.release()
    with pytest.raises(NotHeld):
        await lock.release(identity="worker-7")


async def test_same_identity_same_lease(kind: Kind, lock: Exclusive, make_client: MakeClient) -> None:
    """The same grant again: same fence, from this process or another, and one release ends it."""
    first = await lock.acquire(identity="worker-7")
    again = await lock.acquire(identity="worker-7", timeout=15)
    async with Coordinator(make_client()) as other:
        theirs = await kind.make(other, NAME).try_acquire(identity="worker-7")
        assert theirs is not None
        assert {first.fence, again.fence, theirs.fence} == {first.fence}
        assert {first.token, again.token, theirs.token} == {"worker-7"}
        await theirs.release()
    assert await holder(lock) is None


# -- an end of a body that did not begin -------------------------------------------------------------------


@pytest.mark.parametrize("make", [MAKERS[label] for label in ("lock", "semaphore", "reentrant lock", "multi-lock")])
async def test_f8_an_exit_without_an_entry(sync: Coordinator, make: Maker) -> None:
    """The error says what to do, and the lease is left alone."""
    lock = make(sync, NAME)
    lease = await lock.acquire()
    with pytest.raises(NotHeld, match=r"'.*contexts.*'.* was not entered.*enter_async_context\(lease\)"):
        async with AsyncExitStack() as stack:
            stack.push_async_exit(lock)
    lease.check()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(lease)
    async with lock:  # is not disturbed by that
        pass


async def test_f8_the_bodys_error_comes_before_that_of_an_exit_without_an_entry(sync: Coordinator) -> None:
    with pytest.raises(NotHeld, match="this acquisition was not entered"):
        async with AsyncExitStack() as stack:
            stack.push_async_exit(sync.lock(NAME).acquire())
    for exits in (sync.lock(NAME), sync.lock(NAME).acquire()):
        with pytest.raises(KeyError) as caught:  # noqa: PT012
            async with AsyncExitStack() as stack:
                stack.push_async_exit(exits)
                raise KeyError
        assert "was not entered" in caught.value.__notes__[0]
