"""``replicas=``: replicas confirm a grant before its caller has it, or it is given back.

A replica that is stopped confirms nothing. So a request that returns while it is stopped was not confirmed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio
from redis import Redis as BlockingRedis
from redis.asyncio import Connection, ConnectionPool, Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncReentrantLock,
    AsyncRobustLock,
    AsyncSemaphore,
    Coordinator,
    Unreachable,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed, NotReplicated, PermissionDenied
from redis_sync_aio.testing.servers import ClusterTopology, SentinelTopology

from ..support.body import FAST, waits

pytestmark = pytest.mark.real

NAME = "orders:42"
LONG = 60.0
"""Seconds in which a replica that was stopped is certainly back."""
SHORT = 0.3

MAKES: dict[str, Callable[..., Any]] = {
    "lock": AsyncLock,
    "shared lock": lambda sync, name, **options: AsyncLock(sync, name, share=True, **options),
    "semaphore": lambda sync, name, **options: AsyncSemaphore(sync, name, 1, **options),
    "reader": lambda sync, name, **options: AsyncReadWriteLock(sync, name, **options).read(),
    "writer": lambda sync, name, **options: AsyncReadWriteLock(sync, name, **options).write(),
    "reentrant lock": AsyncReentrantLock,
    "robust lock": AsyncRobustLock,
    "multi-lock": lambda sync, name, **options: AsyncMultiLock(sync, [name, "another"], **options),
}
EXCLUSIVE = ["lock", "shared lock", "semaphore", "writer"]


def blocked_by_wait(clients: list[dict[str, str]]) -> list[str]:
    """Return the ids of the clients that a WAIT blocks."""
    return [it["id"] for it in clients if it["cmd"] == "wait" and "b" in it["flags"]]


class Pair:
    """A primary and its replica."""

    def __init__(self, primary: EmbeddedServer, replica: EmbeddedServer) -> None:
        self.primary, self.replica = primary, replica
        self.admin: Any = BlockingRedis.from_url(primary.url)

    def follows(self) -> None:
        """Return when the replica has what the primary has."""
        while not self.admin.wait(1, 1000):
            pass

    def waits(self) -> int:
        """Return how many WAIT the primary has executed."""
        return int(self.admin.info("commandstats").get("cmdstat_wait", {"calls": 0})["calls"])

    def clients(self, blocked: bool = False) -> list[str]:
        """Return the ids of the clients; ``blocked``: of those that a WAIT blocks."""
        found = self.admin.client_list()
        return blocked_by_wait(found) if blocked else [it["id"] for it in found if it["cmd"] != "replconf"]

    async def blocks(self) -> bool:
        """Return whether a WAIT blocks a client."""
        return bool(self.clients(blocked=True))

    @asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        """Stop the replica for a while."""
        self.replica.pause()
        try:
            yield
        finally:
            self.replica.resume()


@pytest.fixture(scope="module")
def servers() -> Iterator[Pair]:
    quickly = "--repl-diskless-sync-delay", "0"
    with EmbeddedServer(port=0, args=quickly) as primary, EmbeddedServer(port=0, args=quickly) as replica:
        pair = Pair(primary, replica)
        with pair.admin, BlockingRedis.from_url(replica.url) as other:
            other.replicaof(primary.host, str(primary.port))
            pair.follows()
            yield pair


@pytest_asyncio.fixture
async def pair(servers: Pair) -> Pair:
    servers.admin.flushall()
    servers.follows()
    return servers


@pytest_asyncio.fixture
async def sync(pair: Pair) -> AsyncIterator[Coordinator]:
    async with pair.primary.client() as client, Coordinator(client) as coordinator:
        yield coordinator


@pytest_asyncio.fixture
async def other(pair: Pair) -> AsyncIterator[Coordinator]:
    async with pair.primary.client() as client, Coordinator(client) as coordinator:
        yield coordinator


async def ends(task: asyncio.Task[Any]) -> Any:
    async with asyncio.timeout(LONG):
        return await task


async def refused(acquiring: Awaitable[object]) -> NotReplicated:
    with pytest.raises(NotReplicated) as caught:
        async with asyncio.timeout(LONG):
            await acquiring
    return caught.value


# -- what is confirmed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", MAKES)
async def test_a_grant_is_not_known_before_a_replica_has_it(what: str, pair: Pair, sync: Coordinator) -> None:
    it = MAKES[what](sync, NAME, replicas=1, replicated_within=LONG)
    await (await it.acquire()).release()
    async with pair.stopped():
        task = asyncio.create_task(it.acquire())
        await wait_until(pair.blocks, FAST, timeout=LONG)
        assert not task.done()
    lease = await ends(task)
    assert lease.remaining() > 10
    await lease.release()
    assert not await AsyncLock(sync, NAME).locked()


@pytest.mark.parametrize("what", MAKES)
@pytest.mark.parametrize("tries", [False, True])
async def test_too_few_replicas(what: str, tries: bool, pair: Pair, sync: Coordinator, other: Coordinator) -> None:
    """The grant is given back, and the error says how many replicas had it."""
    it = MAKES[what](sync, NAME, replicas=2, replicated_within=SHORT)
    error = await refused(it.try_acquire() if tries else it.acquire())
    assert (error.name in (NAME, "another"), error.replicas, error.found) == (True, 2, 1)
    assert "1 of the 2 replicas that were asked for had the grant within 0.3 seconds: it was given back" in str(error)
    async with asyncio.timeout(LONG), MAKES[what](other, NAME, replicas=1, replicated_within=LONG):
        pass


async def test_a_stopped_replica_delays_no_other_request(pair: Pair, sync: Coordinator) -> None:
    """Nothing waits behind the WAIT: not on the link."""
    async with pair.stopped():
        task = asyncio.create_task(sync.lock(NAME, replicas=1, replicated_within=LONG).acquire())
        await wait_until(pair.blocks, FAST, timeout=LONG)
        for _ in range(20):
            async with sync.lock("another"):
                pass
        assert not task.done()
        await wait_until(pair.blocks, FAST, timeout=LONG)
    await (await ends(task)).release()


@pytest.mark.parametrize("what", EXCLUSIVE)
async def test_a_grant_that_is_handed_over_is_confirmed(
    what: str, pair: Pair, sync: Coordinator, other: Coordinator
) -> None:
    """The process that hands it over has written it, on a connection of its own."""
    holder = await MAKES[what](other, NAME).acquire()
    it = MAKES[what](sync, NAME, replicas=1, replicated_within=LONG)
    task = asyncio.create_task(it.acquire())
    await wait_until(waits(it), FAST, timeout=LONG)
    async with pair.stopped():
        await holder.release()
        await wait_until(pair.blocks, FAST, timeout=LONG)
        assert not task.done()
    lease = await ends(task)
    assert lease.fence > holder.fence
    await lease.release()


async def test_an_identity_that_joins_is_confirmed(pair: Pair, sync: Coordinator, other: Coordinator) -> None:
    """If it is not, the lease that it would have joined stays."""
    held = await other.lock(NAME).acquire(identity="me")
    lock = sync.lock(NAME, replicas=1, replicated_within=LONG)
    async with pair.stopped():
        await refused(sync.lock(NAME, replicas=1, replicated_within=SHORT).acquire(identity="me"))
        task = asyncio.create_task(lock.acquire(identity="me"))
        await wait_until(pair.blocks, FAST, timeout=LONG)
        assert not task.done()
    lease = await ends(task)
    assert lease.fence == held.fence
    await held.release()
    await other.lock("forever", ttl=None).acquire(identity="me")
    error = await refused(sync.lock("forever", replicas=1).acquire(identity="me"))
    assert "it has no ttl" in str(error)
    await other.lock("forever").release(identity="me")


async def test_an_inner_lease_of_a_reentrant_lock_needs_no_confirmation(pair: Pair, sync: Coordinator) -> None:
    lock = sync.reentrant_lock(NAME, replicas=1)
    async with lock:
        before = pair.waits()
        async with pair.stopped(), lock:
            assert lock.depth() == 2
        assert pair.waits() == before


async def test_tasks_that_share_have_one_confirmation(pair: Pair, sync: Coordinator) -> None:
    """A grant that rests in the process was confirmed; tasks that ask for more replicas do not share it."""
    lock = sync.lock(NAME, share=True, linger=LONG, replicas=1, replicated_within=LONG)

    async def use() -> None:
        async with lock:
            pass

    await asyncio.gather(*(use() for _ in range(20)))
    async with pair.stopped():
        await use()
    assert await sync.lock(NAME).locked()
    await refused(sync.lock(NAME, share=True, replicas=2, replicated_within=SHORT).acquire(timeout=LONG))
    async with asyncio.timeout(LONG):
        await use()


async def test_many_grants_share_a_wait(pair: Pair, sync: Coordinator) -> None:
    locks = [sync.lock(f"order:{number}", replicas=1, replicated_within=LONG) for number in range(50)]
    async with sync.lock(NAME, replicas=1):
        before = pair.waits()
    leases = await asyncio.gather(*(lock.acquire() for lock in locks))
    assert pair.waits() - before <= 25
    await asyncio.gather(*(lease.release() for lease in leases))


async def test_requests_with_little_and_much_patience(pair: Pair, sync: Coordinator) -> None:
    """One that asks for more replicas, or waits longer, holds up no other."""
    long = asyncio.create_task(sync.lock("long", replicas=2, replicated_within=LONG).acquire())
    await wait_until(pair.blocks, FAST, timeout=LONG)
    async with asyncio.timeout(LONG / 2), sync.lock("easy", replicas=1):
        pass
    await refused(sync.lock("short", replicas=2, replicated_within=SHORT).acquire())
    assert not long.done()
    long.cancel()
    with suppress(asyncio.CancelledError):
        await long


async def test_without_pushes(pair: Pair) -> None:
    async with pair.primary.client() as client, Coordinator(client, push="never") as sync:
        async with sync.lock(NAME, replicas=1):
            pass
        await refused(sync.lock(NAME, replicas=2, replicated_within=SHORT).acquire())


async def test_a_script_that_the_server_forgot(pair: Pair, sync: Coordinator) -> None:
    """WAIT counts behind the last write. So the renewal that is sent again has to come before it."""
    lock = sync.lock(NAME, replicas=1, replicated_within=LONG)
    async with lock:
        pass
    pair.admin.script_flush()
    async with pair.stopped():
        task = asyncio.create_task(lock.acquire())
        await wait_until(pair.blocks, FAST, timeout=LONG)
        assert not task.done()
    await (await ends(task)).release()


# -- what ends a confirmation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", MAKES)
async def test_p5_a_cancelled_request_gives_its_grant_back(
    what: str, pair: Pair, sync: Coordinator, other: Coordinator
) -> None:
    async with pair.stopped():
        task = asyncio.create_task(MAKES[what](sync, NAME, replicas=1, replicated_within=LONG).acquire())
        await wait_until(pair.blocks, FAST, timeout=LONG)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(LONG), MAKES[what](other, NAME):
            pass


async def test_close_ends_a_confirmation_and_the_connection(pair: Pair) -> None:
    before = pair.clients()
    async with pair.primary.client() as client, pair.stopped():
        sync = Coordinator(client)
        task = asyncio.create_task(sync.lock(NAME, replicas=1, replicated_within=LONG).acquire())
        await wait_until(pair.blocks, FAST, timeout=LONG)
        await sync.aclose()
        with pytest.raises(CoordinatorClosed):
            await ends(task)
        assert pair.admin.get(NAME) is None

    async def gone() -> bool:
        return set(pair.clients()) <= set(before)

    await wait_until(gone, FAST, timeout=LONG)


async def test_a_lost_connection_is_replaced_once(pair: Pair, sync: Coordinator) -> None:
    lock = sync.lock(NAME, replicas=1, replicated_within=LONG)

    async def cut() -> None:
        await wait_until(pair.blocks, FAST, timeout=LONG)
        for client in pair.clients(blocked=True):
            pair.admin.client_kill_filter(_id=client)

    async with pair.stopped():
        task = asyncio.create_task(lock.acquire())
        await cut()
        await wait_until(pair.blocks, FAST, timeout=LONG)
    await (await ends(task)).release()
    async with pair.stopped():
        task = asyncio.create_task(lock.acquire())
        await cut()
        await cut()
        error = await refused(task)
        assert error.found == 0
        assert "closed the connection" in str(error)
        assert not await lock.locked()  # behind the release, which `pair.admin` might overtake


async def test_a_grant_that_the_server_lost_is_not_confirmed(pair: Pair, sync: Coordinator) -> None:
    lock = sync.lock(NAME, replicas=1, replicated_within=SHORT)
    async with pair.stopped():
        task = asyncio.create_task(lock.acquire())
        await wait_until(pair.blocks, FAST, timeout=LONG)
        pair.admin.set(NAME, "of somebody")
        await refused(task)
        assert pair.admin.get(NAME) == b"of somebody"


class Elsewhere(Connection):
    """Connections of a client: the first leads to one server, all others to another one."""

    ports: list[int]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.port = self.ports.pop(0) if len(self.ports) > 1 else self.ports[0]


async def test_a_second_connection_to_another_server_confirms_nothing(pair: Pair) -> None:
    """There is a replica behind each of them."""
    with EmbeddedServer(port=0) as stranger:
        Elsewhere.ports = [pair.primary.port or 0, stranger.port or 0]
        pool: Any = ConnectionPool(Elsewhere)
        async with Redis(connection_pool=pool) as client, Coordinator(client) as sync:
            error = await refused(sync.lock(NAME, replicas=1).acquire())
            assert "a server with other data" in str(error)
        await pool.disconnect()


async def test_a_user_without_the_right(pair: Pair, other: Coordinator) -> None:
    pair.admin.execute_command("ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all", "-wait")
    user = Redis.from_url(pair.primary.url, username="app", password="secret")
    async with user as client, Coordinator(client) as sync:
        with pytest.raises(PermissionDenied, match="wait"):
            await sync.lock(NAME, replicas=1).acquire()
    async with asyncio.timeout(LONG), other.lock(NAME):
        pass


async def test_d6_a_failover_after_the_grant() -> None:
    """The replica that is promoted did not have it: nobody may think that it holds the lock."""
    async with SentinelTopology() as group, group.client() as client, Coordinator(client) as sync:
        lock = sync.lock(NAME, replicas=1, replicated_within=LONG)
        async with lock:
            pass
        await group.cut_replication()
        task = asyncio.create_task(lock.acquire())

        async def blocks() -> bool:
            return bool(blocked_by_wait(await group.call(group.primary, "CLIENT LIST")))

        await wait_until(blocks, FAST, timeout=LONG)
        group.primary.kill()
        group.replica.resume()
        await group.promoted()
        await refused(task)
        async with asyncio.timeout(LONG):
            lease = await taken_again(sync)
            await lease.release()


async def taken_again(sync: Coordinator) -> Any:
    """Acquire at the new primary, which connections may reach later than the sentinels name it."""
    while True:
        with suppress(Unreachable):
            return await sync.lock(NAME).acquire()


@pytest.mark.ci
async def test_each_shard_of_a_cluster_confirms_its_grants() -> None:
    nodes = ClusterTopology(replicas=1, node_timeout=LONG)
    async with nodes, nodes.client() as client, Coordinator(client) as sync:
        names = [nodes.name_at(shard) for shard in range(3)]
        options: dict[str, Any] = {"replicas": 1, "replicated_within": LONG}
        async with sync.multi_lock(names, **options):
            pass
        nodes.replicas[0].pause()
        task = asyncio.create_task(sync.lock(names[0], **options).acquire())
        async with asyncio.timeout(LONG), sync.lock(names[1], **options), sync.lock(names[2], **options):
            assert not task.done()
        await refused(sync.multi_lock([names[1], "other"], replicas=2, replicated_within=SHORT).acquire())
        nodes.replicas[0].resume()
        await (await ends(task)).release()


# -- arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", MAKES)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"replicas": -1}, ValueError, "replicas must be 0 or more"),
        ({"replicas": 1001}, ValueError, "replicas must be 1000 or less"),
        ({"replicas": True}, TypeError, "replicas must be a whole number"),
        ({"replicas": 1.0}, TypeError, "replicas must be a whole number"),
        ({"replicated_within": 0}, ValueError, "replicated_within must be between 0.01 seconds"),
        ({"replicas": 1, "replicated_within": None}, TypeError, "replicated_within must be seconds"),
        ({"replicas": 1, "engine": "watch"}, ValueError, "needs scripts"),
    ],
)
async def test_bad_arguments(what: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MAKES[what](Redis(), NAME, **options)


async def test_a_lease_without_an_end_cannot_be_confirmed(pair: Pair, sync: Coordinator) -> None:
    with pytest.raises(ValueError, match="replicas needs a ttl"):
        sync.lock(NAME, ttl=None, replicas=1)
    async with sync.lock(NAME, ttl=None, max_hold=60, replicas=1, replicated_within=timedelta(minutes=1)) as lease:
        assert lease.remaining() > 10
