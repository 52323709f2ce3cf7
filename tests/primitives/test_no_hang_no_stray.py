"""What once hung, named the wrong lock, or left something behind: odd numbers, slow answers, small surprises."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncRobustLock,
    AsyncSemaphore,
    Compensation,
    Coordinator,
    Lease,
    LeaseLost,
    SyncError,
    Unreachable,
)
from redis_sync_aio.compat import Lock
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action, FaultProxy, script
from redis_sync_aio.types import UndoSteps

from ..conftest import MakeClient
from ..support.inside import hub_of, load


class Permits(IntEnum):
    """Numbers as configurations have them."""

    ONE = 1
    TWO = 2
    THREE = 3


# -- numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"push": "never"}], ids=["link", "polling"])
@pytest.mark.parametrize("engine", ["lua", "watch"])
async def test_e2_an_int_of_another_type_is_that_number(
    redis: Redis, make_client: MakeClient, options: Any, engine: Any
) -> None:
    """As a limit, a weight and a new limit; on a connection that is not there yet, too."""
    client = make_client()
    async with Coordinator(client, **options) as sync, asyncio.timeout(5):
        gpus = AsyncSemaphore(sync, "gpus", limit=Permits.THREE, engine=engine)
        async with gpus.acquire(weight=Permits.TWO) as lease:
            assert lease.weight == 2
            await gpus.resize(Permits.TWO)
        assert await gpus.try_acquire(weight=Permits.ONE) is not None
        assert await gpus.get_limit() == 2
    await client.aclose()


# -- answers that are slower than a lease lasts --------------------------------------------------------------


Asks: dict[str, Callable[[Coordinator], Awaitable[object]]] = {
    "lock": lambda sync: AsyncLock(sync, "slow", ttl=0.05).try_acquire(),
    "lock, timeout=0": lambda sync: AsyncLock(sync, "slow", ttl=0.05).acquire(timeout=0),
    "lock, forever": lambda sync: AsyncLock(sync, "slow", ttl=0.05).acquire(),
    "semaphore": lambda sync: AsyncSemaphore(sync, "slow", limit=1, ttl=0.05).try_acquire(),
    "reader": lambda sync: AsyncReadWriteLock(sync, "slow", ttl=0.05).read().try_acquire(),
    "several": lambda sync: AsyncMultiLock(sync, ["{slow}:a", "{slow}:b"], ttl=0.05).try_acquire(),
}


@pytest.mark.parametrize("ask", Asks.values(), ids=Asks)
async def test_p6_a_lease_that_is_over_before_it_is_heard_of(
    server: EmbeddedServer, redis: Redis, ask: Callable[[Coordinator], Awaitable[object]]
) -> None:
    """P6: it is none. Who does not wait is told after a second one, and one that waits after `retry_for`."""
    async with (
        FaultProxy(server) as proxy,
        proxy.client() as client,
        Coordinator(client, retry_for=0.5) as sync,
    ):
        await AsyncLock(sync, "warm").locked()
        proxy.latency = 0.04
        async with asyncio.timeout(5):
            with pytest.raises(Unreachable, match="a longer ttl"):
                await ask(sync)
        proxy.latency = 0
        assert not hub_of(sync).acquisitions
    async with Coordinator(redis) as near:
        assert await asyncio.wait_for(ask(near), 5) is not None


# -- records -------------------------------------------------------------------------------------------------


async def test_a_record_that_was_refused_is_not_believed(server: EmbeddedServer) -> None:
    """The progress is that on the server, and no undo step is forgotten by the next thing that is recorded."""
    steps = UndoSteps()
    refunded: list[int] = []

    @steps.step("refund")
    async def refund(*, order: int) -> None:
        refunded.append(order)

    async with (
        FaultProxy(server) as proxy,
        proxy.client() as client,
        Coordinator(client) as sync,
    ):
        recording, no = script(load("robust/record").sha), Action.answer_error("ERR no")
        lock = AsyncRobustLock(sync, "job", ttl=5)
        lease = await lock.acquire()
        await lease.record({"line": 1})
        changes: list[Callable[[], Awaitable[None]]] = [lambda: lease.record({"line": 2}), lease.clear_record]
        for change in changes:
            proxy.on(recording, no, times=1)
            with pytest.raises(SyncError, match="nothing was changed"):
                await change()
            assert lease.progress == {"line": 1}
        proxy.on(recording, no, times=2)
        both = await asyncio.gather(lease.record({"line": 2}), lease.record({"line": 3}), return_exceptions=True)
        assert all(isinstance(error, SyncError) for error in both)
        assert lease.progress == {"line": 1}
        with pytest.raises(SyncError, match="nothing was changed"):  # noqa: PT012
            async with Compensation(lease, steps) as undo:
                await undo.push("refund", order=7)
                proxy.on(recording, no, times=1)
        await lease.record({"line": 3})
        await lease.release()
        after = await lock.acquire()
        assert after.abandoned is not None
        assert after.abandoned.steps == ("refund",)
        await after.compensate(steps)
        assert refunded == [7]
        await after.release()


# -- P7 ------------------------------------------------------------------------------------------------------


async def test_p7_the_drop_in_lets_the_bodys_error_out_when_it_is_cancelled_behind_it(server: EmbeddedServer) -> None:
    """The release goes on, and the cancellation is delivered at the next await."""
    async with FaultProxy(server) as proxy, proxy.client() as client:
        slow = proxy.on(script(load("lock/release").sha), Action.delay_reply(0.3))
        steps: list[str] = []

        async def work() -> None:
            try:
                async with client.lock("drop-in", timeout=10, lock_class=Lock):
                    raise KeyError
            except KeyError:
                steps.append("error")
            await asyncio.sleep(5)

        task = asyncio.create_task(work())
        await asyncio.wait_for(slow.fired.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert steps == ["error"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="there are no eager tasks")
async def test_p7_a_loss_that_an_eager_task_finds_leaves_no_cancellation_behind(sync: Coordinator) -> None:
    """The body has no await any more: LeaseLost leaves, and nothing else comes after it."""
    loop = asyncio.get_running_loop()
    eager_loop: Any = loop
    eager: Any = asyncio
    loop.set_task_factory(eager.eager_task_factory)
    found: list[str] = []
    tasks: list[asyncio.Task[None]] = []

    async def release(lease: Lease) -> None:
        try:
            await lease.release()
        except LeaseLost as error:
            found.append(error.reason)

    try:
        with pytest.raises(LeaseLost):  # noqa: PT012
            async with AsyncLock(sync, "eager", ttl=3) as lease:
                eager_loop.pass_time(4)  # the loop is blocked
                tasks.append(asyncio.create_task(release(lease)))
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert found
    finally:
        loop.set_task_factory(None)
