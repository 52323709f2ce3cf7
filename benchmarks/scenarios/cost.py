"""The cost of acquire and release while others hold 10, 1,000 or 100,000 permits.

The permits are written into the keys as the scripts would do it, and the library's own statistics have to see
them. Acquiring that many in one process would measure that process, which would renew them all.
"""

from __future__ import annotations

import time

from redis_sync_aio import AsyncSemaphore
from redis_sync_aio._core.keys import permit_keys

from ..contestant import Contestant
from ..contestants import BY_NAME, Ours
from ..measure import middle
from ..scenario import Bench, Column, Round, Scenario
from ..server_stats import ServerStats
from ..workers import Desk

SIZES = {"few": 10, "some": 1_000, "many": 100_000}
LIMIT = 1_000_000
TTL = 3600
AT_ONCE = 1000
TURNS = 10


def _fill(stats: ServerStats, name: str, count: int) -> None:
    """Let ``count`` others hold a permit each."""
    permits, state, *_ = permit_keys(name.encode(), "sem").all
    now = time.time_ns() // 1000
    for start in range(0, count, AT_ONCE):
        tokens = [f"other:{number}" for number in range(start, min(start + AT_ONCE, count))]
        stats.client.zadd(permits, {token: now + TTL * 1_000_000 + number for number, token in enumerate(tokens)})
        stats.client.hset(state, mapping={f"={token}": f"1 {now}" for token in tokens})
    stats.client.hset(state, mapping={"limit": LIMIT, "used": count, "fence": now})
    for key in (permits, state):
        stats.client.expire(key, 2 * TTL)


async def cost(desk: Desk, contestant: str, pairs: int) -> dict[str, float]:
    """Return microseconds of a pair and of a script by the number of permits held; sizes take turns."""
    player = BY_NAME[contestant](desk.url)
    assert isinstance(player, Ours)
    await player.open()
    try:
        with ServerStats(desk.url) as stats:
            for size, count in SIZES.items():
                _fill(stats, size, count)
                seen = await AsyncSemaphore(player.client, size, limit=None).statistics()
                if (seen.held, seen.limit, len(seen.holders)) != (count, LIMIT, min(count, 100)):
                    raise ValueError(f"{count} permits were written, but the statistics are {seen}")
            return await _measure(player, stats, pairs)
    finally:
        await player.close()


async def _measure(player: Contestant, stats: ServerStats, pairs: int) -> dict[str, float]:
    grips = {size: player.permit(size, LIMIT) for size in SIZES}
    times: dict[str, list[float]] = {size: [] for size in SIZES}
    scripts, spent = dict.fromkeys(SIZES, 0), dict.fromkeys(SIZES, 0.0)
    for grip in grips.values():
        await grip.release(await grip.acquire())
    for _ in range(TURNS):
        for size, grip in grips.items():
            before = stats.script_time()
            for _ in range(max(1, pairs // TURNS)):
                start = time.perf_counter_ns()
                await grip.release(await grip.acquire())
                times[size].append((time.perf_counter_ns() - start) / 1000)
            after = stats.script_time()
            scripts[size] += after[0] - before[0]
            spent[size] += after[1] - before[1]
    return {f"pair_{size}": middle(times[size]) for size in SIZES} | {
        f"script_{size}": spent[size] / scripts[size] for size in SIZES
    }


def _play(bench: Bench, contestant: type[Contestant]) -> Round:
    [worker] = bench.start([cost], contestant=contestant.name, pairs=int(1000 * bench.scale.pairs))
    return Round(worker.result())


COST = Scenario(
    "cost", "Semaphore: cost at 10, 1,000 and 100,000 permits held", _play,
    (
        *(Column(f"pair_{size}", f"µs a pair, {count:,} held", 0) for size, count in SIZES.items()),
        *(Column(f"script_{size}", f"server µs a script, {count:,} held", 1) for size, count in SIZES.items()),
    ),
    "pair_many", kinds=("ours",), game="semaphores",
    refuses={"ours-lingering": "it sends nothing, for any number"},
)  # fmt: skip
