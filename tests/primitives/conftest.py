"""Every primitive that can be acquired, as one makes it: the suites of this folder run over all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncRedlock,
    AsyncReentrantLock,
    AsyncRobustLock,
    AsyncSemaphore,
    Coordinator,
)
from redis_sync_aio.embedded import EmbeddedServer

Make = Callable[..., Any]
"""Makes a primitive from coordinators, with options that all of them have; it is called "it", unless told a name."""


@dataclass(frozen=True)
class Primitive:
    """One way to acquire something."""

    label: str
    make: Make
    servers: int = 1
    """How many servers it needs."""
    alone: bool = True
    """Only one can have it at a time."""
    reenters: bool = False
    """The task that has it may acquire it again."""

    def __str__(self) -> str:
        return self.label


def _one(kind: Callable[..., Any], **own: Any) -> Make:
    return lambda syncs, name="it", **options: kind(syncs[0], name, **{**own, **options})


def _side(side: str, **own: Any) -> Make:
    return lambda syncs, name="it", **options: getattr(AsyncReadWriteLock(syncs[0], name, **{**own, **options}), side)()


def _several(syncs: Sequence[Coordinator], name: str = "it", **options: Any) -> AsyncMultiLock:
    return AsyncMultiLock(syncs[0], [name, f"{name} and that"], **options)


PRIMITIVES = (
    Primitive("lock", _one(AsyncLock)),
    Primitive("lock with WATCH", _one(AsyncLock, engine="watch")),
    Primitive("shared lock", _one(AsyncLock, share=True)),
    Primitive("robust lock", _one(AsyncRobustLock)),
    Primitive("reentrant lock", _one(AsyncReentrantLock), reenters=True),
    Primitive("multi-lock", _several),
    Primitive("redlock", lambda syncs, name="it", **options: AsyncRedlock(syncs, name, **options), servers=3),
    Primitive("semaphore", _one(AsyncSemaphore, limit=4), alone=False),
    Primitive("semaphore with WATCH", _one(AsyncSemaphore, limit=4, engine="watch"), alone=False),
    Primitive("shared semaphore", _one(AsyncSemaphore, limit=4, share=True), alone=False),
    Primitive("readers", _side("read"), alone=False),
    Primitive("shared readers", _side("read", share=True), alone=False),
    Primitive("writer", _side("write")),
    Primitive("shared writer", _side("write", share=True)),
)
ALONE = [one for one in PRIMITIVES if one.alone]
TOGETHER = [one for one in PRIMITIVES if not one.alone]


@pytest.fixture(scope="session")
def independent_servers() -> Iterator[list[EmbeddedServer]]:
    """Two servers that know nothing of the shared one."""
    with ExitStack() as stack:  # a group cannot be started where a test's event loop runs, as `make` asks for it
        yield [stack.enter_context(EmbeddedServer(port=0)) for _ in range(2)]


@pytest_asyncio.fixture
async def make(
    request: pytest.FixtureRequest, primitive: Primitive, redis: Redis, sync: Coordinator
) -> AsyncIterator[Make]:
    """Make the primitive of a test; each call makes another object of the same name."""
    async with AsyncExitStack() as stack:
        syncs = [sync]
        for server in request.getfixturevalue("independent_servers") if primitive.servers > 1 else []:
            client = await stack.enter_async_context(server.client())
            await client.flushall()
            syncs.append(await stack.enter_async_context(Coordinator(client)))
        yield lambda **options: primitive.make(syncs, **options)
