"""Processes that wait for each other: a go for all, parts that are counted, a barrier that a killed party breaks.

- `AsyncEvent`: the workers start when the coordinator of the work sets it; one that comes later starts immediately.
- `AsyncCountDownLatch`: each part counts once, also if a worker does it again after a crash.
- `AsyncBarrier`: the workers go on together. One that is killed while it waits breaks the barrier for the others, so
  none of them waits forever; after `reset` they meet again.

Run ``python examples/together.py`` (needs ``pip install 'redis_sync_aio[embedded]'``): three processes on an embedded
server, one of which is killed at the barrier. Exit code 0 if the others learned of it, and met again.

Read more in docs/guides/events-latches-and-barriers.md.
"""

from __future__ import annotations

import asyncio
import os
import sys

from redis.asyncio import Redis

from redis_sync_aio import AsyncBarrier, AsyncCountDownLatch, AsyncEvent, Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import BrokenBarrierError

WORKERS = ("ann", "bob", "cy")
TTL = 6.0


async def work(url: str, name: str) -> None:
    """Do one part when there is a go, and meet the others."""
    async with Redis.from_url(url) as redis, Coordinator(redis) as sync:
        await AsyncEvent(sync, "go").wait(timeout=60)
        await AsyncCountDownLatch(sync, "parts", len(WORKERS)).count_down(identity=name)
        try:
            await AsyncBarrier(sync, "all three", len(WORKERS) + 1, ttl=TTL).wait(timeout=60)
        except BrokenBarrierError:
            await AsyncCountDownLatch(sync, "have learned", len(WORKERS) - 1).count_down(identity=name)
            rank = await AsyncBarrier(sync, "the two", len(WORKERS) - 1).wait(timeout=60)
            await redis.hset("ranks", name, str(rank))


async def demonstrate() -> int:
    async with EmbeddedServer() as server, server.client() as redis, Coordinator(redis) as sync:
        processes = [
            await asyncio.create_subprocess_exec(
                sys.executable, __file__, "worker", name, env={**os.environ, "REDIS_URL": server.url}
            )
            for name in WORKERS
        ]
        try:
            async with asyncio.timeout(60):
                await AsyncEvent(sync, "go").set()
                await AsyncCountDownLatch(sync, "parts", len(WORKERS)).wait()
                barrier = AsyncBarrier(sync, "all three", len(WORKERS) + 1, ttl=TTL)

                async def all_there() -> bool:
                    return await barrier.n_waiting() == len(WORKERS)

                await wait_until(all_there)
                processes[0].kill()
                await AsyncCountDownLatch(sync, "have learned", len(WORKERS) - 1).wait()
                for process in processes:
                    await process.wait()
                ranks = sorted(await redis.hvals("ranks"))
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                await process.wait()
    met = ranks == [b"0", b"1"] and [process.returncode for process in processes[1:]] == [0, 0]
    print(f"one was killed, and the others learned of it and met again: {'yes' if met else 'no'}")
    return 0 if met else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        asyncio.run(work(os.environ["REDIS_URL"], sys.argv[2]))
    else:
        sys.exit(asyncio.run(demonstrate()))
