"""Errors of common mistakes say what is known, and what to do instead."""

from __future__ import annotations

import asyncio
import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis

import redis_sync_aio
from redis_sync_aio import (
    AcquireTimeout,
    AsyncBarrier,
    AsyncCountDownLatch,
    AsyncEvent,
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncRedlock,
    AsyncReentrantLock,
    AsyncRobustLock,
    AsyncSemaphore,
    Coordinator,
    FenceGate,
    LeaderElection,
    SyncError,
    Unreachable,
    WouldDeadlock,
    idempotent,
    once,
    once_per,
    synchronized,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import PermissionDenied, WrongContext, WrongKeyType

from ..support.inside import NAMES_OF_OTHERS

NAME = "job"

Make = Callable[..., Any]
LOCKS: dict[str, Make] = {
    "lock": lambda client, **options: AsyncLock(client, NAME, **options),
    "reentrant": lambda client, **options: AsyncReentrantLock(client, NAME, **options),
    "semaphore": lambda client, **options: AsyncSemaphore(client, NAME, limit=2, **options),
    "readers": lambda client, **options: AsyncReadWriteLock(client, NAME, **options).read(),
    "several": lambda client, **options: AsyncMultiLock(client, [NAME, "another"], **options),
    "redlock": lambda client, **options: AsyncRedlock([client, Redis(), Redis()], NAME, **options),
}
each_lock = pytest.mark.parametrize("make", LOCKS.values(), ids=LOCKS)


@each_lock
def test_words_of_redis_py(make: Make) -> None:
    """``timeout`` is what redis-py calls the ttl; each of its words is answered with what there is instead."""
    with pytest.raises(TypeError, match=r"has no argument 'timeout': in redis-py that is .* Here it is ttl="):
        make(Redis(), timeout=10)
    with pytest.raises(TypeError, match=r"has no argument 'blocking_timeout': .* acquire\(\)"):
        make(Redis(), blocking_timeout=10)


@each_lock
def test_an_acquire_in_words_of_redis_py(make: Make) -> None:
    """Each call is answered with the right spelling, and sends nothing."""
    lock = make(Redis())
    wrong: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: lock.acquire(blocking=False), r"acquire\(\) has no argument 'blocking': use try_acquire\(\)"),
        (lambda: lock.acquire(blocking_timeout=5), r"'blocking_timeout': how long to wait is timeout="),
        (lambda: lock.acquire(token="me"), r"'token': each lease gets a token of its own, lease\.token"),
        (lambda: lock.acquire(5), r"acquire\(\) takes its arguments by name: .*acquire\(timeout=5\)"),
        (lambda: lock.acquire(False), r"acquire\(\), which waits, or try_acquire\(\), which does not"),
        (lambda: lock.try_acquire(timeout=5), r"it never waits; acquire\(timeout=5\) waits for 5 seconds"),
        (lambda: lock.try_acquire(blocking=False), r"'blocking': it never waits"),
        (lambda: lock.acquire(timeout="5"), r"timeout must be seconds"),
        (lambda: lock.acquire(unknown=5), r"unexpected keyword argument 'unknown'"),
    )
    for refused, right in wrong:
        with pytest.raises(TypeError, match=right) as caught:
            refused()
        assert type(lock).__name__ in str(caught.value) or "timeout must" in right or "unexpected" in right


def _swapped_redlock(clients: Any) -> object:
    return AsyncRedlock(ORDERS, clients)


