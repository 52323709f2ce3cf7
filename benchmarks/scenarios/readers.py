"""Read-mostly: 31 readers and one writer in two processes, 1 ms each time: a read/write lock, or a plain lock.

Each run verifies by the hold intervals that the writer was alone.
"""

from __future__ import annotations

from ..contestant import Contestant
from ..contestants import BY_NAME
from ..measure import peak, torn
from ..scenario import Bench, Column, Round, Scenario
from ..workers import Desk
from .contention import COLUMNS, KEY, Result, judged, race, warm_up

WORK = 0.001


async def mix(desk: Desk, contestant: str, tasks: int, seconds: float, side: int) -> Result:
    """Let tasks read; the first one of side 0 writes."""
    player = BY_NAME[contestant](desk.url)
    await player.open()
    try:
        warm = [player.side(f"warm:{side}:{number}", write) for number in range(tasks) for write in (True, False)]
        await warm_up(desk, player, warm)
        grips = [player.side(KEY, write=side == number == 0) for number in range(tasks)]
        return await race(desk, player, grips, seconds, WORK)
    finally:
        await player.close()


def _play(bench: Bench, contestant: type[Contestant]) -> Round:
    results, cost = bench.run(contestant, [mix, mix], tasks=16, seconds=bench.scale.share)
    figures, [writer, *readers] = judged(results, cost)
    end = min(result[1] for result in results)
    writes = sum(1 for hold in writer if hold[1] < end)
    return Round(
        {**figures, "writes_per_second": writes / bench.scale.share, "peak": peak(readers)}, torn(readers, [writer])
    )


READ_MOSTLY = Scenario(
    "rw", "Read-mostly: 31 readers, 1 writer, 2 processes, 1 ms", _play,
    (Column("writes_per_second", "writes/s"), Column("peak", "concurrent readers", most=True), *COLUMNS),
    "grants_per_second", game="readers and writers",
)  # fmt: skip
