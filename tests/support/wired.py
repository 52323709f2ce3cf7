"""A coordinator behind a proxy, and another one with a connection of its own."""

from __future__ import annotations

import asyncio
import gc
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest_asyncio
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from redis_sync_aio import Backoff, Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing._resp import Predicate
from redis_sync_aio.testing.faults import FaultProxy, script
from redis_sync_aio.types import BaseLease

from .inside import load, now, tuned
from .primitives import KINDS, LOCK, PARTS, Exclusive, Part, Primitive, holder

T = TypeVar("T")
COUNT_DOWN, JOIN, BREAK = load("permits/count_down"), load("barrier/join"), load("barrier/break")
KNOWN = (
    *(kind.script(part) for kind in KINDS for part in PARTS),
    *(
        load("lock/force_release"),
        load("lock/mark"),
        load("permits/resize"),
        COUNT_DOWN,
        JOIN,
        BREAK,
        load("link/read"),
    ),
)
"""Every script, but those that the compatible lock has to itself."""


def _of_any_kind(part: Part) -> Predicate:
    ours = [script(kind.script(part).sha) for kind in KINDS]
    return lambda args: any(is_it(args) for is_it in ours)


ACQUIRE, RELEASE, RENEW = (_of_any_kind(part) for part in PARTS)
READ = script(load("link/read").sha)
FORCE = script(load("lock/force_release").sha)
MARK = script(load("lock/mark").sha)
RESPONSE_TIMEOUT = 0.3
RETRY_FOR = 3.0
SOON = Backoff(initial=0.002, cap=0.01)
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # client options, coordinator options
    "link": ({}, {}),
    "plain": ({"retry": Retry(NoBackoff(), 0)}, {"push": "never"}),
    "plain, retried by redis-py": ({}, {"push": "never"}),
}


@pytest_asyncio.fixture(autouse=True)
async def quiet_loop() -> AsyncIterator[None]:
    """P12: no callback and no task of ours ends with an exception that nobody looks at."""
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    yield
    gc.collect(1)  # what this test has left in cycles
    assert not unhandled, unhandled


async def timed(what: Callable[[], Awaitable[T]]) -> tuple[float, T]:
    """Return how many seconds ``what()`` took, and what it returned."""
    begin = now()
    found = await what()
    return now() - begin, found


@dataclass
class Wired:
    """A coordinator behind a proxy, and another one with a wire of its own."""

    proxy: FaultProxy
    client: Redis
    sync: Coordinator
    direct: Redis
    other: Coordinator
    name: str = "wire"
    kind: Primitive = LOCK

    def lock(self, **options: Any) -> Exclusive:
        made: Exclusive = self.kind.make(self.sync, self.name, **options)
        return made

    def elsewhere(self, **options: Any) -> Exclusive:
        """The same lock, as others see it who are not behind the proxy."""
        made: Exclusive = self.kind.make(self.other, self.name, **options)
        return made

    async def queued(self, number: int = 1, *, waiting: asyncio.Task[BaseLease] | None = None) -> None:
        """Wait until so many are in the queue, or until ``waiting`` fails instead."""

        async def enough() -> bool:
            if waiting is not None and waiting.done():
                await waiting
            return (await self.elsewhere().statistics()).waiting >= number

        await wait_until(enough, SOON, timeout=15)

    async def check_held(self, lease: BaseLease) -> None:
        lease.check()
        assert lease.remaining() > 0
        assert await self.kind.token(self.direct, self.name) == lease._grant.wire_token

    async def check_free(self, last: int) -> None:
        """Nothing is left, and others can go on immediately, under a greater fence."""
        found = await self.elsewhere().statistics()
        assert (await holder(self.elsewhere()), found.waiting) == (None, 0), f"left behind: {found}"
        assert await self.direct.zcard(self.kind.polls(self.name)) == 0
        lease = await self.elsewhere().try_acquire()
        assert lease is not None
        assert lease.fence > last
        await lease.release()
        assert await self.kind.empty(self.direct, self.name)


@asynccontextmanager
async def wired(
    server: EmbeddedServer,
    mode: str = "link",
    *,
    name: str = "wire",
    kind: Primitive = LOCK,
    client: dict[str, Any] | None = None,
    tls: ssl.SSLContext | None = None,
    **options: Any,
) -> AsyncIterator[Wired]:
    """Set all that up. Scripts are known to the server, so that the faults hit commands that do something."""
    # Many of a sweep may connect at the same time, with several round trips each.
    timeouts: dict[str, Any] = {"socket_timeout": RESPONSE_TIMEOUT, "socket_connect_timeout": 3 * RESPONSE_TIMEOUT}
    client_options, coordinator_options = MODES[mode]
    limits: dict[str, Any] = {"response_timeout": RESPONSE_TIMEOUT, "retry_for": RETRY_FOR}
    async with (
        FaultProxy(server, tls) as proxy,
        server.client() as direct,
        proxy.client(**(timeouts | client_options | (client or {}))) as faulty,
        Coordinator(direct) as other,
        tuned(faulty, **(limits | coordinator_options | options)) as sync,
    ):
        for one in KNOWN:
            await direct.script_load(one.source.decode())
        await direct.delete(*kind.keys(name).all)
        yield Wired(proxy, faulty, sync, direct, other, name, kind)
