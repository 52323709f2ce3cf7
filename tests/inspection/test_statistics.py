"""One view of a name: `statistics` of a primitive, and of this process alone; the same type as that of `inspect`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncReentrantLock,
    AsyncRobustLock,
    Coordinator,
    wait_until,
)
from redis_sync_aio.errors import PermissionDenied, WrongContext
from redis_sync_aio.inspection import HolderView, NameView, WaiterView, inspect
from redis_sync_aio.types import Push

from ..conftest import MakeClient
from ..support.body import FAST
from ..support.inside import permit_keys


def holders(sync: Coordinator) -> dict[str, HolderView]:
    """Return the only holder of each name that this process holds."""
    return {view.name: holder for view in sync.statistics() for holder in view.holders}


def waiters(sync: Coordinator) -> list[WaiterView]:
    return [waiter for view in sync.statistics() for waiter in view.waiters]


async def test_leases_and_waiting_tasks_are_told_with_their_tasks(sync: Coordinator, other: Coordinator) -> None:
    """Of this process: kinds, tokens, fences, times and the names of tasks; nothing is left when all has ended."""
    assert sync.statistics() == ()
    lease = await sync.lock("lock").acquire()
    permits = await sync.semaphore("slots", limit=3).acquire(weight=2, identity="me")
    endless = await sync.lock("endless", ttl=None).acquire()
    both = AsyncReadWriteLock(sync, "both")
    async with AsyncRobustLock(sync, "robust"), both.read():
        waiting = asyncio.create_task(both.write().acquire(), name="the writer")
        await wait_until(lambda: waiters(sync), FAST, timeout=20)
        task = asyncio.current_task()
        assert task is not None
        assert [(view.name, view.kind, view.held, view.waiting) for view in sync.statistics()] == [
            ("both", "read_write", 1, 1),
            ("endless", "lock", 1, 0),
            ("lock", "lock", 1, 0),
            ("robust", "robust", 1, 0),
            ("slots", "semaphore", 2, 0),
        ]
        found = holders(sync)
        assert {it.task for it in found.values()} == {task.get_name()}
        it = found["lock"]
        assert (it.token, it.fence, it.identity, it.weight) == (lease.token, lease.fence, None, 1)
        assert it.remaining is not None
        assert 0 < it.remaining <= 30.1
        assert it.held_for is not None
        assert it.held_for >= 0
        assert (found["slots"].identity, found["slots"].weight, found["both"].access) == ("me", 2, "read")
        assert found["endless"].remaining is None
        (waiter,) = waiters(sync)
        assert (waiter.task, waiter.access, waiter.pid) == ("the writer", "write", it.pid)
        assert waiter.waited is not None
        assert waiter.waited >= 0
        assert other.statistics() == ()
    await (await waiting).release()
    for one in (lease, permits, endless):
        await one.release()
    assert sync.statistics() == other.statistics() == ()


async def test_tasks_that_share_and_locks_made_of_locks(sync: Coordinator) -> None:
    """A shared lease belongs to the task that has it now; the others wait for it. Groups show their locks."""
    lock = AsyncLock(sync, "shared", share=True)
    lease = await lock.acquire()
    waiting = asyncio.create_task(lock.acquire(), name="next")
    await wait_until(lambda: waiters(sync), FAST, timeout=20)
    (view,) = sync.statistics()
    assert (view.name, view.kind, view.fence, view.holders[0].fence) == ("shared", "lock", lease.fence, lease.fence)
    assert [(it.task, it.token) for it in view.waiters] == [("next", "")]
    assert [it.waited is not None and 0 <= it.waited < 20 for it in view.waiters] == [True]
    await lease.release()
    await (await waiting).release()
    async with AsyncMultiLock(sync, ["a", "b"]), AsyncReentrantLock(sync, "c"):
        assert [it.name for it in sync.statistics() if it.name in "abc"] == ["a", "b", "c"]


async def test_it_belongs_to_its_event_loop(sync: Coordinator) -> None:
    """Another loop gets an error; a closed coordinator has nothing."""
    async with sync.lock("x"):

        async def elsewhere() -> None:
            sync.statistics()

        with pytest.raises(WrongContext):
            await asyncio.to_thread(asyncio.run, elsewhere())
    await sync.aclose()
    assert sync.statistics() == ()


def timeless(view: NameView) -> NameView:
    """Return a view without what differs from one reading to the next."""
    holders = tuple(replace(it, held_for=None, remaining=None) for it in view.holders)
    return replace(view, holders=holders, waiters=tuple(replace(it, waited=None) for it in view.waiters), server="")


MAKE: dict[str, Callable[[Coordinator], Any]] = {
    "lock": lambda sync: sync.lock("lock"),
    "endless": lambda sync: sync.lock("endless", ttl=None),
    "watched": lambda sync: sync.lock("watched", engine="watch"),
    "slots": lambda sync: sync.semaphore("slots", 3),
    "both": lambda sync: sync.read_write_lock("both"),
    "robust": lambda sync: sync.robust_lock("robust"),
    "again": lambda sync: sync.reentrant_lock("again"),
    "leader": lambda sync: sync.election("leader"),
    "event": lambda sync: sync.event("event"),
    "latch": lambda sync: sync.latch("latch", 2),
    "barrier": lambda sync: sync.barrier("barrier", 2),
}


def ways_in(primitive: Any) -> list[Callable[[], Any]]:
    """Return how a primitive is held and waited for."""
    if hasattr(primitive, "wait"):
        return [primitive.wait]
    if hasattr(primitive, "lead"):
        return [primitive.lead, primitive.lead]
    if hasattr(primitive, "read"):
        return [primitive.read().acquire, primitive.read().acquire, primitive.write().acquire]
    if primitive.name == "slots":
        return [lambda: primitive.acquire(weight=2, identity="me"), lambda: primitive.acquire(weight=3)]
    return [primitive.acquire, primitive.acquire]


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("push", ["auto", "never"])
async def test_each_primitive_has_the_view_that_inspect_has(redis: Redis, name: str, push: Push) -> None:
    """Of all kinds, free, held and waited for, whichever way the coordinator takes."""
    async with Coordinator(redis, push=push) as sync, Coordinator(redis) as other:
        primitive = MAKE[name](sync)
        free = await primitive.statistics()
        assert (free.holders, free.waiters, free.held, free.waiting, free.problems) == ((), (), 0, 0, ())
        ways, tasks = ways_in(MAKE[name](other)), []
        for way in ways:

            async def enter(way: Callable[[], Any] = way) -> None:
                found = way()
                if hasattr(found, "__aenter__"):
                    async with found:
                        await asyncio.Event().wait()
                else:
                    await found

            tasks.append(asyncio.create_task(enter()))

            async def there() -> bool:
                view = await primitive.statistics()
                return bool(len(view.holders) + view.waiting == len(tasks))

            await wait_until(there, FAST, timeout=20)
        found = await primitive.statistics()
        (seen,) = await inspect(redis, name)
        assert timeless(found) == timeless(seen)
        assert found.kind == seen.kind == primitive_kind(name)
        assert found.waiting == 1
        assert found.server in (seen.server, f"{seen.server}, db {redis.connection_pool.connection_kwargs.get('db')}")
        assert all(it.connected for it in found.holders if it.identity is None)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def primitive_kind(name: str) -> str:
    kinds = {"slots": "semaphore", "both": "read_write"}
    return kinds.get(name, name if name in ("robust", "event", "latch", "barrier") else "lock")


async def test_groups_have_a_view_of_each_name(sync: Coordinator) -> None:
    """Of a multi-lock in the order of its names; both sides of a read/write lock have the whole of it."""
    multi, both = sync.multi_lock(["b", "a"]), sync.read_write_lock("both")
    async with multi as lease, both.read() as reading:
        found = await multi.statistics()
        assert [(it.name, it.holders[0].fence) for it in found] == [*lease.fences.items()]
        views = [await it.statistics() for it in (both, both.read(), both.write())]
        assert [[(one.token, one.access) for one in view.holders] for view in views] == [[(reading.token, "read")]] * 3


async def test_what_is_undone_hides_no_holder(sync: Coordinator, redis: Redis) -> None:
    """More undone requests than are read at first: all holders are shown, and counted exactly."""
    sem = sync.semaphore("slots", 5)
    key, fence = permit_keys(b"slots", "sem").all[0], 0
    async with sem.acquire(ttl=300) as lease, sem.acquire(weight=2, ttl=300) as other:
        soon = (await redis.time())[0] * 1_000_000 + 30_000_000
        await redis.zadd(key, {f"undone:{number}": soon + number + 0.5 for number in range(500)})
        await redis.zadd(key, {f"over:{number}": 1_000_000 + number for number in range(500)})
        found = await sem.statistics()
        fence = other.fence
        assert {(it.token, it.weight) for it in found.holders} == {(lease.token, 1), (other.token, 2)}
        assert (found.held, found.available, found.fence, found.problems) == (3, 2, fence, ())
        assert not await sem.locked()


async def test_what_is_released_meanwhile_is_read_again(sync: Coordinator, redis: Redis) -> None:
    """A permit that goes between the two round trips is in no view: neither as a holder, nor in what is held."""
    sem = sync.semaphore("slots", 2)
    kept, gone = await sem.acquire(), await sem.acquire()
    looking = asyncio.create_task(sem.statistics())
    await asyncio.sleep(0)  # its first command is sent, its second one comes behind the release
    await gone.release()
    found = await looking
    assert [it.token for it in found.holders] in ([kept.token], [kept.token, gone.token], [gone.token, kept.token])
    assert found.held == len(found.holders) == 2 - (found.available or 0)
    await kept.release()


async def test_a_view_is_behind_what_was_sent_before(sync: Coordinator) -> None:
    """It shows a release that nobody has waited for yet, and a request that was just sent."""
    lock = sync.lock("lock")
    lease = await lock.acquire()
    releasing = asyncio.create_task(lease.release())
    await asyncio.sleep(0)
    assert (await lock.statistics()).held == 0
    await releasing
    lease = await lock.acquire()
    waiting = asyncio.create_task(lock.acquire())
    await asyncio.sleep(0)
    assert (await lock.statistics()).waiting == 1
    await lease.release()
    await (await waiting).release()


async def test_what_the_user_may_not_read_is_an_error(redis: Redis, sync: Coordinator, make_client: MakeClient) -> None:
    """Nothing is concluded from what is not readable; optional rights are not needed."""
    rights = "+@all -@pubsub -getrange -hget -info"
    await redis.acl_setuser("seer", enabled=True, nopass=True, keys=["*"], commands=rights.split())
    await redis.acl_setuser("blind", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-zrange"])
    async with (
        sync.robust_lock("robust"),
        Coordinator(make_client(username="seer", password="any"), push="never") as seer,
        Coordinator(make_client(username="blind", password="any"), push="never") as blind,
    ):
        found = await seer.lock("robust").statistics()
        assert (found.kind, found.held, found.holders[0].connected) == ("lock", 1, None)
        for look in (blind.lock("robust").statistics, blind.lock("robust").locked):
            with pytest.raises(PermissionDenied, match="zrange"):
                await look()
    await redis.acl_deluser("seer", "blind")
