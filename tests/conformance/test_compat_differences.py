"""`redis_sync_aio.compat.Lock`: what is better than with redis-py's lock: errors, cancellation, waiting, arguments."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
import redis.exceptions as errors
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.asyncio.lock import Lock as RedisLock
from redis.exceptions import LockNotOwnedError

from redis_sync_aio import CommandRefused, Unreachable
from redis_sync_aio.compat import Lock
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action, script

from ..conftest import MakeClient
from ..support.inside import close_implicit, hub_of, load
from ..support.inspecting import calls
from ..support.sweep import Outcome, sweep
from .compat import (
    NAME,
    OTHER,
    is_free,
    near,
    queue_is_empty,
    refused,
    started,
    through_proxy,
    until,
)
from .compat import client as client
from .compat import lock as lock

ACQUIRE, RENEW, RELEASE = (script(load(f"lock/{part}").sha) for part in ("acquire", "renew", "release"))

# -- errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quiet", [False, True])
async def test_the_error_of_the_body_leaves(
    lock: RedisLock, redis: Redis, caplog: pytest.LogCaptureFixture, quiet: bool
) -> None:
    lock.raise_on_release_error = not quiet
    with pytest.raises(ZeroDivisionError) as caught:  # noqa: PT012
        async with lock:
            await redis.delete(NAME)
            raise ZeroDivisionError
    notes = [] if quiet else ["redis_sync_aio: Cannot release a lock that's no longer owned"]
    assert getattr(caught.value, "__notes__", []) == notes
    assert bool(caplog.messages) is quiet


@pytest.mark.parametrize("fault", [Action.CUT_AFTER, Action.CUT_BEFORE], ids=["answer lost", "command lost"])
@pytest.mark.parametrize("token", [None, "mine"])
async def test_lost_connections_change_no_answer(
    server: EmbeddedServer, redis: Redis, fault: Any, token: str | None
) -> None:
    async with through_proxy(server) as (proxy, client):
        lock = client.lock(NAME, timeout=10, lock_class=Lock)
        async with lock:  # the server knows the scripts
            await lock.extend(10)
        rules = [proxy.on(part, fault) for part in (ACQUIRE, RENEW, RELEASE)]
        assert await lock.acquire(blocking=False, token=token) is True
        assert await lock.owned()
        assert await lock.extend(10)
        assert near(await redis.pttl(NAME), 20)
        await lock.release()
        assert all(rule.acted for rule in rules)
        assert await is_free(redis)


async def test_the_error_of_the_body_leaves_without_a_server(redis: Redis, server: EmbeddedServer) -> None:
    async with through_proxy(server) as (proxy, client):
        lock = client.lock(NAME, timeout=30, lock_class=Lock)

        async def fail() -> None:
            async with lock:
                hub_of(client).retry_for = 0.05
                proxy.refuse = True
                await proxy.cut()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError) as caught:
            await fail()
        assert "Redis did not confirm the release" in caught.value.__notes__[0]
        assert lock.local.token == await redis.get(NAME)  # not confirmed: still ours
    assert await is_free(redis)  # it was given back in the background
    assert lock.local.token is None


async def test_a_stale_release_frees_nobody_elses_lock(lock: RedisLock, redis: Redis) -> None:
    second = asyncio.Event()

    async def successor() -> None:
        async with lock:
            second.set()
            await asyncio.Event().wait()

    await lock.acquire()
    await redis.delete(NAME)  # it ran out
    task = asyncio.create_task(successor())
    await second.wait()
    theirs = lock.local.token
    assert theirs == await redis.get(NAME)
    assert not await lock.owned()
    for _ in range(2):
        with pytest.raises(LockNotOwnedError):
            await lock.extend(10)
        with pytest.raises(LockNotOwnedError):
            await lock.release()
    lock.name = "other"  # what it held has nothing to do with that
    lock.name = NAME
    assert lock.local.token == theirs == await redis.get(NAME)
    await asyncio.create_task(lock.release())  # a task that acquired nothing acts for the object
    assert await is_free(redis)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("answer", "error", "at_release"),
    [
        ("OOM command not allowed", errors.OutOfMemoryError, None),
        ("NOPERM this user has no permissions", errors.NoPermissionError, None),
        ("NOAUTH Authentication required.", errors.AuthenticationError, None),
        ("ERR something else", errors.ResponseError, None),
        # These are waited for: a release still runs when it raises.
        ("LOADING Redis is loading the dataset in memory", errors.BusyLoadingError, Unreachable),
        ("MISCONF Redis is configured to save RDB snapshots", errors.ResponseError, Unreachable),
    ],
)
async def test_an_answer_that_is_an_error(
    server: EmbeddedServer, answer: str, error: type[Exception], at_release: type[Exception] | None
) -> None:
    """Each operation raises the error of redis-py, caused by ours."""
    async with through_proxy(server) as (proxy, client):
        hub_of(client).retry_for = 0.1 if at_release else 10
        rule = proxy.on("EVALSHA", Action.answer_error(answer), times=None)
        await refused(Lock, client, error, at_release)
        with pytest.raises(error) as caught:
            await client.lock(NAME, lock_class=Lock).locked()
        assert isinstance(caught.value.__cause__, CommandRefused)
        rule.cancel()


async def test_an_extended_lock_is_released_for_sure(server: EmbeddedServer) -> None:
    """The repetition of a release whose answer was lost knows that the lock is held for longer than at first."""
    async with through_proxy(server) as (proxy, client):
        lock = client.lock(NAME, timeout=3, lock_class=Lock)
        await lock.acquire()
        await lock.extend(30)
        await asyncio.sleep(4)
        rule = proxy.on(RELEASE, Action.CUT_AFTER)
        await lock.release()
        assert rule.acted


async def test_unreachable_is_not_false(server: EmbeddedServer, redis: Redis) -> None:
    await redis.set(NAME, OTHER)
    async with through_proxy(server) as (proxy, client):
        hub_of(client).retry_for = 0.5
        lock = client.lock(NAME, lock_class=Lock)
        await lock.acquire(blocking=False)
        silent = proxy.on(ACQUIRE, Action.SWALLOW_REQUEST, skip=1)
        assert await lock.acquire(blocking_timeout=0.05) is False  # it was taken, and then the time was up
        assert silent.acted
        await proxy.cut()
        lost = proxy.on(ACQUIRE, Action.CUT_BEFORE, skip=1)
        waiting = asyncio.create_task(lock.acquire(blocking_timeout=0.2))
        await lost.fired.wait()
        proxy.refuse = True
        with pytest.raises(Unreachable) as caught:
            await waiting
        assert isinstance(caught.value, errors.ConnectionError)
    assert await queue_is_empty(redis)


async def test_the_client_is_closed_while_it_waits(make_client: MakeClient, redis: Redis) -> None:
    await redis.set(NAME, OTHER)
    client = make_client()
    waiting = await started(redis, client.lock(NAME, lock_class=Lock).acquire())
    coordinator = hub_of(client)
    await client.aclose()
    with pytest.raises(errors.ConnectionError, match="client was closed"):
        await waiting
    await close_implicit(coordinator)
    assert await queue_is_empty(redis)


async def test_closing_the_client_releases_nothing(make_client: MakeClient, redis: Redis) -> None:
    client = make_client()
    lock = client.lock(NAME, timeout=30, lock_class=Lock)
    await lock.acquire()
    await client.aclose()
    assert await lock.owned()  # on a new connection, as redis-py
    await lock.release()
    assert await is_free(redis)


async def test_extend_counts_from_when_the_time_left_was_true(server: EmbeddedServer, redis: Redis) -> None:
    """The time that the server's answer takes is not a gift: 10 seconds, 2 of which passed, and 10 more are 18."""
    async with through_proxy(server) as (proxy, client):
        lock = client.lock(NAME, timeout=10, lock_class=Lock)
        await lock.acquire()
        assert await lock.owned()  # the server knows the script
        slow = proxy.on(script(load("link/read").sha), Action.delay_reply(2), times=1)
        assert await lock.extend(10)
        assert slow.acted
        assert 17_000 < await redis.pttl(NAME) <= 18_050
        await lock.release()


