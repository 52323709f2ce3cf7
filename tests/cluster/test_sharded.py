"""P3, P9, P10: from Redis 7.0 on a hand-over stays in its shard, and the end of the subscription is a notice.

An inbox is a channel in a slot of its shard. It listens to SPUBLISH and to PUBLISH: that goes to all nodes, and is
used by servers, users and engines without SPUBLISH.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.crc import key_slot
from redis.exceptions import ResponseError

from redis_sync_aio import AsyncLock, AsyncSemaphore, Coordinator, Lease, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.servers import SLOTS

from ..support.body import FAST, waits
from ..support.inside import cluster_link_of, hub_of, lock_keys
from ..support.rights import CHANNELS, KEYS, LOCKS, SHARDED_TOO
from ..support.topologies import EVEN, SHARDS, Nodes, moved_back, processes, user

pytestmark = pytest.mark.real

NEVER = 300.0
"""Seconds until a waiter would look again by itself."""
SILENT: dict[str, Any] = {"poll_cap": NEVER, "response_timeout": 60}
"""Options with which a process asks nothing by itself for a minute."""
TURNS = 10
MUTEXES: dict[str, Callable[..., Any]] = {
    "lock": AsyncLock,
    "semaphore": lambda sync, name, **options: AsyncSemaphore(sync, name, limit=1, **options),
    "shared": lambda sync, name: AsyncLock(sync, name, share=True),
}


@pytest.fixture(autouse=True)
async def sharded(nodes: Nodes) -> None:
    try:
        await nodes.call(nodes.primaries[0], "PUBSUB", "SHARDNUMSUB")
    except ResponseError:
        pytest.skip("this server has no sharded pub/sub")


async def calls(nodes: Nodes, node: EmbeddedServer) -> dict[str, int]:
    """Return how often a node ran PUBLISH and SPUBLISH, also in scripts, and what it sent to others because of them."""
    stats = await nodes.call(node, "INFO", "commandstats")
    found = {name: stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("publish", "spublish")}
    sent = dict(re.findall(r"cluster_stats_messages_(\w+)_sent:(\d+)", str(await nodes.call(node, "CLUSTER", "INFO"))))
    return found | {f"{kind} sent": int(sent.get(kind, 0)) for kind in ("publish", "publishshard")}


async def done_since(nodes: Nodes, node: EmbeddedServer, before: dict[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in (await calls(nodes, node)).items()}


def inbox_of(sync: Coordinator, name: str) -> bytes:
    return hub_of(sync).endpoint_of(lock_keys(name.encode())).inbox


async def hand_over(lease: Lease, holds: Any, waits_for: Any) -> Lease:
    """Release a lease to the one that waits, which looks never by itself."""
    waiting = asyncio.create_task(waits_for.acquire())
    await wait_until(waits(holds), FAST, timeout=15)
    await lease.release()
    return await asyncio.wait_for(waiting, 15)


@asynccontextmanager
async def there_and_back(nodes: Nodes, name: str, *both: Coordinator) -> AsyncIterator[tuple[EmbeddedServer, Any]]:
    """Yield the node of a name, and what hands it over from one process to the other and back."""
    locks = [sync.lock(name) for sync in both]

    async def turn() -> None:
        lease = await locks[0].acquire()
        lease = await hand_over(lease, *locks)
        lease = await hand_over(lease, *locks[::-1])
        await lease.release()

    await turn()
    yield nodes.owner(name), turn


@pytest.mark.parametrize("mutex", MUTEXES)
async def test_p9_a_hand_over_is_one_message_to_each_replica(mutex: str) -> None:
    """PUBLISH would be one to each of the five other nodes. A process that shares is told that others wait, too."""
    async with Nodes(replicas=1) as nodes, processes(nodes, poll_cap=NEVER) as both:
        name = nodes.name_at(0)
        locks = [MUTEXES[mutex](sync, name) for sync in both]
        for lock in locks:
            await (await lock.acquire()).release()
        lease, before = await locks[0].acquire(), await calls(nodes, nodes.primaries[0])
        for _ in range(TURNS):
            lease = await hand_over(lease, *locks)
            locks.reverse()
        messages = TURNS * (2 if mutex == "shared" else 1)
        expected = {"publish": 0, "publish sent": 0, "spublish": messages, "publishshard sent": messages}
        assert await done_since(nodes, nodes.primaries[0], before) == expected
        await lease.release()


async def test_p3_a_waiter_follows_when_the_slot_of_its_inbox_moves(nodes: Nodes) -> None:
    """Its name stays. It is told, queues again under another inbox, and hand-overs stay in the shard again."""
    name = nodes.name_at(0, "inbox")
    a, b, _ = nodes.primaries
    async with processes(nodes, **SILENT) as (sync, other):
        lease = await sync.lock(name).acquire()
        waiting = asyncio.create_task(other.lock(name).acquire())
        await wait_until(waits(sync.lock(name)), FAST, timeout=15)
        former = inbox_of(other, name)
        assert key_slot(former) in await nodes.slots(a)
        async with moved_back(nodes, former.decode()):
            await nodes.move(key_slot(former), a, b)

            async def queued_again() -> bool:
                tickets = await nodes.call(a, "ZRANGE", f"{{{name}}}:queue", 0, -1)
                return [ticket.partition(b"|")[0] for ticket in tickets] == [inbox_of(other, name)] != [former]

            await wait_until(queued_again, FAST, timeout=15)
            assert key_slot(inbox_of(other, name)) in await nodes.slots(a)
            before = await calls(nodes, a)
            await lease.release()
            granted = await asyncio.wait_for(waiting, 15)
            done = await done_since(nodes, a, before)
            assert (done["publish"], done["spublish"]) == (0, 1)
            await granted.release()


async def test_p3_d6_a_planned_failover_is_noticed(nodes: Nodes) -> None:
    """Neither holder nor waiter has anything to send, and the old primary closes no connection."""
    async with Nodes(replicas=1) as nodes, processes(nodes, **SILENT) as (sync, other):
        name = nodes.name_at(0)
        locks = [one.lock(name, ttl=None) for one in (sync, other)]
        lease = await locks[0].acquire()
        waiting = asyncio.create_task(locks[1].acquire())
        await wait_until(waits(locks[0]), FAST, timeout=15)
        former = [inbox_of(one, name) for one in (sync, other)]
        replica = await nodes.fail_over(nodes.primaries[0])

        async def have_moved() -> bool:
            present = [inbox_of(one, name) for one in (sync, other)]
            listens = await nodes.call(replica, "PUBSUB", "SHARDNUMSUB", *present)
            return present[0] != former[0] and present[1] != former[1] and listens[1::2] == [1, 1]

        await wait_until(have_moved, FAST, timeout=15)
        await lease.release()
        granted = await asyncio.wait_for(waiting, 15)
        assert granted.fence > lease.fence
        await granted.release()


@pytest.mark.parametrize("rights", ["-ssubscribe", "-spublish", "-ssubscribe -spublish", "-publish", "-pubsub"])
@pytest.mark.parametrize("whose", ["both", "first"])
async def test_p3_p10_users_without_a_right(
    nodes: Nodes, rights: str, whose: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Hand-overs are pushed by PUBLISH where it has to be. It makes no difference who of the two lacks the right."""
    name = nodes.name_at(0, "rights")
    async with (
        user(nodes, *rights.split()) as client,
        nodes.client() as unrestricted,
        Coordinator(client, push="always") as sync,
        Coordinator(client if whose == "both" else unrestricted, push="always") as other,
        there_and_back(nodes, name, sync, other) as (node, turn),
    ):
        before = await calls(nodes, node)
        await turn()
        done = await done_since(nodes, node, before)
        served = 2 if rights in ("-publish", "-pubsub") else 1 if (whose, rights) == ("first", "-ssubscribe") else 0
        assert (done["publish"], done["spublish"]) == (2 - served, served)
    assert not caplog.records


