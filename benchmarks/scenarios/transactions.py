"""The cost of an optimistic transaction without conflicts, and the extra cost of guarding a commit by a lease.

The first is one task that adds one to a counter under WATCH: ours, and redis-py's own ``transaction()``. The counter is
compared with the number of transactions afterwards. The second is a write of one key with MULTI and EXEC: guarded by a
lease, and through redis-py's pipeline without a guard; the server's reads are the round trips.
"""

from __future__ import annotations

import time

from ..contestant import Contestant
from ..contestants import BY_NAME
from ..scenario import Bench, Column, Round, Scenario
from ..workers import Desk

KEY = "counter"
WARM_UP = 20


async def add(desk: Desk, contestant: str, seconds: float) -> tuple[int, float]:
    """Add one to the counter repeatedly; return the count and the seconds."""
    player = BY_NAME[contestant](desk.url)
    await player.open()
    try:
        add_one = player.adder(KEY)
        for _ in range(WARM_UP):
            await add_one()
        desk.meet()
        start = time.monotonic()
        end, count = start + seconds, 0
        while time.monotonic() < end:
            await add_one()
            count += 1
        took = time.monotonic() - start
        desk.meet()
        return count, took
    finally:
        await player.close()


async def commit(desk: Desk, contestant: str, seconds: float) -> tuple[int, float]:
    """Write under one lease repeatedly; return the count and the seconds."""
    player = BY_NAME[contestant](desk.url)
    await player.open()
    try:
        async with player.writer(KEY) as write:
            for number in range(WARM_UP):
                await write(number)
            desk.meet()
            start = time.monotonic()
            end, count = start + seconds, 0
            while time.monotonic() < end:
                count += 1
                await write(count)
            took = time.monotonic() - start
            desk.meet()
        return count, took
    finally:
        await player.close()


def _play_add(bench: Bench, contestant: type[Contestant]) -> Round:
    [(count, took)], cost = bench.run(contestant, [add], seconds=bench.scale.pairs)
    found = int(bench.stats.client.get(KEY) or 0)
    wrong = [] if found == count + WARM_UP else [f"the counter says {found} after {count + WARM_UP} transactions"]
    return Round({"us": took / count * 1e6, "reads": cost.reads / count}, wrong)


def _play_commit(bench: Bench, contestant: type[Contestant]) -> Round:
    [(count, took)], cost = bench.run(contestant, [commit], seconds=bench.scale.pairs)
    found = int(bench.stats.client.get(KEY) or 0)
    wrong = [] if found == count else [f"the key says {found}, the last commit wrote {count}"]
    return Round({"us": took / count * 1e6, "reads": cost.reads / count}, wrong)


TRANSACTION = Scenario(
    "tx", "Transaction without competition, 1 task", _play_add,
    (Column("us", "µs a transaction", 0), Column("reads", "round trips a transaction", 2)), "us", game="transactions",
)  # fmt: skip
GUARDED = Scenario(
    "guarded", "A write guarded by a lease, and one that is not", _play_commit,
    (Column("us", "µs a commit", 0), Column("reads", "round trips a commit", 2)), "us", game="guarded commits",
)  # fmt: skip
