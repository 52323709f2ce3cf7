"""S4: a hundred tasks of one process wait for one lock: what that costs, and how fast they get through."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from ..contestants import BY_NAME, Contestant, Grip
from ..measure import Hold, miscounted, overlaps
from ..runner import Bench, Column, Round, Scenario
from ..server_stats import ServerStats
from ..workers import Cells, Desk, sleep_until

COUNTER = 0
KEY = "awaited"
SETTLE = 0.3
"""Seconds in which all requests are certainly at the server."""


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


async def line(desk: Desk, contestant: str, waiters: int, idle: float) -> tuple[dict[str, float], list[Hold]]:
    """Return the figures and the holds of all waiters."""
    player = BY_NAME[contestant](desk.url)
    with ServerStats(desk.url) as stats:
        others = stats.connections()
        await player.open()
        try:
            holder, asked, holds = player.grip(KEY), list[None](), list[Hold]()
            lease = await holder.acquire()
            bodies = [partial(_wait_in_line, player.grip(KEY), desk.cells, asked, holds) for _ in range(waiters)]
            crowd = asyncio.create_task(desk.run_tasks(bodies, player.threads))
            await sleep_until(lambda: len(asked) == waiters)
            await asyncio.sleep(SETTLE)
            before = stats.look()
            await asyncio.sleep(idle)
            cost = player.sends.cost(before, stats.look())
            connections = stats.connections() - others
            start = time.monotonic_ns()
            await holder.release(lease)
            await crowd
            # The last release is in it: the task ends with it. Its time is that of the loop, or of the thread.
            drained = (time.monotonic_ns() - start) / 1e6
        finally:
            await player.close()
    figures = {"commands_per_second": cost.commands / idle, "connections": connections, "drain_ms": drained}
    return figures, holds


def _play(bench: Bench, contestant: type[Contestant]) -> Round:
    [worker] = bench.start([line], contestant=contestant.name, waiters=bench.scale.waiters, idle=bench.scale.idle)
    figures, holds = worker.result()
    return Round(figures, overlaps([hold] for hold in holds) + miscounted(bench.pool.cells[COUNTER], len(holds)))


WAITING = Scenario(
    "s4", "S4: 100 tasks of one process wait for one lock", _play,
    (
        Column("commands_per_second", "commands/s while waiting", 1),
        Column("connections", "connections"),
        Column("drain_ms", "drain ms", 1),
    ),
    "drain_ms",
)  # fmt: skip