async def test_p3_p10_nodes_without_sharded_pub_sub() -> None:
    """As before Redis 7.0: what is unknown to them is refused, and hand-overs are pushed by PUBLISH."""
    without = ("--rename-command", "SPUBLISH", "", "--rename-command", "SSUBSCRIBE", "")
    async with (
        Nodes(SHARDS, bounds=EVEN, args=without) as nodes,
        processes(nodes, push="always") as both,
        there_and_back(nodes, "orders", *both) as (node, turn),
    ):
        inboxes, connections = ([inbox_of(sync, "orders") for sync in both], [sync.connections for sync in both])
        before = await calls(nodes, node)
        await turn()
        assert (await done_since(nodes, node, before))["publish"] == 2
        await nodes.call(node, "CLIENT", "KILL", "TYPE", "pubsub")
        await turn()
        assert [sync.connections for sync in both] == [count + 1 for count in connections]
        assert [inbox_of(sync, "orders") for sync in both] == inboxes, "SSUBSCRIBE was tried again, for the same ones"


@pytest.mark.parametrize("engine", ["lua", "watch"])
async def test_p2_p3_scripts_that_know_of_no_shards_hand_over_by_publish(nodes: Nodes, engine: str) -> None:
    """They count the listeners of the same channel. So do decisions with WATCH: EXEC takes no second slot."""
    name = nodes.name_at(0, f"earlier-{engine}")
    async with processes(nodes, poll_cap=NEVER) as (sync, other):
        lock, its = AsyncLock(sync, name, engine="watch" if engine == "watch" else "lua"), other.lock(name)
        lease = await lock.acquire()
        waiting = asyncio.create_task(its.acquire())
        await wait_until(waits(lock), FAST, timeout=15)
        inbox = inbox_of(other, name)
        assert await nodes.call(nodes.owner(name), "PUBSUB", "NUMSUB", inbox) == [inbox, 1]
        assert await nodes.call(nodes.owner(name), "PUBSUB", "SHARDNUMSUB", inbox) == [inbox, 1]
        before = await calls(nodes, nodes.owner(name))
        await lease.release()
        await (await asyncio.wait_for(waiting, 15)).release()
        done = await done_since(nodes, nodes.owner(name), before)
        assert (done["publish"] == 1, done["spublish"] == 0) == ((engine == "watch"),) * 2


