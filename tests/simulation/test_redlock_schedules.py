"""P1, P5, P8, E9 of a Redlock: random schedules in virtual time, on real servers behind proxies.

A few tasks of two processes want one lock of five servers, whose clocks differ. A seeded choice delays, cuts and stops
servers, loses and repeats commands and replies, and restarts a server without its data, which then stays away for the
longest ttl and ten seconds. No two tasks hold the lock at the same time, fences rise, and nothing is left in the end.

    python -m pytest tests/simulation/test_redlock_schedules.py --run-ci
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from typing import Any, cast

import pytest

from redis_sync_aio import AcquireTimeout, AsyncRedlock, Coordinator, LeaseLost, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action, FaultProxy

from ..support.inside import lock_keys
from ..support.virtual import VirtualLoop
from ..support.wired import ACQUIRE, RELEASE, RENEW

NAME = "everywhere"
KEYS = lock_keys(NAME.encode())
SERVERS = 5
TTL = 6.0
WITHIN = 0.25
SECONDS = 60.0
"""How long a schedule lasts."""
AWAY = TTL + 10.5
"""How long a server that has forgotten all stays away, by the rule of the guide."""
FAULTS = (Action.CUT_BEFORE, Action.CUT_AFTER, Action.CUT_INSIDE_REPLY, Action.SWALLOW_REPLY, Action.DUPLICATE)


@pytest.fixture(scope="module")
def five() -> Iterator[list[EmbeddedServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(EmbeddedServer()) for _ in range(SERVERS)]


class World:
    """The servers, the ways to them, and what may happen to them."""

    def __init__(self, seed: int, away: float) -> None:
        self.chance = random.Random(seed)
        self.away = away
        self.proxies: list[FaultProxy] = []
        self.direct: list[Any] = []
        self.over = False
        self.inside = 0
        self.fences: list[int] = []
        self.failed = 0
        self.troubled: set[int] = set()

    async def work(self, lock: AsyncRedlock) -> None:
        """Hold the lock again and again, for longer and for less than it takes to renew it."""
        while not self.over:
            try:
                async with lock.acquire(timeout=self.chance.choice([0, 0.5, 5])) as lease:
                    assert not self.inside, "P1: two hold it"
                    assert not self.fences or lease.fence > self.fences[-1], "P8: a fence that does not rise"
                    self.fences.append(lease.fence)
                    self.inside += 1
                    try:
                        await asyncio.sleep(self.chance.choice([0, 0.001, 0.05, 0.2, 1, 4]))
                    finally:
                        self.inside -= 1
            except (LeaseLost, Unreachable, AcquireTimeout):
                self.failed += 1
            await asyncio.sleep(self.chance.choice([0, 0, 0.01, 0.3]))

    async def disturb(self) -> None:
        """Let one thing after the other happen, some of them at the same time."""
        async with asyncio.TaskGroup() as happening:
            ends = asyncio.get_running_loop().time() + SECONDS
            while asyncio.get_running_loop().time() < ends:
                happen = self.chance.choice([self.delay, self.lose, self.lose, self.hang, self.cut, self.forget])
                happening.create_task(happen(self.chance.randrange(SERVERS)))
                await asyncio.sleep(self.chance.choice([0.01, 0.3, 1, 3]))
        self.over = True

    async def delay(self, server: int) -> None:
        self.proxies[server].latency = self.chance.choice([0, 0, 0.001, 0.01, 0.1, 0.4])

    async def lose(self, server: int) -> None:
        command, fault = self.chance.choice([ACQUIRE, RELEASE, RENEW]), self.chance.choice(FAULTS)
        rule = self.proxies[server].on(command, fault, skip=self.chance.randrange(3))
        await asyncio.sleep(5)
        rule.cancel()

    async def hang(self, server: int) -> None:
        """Let nothing pass for longer and for less than an answer may take."""
        if server not in self.troubled and len(self.troubled) < 2:
            async with self.trouble(server):
                self.proxies[server].black_hole = True
                await asyncio.sleep(self.chance.choice([0.1, 0.3, 2, 8]))
                self.proxies[server].black_hole = False

    async def cut(self, server: int) -> None:
        """Be away with all data."""
        if server not in self.troubled and len(self.troubled) < 3:
            async with self.trouble(server):
                self.proxies[server].refuse = True
                await self.proxies[server].cut()
                await asyncio.sleep(self.chance.choice([0, 0.5, 3]))
                self.proxies[server].refuse = False

    async def forget(self, server: int) -> None:
        """Restart without data."""
        if server not in self.troubled and len(self.troubled) < 2:
            async with self.trouble(server):
                self.proxies[server].refuse = True
                await self.proxies[server].cut()
                await asyncio.sleep(0.01)  # what was on the way is there
                await self.direct[server].flushall()
                await self.direct[server].script_flush()
                await asyncio.sleep(self.away)
                self.proxies[server].refuse = False

    @asynccontextmanager
    async def trouble(self, server: int) -> AsyncIterator[None]:
        self.troubled.add(server)
        try:
            yield
        finally:
            self.troubled.discard(server)

    async def nothing_left(self) -> bool:
        return not [key for direct in self.direct for key in await direct.keys("*") if key != KEYS.fence]


async def play(five: list[EmbeddedServer], seed: int, away: float = AWAY) -> World:
    """Run one schedule."""
    world, loop = World(seed, away), cast(VirtualLoop, asyncio.get_running_loop())
    async with AsyncExitStack() as stack:
        for server in five:
            direct = await stack.enter_async_context(server.client())
            await direct.flushall()
            world.direct.append(direct)
            world.proxies.append(await stack.enter_async_context(FaultProxy(server)))
            loop.ahead[world.proxies[-1]._upstream] = world.chance.choice([0, 0, 0.03, -0.2, 2, -4])
        if world.chance.random() < 0.3:
            one = world.chance.choice(world.proxies)
            loop.ahead[one._upstream] = world.chance.choice([3600, -3600])
        workers = []
        for _ in range(2):
            process = []
            for proxy in world.proxies:
                redis = await stack.enter_async_context(proxy.client())
                coordinator = Coordinator(redis, response_timeout=world.chance.choice([0.5, 2]), retry_for=3)
                process.append(await stack.enter_async_context(coordinator))
            workers += [AsyncRedlock(process, NAME, ttl=TTL, answer_within=WITHIN) for _ in range(2)]
        async with asyncio.TaskGroup() as tasks:
            for worker in workers:
                tasks.create_task(world.work(worker))
            await world.disturb()
        for proxy in world.proxies:
            proxy.latency = 0.0
        await wait_until(world.nothing_left, timeout=120)
    return world


async def test_a_random_schedule(five: list[EmbeddedServer]) -> None:
    world = await play(five, 2)  # in which much happens
    print(f"{len(world.fences)} leases, {world.failed} requests without success")
    assert len(world.fences) > 10


@pytest.mark.ci
@pytest.mark.parametrize("seed", sorted({*range(40)} - {2}))
async def test_more_random_schedules(five: list[EmbeddedServer], seed: int) -> None:
    await play(five, seed)