# -- arguments and subclasses --------------------------------------------------------------------------


async def test_a_token_no_client_could_decode(lock: RedisLock, redis: Redis) -> None:
    assert await lock.acquire(token=b"\xff|")
    assert await lock.owned()
    assert await redis.get(NAME) == b"\xff|"
    await lock.release()


async def test_bad_arguments_are_refused_where_they_are_given(lock: RedisLock, client: Redis, redis: Redis) -> None:
    bad: Any
    for bad in ("", 5, "\ud800"):
        with pytest.raises((TypeError, ValueError)):
            client.lock(bad, lock_class=Lock)
        with pytest.raises((TypeError, ValueError)):
            lock.name = bad
    assert lock.name == NAME
    for name in ("}{", "{}{a}"):
        client.lock(name, timeout=0.01, lock_class=Lock)
    for bad in (-1, 0.0001, math.inf):
        with pytest.raises(ValueError):
            client.lock(NAME, lock_class=Lock, timeout=bad)
    with pytest.raises(ValueError, match="token"):
        await lock.acquire(token="")
    assert await is_free(redis)
    await lock.acquire()
    for bad in ("20", b"20", [20], object(), math.nan, Decimal("nan")):
        no_number = pytest.raises((TypeError, ValueError), match="must be a number of seconds")
        with no_number:
            client.lock(NAME, lock_class=Lock, timeout=bad)
        with no_number:
            await lock.acquire(blocking_timeout=bad)
        with no_number:
            await lock.extend(bad)
        with no_number:
            await client.lock(NAME, lock_class=Lock, sleep=bad).acquire(blocking_timeout=1, token="x")
    with pytest.raises(ValueError, match="finite"):
        await lock.extend(math.inf)
    with pytest.raises(TypeError, match="synchronous client"):
        BlockingRedis().lock(NAME, lock_class=Lock)


