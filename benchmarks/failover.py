"""``python -m benchmarks.failover``: seconds without a grant, and of two holders, around faults of the server.

Two coordinators with four tasks each take eight locks at random, for 20 ms, throughout the fault. A third one, with a
new client, joins when the new primary (or the restarted server) is known. So after a planned failover old connections
compete with a new one, each at its own primary. Of several runs the worst figures are shown. Takes about two minutes;
prints a table in Markdown.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from redis.asyncio import Redis, RedisCluster

from redis_sync_aio import AsyncLock, Coordinator, SyncError, wait_until
from redis_sync_aio._core.clock import now
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.servers import SOON, ClusterTopology, SentinelTopology

NAMES = [f"{{failover}}:{number}" for number in range(8)]
TTL, HOLD = 2.0, 0.02
BEFORE, TASKS = 1.5, 4
GRANTS = 50
"""Grants to the new client that end a case, after `Case.after` seconds at the earliest."""
PATIENCE = 30.0

Client: TypeAlias = Redis | RedisCluster
Connect: TypeAlias = Callable[[], Client]
Fault: TypeAlias = Callable[[], Awaitable[float]]
"""Causes the fault; returns the time (local clock) from which clients reach a server that accepts writes again."""


@dataclass
class Case:
    """A topology and a fault; ``set_up`` yields a function that connects, and the fault."""

    topology: str
    fault: str
    set_up: Callable[[], AsyncIterator[tuple[Connect, Fault]]]
    after: float = 2.0
    """Minimum seconds of observation after the fault."""
    runs: int = 1


@dataclass
class Record:
    """The grants of one case."""

    begun: float = 0.0
    back: float = 0.0
    holds: list[tuple[float, float, str]] = field(default_factory=list)
    by_new_client: int = 0

    def gap(self) -> float:
        """Return the longest time without a grant since the fault."""
        grants = sorted(begin for begin, _, _ in self.holds)
        return max((b - a for a, b in itertools.pairwise(grants) if b > self.begun), default=float("nan"))

    def until_granted(self) -> float:
        """Return the time from when a server accepted writes again to the next grant."""
        return min((begin for begin, _, _ in self.holds if begin >= self.back), default=float("nan")) - self.back

    def two_holders(self) -> float:
        """Return the time between the first and the last moment at which a lock had two holders."""
        moments: list[float] = []
        ends: dict[str, float] = {}
        for begin, until, name in sorted(self.holds):
            end = ends.get(name, begin)
            if begin < end:
                moments += [begin, min(until, end)]
            ends[name] = max(end, until)
        return max(moments) - min(moments) if moments else 0.0


async def work(sync: Coordinator, record: Record, over: asyncio.Event, *, new: bool = False) -> None:
    """Hold the lock again and again."""
    while not over.is_set():
        name = random.choice(NAMES)
        try:
            # The new client does not wait: leases held at the failover are held at the new primary, too, for a while.
            lease = await AsyncLock(sync, name, ttl=TTL).acquire(timeout=0.002 if new else 1)
        except SyncError:
            continue
        begin = now()
        await asyncio.sleep(HOLD)
        record.holds.append((begin, min(now(), lease._grant.deadline), name))
        record.by_new_client += new
        try:
            await lease.release()
        except SyncError:
            continue


async def play(case: Case) -> Record:
    """Cause the fault while the locks are used."""
    record, over = Record(), asyncio.Event()
    async with AsyncExitStack() as stack:
        connect, fault = await stack.enter_async_context(asynccontextmanager(case.set_up)())

        async def coordinator() -> Coordinator:
            client = connect()
            stack.push_async_callback(client.aclose)
            return await stack.enter_async_context(Coordinator(client, retry_for=1))

        async def enough() -> bool:
            return record.by_new_client >= GRANTS and now() >= record.begun + case.after

        async with asyncio.TaskGroup() as group:
            for sync in [await coordinator(), await coordinator()]:
                for _ in range(TASKS):
                    group.create_task(work(sync, record, over))
            await asyncio.sleep(BEFORE)
            record.begun = now()
            record.back = await fault()
            fresh = await coordinator()
            for _ in range(TASKS):
                group.create_task(work(fresh, record, over, new=True))
            try:
                await wait_until(enough, SOON, timeout=PATIENCE)
            finally:
                over.set()
    return record


async def standalone() -> AsyncIterator[tuple[Connect, Fault]]:
    """One server that restarts with its data."""
    async with EmbeddedServer(port=0, persistent=True) as server:

        async def restart() -> float:
            await asyncio.to_thread(server.restart, True)
            return now()

        yield server.client, restart


async def planned() -> AsyncIterator[tuple[Connect, Fault]]:
    """A failover that an operator requested from Sentinel."""
    async with SentinelTopology() as group:
        yield group.client, lambda: _fail_over(group)


async def planned_with_min_replicas() -> AsyncIterator[tuple[Connect, Fault]]:
    """The same, where a primary without a replica accepts no writes."""
    async with SentinelTopology() as group:
        for server in (group.primary, group.replica):
            async with server.client() as client:
                await client.config_set("min-replicas-to-write", 1)
                await client.config_set("min-replicas-max-lag", 1)
        yield group.client, lambda: _fail_over(group)


async def killed() -> AsyncIterator[tuple[Connect, Fault]]:
    """The primary of a Sentinel group dies."""
    async with SentinelTopology() as group:
        yield group.client, lambda: _kill(group)


async def _fail_over(group: SentinelTopology) -> float:
    await group.fail_over()
    return now()


async def _kill(group: SentinelTopology) -> float:
    await group.replicated()
    group.primary.kill()
    await group.promoted(any_sentinel=True)
    return now()


async def taken_over() -> AsyncIterator[tuple[Connect, Fault]]:
    """A shard of a cluster whose replica takes over on request."""
    async with ClusterTopology(replicas=1) as nodes:

        async def take_over() -> float:
            owner = nodes.owner(NAMES[0])
            await nodes.call(nodes.replicas[nodes.primaries.index(owner)], "CLUSTER", "FAILOVER")
            await nodes.promoted(owner)
            return now()

        yield nodes.client, take_over


async def shard_killed() -> AsyncIterator[tuple[Connect, Fault]]:
    """A shard of a cluster whose primary dies."""
    async with ClusterTopology(replicas=1) as nodes:

        async def kill() -> float:
            owner = nodes.owner(NAMES[0])
            owner.kill()
            await nodes.promoted(owner)
            return now()

        yield nodes.client, kill


CASES = [
    Case("one server", "restarts, with its data", standalone),
    Case("Sentinel", "planned failover", planned, after=9, runs=3),
    Case("Sentinel, min-replicas-to-write 1, max-lag 1", "planned failover", planned_with_min_replicas, after=15),
    Case("Sentinel", "the primary is killed (down-after 1 s)", killed),
    Case("Cluster", "planned failover of the shard", taken_over),
    Case("Cluster", "the primary of the shard is killed (node-timeout 1 s)", shard_killed),
]


def main() -> None:
    """Print the table."""
    logging.getLogger("redis_sync_aio").setLevel(logging.CRITICAL)
    titles = ("topology", "fault", "s without a grant", "of these since a server accepts writes", "s of two holders")
    print("| " + " | ".join(titles) + " |")
    print("|" + "---|" * len(titles))
    for case in CASES:
        figures: list[tuple[float, ...]] = []
        for _ in range(case.runs):
            record = asyncio.run(play(case))
            figures.append((record.gap(), record.until_granted(), record.two_holders()))
        worst = " | ".join(f"{max(found):.2f}" for found in zip(*figures, strict=True))
        print(f"| {case.topology} | {case.fault} | {worst} |", flush=True)


if __name__ == "__main__":
    main()
