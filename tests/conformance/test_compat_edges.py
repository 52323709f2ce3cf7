"""`redis_sync_aio.compat.Lock` next to redis-py's lock: several tasks, odd numbers, changed attributes, subclasses."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.lock import Lock as RedisLock
from redis.exceptions import LockError, LockNotOwnedError

from redis_sync_aio.compat import Lock
from redis_sync_aio.embedded import EmbeddedServer

from ..support.compat import NAME, MakeLock, is_free, near, queue_is_empty, started, through_proxy, until
from ..support.compat import client as client
from ..support.compat import kind as kind
from ..support.compat import lock as lock
from ..support.compat import make as make
from ..support.inside import load
from ..support.proxy import DELAY_REPLY, script

# -- the same through several tasks ------------------------------------------------------------------------


@asynccontextmanager
async def living(lock: RedisLock) -> AsyncIterator[None]:
    """Another task acquires it and lives on."""
    acquired = asyncio.Event()

    async def acquire() -> None:
        assert await lock.acquire(blocking=False)
        acquired.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(acquire())
    await acquired.wait()
    try:
        yield
    finally:
        task.cancel()


@pytest.mark.parametrize("by", ["the same task", "another task"])
async def test_a_task_that_released_acts_on_what_another_one_holds(make: MakeLock, redis: Redis, by: str) -> None:
    lock = make(timeout=30)
    await lock.acquire()
    await (lock.release() if by == "the same task" else asyncio.create_task(lock.release()))
    async with living(lock):
        assert await lock.owned() is True
        assert await lock.extend(10) is True
        assert await lock.reacquire() is True
        await lock.release()
        assert await is_free(redis)


async def test_a_task_whose_lock_ran_out_does_not(lock: RedisLock, redis: Redis) -> None:
    """Of this lock only: redis-py's would release what the other task holds."""
    await lock.acquire()
    await redis.delete(NAME)
    async with living(lock):
        assert await lock.owned() is False
        for _ in range(2):
            with pytest.raises(LockNotOwnedError):
                await lock.release()
        lock.name = "other"  # what it held has nothing to do with that
        lock.name = NAME
        assert await lock.owned()
        await lock.release()


# -- numbers -----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("bad", ["20", b"20", [20], object(), math.nan, Decimal("nan")])
async def test_what_is_no_number_of_seconds(lock: RedisLock, client: Redis, bad: Any) -> None:
    expected = pytest.raises((TypeError, ValueError), match="must be a number of seconds")
    with expected:
        client.lock(NAME, lock_class=Lock, timeout=bad)
    with expected:
        await lock.acquire(blocking_timeout=bad)
    await lock.acquire()
    with expected:
        await lock.extend(bad)
    with pytest.raises(ValueError, match="finite"):
        await lock.extend(math.inf)
    lock.sleep = bad
    with expected:
        await client.lock(NAME, lock_class=Lock, sleep=bad).acquire(blocking_timeout=1, token="x")


@pytest.mark.parametrize("more", [(-30,), (-1000,), (0, True), (-5, True)])
async def test_extend_until_nothing_is_left_ends_the_lock(make: MakeLock, redis: Redis, more: tuple[Any, ...]) -> None:
    lock = make(timeout=30)
    await lock.acquire()
    token = lock.local.token
    assert await lock.extend(*more) is True
    assert await is_free(redis)
    assert lock.local.token == token
    with pytest.raises(LockNotOwnedError):
        await lock.extend(*more)
    with pytest.raises(LockNotOwnedError):
        await lock.release()


@pytest.mark.timing
async def test_then_the_next_one_has_it_immediately(lock: RedisLock, client: Redis, redis: Redis) -> None:
    """Waiters for this lock are notified. A key that just ends would be noticed at the next look only."""
    await lock.acquire()
    waiter = client.lock(NAME, timeout=30, lock_class=Lock)
    waiting = await started(redis, waiter.acquire())

    async def queued() -> bool:
        return not await queue_is_empty(redis)

    await until(queued)
    await lock.extend(-1000)
    assert await asyncio.wait_for(waiting, 1.5)
    assert await waiter.owned()


