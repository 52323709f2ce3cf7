"""The end of a body, a lease or a coordinator takes the time that it is given, whatever Redis does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncSemaphore, Coordinator, LeaseLost, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed
from redis_sync_aio.testing.faults import FaultProxy

from ..conftest import MakeClient
from ..support.body import FAST, for_ever, waits
from ..support.inside import now
from .conftest import PRIMITIVES, Make, Primitive

everything = pytest.mark.parametrize("primitive", PRIMITIVES, ids=str)


# -- a body that fails while Redis is away -----------------------------------------------------------------


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("how", ["error", "cancelled"])
async def test_an_error_leaves_a_body_in_time_while_redis_is_away(
    server: EmbeddedServer, how: str, share: bool
) -> None:
    """F7: its release goes on in the background, and frees the lock when the server is back."""
    async with FaultProxy(server) as proxy, proxy.client() as client:
        sync = Coordinator(client, response_timeout=30, exit_timeout=0.2)
        entered = asyncio.Event()

        async def body() -> None:
            async with AsyncLock(sync, "it", share=share):
                proxy.black_hole = True
                entered.set()
                if how == "error":
                    raise KeyError("of the body")
                await for_ever()

        task = asyncio.create_task(body())
        try:
            await entered.wait()
            began = now()
            if how == "cancelled":
                task.cancel()
            await asyncio.wait([task], timeout=20)
            assert task.done()
            assert now() - began < 10, "far less than the answer may take"
        finally:
            proxy.black_hole = False
        error = asyncio.CancelledError if how == "cancelled" else KeyError
        with pytest.raises(error) as raised:
            await task
        assert "has no answer yet and goes on" in raised.value.__notes__[0]
        async with asyncio.timeout(20), AsyncLock(sync, "it"):
            pass
        await sync.aclose()


# -- what watches a lease ----------------------------------------------------------------------------------


@everything
async def test_what_watches_a_lease_ends_with_its_release(primitive: Primitive, make: Make) -> None:
    """A task group with a watcher in it is left when the lease was released, and is told that it was not lost."""
    lease = await make().acquire()
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        watching = group.create_task(lease.wait_lost())
        await asyncio.sleep(0)
        assert not watching.done()
        await lease.release()
    assert watching.result() is False
    assert lease.lost is False
    assert await lease.wait_lost() is False  # it has ended already


async def test_an_error_that_passes_task_groups_waits_once(server: EmbeddedServer) -> None:
    """F7: for all that it ends on its way: bodies around a group, and those of the tasks that the group cancels."""
    options: dict[str, Any] = {"response_timeout": 600, "retry_for": 600, "exit_timeout": 3}
    async with FaultProxy(server) as proxy, proxy.client() as client, Coordinator(client, **options) as sync:
        entered = [asyncio.Event() for _ in range(3)]

        async def sibling(number: int) -> None:
            async with sync.lock(f"sibling {number}"):
                entered[number].set()
                await for_ever()

        async def level(number: int) -> None:
            async with sync.lock(f"around {number}"), asyncio.TaskGroup() as group:
                group.create_task(sibling(number))
                await entered[number].wait()
                if number < 2:
                    group.create_task(level(number + 1))
                else:
                    proxy.black_hole = True
                    raise KeyError("of the innermost body")

        task = asyncio.create_task(level(0))
        try:
            await entered[2].wait()
            began = now()
            await asyncio.wait([task], timeout=60)
            assert task.done()
            assert 3 <= now() - began < 9, "it would be 18 if each of six bodies waited"
        finally:
            proxy.black_hole = False
        with pytest.raises(ExceptionGroup) as raised:
            await task
        assert raised.group_contains(KeyError)
        names = [f"{place} {number}" for place in ("sibling", "around") for number in range(3)]

        async def free() -> bool:
            return not await client.exists(*names)

        await wait_until(free, FAST, timeout=30)  # the releases go on


# -- draining ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [False, True])
async def test_draining_lets_bodies_end_and_grants_nothing(sync: Coordinator, share: bool) -> None:
    """They are renewed meanwhile, and may release by name; the coordinator closes as soon as nothing is held."""
    sem = AsyncSemaphore(sync, "it", limit=1, ttl=0.6, share=share)
    leave = asyncio.Event()

    async def body() -> str:
        async with sem as lease:
            await leave.wait()
            lease.check()
            await sem.release()
        return "ended"

    running = asyncio.create_task(body())
    await wait_until(sem.locked, FAST, timeout=5)
    waiting = asyncio.create_task(sem.acquire())
    await wait_until(waits(sem), FAST, timeout=5)
    closing = asyncio.create_task(sync.aclose(drain=30))
    async with asyncio.timeout(10):
        with pytest.raises(CoordinatorClosed):
            await waiting
        for refused in (sem, sync.lock("another"), AsyncLock(sync, "a third", share=True)):
            with pytest.raises(CoordinatorClosed, match="is being closed"):
                await refused.acquire()
        await asyncio.sleep(1.0)  # longer than the ttl
        assert not closing.done()
        leave.set()
        assert await running == "ended"
        await closing
    assert sync.why_closed is not None


@pytest.mark.parametrize("second", [60, 0.2, 0], ids=["as long", "shorter", "not"])
async def test_two_that_drain_it_end_together(sync: Coordinator, second: float) -> None:
    """When nothing is held, or when the shorter time has passed: what is held then is closed."""
    leave = asyncio.Event()

    async def body() -> None:
        async with sync.lock("it"):
            await leave.wait()

    running = asyncio.create_task(body())
    await wait_until(sync.lock("it").locked, FAST, timeout=5)
    both = [asyncio.create_task(sync.aclose(drain=drain)) for drain in (60, second)]
    await asyncio.sleep(0)
    if second == 60:
        leave.set()
    done, _ = await asyncio.wait(both, timeout=30)
    assert done == set(both)
    if second == 60:
        await running
    else:
        with pytest.raises(LeaseLost):
            await running


@pytest.mark.parametrize("share", [False, True])
async def test_draining_an_idle_one_takes_no_time(sync: Coordinator, redis: Redis, share: bool) -> None:
    """A lease that only rests here for the next task is given back, and not waited for."""
    async with sync.lock("it", share=share, linger=3000 if share else 0):
        pass
    async with asyncio.timeout(30):
        await sync.aclose(drain=3000)
    assert not await redis.exists("it")


async def test_draining_ends_after_its_time(sync: Coordinator) -> None:
    """What is still held then is closed as without draining."""

    async def body() -> None:
        async with sync.lock("it"):
            entered.set()
            await for_ever()

    entered = asyncio.Event()
    running = asyncio.create_task(body())
    await entered.wait()
    await sync.aclose(drain=0.2)
    with pytest.raises(LeaseLost) as lost:
        await running
    assert lost.value.reason == "closed"


async def test_a_cancelled_draining_closes(make_client: MakeClient) -> None:
    sync = Coordinator(make_client())
    lease = await sync.lock("it").acquire()
    closing = asyncio.create_task(sync.aclose(drain=60))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert lease.lost
    assert sync.why_closed is not None


@pytest.mark.parametrize("drain", [-1, float("nan"), "5"])
async def test_a_bad_time_closes_nothing(sync: Coordinator, drain: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="drain"):
        await sync.aclose(drain=drain)
    async with sync.lock("it"):
        pass
