"""A coordinator looks at the server: `inspect` for names, `ping` for the way there."""

from __future__ import annotations

import inspect as introspection
from typing import Literal

import pytest
from redis.asyncio import Redis

from redis_sync_aio import Coordinator, Unreachable
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed
from redis_sync_aio.inspection import inspect

from ..support.clusters import SHARDS, Nodes


async def test_a_coordinator_inspects_the_names_of_its_prefix(redis: Redis) -> None:
    """Names are shown as its locks have them; another prefix can be asked for."""
    mine, plain = Coordinator(redis, prefix="app:"), Coordinator(redis)
    async with mine, plain, mine.lock("orders:1"), mine.semaphore("slots", 2), plain.lock("orders:2"):
        assert [it.name for it in await mine.inspect()] == ["orders:1", "slots"]
        assert [it.name for it in await mine.inspect("orders:*")] == ["orders:1"]
        assert [it.name for it in await plain.inspect("orders:*")] == ["orders:2"]
        assert [it.name for it in await plain.inspect(prefix="app:", limit=1)] == ["orders:1"]


def test_inspect_has_the_same_arguments_in_both_places() -> None:
    of_module, of_coordinator = (introspection.signature(it).parameters for it in (inspect, Coordinator.inspect))
    assert list(of_module.values())[1:] == list(of_coordinator.values())[1:]


@pytest.mark.parametrize("push", ["auto", "never"])
async def test_a_ping_takes_the_way_of_the_locks(redis: Redis, push: Literal["auto", "never"]) -> None:
    """It returns seconds, changes nothing, and fails after the end of the coordinator."""
    async with Coordinator(redis, push=push) as sync:
        assert 0 < await sync.ping() < 60
        assert sync.connections == 1
        assert await redis.keys() == []
    with pytest.raises(CoordinatorClosed):
        await sync.ping()


async def test_a_ping_reaches_each_shard_of_a_cluster(nodes: Nodes) -> None:
    async with nodes.client() as client, Coordinator(client, prefix="app:") as sync:
        assert await sync.ping() > 0
        assert sync.connections == SHARDS


async def test_a_ping_without_an_answer_says_so() -> None:
    with EmbeddedServer(port=0) as server:
        async with server.client() as client, Coordinator(client, retry_for=0.5) as sync:
            await sync.ping()
            server.stop()
            with pytest.raises(Unreachable):
                await sync.ping()
