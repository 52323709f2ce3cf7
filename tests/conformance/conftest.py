"""Every way to reach a server: what passes on one of them must pass on all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import Coordinator

from ..conftest import MakeClient

WAYS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "link": ({}, {}),
    "link-resp2-decoded": ({"protocol": 2, "decode_responses": True}, {}),
    "link-no-socket-timeout": ({"socket_timeout": None}, {}),
    "polling": ({}, {"push": "never"}),
    "polling-resp2-decoded": ({"protocol": 2, "decode_responses": True}, {"push": "never"}),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """How the locks under test reach the server."""
    return str(request.param)


@pytest_asyncio.fixture
async def client(make_client: MakeClient, way: str) -> Redis:
    """A client of that kind; the database is empty."""
    client = make_client(**WAYS[way][0])
    await client.flushall()
    return client


@pytest_asyncio.fixture
async def sync(client: Redis, way: str) -> AsyncIterator[Coordinator]:
    """A coordinator of that kind."""
    async with Coordinator(client, **WAYS[way][1]) as coordinator:
        yield coordinator