ORDERS: Any = "orders"
SEVERAL: Any = ["orders", "customers"]
SWAPPED: dict[str, Callable[[Any], object]] = {
    "AsyncLock": lambda client: AsyncLock(ORDERS, client),
    "AsyncReentrantLock": lambda client: AsyncReentrantLock(ORDERS, client),
    "AsyncRobustLock": lambda client: AsyncRobustLock(ORDERS, client),
    "AsyncReadWriteLock": lambda client: AsyncReadWriteLock(ORDERS, client),
    "AsyncSemaphore": lambda client: AsyncSemaphore(ORDERS, client, limit=3),
    "AsyncMultiLock": lambda client: AsyncMultiLock(SEVERAL, client),
    "AsyncRedlock": lambda client: _swapped_redlock([client, Redis(port=1)]),
    "AsyncEvent": lambda client: AsyncEvent(ORDERS, client),
    "AsyncCountDownLatch": lambda client: AsyncCountDownLatch(ORDERS, client, 3),
    "AsyncBarrier": lambda client: AsyncBarrier(ORDERS, client, 3),
    "LeaderElection": lambda client: LeaderElection(ORDERS, client),
    "FenceGate": lambda client: FenceGate(ORDERS, client),
    "synchronized": lambda client: synchronized(ORDERS, client),
    "once": lambda client: once(ORDERS, client),
    "once_per": lambda client: once_per(ORDERS, client),
    "idempotent": lambda client: idempotent(ORDERS, client),
}


@pytest.mark.parametrize("client", [Redis(), Coordinator(Redis())], ids=["client", "coordinator"])
@pytest.mark.parametrize("called", SWAPPED)
def test_a_name_before_its_client_is_said_to_be_swapped(called: str, client: Any) -> None:
    with pytest.raises(TypeError, match=rf"arguments of {called}\(\) are swapped: write {called}\(clients?, names?, "):
        SWAPPED[called](client)


@pytest.mark.parametrize("name", [*NAMES_OF_OTHERS, "LimitMismatch", "ReadSide"])
def test_a_name_of_another_library_or_module_is_answered_with_the_import(name: str) -> None:
    """The import that the error tells works."""
    with pytest.raises(ImportError) as caught:
        exec(f"from redis_sync_aio import {name}", {})
    right = re.search("write `(.*)`", str(caught.value))
    assert right is not None
    exec(right[1], {})
    with pytest.raises(AttributeError, match="write `from redis_sync_aio"):
        getattr(redis_sync_aio, name)


def test_a_name_that_nothing_has_is_missing_as_anywhere() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Nothing' from 'redis_sync_aio'"):
        exec("from redis_sync_aio import Nothing", {})
    assert not hasattr(redis_sync_aio, "Lock")


ADDRESS = "redis://user:secret@localhost"
"""What is often passed in place of a client."""


@pytest.mark.parametrize("given", [ADDRESS, ADDRESS.encode(), urlsplit(ADDRESS), {"url": ADDRESS}], ids=type)
@pytest.mark.parametrize(
    "make", [*LOCKS.values(), lambda client, **_: Coordinator(client)], ids=[*LOCKS, "coordinator"]
)
def test_an_address_in_place_of_a_client_is_never_quoted(make: Make, given: Any) -> None:
    """It may have a password."""
    with pytest.raises(TypeError) as caught:
        make(given)
    assert "secret" not in str(caught.value)
    if isinstance(given, (str, bytes)):
        assert "takes a client, not an address: for an address use Coordinator.from_url(...)" in str(caught.value)


@pytest.mark.parametrize("given", [ADDRESS, [ADDRESS, f"{ADDRESS}:6380"]], ids=["one", "two"])
def test_addresses_in_place_of_several_clients_are_never_quoted(given: Any) -> None:
    with pytest.raises(TypeError, match="from_url") as caught:
        AsyncRedlock(given, NAME)
    assert "secret" not in str(caught.value)


def test_an_argument_of_the_client_says_where_it_goes() -> None:
    """`from_url` takes those of the coordinator."""
    options: dict[str, Any] = {"decode_responses": True}
    with pytest.raises(TypeError, match=r"client go into client_options=\{'decode_responses': …\}"):
        Coordinator.from_url("redis://localhost", **options)


async def test_a_reentrant_lock_under_a_plain_one_says_what_to_do(sync: Coordinator) -> None:
    """The advice is not what the caller has just done."""
    async with sync.lock(NAME):
        with pytest.raises(WouldDeadlock, match="use AsyncReentrantLock for both, or pass the lease down"):
            await sync.reentrant_lock(NAME).acquire(timeout=5)


