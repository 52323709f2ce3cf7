"""Tests here run in virtual time, but for those marked real."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis import Redis as BlockingRedis

from redis_sync_aio.testing.servers import SentinelTopology

from ..support.topologies import PATIENT


@pytest.fixture(scope="session")
def running_group() -> Iterator[SentinelTopology]:
    with SentinelTopology(down_after=PATIENT) as group:
        yield group


@pytest.fixture
def group(running_group: SentinelTopology) -> SentinelTopology:
    """A primary, a replica and three sentinels, without a key. They stay as they are."""
    with BlockingRedis.from_url(running_group.primary.url) as client:
        client.flushall()
    return running_group
