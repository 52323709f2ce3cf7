"""Errors of common mistakes say what is known, and what to do instead."""

from __future__ import annotations

import asyncio
import copy
import importlib
import os
import pickle
import re
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any, cast
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
from redis_sync_aio.testing.faults import FaultProxy

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
    with pytest.raises(TypeError, match=r"'raise_on_release_error': .* contextlib\.suppress\(LeaseLost\)"):
        make(Redis(), raise_on_release_error=False)


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


ORDERS: Any = "orders"
SEVERAL: Any = ["orders", "customers"]
SWAPPED: dict[str, Callable[[Any], object]] = {
    "AsyncLock": lambda client: AsyncLock(ORDERS, client),
    "AsyncReentrantLock": lambda client: AsyncReentrantLock(ORDERS, client),
    "AsyncRobustLock": lambda client: AsyncRobustLock(ORDERS, client),
    "AsyncReadWriteLock": lambda client: AsyncReadWriteLock(ORDERS, client),
    "AsyncSemaphore": lambda client: AsyncSemaphore(ORDERS, client, limit=3),
    "AsyncMultiLock": lambda client: AsyncMultiLock(SEVERAL, client),
    "AsyncRedlock": lambda client: AsyncRedlock(ORDERS, cast("Any", [client, Redis(port=1)])),
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
    with pytest.raises(ImportError, match="cannot import name 'Nothing' from 'redis_sync_aio'"):
        exec("from redis_sync_aio import Nothing", {})


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
    several: Any
    for several in (given, [given, given]):
        with pytest.raises(TypeError) as caught:
            AsyncRedlock(several, NAME)
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


NO_ANSWER: dict[str, tuple[Callable[[Coordinator, Any], Awaitable[object]], str]] = {
    "acquire": (lambda sync, _: sync.lock("other").acquire(), r"did not answer the acquire of 'other' within"),
    "release": (lambda _, writer: writer.release(), r"did not (answer|confirm) the release of 'job'"),
    "downgrade": (
        lambda sync, writer: sync.read_write_lock(NAME).downgrade(writer),
        "did not answer the downgrade of 'job' (within|in time)",
    ),
    "event": (lambda sync, _: sync.event(NAME).wait(), r"did not answer the wait for 'job' (within .* s|in time)"),
    "latch": (
        lambda sync, _: AsyncCountDownLatch(sync, NAME, 2).wait(timeout=30),
        r"did not answer the wait for 'job' (within .* s|in time)",
    ),
    "barrier": (
        lambda sync, _: AsyncBarrier(sync, NAME, 2).wait(timeout=1),
        r"did not answer the wait for 'job' (within .* s|in time)",
    ),
}


@pytest.mark.parametrize("push", ["auto", "never"])
@pytest.mark.parametrize(("ask", "words"), NO_ANSWER.values(), ids=NO_ANSWER)
async def test_no_answer_says_to_what(
    server: EmbeddedServer, push: Any, ask: Callable[[Coordinator, Any], Awaitable[object]], words: str
) -> None:
    """The caller does different things then. A waiter of an event acquires nothing, and its error says so."""
    async with FaultProxy(server) as proxy, proxy.client() as client:
        sync = Coordinator(client, push=push, retry_for=2, exit_timeout=0.5)
        writer = await sync.read_write_lock(NAME).write().acquire()
        await sync.lock("connected").locked()
        proxy.refuse = True
        await proxy.cut()
        with pytest.raises(Unreachable, match=words):
            await ask(sync, writer)
        await sync.aclose()


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
def test_an_integration_without_its_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, module: str, library: str, extra: str
) -> None:
    """As the command line does without typer."""
    for loaded in [*sys.modules]:
        if loaded.startswith(("redis_sync_aio.contrib", f"{library}.")):
            monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(f"redis_sync_aio.{module}")
    assert f"redis_sync_aio.{module} needs {library}: run  pip install '{extra}'" in str(caught.value)


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


# -- an error of a request whose time is up says why, and what to do ----------------------------------------


HERE = f"{socket.gethostname()[:32]}:{os.getpid()}"
ITSELF = "If the holder is the task that asks, it waits for itself"


async def message(asked: Any, timeout: float = 0.2, **options: Any) -> str:
    with pytest.raises(AcquireTimeout) as caught:
        await asked.acquire(timeout=timeout, **options)
    return str(caught.value)


