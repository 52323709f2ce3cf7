"""`redis_sync_aio.compat.Lock` with the lock of redis-py; cancellation and waiting, which are better with ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.lock import Lock as RedisLock
from redis.exceptions import LockNotOwnedError

from redis_sync_aio import AsyncLock
from redis_sync_aio.compat import Lock
from redis_sync_aio.embedded import EmbeddedServer

from ..conftest import MakeClient
from ..support.compat import (
    NAME,
    OTHER,
    calls,
    is_free,
    queue_is_empty,
    started,
    until,
)
from ..support.compat import client as client
from ..support.compat import kind as kind
from ..support.compat import lock as lock
from ..support.sweep import Outcome, sweep
from ..support.timed import Timed

# -- each with the other ---------------------------------------------------------------------------------

both_ways = pytest.mark.parametrize(
    ("holds", "comes"), [(RedisLock, Lock), (Lock, RedisLock)], ids=["redis-py holds", "compat holds"]
)


@both_ways
async def test_they_exclude_each_other(client: Redis, holds: type[RedisLock], comes: type[RedisLock]) -> None:
    holder = client.lock(NAME, timeout=10, lock_class=holds)
    other = client.lock(NAME, timeout=10, lock_class=comes, sleep=0.005)
    assert await holder.acquire()
    for limit in (0, 0.02):
        assert await other.acquire(blocking_timeout=limit) is False
        assert await other.acquire(blocking_timeout=limit, token="mine") is False
    assert (await other.locked(), await other.owned(), await holder.owned()) == (True, False, True)
    await holder.release()
    assert await other.acquire(blocking=False)


@both_ways
@pytest.mark.timing
async def test_the_waiter_has_it_soon_after_the_release(
    client: Redis, redis: Redis, holds: type[RedisLock], comes: type[RedisLock]
) -> None:
    holder = client.lock(NAME, timeout=30, lock_class=holds)
    waiter = client.lock(NAME, timeout=30, lock_class=comes)
    await holder.acquire()
    waiting = await started(redis, waiter.acquire())
    await holder.release()
    assert await asyncio.wait_for(waiting, 1)
    assert await waiter.owned()


async def test_a_token_may_change_the_kind_of_lock(client: Redis, kind: type[RedisLock], redis: Redis) -> None:
    first = client.lock(NAME, timeout=10, lock_class=kind)
    second = client.lock(NAME, timeout=10, lock_class=RedisLock if kind is Lock else Lock)
    await first.acquire()
    second.local.token = first.local.token
    assert await second.extend(10)
    await second.release()
    assert await is_free(redis)


async def test_all_kinds_contend(redis: Redis, make_client: MakeClient) -> None:
    rounds, inside = 15, 0

    async def count() -> None:
        nonlocal inside
        inside += 1
        assert inside == 1
        counter = int(await redis.get("counter") or 0)
        await redis.set("counter", counter + 1)
        inside -= 1

    async def redis_py(lock: RedisLock) -> None:
        for _ in range(rounds):
            async with lock:
                await count()

    async def ours() -> None:
        for _ in range(rounds):
            async with AsyncLock(make_client(), NAME):
                await count()

    options: dict[str, Any] = {"timeout": 30, "sleep": 0.001}
    shared = make_client().lock(NAME, lock_class=Lock, **options)
    async with asyncio.timeout(50), asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(redis_py(make_client().lock(NAME, lock_class=RedisLock, **options)))
            tasks.create_task(redis_py(make_client().lock(NAME, lock_class=Lock, **options)))
            tasks.create_task(redis_py(shared))
            tasks.create_task(ours())
    assert int(await redis.get("counter") or 0) == 12 * rounds


# -- what is better: cancellation ------------------------------------------------------------------------


ACQUIRES: dict[str, dict[str, Any]] = {
    "wait": {},
    "limit": {"blocking_timeout": 30},
    "try": {"blocking": False},
    "token": {"token": "mine"},
}


@pytest.mark.parametrize("arguments", ACQUIRES.values(), ids=ACQUIRES)
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
async def test_cancelled_acquire_leaves_no_key(
    lock: RedisLock, redis: Redis, arguments: dict[str, Any], twice: bool
) -> None:
    async def check(outcome: Outcome[bool]) -> None:
        if outcome.value:
            await lock.release()
        await until(lambda: is_free(redis))

    await lock.locked()  # connected
    result = await sweep(lambda: lock.acquire(**arguments), check, twice=twice)
    assert sum(result.cancellations.values()) >= 2


@pytest.mark.parametrize("arguments", [{"blocking_timeout": 0.02}, {"blocking_timeout": 0.02, "token": "mine"}])
async def test_cancelled_wait_leaves_no_ticket(lock: RedisLock, redis: Redis, arguments: dict[str, Any]) -> None:
    async def check(outcome: Outcome[bool]) -> None:
        assert not outcome.value
        await until(lambda: queue_is_empty(redis))
        assert await redis.get(NAME) == OTHER

    await redis.set(NAME, OTHER)
    await sweep(lambda: lock.acquire(**arguments), check)


async def test_cancelled_around_the_hand_over(make_client: MakeClient, redis: Redis) -> None:
    holder, waiter = (make_client().lock(NAME, lock_class=Lock) for _ in range(2))
    for turns in range(40):
        await holder.acquire()
        waiting = await started(redis, waiter.acquire())
        releasing = asyncio.create_task(holder.release())
        for _ in range(turns):
            await asyncio.sleep(0)
        if waiting.cancel():
            with pytest.raises(asyncio.CancelledError):
                await waiting
        else:
            await waiter.release()
        await releasing
        await until(lambda: is_free(redis))


async def body(lock: RedisLock) -> None:
    async with lock:
        await asyncio.sleep(0)


async def acquire_and_release(lock: RedisLock) -> None:
    await lock.acquire()
    try:
        await asyncio.sleep(0)
    finally:
        await lock.release()


@pytest.mark.parametrize("operation", [body, acquire_and_release])
async def test_cancelled_release_still_releases(
    lock: RedisLock, redis: Redis, operation: Callable[[RedisLock], Any]
) -> None:
    async def released() -> bool:
        return lock.local.token is None and await is_free(redis)

    async def check(outcome: Outcome[object]) -> None:
        await until(released)

    await lock.locked()
    result = await sweep(lambda: operation(lock), check)
    assert sum(result.cancellations.values()) >= 6


async def test_cancelled_release_may_be_repeated(lock: RedisLock, redis: Redis) -> None:
    await lock.acquire()
    first = asyncio.create_task(lock.release())
    await asyncio.sleep(0)  # it was sent
    first.cancel()
    await lock.release()  # finds the key gone, and knows who did it
    assert first.cancelled()
    assert await is_free(redis)


async def test_a_release_of_long_ago_says_nothing(lock: RedisLock, redis: Redis) -> None:
    for lost in (False, True):
        await lock.acquire(token="mine")
        if lost:
            await redis.delete(NAME)
            with pytest.raises(LockNotOwnedError):
                await lock.release()
        else:
            await lock.release()


async def test_the_end_of_the_loop_does_not_release(server: EmbeddedServer, redis: Redis) -> None:
    async def once_a_minute() -> bool:
        async with server.client() as client:
            lock = client.lock(NAME, timeout=60, blocking=False, lock_class=Lock)
            acquired: bool = await lock.acquire()
            return acquired

    assert await asyncio.to_thread(asyncio.run, once_a_minute())
    assert not await asyncio.to_thread(asyncio.run, once_a_minute())


# -- what is better: waiting -----------------------------------------------------------------------------


async def test_a_waiter_does_not_poll(make_client: MakeClient, redis: Redis) -> None:
    holder, waiter = (make_client().lock(NAME, lock_class=Lock, sleep=0.001) for _ in range(2))
    await asyncio.gather(holder.locked(), waiter.locked())
    for each in (holder, waiter):  # the server knows the scripts
        async with each:
            pass
    before = await calls(redis, "evalsha", "eval")
    async with Timed() as took:
        await holder.acquire()
        waiting = await started(redis, waiter.acquire())
        for _ in range(200):
            await redis.ping()
        await holder.release()
        assert await waiting
    looks = int(took.seconds)  # one a second, if that took so long
    # Acquire, queue, release: none to wake up.
    assert 3 <= await calls(redis, "evalsha", "eval") - before <= 3 + looks


@pytest.mark.parametrize("limit", [None, 30])
async def test_waiters_are_served_in_order(make_client: MakeClient, redis: Redis, limit: float | None) -> None:
    holder, *waiters = (make_client().lock(NAME, lock_class=Lock) for _ in range(6))
    order: list[int] = []

    async def take_turn(number: int) -> bool:
        async with waiters[number]:
            order.append(number)
        return True

    await holder.acquire()
    tasks = []
    for number, waiter in enumerate(waiters):
        waiter.blocking_timeout = limit
        tasks.append(asyncio.create_task(take_turn(number)))

        async def queued(number: int = number) -> bool:
            return (await AsyncLock(redis, NAME).statistics()).waiting == number + 1

        await until(queued)
    assert await make_client().lock(NAME, lock_class=Lock).acquire(blocking=False) is False
    await holder.release()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]


async def test_false_only_when_the_time_is_over(lock: RedisLock, redis: Redis) -> None:
    await redis.set(NAME, OTHER)
    lock.sleep = 10
    for token in (None, "mine"):
        start = asyncio.get_running_loop().time()
        assert await lock.acquire(blocking_timeout=0.05, token=token) is False
        assert 0.04 < asyncio.get_running_loop().time() - start < 5


@pytest.mark.timing
async def test_without_pubsub_it_polls(make_client: MakeClient, redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    await redis.acl_setuser("mute", enabled=True, nopass=True, reset_channels=True, keys=["*"], categories=["+@all"])
    holder, waiter = (make_client(username="mute", password="x").lock(NAME, lock_class=Lock) for _ in range(2))
    async with holder:
        assert await waiter.acquire(blocking_timeout=0.05) is False
        waiting = await started(redis, waiter.acquire())
    assert await waiting
    assert await waiter.owned()
    await waiter.release()
    assert "polls instead of being woken" in caplog.text
