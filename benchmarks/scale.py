"""``python -m benchmarks.scale``: one event loop with very many leases, waiters or coordinators.

Each part has its own event loop and server. In each of its phases every callback of the loop is timed: nothing else can
run during the longest one. The time is CPU time, so that other work of the machine does not count. It excludes garbage
collections, since they grow with all objects of a process; the longest one has its own column. "stall" is the maximum
delay of a heartbeat of a millisecond by wall-clock time: all callbacks of a turn of the loop, garbage collections and
other programs together. The benchmark's own work is done in small steps.

    held          leases of one process, on as many names: taking, renewing, with one lease of 0.1 seconds among them,
                  a lost connection, closing
    waiters       tasks that wait for names that another process holds, a hundred for each name
    weighted      tasks that wait for permits of one semaphore, of weights 1 to 4, and get them
    coordinators  each with its own client, connection and lease
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import time
from asyncio import events
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from redis_sync_aio import AsyncLock, AsyncSemaphore, Coordinator, Lease
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed

AT_ONCE = 100
"""Number of tasks that acquire at the same time."""
BEAT = 0.001


@dataclass
class Phase:
    """The cost of one phase of a part."""

    part: str
    name: str
    seconds: float
    cpu: float
    callback: float
    """The longest callback; seconds."""
    what: str
    collection: float
    """The longest garbage collection; seconds."""
    stall: float


class Watch:
    """Times phases, and every callback of the event loop in them."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.phases: list[Phase] = []
        self._longest = 0.0
        self._what = ""
        self._stall = 0.0
        self._collecting = 0.0  # start of the current collection
        self._collected = 0.0  # total seconds
        self._collection = 0.0

    @contextmanager
    def callbacks(self) -> Iterator[None]:
        """Time all callbacks of event loops that run inside this context."""
        plain = events.Handle._run

        def timed(handle: Any) -> None:
            begun, callback = time.thread_time() - self._collected, handle._callback
            plain(handle)
            took = time.thread_time() - self._collected - begun
            if took > self._longest:
                self._longest, self._what = took, _name(callback)

        events.Handle._run = timed  # type: ignore
        gc.callbacks.append(self._collects)
        try:
            yield
        finally:
            events.Handle._run = plain  # type: ignore
            gc.callbacks.remove(self._collects)

    def _collects(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.thread_time()
        else:
            took = time.thread_time() - self._collecting
            self._collected += took
            self._collection = max(self._collection, took)

    async def _beat(self) -> None:
        while True:
            due = time.perf_counter() + BEAT
            await asyncio.sleep(BEAT)
            self._stall = max(self._stall, time.perf_counter() - due)

    @asynccontextmanager
    async def phase(self, name: str) -> AsyncIterator[None]:
        """Time a phase."""
        gc.collect()
        await asyncio.sleep(0.5)
        beat = asyncio.create_task(self._beat())
        await asyncio.sleep(0.01)
        self._longest = self._stall = self._collection = 0.0
        begun, cpu = time.perf_counter(), time.process_time()
        yield
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        longest, what, collection, stall = self._longest, self._what, self._collection, self._stall
        beat.cancel()
        self.phases.append(Phase(self.part, name, seconds, cpu / seconds, longest, what, collection, stall))


def _name(callback: Any) -> str:
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return f"task {owner.get_name()}"
    return str(getattr(callback, "__qualname__", callback))


async def _each(number: int, what: Callable[[int], Awaitable[object]], at_once: int = AT_ONCE) -> None:
    """Call ``what`` ``number`` times, from some tasks."""
    numbers = iter(range(number))

    async def some() -> None:
        for one in numbers:
            await what(one)

    await asyncio.gather(*(some() for _ in range(at_once)))


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.05)


async def _scripts(client: Redis) -> int:
    stats: dict[str, Any] = await client.info("commandstats")
    return int(stats.get("cmdstat_evalsha", {"calls": 0})["calls"])


async def _cut(client: Redis, coordinator: Coordinator, scripts: int) -> None:
    """Cut the connection of ``coordinator``, and wait until ``scripts`` scripts have run on the next one."""
    before, connections = await _scripts(client), coordinator.connections
    await client.client_kill_filter(_type="pubsub")
    await _until(lambda: coordinator.connections > connections)
    while await _scripts(client) < before + scripts:
        await asyncio.sleep(0.05)


async def held(watch: Watch, server: EmbeddedServer, number: int, ttl: float) -> None:
    """Hold ``number`` leases."""
    over = asyncio.Event()
    leases: list[Lease] = []
    async with server.client() as client, server.client() as aside:
        coordinator = Coordinator(client)

        async def take(one: int) -> None:
            leases.append(await AsyncLock(coordinator, f"held:{one}", ttl=ttl).acquire())

        async def holder(numbers: Iterator[int]) -> None:
            for one in numbers:
                await take(one)
            await over.wait()  # a lease is renewed as long as its task lives

        async with watch.phase("taking"):
            numbers = iter(range(number))
            holders = [asyncio.create_task(holder(numbers)) for _ in range(AT_ONCE)]
            await _until(lambda: len(leases) == number)
        async with watch.phase("renewing"):
            await asyncio.sleep(ttl)
        gc.collect()
        gc.freeze()  # a collection that scans all of these takes longer than the short lease lasts
        async with watch.phase("renewing, and one of 0.1 s"):
            short = await AsyncLock(coordinator, "short", ttl=0.1).acquire()
            await asyncio.sleep(ttl)
        if short.lost:
            watch.phases[-1].name += " (lost)"
        async with watch.phase("reconnect"):
            await _cut(aside, coordinator, number)
        assert not any(lease.lost for lease in leases)
        async with watch.phase("closing"):
            await coordinator.aclose()
        over.set()
        await asyncio.gather(*holders)


