"""One lock, many tasks and contexts: where a lease is entered, left, released and named (P1, P7, P12; E6, F8).

Set-up and tear-down may run in different tasks; the lock object may be shared; all that know the identity
may release. The life of coordinators and clients is in test_contexts_life.py.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial

import pytest
from redis.asyncio import Redis

from redis_sync_aio import Coordinator, LeaseLost, NotHeld, wait_until
from redis_sync_aio.errors import WrongKeyType
from redis_sync_aio.testing import lose
from redis_sync_aio.types import BaseLease

from ..conftest import MakeClient
from ..support.body import FAST, assert_undisturbed, for_ever
from ..support.primitives import Exclusive, Primitive, holder
from .exception_races import lose_now

NAME = "contexts"


@pytest.fixture
def lock(kind: Primitive, sync: Coordinator) -> Exclusive:
    """One object, shared by everybody in a test."""
    made: Exclusive = kind.make(sync, NAME)
    return made


# -- left in another task than entered ---------------------------------------------------------------------


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


@pytest.mark.parametrize("first_out", ["loser", "holder"])
async def test_p1_the_right_lease_for_the_right_task(
    kind: Primitive, lock: Exclusive, redis: Redis, first_out: str
) -> None:
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


# -- release() of the lock ---------------------------------------------------------------------------------


async def test_release_of_the_lock(kind: Primitive, lock: Exclusive, make_client: MakeClient) -> None:
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
async def test_release_again_after_a_refused_release(kind: Primitive, lock: Exclusive, redis: Redis) -> None:
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


@pytest.mark.parametrize("held_by", ["worker-7", None])
async def test_wrong_identity_changes_nothing(
    kind: Primitive, lock: Exclusive, redis: Redis, make_client: MakeClient, held_by: str | None
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


# -- an end of a body that did not begin -------------------------------------------------------------------


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