@pytest.mark.parametrize("share", [False, True])
async def test_permits_that_this_process_holds(sync: Coordinator, other: Coordinator, share: bool) -> None:
    ours, theirs = (AsyncSemaphore(one, NAME, limit=3, share=share) for one in (sync, other))
    async with ours.acquire(weight=2), ours:
        assert f"this process holds 3 of them. {ITSELF}" in await message(ours)
        assert f"held by {HERE}; wait longer" in await message(theirs)


@pytest.mark.parametrize("names", [["a", "b"], ["{t}:a", "{t}:b"]])
async def test_several_without_an_answer(server: EmbeddedServer, names: list[str]) -> None:
    """Nobody is blamed for holding what may be free."""
    async with FaultProxy(server) as proxy, proxy.client() as client, Coordinator(client, response_timeout=30) as sync:
        lock = AsyncMultiLock(sync, names)
        async with lock:
            pass
        proxy.black_hole = True
        with pytest.raises(AcquireTimeout, match=r"Redis has not answered yet about .*; allow more time") as caught:
            await lock.acquire(timeout=2)
        assert not caught.value.answered
        proxy.black_hole = False
        async with AsyncLock(sync, "c"):
            lease = await lock.acquire()
            with pytest.raises(AcquireTimeout, match="this process holds") as caught:
                await lock.acquire(timeout=2)
            assert caught.value.answered
            await lease.release()


SIDES: dict[str, Callable[[AsyncReadWriteLock], Any]] = {
    "read": AsyncReadWriteLock.read,
    "write": AsyncReadWriteLock.write,
}


@pytest.mark.parametrize(
    ("held", "asked", "use"),
    [
        ("read", "write", "release that lease before you acquire the write side"),
        ("write", "read", "go on with that lease"),
        ("write", "write", "go on with that lease"),
    ],
)
async def test_a_side_that_this_process_holds(
    sync: Coordinator, other: Coordinator, held: str, asked: str, use: str
) -> None:
    ours, theirs = AsyncReadWriteLock(sync, NAME), AsyncReadWriteLock(other, NAME)
    lease = await SIDES[held](ours).acquire()  # without a body: it may be for another task to release
    assert f"this process holds it. {ITSELF}: {use}" in await message(SIDES[asked](ours))
    assert f"held by {HERE}; wait longer" in await message(SIDES[asked](theirs))
    await lease.release()


async def test_advice_for_a_call_that_does_not_wait_fits_every_primitive(sync: Coordinator) -> None:
    """Elections and idempotent functions have no `try_acquire`."""
    advice = "is taken, and timeout=0 means do not wait: pass a timeout, or try again later"

    async def run() -> None: ...

    async with AsyncLock(sync, NAME):
        with pytest.raises(AcquireTimeout, match=advice):
            await asyncio.create_task(LeaderElection(sync, NAME).lead(timeout=0).__aenter__())
        with pytest.raises(AcquireTimeout, match=advice):
            await asyncio.create_task(idempotent(sync, NAME, timeout=0)(run)())


async def test_a_reentrant_lock_that_another_task_of_this_process_holds(sync: Coordinator, other: Coordinator) -> None:
    ours, theirs = (AsyncReentrantLock(one, NAME) for one in (sync, other))
    async with ours:
        told: str = await asyncio.create_task(message(ours))
        assert "another task, or owner, of this process holds it" in told
        assert "acquire(identity=...)" in told
        assert "AsyncReentrantLock" not in told
        assert f"held by {HERE}; wait longer" in await asyncio.create_task(message(theirs))
        with pytest.raises(TypeError, match="an identity for 'job' must be hashable"):
            await ours.acquire(identity=[])  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", [0, 0.2])
async def test_one_of_several_that_this_process_holds(sync: Coordinator, other: Coordinator, timeout: float) -> None:
    lease = await AsyncLock(sync, "b").acquire()  # without a body: it may be for another task to release
    assert f"this process holds 'b'. {ITSELF}" in await message(AsyncMultiLock(sync, ["a", "b"]), timeout)
    theirs = f"'b' is held by {HERE};" if timeout else "others hold 'b' or wait for it"
    assert theirs in await message(AsyncMultiLock(other, ["a", "b"]), timeout)
    await lease.release()
