"""Several processes, and what they did."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from ..conftest import MakeClient
from .child import Crew
from .factories import Client
from .textbook import decoded


@pytest_asyncio.fixture
async def plain(redis: Redis, make_client: MakeClient) -> AsyncIterator[Client]:
    """A plain client, as the textbooks use it."""
    yield decoded(make_client(decode_responses=True))


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew() as crew:
        yield crew
