"""A configuration in several keys, read by many tasks and changed by one: no reader ever sees half of a change.

- Readers share: ``read()``.
- A reader that finds the configuration out of date releases ``read()`` and takes ``write()``. Another one may have been
  quicker: ``previous_fence`` tells, and then it looks again.
- A change from outside takes ``write()`` and then *downgrades*: it checks its writes while others already read, and no
  other process can have written in between.

Run ``python examples/config_readers.py`` (needs ``pip install 'redis_sync_aio[embedded]'``): three processes read and
refresh a configuration on an embedded server while this one publishes new releases. Exit code 0 if every read was
whole. To run it on your own server: ``REDIS_URL=… python examples/config_readers.py worker``, many times.

Read more in docs/guides/read-write-locks.md.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from redis.asyncio import Redis

from redis_sync_aio import AsyncReadWriteLock, Coordinator, LeaseLost, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import GuardingLease

PARTS = ("hosts", "limits", "texts")
RELEASES, READERS = 12, 4

# The lock keeps others out. The fence keeps out a writer that has lost the lock without noticing it yet.
STORE = """
if tonumber(redis.call('HGET', KEYS[1], 'fence') or 0) > tonumber(ARGV[1]) then return 0 end
return redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'release', ARGV[2]) and 1
"""


class Config:
    """The parts of the configuration, each in its own key; all belong to one release."""

    def __init__(self, redis: Redis, sync: Coordinator) -> None:
        self._redis = redis
        self._lock = AsyncReadWriteLock(sync, "config", ttl=5)

    async def read(self) -> list[int]:
        """Return the release of each part. If they differ, a change was seen half done."""
        async with self._lock.read():
            return await self._load()

    async def refresh(self, newest: int) -> bool:
        """Bring the configuration up to date; return whether there was anything to do."""
        async with self._lock.read() as reader:
            if min(await self._load()) >= newest:
                return False
        async with self._lock.write() as writer:  # the others finish reading, then we are alone
            if writer.previous_fence != reader.fence and min(await self._load()) >= newest:
                return False
            await self._store(newest, writer)
        return True

    async def publish(self, release: int) -> None:
        """Change the configuration unconditionally, and check the outcome."""
        async with self._lock.write() as lease:
            await self._store(release, lease)
            await self._lock.downgrade(lease)  # the same lease continues, as a reader's
            if await self._load() != [release] * len(PARTS):
                raise RuntimeError(f"release {release} was not stored as it is")

    async def _load(self) -> list[int]:
        return [int(await self._redis.hget(f"config:{part}", "release") or 0) for part in PARTS]

    async def _store(self, release: int, writer: GuardingLease) -> None:
        for part in PARTS:
            if not await self._redis.eval(STORE, 1, f"config:{part}", str(writer.fence), str(release)):
                raise LeaseLost(name=writer.name, reason="taken", fence=writer.fence)
            await asyncio.sleep(0.002)  # changes are slow; a reader that got in now would see half of this change


async def run_process(url: str) -> None:
    """Read with some tasks and refresh with another, until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with Redis.from_url(url, decode_responses=True) as redis, Coordinator(redis) as sync:
        config = Config(redis, sync)
        await redis.incr("processes")

        async def look() -> None:
            while not stop.is_set():
                whole = len(set(await config.read())) == 1
                await redis.hincrby("seen", "whole" if whole else "torn", 1)

        async def keep_fresh() -> None:
            while not stop.is_set():
                if await config.refresh(int(await redis.get("newest") or 0)):
                    await redis.hincrby("seen", "refreshed", 1)
                await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as group:
            for _ in range(READERS):
                group.create_task(look())
            group.create_task(keep_fresh())


async def demonstrate() -> int:
    async with (
        EmbeddedServer() as server,
        server.client(decode_responses=True) as redis,
        Coordinator(redis) as sync,
    ):
        config = Config(redis, sync)
        environment = {**os.environ, "REDIS_URL": server.url}
        workers = [
            await asyncio.create_subprocess_exec(sys.executable, __file__, "worker", env=environment) for _ in range(3)
        ]

        async def all_run() -> bool:  # and heed SIGTERM
            return int(await redis.get("processes") or 0) == len(workers) and await redis.hexists("seen", "whole")

        try:
            await wait_until(all_run, timeout=30)
            for release in range(1, RELEASES + 1):
                if release % 3 == 0:
                    await config.publish(release)
                await redis.set("newest", release)  # the workers store it, unless it is already there

                async def fresh(release: int = release) -> bool:
                    return await config.read() == [release] * len(PARTS)

                await wait_until(fresh, timeout=30)
        finally:
            for worker in workers:
                if worker.returncode is None:
                    worker.terminate()
            ends = [await worker.wait() for worker in workers]
        seen = {name: int(count) for name, count in (await redis.hgetall("seen")).items()}
    print(f"release {RELEASES} reached, {seen.get('refreshed', 0)} times by a reader")
    print(f"{seen['whole']} reads were whole, {seen.get('torn', 0)} were torn")
    return 0 if "torn" not in seen and seen.get("refreshed") == RELEASES - RELEASES // 3 and not any(ends) else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        asyncio.run(run_process(os.environ["REDIS_URL"]))
    else:
        sys.exit(asyncio.run(demonstrate()))
