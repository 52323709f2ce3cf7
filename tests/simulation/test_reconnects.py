"""Fleets: after a cut of all its connections at one moment, a server has to be able to serve all attempts in time.

    python -m pytest -s --run-ci tests/simulation/test_reconnects.py

prints the figures of the page about capacity.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import NamedTuple

import pytest
from redis.asyncio import Redis

from redis_sync_aio import Backoff, Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action, FaultProxy, script

from ..support.inside import ATTEMPT, link_of, load, longest_pause, now

WITHIN = 5.0
"""Seconds that an attempt may take: the default."""


# -- The pause --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failed", "overdue", "clients", "longest"),
    [
        (0, 0, 0, 0.0),  # the first attempt comes immediately
        (1, 0, 0, 0.02),
        (2, 0, 0, 0.04),
        (9, 0, 0, 0.5),
        (9, 9, 0, 0.5),  # the number of clients is not known
        (9, 9, 100, 0.5),  # few clients cannot keep a server busy: the network is down
        (0, 0, 8_000, 0.0),  # all are served in half of the time that they have
        (9, 0, 8_000, 0.5),
        (1, 1, 1_000, 1.2),
        (3, 3, 1_000, 4.8),
        (9, 9, 1_000, 4.8),
        (0, 0, 16_000, 4.6),
        (9, 0, 16_000, 4.6),  # the server is down: after its restart all come
        (0, 0, 50_000, 25.0),
        (1, 1, 16_000, 19.2),
        (2, 2, 16_000, 38.4),
        (3, 3, 16_000, 60.0),
        (0, 0, 1_000_000, 60.0),
    ],
)
def test_the_longest_pause(failed: int, overdue: int, clients: int, longest: float) -> None:
    assert longest_pause(failed, overdue, clients, WITHIN) == pytest.approx(longest)


# -- Many clients and one server, in virtual time ---------------------------------------------------------------

Knows = Callable[[int, random.Random], float]
KNOWS: dict[str, Knows] = {
    "all": lambda clients, _: clients,
    "those that came before": lambda clients, draw: draw.random() * clients,
    "a third": lambda clients, _: clients / 3,
    "nothing": lambda _clients, _: 0,
}
"""The number of clients that each knows when the cut comes."""


class Return(NamedTuple):
    """The end of an outage."""

    back: int
    last: float
    attempts: float


def cut(clients: int, knows: Knows, *, cost: float = ATTEMPT, seconds: float = 600.0) -> Return:
    """Cut all connections at one moment; return how many clients are back, the last one when, and attempts for each.

    The server sets up one connection after the other, and each costs it ``cost`` seconds, also if the client has given
    up meanwhile.
    """
    draw = random.Random(7)
    known = [int(knows(clients, draw)) for _ in range(clients)]
    overdue = [0] * clients
    idle_at, attempts, back, last = 0.0, 0, 0, 0.0

    def pause(client: int) -> float:
        return draw.random() * longest_pause(overdue[client], overdue[client], known[client], WITHIN)

    coming = [(pause(client), client) for client in range(clients)]
    heapq.heapify(coming)
    while coming and coming[0][0] < seconds:
        time, client = heapq.heappop(coming)
        attempts += 1
        idle_at = max(idle_at, time) + cost
        if idle_at - time <= WITHIN:
            back, last = back + 1, idle_at
        else:
            overdue[client] += 1
            heapq.heappush(coming, (time + WITHIN + pause(client), client))
    return Return(back, last, attempts / clients)


@pytest.mark.parametrize(
    ("clients", "knows", "cost", "last", "attempts"),
    [
        (8_000, "nothing", 1, 2.5, 1.0),
        (16_000, "all", 1, 5.0, 1.0),
        (16_000, "those that came before", 1, 5.0, 1.0),
        (50_000, "all", 1, 25.1, 1.0),
        (50_000, "those that came before", 1, 25.1, 1.01),
        (50_000, "a third", 1, 60, 1.7),
        pytest.param(100_000, "all", 1, 55.1, 1.0, marks=pytest.mark.ci),
        pytest.param(100_000, "those that came before", 1, 95, 1.8, marks=pytest.mark.ci),
        (8_000, "all", 3, 20, 1.5),  # TLS
        (16_000, "all", 3, 60, 1.7),
    ],
)
def test_all_clients_come_back(clients: int, knows: str, cost: int, last: float, attempts: float) -> None:
    found = cut(clients, KNOWS[knows], cost=cost * ATTEMPT)
    print(f"\n{clients:,} clients, each knows {knows}, {cost * ATTEMPT * 1e6:.0f} us: {found}")
    assert found.back == clients
    assert found.last <= last
    assert found.attempts <= attempts


def test_without_the_number_of_clients_many_never_come_back() -> None:
    """It shows that the model has the fault that the pauses are for."""
    assert cut(50_000, KNOWS["nothing"], seconds=15).back < 17_000


# -- The package itself -----------------------------------------------------------------------------------------

PROCESSES = 20


def tell(proxy: FaultProxy, clients: int) -> None:
    """Let the server say that it has so many clients, whenever a connection is set up."""
    told = b"*2\r\n:1\r\n:%d\r\n" % clients
    proxy.on(script(load("link/listeners").sha), Action(reply=lambda it: it.rewrite(lambda _: told)), times=None)


@pytest.mark.parametrize(("clients", "most"), [(100, 1.0), (50_000, 25.5)])
async def test_links_come_back_as_the_number_of_clients_says(
    server: EmbeddedServer, redis: Redis, clients: int, most: float
) -> None:
    """The server tells it when a connection is set up; here a proxy does."""
    async with FaultProxy(server) as proxy, AsyncExitStack() as stack:
        tell(proxy, clients)
        links = []
        for number in range(PROCESSES):
            client = await stack.enter_async_context(proxy.client())
            links.append(await stack.enter_async_context(Coordinator(client)))
            await links[-1].lock(f"held {number}", ttl=600).acquire()
        begun = now()
        await proxy.cut()

        async def back(sync: Coordinator) -> float:
            await wait_until(lambda: sync.connections == 2, Backoff(cap=0.2), timeout=60)
            return now() - begun

        times = sorted(await asyncio.gather(*map(back, links)))
        assert times[-1] < most
        if clients > 10_000:
            assert times[-1] - times[0] > most / 5
            assert times[PROCESSES // 2] > most / 10


@pytest.mark.parametrize(("clients", "least", "most"), [(100, 20, 25), (16_000, 2, 14)])
async def test_attempts_become_few_while_they_are_not_answered(
    server: EmbeddedServer, redis: Redis, clients: int, least: int, most: int
) -> None:
    """In two minutes; an attempt takes five seconds, and the pause after it depends on the number of clients."""
    async with FaultProxy(server) as proxy, proxy.client() as client, Coordinator(client) as sync:
        tell(proxy, clients)
        await sync.lock("held", ttl=600).acquire()
        before = proxy.connections
        proxy.black_hole = True
        await proxy.cut()
        await asyncio.sleep(120)
        assert least <= proxy.connections - before <= most
        proxy.black_hole = False
        await wait_until(lambda: sync.connections == 2, Backoff(cap=0.2), timeout=120)


async def test_the_server_tells_how_many_clients_it_has(server: EmbeddedServer, redis: Redis) -> None:
    async with AsyncExitStack() as stack:
        links = []
        for _ in range(3):
            client = await stack.enter_async_context(server.client())
            links.append(await stack.enter_async_context(Coordinator(client)))
            await links[-1].lock("x").locked()
        known = [link_of(sync)._handshake.clients for sync in links]
        assert known[0] > 0
        assert known == [known[0], known[0] + 1, known[0] + 2]
