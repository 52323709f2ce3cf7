"""Each test of this folder that asks for ``make`` is parametrized with a primitive: see `support/primitives.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import Coordinator
from redis_sync_aio.embedded import EmbeddedServer

from ..support.primitives import Primitive

Make = Callable[..., Any]
"""Makes the primitive of a test; it is called "it", unless told a name."""


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
        source = syncs if primitive.servers > 1 else sync
        yield lambda **options: primitive.make(source, **options)
