"""The command `bench`: how fast locks are on a given server, in a few seconds, by public functions only."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from redis_sync_aio import Coordinator
from redis_sync_aio._core.keys import lock_keys

from ._session import Session, Shared, counted, execute

EXITS = {0: "it was measured"}
PREFIX = "redis-sync-aio-bench"


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of a measurement. Durations are seconds."""

    alone_per_second: float
    """Acquire and release by one task, one after the other: two round trips for each pair."""
    alone_median: float
    together_per_second: float
    """The same by many tasks at the same time, each with a lock of its own, over one connection."""
    tasks: int
    handover_median: float | None
    """From the release to the moment when the next holder, on another connection, goes on."""
    handover_p99: float | None
    handovers: int


def bench(
    shared: Shared,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, metavar="S",
        help="Seconds for each of the three measurements.")] = 2.0,
    tasks: Annotated[int, typer.Option(min=1, max=1000, metavar="N",
        help="Tasks that acquire at the same time, in the second one.")] = 16,
) -> None:  # fmt: skip
    """Measure how fast locks are on this server, from this machine. It takes a few seconds.

    It measures pairs of acquire and release by one task, the same by many tasks with a lock each, and the time in
    which a lock goes over from one client to another that waits. The locks have names of their own, and are deleted.
    """

    async def body(session: Session) -> int:
        figures = await measure(session, seconds, tasks)
        session.output.show(asdict(figures), lambda console: show(figures, session.address.shown, console))
        return 0

    execute(shared, body)


async def measure(session: Session, seconds: float, tasks: int) -> Figures:
    """Take all three measurements, one after the other."""
    async with AsyncExitStack() as stack:
        sync = await stack.enter_async_context(Coordinator(session.client, prefix=session.prefix))
        other = await stack.enter_async_context(Coordinator(session.client, prefix=session.prefix))
        alone = await stack.enter_async_context(_names(session, 1))
        many = await stack.enter_async_context(_names(session, tasks))
        contended = await stack.enter_async_context(_names(session, 1))
        durations = await _pairs(sync, alone[0], time.monotonic() + seconds)
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(_pairs(sync, name, began + seconds)) for name in many]
        took = time.monotonic() - began
        handovers = sorted(await _handovers([sync, other], contended[0], seconds))
        return Figures(
            len(durations) / sum(durations),
            median(durations),
            sum(len(one.result()) for one in running) / took,
            tasks,
            median(handovers) if handovers else None,
            handovers[len(handovers) * 99 // 100] if handovers else None,
            len(handovers),
        )


async def _pairs(sync: Coordinator, name: str, until: float) -> list[float]:
    """Acquire and release a lock again and again; return how long each pair took. The first one connects."""
    lock = sync.lock(name)
    await (await lock.acquire()).release()
    durations: list[float] = []
    while not durations or time.monotonic() < until:
        began = time.perf_counter()
        await (await lock.acquire()).release()
        durations.append(time.perf_counter() - began)
    return durations


async def _handovers(syncs: list[Coordinator], name: str, seconds: float) -> list[float]:
    """Let two clients take turns with one lock; return how long it took from each release to the next holder."""
    released: list[float] = []
    found: list[float] = []
    until = time.monotonic() + seconds

    async def take_turns(sync: Coordinator) -> None:
        lock = sync.lock(name)
        while time.monotonic() < until:
            async with await lock.acquire() as lease:
                if released:
                    found.append(time.perf_counter() - released.pop())
                while time.monotonic() < until:
                    if (await lock.statistics()).waiting:  # so the release goes to a client that waits
                        released.append(time.perf_counter())
                        await lease.release()
                        break

    async with asyncio.TaskGroup() as group:
        for sync in syncs:
            group.create_task(take_turns(sync))
    return found


@asynccontextmanager
async def _names(session: Session, count: int) -> AsyncIterator[list[str]]:
    """Yield names that nobody else has; nothing of them is left behind."""
    names = [f"{PREFIX}:{secrets.token_hex(6)}" for _ in range(count)]
    try:
        yield names
    finally:
        delete: Callable[..., Awaitable[object]] = session.client.delete
        for name in names:
            await delete(*lock_keys(name.encode(), session.prefix.encode()).all)


def show(figures: Figures, address: str, console: Console) -> None:
    """Print the figures as a table."""
    table = Table(title=f"Locks on {address}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_row("acquire and release, one task", f"{figures.alone_per_second:,.0f} pairs per second")
    table.add_row("  a pair (two round trips), median", f"{figures.alone_median * 1000:,.2f} ms")
    table.add_row(
        f"the same, {counted(figures.tasks, 'task')} with a lock each",
        f"{figures.together_per_second:,.0f} pairs per second",
    )
    if figures.handover_median is not None and figures.handover_p99 is not None:
        table.add_row("release to the next client that waits, median", f"{figures.handover_median * 1000:,.2f} ms")
        table.add_row("  99 of 100 within", f"{figures.handover_p99 * 1000:,.2f} ms")
    console.print(table)
