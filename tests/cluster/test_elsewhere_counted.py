"""P1, P3: a grant is what the server holds, and not a message; who listens is counted where the keys are.

A proxy that knows commands may send SUBSCRIBE to another node of a cluster than the keys. The message of a script then
arrives over the bus, although that script counted nobody. So it must not be a grant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from redis_sync_aio import AsyncLock, AsyncSemaphore, Coordinator, Lease, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import PushUnavailable

from ..support.body import FAST, waits
from ..support.routing import Route, RoutingProxy
from ..support.topologies import EVEN, SHARDS, Nodes

pytestmark = pytest.mark.real

TASKS, TURNS = 6, 5
MUTEXES: dict[str, Callable[[Coordinator, str], Any]] = {
    "lock": AsyncLock,
    "semaphore": lambda sync, name: AsyncSemaphore(sync, name, limit=1),
}
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    # where scripts without keys go, and the rights of the user
    "subscribed elsewhere": (0, ()),
    "as if all were at one node": (1, ()),
    "the same, and nobody may ask who listens": (1, ("-pubsub",)),
}


def routes(nodes: Nodes, subscribe: int, keyless: int) -> Route:
    """Send commands on keys to their owners, SUBSCRIBE and PUBLISH to one node, scripts without keys to another."""

    def route(words: list[bytes]) -> int:
        name = words[0].upper()
        if name in (b"SUBSCRIBE", b"PUBLISH"):
            return subscribe
        if name in (b"EVAL", b"EVALSHA"):
            return owner(words[3]) if words[2] != b"0" else keyless
        if name in (b"CLIENT", b"INFO", b"PING", b"PUBSUB", b"SCRIPT"):
            return keyless
        return owner(words[1])

    def owner(key: bytes) -> int:
        return next(number for number in range(SHARDS) if key_slot(key) < EVEN[number + 1])

    return route


class Overlaps:
    """Counts the leases of a name that began before another one had ended, and fences that did not rise."""

    def __init__(self) -> None:
        self.leases = self.found = self._inside = self._fence = 0

    async def hold(self, lease: Lease) -> None:
        self.leases += 1
        self.found += self._inside != 0 or lease.fence <= self._fence
        self._fence = lease.fence
        self._inside += 1
        await asyncio.sleep(0.003)
        self._inside -= 1
        await lease.release()


@pytest.mark.parametrize("mutex", MUTEXES)
@pytest.mark.parametrize("case", CASES)
async def test_no_two_holders_behind_a_proxy_of_a_cluster(
    nodes: Nodes, case: str, mutex: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if what the link finds out at its start is that all is well, since its question went to that node."""
    keyless, rights = CASES[case]
    for node in nodes.primaries:
        await nodes.call(node, "ACL", "SETUSER", "app", "reset", "on", "nopass", "~*", "&*", "+@all", *rights)
    name, seen = nodes.name_at(0, f"mutex of {mutex}"), Overlaps()

    async def work(sync: Coordinator) -> None:
        for _ in range(TURNS):
            await seen.hold(await MUTEXES[mutex](sync, name).acquire(timeout=60))

    async with (
        RoutingProxy(nodes.primaries, routes(nodes, subscribe=1, keyless=keyless)) as proxy,
        AsyncExitStack() as stack,
    ):
        processes = []
        for _ in range(2):
            client = await stack.enter_async_context(Redis(host=proxy.host, port=proxy.port, username="app"))
            processes.append(await stack.enter_async_context(Coordinator(client)))
        async with asyncio.TaskGroup() as group:
            for number in range(TASKS):
                group.create_task(work(processes[number % 2]))
    for node in nodes.primaries:
        await nodes.call(node, "ACL", "DELUSER", "app")
    assert (seen.leases, seen.found) == (TASKS * TURNS, 0)
    polls = [record for record in caplog.records if getattr(record, "event", "") == "polling_instead"]
    assert len(polls) == (2 if keyless == 0 else 0), "each process says that it polls, and why"
    assert all("no listener" in record.getMessage() for record in polls)


async def test_a_link_that_must_push_is_refused(nodes: Nodes) -> None:
    """push="always" tells what is wrong, instead of waiting for messages that nobody sends."""
    async with (
        RoutingProxy(nodes.primaries, routes(nodes, subscribe=1, keyless=0)) as proxy,
        Redis(host=proxy.host, port=proxy.port) as client,
        Coordinator(client, push="always") as sync,
    ):
        with pytest.raises(PushUnavailable, match="no listener on rsa:"):
            await sync.lock("x").acquire()


async def test_two_servers_that_know_nothing_of_each_other(
    server: EmbeddedServer, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """SUBSCRIBE leads to a server that has no keys: grants are found by polling."""

    def route(words: list[bytes]) -> int:
        return words[0].upper() in (b"SUBSCRIBE", b"PUBLISH")

    async with (
        EmbeddedServer(port=0) as second,
        RoutingProxy([server, second], route) as proxy,
        Redis(host=proxy.host, port=proxy.port) as client,
        Coordinator(client) as sync,
        Coordinator(redis) as other,
    ):
        lease = await other.lock("x").acquire()
        waiting = asyncio.create_task(sync.lock("x").acquire(timeout=15))
        await wait_until(waits(other.lock("x")), FAST, timeout=15)
        await lease.release()
        granted = await waiting
        assert granted.fence > lease.fence
        await granted.release()
    assert [getattr(record, "event", "") for record in caplog.records] == ["polling_instead"]


@pytest.mark.parametrize("mutex", MUTEXES)
async def test_a_server_that_takes_no_writes_announces_no_grant(mutex: str) -> None:
    """A primary without its replicas refuses the release; the waiter must not be told that it is the holder."""
    async with (
        EmbeddedServer() as server,
        server.client() as client,
        server.client() as second,
        Coordinator(client) as sync,
        Coordinator(second) as other,
    ):
        mine, its = MUTEXES[mutex](sync, "x"), MUTEXES[mutex](other, "x")
        lease = await mine.acquire()
        waiting = asyncio.create_task(its.acquire())
        await wait_until(waits(mine), FAST, timeout=15)
        await client.config_set("min-replicas-to-write", 1)
        releasing = asyncio.create_task(lease.release())

        async def refused() -> bool:
            refusals: dict[str, Any] = await client.info("errorstats")
            return "errorstat_NOREPLICAS" in refusals

        await wait_until(refused, FAST, timeout=15)
        await its.statistics()  # what was sent to it before is there now
        assert not waiting.done()
        await client.config_set("min-replicas-to-write", 0)
        await releasing
        granted = await waiting
        assert granted.fence > lease.fence
        await granted.release()
