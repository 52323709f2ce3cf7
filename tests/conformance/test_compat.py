"""`redis_sync_aio.compat.Lock` next to the lock of redis-py: the same contract, over both.

What is asserted is what redis-py documents, and does. Releases, extensions, lost locks and bodies are compared step by
step in simulation/test_compat_sequences.py. What is better with ours: test_compat_differences.py.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import redis.exceptions as errors
from redis.asyncio import Redis
from redis.asyncio.lock import Lock as RedisLock
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import LockError, LockNotOwnedError

from redis_sync_aio import AsyncLock
from redis_sync_aio.compat import Lock
from redis_sync_aio.embedded import EmbeddedServer

from ..conftest import MakeClient
from ..support.inside import close_implicit, hub_of
from .compat import NAME, OTHER, MakeLock, is_free, near, refused, started
from .compat import client as client
from .compat import kind as kind
from .compat import make as make

TOKENS = pytest.mark.parametrize("token", [None, "mine"])
# -- acquire and release -------------------------------------------------------------------------------


async def test_each_acquire_has_a_token_of_its_own_until_the_release(make: MakeLock, redis: Redis) -> None:
    lock, tokens = make(), set()
    for _ in range(3):
        assert await lock.acquire() is True
        assert isinstance(lock.local.token, bytes)
        assert lock.local.token == await redis.get(NAME)
        tokens.add(lock.local.token)
        assert await lock.release() is None  # type: ignore[func-returns-value]
        assert lock.local.token is None
        assert await is_free(redis)
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
@TOKENS
async def test_free_is_acquired_however_short_the_time(make: MakeLock, limit: float, token: str | None) -> None:
    assert await make().acquire(blocking_timeout=limit, token=token) is True


@pytest.mark.parametrize("limit", [None, 30])
@TOKENS
async def test_a_waiter_has_it_after_the_release_with_its_own_timeout(
    make: MakeLock, redis: Redis, limit: float | None, token: str | None
) -> None:
    holder, waiter = make(), make(blocking_timeout=limit, timeout=10)
    await holder.acquire()
    waiting = await started(redis, waiter.acquire(token=token))
    assert not waiting.done()
    await holder.release()
    assert await waiting is True
    assert await waiter.owned()
    assert near(await redis.pttl(NAME), 10)


async def test_a_waiter_has_it_after_the_timeout_of_the_holder(make: MakeLock) -> None:
    holder, waiter = make(timeout=0.05), make()
    await holder.acquire()
    assert await waiter.acquire(blocking_timeout=30) is True
    with pytest.raises(LockNotOwnedError):
        await holder.release()
    assert await waiter.owned()


@pytest.mark.parametrize("token", ["täglich", "täglich".encode(), b"\x00|1 2\r\n"])
async def test_a_token_of_the_caller(make: MakeLock, redis: Redis, token: str | bytes) -> None:
    lock = make()
    assert await lock.acquire(token=token)
    encoded = token.encode() if isinstance(token, str) else token
    assert lock.local.token == encoded == await redis.get(NAME)
    assert await lock.owned()
    assert await make().acquire(blocking=False, token=token) is False  # the same token is no way in
    await lock.release()
    assert await is_free(redis)
    assert await lock.acquire(token=token)  # and may be used again


async def test_a_token_set_by_hand_acts_for_its_lock(
    make: MakeLock, client: Redis, kind: type[RedisLock], redis: Redis
) -> None:
    """Also if the other lock is of the other kind."""
    for other in (Lock, RedisLock):
        first, second = make(timeout=10), client.lock(NAME, timeout=10, lock_class=other)
        await first.acquire()
        second.local.token = first.local.token
        assert await second.owned()
        assert await second.extend(10)
        assert near(await redis.pttl(NAME), 20)
        await second.release()
        assert await is_free(redis)
        with pytest.raises(LockNotOwnedError):
            await first.release()


# -- timeouts ------------------------------------------------------------------------------------------


async def test_extend_adds_to_what_the_server_says_and_reacquire_does_not(make: MakeLock, redis: Redis) -> None:
    lock = make(timeout=10.5)
    await lock.acquire()
    await redis.pexpire(NAME, 100_000)
    assert await lock.extend(additional_time=10, replace_ttl=False)
    assert near(await redis.pttl(NAME), 110)
    for left in (100_000, 5_000):
        await redis.pexpire(NAME, left)
        assert await lock.reacquire() is True
        assert near(await redis.pttl(NAME), 10.5)


async def test_extending_an_unlocked_or_endless_lock_is_refused_at_the_call(make: MakeLock) -> None:
    """Not when it is awaited."""
    unlocked, endless = make(timeout=10), make()
    await endless.acquire()
    for lock, why in ((unlocked, "an unlocked lock"), (endless, "a lock with no timeout")):
        with pytest.raises(LockError, match=f"Cannot extend {why}") as caught:
            _ = lock.extend(10)
        assert caught.type is LockError
        with pytest.raises(LockError, match=f"Cannot reacquire {why}") as caught:
            _ = lock.reacquire()
        assert caught.type is LockError
    await endless.release()


@pytest.mark.parametrize("seconds", [20, 20.5, Decimal("20.5"), Fraction(41, 2), timedelta(seconds=20), True])
async def test_seconds_of_any_type(make: MakeLock, kind: type[RedisLock], redis: Redis, seconds: Any) -> None:
    if kind is RedisLock and isinstance(seconds, timedelta):
        pytest.skip("redis-py's takes numbers only")
    expected = float(seconds.total_seconds() if isinstance(seconds, timedelta) else seconds)
    lock: Any = make(timeout=seconds)
    await lock.acquire()
    assert near(await redis.pttl(NAME), expected)
    await lock.reacquire()
    await lock.extend(seconds, True)
    assert near(await redis.pttl(NAME), expected)
    await lock.extend(seconds)
    assert near(await redis.pttl(NAME), 2 * expected)
    other: Any = make(sleep=Fraction(1, 200))
    waits = 0.02 if kind is RedisLock else type(seconds)(0)
    assert await other.acquire(blocking_timeout=waits, token="x") is False


# -- the object ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["lost", "released"])
async def test_the_end_of_a_body_may_log_instead_of_raising(
    make: MakeLock, redis: Redis, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    with caplog.at_level(logging.WARNING):
        async with make(raise_on_release_error=False) as lock:
            await (redis.delete(NAME) if how == "lost" else lock.release())
    assert "Lock was unlocked or no longer owned when exiting context manager." in caplog.messages
    assert lock.local.token is None


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


@pytest.mark.parametrize("name", ["läufe", b"\xff\x00", memoryview(b"view")], ids=["str", "bytes", "memoryview"])
async def test_names(make: MakeLock, redis: Redis, name: Any) -> None:
    async with make(name) as lock:
        assert lock.name == name
        assert await redis.exists(name)


# -- errors of connection and server -------------------------------------------------------------------


async def test_without_permission(kind: type[RedisLock], redis: Redis, make_client: MakeClient) -> None:
    await redis.acl_setuser("narrow", enabled=True, nopass=True, channels=["*"], categories=["+@all"], keys=["else:*"])
    await refused(kind, make_client(username="narrow", password="x"), errors.NoPermissionError)


async def test_without_server(kind: type[RedisLock]) -> None:
    with EmbeddedServer() as server:
        client = server.client(socket_timeout=0.1, retry=Retry(NoBackoff(), 0))
        server.stop()
        coordinator = hub_of(client)
        coordinator.retry_for = 0.05
        await refused(kind, client, errors.ConnectionError)
        await close_implicit(coordinator)
        await client.aclose()


# -- each with the other -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("holds", "comes"), [(RedisLock, Lock), (Lock, RedisLock)], ids=["redis-py holds", "compat holds"]
)
async def test_they_exclude_each_other(
    client: Redis, redis: Redis, holds: type[RedisLock], comes: type[RedisLock]
) -> None:
    """And a waiter has it soon after the release."""
    holder = client.lock(NAME, timeout=10, lock_class=holds)
    other = client.lock(NAME, timeout=10, lock_class=comes, sleep=0.005)
    assert await holder.acquire()
    for limit in (0, 0.02):
        assert await other.acquire(blocking_timeout=limit) is False
        assert await other.acquire(blocking_timeout=limit, token="mine") is False
    assert (await other.locked(), await other.owned(), await holder.owned()) == (True, False, True)
    waiting = await started(redis, other.acquire())
    await holder.release()
    assert await asyncio.wait_for(waiting, 1)
    assert await other.owned()


async def test_all_kinds_contend(redis: Redis, make_client: MakeClient) -> None:
    rounds, inside = 5, 0

    async def count() -> None:
        nonlocal inside
        inside += 1
        assert inside == 1
        counter = int(await redis.get("counter") or 0)
        await redis.set("counter", counter + 1)
        inside -= 1

    async def contend(lock: RedisLock | AsyncLock) -> None:
        for _ in range(rounds):
            async with lock:
                await count()

    options: dict[str, Any] = {"timeout": 30, "sleep": 0.001}
    shared = make_client().lock(NAME, lock_class=Lock, **options)
    async with asyncio.timeout(50), asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(contend(make_client().lock(NAME, lock_class=RedisLock, **options)))
            tasks.create_task(contend(make_client().lock(NAME, lock_class=Lock, **options)))
            tasks.create_task(contend(shared))
            tasks.create_task(contend(AsyncLock(make_client(), NAME)))
    assert int(await redis.get("counter") or 0) == 12 * rounds