@pytest.mark.parametrize("push", ["auto", "never"])
async def test_no_answer_says_to_what(push: Any) -> None:
    """A request that was not granted, or a body whose end was not confirmed: the caller does different things."""
    with EmbeddedServer(port=0) as away:
        async with away.client() as client, Coordinator(client, push=push, retry_for=2, exit_timeout=0.5) as sync:
            lease = await sync.lock(NAME).acquire()
            away.kill()
            with pytest.raises(Unreachable, match="did not answer the acquire of 'other' within"):
                await sync.lock("other").acquire()
            with pytest.raises(Unreachable, match=r"did not (answer|confirm) the release of 'job'"):
                await lease.release()


@pytest.mark.parametrize("push", ["auto", "never"])
async def test_no_answer_to_a_downgrade_says_so(push: Any) -> None:
    with EmbeddedServer(port=0) as away:
        async with away.client() as client, Coordinator(client, push=push, retry_for=2) as sync:
            lock = sync.read_write_lock(NAME)
            writer = await lock.write().acquire()
            away.kill()
            with pytest.raises(Unreachable, match=f"did not answer the downgrade of '{NAME}' (within|in time)"):
                await lock.downgrade(writer)


WAITS: dict[str, Callable[[Coordinator, float | None], Awaitable[object]]] = {
    "event": lambda sync, timeout: AsyncEvent(sync, NAME).wait(timeout=timeout),
    "latch": lambda sync, timeout: AsyncCountDownLatch(sync, NAME, 2).wait(timeout=timeout),
    "barrier": lambda sync, timeout: AsyncBarrier(sync, NAME, 2).wait(timeout=timeout),
}


@pytest.mark.parametrize("timeout", [None, 30, 1], ids=["no timeout", "retry_for ends first", "timeout ends first"])
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
@pytest.mark.parametrize("push", ["auto", "never"])
async def test_no_answer_to_a_wait_says_so(
    push: Any, wait: Callable[[Coordinator, float | None], Awaitable[object]], timeout: float | None
) -> None:
    """A waiter of an event, a latch or a barrier acquires nothing, and its error does not say that it does."""
    with EmbeddedServer(port=0) as away:
        async with away.client() as client, Coordinator(client, push=push, retry_for=2) as sync:
            await sync.lock("other").locked()
            away.kill()
            with pytest.raises(Unreachable, match=f"did not answer the wait for '{NAME}' (within .* s|in time)"):
                await wait(sync, timeout)


@each_lock
def test_methods_of_redis_py(make: Make) -> None:
    """A method that redis-py's Lock has, and the lock here has not, is answered with the one of the lease."""
    lock = make(Redis())
    for name, instead in {"owned": "lease.check()", "extend": "of the lease", "reacquire": "is renewed"}.items():
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': .*{re.escape(instead)}") as caught:
            getattr(lock, name)
        assert (caught.value.name, caught.value.obj) == (name, lock)
    with pytest.raises(AttributeError, match=r"object has no attribute 'something'$"):
        lock.something  # noqa: B018


@each_lock
def test_an_ignored_error_of_the_release(make: Make) -> None:
    """The hint for ``raise_on_release_error`` says how to ignore the error."""
    with pytest.raises(TypeError, match=r"'raise_on_release_error': .* contextlib\.suppress\(LeaseLost\)"):
        make(Redis(), raise_on_release_error=False)


async def test_rights_without_scripts_name_scripts_first(redis: Redis, server: EmbeddedServer) -> None:
    """They are what the rule lacks; the commands of the way without them are many."""
    admin: Any = redis
    await admin.execute_command("ACL", "SETUSER", "few", "reset", "on", ">secret", "~*", "&*", "+get", "+hello")
    async with server.client(username="few", password="secret") as client, Coordinator(client) as sync:
        with pytest.raises(PermissionDenied, match=r"'evalsha'.*; without scripts it answered NOPERM"):
            await sync.lock(NAME).acquire()
    await admin.execute_command("ACL", "DELUSER", "few")


