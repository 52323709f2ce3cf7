"""Errors of common mistakes say what is known, and what to do instead."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncRedlock,
    AsyncReentrantLock,
    AsyncSemaphore,
    Coordinator,
    SyncError,
    Unreachable,
    WrongContext,
    WrongKeyType,
)
from redis_sync_aio.embedded import EmbeddedServer

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
    with pytest.raises(TypeError, match=r"has no argument 'blocking_timeout': .* acquire\(\) and hold\(\)"):
        make(Redis(), blocking_timeout=10)


def test_a_long_value_is_shortened() -> None:
    """The message is for a log: it is not the 900 characters of what was given by mistake."""
    client = Redis()
    mistakes: list[Callable[[], object]] = [
        lambda: AsyncLock({"url": "x" * 900}, NAME),  # type: ignore[arg-type]
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
async def test_tls_on_a_port_without(server: EmbeddedServer, response_timeout: float | None) -> None:
    """The server says nothing to a TLS handshake; so the error says what that may mean."""
    async with (
        Redis.from_url(server.url.replace("redis://", "rediss://")) as client,
        Coordinator(client, response_timeout=response_timeout) as sync,
    ):
        with pytest.raises(Unreachable, match="use redis:// instead of rediss://"):
            await AsyncLock(sync, NAME).acquire(timeout=1.5)


@pytest.mark.parametrize("push", ["auto", "never"])
@pytest.mark.timing
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
@pytest.mark.timing
async def test_data_under_the_name(redis: Redis, push: Any, engine: Any, timeout: float) -> None:
    """A key without a ttl that is no lock of ours is never free by itself: the error says what it has."""
    await redis.set(NAME, "my precious data")
    async with Coordinator(redis, push=push) as sync:
        lock = AsyncLock(sync, NAME, engine=engine)
        with pytest.raises(AcquireTimeout, match="its key has the value 'my precious data' and no ttl") as caught:
            await lock.acquire(timeout=timeout)
        assert "If that is data, give the lock another name" in str(caught.value)
        assert await lock.try_acquire() is None
        await redis.set(NAME, "a lock of another kind", px=60_000)
        with pytest.raises(AcquireTimeout) as caught:
            await lock.acquire(timeout=timeout)
        assert "no ttl" not in str(caught.value)
    assert await redis.get(NAME) == b"a lock of another kind"


async def test_a_lock_of_ours_without_a_ttl_is_no_data(sync: Coordinator, other: Coordinator) -> None:
    async with AsyncLock(other, NAME, ttl=None):
        with pytest.raises(AcquireTimeout, match="others hold it or wait for it"):
            await AsyncLock(sync, NAME).acquire(timeout=0.5)
