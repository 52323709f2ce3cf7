"""S5: many tasks of two processes contend for five permits of one semaphore, with an empty section or 1 ms of work.

The limit is verified in every run, in two ways. Before the measured window the same tasks compete for a moment with a
counter in Redis, raised by INCR after each acquire and lowered by DECR before each release: its greatest answer is
the number of holders at one moment. In the window, where that would be two more round trips a grant, the
hold intervals of all tasks of all processes are recorded and overlaid. More than five fails the run if it is
ours; for others it is shown.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from ..contestant import Contestant, Grip, Kind
from ..contestants import BY_NAME
from ..measure import peak
from ..raw import RawProtocol
from ..scenario import Bench, Column, Round, Scenario
from ..workers import Desk, sleep_until
from .contention import COLUMNS, KEY, Result, judged, race, warm_up

PERMITS = 5
HOLDERS = b"holders"
READY = 1
"""Number of the first cell in which a side reports that it is ready to be counted."""
COUNTED = 0.1
"""Seconds of competition with the counter."""


async def share(desk: Desk, contestant: str, tasks: int, seconds: float, work: float, side: int) -> tuple[Result, int]:
    """Let tasks compete; return the result of `race`, and the greatest number of holders counted in Redis."""
    player = BY_NAME[contestant](desk.url)
    await player.open()
    raw = await RawProtocol.open(desk.url)
    try:
        await warm_up(desk, player, [player.permit(f"warm:{side}:{number}", PERMITS) for number in range(tasks)])
        grips = [player.permit(KEY, PERMITS) for _ in range(tasks)]
        desk.cells[READY + side] = 1
        await sleep_until(lambda: desk.cells[READY + 1 - side] == 1, limit=2.0)
        counts = await _count(raw, grips, work)
        return await race(desk, player, grips, seconds, work), max(counts)
    finally:
        await raw.close()
        await player.close()


async def _count(raw: RawProtocol, grips: Sequence[Grip], work: float) -> list[int]:
    counts: list[int] = []
    end = time.monotonic() + COUNTED

    async def compete(grip: Grip) -> None:
        while time.monotonic() < end:
            lease = await grip.acquire()
            counts.append(await raw.command(b"INCR", HOLDERS))
            await asyncio.sleep(work)
            await raw.command(b"DECR", HOLDERS)
            await grip.release(lease)

    await asyncio.gather(*map(compete, grips))
    return counts


def crowded(contestant: type[Contestant], holders: int, permits: int) -> list[str]:
    """Return the violation, if that many holders at one moment is one. For peers the figure is only shown."""
    wrong = holders > permits and contestant.kind in ("ours", "broken")
    return [f"{holders} held the {permits} permits at one moment"] if wrong else []


def _play(work: float, bench: Bench, contestant: type[Contestant]) -> Round:
    results, cost = bench.run(contestant, [share, share], tasks=16, seconds=bench.scale.share, work=work)
    figures, holds = judged([result for result, _ in results], cost)
    most = max(peak(holds), *(counted for _, counted in results))
    return Round({**figures, "peak": most}, crowded(contestant, most, PERMITS))


_COLUMNS = (Column("peak", "peak of 5", most=True), *COLUMNS)
_KINDS: tuple[Kind, ...] = ("ours", "peer", "raw", "broken")

SHARE = Scenario(
    "s5", "S5: 2 processes x 16 tasks, semaphore of 5, empty section", partial(_play, 0.0), _COLUMNS,
    "fair_per_second", kinds=_KINDS, game="semaphores",
)  # fmt: skip
SHARE_WITH_WORK = Scenario(
    "s5work", "S5: 2 processes x 16 tasks, semaphore of 5, 1 ms of work", partial(_play, 0.001), _COLUMNS,
    "fair_per_second", kinds=_KINDS, game="semaphores", quick=False,
)  # fmt: skip
