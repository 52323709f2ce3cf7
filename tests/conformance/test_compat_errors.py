"""`redis_sync_aio.compat.Lock`: the errors of redis-py's contract, over both locks, and those that are better."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis.exceptions
from redis.asyncio import Redis
from redis.asyncio.lock import Lock as RedisLock
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import LockError, LockNotOwnedError

from redis_sync_aio import CommandRefused, Unreachable
from redis_sync_aio.compat import Lock
from redis_sync_aio.embedded import EmbeddedServer

from ..conftest import MakeClient
from ..support.compat import (
    NAME,
    OTHER,
    is_free,
    near,
    queue_is_empty,
    started,
    through_proxy,
    until,
)
from ..support.compat import client as client
from ..support.compat import kind as kind
from ..support.compat import lock as lock
from ..support.inside import close_implicit, hub_of, load
from ..support.proxy import CUT_AFTER, CUT_BEFORE, ERROR, SWALLOW_REQUEST, script

# -- the contract: errors of connection and server -------------------------------------------------------


REDIS_PY_KEEPS_THE_TOKEN = tuple(map(int, redis.__version__.split(".")[:2])) >= (7, 2)
"""Whether redis-py's own lock can be released again after a release that failed."""


async def refused(
    kind: type[RedisLock], client: Redis, error: type[Exception], at_release: type[Exception] | None = None
) -> None:
    """Every operation that needs the server raises ``error`` itself."""
    lock = client.lock(NAME, timeout=10, lock_class=kind)
    lock.local.token = b"token"
    operations: list[Callable[[], Awaitable[object]]] = [
        lock.acquire,
        lambda: lock.acquire(blocking=False),
        lambda: lock.acquire(blocking_timeout=0.5),
        lambda: lock.acquire(token="mine"),
        lock.owned,
        lock.locked,
        lambda: lock.extend(10),
        lambda: lock.extend(10, True),
        lock.reacquire,
    ]
    for operation in operations:
        with pytest.raises(error) as caught:
            await operation()
        assert caught.type is error or caught.type is Unreachable
    with pytest.raises(at_release or error):
        await lock.release()
    if kind is Lock or REDIS_PY_KEEPS_THE_TOKEN:
        assert lock.local.token == b"token"
    with pytest.raises(error):
        async with lock:
            pytest.fail("entered")


async def test_without_permission(kind: type[RedisLock], redis: Redis, make_client: MakeClient) -> None:
    await redis.acl_setuser("narrow", enabled=True, nopass=True, channels=["*"], categories=["+@all"], keys=["else:*"])
    client = make_client(username="narrow", password="x")
    await refused(kind, client, redis_error("NoPermissionError"))


def redis_error(name: str) -> type[Exception]:
    error: type[Exception] = getattr(redis.exceptions, name)
    return error


@pytest.mark.timing
async def test_without_server(kind: type[RedisLock]) -> None:
    with EmbeddedServer() as server:
        client = server.client(socket_timeout=0.1, retry=Retry(NoBackoff(), 0))
        server.stop()
        coordinator = hub_of(client)
        coordinator.retry_for = 0.05
        await refused(kind, client, redis_error("ConnectionError"))
        await close_implicit(coordinator)
        await client.aclose()


async def test_out_of_memory(kind: type[RedisLock]) -> None:
    with EmbeddedServer() as server:
        async with server.client() as client:
            held = client.lock("held", timeout=10, lock_class=kind)
            await held.acquire()
            await client.config_set("maxmemory", 1)
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                await client.lock(NAME, lock_class=kind).acquire()
            await held.extend(10)
            await held.reacquire()
            await held.release()
            assert await is_free(client, "held")


# -- what is better: errors ------------------------------------------------------------------------------


