"""What we read off the caller's client. Public attributes of redis-py only."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.client import Pipeline

from .._types import Name, Seconds, positive_seconds
from ..errors import WrongContext

DEFAULT_TIMEOUT = 5.0


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop; raise WrongContext when there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise WrongContext("no event loop is running here: use it inside a coroutine") from None


def check_client(client: object) -> None:
    """Raise TypeError, saying what to pass instead, unless ``client`` is an asyncio Redis client."""
    if isinstance(client, Redis) and not isinstance(client, Pipeline):
        return
    if isinstance(client, RedisCluster):
        raise TypeError("RedisCluster is not supported yet: pass a redis.asyncio.Redis of one server")
    if type(client).__module__.startswith(("redis.client", "redis.cluster")):
        raise TypeError(
            f"{type(client).__name__} from {type(client).__module__} is a synchronous client: "
            "pass a redis.asyncio.Redis (from redis.asyncio import Redis)"
        )
    raise TypeError(f"expected a redis.asyncio.Redis or a Coordinator, not {client!r}")


def client_response_timeout(client: Redis, given: Seconds | None) -> float:
    """Return how long an answer may take, in seconds."""
    if given is not None:
        return positive_seconds(given, "response_timeout")
    configured = client.connection_pool.connection_kwargs.get("socket_timeout")
    return float(configured) if configured else DEFAULT_TIMEOUT


def client_connect_timeout(client: Redis, response_timeout: float) -> float:
    """Return how long connecting may take, in seconds."""
    configured = client.connection_pool.connection_kwargs.get("socket_connect_timeout")
    return float(configured) if configured else response_timeout


def encode(client: Redis, value: Name, what: str) -> bytes:
    """Return a name or identity as bytes: text in the client's own encoding, so that foreign locks agree."""
    if isinstance(value, str):
        untyped: Any = client
        value = untyped.get_encoder().encode(value)
    if not isinstance(value, bytes):
        raise TypeError(f"{what} must be str or bytes, not {value!r}")
    if not value:
        raise ValueError(f"{what} must not be empty")
    return value