async def test_a_port_of_something_else_is_said_to_be_one() -> None:
    """The first byte of its answer says nothing to a reader."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)  # closing sooner would refuse what the client writes, and it would read nothing
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    web = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{web.sockets[0].getsockname()[1]}"
    async with web, Coordinator.from_url(url, retry_for=2) as sync:
        with pytest.raises(Unreachable, match="does not speak Redis"):
            await sync.lock(NAME).acquire()


def test_a_long_value_is_shortened() -> None:
    """The message is for a log: it is not the 900 characters of what was given by mistake."""
    client = Redis()
    mistakes: list[Callable[[], object]] = [
        lambda: AsyncLock(client, ["x"] * 900),  # type: ignore[arg-type]
        lambda: AsyncLock(client, NAME, ttl=["x"] * 900),  # type: ignore[arg-type]
        lambda: AsyncSemaphore(client, NAME, limit="x" * 900),  # type: ignore[arg-type]
    ]
    for mistake in mistakes:
        with pytest.raises(TypeError, match="…") as caught:
            mistake()
        assert len(str(caught.value)) < 250


def test_a_semaphore_on_several_servers() -> None:
    """Refused with the reason: what is a majority for one lock is none for the sum of permits."""
    with pytest.raises(TypeError, match="a majority for each permit would not bound"):
        AsyncSemaphore([Redis(), Redis(), Redis()], NAME, limit=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("response_timeout", [None, 0.5])
@pytest.mark.real
async def test_tls_on_a_port_without(server: EmbeddedServer, response_timeout: float | None) -> None:
    """The server says nothing to a TLS handshake; so the error says what that may mean."""
    async with (
        Redis.from_url(server.url.replace("redis://", "rediss://")) as client,
        Coordinator(client, response_timeout=response_timeout) as sync,
    ):
        with pytest.raises(Unreachable, match="use redis:// instead of rediss://"):
            await AsyncLock(sync, NAME).acquire(timeout=1.5)


@pytest.mark.parametrize("push", ["auto", "never"])
async def test_for_how_long_redis_did_not_answer(push: Any) -> None:
    async with Redis(port=1) as client, Coordinator(client, retry_for=0.5, push=push) as sync:
        with pytest.raises(Unreachable, match=r"did not answer .* within \d\.\d seconds: ConnectionError"):
            await AsyncLock(sync, NAME).acquire()


@each_lock
async def test_another_event_loop(redis: Redis, make: Make) -> None:
    """The error names the lock, and the lease."""
    async with Coordinator(redis) as sync:
        lock = make(sync)
        lease = None if isinstance(lock, AsyncRedlock) else await lock.acquire()

        async def elsewhere() -> None:
            with pytest.raises(WrongContext, match=r"'(job|another)'.* cannot be used here: .* another event loop"):
                await lock.acquire()
            if lease is not None:
                with pytest.raises(WrongContext, match=r"the lease on '(job|another)' cannot be used here"):
                    await lease.release()

        await asyncio.to_thread(asyncio.run, elsewhere())


HASH = re.compile(r"[0-9a-f]{40}|user_script")


@pytest.mark.parametrize("push", ["auto", "never"])
async def test_no_script_is_named(redis: Redis, push: Any) -> None:
    """Neither its hash nor its line: nobody can do anything with them."""
    async with Coordinator(redis, push=push) as sync:
        await redis.rpush(NAME, "data")
        with pytest.raises(WrongKeyType) as wrong:
            await AsyncLock(sync, NAME).acquire(timeout=5)
        await redis.config_set("maxmemory", "1mb")
        try:
            with pytest.raises(SyncError) as full:
                await AsyncLock(sync, "other").acquire(timeout=5)
        finally:
            await redis.config_set("maxmemory", "0")
    for caught in (wrong, full):
        assert not HASH.search(str(caught.value))
    assert "WRONGTYPE" in str(wrong.value)
    assert "OOM" in str(full.value)


@pytest.mark.parametrize("engine", ["lua", "watch"])
@pytest.mark.parametrize("push", ["auto", "never"])
@pytest.mark.parametrize("timeout", [0, 0.5])
async def test_data_under_the_name(redis: Redis, push: Any, engine: Any, timeout: float) -> None:
    """A key without a ttl that is no lock of ours is never free by itself: the error says what it has."""
    await redis.set(NAME, "my precious data")
    async with Coordinator(redis, push=push) as sync:
        lock = AsyncLock(sync, NAME, engine=engine)
        with pytest.raises(AcquireTimeout, match="its key has the value 'my precious data' and no ttl") as caught:
            await lock.acquire(timeout=timeout)
        assert "If it is data, give the lock another name" in str(caught.value)
        assert await lock.try_acquire() is None
        await redis.set(NAME, "a lock of another kind", px=60_000)
        with pytest.raises(AcquireTimeout) as caught:
            await lock.acquire(timeout=timeout)
        assert "no ttl" not in str(caught.value)
    assert await redis.get(NAME) == b"a lock of another kind"


async def test_a_lock_of_ours_without_a_ttl_is_no_data(sync: Coordinator, other: Coordinator) -> None:
    lease = await AsyncLock(other, NAME, ttl=None).acquire()
    with pytest.raises(AcquireTimeout, match=r"not free within 2\.0 seconds: held by "):
        await AsyncLock(sync, NAME).acquire(timeout=2)
    await lease.release()


class Orders:
    """The owner of a method."""

    async def charge(self, order: int) -> None: ...


def _decorators(client: Any) -> dict[str, Callable[[Any], object]]:
    return {
        "synchronized": synchronized(client, "{order}:{customer}"),
        "once_per": once_per(client, "{order}:{customer}"),
        "idempotent": idempotent(client, "{order}:{customer}"),
    }


@pytest.mark.parametrize("decorator", _decorators(Redis()))
def test_a_field_that_is_no_argument_names_the_function(decorator: str) -> None:
    """As it is called; not by the address of an object."""
    with pytest.raises(ValueError, match="refers to 'customer', which ") as caught:
        _decorators(Redis())[decorator](Orders().charge)
    assert "which Orders.charge() does not take: its arguments are 'order'" in str(caught.value)


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [
        ("contrib.fastapi", "fastapi", "redis_sync_aio[fastapi]"),
        ("contrib.aiohttp", "aiohttp", "redis_sync_aio[aiohttp]"),
        ("contrib.otel", "opentelemetry", "redis_sync_aio[otel]"),
        ("contrib.prometheus", "prometheus_client", "redis_sync_aio[prometheus]"),
        ("contrib.otel_instrumentor", "opentelemetry", "opentelemetry-instrumentation"),
    ],
)
def test_an_integration_without_its_library_says_what_to_install(module: str, library: str, extra: str) -> None:
    """As the command line does without typer."""
    code = f"import sys; sys.modules[{library!r}] = None; import redis_sync_aio.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert f"redis_sync_aio.{module} needs {library}: run  pip install '{extra}'" in done.stderr.splitlines()[-1]


async def test_a_lease_is_not_pickled_but_detached(sync: Coordinator) -> None:
    """Neither is it copied: two objects would stand for one possession. What cannot be detached says why not."""
    one, shared = sync.lock(NAME), sync.lock("shared", share=True)
    ways = {
        r"await lease\.detach\(\)": await one.acquire(),
        r"cannot be detached either: it has an identity": await sync.lock("other").acquire(identity="me"),
        r"cannot be detached either: tasks of this process share it": await shared.acquire(),
        r"Only leases of locks and semaphores can change hands": await sync.read_write_lock(NAME).write().acquire(),
    }
    for why, lease in ways.items():
        for duplicate in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=f"cannot be pickled or copied: .*{why}"):
                duplicate(lease)
        await lease.release()