async def waiters(watch: Watch, server: EmbeddedServer, number: int) -> None:
    """Let ``number`` tasks wait, a hundred for each name."""
    async with server.client() as client, server.client() as aside, Coordinator(aside) as other:
        coordinator = Coordinator(client)
        names = [f"waited:{one}" for one in range(number // 100)]
        theirs = [await AsyncLock(other, name, ttl=300).acquire() for name in names]
        tasks: list[asyncio.Task[None]] = []

        async def wait(name: str) -> None:
            with suppress(CoordinatorClosed):
                await AsyncLock(coordinator, name, ttl=300).acquire()

        async with watch.phase("queuing"):
            before = await _scripts(aside)
            for one in range(number):
                tasks.append(asyncio.create_task(wait(names[one % len(names)])))
                if one % 20 == 0:
                    await asyncio.sleep(0)
            while await _scripts(aside) < before + number:
                await asyncio.sleep(0.05)
        async with watch.phase("waiting"):
            await asyncio.sleep(5)
        async with watch.phase("reconnect"):
            await _cut(aside, coordinator, number)
        async with watch.phase("closing"):
            await coordinator.aclose()
            for task in tasks:
                await task
        for lease in theirs:
            await lease.release()


async def weighted(watch: Watch, server: EmbeddedServer, number: int) -> None:
    """Let ``number`` tasks wait for permits of one semaphore, and get them."""
    async with server.client() as client, server.client() as aside, Coordinator(client) as coordinator:
        semaphore = AsyncSemaphore(coordinator, "weighted", limit=8, ttl=300)
        first = await semaphore.acquire(weight=8)
        tasks: list[asyncio.Task[None]] = []

        async def use(weight: int) -> None:
            async with semaphore.acquire(weight=weight):
                pass

        async with watch.phase("queuing"):
            before = await _scripts(aside)
            for one in range(number):
                tasks.append(asyncio.create_task(use(1 + one % 4)))
                if one % 20 == 0:
                    await asyncio.sleep(0)
            while await _scripts(aside) < before + number:
                await asyncio.sleep(0.05)
        async with watch.phase("granting all"):
            await first.release()
            for task in tasks:
                await task


async def coordinators(watch: Watch, server: EmbeddedServer, number: int, ttl: float) -> None:
    """Let ``number`` coordinators hold a lease each."""
    made: list[Coordinator] = []
    over = asyncio.Event()
    leases: list[Lease] = []
    async with AsyncExitStack() as stack:

        async def make(numbers: Iterator[int]) -> None:
            for one in numbers:
                client = await stack.enter_async_context(server.client())
                made.append(coordinator := Coordinator(client))
                leases.append(await coordinator.lock(f"of:{one}", ttl=ttl).acquire())
            await over.wait()

        async with watch.phase("taking"):
            numbers = iter(range(number))
            makers = [asyncio.create_task(make(numbers)) for _ in range(20)]
            await _until(lambda: len(leases) == number)
        async with watch.phase("renewing"):
            await asyncio.sleep(ttl)
        assert not any(lease.lost for lease in leases)
        async with watch.phase("closing"):
            await _each(number, lambda one: made[one].aclose(), 20)
        over.set()
        await asyncio.gather(*makers)


def table(phases: list[Phase]) -> Table:
    """Return the figures as a table."""
    shown = Table("part", "phase", "seconds", "CPU", "longest callback", "which", "gc", "stall")
    for phase in phases:
        shown.add_row(
            *(phase.part, phase.name, f"{phase.seconds:.1f}", f"{phase.cpu:.0%}", f"{phase.callback * 1000:.1f} ms"),
            *(phase.what, f"{phase.collection * 1000:.1f} ms", f"{phase.stall * 1000:.1f} ms"),
        )
    return shown


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Run a tenth of everything.")] = False,
    part: Annotated[str, typer.Option(help="Only these parts, separated by commas.")] = "",
) -> None:
    """Measure one event loop with very many leases, waiters or coordinators."""
    size = 10 if quick else 1
    ttl = 6.0 if quick else 30.0
    parts: dict[str, Callable[[Watch, EmbeddedServer], Awaitable[None]]] = {
        "held": lambda watch, server: held(watch, server, 50_000 // size, ttl),
        "waiters": lambda watch, server: waiters(watch, server, 50_000 // size),
        "weighted": lambda watch, server: weighted(watch, server, 20_000 // size),
        "coordinators": lambda watch, server: coordinators(watch, server, 2_000 // size, ttl),
    }
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logging.getLogger("redis_sync_aio").setLevel(logging.ERROR)
    phases: list[Phase] = []
    for name in part.split(",") if part else parts:

        async def run(name: str = name) -> list[Phase]:
            watch = Watch(name)
            async with EmbeddedServer() as server:
                with watch.callbacks():
                    await parts[name](watch, server)
            return watch.phases

        phases += asyncio.run(run())
    Console(width=140).print(table(phases))


if __name__ == "__main__":
    typer.run(main)
