"""``python -m benchmarks.replicas``: a plain lock, and one whose grants a replica confirms, in turn on one primary.

Prints a line for each round: the median of an acquire by one task, and acquire/release pairs a second of 50 tasks. The
ratios of a round hold on other machines; times do not.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from redis_sync_aio import Coordinator
from redis_sync_aio.embedded import EmbeddedServer

ROUNDS, ACQUIRES, TASKS, PAIRS = 10, 1000, 50, 100
QUICKLY = "--repl-diskless-sync-delay", "0"


async def median_us(sync: Coordinator, replicas: int) -> float:
    """Return the median microseconds of an acquire, alone."""
    lock, found = sync.lock("alone", replicas=replicas), []
    for _ in range(ACQUIRES):
        begun = time.perf_counter()
        lease = await lock.acquire()
        found.append(time.perf_counter() - begun)
        await lease.release()
    return statistics.median(found) * 1e6


async def pairs_a_second(sync: Coordinator, replicas: int) -> float:
    """Return how many pairs 50 tasks do, each with a lock of its own."""

    async def work(number: int) -> None:
        lock = sync.lock(f"task:{number}", replicas=replicas)
        for _ in range(PAIRS):
            async with lock:
                pass

    begun = time.perf_counter()
    await asyncio.gather(*map(work, range(TASKS)))
    return TASKS * PAIRS / (time.perf_counter() - begun)


async def measure() -> None:
    """Print a line for each round, and the median of the ratios."""
    async with (
        EmbeddedServer(port=0, args=QUICKLY) as primary,
        EmbeddedServer(port=0, args=QUICKLY) as replica,
        primary.client() as client,
        replica.client() as other,
        Coordinator(client) as sync,
    ):
        plain: Any = client
        await other.replicaof(primary.host, str(primary.port))
        while not await plain.wait(1, 1000):
            pass
        slower, fewer = [], []
        for _ in range(ROUNDS):
            one, confirmed = await median_us(sync, 0), await median_us(sync, 1)
            many, many_confirmed = await pairs_a_second(sync, 0), await pairs_a_second(sync, 1)
            slower.append(confirmed / one)
            fewer.append(many_confirmed / many)
            print(
                f"acquire {one:.0f} and {confirmed:.0f} us: {slower[-1]:.2f}x; 50 tasks {many:,.0f} and "
                f"{many_confirmed:,.0f} pairs/s: {fewer[-1]:.2f}x",
                flush=True,
            )
        print(f"medians: {statistics.median(slower):.2f}x and {statistics.median(fewer):.2f}x")


if __name__ == "__main__":
    asyncio.run(measure())
