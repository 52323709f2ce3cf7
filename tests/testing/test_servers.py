"""Groups of servers: how they start, stop, fail, and what is left of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from redis_sync_aio import Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer, ServerNotStarted
from redis_sync_aio.testing import freeze_renewals
from redis_sync_aio.testing.faults import FaultProxy, Upstream
from redis_sync_aio.testing.servers import ClusterTopology, IndependentServers, SentinelTopology, Topology

from ..support.body import FAST, waits
from ..support.embedded import alive, base, eventually

__all__ = ["base"]

pytestmark = pytest.mark.real
TOPOLOGIES: dict[str, Callable[[], Topology]] = {
    "independent": lambda: IndependentServers(3),
    "sentinel": SentinelTopology,
    "cluster": ClusterTopology,
}


GROUPS = ["independent", *(pytest.param(kind, marks=pytest.mark.ci) for kind in ("sentinel", "cluster"))]


@pytest.mark.parametrize("kind", GROUPS)
def test_a_group_starts_without_an_event_loop_and_leaves_nothing(kind: str, base: Path) -> None:
    group = TOPOLOGIES[kind]()
    with group as entered:
        assert entered is group
        servers = group.servers
        pids = [server.pid for server in servers]
        assert len(set(pids)) == len(servers) >= 3
        assert all(len(os.fsencode(server.unix_socket)) < 104 for server in servers)
    assert [*group.servers] == []
    assert not any(alive(pid) for pid in pids)
    assert eventually(lambda: not list(base.iterdir()))
    with group:  # it may be started again
        assert all(alive(server.pid) for server in group.servers)


async def test_where_a_loop_runs_a_group_asks_for_async_with() -> None:
    with pytest.raises(RuntimeError, match="use `async with IndependentServers"), IndependentServers(1):
        raise AssertionError("it was entered")


async def test_a_group_that_cannot_start_leaves_nothing(base: Path) -> None:
    with pytest.raises(ServerNotStarted, match="nonsense"):
        async with IndependentServers(2, args=["--nonsense", "yes"]):
            raise AssertionError("it was entered")
    assert eventually(lambda: not list(base.iterdir()))


async def test_a_group_is_started_once() -> None:
    async with IndependentServers(1) as group:
        pid = group.servers[0].pid
        with pytest.raises(RuntimeError, match="started already"):
            await group.__aenter__()
        assert group.servers[0].pid == pid


def test_numbers_of_servers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="count"):
        IndependentServers(0)
    with pytest.raises(ValueError, match="sentinels"):
        SentinelTopology(0)
    with pytest.raises(ValueError, match="shards"):
        ClusterTopology(2)
    with pytest.raises(ValueError, match="replicas"):
        ClusterTopology(3, 2)


@pytest.mark.ci
async def test_a_parted_primary_loses_its_leases_before_the_other_one_grants_them() -> None:
    """P1: it refuses to renew them, so they end in time; a client that has stayed there follows after the healing."""
    safe = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "1")
    async with (
        SentinelTopology(down_after=5, args=safe) as group,
        group.client() as client,
        group.client() as other,
        group.primary.client() as parted,
        Coordinator(client) as sync,
    ):
        with freeze_renewals(sync):  # else one of them may be the last that the replica does not get
            lease = await sync.lock("orders:42", ttl=6).acquire()
            await group.replicated()
            await group.partition()
            with pytest.raises(ResponseError, match="NOREPLICAS"):  # clients reach it
                await parted.set("key", 1)
        assert await group.promoted() is group.replica
        await group.call(group.replica, "CONFIG", "SET", "min-replicas-to-write", "0")
        async with Coordinator(other) as elsewhere, asyncio.timeout(120):
            following = await elsewhere.lock("orders:42", ttl=120).acquire()
            assert lease.remaining() == 0
            await lease.wait_lost()
            await group.heal()

            async def follows() -> bool:
                async with group.replica.client() as primary:
                    return int((await primary.info("replication"))["connected_slaves"]) == 1

            await wait_until(follows, FAST)
            waiting = asyncio.create_task(sync.lock("orders:42").acquire())
            await wait_until(waits(elsewhere.lock("orders:42")), FAST)
            await following.release()
            last = await waiting
            assert last.fence > following.fence > lease.fence
            await last.release()


@pytest.mark.ci
async def test_a_partition_of_sentinel_that_ends_early_changes_nothing() -> None:
    """The replica gets what was written meanwhile, and the sentinels have the primary that they had."""
    async with SentinelTopology(down_after=600) as group, group.client() as client, group.replica.client() as copy:
        await client.set("key", "before")
        await group.replicated()
        await group.partition()
        await client.set("key", "meanwhile")
        assert await copy.get("key") == b"before"
        await group.heal(group.primary)
        await group.replicated()
        assert await copy.get("key") == b"meanwhile"
        assert await client.get("key") == b"meanwhile"


@pytest.mark.ci
async def test_a_cluster_fails_over_and_moves_slots() -> None:
    async with ClusterTopology(replicas=1, isolation=True) as group, group.client() as client:
        name = group.name_at(0, like="order")
        assert group.owner(name) is group.primaries[0]
        await client.set(name, "here")
        new = await group.fail_over(group.primaries[0])
        assert new is group.replicas[0]
        assert await client.get(name) == b"here"
        await group.move(group.slot(name), new, group.primaries[1])
        assert group.slot(name) in await group.slots(group.primaries[1])
        assert await client.get(name) == b"here"
        await group.healthy()
        await group.isolate(group.primaries[2])
        assert await group.call(group.primaries[2], "PING")  # clients reach it


async def test_a_cluster_says_what_it_lacks() -> None:
    group = ClusterTopology()
    with pytest.raises(RuntimeError, match=r"replicas=1"):
        await group.fail_over(EmbeddedServer())
    with pytest.raises(RuntimeError, match=r"isolation=True"):
        await group.isolate(EmbeddedServer())


async def test_the_proxy_finds_its_server_in_every_way_to_name_one() -> None:
    async with IndependentServers(1) as group:
        (server,) = group.servers
        assert server.port is not None
        path = server.unix_socket
        ways: list[Upstream] = [server, (server.host, server.port), server.url, f"unix://{path}", path]
        for upstream in ways:
            async with FaultProxy(upstream) as proxy, proxy.client() as client:
                assert await client.ping()
                assert proxy.commands["PING"] == 1
                assert proxy.url == f"redis://127.0.0.1:{proxy.port}"
