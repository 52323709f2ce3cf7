"""P3, P6, P8, P12: the network to a server is cut, as by a pulled cable. Nothing is closed, nothing is answered."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from redis.asyncio import Redis, RedisCluster
from redis.crc import key_slot

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncRedlock,
    Coordinator,
    LeaseLost,
    Unreachable,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import BaseLease

from ..support.body import FAST, for_ever, lost_in
from ..support.inside import now
from .network import PORT, Network, Scenario, in_a_network, is_cluster

NAME = "far away"
QUICKLY: dict[str, Any] = {"response_timeout": 0.5, "retry_for": 2.0}


def test_a_link() -> None:
    run(cut_link)


@pytest.mark.ci
def test_one_shard_of_a_cluster() -> None:
    run(cut_shard)


@pytest.mark.ci
def test_a_minority_and_a_majority_of_a_redlock() -> None:
    run(cut_redlock)


def run(scenario: Scenario) -> None:
    try:
        in_a_network(scenario)
    except LookupError as error:
        pytest.skip(str(error))


async def lost_when_cut(lock: AsyncLock, network: Network, server: EmbeddedServer, ttl: float) -> BaseLease:
    """Lose its lease at the deadline, neither sooner nor much later."""
    cut_at = ends = 0.0

    async def body(lease: BaseLease) -> None:
        nonlocal cut_at, ends
        network.cut(server)
        cut_at, ends = now(), now() + lease.remaining()
        await for_ever()

    lease, error = await lost_in(lock.acquire(), body)
    assert isinstance(error, LeaseLost)
    assert ends - 0.1 < now() < cut_at + ttl + 15
    return lease


async def out_of_reach(lock: AsyncLock) -> None:
    """Say so in time, as often as it is asked."""
    for _ in range(2):
        begun = now()
        with pytest.raises((Unreachable, AcquireTimeout)):
            await lock.acquire(timeout=1)
        assert now() - begun < 15


async def cut_link(network: Network) -> None:
    server = network.server()
    async with Redis(host=network.address(server), port=PORT) as client, Coordinator(client, **QUICKLY) as sync:
        lease = await lost_when_cut(AsyncLock(sync, NAME, ttl=3), network, server, 3)
        await out_of_reach(AsyncLock(sync, NAME, ttl=3))
        waiting = asyncio.create_task(AsyncLock(sync, NAME, ttl=3).acquire())
        network.heal(server)
        again = await asyncio.wait_for(waiting, 30)
        assert again.fence > lease.fence
        await again.release()


async def cut_shard(network: Network) -> None:
    """The names of the others do not notice: what is held there is renewed, and acquired."""
    options = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", "--cluster-node-timeout", "60000")
    servers = [network.server(*options) for _ in range(3)]
    await is_cluster(servers, network)
    names = [[f"n{n}" for n in range(99) if key_slot(b"n%d" % n) * 3 // 16384 == shard] for shard in range(3)]
    first, last, other = names[0][0], *names[2][:2]
    async with (
        RedisCluster(host=network.address(servers[1]), port=PORT) as client,
        Coordinator(client, **QUICKLY) as sync,
        AsyncLock(sync, last, ttl=3) as held,
    ):
        lease = await lost_when_cut(AsyncLock(sync, first, ttl=6), network, servers[0], 6)
        await out_of_reach(AsyncLock(sync, first, ttl=3))
        held.check()  # it was renewed several times
        async with AsyncLock(sync, other).acquire(timeout=15):
            pass
        waiting = asyncio.create_task(AsyncLock(sync, first, ttl=3).acquire())
        network.heal(servers[0])
        again = await asyncio.wait_for(waiting, 30)
        assert again.fence > lease.fence
        await again.release()


async def cut_redlock(network: Network) -> None:
    """A minority is no loss; a majority is one, at the deadline; when they are back the lock is had again."""
    servers = [network.server() for _ in range(3)]
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Redis(host=network.address(it), port=PORT)) for it in servers]
        syncs = [await stack.enter_async_context(Coordinator(client, **QUICKLY)) for client in clients]
        lock = AsyncRedlock(syncs, NAME, ttl=3)
        fences = []
        async with lock as lease:
            fences.append(lease.fence)
            await wait_until(lambda: lease.held_on == 3, FAST, timeout=30)
            network.cut(servers[0])
            await wait_until(lambda: lease.held_on == 2, FAST, timeout=30)
            lease.check()
        async with lock.acquire(timeout=15) as lease:
            assert lease.held_on == 2
            fences.append(lease.fence)

        async def body(lease: BaseLease) -> None:
            fences.append(lease.fence)
            network.cut(servers[1])
            await for_ever()

        begun = now()
        _, error = await lost_in(lock.acquire(timeout=15), body)
        assert "2 have to" in str(error)
        assert now() - begun < 20
        with pytest.raises(Unreachable):
            await lock.try_acquire()
        network.heal(servers[0])
        network.heal(servers[1])
        async with lock.acquire(timeout=15) as lease:
            fences.append(lease.fence)
        assert fences == sorted(set(fences))
