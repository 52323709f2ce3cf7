"""P10: everything works on a Redis Cluster, whose shards have their names among them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import RedisCluster
from redis.asyncio.cluster import ClusterNode

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncRedlock,
    AsyncReentrantLock,
    AsyncSemaphore,
    CommandRefused,
    Coordinator,
    FenceGate,
    Lease,
    LeaseLost,
    Unreachable,
    transaction,
    wait_until,
    watch_retry,
)
from redis_sync_aio.compat import Lock
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed, PermissionDenied, StaleFence, TransactionMisuse
from redis_sync_aio.types import Transaction

from ..support.body import FAST, for_ever, waits
from ..support.clusters import SHARDS, Nodes
from ..support.inside import Cluster, hub_of

pytestmark = pytest.mark.timing
EVERY_SHARD = range(SHARDS)


@pytest_asyncio.fixture(autouse=True)
async def empty(nodes: Nodes) -> None:
    for node in nodes.primaries:
        await nodes.say(node, "FLUSHALL")


@pytest_asyncio.fixture
async def client(nodes: Nodes) -> AsyncIterator[RedisCluster]:
    async with nodes.client() as client:
        yield client


@pytest_asyncio.fixture(params=["link", "polling"])
async def sync(request: pytest.FixtureRequest, client: RedisCluster) -> AsyncIterator[Coordinator]:
    async with Coordinator(client, push="auto" if request.param == "link" else "never") as sync:
        yield sync


async def test_p1_p2_p8_locks_of_every_shard(nodes: Nodes, sync: Coordinator) -> None:
    """Two processes and many names: one holder at a time, in the order of arrival, with rising fences."""
    async with nodes.client() as second, Coordinator(second) as other:
        names = [nodes.name_at(shard, like) for shard in EVERY_SHARD for like in ("a", "b")]
        held: dict[str, int] = {}
        fences: dict[str, list[int]] = {name: [] for name in names}

        async def use(source: Coordinator, name: str) -> None:
            for _ in range(5):
                async with AsyncLock(source, name, ttl=5) as lease:
                    assert name not in held
                    held[name] = lease.fence
                    fences[name].append(lease.fence)
                    await asyncio.sleep(0)
                    del held[name]

        await asyncio.gather(*(use(source, name) for source in (sync, other) for name in names for _ in range(2)))
        assert all(len(found) == 20 and found == sorted(set(found)) for found in fences.values())
        assert other.connections == SHARDS


async def test_p3_p9_a_waiter_is_woken_by_a_push(nodes: Nodes, client: RedisCluster) -> None:
    """Idle waiters send nothing, and the one whose turn it is gets it without a look of its own."""
    async with nodes.client() as second, Coordinator(client) as sync, Coordinator(second) as other:
        for shard in EVERY_SHARD:
            name = nodes.name_at(shard)
            lease = await AsyncLock(sync, name).acquire()
            lock = AsyncLock(other, name)
            waiter = asyncio.create_task(lock.acquire())
            await wait_until(waits(lock), FAST, timeout=15)
            before = (await nodes.say(nodes.primaries[shard], "INFO", "commandstats"))["cmdstat_evalsha"]["calls"]
            await lease.release()
            granted = await asyncio.wait_for(waiter, 1)
            after = (await nodes.say(nodes.primaries[shard], "INFO", "commandstats"))["cmdstat_evalsha"]["calls"]
            assert after - before == 1
            assert granted.fence > lease.fence
            await granted.release()


@pytest.mark.parametrize("options", [{}, {"protocol": 2, "decode_responses": True}, {"protocol": 3}], ids=str)
async def test_every_primitive(nodes: Nodes, options: dict[str, Any]) -> None:
    async with nodes.client(**options) as client, Coordinator(client) as sync:
        for shard in EVERY_SHARD:
            name = nodes.name_at(shard)
            semaphore = AsyncSemaphore(sync, f"{{{name}}}:permits", limit=3)
            async with semaphore.acquire(weight=2):
                assert (await semaphore.statistics()).available == 1
            await semaphore.resize(5)
            shared = AsyncReadWriteLock(sync, f"{{{name}}}:rw")
            async with shared.read() as reader:
                assert await shared.write().try_acquire() is None
            async with shared.write() as writer:
                assert await shared.read().try_acquire() is None
                assert writer.fence > reader.fence
                await shared.downgrade(writer)
                assert await shared.write().try_acquire() is None
            again = AsyncReentrantLock(sync, f"{{{name}}}:again")
            async with again, again:
                assert await again.locked()
            async with AsyncLock(sync, f"{{{name}}}:watch", engine="watch") as lease:
                await lease.extend(10)
            gate = FenceGate(sync, f"{{{name}}}:gate")
            await gate.accept(lease.fence)
            with pytest.raises(StaleFence):
                await gate.accept(lease.fence - 1)
            async with AsyncLock(sync, name, share=True) as first:
                assert first.fence
            by_identity = AsyncLock(sync, name)
            await by_identity.acquire(identity="w")
            await by_identity.release(identity="w")


async def test_a_multi_lock_over_all_shards(nodes: Nodes, sync: Coordinator) -> None:
    """All or nothing, whatever the order of the names: ABBA."""
    async with nodes.client() as second, Coordinator(second) as other:
        names = [nodes.name_at(shard) for shard in EVERY_SHARD]
        inside = 0

        async def use(source: Coordinator, order: list[str]) -> None:
            nonlocal inside
            for _ in range(5):
                async with AsyncMultiLock(source, order, ttl=5) as lease:
                    inside += 1
                    assert inside == 1
                    assert set(lease.fences) == set(names)
                    await asyncio.sleep(0)
                    inside -= 1

        async with asyncio.timeout(20):
            await asyncio.gather(use(sync, names), use(other, names[::-1]), use(other, [*names[1:], names[0]]))
        assert not any([await AsyncLock(sync, name).locked() for name in names])


async def test_transactions(nodes: Nodes, sync: Coordinator) -> None:
    """By conflict, under a lease, and in turn; on every shard, the first command of a client included."""
    for shard in EVERY_SHARD:
        key = nodes.name_at(shard, "stock")

        async def deduct(tx: Transaction, key: str = key) -> int:
            left = int(await tx.get(key) or 10) - 1
            tx.multi()
            tx.set(key, left)
            return left

        done = await asyncio.gather(
            *(transaction(sync, deduct, key, attempts=100, escalate_after=3) for _ in range(5)),
        )
        assert sorted(it.value for it in done) == [5, 6, 7, 8, 9]
        async with AsyncLock(sync, f"{{{key}}}:lock") as lease, lease.transaction() as tx:
            left = int(await tx.get(key) or 0)
            tx.multi()
            tx.set(key, left - 1)

        @watch_retry(sync, key, exactly_once=True)
        async def read(tx: Transaction, key: str = key) -> int:
            left = int(await tx.get(key) or 0)
            tx.multi()
            return left

        assert await read() == 4


async def test_a_lease_over_several_slots_guards_no_transaction(nodes: Nodes, client: RedisCluster) -> None:
    async with Coordinator(client) as sync, AsyncMultiLock(sync, [nodes.name_at(0), nodes.name_at(1)]) as lease:
        with pytest.raises(ValueError, match="several hash slots of the cluster"):
            lease.transaction()


async def test_redis_pys_own_lock_method(nodes: Nodes, client: RedisCluster) -> None:
    """And a foreign lock by the classic pattern: both exclude ours (P11)."""
    for shard in EVERY_SHARD:
        name = nodes.name_at(shard)
        lock: Any = client.lock(name, timeout=5, lock_class=Lock)
        async with lock:
            assert await AsyncLock(client, name).try_acquire() is None
        await client.set(name, "theirs", nx=True, px=5000)
        with pytest.raises(AcquireTimeout):
            await AsyncLock(client, name).acquire(timeout=0.05)


async def test_a_bare_client(nodes: Nodes) -> None:
    """Its implicit coordinator ends when the client is closed, and no connection is left."""
    async with nodes.client() as client:
        lock = AsyncLock(client, nodes.name_at(1))
        lease = await lock.acquire()
        assert lease._grant.manager.hub.client is client
        body = asyncio.create_task(hold_for_ever(AsyncLock(client, nodes.name_at(2))))
        await wait_until(AsyncLock(client, nodes.name_at(2)).locked, FAST, timeout=15)
    with pytest.raises(LeaseLost, match="client was closed"):
        await body
    with pytest.raises(LeaseLost):
        lease.check()
    for node in nodes.primaries:

        async def nobody(node: EmbeddedServer = node) -> bool:
            return "sub=1" not in str(await nodes.say(node, "CLIENT", "LIST", "TYPE", "pubsub"))

        await wait_until(nobody, FAST, timeout=15)


async def hold_for_ever(lock: AsyncLock) -> None:
    async with lock:
        await for_ever()


async def test_a_client_that_is_closed_before_anything_was_sent(nodes: Nodes) -> None:
    client = nodes.client()
    sync = Coordinator(client)
    hub_of(sync).check()
    await client.aclose()
    with pytest.raises(CoordinatorClosed):
        await sync.lock("a").acquire()


async def test_the_first_nodes_are_gone(nodes: Nodes) -> None:
    """One startup node is nowhere, one stands still: another is asked."""
    with EmbeddedServer(port=0) as still:
        still.pause()
        startup = [ClusterNode("127.0.0.1", 1), ClusterNode(still.host, still.port or 0)]
        startup.append(ClusterNode(nodes.primaries[2].host, nodes.primaries[2].port or 0))
        client = RedisCluster(startup_nodes=startup)
        async with asyncio.timeout(9):
            for shard in EVERY_SHARD:
                async with AsyncLock(client, nodes.name_at(shard)):
                    pass
        await client.aclose()
        still.resume()


async def test_one_of_the_first_nodes_is_no_cluster(nodes: Nodes) -> None:
    """What one of them refuses another may answer."""
    with EmbeddedServer(port=0) as plain:
        for good in (nodes.primaries[0], nodes.primaries[1]):
            startup = [ClusterNode(it.host, it.port or 0) for it in (plain, good)]
            client = RedisCluster(startup_nodes=startup)
            async with AsyncLock(client, "a").acquire(timeout=5):
                pass
            await client.aclose()


async def test_a_node_without_slots(nodes: Nodes) -> None:
    """It was reset, or has not joined yet: another one is asked, or itself again later, as that may change."""
    good = nodes.primaries[0]
    with EmbeddedServer(port=0, args=("--cluster-enabled", "yes")) as lone:
        for startup in ([lone, good], [good, lone]):
            client = RedisCluster(startup_nodes=[ClusterNode(it.host, it.port or 0) for it in startup])
            async with AsyncLock(client, "a").acquire(timeout=5):
                pass
            await client.aclose()
        client = RedisCluster(host=lone.host, port=lone.port or 0)
        async with Coordinator(client, retry_for=0.3) as sync:
            with pytest.raises(Unreachable, match="knows of no slots"):
                await sync.lock("a").acquire()
        async with Coordinator(client) as sync:
            waiting = asyncio.create_task(sync.lock("a").acquire(timeout=10))
            await wait_until(lambda: sync.connection_error, FAST, timeout=15)
            await nodes.say(lone, "CLUSTER", "ADDSLOTS", *range(16384))
            await (await waiting).release()
        await client.aclose()


async def test_it_is_no_cluster(server: EmbeddedServer) -> None:
    client = RedisCluster(host=server.host, port=server.port or 0)
    with pytest.raises(CommandRefused, match=r"cluster support disabled.*use a redis\.asyncio\.Redis"):
        await AsyncLock(client, "a").acquire(timeout=5)
    await client.aclose()


async def test_a_client_of_one_node_is_told_what_to_use(nodes: Nodes) -> None:
    node = nodes.owner("a")
    elsewhere = next(it for it in nodes.primaries if it is not node)
    async with elsewhere.client() as client:
        with pytest.raises(CommandRefused, match=r"MOVED .*RedisCluster"):
            await AsyncLock(client, "a").acquire()
        async with Coordinator(client, push="never") as polling:
            with pytest.raises(CommandRefused, match=r"MOVED .*RedisCluster"):
                await polling.lock("a").acquire()


async def test_a_user_without_the_rights(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    """CLUSTER SLOTS is needed; PUBSUB NUMSUB is not."""
    rights = ("+@all", "~*", "&*")
    for node in nodes.primaries:
        await nodes.say(node, "ACL", "SETUSER", "blind", "on", ">x", *rights, "-cluster")
        await nodes.say(node, "ACL", "SETUSER", "deaf", "on", ">x", *rights, "-pubsub")
    async with nodes.client(username="deaf", password="x") as client, Coordinator(client) as sync:
        lock = sync.lock(nodes.name_at(1))
        lease = await lock.acquire()
        waiting = asyncio.create_task(lock.acquire())
        await wait_until(waits(lock), FAST, timeout=15)
        await lease.release()
        await (await waiting).release()
        assert hub_of(sync).pushes
    assert not caplog.records
    client = nodes.client(username="blind", password="x")
    with pytest.raises(PermissionDenied, match="cluster"):
        await AsyncLock(client, "a").acquire()
    await client.aclose()


async def test_a_user_is_unknown_to_one_node(nodes: Nodes) -> None:
    """Its names are refused; waiters at others wait on."""
    for node in nodes.primaries[:2]:
        await nodes.say(node, "ACL", "SETUSER", "some", "on", ">x", "+@all", "~*", "&*")
    await nodes.say(nodes.primaries[2], "ACL", "DELUSER", "some")
    async with nodes.client() as holder, Coordinator(holder) as other:
        lock = AsyncLock(other, nodes.name_at(1))
        lease = await lock.acquire()
        client = nodes.client(username="some", password="x")
        async with Coordinator(client) as sync:
            waiter = asyncio.create_task(AsyncLock(sync, nodes.name_at(1)).acquire())
            await wait_until(waits(lock), FAST, timeout=15)
            with pytest.raises(PermissionDenied, match="WRONGPASS"):
                await AsyncLock(sync, nodes.name_at(2)).acquire(timeout=5)
            assert not waiter.done()
            await lease.release()
            await (await asyncio.wait_for(waiter, 1)).release()
        await client.aclose()


async def test_scripts_refused_by_every_node_together_fall_back_once(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    """The fall back to polling is made once."""
    for node in nodes.primaries:
        await nodes.say(node, "ACL", "SETUSER", "deaf", "on", ">x", "+@all", "~*", "&*", "-subscribe")
    async with nodes.client(username="deaf", password="x") as client, Coordinator(client) as sync:

        async def use(shard: int) -> None:
            async with sync.lock(nodes.name_at(shard)):
                pass

        await asyncio.gather(*map(use, EVERY_SHARD))
        assert not hub_of(sync).pushes
        assert len(caplog.records) == 1


async def test_a_key_of_another_slot_in_a_transaction(nodes: Nodes, client: RedisCluster) -> None:
    """On another shard the server finds it out: nothing is written, and what is known of the slots stays."""
    here, there = nodes.name_at(0), nodes.name_at(1)

    async def early(tx: Transaction) -> None:
        await tx.get(there)

    async def late(tx: Transaction) -> None:
        await tx.get(here)
        tx.multi()
        tx.set(here, 1)
        tx.set(there, 1)

    for body in (early, late):
        with pytest.raises(TransactionMisuse, match=r"another hash slot of the cluster.*common hash tag"):
            await asyncio.wait_for(transaction(client, body, here), 9)
    async with AsyncLock(client, f"{{{here}}}:lock") as lease:
        with pytest.raises(TransactionMisuse, match="another hash slot"):
            async with lease.transaction() as tx:
                await late(tx)
    assert await client.exists(here) == await client.exists(there) == 0


async def test_a_key_of_another_slot_of_the_same_shard_is_not_watched(nodes: Nodes, client: RedisCluster) -> None:
    """It would work until one of the slots is moved. Where the keys are does not matter, so nothing is sent."""
    here, beside = nodes.name_at(0), nodes.name_at(0, "beside")

    async def body(tx: Transaction) -> None:
        await tx.get(here)
        await tx.watch(f"{{{here}}}:more", beside)

    async def crossing(tx: Transaction) -> None:
        await tx.get(here)
        tx.multi()
        tx.set(here, 1)
        tx.set(beside, 1)

    async def guarded(lease: Lease) -> None:
        async with lease.transaction() as tx:
            await body(tx)

    wrong = rf"'{beside}' is in another hash slot of the cluster than .*common hash tag"
    with pytest.raises(TransactionMisuse, match=wrong):
        await transaction(client, body, here)
    with pytest.raises(TransactionMisuse, match="another hash slot"):  # as the server says
        await transaction(client, crossing, here)
    async with AsyncLock(client, f"{{{here}}}:lock") as lease:
        with pytest.raises(TransactionMisuse, match=wrong):
            await guarded(lease)
    assert await client.exists(here) == await client.exists(beside) == 0


async def test_redlock_takes_no_cluster(nodes: Nodes, client: RedisCluster) -> None:
    with pytest.raises(TypeError, match="know nothing of each other"):
        AsyncRedlock([client], "a")  # type: ignore[list-item]


async def test_one_client_in_two_threads(nodes: Nodes) -> None:
    """Each has an event loop, and learns of moves there."""
    name = nodes.name_at(0, "threads")
    client = nodes.client()
    errors: list[object] = []

    async def use(turns: int) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        async with Coordinator(client) as sync:
            for _ in range(turns):
                Cluster.of(client).moved("")
                await Cluster.of(client).refresh()
                for shard in EVERY_SHARD:
                    async with sync.lock(nodes.name_at(shard, "threads")):
                        pass

    await asyncio.gather(*(asyncio.to_thread(asyncio.run, use(20)) for _ in range(2)))
    assert errors == []
    assert not await AsyncLock(client, name).locked()
    await client.aclose()


ROOT = Path(__file__).parents[2]
FORGOTTEN = """
import gc
from weakref import ref
from redis.asyncio import RedisCluster
from redis_sync_aio import AsyncLock
from tests.support.inside import Cluster

client = RedisCluster(host="127.0.0.1", port=1)
assert Cluster.of(client) is Cluster.of(client)
AsyncLock(client, "a")
gone = ref(Cluster.of(client))
del client
for _ in range(2):  # its cycle, and then the cluster's
    gc.collect()
assert gone() is None
"""


def test_it_is_forgotten_with_its_client() -> None:
    """In a process of its own, where the collector finds nothing but that client; whatever it warns of is an error."""
    command = [sys.executable, "-W", "error", "-c", FORGOTTEN]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stderr) == (0, "")
