"""Compare `AsyncRedlock` on five servers with the bare protocol, a lock on one server, and other packages.

    python -m benchmarks.redlock                # one task, 50 tasks on names of their own, 8 tasks on one name
    python -m benchmarks.redlock --delay 2      # with 2 ms on the way to each server and back
    python -m benchmarks.redlock --stopped 2    # while two servers are stopped

pottery and redlock-ng take part if they are installed. The contestants take turns; the medians of the rounds are shown.
Run it on a machine that does nothing else: six processes share its cores.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib import import_module
from typing import Any

from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncRedlock
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import FaultProxy

from .raw import COMPARE_AND_DELETE, Command, RawProtocol, Word

Release = Callable[[], Awaitable[object]]
Acquire = Callable[[], Awaitable[Release | None]]


class Bare:
    """The protocol and nothing else: SET at all servers, on at three answers; no queue, no fence, no renewal."""

    def __init__(self, commands: list[Command], name: str) -> None:
        self._commands = commands
        self._name = name.encode()

    async def acquire(self) -> Release:
        token = secrets.token_hex(8).encode()
        await self._most(b"SET", self._name, token, b"NX", b"PX", 10_000)
        return lambda: self._most(b"EVAL", COMPARE_AND_DELETE, 1, self._name, token)

    async def _most(self, *words: Word) -> None:
        enough = asyncio.get_running_loop().create_future()
        left = len(self._commands) // 2 + 1

        def answered(_: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                enough.set_result(None)

        for command in self._commands:
            asyncio.ensure_future(command(*words)).add_done_callback(answered)
        await enough


def ours(clients: list[Redis], name: str) -> Acquire:
    lock = AsyncRedlock(clients, name, ttl=10)

    async def acquire() -> Release:
        return (await lock.acquire()).release

    return acquire


def single(clients: list[Redis], name: str) -> Acquire:
    lock = AsyncLock(clients[0], name, ttl=10)

    async def acquire() -> Release:
        return (await lock.acquire()).release

    return acquire


def pottery(clients: list[Redis], name: str) -> Acquire:
    kind: Any = import_module("pottery").AIORedlock

    async def acquire() -> Release | None:
        lock = kind(key=name, masters=set(clients), auto_release_time=10)
        return lock.release if await lock.acquire() else None

    return acquire


def redlock_ng(clients: list[Redis], name: str) -> Acquire:
    kind: Any = import_module("redlock").AsyncRedlock
    made = kind(["redis://localhost"] * len(clients))  # it opens no connection before it is used
    made.client.instances = clients

    async def acquire() -> Release | None:
        lock = await made.acquire(name, 10_000, blocking=True)
        return (lambda: made.release(lock)) if lock is not None and lock.valid else None

    return acquire


Make = Callable[[list[Redis], str], Acquire]
CONTESTANTS: dict[str, Make] = {
    "AsyncRedlock": ours,
    "AsyncLock on one server": single,
    "pottery": pottery,
    "redlock-ng": redlock_ng,
}


class Figures:
    """What was measured of one contestant in one round."""

    def __init__(self) -> None:
        self.acquires: list[float] = []
        self.releases: list[float] = []
        self.pairs: list[int] = []

    async def work(self, acquire: Acquire, until: float) -> None:
        number = 0
        while (begin := time.perf_counter()) < until:
            release = await acquire()
            if release is None:
                continue
            held = time.perf_counter()
            with suppress(Exception):  # of a package that has lost it meanwhile
                await release()
            self.acquires.append(held - begin)
            self.releases.append(time.perf_counter() - held)
            number += 1
        self.pairs.append(number)

    def jain(self) -> float:
        """Return how evenly the tasks got it: 1.0 is the same for all."""
        squares = sum(number * number for number in self.pairs)
        return sum(self.pairs) ** 2 / (len(self.pairs) * squares) if squares else 0.0


@asynccontextmanager
async def five(delay: float) -> AsyncIterator[tuple[list[EmbeddedServer], list[Redis], list[Command]]]:
    """Start servers; yield them, a client of each, and a bare connection to each."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(EmbeddedServer()) for _ in range(5)]
        clients: list[Redis] = []
        commands: list[Command] = []
        for server in servers:
            client, url = server.client(), f"unix://{server.unix_socket}"
            if delay:
                proxy = await stack.enter_async_context(FaultProxy(server))
                proxy.latency = delay / 2
                client, url = proxy.client(), proxy.url
            clients.append(await stack.enter_async_context(client))
            raw = await RawProtocol.open(url)
            stack.push_async_callback(raw.close)
            commands.append(raw.command)
        yield servers, clients, commands


async def measure(make: Make, clients: list[Redis], args: Any, case: str) -> Figures:
    tasks, names = {"one task": (1, 1), "50 tasks": (50, 50), "one name": (8, 1)}[case]
    figures, name = Figures(), secrets.token_hex(4)
    until = time.perf_counter() + args.seconds
    working = [figures.work(make(clients, f"{name}:{number % names}"), until) for number in range(tasks)]
    await asyncio.gather(*working)
    return figures


async def main() -> None:
    """Measure, and print a table of each case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.redlock")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each contestant in each round: 1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds to each server and back")
    parser.add_argument("--stopped", type=int, default=0, help="how many servers are stopped")
    args = parser.parse_args()
    async with five(args.delay / 1000) as (servers, clients, commands):
        contestants = {**CONTESTANTS, "bare protocol": lambda _, name: Bare(commands, name).acquire}
        begin = time.perf_counter()
        await (await ours(clients, "first")() or main)()
        print(f"first pair: {(time.perf_counter() - begin) * 1000:.1f} ms")
        for server in servers[: args.stopped]:
            server.pause()
        try:
            for case in ("one task", "50 tasks", "one name"):
                await compare(case, contestants, clients, args)
        finally:
            for server in servers[: args.stopped]:
                server.resume()


async def compare(case: str, contestants: dict[str, Make], clients: list[Redis], args: Any) -> None:
    found: dict[str, list[Figures]] = {}
    for _ in range(args.rounds):
        for name, make in contestants.items():
            if (case == "one name" and name == "bare protocol") or (args.stopped and name != "AsyncRedlock"):
                continue
            with suppress(ImportError):
                found.setdefault(name, []).append(await measure(make, clients, args, case))
    print(f"{case:<25}{'pairs/s':>9}{'acquire p50, us':>17}{'release p50, us':>17}{'Jain':>7}")
    for name, rounds in found.items():
        pairs = statistics.median(sum(one.pairs) for one in rounds) / args.seconds
        acquire, release = (
            statistics.median(statistics.median(getattr(one, what) or [0.0]) for one in rounds) * 1e6
            for what in ("acquires", "releases")
        )
        jain = statistics.median(one.jain() for one in rounds)
        print(f"  {name:<23}{pairs:>9,.0f}{acquire:>17,.0f}{release:>17,.0f}{jain:>7.3f}")


if __name__ == "__main__":
    asyncio.run(main())
