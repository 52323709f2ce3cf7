"""max_waiting: a request that would wait behind so many others fails immediately, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AcquireTimeout,
    AsyncReadWriteLock,
    Coordinator,
    Lease,
    QueueFull,
    wait_until,
)

from ..conftest import MakeClient
from ..support.body import FAST
from ..support.inside import tuned
from ..support.primitives import LOCK, SEMAPHORE, WATCHED_LOCK, WATCHED_SEMAPHORE, WRITER, Primitive, each
from ..support.sweep import Outcome, sweep

NAME = "queue"


KINDS = [LOCK, WATCHED_LOCK, SEMAPHORE, WATCHED_SEMAPHORE, WRITER]


class Queue:
    """Something that is held, and the tickets of those that wait for it."""

    def __init__(self, kind: Primitive, sync: Coordinator, redis: Redis) -> None:
        self._kind, self._sync, self._redis = kind, sync, redis
        self.key = kind.queue(NAME)
        self.tasks: list[asyncio.Task[Lease]] = []

    def make(self, **options: Any) -> Any:
        return self._kind.make(self._sync, NAME, **options)

    async def is_long(self, number: int) -> bool:
        found: int = await self._redis.zcard(self.key)
        return found == number

    async def add(self, **options: Any) -> None:
        """Let one more request wait."""
        before: int = await self._redis.zcard(self.key)
        self.tasks.append(asyncio.create_task(self.make(**options).acquire(timeout=60)))
        await wait_until(lambda: self.is_long(before + 1), FAST, timeout=20)

    async def serve(self) -> None:
        """Let all of them have it."""

        async def serve(task: asyncio.Task[Lease]) -> None:
            await (await task).release()

        await asyncio.gather(*map(serve, self.tasks))
        assert await self.is_long(0)


@pytest.fixture(params=KINDS, ids=str)
def queue(request: pytest.FixtureRequest, sync: Coordinator, redis: Redis) -> Queue:
    return Queue(request.param, sync, redis)


async def test_a_request_that_finds_a_full_queue_fails_at_the_call(queue: Queue) -> None:
    """The queue does not grow, and those that are in it are not disturbed."""
    async with asyncio.timeout(60):
        holder = await queue.make().acquire()
        await queue.add(max_waiting=2)
        await queue.add(max_waiting=2)
        with pytest.raises(QueueFull) as caught:
            await queue.make(max_waiting=2).acquire()
        error = caught.value
        assert (error.name, error.waiting, error.max_waiting, error.answered) == (NAME, 2, 2, True)
        assert error.remaining is None or error.remaining < 31
        assert str(error).startswith("'queue' is not free, and 2 requests wait for it: with max_waiting=2")
        assert isinstance(error, AcquireTimeout)
        assert await queue.is_long(2)
        await queue.add()  # without it there is no limit
        await holder.release()
        await queue.serve()


async def test_what_is_free_is_granted_however_few_may_wait(queue: Queue) -> None:
    """0: it never waits; but nothing has to be waited for."""
    lock = queue.make(max_waiting=0)
    lease = await lock.acquire()
    with pytest.raises(QueueFull, match="0 requests wait for it: with max_waiting=0"):
        await queue.make(max_waiting=0).acquire(timeout=5)
    assert await queue.make(max_waiting=0).try_acquire() is None
    await lease.release()
    await (await lock.acquire()).release()


async def test_a_request_by_an_identity_that_holds_it_does_not_wait(queue: Queue) -> None:
    holder = await queue.make().acquire(identity="me")
    await queue.add()
    again = await queue.make(max_waiting=0).acquire(identity="me")
    assert again.token == holder.token
    await holder.release()
    await queue.serve()


async def test_more_may_wait_than_a_decision_without_scripts_reads(queue: Queue) -> None:
    """One with WATCH reads the first 16 tickets, and the number of all."""
    holder = await queue.make().acquire()
    for _ in range(18):
        queue.tasks.append(asyncio.create_task(queue.make().acquire(timeout=60)))
    await wait_until(lambda: queue.is_long(18), FAST, timeout=30)
    with pytest.raises(QueueFull, match="18 requests wait"):
        await queue.make(max_waiting=18).acquire()
    await queue.add(max_waiting=19)
    await holder.release()
    await queue.serve()


async def test_nothing_is_left_wherever_a_refused_request_is_cancelled(queue: Queue) -> None:
    """P5."""
    holder = await queue.make().acquire()
    await queue.add()

    async def ask() -> None:
        with pytest.raises(QueueFull):
            await queue.make(max_waiting=1).acquire()

    async def check(_: Outcome[None]) -> None:
        await wait_until(lambda: queue.is_long(1), FAST, timeout=20)

    assert (await sweep(ask, check)).outcomes
    await holder.release()
    await queue.serve()


async def test_readers_are_counted_with_writers(sync: Coordinator) -> None:
    rw = AsyncReadWriteLock(sync, NAME, max_waiting=0)
    readers = [await rw.read().acquire(), await rw.read().acquire()]  # they do not wait for each other
    with pytest.raises(QueueFull):
        await rw.write().acquire()
    for lease in readers:
        await lease.release()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_waiting": -1}, ValueError, "max_waiting must be 0 or more"),
        ({"max_waiting": 1.5}, TypeError, "max_waiting must be a whole number"),
        (
            {"max_waiting": 1, "share": True},
            ValueError,
            "max_waiting cannot be combined with share=True",
        ),
    ],
)
@each(KINDS, "kind")
async def test_bad_arguments_are_refused(
    sync: Coordinator, kind: Primitive, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kind.make(sync, NAME, **options)


async def test_a_request_whose_place_was_lost_gets_another_one(
    make_client: MakeClient, other: Coordinator, redis: Redis
) -> None:
    """Although as many wait by then as it would wait behind."""
    async with tuned(make_client(), poll_cap=0.2) as sync:
        first, queue = Queue(LOCK, sync, redis), Queue(LOCK, other, redis)
        holder = await queue.make().acquire()
        await first.add(max_waiting=1)
        await queue.add()
        await queue.add()
        await redis.zremrangebyrank(queue.key, 0, 0)
        await wait_until(lambda: queue.is_long(3), FAST, timeout=20)
        await holder.release()
        queue.tasks += first.tasks
        await queue.serve()
