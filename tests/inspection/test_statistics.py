"""`Coordinator.statistics` tells what this process holds and waits for, without asking the server."""

from __future__ import annotations

import asyncio

import pytest

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncReentrantLock,
    AsyncRobustLock,
    Coordinator,
    wait_until,
)
from redis_sync_aio.errors import WrongContext
from tests.support.body import FAST


async def test_leases_and_waiting_tasks_are_told_with_their_tasks(sync: Coordinator, other: Coordinator) -> None:
    """Kinds, tokens, fences, times and the names of tasks; nothing is left when all has ended."""
    assert sync.statistics().held == ()
    assert sync.statistics().waiting == ()
    lease = await sync.lock("lock").acquire()
    permits = await sync.semaphore("slots", limit=3).acquire(weight=2, identity="me")
    endless = await sync.lock("endless", ttl=None).acquire()
    both = AsyncReadWriteLock(sync, "both")
    async with AsyncRobustLock(sync, "robust"), both.read():
        waiting = asyncio.create_task(both.write().acquire(), name="the writer")
        await wait_until(lambda: sync.statistics().waiting, FAST, timeout=20)
        task = asyncio.current_task()
        assert task is not None
        found = {it.name: it for it in sync.statistics().held}
        assert {name: it.kind for name, it in found.items()} == {
            "both": "read", "endless": "lock", "lock": "lock", "robust": "robust", "slots": "semaphore",
        }  # fmt: skip
        assert {it.task for it in found.values()} == {task.get_name()}
        it = found["lock"]
        assert (it.token, it.fence, it.identity, it.weight) == (lease.token, lease.fence, None, 1)
        assert it.remaining is not None
        assert 0 < it.remaining <= 30
        assert it.held_for >= 0
        assert (found["slots"].identity, found["slots"].weight) == ("me", 2)
        assert found["endless"].remaining is None
        (waiter,) = sync.statistics().waiting
        assert (waiter.name, waiter.kind, waiter.task) == ("both", "write", "the writer")
        assert waiter.waited is not None
        assert waiter.waited >= 0
        assert other.statistics().held == ()
    await (await waiting).release()
    for one in (lease, permits, endless):
        await one.release()
    assert sync.statistics() == other.statistics()


async def test_tasks_that_share_and_locks_made_of_locks(sync: Coordinator) -> None:
    """A shared lease belongs to the task that has it now; the others wait for it. Groups show their locks."""
    lock = AsyncLock(sync, "shared", share=True)
    lease = await lock.acquire()
    waiting = asyncio.create_task(lock.acquire(), name="next")
    await wait_until(lambda: sync.statistics().waiting, FAST, timeout=20)
    (held,), (waiter,) = sync.statistics().held, sync.statistics().waiting
    assert (held.fence, held.name) == (lease.fence, "shared")
    assert (waiter.task, waiter.kind) == ("next", "lock")
    await lease.release()
    await (await waiting).release()
    async with AsyncMultiLock(sync, ["a", "b"]), AsyncReentrantLock(sync, "c"):
        assert [it.name for it in sync.statistics().held if it.name in "abc"] == ["a", "b", "c"]


async def test_it_belongs_to_its_event_loop(sync: Coordinator) -> None:
    """Another loop gets an error; a closed coordinator has nothing."""
    async with sync.lock("x"):

        async def elsewhere() -> None:
            sync.statistics()

        with pytest.raises(WrongContext):
            await asyncio.to_thread(asyncio.run, elsewhere())
    await sync.aclose()
    assert sync.statistics().held == ()
