"""Draws docs/assets/tracing.svg, in a second: ``python -m benchmarks.traced``. It has all that a picture can show."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path

from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, Coordinator, LeaseLost
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.tracing import merged, tracing


async def use(sync: Coordinator, seed: int) -> None:
    """Use locks as a service does: some for each order, some for the whole process, a semaphore."""
    chance = random.Random(seed)

    async def orders(number: int) -> None:
        for _ in range(6):
            try:
                async with sync.lock(f"orders:{number}").acquire(timeout=0.15):
                    await asyncio.sleep(chance.uniform(0.01, 0.06))
            except AcquireTimeout:
                pass
            await asyncio.sleep(chance.uniform(0, 0.08))

    async def mails() -> None:
        for _ in range(5):
            async with sync.semaphore("smtp", limit=3):
                await asyncio.sleep(chance.uniform(0.02, 0.08))

    async def prices() -> None:
        for _ in range(12):
            async with sync.lock("prices", share=True):
                await asyncio.sleep(0.004)
            await asyncio.sleep(chance.uniform(0, 0.02))

    works = [orders(42), orders(42), orders(43), *(mails() for _ in range(4)), *(prices() for _ in range(3))]
    await asyncio.gather(*works)


async def export(sync: Coordinator, redis: Redis) -> None:
    """Lose a lease, since somebody deletes the key, and stop the event loop for a while."""
    try:
        async with sync.lock("export:nightly"):
            await asyncio.sleep(0.15)
            await redis.delete("export:nightly")
            await sync.lock("export:nightly").statistics()
            async with sync.lock("report:nightly", ttl=0.6):
                await asyncio.sleep(0.05)
                time.sleep(0.25)  # noqa: ASYNC251  as a service should not
                await asyncio.sleep(0.5)
    except LeaseLost:
        pass


async def main(out: Path) -> None:
    """Trace two coordinators as two processes, and draw both."""
    async with (
        EmbeddedServer() as server,
        server.client() as redis,
        server.client() as second,
        Coordinator(redis) as web,
        Coordinator(second) as worker,
    ):
        await asyncio.gather(*(one.lock("orders:42").locked() for one in (web, worker)))  # connect first
        async with tracing(web, process="web 1") as one, tracing(worker, process="worker 1") as two:
            await asyncio.gather(use(web, 1), use(worker, 2), export(worker, redis))
    with tempfile.TemporaryDirectory() as name:
        paths = Path(name) / "1.json", Path(name) / "2.json"
        for path, trace in zip(paths, (one, two), strict=True):
            trace.save(path)
        merged(*paths).save(out)


if __name__ == "__main__":
    asyncio.run(main(Path("docs/assets/tracing.svg")))
