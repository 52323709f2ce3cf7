"""S6: tasks are cancelled at random moments of their acquire. What is left behind?

Waves of five tasks on each of ten keys, until enough were cancelled. Each task's time is up at a random moment:
if it has the lock it releases it, otherwise it is cancelled. Afterwards every key must be free immediately, and no
queue may contain an entry.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

from ..contestant import Contestant, Grip
from ..contestants import BY_NAME
from ..measure import percentile
from ..scenario import Bench, Column, Round, Scenario
from ..server_stats import ServerStats
from ..workers import Desk

KEYS = 10
PER_KEY = 5
WAVES = 40
LONGEST = 0.01
"""Seconds after which the last task's time is up."""
HEEDED = 0.2
"""Seconds within which a task that respects its cancellation has ended."""
STUCK = 1.0
"""Seconds after which a key counts as stuck."""


@dataclass(slots=True)
class Tally:
    """The outcomes of the tasks."""

    cancelled: int = 0
    ignored: int = 0
    overlaps: int = 0


async def _attempt(grip: Grip, holders: list[int], key: int, delay: float, tally: Tally) -> None:
    """Try to get the lock until ``delay`` has passed."""
    task = asyncio.ensure_future(grip.acquire())
    done, _ = await asyncio.wait([task], timeout=delay)
    if done:
        tally.overlaps += holders[key]
        holders[key] += 1
        await asyncio.sleep(delay / 4)
        holders[key] -= 1
        await grip.release(task.result())
        return
    task.cancel()
    finished, _ = await asyncio.wait([task], timeout=HEEDED)
    if task.cancelled():
        tally.cancelled += 1
        return
    tally.ignored += 1
    if finished:
        await grip.release(task.result())
    else:
        task.cancel()
        await asyncio.wait([task], timeout=STUCK)


def _moment(chance: random.Random) -> float:
    """Return the seconds until a task's time is up; early moments, with commands in flight, are frequent."""
    return LONGEST * chance.random() * chance.random()


async def _usable(grip: Grip) -> float:
    """Return the seconds until the lock could be acquired; STUCK if it could not."""
    start = time.monotonic()
    try:
        async with asyncio.timeout(STUCK):
            lease = await grip.acquire()
    except TimeoutError:
        return STUCK
    usable = time.monotonic() - start
    await grip.release(lease)
    return usable


async def cancel(desk: Desk, contestant: str, cancels: int, seed: int) -> dict[str, float]:
    """Return the figures of one run."""
    player = BY_NAME[contestant](desk.url)
    chance = random.Random(seed)
    tally, holders = Tally(), [0] * KEYS
    await player.open()
    try:
        await asyncio.gather(*(_usable(player.grip(f"warm:{number}")) for number in range(KEYS * PER_KEY)))
        waves = 0
        while tally.cancelled + tally.ignored < cancels and waves < WAVES:
            waves += 1
            wave = [(key, player.grip(f"key:{key}")) for key in range(KEYS) for _ in range(PER_KEY)]
            attempt = [_attempt(grip, holders, key, _moment(chance), tally) for key, grip in wave]
            await asyncio.gather(*attempt)
        times = await asyncio.gather(*(_usable(player.grip(f"key:{key}")) for key in range(KEYS)))
        with ServerStats(desk.url) as stats:
            left = stats.queue_entries()
    finally:
        await player.close()
    return {
        "cancelled": tally.cancelled,
        "stuck": sum(1 for time in times if time >= STUCK),
        "ignored": tally.ignored,
        "left": left,
        "usable_ms": percentile(times, 1.0) * 1000,
        "overlaps": tally.overlaps,
    }


def _play(bench: Bench, contestant: type[Contestant]) -> Round:
    seed = random.randrange(2**32)
    [worker] = bench.start([cancel], contestant=contestant.name, cancels=bench.scale.cancels, seed=seed)
    figures = worker.result()
    overlaps = int(figures.pop("overlaps"))
    return Round(figures, [f"{overlaps} times a task got a lock that another task held"] if overlaps else [])


CANCELLATION = Scenario(
    "s6", "S6: acquires cancelled at random moments, 10 keys", _play,
    (
        Column("cancelled", "cancelled"),
        Column("stuck", "keys stuck"),
        Column("ignored", "cancellations ignored"),
        Column("left", "queue entries left"),
        Column("usable_ms", "all usable after ms", 2),
    ),
    "usable_ms",
    refuses={"python-redis-lock": "synchronous: a waiting thread cannot be cancelled"},
)  # fmt: skip
