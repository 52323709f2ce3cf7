"""Tests here run in virtual time, but for those marked real."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis import Redis as BlockingRedis

from ..support.sentinels import GROUP, PATIENT, Group


@pytest.fixture(scope="session")
def running_group() -> Iterator[Group]:
    with Group(group=GROUP, down_after=PATIENT) as group:
        yield group


@pytest.fixture
def group(running_group: Group) -> Group:
    """A primary, a replica and three sentinels, without a key. They stay as they are."""
    with BlockingRedis.from_url(running_group.primary.url) as client:
        client.flushall()
    return running_group
