"""S3: many tasks contend for one lock, in two processes or in one, with an empty section or with 1 ms of work.

Exclusion is verified in every run, in two ways: every holder reads a plain counter in shared memory and writes it
plus one before it releases (which is not atomic), and the hold times of all tasks of all processes
may not overlap. A so-called empty section gives the loop a turn in every eighth of its
grants; otherwise two holders in one process could not meet.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from ..contestant import Contestant, Grip
from ..contestants import BY_NAME
from ..measure import Hold, contest, miscounted, overlaps
from ..scenario import Bench, Column, Round, Scenario
from ..server_stats import Cost
from ..workers import Cells, Desk

COUNTER = 0
KEY = "contested"
Log: TypeAlias = "array[int]"
Pause: TypeAlias = Callable[[], float]
"""Returns the seconds to pause."""
Result: TypeAlias = tuple[int, int, float, list[Log]]


async def _compete(grip: Grip, cells: Cells, work: float, limit: int, end: int, log: Log, pause: Pause | None) -> None:
    """Acquire and release until ``end`` (ns), at most ``limit`` times unless it is 0, with a pause after each."""
    acquire, release, clock = grip.acquire, grip.release, time.monotonic_ns
    number = 0
    while (asked := clock()) < end and (not limit or number < limit):
        lease = await acquire()
        got = clock()
        seen = cells[COUNTER]
        if work and got < end:
            await asyncio.sleep(work)
        elif number & 7 == 0:
            await asyncio.sleep(0)
        cells[COUNTER] = seen + 1
        log.extend((asked, got, clock()))
        await release(lease)
        number += 1
        if pause is not None:
            await asyncio.sleep(pause())


async def compete(
    desk: Desk,
    contestant: str | Contestant,
    tasks: int,
    seconds: float,
    work: float,
    limit: int = 0,
    permits: int = 0,
    side: int = 0,
) -> Result:
    """Let tasks compete for one lock, or with ``permits`` for one semaphore."""
    player = BY_NAME[contestant](desk.url) if isinstance(contestant, str) else contestant
    await player.open()
    try:
        await warm_up(desk, player, [player.take(f"warm:{side}:{number}", permits) for number in range(tasks)])
        return await race(desk, player, [player.take(KEY, permits) for _ in range(tasks)], seconds, work, limit)
    finally:
        await player.close()


async def warm_up(desk: Desk, player: Contestant, grips: Sequence[Grip]) -> None:
    """Acquire and release each grip once."""
    await desk.run_tasks([partial(_warm_up, grip) for grip in grips], player.threads)


async def _warm_up(grip: Grip) -> None:
    await grip.release(await grip.acquire())


async def race(
    desk: Desk,
    player: Contestant,
    grips: Sequence[Grip],
    seconds: float,
    work: float,
    limit: int = 0,
    pause: Pause | None = None,
) -> Result:
    """Return start and end of the window, seconds of CPU, and the holds of each task."""
    logs: list[Log] = [array("q") for _ in grips]
    desk.meet()
    cpu, start = time.process_time(), time.monotonic_ns()
    end = start + int(seconds * 1e9)
    pairs = zip(grips, logs, strict=True)
    bodies = [partial(_compete, grip, desk.cells, work, limit, end, log, pause) for grip, log in pairs]
    await desk.run_tasks(bodies, player.threads)
    cpu = time.process_time() - cpu
    await player.come_to_rest()
    desk.meet()
    return start, end, cpu, logs


def holds_of(logs: Sequence[Log]) -> list[list[Hold]]:
    return [list(zip(log[0::3], log[1::3], log[2::3], strict=True)) for log in logs]


def prove(bench: Bench, contestant: type[Contestant]) -> list[str]:
    """Return the violations when two tasks compete for a few grants of a lock, or of a semaphore's only permit."""
    permits = 0 if "locks" in contestant.plays else 1
    arguments = {"tasks": 2, "seconds": 5.0, "work": 0.002, "limit": 3, "permits": permits}
    [(_, _, _, logs)], _ = bench.run(contestant, [compete], **arguments)
    return verify(bench, holds_of(logs))


def verify(bench: Bench, tasks: Sequence[Sequence[Hold]]) -> list[str]:
    return overlaps(tasks) + miscounted(bench.pool.cells[COUNTER], sum(map(len, tasks)))


def _play(processes: int, tasks: int, work: float, bench: Bench, contestant: type[Contestant]) -> Round:
    jobs = [compete] * processes
    results, cost = bench.run(contestant, jobs, tasks=tasks, seconds=bench.scale.contest, work=work)
    figures, holds = judged(results, cost)
    return Round(figures, verify(bench, holds))


def judged(results: Sequence[Result], cost: Cost) -> tuple[dict[str, float], list[list[Hold]]]:
    """Return the figures of a race, and its holds."""
    start, end = max(result[0] for result in results), min(result[1] for result in results)
    holds = holds_of([log for result in results for log in result[3]])
    found = contest(holds, start, end)
    total = sum(map(len, holds))
    figures = {
        "fair_per_second": found.fair_per_second,
        "grants_per_second": found.per_second,
        "jain": found.jain,
        "starved": found.starved,
        "p99_wait_ms": found.p99_wait * 1000,
        "max_wait_ms": found.max_wait * 1000,
        "section_ms": sum(over - got for task in holds for _, got, over in task) / total / 1e6,
        "commands_per_grant": cost.commands / total,
        "reads_per_grant": cost.reads / total,
        "cpu_us_per_grant": sum(result[2] for result in results) / total * 1e6,
        "server_cpu_us_per_grant": cost.cpu / total * 1e6,
    }
    return figures, holds


COLUMNS = (
    Column("fair_per_second", "fair/s"),
    Column("grants_per_second", "grants/s"),
    Column("jain", "Jain", 3),
    Column("starved", "starved"),
    Column("p99_wait_ms", "p99 wait ms", 1),
    Column("max_wait_ms", "max wait ms", 1),
    Column("section_ms", "mean section ms", 3),  # a sleep takes longer in a loop that is woken in between
    Column("commands_per_grant", "commands a grant", 2),
    Column("reads_per_grant", "server reads a grant", 2),
    Column("cpu_us_per_grant", "client CPU µs a grant", 1),
    Column("server_cpu_us_per_grant", "server CPU µs a grant", 1),
)

CONTEST = Scenario(
    "s3", "S3: 2 processes x 16 tasks, one key, empty section", partial(_play, 2, 16, 0.0), COLUMNS, "fair_per_second"
)
CONTEST_WITH_WORK = Scenario(
    "s3work", "S3: 2 processes x 16 tasks, one key, 1 ms of work", partial(_play, 2, 16, 0.001), COLUMNS,
    "fair_per_second",
)  # fmt: skip
CONTEST_IN_ONE = Scenario(
    "s3one", "S3: 1 process x 32 tasks, one key, empty section", partial(_play, 1, 32, 0.0), COLUMNS,
    "fair_per_second", kinds=("ours", "peer", "in-process", "broken"),
)  # fmt: skip
