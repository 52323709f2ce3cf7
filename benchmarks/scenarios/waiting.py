"""S4: a hundred tasks of one process wait for a lock, or for permits: the cost, and the time to serve them all."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from ..contestant import Contestant, Grip
from ..contestants import BY_NAME
from ..measure import Hold, miscounted, overlaps, peak
from ..scenario import Bench, Column, Round, Scenario
from ..server_stats import ServerStats
from ..workers import Cells, Desk, sleep_until
from .permits import PERMITS, crowded

COUNTER = 0
KEY = "awaited"
SETTLE = 0.3
"""Seconds after which all requests have certainly reached the server."""


async def _wait_in_line(grip: Grip, cells: Cells, asked: list[None], holds: list[Hold]) -> None:
    start = time.monotonic_ns()
    asked.append(None)
    lease = await grip.acquire()
    got = time.monotonic_ns()
    seen = cells[COUNTER]
    await asyncio.sleep(0)
    cells[COUNTER] = seen + 1
    holds.append((start, got, time.monotonic_ns()))
    await grip.release(lease)


async def line(
    desk: Desk, contestant: str, waiters: int, idle: float, permits: int = 0
) -> tuple[dict[str, float], list[Hold]]:
    """Return the figures and the holds of all waiters."""
    player = BY_NAME[contestant](desk.url)
    with ServerStats(desk.url) as stats:
        others = stats.connections()
        await player.open()
        try:
            asked, holds = list[None](), list[Hold]()
            holders = [player.take(KEY, permits) for _ in range(permits or 1)]
            leases = [await holder.acquire() for holder in holders]
            crowd_grips = [player.take(KEY, permits) for _ in range(waiters)]
            bodies = [partial(_wait_in_line, grip, desk.cells, asked, holds) for grip in crowd_grips]
            crowd = asyncio.create_task(desk.run_tasks(bodies, player.threads))
            await sleep_until(lambda: len(asked) == waiters)
            await asyncio.sleep(SETTLE)
            before = stats.look()
            await asyncio.sleep(idle)
            cost = player.sends.cost(before, stats.look())
            connections = stats.connections() - others
            start = time.monotonic_ns()
            for holder, lease in zip(holders, leases, strict=True):
                await holder.release(lease)
            await crowd
            # This includes the last release, which ends the task. Its time is that of the loop, or of the thread.
            drained = (time.monotonic_ns() - start) / 1e6
        finally:
            await player.close()
    figures = {"commands_per_second": cost.commands / idle, "connections": connections, "drain_ms": drained}
    return figures, holds


def _play(permits: int, bench: Bench, contestant: type[Contestant]) -> Round:
    arguments = {"waiters": bench.scale.waiters, "idle": bench.scale.idle, "permits": permits}
    [worker] = bench.start([line], contestant=contestant.name, **arguments)
    figures, holds = worker.result()
    if permits:
        return Round(figures, crowded(contestant, peak([hold] for hold in holds), permits))
    return Round(figures, overlaps([hold] for hold in holds) + miscounted(bench.pool.cells[COUNTER], len(holds)))


_COLUMNS = (
    Column("commands_per_second", "commands/s while waiting", 1),
    Column("connections", "connections"),
    Column("drain_ms", "drain ms", 1),
)

WAITING = Scenario("s4", "S4: 100 tasks of one process wait for one lock", partial(_play, 0), _COLUMNS, "drain_ms")
WAITING_FOR_PERMITS = Scenario(
    "s4sem", "S4: 100 tasks of one process wait for a semaphore of 5", partial(_play, PERMITS), _COLUMNS, "drain_ms",
    game="semaphores", quick=False,
    refuses={"sorted-set": "each waiter polls a thousand times a second, and the last one gets in after seconds"},
)  # fmt: skip
