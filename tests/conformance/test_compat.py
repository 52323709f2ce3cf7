"""`redis_sync_aio.compat.Lock` beside the lock of redis-py: the same contract, each with the other, what is better.

The first part runs over both locks. What it asserts is what redis-py documents, and does.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import redis.exceptions
from redis.asyncio import Redis
from redis.asyncio.lock import Lock as RedisLock
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import LockError, LockNotOwnedError

from redis_sync_aio import AsyncLock, Backoff, CommandRefused, Unreachable, wait_until
from redis_sync_aio._implicit import coordinator_for
from redis_sync_aio._scripts import load
from redis_sync_aio.compat import Lock
from redis_sync_aio.embedded import EmbeddedServer

from ..conftest import MakeClient
from ..support.proxy import CUT_AFTER, CUT_BEFORE, ERROR, SWALLOW_REQUEST, FaultProxy, script
from ..support.sweep import Outcome, sweep

NAME = "compat"
OTHER = b"somebody else"
KINDS: dict[str, type[RedisLock]] = {"redis-py": RedisLock, "compat": Lock}
UNLOCKED = "Cannot release a lock that's not owned or is already unlocked."

Condition = Callable[[], Awaitable[object]]
MakeLock = Callable[..., RedisLock]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> type[RedisLock]:
    """The lock under test."""
    return KINDS[request.param]


@pytest.fixture(params=[False, True], ids=["bytes", "decoded"])
def client(request: pytest.FixtureRequest, redis: Redis, make_client: MakeClient) -> Redis:
    """The client of the lock under test; `redis` looks at the same database."""
    return make_client(decode_responses=request.param)


@pytest.fixture
def make(client: Redis, kind: type[RedisLock]) -> MakeLock:
    """Build the lock under test; it polls often if it polls."""

    def make(name: str | bytes = NAME, **options: Any) -> RedisLock:
        options.setdefault("sleep", 0.005)
        return client.lock(name, lock_class=kind, **options)

    return make


@asynccontextmanager
async def through_proxy(server: EmbeddedServer) -> AsyncIterator[tuple[FaultProxy, Redis]]:
    """A client whose connections can be disturbed. In the end all that it still has to undo is undone."""
    async with FaultProxy((server.host, server.port or 0)) as proxy, Redis.from_url(proxy.url) as client:
        coordinator = coordinator_for(client)
        try:
            yield proxy, client
        finally:
            proxy.refuse = False
            await coordinator.close()


async def until(condition: Condition, timeout: float = 5) -> None:
    await wait_until(condition, Backoff(initial=0.001, cap=0.01), timeout)


async def is_free(redis: Redis, name: str = NAME) -> bool:
    return not await redis.exists(name)


async def calls(redis: Redis, *names: str) -> int:
    """How often clients have sent these commands."""
    stats = await redis.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in names)


async def started(redis: Redis, coroutine: Awaitable[bool]) -> asyncio.Task[bool]:
    """Run an acquire until the server has seen its first try."""
    before = await calls(redis, "set", "evalsha")
    task = asyncio.ensure_future(coroutine)

    async def tried() -> bool:
        return await calls(redis, "set", "evalsha") > before

    await until(tried)
    return task


def near(milliseconds: int, seconds: float) -> bool:
    """So many seconds, of which up to 2 have passed."""
    return (seconds - 2) * 1000 < milliseconds <= seconds * 1000


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


# -- the contract: errors of connection and server -------------------------------------------------------


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


async def test_without_server(kind: type[RedisLock]) -> None:
    with EmbeddedServer() as server:
        client = server.client(socket_timeout=0.1, retry=Retry(NoBackoff(), 0))
        server.stop()
        coordinator = coordinator_for(client)
        coordinator.retry_for = 0.05
        await refused(kind, client, redis_error("ConnectionError"))
        await coordinator.close()
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


@pytest.fixture
def lock(client: Redis) -> RedisLock:
    return client.lock(NAME, timeout=30, lock_class=Lock, sleep=0.005)


async def queue_is_empty(redis: Redis) -> bool:
    return (await AsyncLock(redis, NAME).statistics()).waiters == 0


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
    for lock in (holder, waiter):  # the server knows the scripts
        async with lock:
            pass
    before = await calls(redis, "evalsha", "eval")
    await holder.acquire()
    waiting = await started(redis, waiter.acquire())
    for _ in range(200):
        await redis.ping()
    await holder.release()
    assert await waiting
    assert await calls(redis, "evalsha", "eval") - before == 3  # acquire, queue, release: none to wake up


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
            return (await AsyncLock(redis, NAME).statistics()).waiters == number + 1

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
                coordinator_for(client).retry_for = 0.05
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
        rule = proxy.on(script(load("acquire").sha), fault)
        assert await lock.acquire(blocking=False, token=token) is True
        assert rule.acted
        assert await lock.owned()
        rule = proxy.on(script(load("renew").sha), fault)
        assert await lock.extend(10)
        assert rule.acted
        assert near(await redis.pttl(NAME), 20)
        rule = proxy.on(script(load("release").sha), fault)
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
async def test_an_answer_that_is_an_error(
    server: EmbeddedServer, answer: str, name: str, at_release: type[Exception] | None
) -> None:
    error = redis_error(name)
    async with through_proxy(server) as (proxy, client):
        coordinator_for(client).retry_for = 0.02
        rule = proxy.on("EVALSHA", ERROR(answer), times=None)
        await refused(Lock, client, error, at_release)
        with pytest.raises(error) as caught:
            await client.lock(NAME, lock_class=Lock).locked()
        assert isinstance(caught.value.__cause__, CommandRefused)
        rule.cancel()


async def test_an_extended_lock_is_released_for_sure(server: EmbeddedServer, redis: Redis) -> None:
    async with through_proxy(server) as (proxy, client):
        lock = client.lock(NAME, timeout=0.1, lock_class=Lock)
        async with lock:  # the server knows the scripts
            pass
        await lock.acquire()
        await redis.set("clock", 0, px=150)
        await lock.extend(30)
        await until(lambda: is_free(redis, "clock"))
        rule = proxy.on(script(load("release").sha), CUT_AFTER)
        await lock.release()
        assert rule.acted


async def test_out_of_reach_is_not_false(server: EmbeddedServer, redis: Redis) -> None:
    await redis.set(NAME, OTHER)
    asked = script(load("acquire").sha)
    async with through_proxy(server) as (proxy, client):
        coordinator_for(client).retry_for = 0.5
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
    coordinator = coordinator_for(client)
    await client.aclose()
    with pytest.raises(redis_error("ConnectionError"), match="client was closed"):
        await waiting
    await coordinator.close()
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
        assert coordinator_for(client).locals == {}
        await lock.extend(10)
        await lock.release()
        assert coordinator_for(client).locals == {}


async def test_a_key_of_another_type(lock: RedisLock, redis: Redis) -> None:
    await redis.lpush(NAME, "no lock")
    for operation in (lock.acquire, lock.locked):
        with pytest.raises(redis_error("ResponseError"), match="WRONGTYPE"):
            await operation()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"name": ""}, ValueError),
        ({"name": "}{"}, ValueError),
        ({"name": "{}{a}"}, ValueError),
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
