"""One program of `benchmarks.commits`: acquire and release for a while, and print the cost of a pair.

It runs as a script of its own, with whichever version of the package is on its path: it imports nothing else of these
benchmarks, and uses what all versions to be compared have in common.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import redis
from redis.asyncio import Redis

import redis_sync_aio
from redis_sync_aio import AsyncLock, AsyncSemaphore, Coordinator
from redis_sync_aio.compat import Lock as CompatLock

Pair: TypeAlias = Callable[[], Awaitable[None]]
Make: TypeAlias = Callable[[Any, str], Pair]
"""Makes the pair of a task from a coordinator or a client, and a name."""
TTL = 30.0


def leased(primitive: Any) -> Pair:
    """Return the pair of a primitive of ours."""
    acquire = primitive.acquire

    async def pair() -> None:
        await (await acquire()).release()

    return pair


def plain(lock: Any) -> Pair:
    """Return the pair of a lock with the methods of redis-py's."""

    async def pair() -> None:
        await lock.acquire()
        await lock.release()

    return pair


def in_process(lock: asyncio.Lock) -> Pair:
    """Return the pair of a lock of this process."""

    async def pair() -> None:
        async with lock:
            pass

    return pair


def lock(sync: Coordinator, name: str) -> Pair:
    """Return the pair of a lock."""
    return leased(AsyncLock(sync, name, ttl=TTL))


def shared(sync: Coordinator, name: str) -> Pair:
    """Return the pair of a lock whose lease tasks share."""
    return leased(AsyncLock(sync, name, ttl=TTL, share=True))


def lingering(sync: Coordinator, name: str) -> Pair:
    """Return the pair of a lock whose lease lingers."""
    return leased(AsyncLock(sync, name, ttl=TTL, share=True, linger=0.005))


def semaphore(sync: Coordinator, name: str) -> Pair:
    """Return the pair of a semaphore of five permits."""
    return leased(AsyncSemaphore(sync, name, limit=5, ttl=TTL))


def compat(client: Redis, name: str) -> Pair:
    """Return the pair of `compat.Lock`."""
    return plain(CompatLock(client, name, timeout=TTL))


def redis_py(client: Redis, name: str) -> Pair:
    """Return the pair of redis-py's lock."""
    return plain(client.lock(name, timeout=TTL))


@cache
def lock_of_process(name: str) -> asyncio.Lock:
    """Return the lock of this process by that name."""
    return asyncio.Lock()


def asyncio_lock(client: Redis, name: str) -> Pair:
    """Return the pair of `asyncio.Lock`."""
    return in_process(lock_of_process(name))


COORDINATED = (lock, shared, lingering, semaphore)
PROGRAMS: dict[str, tuple[Make, int, int]] = {
    "S1": (lock, 1, 1),
    "S2": (lock, 100, 100),
    "shared S1": (shared, 1, 1),
    "shared S2": (shared, 100, 100),
    "lingering S1": (lingering, 1, 1),
    "lingering S2": (lingering, 100, 100),
    "compat S1": (compat, 1, 1),
    "compat S2": (compat, 100, 100),
    "semaphore S1": (semaphore, 1, 1),
    "semaphore S2": (semaphore, 100, 100),
    "contended 2x16": (lock, 32, 1),
    "shared 1x32": (shared, 32, 1),
    "drain of 100": (lock, 100, 1),
    "redis-py S1": (redis_py, 1, 1),
    "redis-py S2": (redis_py, 100, 100),
    "asyncio.Lock 1x32": (asyncio_lock, 32, 1),
}
"""By name: how to make a pair, the number of tasks, the number of names."""


@asynccontextmanager
async def opened(url: str, make: Make, processes: int) -> AsyncIterator[Sequence[Any]]:
    """Yield that many coordinators, or clients; each coordinator is to the server what a process is."""
    clients = [Redis.from_url(url, max_connections=1000) for _ in range(processes)]
    syncs: list[Any] = [Coordinator(client) for client in clients] if make in COORDINATED else []
    try:
        yield syncs or clients
    finally:
        for sync in syncs:
            await (sync.aclose if hasattr(sync, "aclose") else sync.close)()
        for client in clients:
            await client.aclose()


async def task(pair: Pair, end: float) -> int:
    """Repeat a pair until ``end``; return the number. The loop gets its turns even if the pair never waits."""
    count, clock = 0, time.monotonic
    while clock() < end:
        await pair()
        count += 1
        if count & 7 == 0:
            await asyncio.sleep(0)
    return count


async def crowd(pairs: Sequence[Pair], seconds: float) -> int:
    """Repeat all pairs side by side for a while; return how often."""
    end = time.monotonic() + seconds
    return sum(await asyncio.gather(*(task(pair, end) for pair in pairs)))


async def repeated(url: str, name: str, seconds: float, server: Callable[[], float]) -> dict[str, float]:
    """Return what a pair costs: microseconds of client CPU, of server CPU, of time."""
    make, tasks, names = PROGRAMS[name]
    processes = 2 if name.startswith("contended") else 1
    async with opened(url, make, processes) as owners:
        pairs = [make(owners[number % processes], f"{number % names}") for number in range(tasks)]
        await crowd(pairs, 0.1)
        served, cpu, start = server(), time.process_time(), time.monotonic()
        count = await crowd(pairs, seconds)
        end, used = time.monotonic(), time.process_time()
        return {
            "client": (used - cpu) / count * 1e6,
            "server": (server() - served) / count * 1e6,
            "time": (end - start) / count * 1e6,
        }


async def drained(url: str, name: str, seconds: float, server: Callable[[], float]) -> dict[str, float]:
    """Return what it costs to serve a hundred waiters that acquire once, each in its turn, in the same units."""
    make, tasks, _ = PROGRAMS[name]
    best = {"client": float("inf"), "server": float("inf"), "time": float("inf")}
    async with opened(url, make, 1) as [sync]:
        pair, gate = make(sync, "drain"), AsyncLock(sync, "drain", ttl=TTL)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            lease = await gate.acquire()
            waiting = [asyncio.ensure_future(pair()) for _ in range(tasks)]
            await asyncio.sleep(0)
            await gate.locked()  # answered behind the requests of all waiters
            served, cpu, start = server(), time.process_time(), time.monotonic()
            await lease.release()
            await asyncio.gather(*waiting)
            found = {"time": time.monotonic() - start, "client": time.process_time() - cpu, "server": server() - served}
            best = {key: min(value, found[key] * 1e6) for key, value in best.items()}
    return best


def main() -> None:
    """Run one program: URL NAME SECONDS PACKAGE, with the directory that the package has to come from."""
    url, name, seconds, package = sys.argv[1], sys.argv[2], float(sys.argv[3]), Path(sys.argv[4])
    if not Path(redis_sync_aio.__file__).is_relative_to(package):
        raise SystemExit(f"redis_sync_aio was imported from {redis_sync_aio.__file__} instead of {package}")
    observer = redis.Redis.from_url(url)

    def server() -> float:
        used: Any = observer.info("cpu")
        return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])

    observer.flushall()
    program = drained if name.startswith("drain") else repeated
    print(json.dumps(asyncio.run(program(url, name, seconds, server))))


if __name__ == "__main__":
    main()
