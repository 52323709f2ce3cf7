"""Hand-over between processes: from the call of release() in one to the return of acquire() in the other.

There is one task in each of two processes. The holder waits until the other has asked, releases, and does not ask
again before the other has the lock. So every sample is a true hand-over to a waiter, even with locks that let the
releaser barge in. The hop is the limit: from PUBLISH in one process to its arrival in the other.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from ..contestant import Contestant
from ..contestants import BY_NAME
from ..measure import Hold, handovers, middle, miscounted, overlaps, percentile
from ..raw import RawProtocol
from ..scenario import Bench, Column, Round, Scenario
from ..workers import Cells, Desk, sleep_until

COUNTER, ASKING, GRANTS = 0, 1, 3
KEY = "handed-over"
ARRIVED = 0.002
"""Seconds after which a request has certainly reached the server."""


async def alternate(desk: Desk, contestant: str, seconds: float, side: int) -> list[Hold]:
    """Return the holds of this side."""
    player = BY_NAME[contestant](desk.url)
    await player.open()
    try:
        warm = player.grip(f"warm:{side}")
        await warm.release(await warm.acquire())
        desk.meet()
        holds = await _alternate(desk, player, int(seconds * 1e9), side)
        await player.come_to_rest()
        desk.meet()
        return holds
    finally:
        await player.close()


async def _alternate(desk: Desk, player: Contestant, window: int, side: int) -> list[Hold]:
    cells, clock, grip = desk.cells, time.monotonic_ns, player.grip(KEY)
    other = 1 - side
    holds: list[Hold] = []
    end = clock() + window
    over = False
    while not over:
        cells[ASKING + side] = 1
        asked = clock()
        lease = await grip.acquire()
        got = clock()
        over = got >= end
        seen = cells[COUNTER]
        cells[ASKING + side] = 0
        cells[GRANTS + side] += 1
        if not over:
            await sleep_until(partial(_grew, cells, ASKING + other, 0), limit=0.5)
        await asyncio.sleep(ARRIVED)
        granted = cells[GRANTS + other]
        cells[COUNTER] = seen + 1
        holds.append((asked, got, clock()))
        await grip.release(lease)
        if not over:
            await sleep_until(partial(_grew, cells, GRANTS + other, granted), step=0.001, limit=0.5)
    return holds


def _grew(cells: Cells, index: int, before: int) -> bool:
    return cells[index] > before


async def hop(desk: Desk, contestant: str, seconds: float, side: int) -> list[float]:
    """Return the microseconds from each PUBLISH of the other side to its push here, in the same rhythm."""
    raw = await RawProtocol.open(desk.url)
    inboxes = (b"hop:0", b"hop:1")
    arrived = asyncio.Event()
    samples: list[float] = []

    def pushed(push: list[Any]) -> None:
        samples.append((time.monotonic_ns() - int(push[2])) / 1000)
        arrived.set()

    raw.pushed = pushed
    await raw.command(b"HELLO", 3)
    await raw.command(b"SUBSCRIBE", inboxes[side])
    desk.meet()
    end = time.monotonic() + seconds
    if side == 1:
        arrived.set()
    while time.monotonic() < end:
        await arrived.wait()
        arrived.clear()
        await asyncio.sleep(ARRIVED)
        await raw.command(b"PUBLISH", inboxes[1 - side], b"%d" % time.monotonic_ns())
    desk.meet()
    await raw.close()
    return samples


def _play(bench: Bench, contestant: type[Contestant]) -> Round:
    job = hop if contestant.kind == "hop" else alternate
    results, _ = bench.run(contestant, [job, job], seconds=bench.scale.alternate)
    violations: list[str] = []
    if job is hop:
        samples: list[float] = [sample for result in results for sample in result]
    else:
        samples = handovers(results)
        violations = overlaps(results) + miscounted(bench.pool.cells[COUNTER], sum(map(len, results)))
    return Round(
        {"p50_us": middle(samples), "p99_us": percentile(samples, 0.99), "samples": len(samples)},
        violations,
    )


HANDOVER = Scenario(
    "handover", "Hand-over between processes", _play,
    (Column("p50_us", "p50 µs"), Column("p99_us", "p99 µs"), Column("samples", "samples a round")),
    "p50_us", kinds=("ours", "peer", "hop", "broken"),
)  # fmt: skip
