"""S1 and S2: acquire and release without competition, by one task and by a hundred; locks, and semaphores."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from ..contestant import Contestant, Grip, Kind
from ..contestants import BY_NAME
from ..scenario import Bench, Column, Round, Scenario
from ..workers import Desk


async def _loop(grip: Grip, end: float, counts: list[int], ends: list[float]) -> None:
    """Acquire and release until ``end``. The loop gets its turns even if that never waits."""
    acquire, release, clock = grip.acquire, grip.release, time.monotonic
    count = 0
    while clock() < end:
        await release(await acquire())
        count += 1
        if count & 7 == 0:
            await asyncio.sleep(0)
    counts.append(count)
    ends.append(clock())


async def pairs(desk: Desk, contestant: str, tasks: int, seconds: float, permits: int = 0) -> tuple[int, float, float]:
    """Return pairs, seconds, seconds of CPU of this process. Every task has its own key and lock object."""
    return await pairs_of(desk, BY_NAME[contestant](desk.url), tasks, seconds, permits)


async def pairs_of(
    desk: Desk, player: Contestant, tasks: int, seconds: float, permits: int = 0
) -> tuple[int, float, float]:
    """Return `pairs` of a contestant that may be none of those of the scenarios."""
    await player.open()
    try:
        grips = [player.take(f"own:{number}", permits) for number in range(tasks)]
        await _run(desk, player, grips, 0.05)
        desk.meet()
        cpu, start = time.process_time(), time.monotonic()
        count, end = await _run(desk, player, grips, seconds)
        cpu = time.process_time() - cpu
        desk.meet()
        return count, end - start, cpu
    finally:
        await player.close()


async def _run(desk: Desk, player: Contestant, grips: Sequence[Grip], seconds: float) -> tuple[int, float]:
    counts: list[int] = []
    ends: list[float] = []
    end = time.monotonic() + seconds
    await desk.run_tasks([partial(_loop, grip, end, counts, ends) for grip in grips], player.threads)
    return sum(counts), max(ends)


def _play(tasks: int, permits: int, bench: Bench, contestant: type[Contestant]) -> Round:
    arguments = {"tasks": tasks, "seconds": bench.scale.pairs, "permits": permits}
    [(count, seconds, cpu)], cost = bench.run(contestant, [pairs], **arguments)
    return Round(
        {
            "pairs_per_second": count / seconds,
            "commands_per_pair": cost.commands / count,
            "reads_per_pair": cost.reads / count,
            "cpu_us_per_pair": cpu / count * 1e6,
            "server_cpu_us_per_pair": cost.cpu / count * 1e6,
        }
    )


_COLUMNS = (
    Column("pairs_per_second", "pairs/s"),
    Column("commands_per_pair", "commands a pair", 2),
    Column("reads_per_pair", "server reads a pair", 3),
    Column("cpu_us_per_pair", "client CPU µs a pair", 1),
    Column("server_cpu_us_per_pair", "server CPU µs a pair", 1),
)
_KINDS: tuple[Kind, ...] = ("ours", "peer", "raw", "broken")

ONE = Scenario(
    "s1", "S1: 1 task, uncontended", partial(_play, 1, 0), _COLUMNS, "pairs_per_second", kinds=_KINDS, proof=False
)
MANY = Scenario(
    "s2", "S2: 100 tasks, own keys", partial(_play, 100, 0), _COLUMNS, "pairs_per_second", kinds=_KINDS, proof=False
)
MANY_SEMAPHORES = Scenario(
    "s2sem", "S2: 100 tasks, own semaphores of 5", partial(_play, 100, 5), _COLUMNS, "pairs_per_second",
    proof=False, game="own semaphores",
)  # fmt: skip
