"""P5, P10, P12: coordinators and clients of a cluster that are closed, forked, or reach nodes by other addresses."""

from __future__ import annotations

import asyncio
import gc
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from weakref import ref

import pytest
from redis.asyncio import RedisCluster
from redis.asyncio.cluster import ClusterNode

from redis_sync_aio import AsyncLock, AsyncSemaphore, Coordinator, transaction, wait_until
from redis_sync_aio.testing.faults import FaultProxy
from redis_sync_aio.types import Transaction

from ..support.body import FAST, waits
from ..support.inside import cluster_link_of
from ..support.processes import play
from ..support.sweep import Outcome, sweep
from ..support.tls import make_tls
from ..support.topologies import SHARDS, Nodes
from ..transport.scenes import NAME, fork, look


async def open_connections(nodes: Nodes) -> int:
    """Return how many clients all nodes have, without those that ask."""
    return sum([len(str(await nodes.call(node, "CLIENT", "LIST")).split("id=")) - 2 for node in nodes.primaries])


async def none_is_open(nodes: Nodes) -> bool:
    return await open_connections(nodes) == 0


@pytest.mark.real
@pytest.mark.parametrize("cancelled", [False, True])
async def test_p12_closed_while_the_nodes_are_asked(nodes: Nodes, cancelled: bool) -> None:
    """They do not answer. The end comes long before the time that an answer has."""
    client = nodes.client()
    sync = Coordinator(client, response_timeout=60)
    async with sync.lock(nodes.name_at(0)):
        pass
    for node in nodes.primaries:
        node.pause()
    try:
        cluster_link_of(sync).redirected("")
        await asyncio.sleep(0)
        asking = cluster_link_of(sync)._refreshing
        assert asking is not None
        assert not asking.done()
        closing = asyncio.create_task(sync.aclose())
        await asyncio.sleep(0)
        if cancelled:
            closing.cancel()
        async with asyncio.timeout(15):
            with suppress(asyncio.CancelledError):
                await closing
        assert closing.cancelled() == cancelled
        assert asking.done()
    finally:
        for node in nodes.primaries:
            node.resume()
        await nodes.healthy()
    await client.aclose()
    await wait_until(lambda: none_is_open(nodes), FAST, timeout=15)


@pytest.mark.real
async def test_p5_a_client_whose_closing_is_cancelled(nodes: Nodes) -> None:
    """At any await. Closed again, it leaves no connection behind, whatever had been closed already."""
    clients: list[RedisCluster] = []

    async def used_and_closed() -> None:
        client = nodes.client()
        clients.append(client)
        for shard in range(SHARDS):
            async with AsyncLock(client, nodes.name_at(shard)):
                pass
        await client.aclose()

    async def check(outcome: Outcome[None]) -> None:
        await clients.pop().aclose()
        await wait_until(lambda: none_is_open(nodes), FAST, timeout=15)

    result = await sweep(used_and_closed, check, ways=["task"])
    assert result.cancellations["task"] > 2 * SHARDS


# Of transports whose loop nobody ended.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_p12_a_loop_that_is_closed_by_hand_keeps_no_client(nodes: Nodes) -> None:
    async def used() -> tuple[ref[RedisCluster], ref[Coordinator]]:
        client = nodes.client()
        sync = Coordinator(client)
        async with sync.lock("a"):
            pass
        return ref(client), ref(sync)

    loop = asyncio.new_event_loop()
    client, sync = loop.run_until_complete(used())
    loop.close()
    del loop
    gc.collect()
    gc.collect()
    assert (client(), sync()) == (None, None)


@pytest.mark.ci
@pytest.mark.real
@pytest.mark.parametrize(
    "how",
    [
        "coordinator os._exit",
        "coordinator sys.exit",
        "bare client os._exit",
        "polling sys.exit",
    ],
)
async def test_p12_a8_fork(nodes: Nodes, how: str) -> None:
    server = nodes.owner(NAME)
    assert await asyncio.to_thread(play, fork, server.url, f"cluster {how}", PYTHONDEVMODE="") == "done"
    assert look(server) is None


