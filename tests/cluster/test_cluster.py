"""P10: everything works on a Redis Cluster, whose shards have their names among them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any
from weakref import ref

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
from redis_sync_aio.errors import PermissionDenied, StaleFence, TransactionMisuse
from redis_sync_aio.testing.servers import SLOTS
from redis_sync_aio.types import Transaction

from ..support.body import FAST, for_ever, waits
from ..support.inside import Cluster, hub_of
from ..support.topologies import SHARDS, Nodes, user

EVERY_SHARD = range(SHARDS)


@pytest_asyncio.fixture
async def client(nodes: Nodes) -> AsyncIterator[RedisCluster]:
    async with nodes.client() as client:
        yield client


@pytest_asyncio.fixture(params=["auto", "never"])
async def sync(request: pytest.FixtureRequest, client: RedisCluster) -> AsyncIterator[Coordinator]:
    async with Coordinator(client, push=request.param) as sync:
        yield sync


@pytest_asyncio.fixture
async def other(nodes: Nodes) -> AsyncIterator[Coordinator]:
    async with nodes.client() as client, Coordinator(client) as other:
        yield other


# -- every primitive -----------------------------------------------------------------------------------------------


async def test_p1_p2_p8_locks_of_every_shard(nodes: Nodes, sync: Coordinator, other: Coordinator) -> None:
    """Two processes and many names: one holder at a time, each has its turns, with rising fences."""
    names = [nodes.name_at(shard, like) for shard in EVERY_SHARD for like in ("a", "b")]
    held: set[str] = set()
    fences: dict[str, list[int]] = {name: [] for name in names}

    async def use(source: Coordinator, name: str) -> None:
        for _ in range(3):
            async with AsyncLock(source, name, ttl=5) as lease:
                assert name not in held
                held.add(name)
                fences[name].append(lease.fence)
                await asyncio.sleep(0)
                held.remove(name)

    await asyncio.gather(*(use(source, name) for source in (sync, other) for name in names for _ in range(2)))
    assert all(len(found) == 12 and found == sorted(set(found)) for found in fences.values())
    assert other.connections == SHARDS


async def test_p3_p9_a_waiter_is_woken_by_a_push(nodes: Nodes, client: RedisCluster, other: Coordinator) -> None:
    """Idle waiters send nothing, and the one whose turn it is gets it without a look of its own."""

    async def scripts_run(shard: int) -> int:
        found = await nodes.call(nodes.primaries[shard], "INFO", "commandstats")
        return int(found["cmdstat_evalsha"]["calls"])

    async with Coordinator(client) as sync:
        for shard in EVERY_SHARD:
            lease = await sync.lock(nodes.name_at(shard)).acquire()
            lock = other.lock(nodes.name_at(shard))
            waiter = asyncio.create_task(lock.acquire())
            await wait_until(waits(lock), FAST, timeout=15)
            before = await scripts_run(shard)
            await lease.release()
            granted = await waiter
            assert await scripts_run(shard) == before + 1
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


async def test_a_multi_lock_over_all_shards(nodes: Nodes, sync: Coordinator, other: Coordinator) -> None:
    """All or nothing, whatever the order of the names: ABBA."""
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

    async with asyncio.timeout(60):
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
            await deduct(tx)

        @watch_retry(sync, key, exactly_once=True)
        async def read(tx: Transaction, key: str = key) -> int:
            left = int(await tx.get(key) or 0)
            tx.multi()
            return left

        assert await read() == 4


async def test_keys_of_several_slots_are_refused_in_a_transaction(nodes: Nodes, client: RedisCluster) -> None:
    """On another shard the server finds it out. On the same one it would work until a slot moves: nothing is sent."""
    here, beside, there = nodes.name_at(0), nodes.name_at(0, "beside"), nodes.name_at(1)

    async def read_elsewhere(tx: Transaction) -> None:
        await tx.get(there)

    async def watch_beside(tx: Transaction) -> None:
        await tx.get(here)
        await tx.watch(f"{{{here}}}:more", beside)

    async def write_elsewhere(tx: Transaction, key: str = there) -> None:
        await tx.get(here)
        tx.multi()
        tx.set(here, 1)
        tx.set(key, 1)

    async def write_beside(tx: Transaction) -> None:
        await write_elsewhere(tx, beside)

    async def guarded(lease: Lease, body: Any) -> None:
        async with lease.transaction() as tx:
            await body(tx)

    named = rf"'{beside}' is in another hash slot of the cluster than .*common hash tag"
    any_of_them = "another hash slot"
    for body, said in {
        read_elsewhere: rf"{any_of_them} of the cluster.*common hash tag",
        write_elsewhere: rf"{any_of_them} of the cluster.*common hash tag",
        watch_beside: named,
        write_beside: any_of_them,  # as the server says
    }.items():
        with pytest.raises(TransactionMisuse, match=said):
            await asyncio.wait_for(transaction(client, body, here), 9)
    async with AsyncLock(client, f"{{{here}}}:lock") as lease:
        for body in (write_elsewhere, watch_beside):
            with pytest.raises(TransactionMisuse, match=any_of_them):
                await guarded(lease, body)
    assert [await client.exists(key) for key in (here, beside, there)] == [0, 0, 0]


async def test_what_a_cluster_cannot_do_is_refused(nodes: Nodes, client: RedisCluster) -> None:
    async with AsyncMultiLock(client, [nodes.name_at(0), nodes.name_at(1)]) as lease:
        with pytest.raises(ValueError, match="several hash slots of the cluster"):
            lease.transaction()
    with pytest.raises(TypeError, match="know nothing of each other"):
        AsyncRedlock([client], "a")  # type: ignore[list-item]


async def test_p11_locks_of_others(nodes: Nodes, client: RedisCluster) -> None:
    """redis-py's own method, with our class, and the classic pattern: both exclude ours."""
    for shard in EVERY_SHARD:
        name = nodes.name_at(shard)
        lock: Any = client.lock(name, timeout=5, lock_class=Lock)
        async with lock:
            assert await AsyncLock(client, name).try_acquire() is None
        await client.set(name, "theirs", nx=True, px=5000)
        with pytest.raises(AcquireTimeout):
            await AsyncLock(client, name).acquire(timeout=0.05)


