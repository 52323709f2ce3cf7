"""`lose`, `steal`, `freeze_renewals`, `assert_idle`: through the public API, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, cast, get_args

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncRedlock, AsyncRobustLock, Coordinator, LeaseLost, NotHeld, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import LossReason
from redis_sync_aio.testing import assert_idle, freeze_renewals, lose, steal
from redis_sync_aio.testing.servers import IndependentServers
from redis_sync_aio.types import BaseLease

from ..support.body import FAST, waits
from ..support.views import holder_of

REASONS = cast("tuple[LossReason, ...]", get_args(LossReason))
KINDS = ("lock", "endless", "shared", "semaphore", "reader", "writer", "multi", "reentrant", "robust")


def hold(sync: Coordinator, kind: str) -> AbstractAsyncContextManager[BaseLease]:
    options: dict[str, Callable[[], Any]] = {
        "lock": lambda: sync.lock("x").acquire(),
        "endless": lambda: sync.lock("x", ttl=None).acquire(),
        "shared": lambda: sync.lock("x", share=True).acquire(),
        "semaphore": lambda: sync.semaphore("x", limit=2).acquire(),
        "reader": lambda: sync.read_write_lock("x").read().acquire(),
        "writer": lambda: sync.read_write_lock("x").write().acquire(),
        "multi": lambda: sync.multi_lock(["x", "y"]).acquire(),
        "reentrant": lambda: sync.reentrant_lock("x").acquire(),
        "robust": lambda: AsyncRobustLock(sync, "x").acquire(),
    }
    return cast("AbstractAsyncContextManager[BaseLease]", options[kind]())


@pytest.mark.real
@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("kind", KINDS)
async def test_each_kind_of_lease_can_be_lost_for_each_reason(
    sync: Coordinator, other: Coordinator, kind: str, reason: LossReason
) -> None:
    """The body is cancelled and LeaseLost says the reason; nothing of the holder is left on the server."""
    held: asyncio.Future[BaseLease] = asyncio.get_running_loop().create_future()

    async def body() -> None:
        async with hold(sync, kind) as lease:
            held.set_result(lease)
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    either: list[asyncio.Future[Any]] = [task, held]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    lease = held.result()
    if reason == "taken" and kind in ("semaphore", "reader", "writer"):
        with pytest.raises(ValueError, match="never 'taken'"):
            await lose(lease, reason)
        reason = "expired"
    await lose(lease, reason)
    async with asyncio.timeout(60):
        with pytest.raises(LeaseLost) as caught:
            await task
    assert caught.value.reason == reason
    if kind != "endless":  # that has no time
        assert caught.value.time_is_up == (reason in ("unreachable", "late")), "its time has passed, by the clock"
        assert caught.value.stalled > 0 or reason != "late", "the event loop stood still"
    if reason != "taken":
        await assert_idle(other, within=60)


@pytest.mark.real
async def test_what_is_lost_goes_to_the_next_waiter(sync: Coordinator, other: Coordinator) -> None:
    for reason in ("expired", "unreachable", "late", "closed"):
        lease = await sync.lock("x").acquire()
        waiting = asyncio.create_task(other.lock("x").acquire())
        await wait_until(waits(sync.lock("x")), FAST, timeout=60)
        await lose(lease, reason)
        async with asyncio.timeout(60):
            granted = await waiting
        assert granted.fence > lease.fence
        await granted.release()


@pytest.mark.real
@pytest.mark.parametrize("reason", ["expired", "unreachable", "late", "closed"])
@pytest.mark.parametrize("push", ["always", "never"])
async def test_several_leases_are_lost_together_and_the_others_go_on(
    redis: Redis, other: Coordinator, push: Literal["always", "never"], reason: LossReason
) -> None:
    """What makes a lease be lost is about this lease only: neither others of its name, nor of its coordinator."""
    async with Coordinator(redis, push=push) as sync:
        semaphore = sync.semaphore("x", limit=3)
        first, second, stays = [await semaphore.acquire() for _ in range(3)]
        lock = await sync.lock("x").acquire()
        await asyncio.gather(*(lose(lease, reason) for lease in (first, second)))
        for lost in (first, second):
            with pytest.raises(LeaseLost) as caught:
                lost.check()
            assert caught.value.reason == reason
        for held in (stays, lock):
            await held.extend(60)
            await held.release()
        await (await semaphore.acquire()).release()
    await assert_idle(other, within=60)


@pytest.mark.real
async def test_a_lease_that_is_not_renewed_is_declared_late(sync: Coordinator, other: Coordinator) -> None:
    lease = await sync.lock("x", auto_renew=False).acquire()
    await lose(lease, "late")
    with pytest.raises(LeaseLost) as caught:
        lease.check()
    assert (caught.value.reason, caught.value.time_is_up) == ("late", False)
    await assert_idle(other, within=60)


@pytest.mark.real
async def test_a_lease_that_is_gone_already_is_lost_for_that_reason(redis: Redis, sync: Coordinator) -> None:
    lease = await sync.lock("x").acquire()
    await redis.delete("x")
    with pytest.raises(LeaseLost, match="it is gone from the server"):
        await lose(lease, "unreachable")
    assert lease.lost


@pytest.mark.real
async def test_a_lease_may_be_lost_by_two_tasks_together(sync: Coordinator, other: Coordinator) -> None:
    lease = await sync.lock("x").acquire()
    await asyncio.gather(lose(lease, "unreachable"), lose(lease, "unreachable"))
    with pytest.raises(LeaseLost, match="Redis could not be reached"):
        lease.check()
    async with sync.lock("x"):  # nothing is held back any more
        pass
    await assert_idle(other, within=60)


@pytest.mark.real
@pytest.mark.parametrize("reason", ["expired", "unreachable", "late"])
async def test_a_redlock_is_lost_with_its_majority(reason: LossReason) -> None:
    async with IndependentServers(3) as group:
        clients = group.clients()
        lease = await AsyncRedlock(clients, "x").acquire()
        await lose(lease, reason)
        assert lease.lost
        with pytest.raises(LeaseLost) as caught:
            lease.check()
        assert caught.value.reason == reason
        for client in clients:
            await client.aclose()


async def test_what_cannot_be_lost_is_refused(sync: Coordinator) -> None:
    lease = await sync.lock("x").acquire()
    with pytest.raises(ValueError, match="reason is one of"):
        await lose(lease, "bad luck")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="running body"):
        await lose(lease, "released")
    await lease.release()
    with pytest.raises(NotHeld):
        await lose(lease, "taken")


async def test_a_stolen_lock_is_lost_and_can_be_given_to_the_next_waiter(sync: Coordinator, other: Coordinator) -> None:
    lock = sync.lock("x")
    lease = await lock.acquire()
    token = await steal(other, "x")
    assert lease.lost
    with pytest.raises(LeaseLost, match="another token"):
        lease.check()
    waiting = asyncio.create_task(lock.acquire())
    await wait_until(waits(lock), FAST, timeout=60)
    assert holder_of(await lock.statistics()) == token
    await other.lock("x").release(identity=token)
    async with asyncio.timeout(60):
        await (await waiting).release()


async def test_frozen_renewals_let_leases_end_with_their_ttl(sync: Coordinator) -> None:
    longer = await sync.lock("longer", ttl=60).acquire()
    with freeze_renewals(sync):
        lease = await sync.lock("x", ttl=6).acquire()
        with pytest.raises(RuntimeError, match="frozen already"), freeze_renewals(sync):
            pass
        async with asyncio.timeout(60):
            await lease.wait_lost()
        with pytest.raises(LeaseLost) as caught:
            lease.check()
        assert caught.value.reason == "expired"
        await asyncio.sleep(20)  # the other one is due
        assert longer.remaining() < 40
    await asyncio.sleep(0.1)
    assert longer.remaining() > 59, "it is renewed at the end of the block"
    await longer.release()


async def test_a_client_is_idle_when_nothing_is_left(redis: Redis, sync: Coordinator, other: Coordinator) -> None:
    """The error lists leases, waiting tasks, coordinators and connections, and what others hold on the server.

    It looks once in any case, also within no time.
    """
    await assert_idle(sync, within=0)
    lease = await sync.lock("mine").acquire()
    waiting = asyncio.create_task(AsyncLock(redis, "mine").acquire(), name="a waiter")
    await wait_until(waits(sync.lock("mine")), FAST, timeout=60)
    theirs = await other.semaphore("theirs", limit=2).acquire()
    subscription = redis.pubsub()
    await subscription.subscribe("channel")
    with pytest.raises(AssertionError) as caught:
        await assert_idle(redis, within=0)
    said = str(caught.value)
    for words in (
        "lock 'mine' is held by task",
        "lock 'mine' is waited for by task 'a waiter'",
        "was not closed",
        "1 connections of the client's pool",
        "at the server: lock 'mine', held by",
        "at the server: semaphore 'theirs', held by",
    ):
        assert words in said, said
    await subscription.aclose()  # type: ignore[no-untyped-call]
    await theirs.release()
    await lease.release()
    await (await waiting).release()
    await assert_idle(sync, within=60)
    await sync.aclose()
    await assert_idle(redis, within=60)


async def test_a_client_of_a_single_connection_can_be_idle(server: EmbeddedServer, redis: Redis) -> None:
    """It keeps its connection, which is no leak; another one that is not given back is."""
    async with server.client(single_connection_client=True) as client:
        await client.ping()
        await assert_idle(client, within=0)
        subscription = client.pubsub()
        await subscription.subscribe("channel")
        with pytest.raises(AssertionError, match="1 connections of the client's pool"):
            await assert_idle(client, within=0)
        await subscription.aclose()  # type: ignore[no-untyped-call]
        async with AsyncLock(client, "mine"):
            pass
        await assert_idle(client, within=60)
