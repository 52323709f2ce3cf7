"""Tests here run in virtual time, but for those marked real; the shards of the cluster are empty at first."""

from __future__ import annotations

import pytest_asyncio

from ..support.topologies import Nodes


@pytest_asyncio.fixture(autouse=True)
async def empty_shards(nodes: Nodes) -> None:
    for node in nodes.primaries:
        await nodes.call(node, "FLUSHALL")
