"""`redis_sync_aio.compat.Lock` next to the lock of redis-py: the same contract, over both.

What is asserted is what redis-py documents, and does. Errors: test_compat_errors.py. Each with the other, and what is
better: test_compat_waiting.py.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.lock import Lock as RedisLock
from redis.exceptions import LockError, LockNotOwnedError

from ..support.compat import (
    NAME,
    OTHER,
    UNLOCKED,
    MakeLock,
    is_free,
    near,
    started,
    until,
)
from ..support.compat import client as client
from ..support.compat import kind as kind
from ..support.compat import make as make

# -- the contract: acquire and release -----------------------------------------------------------------


async def test_acquire_and_release(make: MakeLock, redis: Redis) -> None:
    lock = make()
    assert await lock.acquire() is True
    assert lock.local.token == await redis.get(NAME)
    assert isinstance(lock.local.token, bytes)
    assert await lock.release() is None  # type: ignore[func-returns-value]
    assert lock.local.token is None
    assert await is_free(redis)


async def test_acquire_again_and_again(make: MakeLock) -> None:
    lock, tokens = make(), set()
    for _ in range(3):
        assert await lock.acquire()
        tokens.add(lock.local.token)
        await lock.release()
    assert len(tokens) == 3


@pytest.mark.parametrize(
    ("configured", "given"),
    [
        ({"blocking": False}, {}),
        ({}, {"blocking": False}),
        ({"blocking": False}, {"blocking_timeout": 5}),
        ({"blocking_timeout": 0}, {}),
        ({}, {"blocking_timeout": 0}),
        ({}, {"blocking_timeout": -1}),
        ({"blocking_timeout": 0.001}, {}),
        ({}, {"blocking_timeout": 0.03}),
        ({"blocking_timeout": 30}, {"blocking_timeout": 0.03}),
        ({"blocking": False}, {"blocking": True, "blocking_timeout": 0.03}),
        ({}, {"blocking_timeout": 0.03, "token": "mine"}),
        ({}, {"blocking": False, "token": "mine"}),
    ],
)
async def test_false_when_taken(
    make: MakeLock, redis: Redis, configured: dict[str, Any], given: dict[str, Any]
) -> None:
    await redis.set(NAME, OTHER)
    lock = make(**configured)
    assert await lock.acquire(**given) is False
    assert lock.local.token is None
    assert await redis.get(NAME) == OTHER


@pytest.mark.parametrize("limit", [0, 0.001, 1, 10.5, float("inf"), -1])
@pytest.mark.parametrize("token", [None, "mine"])
async def test_free_is_acquired_however_short_the_time(make: MakeLock, limit: float, token: str | None) -> None:
    assert await make().acquire(blocking_timeout=limit, token=token) is True


@pytest.mark.parametrize("limit", [None, 30])
@pytest.mark.parametrize("token", [None, "mine"])
async def test_waits_until_it_is_released(make: MakeLock, redis: Redis, limit: float | None, token: str | None) -> None:
    holder, waiter = make(), make(blocking_timeout=limit)
    await holder.acquire()
    waiting = await started(redis, waiter.acquire(token=token))
    assert not waiting.done()
    await holder.release()
    assert await waiting is True
    assert await waiter.owned()


async def test_waits_until_the_timeout_of_the_holder(make: MakeLock, redis: Redis) -> None:
    holder, waiter = make(timeout=30), make()
    await holder.acquire()
    await redis.pexpire(NAME, 50)
    assert await waiter.acquire(blocking_timeout=30) is True
    with pytest.raises(LockNotOwnedError):
        await holder.release()
    assert await waiter.owned()


@pytest.mark.parametrize("token", ["täglich", "täglich".encode(), b"\x00|1 2\r\n"])
async def test_token(make: MakeLock, redis: Redis, token: str | bytes) -> None:
    lock = make()
    assert await lock.acquire(token=token)
    encoded = token.encode() if isinstance(token, str) else token
    assert lock.local.token == encoded == await redis.get(NAME)
    assert await lock.owned()
    assert await make().acquire(blocking=False, token=token) is False  # the same token is no way in
    await lock.release()
    assert await is_free(redis)
    assert await lock.acquire(token=token)  # and may be used again


async def test_token_set_by_hand(make: MakeLock, redis: Redis) -> None:
    first, second = make(timeout=10), make(timeout=10)
    await first.acquire()
    second.local.token = first.local.token
    assert await second.owned()
    assert await second.extend(10)
    assert near(await redis.pttl(NAME), 20)
    await second.release()
    assert await is_free(redis)
    with pytest.raises(LockNotOwnedError):
        await first.release()


async def test_one_task_acquires_another_releases(make: MakeLock, redis: Redis) -> None:
    lock = make()
    await lock.acquire()
    await asyncio.create_task(lock.release())
    assert await is_free(redis)
    await asyncio.wait_for(lock.acquire(), 30)  # on Python 3.11 in another task
    await lock.release()
    assert await is_free(redis)


async def test_release_unlocked(make: MakeLock) -> None:
    lock = make()
    for _ in range(2):
        with pytest.raises(LockError, match=UNLOCKED) as caught:
            await lock.release()
        assert (caught.type, caught.value.lock_name) == (LockError, NAME)
        await lock.acquire()
        await lock.release()


@pytest.mark.parametrize("now_there", [None, OTHER], ids=["gone", "taken"])
async def test_release_of_a_lost_lock(make: MakeLock, redis: Redis, now_there: bytes | None) -> None:
    lock = make(timeout=10)
    await lock.acquire()
    await (redis.delete(NAME) if now_there is None else redis.set(NAME, now_there))
    with pytest.raises(LockNotOwnedError, match="Cannot release a lock that's no longer owned"):
        await lock.release()
    assert await redis.get(NAME) == now_there
    assert lock.local.token is None
    with pytest.raises(LockError, match=UNLOCKED):
        await lock.release()


async def test_release_after_the_timeout(make: MakeLock, redis: Redis) -> None:
    lock = make(timeout=0.05)
    await lock.acquire()
    await until(lambda: is_free(redis))
    with pytest.raises(LockNotOwnedError):
        await lock.release()


async def test_locked_and_owned(make: MakeLock, redis: Redis) -> None:
    lock, other = make(), make()
    assert (await lock.locked(), await lock.owned()) == (False, False)
    await lock.acquire()
    assert (await lock.locked(), await lock.owned()) == (True, True)
    assert (await other.locked(), await other.owned()) == (True, False)
    await redis.set(NAME, OTHER)
    assert (await lock.locked(), await lock.owned()) == (True, False)
    await redis.delete(NAME)
    assert (await lock.locked(), await lock.owned()) == (False, False)


# -- the contract: timeouts ----------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [None, 0, 0.0])
async def test_no_timeout(make: MakeLock, redis: Redis, timeout: float | None) -> None:
    await make(timeout=timeout).acquire()
    assert await redis.pttl(NAME) == -1


@pytest.mark.parametrize("timeout", [10, 10.5, 3.0])
@pytest.mark.parametrize("token", [None, "mine"])
async def test_timeout(make: MakeLock, redis: Redis, timeout: float, token: str | None) -> None:
    await make(timeout=timeout).acquire(token=token)
    assert near(await redis.pttl(NAME), timeout)


async def test_timeout_of_a_lock_that_was_waited_for(make: MakeLock, redis: Redis) -> None:
    holder, waiter = make(), make(timeout=10)
    await holder.acquire()
    waiting = await started(redis, waiter.acquire())
    await holder.release()
    assert await waiting
    assert near(await redis.pttl(NAME), 10)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((10,), 20),
        ((10.5,), 20.5),
        ((-5,), 5),
        ((0,), 10),
        ((10, False), 20),
        ((10, True), 10),
        ((4.5, True), 4.5),
        ((30, True), 30),
    ],
)
async def test_extend(make: MakeLock, redis: Redis, arguments: tuple[Any, ...], expected: float) -> None:
    lock = make(timeout=10)
    await lock.acquire()
    assert await lock.extend(*arguments) is True
    assert near(await redis.pttl(NAME), expected)
    await lock.release()


async def test_extend_adds_to_what_the_server_says(make: MakeLock, redis: Redis) -> None:
    lock = make(timeout=10)
    await lock.acquire()
    await redis.pexpire(NAME, 100_000)
    assert await lock.extend(10)
    assert near(await redis.pttl(NAME), 110)
    assert await lock.extend(additional_time=10, replace_ttl=False)
    assert near(await redis.pttl(NAME), 120)


async def test_reacquire(make: MakeLock, redis: Redis) -> None:
    lock = make(timeout=10.5)
    await lock.acquire()
    await redis.pexpire(NAME, 5_000)
    assert await lock.reacquire() is True
    assert near(await redis.pttl(NAME), 10.5)
    await lock.extend(30)
    assert await lock.reacquire()
    assert near(await redis.pttl(NAME), 10.5)


async def extend(lock: RedisLock) -> None:
    await lock.extend(10)


async def extend_replacing(lock: RedisLock) -> None:
    await lock.extend(10, replace_ttl=True)


async def reacquire(lock: RedisLock) -> None:
    await lock.reacquire()


extending = pytest.mark.parametrize("change", [extend, extend_replacing, reacquire])


@extending
async def test_extend_unlocked(make: MakeLock, change: Callable[[RedisLock], Awaitable[None]]) -> None:
    with pytest.raises(LockError, match=r"Cannot (extend|reacquire) an unlocked lock") as caught:
        await change(make(timeout=10))
    assert caught.type is LockError


@extending
async def test_extend_without_timeout(make: MakeLock, change: Callable[[RedisLock], Awaitable[None]]) -> None:
    lock = make()
    await lock.acquire()
    with pytest.raises(LockError, match=r"Cannot (extend|reacquire) a lock with no timeout") as caught:
        await change(lock)
    assert caught.type is LockError
    await lock.release()


@extending
@pytest.mark.parametrize("now_there", [None, OTHER], ids=["gone", "taken"])
async def test_extend_of_a_lost_lock(
    make: MakeLock, redis: Redis, change: Callable[[RedisLock], Awaitable[None]], now_there: bytes | None
) -> None:
    lock = make(timeout=10)
    await lock.acquire()
    await (redis.delete(NAME) if now_there is None else redis.set(NAME, now_there, px=5_000))
    with pytest.raises(LockNotOwnedError, match=r"Cannot (extend|reacquire) a lock that's no longer owned"):
        await change(lock)
    assert lock.local.token is not None  # only a release clears it
    assert now_there is None or await redis.pttl(NAME) <= 5_000


# -- the contract: async with --------------------------------------------------------------------------


async def test_async_with(make: MakeLock, redis: Redis) -> None:
    lock = make(timeout=10)
    async with lock as entered:
        assert entered is lock
        assert await lock.owned()
    assert await is_free(redis)
    with pytest.raises(ZeroDivisionError):
        async with lock:
            raise ZeroDivisionError
    assert await is_free(redis)


async def test_async_with_not_acquired(make: MakeLock, redis: Redis) -> None:
    await redis.set(NAME, OTHER)
    with pytest.raises(LockError, match="Unable to acquire lock within the time specified") as caught:
        async with make(blocking_timeout=0.02):
            pytest.fail("entered")
    assert caught.type is LockError
    assert await redis.get(NAME) == OTHER


async def test_async_with_lost(make: MakeLock, redis: Redis) -> None:
    with pytest.raises(LockNotOwnedError):
        async with make(timeout=10):
            await redis.set(NAME, OTHER)
    assert await redis.get(NAME) == OTHER


async def test_async_with_released_in_the_body(make: MakeLock) -> None:
    with pytest.raises(LockError, match=UNLOCKED):
        async with make() as lock:
            await lock.release()


@pytest.mark.parametrize("how", ["lost", "released"])
async def test_no_release_error(make: MakeLock, redis: Redis, caplog: pytest.LogCaptureFixture, how: str) -> None:
    with caplog.at_level(logging.WARNING):
        async with make(raise_on_release_error=False) as lock:
            await (redis.delete(NAME) if how == "lost" else lock.release())
    assert "Lock was unlocked or no longer owned when exiting context manager." in caplog.messages
    assert lock.local.token is None


async def test_an_explicit_release_raises_anyway(make: MakeLock) -> None:
    with pytest.raises(LockError):
        await make(raise_on_release_error=False).release()


# -- the contract: the object --------------------------------------------------------------------------


def test_attributes(client: Redis, kind: type[RedisLock]) -> None:
    lock = kind(client, NAME, 10.5, 0.2, False, 3, False, False)
    assert (lock.redis, lock.name) == (client, NAME)
    assert (lock.timeout, lock.sleep, lock.blocking, lock.blocking_timeout) == (10.5, 0.2, False, 3)
    assert (lock.thread_local, lock.raise_on_release_error) == (False, False)
    assert isinstance(lock.local, SimpleNamespace)


def test_defaults(client: Redis, kind: type[RedisLock]) -> None:
    lock = client.lock(NAME, lock_class=kind)
    assert type(lock) is kind
    assert (lock.timeout, lock.sleep, lock.blocking, lock.blocking_timeout) == (None, 0.1, True, None)
    assert (lock.thread_local, lock.raise_on_release_error) == (True, True)
    assert isinstance(lock.local, threading.local)
    assert lock.local.token is None


@pytest.mark.parametrize("thread_local", [True, False])
async def test_what_another_thread_sees(make: MakeLock, thread_local: bool) -> None:
    lock = make(thread_local=thread_local)
    await lock.acquire()
    seen = await asyncio.to_thread(lambda: getattr(lock.local, "token", None))
    assert seen == (None if thread_local else lock.local.token)


async def test_attributes_can_be_changed(make: MakeLock, redis: Redis) -> None:
    lock = make(timeout=10)
    lock.timeout = 20
    await lock.acquire()
    assert near(await redis.pttl(NAME), 20)
    lock.timeout = 30
    await lock.reacquire()
    assert near(await redis.pttl(NAME), 30)
    lock.blocking = False
    assert await lock.acquire() is False


@pytest.mark.parametrize("name", ["läufe", b"\xff\x00", memoryview(b"view")], ids=["str", "bytes", "memoryview"])
async def test_names(make: MakeLock, redis: Redis, name: Any) -> None:
    async with make(name) as lock:
        assert lock.name == name
        assert await redis.exists(name)
