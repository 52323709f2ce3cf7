"""What the life of a context leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable

import pytest_asyncio
from redis.asyncio import Redis

from ..conftest import MakeClient
from .factories import Kind
from .inside import hubs

NAME = "life"


@pytest_asyncio.fixture
async def observer(make_client: MakeClient) -> Redis:
    """Looks at the server, whatever becomes of the client under test."""
    return make_client()


@pytest_asyncio.fixture(autouse=True)
async def nothing_left(kind: Kind, no_task_left: None, observer: Redis) -> AsyncIterator[None]:
    """P12: in the end there are no tasks of ours, no queue, and no implicit coordinator that is closed."""
    yield
    assert await observer.exists(kind.queue(NAME)) == 0
    assert all(found.why_closed is None for found in hubs.values())


def our_tasks() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if "redis_sync_aio" in task.get_name()]


async def connections(observer: Redis) -> int:
    """How many connections of clients the server has, without the observer's own; replicas and sentinels are none."""
    found = await observer.client_list()
    return sum("S" not in it["flags"] and not it["name"].startswith("sentinel-") for it in found) - 1


async def same(number: Awaitable[int], expected: int) -> bool:
    return await number == expected
