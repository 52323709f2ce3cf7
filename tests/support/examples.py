"""Run the examples as modules, on a server of their own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from redis.asyncio import Redis

from redis_sync_aio import Coordinator
from redis_sync_aio.embedded import EmbeddedServer

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    """Import an example by its path: they are scripts, not a package."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
async def redis(server: EmbeddedServer) -> AsyncIterator[Redis]:
    async with server.client(decode_responses=True) as client:
        await client.flushall()
        yield client


@pytest.fixture
async def rival(redis: Redis) -> AsyncIterator[Coordinator]:
    """Another process that wants the same locks, as far as Redis can tell."""
    async with Coordinator(redis) as coordinator:
        yield coordinator