@pytest.mark.parametrize("quiet", [False, True])
async def test_the_error_of_the_body_leaves(
    lock: RedisLock, redis: Redis, caplog: pytest.LogCaptureFixture, quiet: bool
) -> None:
    lock.raise_on_release_error = not quiet

    async def fail() -> None:
        async with lock:
            await redis.delete(NAME)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        await fail()
    notes = [] if quiet else ["redis_sync_aio: Cannot release a lock that's no longer owned"]
    assert getattr(caught.value, "__notes__", []) == notes
    assert bool(caplog.messages) is quiet


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
    assert await is_free(redis)  # it went on in the background
    assert lock.local.token is None


async def test_a_stale_release_frees_nobody_elses_lock(lock: RedisLock, redis: Redis) -> None:
    second = asyncio.Event()

    async def successor() -> bytes | None:
        async with lock:
            second.set()
            await asyncio.Event().wait()
        return None

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
    assert lock.local.token == theirs == await redis.get(NAME)
    await asyncio.create_task(lock.release())  # a task that acquired nothing acts for the object
    assert await is_free(redis)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_after_a_lost_lock_an_ended_task_acquired(lock: RedisLock, redis: Redis) -> None:
    await lock.acquire()
    await redis.delete(NAME)
    await asyncio.create_task(lock.acquire())
    await lock.release()
    assert await is_free(redis)


@pytest.mark.parametrize("fault", [CUT_AFTER, CUT_BEFORE], ids=["answer lost", "command lost"])
@pytest.mark.parametrize("token", [None, "mine"])
async def test_lost_connections_change_no_answer(
    server: EmbeddedServer, redis: Redis, fault: Any, token: str | None
) -> None:
    async with through_proxy(server) as (proxy, client):
        lock = client.lock(NAME, timeout=10, lock_class=Lock)
        async with lock:  # the server knows the scripts
            await lock.extend(10)
        rule = proxy.on(script(load("lock/acquire").sha), fault)
        assert await lock.acquire(blocking=False, token=token) is True
        assert rule.acted
        assert await lock.owned()
        rule = proxy.on(script(load("lock/renew").sha), fault)
        assert await lock.extend(10)
        assert rule.acted
        assert near(await redis.pttl(NAME), 20)
        rule = proxy.on(script(load("lock/release").sha), fault)
        await lock.release()
        assert rule.acted
        assert await is_free(redis)


@pytest.mark.parametrize(
    ("answer", "name", "at_release"),
    [
        ("OOM command not allowed", "OutOfMemoryError", None),
        ("NOPERM this user has no permissions", "NoPermissionError", None),
        ("NOAUTH Authentication required.", "AuthenticationError", None),
        ("ERR something else", "ResponseError", None),
        # These are waited for: a release still goes on when it raises.
        ("LOADING Redis is loading the dataset in memory", "BusyLoadingError", Unreachable),
        ("MISCONF Redis is configured to save RDB snapshots", "ResponseError", Unreachable),
    ],
)
@pytest.mark.timing
async def test_an_answer_that_is_an_error(
    server: EmbeddedServer, answer: str, name: str, at_release: type[Exception] | None
) -> None:
    error = redis_error(name)
    async with through_proxy(server) as (proxy, client):
        hub_of(client).retry_for = 0.1 if at_release else 10
        rule = proxy.on("EVALSHA", ERROR(answer), times=None)
        await refused(Lock, client, error, at_release)
        with pytest.raises(error) as caught:
            await client.lock(NAME, lock_class=Lock).locked()
        assert isinstance(caught.value.__cause__, CommandRefused)
        rule.cancel()


@pytest.mark.timing
async def test_an_extended_lock_is_released_for_sure(server: EmbeddedServer, redis: Redis) -> None:
    async with through_proxy(server) as (proxy, client):
        lock = client.lock(NAME, timeout=0.1, lock_class=Lock)
        async with lock:  # the server knows the scripts
            pass
        await lock.acquire()
        await redis.set("clock", 0, px=150)
        await lock.extend(30)
        await until(lambda: is_free(redis, "clock"))
        rule = proxy.on(script(load("lock/release").sha), CUT_AFTER)
        await lock.release()
        assert rule.acted


