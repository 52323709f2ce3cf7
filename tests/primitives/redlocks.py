"""Five servers for an AsyncRedlock. Each stands behind a proxy: a server that hangs is a proxy that passes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncRedlock, Backoff, Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import FaultProxy
from redis_sync_aio.types import RedlockLease

from ..support.inside import lock_keys, now
from ..support.virtual import EPOCH

NAME = "everywhere"
KEYS = lock_keys(NAME.encode())
WITHIN = 0.2
SOMETIMES = Backoff(initial=0.005, cap=0.2)
"""For `wait_until`: each look asks five servers."""


class Node:
    """One of the servers, and the way to it."""

    def __init__(self, server: EmbeddedServer, proxy: FaultProxy, direct: Redis) -> None:
        self.server = server
        self.proxy = proxy
        self.direct: Any = direct

    async def kill(self) -> None:
        """Close all connections, and refuse new ones."""
        self.proxy.refuse = True
        await self.proxy.cut()

    async def start_empty(self) -> None:
        """Be there again, with no key and no script."""
        await self.direct.flushall()
        await self.direct.script_flush()
        self.proxy.refuse = False

    async def restart(self) -> None:
        await self.kill()
        await self.start_empty()

    async def fence(self) -> int:
        return int((await self.direct.get(KEYS.fence)).split()[0])


Process = list[Coordinator]
"""One process, as far as the servers can see: a coordinator for each server."""


@pytest.fixture(scope="session")
def five() -> Iterator[list[EmbeddedServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(EmbeddedServer()) for _ in range(5)]


@pytest_asyncio.fixture
async def nodes(five: list[EmbeddedServer]) -> AsyncIterator[list[Node]]:
    """All of them up, and empty."""
    async with AsyncExitStack() as stack:
        found = []
        for server in five:
            proxy = await stack.enter_async_context(FaultProxy(server))
            node = Node(server, proxy, await stack.enter_async_context(server.client()))
            await node.direct.flushall()
            found.append(node)
        yield found


@asynccontextmanager
async def process(nodes: Sequence[Node], response_timeout: float = 0.5, **client: Any) -> AsyncIterator[Process]:
    async with AsyncExitStack() as stack:
        found = []
        for node in nodes:
            redis = await stack.enter_async_context(node.proxy.client(**client))
            coordinator = Coordinator(redis, response_timeout=response_timeout, retry_for=2)
            found.append(await stack.enter_async_context(coordinator))
        yield found


@pytest_asyncio.fixture
async def one(nodes: list[Node]) -> AsyncIterator[Process]:
    async with process(nodes) as found:
        yield found


@pytest_asyncio.fixture
async def two(nodes: list[Node]) -> AsyncIterator[Process]:
    async with process(nodes) as found:
        yield found


def redlock(process: Process, ttl: float = 10, within: float = 5, **options: Any) -> AsyncRedlock:
    return AsyncRedlock(process, NAME, ttl=ttl, answer_within=within, **options)


def hasty(process: Process, ttl: float = 10, **options: Any) -> AsyncRedlock:
    """Return one for servers of which some do not answer."""
    return redlock(process, ttl, within=WITHIN, **options)


@contextmanager
def paused(nodes: Sequence[Node]) -> Iterator[None]:
    """Let nothing pass to or from them."""
    for node in nodes:
        node.proxy.black_hole = True
    try:
        yield
    finally:
        for node in nodes:
            node.proxy.black_hole = False


async def left_on(nodes: Sequence[Node]) -> list[bytes]:
    """Return the keys of holders and waiters."""
    return [key for node in nodes for key in await node.direct.keys("*") if key != KEYS.fence]


async def nothing_left(nodes: Sequence[Node]) -> None:
    async def empty() -> bool:
        return not await left_on(nodes)

    await wait_until(empty, SOMETIMES, timeout=30)


async def waiters(process: Process, number: int, server: int = 0) -> None:
    lock = AsyncLock(process[server], NAME)

    async def condition() -> bool:
        return (await lock.statistics()).waiting >= number

    await wait_until(condition, SOMETIMES, timeout=5)


async def seconds_of(work: Callable[[], Any]) -> float:
    began = now()
    await work()
    return now() - began


async def joined_by_two(one: Process, nodes: Sequence[Node]) -> RedlockLease:
    """Return a lease that three of five granted, and that the others joined when they answered again."""
    await hasty(one).locked()
    with paused(nodes[3:]):
        lease = await hasty(one).acquire()
        assert lease.held_on == 3
    await wait_until(lambda: lease.held_on == 5, SOMETIMES, timeout=5)
    return lease


def in_microseconds(seconds: float) -> int:
    """Return the fence of a server whose clock is so many seconds ahead."""
    return int((EPOCH + now() + seconds) * 1_000_000)


async def put_ahead(node: Node, seconds: float) -> int:
    """Let it grant fences from there on, as one does whose clock is ahead; return the last one."""
    fence = in_microseconds(seconds)
    await node.direct.set(KEYS.fence, b"%d whose" % fence)
    return fence
