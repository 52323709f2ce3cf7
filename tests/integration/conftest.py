"""A cluster for the tests that need one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from ..support.clusters import Nodes, cluster


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """A cluster of three shards. Whoever moves slots, or stops a node, takes that back."""
    with asyncio.Runner() as runner:
        running = cluster()
        yield runner.run(running.__aenter__())
        runner.run(running.__aexit__(None, None, None))