@pytest.mark.timing
async def test_out_of_reach_is_not_false(server: EmbeddedServer, redis: Redis) -> None:
    await redis.set(NAME, OTHER)
    asked = script(load("lock/acquire").sha)
    async with through_proxy(server) as (proxy, client):
        hub_of(client).retry_for = 0.5
        lock = client.lock(NAME, lock_class=Lock)
        await lock.acquire(blocking=False)
        silent = proxy.on(asked, SWALLOW_REQUEST, skip=1)
        assert await lock.acquire(blocking_timeout=0.05) is False  # it was taken, and then the time was up
        assert silent.acted
        await proxy.cut()
        lost = proxy.on(asked, CUT_BEFORE, skip=1)
        waiting = asyncio.create_task(lock.acquire(blocking_timeout=0.2))
        await lost.fired.wait()
        proxy.refuse = True
        with pytest.raises(Unreachable) as caught:
            await waiting
        assert isinstance(caught.value, redis_error("ConnectionError"))
    assert await queue_is_empty(redis)


async def test_the_client_is_closed_while_it_waits(make_client: MakeClient, redis: Redis) -> None:
    await redis.set(NAME, OTHER)
    client = make_client()
    waiting = await started(redis, client.lock(NAME, lock_class=Lock).acquire())
    coordinator = hub_of(client)
    await client.aclose()
    with pytest.raises(redis_error("ConnectionError"), match="client was closed"):
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


async def test_nothing_is_remembered(lock: RedisLock, client: Redis, redis: Redis) -> None:
    await redis.set(NAME, OTHER)
    assert not await lock.acquire(blocking_timeout=0.01)
    await redis.delete(NAME)
    for _ in range(2):
        await lock.acquire()
        assert hub_of(client).resources == {}
        await lock.extend(10)
        await lock.release()
        assert hub_of(client).resources == {}


async def test_a_key_of_another_type(lock: RedisLock, redis: Redis) -> None:
    await redis.lpush(NAME, "no lock")
    for operation in (lock.acquire, lock.locked):
        with pytest.raises(redis_error("ResponseError"), match="WRONGTYPE"):
            await operation()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"name": ""}, ValueError),
        ({"name": "}{"}, None),
        ({"name": "{}{a}"}, None),
        ({"name": 5}, TypeError),
        ({"timeout": -1}, ValueError),
        ({"timeout": 0.0001}, ValueError),
        ({"timeout": 0.01}, None),
        ({"timeout": float("nan")}, ValueError),
        ({"timeout": float("inf")}, ValueError),
        ({"timeout": "5"}, TypeError),
        ({"name": "{a}b"}, None),
    ],
)
def test_bad_arguments(client: Redis, options: dict[str, Any], error: type[Exception] | None) -> None:
    arguments = {"name": NAME, **options, "lock_class": Lock}
    if error is None:
        client.lock(**arguments)
        return
    with pytest.raises(error):
        client.lock(**arguments)


async def test_bad_arguments_of_calls(lock: RedisLock, redis: Redis) -> None:
    with pytest.raises(ValueError, match="token"):
        await lock.acquire(token="")
    assert await is_free(redis)
    await lock.acquire()
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="additional_time"):
            await lock.extend(bad)
    lock.timeout = 0
    with pytest.raises(LockError, match="no timeout"):
        await lock.reacquire()
    await lock.release()


async def test_a_token_set_by_hand_may_be_text(make_client: MakeClient, redis: Redis) -> None:
    first, second = (make_client().lock(NAME, timeout=10, lock_class=Lock) for _ in range(2))
    await first.acquire()
    second.local.token = first.local.token.decode()
    assert await second.owned()
    assert await second.extend(10)
    await second.release()
    assert second.local.token is None
    assert await is_free(redis)


async def test_a_token_no_client_could_decode(lock: RedisLock, redis: Redis) -> None:
    assert await lock.acquire(token=b"\xff|")
    assert await lock.owned()
    assert await redis.get(NAME) == b"\xff|"
    await lock.release()


def test_a_client_that_is_not_supported() -> None:
    with pytest.raises(TypeError, match="synchronous client"):
        redis.Redis().lock(NAME, lock_class=Lock)
