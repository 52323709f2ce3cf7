"""A scheduled job on several machines: each slot runs once, though their clocks differ and one machine crashes.

Every process wakes for every slot, some later than others, and calls `once`. One of them runs the slot; the others find
out that it was run. The job takes a millisecond, so a lock alone would be free again when the late ones come. One
process is killed in the middle of a slot: another one runs it when the dead one's lease ends.

Run ``python examples/nightly.py`` (needs ``pip install 'redis_sync_aio[embedded]'``): three processes share six slots.
Exit code 0 if each slot came to its end once. With a real schedule the slot is a date, see docs/guides/jobs.md.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

from redis.asyncio import Redis

from redis_sync_aio import Coordinator, once
from redis_sync_aio.embedded import EmbeddedServer

SLOTS, PERIOD, LATE = 6, 0.3, 0.05  # seconds between two slots, and by which each clock is later than the one before
CRASHES = 2  # the slot whose first run is killed
TTL = 3.0  # seconds; how long the slot of a process that has crashed waits for another one


async def job(redis: Redis, slot: int) -> None:
    """Do the real work (here a line in a log); it kills its process once."""
    await redis.rpush("log", f"began {slot}")
    if slot == CRASHES and await redis.set("killed", os.getpid(), nx=True):
        os.kill(os.getpid(), signal.SIGKILL)
    await redis.rpush("log", f"ended {slot}")


async def run_process(url: str, begin: float, late: float) -> None:
    async with Coordinator.from_url(url) as sync, Redis.from_url(url) as redis:
        for slot in range(SLOTS):
            await asyncio.sleep(max(0.0, begin + slot * PERIOD + late - time.time()))
            async with once(sync, "nightly", slot=slot, keep=3600, ttl=TTL) as lease:
                if lease is not None:
                    await job(redis, slot)


async def demonstrate() -> int:
    async with EmbeddedServer() as server, server.client(decode_responses=True) as redis:
        environment = {**os.environ, "REDIS_URL": server.url}
        begin = str(time.time() + 1)
        processes = [
            await asyncio.create_subprocess_exec(
                sys.executable, __file__, "worker", begin, str(number * LATE), env=environment
            )
            for number in range(3)
        ]
        ends = sorted([await process.wait() for process in processes])
        log = [str(line) for line in await redis.lrange("log", 0, -1)]
    began, ended = ([log.count(f"{what} {slot}") for slot in range(SLOTS)] for what in ("began", "ended"))
    print("runs that began, by slot:", *began)
    print("runs that ended, by slot:", *ended)
    expected = [2 if slot == CRASHES else 1 for slot in range(SLOTS)]
    return 0 if (began, ended, ends) == (expected, [1] * SLOTS, [-signal.SIGKILL, 0, 0]) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        asyncio.run(run_process(os.environ["REDIS_URL"], float(sys.argv[2]), float(sys.argv[3])))
    else:
        sys.exit(asyncio.run(demonstrate()))
