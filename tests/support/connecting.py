"""Ways to connect to a server."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Mapping
from itertools import product
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import Coordinator

from ..conftest import MakeClient

NAME = "caf\u00e9"
BASIC = [
    {"decode_responses": decode, "protocol": protocol, "legacy_responses": legacy, "single_connection_client": single}
    for decode, protocol, legacy, single in product((False, True), (2, 3), (False, True), (False, True))
]
KNOWN = inspect.signature(Redis.__init__).parameters
"""What the installed redis-py takes: some options came after the oldest version we admit."""


def known(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options the installed redis-py takes."""
    return {key: value for key, value in options.items() if key in KNOWN}


MODES: Mapping[str, dict[str, Any]] = {
    **{"-".join(f"{key.split('_')[0]}={value:d}" for key, value in mode.items()): mode for mode in BASIC},
    "latin-1": {"encoding": "latin-1"},
    "latin-1-decoded": {"encoding": "latin-1", "decode_responses": True},
    "errors-ignored": {"encoding_errors": "ignore", "decode_responses": True},
    "db 3": {"db": 3},
    "db 3-single": {"db": 3, "single_connection_client": True},
    "no timeouts": {"socket_timeout": None, "socket_connect_timeout": None},
    "health checks": {"health_check_interval": 1},
    "named": {"client_name": "named"},
    "tiny reads": {"socket_read_size": 1},
    "one connection": {"max_connections": 1},
}
USES = ("explicit", "implicit", "polling")


@pytest_asyncio.fixture(params=MODES)
async def client(request: pytest.FixtureRequest, make_client: MakeClient, redis: Redis) -> Redis:
    """A client of that mode; all databases are empty."""
    return make_client(**known(MODES[request.param]))


@pytest_asyncio.fixture(params=USES)
async def source(request: pytest.FixtureRequest, client: Redis) -> AsyncIterator[Redis | Coordinator]:
    """What the locks are made from: the client itself, or a coordinator."""
    if request.param == "implicit":
        yield client
    else:
        async with Coordinator(client, push="always" if request.param == "explicit" else "never") as coordinator:
            yield coordinator


def wire_of(client: Redis, text: str) -> bytes:
    """Text as the client encodes keys."""
    return text.encode(client.connection_pool.connection_kwargs.get("encoding", "utf-8"))