# -- clients -------------------------------------------------------------------------------------------------------


async def test_p12_a_bare_client(nodes: Nodes) -> None:
    """Its implicit coordinator ends when the client is closed, and no connection is left."""
    body_is_in = asyncio.Event()

    async def hold(lock: AsyncLock) -> None:
        async with lock:
            body_is_in.set()
            await for_ever()

    async with nodes.client() as client:
        lease = await AsyncLock(client, nodes.name_at(1)).acquire()
        body = asyncio.create_task(hold(AsyncLock(client, nodes.name_at(2))))
        await body_is_in.wait()
    with pytest.raises(LeaseLost, match="client was closed"):
        await body
    with pytest.raises(LeaseLost):
        lease.check()

    async def nothing_listens() -> bool:
        found = [str(await nodes.call(node, "CLIENT", "LIST", "TYPE", "pubsub")) for node in nodes.primaries]
        return not any("sub=1" in it for it in found)

    await wait_until(nothing_listens, FAST, timeout=15)


def test_what_is_known_of_a_cluster_is_forgotten_with_its_client() -> None:
    client = RedisCluster(host="127.0.0.1", port=1)
    AsyncLock(client, "a")
    known = ref(Cluster.of(client))
    assert Cluster.of(client) is known()
    del client
    for _ in range(2):  # its cycle, and then the cluster's
        gc.collect()
    assert known() is None


@pytest.mark.real
async def test_a9_one_client_in_two_threads(nodes: Nodes) -> None:
    """Each has an event loop, and learns of moves there."""
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

    await asyncio.gather(*(asyncio.to_thread(asyncio.run, use(10)) for _ in range(2)))
    assert errors == []
    assert not await AsyncLock(client, nodes.name_at(0, "threads")).locked()
    await client.aclose()


# -- whom to ask first ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lone() -> Iterator[EmbeddedServer]:
    """A node without slots: it was reset, or has not joined yet."""
    with EmbeddedServer(port=0, args=("--cluster-enabled", "yes")) as node:
        yield node


