"""S7: the holder's process is killed. How long after the expiry of its lease does the next waiter get the lock?

The holder renews a lease of one second where the library can. Several keys per kill. The expiry is read (PTTL,
whole milliseconds) after the kill.
"""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial

from ..contestant import Contestant, Grip
from ..contestants import BY_NAME
from ..measure import middle, percentile
from ..scenario import Bench, Column, Round, Scenario
from ..workers import Desk, Worker

TTL = 1.0
EARLY = -1.5
"""Milliseconds by which a grant may precede the expiry: the granularity of PTTL and of the server's clock."""


def _key(number: int) -> str:
    return f"crashed:{number}"


async def hold(desk: Desk, contestant: str, keys: int) -> None:
    """Hold all keys until killed."""
    player = BY_NAME[contestant](desk.url, TTL, renew=True)
    await player.open()
    for number in range(keys):
        await player.grip(_key(number)).acquire()
    desk.meet()
    await asyncio.sleep(3600)


async def _await_turn(grip: Grip, limit: float, grants: list[int], number: int) -> None:
    try:
        async with asyncio.timeout(limit):
            lease = await grip.acquire()
    except TimeoutError:
        return
    grants[number] = time.monotonic_ns()
    await grip.release(lease)


async def succeed(desk: Desk, contestant: str, keys: int, limit: float) -> list[int]:
    """Return the time of each key's grant (ns); 0 if it was not granted within ``limit`` seconds."""
    player = BY_NAME[contestant](desk.url, TTL, renew=True)
    await player.open()
    try:
        warm = player.grip("warm")
        await warm.release(await warm.acquire())
        desk.meet()
        grants = [0] * keys
        bodies = [partial(_await_turn, player.grip(_key(number)), limit, grants, number) for number in range(keys)]
        await desk.run_tasks(bodies, player.threads)
        return grants
    finally:
        await player.close()


def _expiries(bench: Bench, contestant: type[Contestant]) -> list[int]:
    """Return the time of each key's expiry (ns, local clock); 0 if it is already gone.

    It is that or less than a round trip later: on a busy machine the answer may be late, and the lease ends no later.
    """
    player = contestant(bench.url)
    found: list[int] = []
    for number in range(bench.scale.crash_keys):
        before = time.monotonic_ns()
        left = bench.stats.milliseconds_left(player.holder_key(_key(number)))
        found.append(before + left * 1_000_000 if left > 0 else 0)
    return found


def _kill(bench: Bench, contestant: type[Contestant], holder: Worker) -> tuple[list[int], list[int]]:
    keys = bench.scale.crash_keys
    [waiter] = bench.start([succeed], contestant=contestant.name, keys=keys, limit=bench.scale.crash_limit)
    holder.start(bench.url, hold, contestant=contestant.name, keys=keys)
    bench.meet([holder])
    bench.meet([waiter])
    time.sleep(random.uniform(0.4, 0.7))
    holder.kill()
    expiries = _expiries(bench, contestant)
    return expiries, waiter.result()


def _play(bench: Bench, contestant: type[Contestant]) -> Round:
    holder = bench.pool.extra()
    try:
        expiries, grants = _kill(bench, contestant, holder)
    finally:
        holder.kill()
    return judge(expiries, grants)


def judge(expiries: list[int], grants: list[int]) -> Round:
    """Return the round's figures; a key that was gone before the kill (expiry 0) does not count."""
    both = [pair for pair in zip(expiries, grants, strict=True) if pair[0]]
    late = [(grant - expiry) / 1e6 for expiry, grant in both if grant]
    missing = sum(1 for _, grant in both if not grant)
    early = [value for value in late if value < EARLY]
    late += [float("inf")] * missing
    return Round(
        {"late_ms": middle(late), "latest_ms": percentile(late, 1.0), "never": missing},
        [f"granted {-value:.1f} ms before the killed holder's lease ended" for value in early],
    )


CRASH = Scenario(
    "s7", "S7: holder killed, next grant after its lease's end", _play,
    (
        Column("late_ms", "median ms past expiry", 1),
        Column("latest_ms", "latest ms", 1),
        Column("never", "not within the limit"),
    ),
    "late_ms",
)  # fmt: skip