@pytest.mark.parametrize("kind", ["lock", "semaphore"])
async def test_p2_a_waiter_that_is_gone_is_passed_over(nodes: Nodes, kind: str) -> None:
    """Nobody listens to its inbox in the shard any more."""
    name = nodes.name_at(0, f"gone-{kind}")
    async with processes(nodes, poll_cap=NEVER) as (sync, other), nodes.client() as client:
        lock, its = MUTEXES[kind](sync, name), MUTEXES[kind](other, name)
        lease = await lock.acquire()
        dying = Coordinator(client)
        gone = asyncio.create_task(MUTEXES[kind](dying, name).acquire())
        await wait_until(waits(lock), FAST, timeout=15)
        cluster_link_of(dying).close_without_loop()  # as if its process was killed: nothing more is sent
        gone.cancel()
        waiting = asyncio.create_task(its.acquire())
        await wait_until(waits(lock, 2), FAST, timeout=15)
        before = await calls(nodes, nodes.owner(name))
        await lease.release()
        await (await asyncio.wait_for(waiting, 15)).release()
        done = await done_since(nodes, nodes.owner(name), before)
        assert (done["publish"], done["spublish"]) == {"lock": (1, 2), "semaphore": (2, 3)}[kind]  # tried twice


async def test_a_shard_with_few_slots(nodes: Nodes) -> None:
    """It may take too long to find an inbox in one of them. Then PUBLISH does."""
    async with Nodes(bounds=(0, 1, EVEN[1], SLOTS)) as small, processes(small, poll_cap=NEVER) as both:
        name = next(name for n in range(10**6) if small.slot(name := f"n{n}") == 0)
        async with there_and_back(small, name, *both) as (_, turn):
            await turn()


@pytest.mark.parametrize("more", [SHARDED_TOO, ""])
async def test_d16_least_rights(nodes: Nodes, more: str) -> None:
    """Those of the documentation for one server suffice, and two more keep hand-overs in the shard."""
    name = next(f"orders:{n}" for n in range(100) if nodes.owner(f"orders:{n}") is nodes.primaries[0])
    rights = f"resetkeys {KEYS} {CHANNELS} -@all +cluster|slots +evalsha +eval +subscribe +publish {LOCKS} {more}"
    async with (
        user(nodes, *rights.split()) as client,
        nodes.client() as unrestricted,
        Coordinator(client, push="always") as sync,
        Coordinator(unrestricted) as other,
        there_and_back(nodes, name, sync, other) as (node, turn),
    ):
        before = await calls(nodes, node)
        await turn()
        assert (await done_since(nodes, node, before))["spublish"] == (2 if more else 0)
