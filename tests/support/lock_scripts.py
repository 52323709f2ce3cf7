"""Run the scripts of the lock."""

from __future__ import annotations

from typing import Any, TypeAlias

from .inside import load, lock_keys, ticket_member

Client: TypeAlias = Any
"""A redis.asyncio.Redis; redis-py's types of raw commands differ from version to version."""
KEYS = lock_keys(b"s")
TTL = 30_000


async def run(redis: Client, script: str, *arguments: bytes | int) -> Any:
    return await redis.eval(load(script).source, 4, *KEYS.all, *arguments)


async def acquire(redis: Client, token: bytes, ticket: bytes = b"", poll_ms: int = 0, identity: bool = False) -> Any:
    return await run(redis, "lock/acquire", token, TTL, ticket, poll_ms, 1 if identity else 0)


def polled(token: bytes) -> bytes:
    return ticket_member(b"", 1, TTL, token)


async def holder(redis: Client) -> bytes | None:
    found = await redis.get(KEYS.name)
    assert found is None or isinstance(found, bytes)
    return found
