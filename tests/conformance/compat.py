"""What the tests of `redis_sync_aio.compat.Lock` next to the lock of redis-py have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
from redis.asyncio import Redis
from redis.asyncio.lock import Lock as RedisLock

from redis_sync_aio import AsyncLock, Backoff, Unreachable, wait_until
from redis_sync_aio.compat import Lock
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import FaultProxy

from ..conftest import MakeClient
from ..support.inside import close_implicit, hub_of
from ..support.inspecting import calls

NAME = "compat"
OTHER = b"somebody else"
KINDS: dict[str, type[RedisLock]] = {"redis-py": RedisLock, "compat": Lock}

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


@pytest.fixture
def lock(client: Redis) -> RedisLock:
    return client.lock(NAME, timeout=30, lock_class=Lock, sleep=0.005)


@asynccontextmanager
async def through_proxy(server: EmbeddedServer) -> AsyncIterator[tuple[FaultProxy, Redis]]:
    """A client whose connections can be disturbed. In the end all that it still has to undo is undone."""
    async with FaultProxy(server) as proxy, proxy.client() as client:
        coordinator = hub_of(client)
        try:
            yield proxy, client
        finally:
            proxy.refuse = False
            await close_implicit(coordinator)


async def until(condition: Condition, timeout: float = 5) -> None:
    await wait_until(condition, Backoff(initial=0.001, cap=0.01), timeout)


async def is_free(redis: Redis, name: str = NAME) -> bool:
    return not await redis.exists(name)


async def queue_is_empty(redis: Redis) -> bool:
    return (await AsyncLock(redis, NAME).statistics()).waiting == 0


async def started(redis: Redis, coroutine: Awaitable[bool]) -> asyncio.Task[bool]:
    """Run an acquire until the server has seen its first try."""
    before = await calls(redis, "set", "evalsha")
    task = asyncio.ensure_future(coroutine)

    async def tried() -> bool:
        return await calls(redis, "set", "evalsha") > before

    await until(tried)
    return task


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


def near(milliseconds: int, seconds: float) -> bool:
    """So many seconds, of which up to 2 have passed; keys may be 50 ms younger than the virtual time."""
    return (seconds - 2) * 1000 < milliseconds <= seconds * 1000 + 50