INSIDE = (
    *("do_acquire", "do_release", "do_extend", "do_reacquire", "register_scripts"),
    *("LUA_RELEASE_SCRIPT", "LUA_EXTEND_SCRIPT", "LUA_REACQUIRE_SCRIPT", "lua_release", "lua_extend", "lua_reacquire"),
)


async def test_what_would_never_be_called_cannot_be_overridden(lock: RedisLock, client: Redis) -> None:
    """It is refused when the class is made, also when it comes from another base."""
    client.lock(NAME)  # the first one of redis-py's locks sets attributes of its class
    for name in INSIDE:
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


# -- cancellation --------------------------------------------------------------------------------------

ACQUIRES: dict[str, dict[str, Any]] = {
    "wait": {},
    "limit": {"blocking_timeout": 30},
    "try": {"blocking": False},
    "token": {"token": "mine"},
}


@pytest.mark.parametrize("arguments", ACQUIRES.values(), ids=ACQUIRES)
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
async def test_a_cancelled_acquire_leaves_no_key(
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
async def test_a_cancelled_wait_leaves_no_ticket(lock: RedisLock, redis: Redis, arguments: dict[str, Any]) -> None:
    async def check(outcome: Outcome[bool]) -> None:
        assert not outcome.value
        await until(lambda: queue_is_empty(redis))
        assert await redis.get(NAME) == OTHER

    await redis.set(NAME, OTHER)
    await sweep(lambda: lock.acquire(**arguments), check)


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
async def test_a_cancelled_release_still_releases(
    lock: RedisLock, redis: Redis, operation: Callable[[RedisLock], Any]
) -> None:
    async def released() -> bool:
        return lock.local.token is None and await is_free(redis)

    async def check(outcome: Outcome[object]) -> None:
        await until(released)

    await lock.locked()
    result = await sweep(lambda: operation(lock), check)
    assert sum(result.cancellations.values()) >= 6


async def test_a_cancelled_release_may_be_repeated(lock: RedisLock, redis: Redis) -> None:
    await lock.acquire()
    first = asyncio.create_task(lock.release())
    await asyncio.sleep(0)  # it was sent
    first.cancel()
    await lock.release()  # finds the key gone, and knows who did it
    assert first.cancelled()
    assert await is_free(redis)


@pytest.mark.real
def test_the_end_of_the_loop_does_not_release(server: EmbeddedServer) -> None:
    async def once_a_minute() -> bool:
        async with server.client() as client:
            lock = client.lock(NAME, timeout=60, blocking=False, lock_class=Lock)
            acquired: bool = await lock.acquire()
            return acquired

    assert asyncio.run(once_a_minute())
    assert not asyncio.run(once_a_minute())


# -- waiting -------------------------------------------------------------------------------------------


async def test_a_waiter_does_not_poll(make_client: MakeClient, redis: Redis) -> None:
    holder, waiter = (make_client().lock(NAME, lock_class=Lock, sleep=0.001) for _ in range(2))
    for each in (holder, waiter):  # the server knows the scripts
        async with each:
            pass
    before = await calls(redis, "evalsha")
    await holder.acquire()
    waiting = await started(redis, waiter.acquire())
    for _ in range(200):
        await redis.ping()
    await holder.release()
    assert await waiting
    assert await calls(redis, "evalsha") - before == 3, "acquire, queue, release: none to wake up"


async def test_a_lock_that_is_extended_to_its_end_is_handed_over(lock: RedisLock, client: Redis, redis: Redis) -> None:
    """Waiters for this lock are notified. A key that just ends would be noticed at the next look only."""
    await lock.acquire()
    waiting = asyncio.create_task(client.lock(NAME, timeout=30, lock_class=Lock).acquire())

    async def queued() -> bool:
        return not await queue_is_empty(redis)

    await until(queued)
    await lock.extend(-1000)
    async with asyncio.timeout(0.05):
        assert await waiting


async def test_false_only_when_the_time_is_up(lock: RedisLock, redis: Redis) -> None:
    await redis.set(NAME, OTHER)
    lock.sleep = 10
    for token in (None, "mine"):
        start = asyncio.get_running_loop().time()
        assert await lock.acquire(blocking_timeout=5, token=token) is False
        assert 4.99 < asyncio.get_running_loop().time() - start < 5.1


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