async def test_extend_counts_from_when_the_time_left_was_true(server: EmbeddedServer, redis: Redis) -> None:
    """The time that the server's answer takes is not a gift: 10 seconds, 2 of which passed, and 10 more are 18."""
    async with through_proxy(server) as (proxy, client):
        lock = client.lock(NAME, timeout=10, lock_class=Lock)
        await lock.acquire()
        assert await lock.owned()  # the server knows the script
        slow = proxy.on(script(load("link/read").sha), DELAY_REPLY(2), times=1)
        assert await lock.extend(10)
        assert slow.acted
        assert 10_000 < await redis.pttl(NAME) <= 18_000
        await lock.release()


# -- attributes and methods --------------------------------------------------------------------------------


async def test_another_name(make: MakeLock, redis: Redis) -> None:
    lock = make("before", timeout=10)
    await lock.acquire()
    lock.name = NAME
    assert await lock.owned() is False
    with pytest.raises(LockNotOwnedError):
        await lock.release()
    assert not await is_free(redis, "before")
    assert await lock.acquire()
    assert await redis.get(NAME) == lock.local.token
    await lock.release()
    assert await is_free(redis)


async def test_a_bad_name_is_refused_when_it_is_set(lock: RedisLock) -> None:
    bad: Any
    for bad in ("", "\ud800", 5):
        with pytest.raises((TypeError, ValueError)):
            lock.name = bad
    assert lock.name == NAME
    await lock.acquire()


async def test_extend_and_reacquire_refuse_when_they_are_called(make: MakeLock) -> None:
    """Not when they are awaited."""
    unlocked, endless = make(timeout=10), make()
    await endless.acquire()
    for refused, why in ((unlocked, "an unlocked lock"), (endless, "a lock with no timeout")):
        with pytest.raises(LockError, match=why):
            _ = refused.extend(10)
        with pytest.raises(LockError, match=why):
            _ = refused.reacquire()


INSIDE = (
    *("do_acquire", "do_release", "do_extend", "do_reacquire", "register_scripts"),
    *("LUA_RELEASE_SCRIPT", "LUA_EXTEND_SCRIPT", "LUA_REACQUIRE_SCRIPT", "lua_release", "lua_extend", "lua_reacquire"),
)


@pytest.mark.parametrize("name", INSIDE)
async def test_what_would_never_be_called_cannot_be_overridden(lock: RedisLock, client: Redis, name: str) -> None:
    """It is refused when the class is made, also when it comes from another base."""
    client.lock(NAME)  # the first one of redis-py's locks sets attributes of its class
    mixin = type("Mixin", (), {name: lambda *_: True})
    with pytest.raises(TypeError, match=rf"Metered overrides {name}, .*override acquire\(\)"):
        type("Metered", (Lock,), {name: lambda *_: True})
    with pytest.raises(TypeError, match="Metered overrides"):
        type("Metered", (mixin, Lock), {})
    if inspect.isfunction(getattr(RedisLock, name)):
        with pytest.raises(NotImplementedError, match=r"use acquire\(\), release\(\)"):
            await getattr(lock, name)(b"token")


async def test_documented_methods_may_be_overridden(client: Redis, redis: Redis) -> None:
    calls: list[str] = []

    class Metered(Lock):
        async def acquire(self, *args: Any, **options: Any) -> bool:
            calls.append("acquire")
            return await super().acquire(*args, **options)

        async def release(self) -> None:
            calls.append("release")
            await super().release()

    async with client.lock(NAME, timeout=10, lock_class=Metered):
        assert calls == ["acquire"]
    assert calls == ["acquire", "release"]
    assert await is_free(redis)