@pytest.mark.real
@pytest.mark.parametrize("encrypted", [False, pytest.param(True, marks=pytest.mark.ci)])
async def test_nodes_by_other_addresses(nodes: Nodes, tmp_path: Path, encrypted: bool) -> None:
    """``address_remap``, to a proxy before each node, perhaps with TLS: the locks take those ways, too."""
    tls = make_tls(tmp_path) if encrypted else None
    async with AsyncExitStack() as stack:
        proxies: dict[int, FaultProxy] = {}
        for node in nodes.primaries:
            assert node.port is not None
            proxy = FaultProxy((node.host, node.port), tls.context if tls is not None else None)
            proxies[node.port] = await stack.enter_async_context(proxy)

        def remapped(address: tuple[str, int]) -> tuple[str, int]:
            proxy = proxies.get(address[1])
            return address if proxy is None else (proxy.host, proxy.port)

        first = proxies[nodes.primaries[0].port or 0]
        client = RedisCluster(
            startup_nodes=[ClusterNode(first.host, first.port)],
            address_remap=remapped,
            socket_timeout=30,
            socket_connect_timeout=30,
            **(tls.options if tls is not None else {}),
        )
        sync = await stack.enter_async_context(Coordinator(client, response_timeout=30))
        stack.push_async_callback(client.aclose)
        names = [nodes.name_at(shard) for shard in range(SHARDS)]
        for name in names:
            async with sync.lock(name):
                assert await nodes.call(nodes.owner(name), "EXISTS", name) == 1
        # One link each, which listens at its inbox and is seen to be there: twice before 7.0, which refuses SSUBSCRIBE.
        version = (await nodes.call(nodes.primaries[0], "INFO", "server"))["redis_version"]
        times = 2 if version.startswith("6.") else 1
        assert sync.connections == SHARDS
        assert [proxy.commands["SUBSCRIBE"] for proxy in proxies.values()] == [2 * times] * SHARDS

        lease = await sync.lock(names[1]).acquire()
        waiter = asyncio.create_task(AsyncLock(client, names[1]).acquire())
        await wait_until(waits(sync.lock(names[1])), FAST, timeout=15)
        for proxy in proxies.values():
            await proxy.cut()
        await lease.release()
        await (await asyncio.wait_for(waiter, 30)).release()
        async with AsyncSemaphore(sync, names[2], limit=2):
            pass

        key = f"{{{names[2]}}}:written"

        async def write(tx: Transaction) -> None:
            await tx.get(key)
            tx.multi()
            tx.set(key, 1)

        await transaction(client, write, key)
        assert await nodes.call(nodes.primaries[2], "GET", key) == b"1"
        await nodes.move(nodes.slot(names[0]), nodes.primaries[0], nodes.primaries[1])
        async with sync.lock(names[0]):
            assert await nodes.call(nodes.primaries[1], "EXISTS", names[0]) == 1
        await nodes.move(nodes.slot(names[0]), nodes.primaries[1], nodes.primaries[0])


@pytest.mark.real
async def test_an_address_remap_that_changes_is_followed(nodes: Nodes) -> None:
    """The proxies that it names are replaced. Leases are kept, although no node says anything new of the slots."""
    async with AsyncExitStack() as replaced, AsyncExitStack() as stack:

        async def proxies(owner: AsyncExitStack) -> dict[int, FaultProxy]:
            ports = [(node.host, node.port or 0) for node in nodes.primaries]
            return {address[1]: await owner.enter_async_context(FaultProxy(address)) for address in ports}

        present = await proxies(replaced)

        def remapped(address: tuple[str, int]) -> tuple[str, int]:
            proxy = present.get(address[1])
            return address if proxy is None else (proxy.host, proxy.port)

        client = await stack.enter_async_context(nodes.client(address_remap=remapped))
        sync = await stack.enter_async_context(Coordinator(client, retry_for=30))
        names = [nodes.name_at(shard, "remapped") for shard in range(SHARDS)]
        leases = [await sync.lock(name).acquire() for name in names]
        present = await proxies(stack)
        await replaced.aclose()
        for name, lease in zip(names, leases, strict=True):
            await lease.extend(30)
            assert await nodes.call(nodes.owner(name), "GET", name) == lease.token.encode()
            await lease.release()
        assert all(proxy.commands["EVALSHA"] for proxy in present.values())