@asynccontextmanager
async def starting_at(*servers: EmbeddedServer | int) -> AsyncIterator[RedisCluster]:
    """Yield a client of the cluster that these nodes, or ports, belong to."""
    ports = [it if isinstance(it, int) else it.port or 0 for it in servers]
    client = RedisCluster(startup_nodes=[ClusterNode("127.0.0.1", port) for port in ports])
    yield client
    await client.aclose()


@pytest.mark.real
async def test_another_one_of_the_first_nodes_is_asked(
    nodes: Nodes, server: EmbeddedServer, lone: EmbeddedServer
) -> None:
    """One is nowhere, one hangs, one is no cluster, one has no slots; wherever the good one stands among them."""
    good = nodes.primaries[2]
    with ExitStack() as stack:
        hangs = stack.enter_context(EmbeddedServer(port=0))
        hangs.pause()
        stack.callback(hangs.resume)
        for first in ((1, hangs, good), (server, good), (lone, good), (good, lone)):
            async with starting_at(*first) as client, asyncio.timeout(60):
                for shard in EVERY_SHARD:
                    async with AsyncLock(client, nodes.name_at(shard)):
                        pass


@pytest.mark.real
async def test_a_node_without_slots_is_asked_again_later(nodes: Nodes, lone: EmbeddedServer) -> None:
    async with starting_at(lone) as client:
        async with Coordinator(client, retry_for=0.3) as sync:
            with pytest.raises(Unreachable, match="knows of no slots"):
                await sync.lock("a").acquire()
        async with Coordinator(client) as sync:
            waiting = asyncio.create_task(sync.lock("a").acquire(timeout=60))
            await wait_until(lambda: sync.connection_error, FAST, timeout=15)
            await nodes.call(lone, "CLUSTER", "ADDSLOTS", *range(SLOTS))
            await (await waiting).release()


async def test_a_wrong_kind_of_client_is_told_what_to_use(nodes: Nodes, server: EmbeddedServer) -> None:
    async with starting_at(server) as client:
        with pytest.raises(CommandRefused, match=r"cluster support disabled.*use a redis\.asyncio\.Redis"):
            await AsyncLock(client, "a").acquire(timeout=5)
    elsewhere = next(it for it in nodes.primaries if it is not nodes.owner("a"))
    async with elsewhere.client() as plain, Coordinator(plain, push="never") as polling:
        for source in (plain, polling):
            with pytest.raises(CommandRefused, match=r"MOVED .*RedisCluster"):
                await AsyncLock(source, "a").acquire()


# -- users ---------------------------------------------------------------------------------------------------------


async def test_a_user_without_rights(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    """CLUSTER SLOTS is needed; PUBSUB NUMSUB is not."""
    async with user(nodes, "-pubsub") as client, Coordinator(client) as sync:
        lock = sync.lock(nodes.name_at(1))
        lease = await lock.acquire()
        waiting = asyncio.create_task(lock.acquire())
        await wait_until(waits(lock), FAST, timeout=15)
        await lease.release()
        await (await waiting).release()
        assert hub_of(sync).pushes
    assert not caplog.records
    async with user(nodes, "-cluster") as client:
        with pytest.raises(PermissionDenied, match="cluster"):
            await AsyncLock(client, "a").acquire()


async def test_a_user_who_is_unknown_to_one_node(nodes: Nodes, other: Coordinator) -> None:
    """Names of that node are refused; waiters at others wait on."""
    lock = other.lock(nodes.name_at(1))
    lease = await lock.acquire()
    async with user(nodes, at=(0, 1)) as client, Coordinator(client) as sync:
        waiter = asyncio.create_task(AsyncLock(sync, nodes.name_at(1)).acquire())
        await wait_until(waits(lock), FAST, timeout=15)
        with pytest.raises(PermissionDenied, match="WRONGPASS"):
            await AsyncLock(sync, nodes.name_at(2)).acquire(timeout=5)
        assert not waiter.done()
        await lease.release()
        await (await waiter).release()


async def test_links_refused_by_every_node_together_fall_back_to_polling_once(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    async with user(nodes, "-subscribe") as client, Coordinator(client) as sync:

        async def use(shard: int) -> None:
            async with sync.lock(nodes.name_at(shard)):
                pass

        await asyncio.gather(*map(use, EVERY_SHARD))
        assert not hub_of(sync).pushes
        assert len(caplog.records) == 1
