"""A lone task in one process, now and then, against 64 busy tasks in another. How long does it wait?

The busy tasks ask again immediately, and their sections are empty. The lone task pauses for a random time between its
turns. At the same time, PINGs over a bare protocol measure the round trip of that process.
"""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial

from ..contestant import Contestant
from ..contestants import BY_NAME
from ..measure import contest, middle, percentile, waits_of
from ..raw import RawProtocol
from ..scenario import Bench, Column, Round, Scenario
from ..workers import Desk
from .contention import KEY, Result, compete, holds_of, race, verify, warm_up

BUSY = 64
SHORTEST, LONGEST = 0.001, 0.003
"""Seconds between two turns of the lone task."""
PING = 0.002
"""Seconds between two PINGs."""


async def crowd(desk: Desk, contestant: str, seconds: float, side: int) -> tuple[Result, list[float]]:
    """Run the busy tasks."""
    return await compete(desk, contestant, BUSY, seconds, 0.0, side=side), []


async def lone(desk: Desk, contestant: str, seconds: float, side: int) -> tuple[Result, list[float]]:
    """Return the result of `race` for one task with pauses, and the milliseconds of round trips."""
    player = BY_NAME[contestant](desk.url)
    await player.open()
    raw = await RawProtocol.open(desk.url)
    trips: list[tuple[int, int]] = []
    try:
        await warm_up(desk, player, [player.grip(f"warm:{side}")])
        pause = partial(random.uniform, SHORTEST, LONGEST)
        over = asyncio.Event()
        pinging = asyncio.create_task(_ping(raw, trips, over))
        result = await race(desk, player, [player.grip(KEY)], seconds, 0.0, pause=pause)
        over.set()
        await pinging
        return result, [(end - start) / 1e6 for start, end in trips if result[0] <= start and end <= result[1]]
    finally:
        await raw.close()
        await player.close()


async def _ping(raw: RawProtocol, trips: list[tuple[int, int]], over: asyncio.Event) -> None:
    while not over.is_set():
        start = time.monotonic_ns()
        await raw.command(b"PING")
        trips.append((start, time.monotonic_ns()))
        await asyncio.sleep(PING)


def _play(bench: Bench, contestant: type[Contestant]) -> Round:
    [(busy, _), (alone, trips)], _ = bench.run(contestant, [crowd, lone], seconds=bench.scale.contest)
    start, end = max(busy[0], alone[0]), min(busy[1], alone[1])
    crowded, single = holds_of(busy[3]), holds_of(alone[3])
    waits = [wait / 1e6 for wait in waits_of(single, start, end)]
    figures = {
        "p50_ms": middle(waits),
        "p99_ms": percentile(waits, 0.99),
        "longest_ms": max(waits),
        "turns": len(waits),
        "trip_ms": middle(trips),
        "trip_p99_ms": percentile(trips, 0.99),
        "busy_per_second": contest(crowded, start, end).per_second,
    }
    return Round(figures, verify(bench, crowded + single))


LONE = Scenario(
    "lone", "A lone task against 64 busy tasks of another process, one key", _play,
    (
        Column("p50_ms", "wait p50 ms", 2),
        Column("p99_ms", "wait p99 ms", 2),
        Column("longest_ms", "longest wait ms", 2),
        Column("turns", "turns"),
        Column("trip_ms", "round trip p50 ms", 2),
        Column("trip_p99_ms", "round trip p99 ms", 2),
        Column("busy_per_second", "busy grants/s"),
    ),
    "p99_ms", quick=False,
)  # fmt: skip
