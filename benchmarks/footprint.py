"""What locks take: ``python -m benchmarks.footprint``, the figures of docs/operations/capacity.md and metrics.md.

The keys that it leaves behind expire. It resets the server's statistics (CONFIG RESETSTAT).

    memory     bytes of each key, and how long it stays
    traffic    CPU of the scripts, and bytes on the network, of one operation
    fleet      memory and CPU of many processes that wait for one name
    look       seconds for one look at many held names
    metrics    CPU time of this process for an acquire and a release, with each kind of observer
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable
from contextlib import AsyncExitStack
from typing import Annotated, Any, TypeVar

import typer
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from redis_sync_aio import AsyncRobustLock, Coordinator, FenceGate, Lease
from redis_sync_aio.contrib.otel import OpenTelemetryObserver
from redis_sync_aio.contrib.prometheus import PrometheusObserver
from redis_sync_aio.inspection import inspect
from redis_sync_aio.instrumentation import Observer

T = TypeVar("T")
SECONDS = 5
"""Time for which looks are counted."""


async def memory(redis: Redis, sync: Coordinator, many: int, names: int) -> None:
    """Print the growth of the server for each of ``names``, and the size of each key; ``many`` hold and wait."""
    before = await _used(redis)
    for start in range(0, names, 50):
        locks = [sync.lock(f"m:{number}") for number in range(start, start + 50)]
        held = await asyncio.gather(*(lock.acquire() for lock in locks))
        await asyncio.gather(*(lease.release() for lease in held))
    print(f"{names:,} names that were used: {(await _used(redis) - before) / names:.0f} bytes each")

    async with sync.lock("m:free"):
        pass
    held = [await sync.lock("m:held").acquire(), await sync.lock("m:queue").acquire()]
    robust = await AsyncRobustLock(sync, "m:robust").acquire()
    permits = [await sync.semaphore("m:permit", 5).acquire()]
    reader = await sync.read_write_lock("m:reader").read().acquire()
    permits += await asyncio.gather(*(sync.semaphore("m:permits", many).acquire() for _ in range(many)))
    await FenceGate(sync, "m:gate").accept(held[0])
    waiting = await _waiting(sync, "m:queue", many)

    for key in sorted([key async for key in redis.scan_iter("*m:[a-z]*")]):
        size, left = await redis.memory_usage(key, samples=0), await redis.pttl(key)
        print(f"{key.decode():22} {size:8,} bytes, for {left / 1000:9,.0f} s")

    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.gather(*(lease.release() for lease in (*held, robust, *permits, reader)))


async def _used(redis: Redis) -> int:
    found: Any = await redis.info("memory")
    return int(found["used_memory"])


async def _waiting(sync: Coordinator, name: str, many: int) -> list[asyncio.Task[Lease]]:
    """Return tasks that wait for a name, once the server has queued them."""

    async def acquire() -> Lease:
        return await sync.lock(name, ttl=300).acquire()

    tasks = [asyncio.create_task(acquire()) for _ in range(many)]
    while (await sync.lock(name).statistics()).waiting < many:
        await asyncio.sleep(0.01)
    return tasks


async def traffic(redis: Redis, sync: Coordinator, times: int) -> None:
    """Print the cost of one of ``times`` operations of each kind."""

    async def measure(what: str, act: Awaitable[T]) -> T:
        await redis.config_resetstat()
        result = await act
        network: Any = await redis.info("stats")
        commands: Any = await redis.info("commandstats")
        calls, cpu = (commands["cmdstat_evalsha"][one] / times for one in ("calls", "usec"))
        sent = (network["total_net_input_bytes"] + network["total_net_output_bytes"]) / times
        print(f"{what:22} {calls:.1f} scripts, {cpu:5.1f} us, {sent:4.0f} bytes")
        return result

    locks = [sync.lock(f"t:{it}", ttl=300) for it in range(times)]
    semaphores = [sync.semaphore(f"t:{it}", 5, ttl=300) for it in range(times)]
    for kind, each in ("lock", locks), ("semaphore", semaphores):
        first = await each[0].acquire()
        await first.extend(300)
        await first.release()  # by now the server knows the scripts
        leases = await measure(f"{kind}: acquire", _together(one.acquire() for one in each))
        await measure(f"{kind}: renew", _together(lease.extend(300) for lease in leases))
        await measure(f"{kind}: release", _together(lease.release() for lease in leases))

    lease = await sync.lock("t:hot", ttl=300).acquire()

    async def hand_over(waiting: list[asyncio.Task[Lease]]) -> None:
        await lease.release()
        for task in waiting:
            await (await task).release()

    waiting = await measure("lock: wait in a queue", _waiting(sync, "t:hot", times))
    await measure("lock: hand over", hand_over(waiting))


async def _together(acts: Iterable[Awaitable[T]]) -> list[T]:
    return await asyncio.gather(*acts)


async def fleet(redis: Redis, url: str, processes: int) -> None:
    """Print the cost of ``processes`` that wait for one name: each has a connection of its own."""

    async def wait(sync: Coordinator) -> None:
        async with sync.lock("f:name", ttl=300):
            pass

    async def scripts() -> tuple[int, int]:
        commands: Any = await redis.info("commandstats")
        return commands["cmdstat_evalsha"]["calls"], commands["cmdstat_evalsha"]["usec"]

    async with AsyncExitStack() as stack, Coordinator(redis) as first:
        held = await first.lock("f:name", ttl=300).acquire()
        before = await _used(redis)
        others = [await stack.enter_async_context(Coordinator.from_url(url)) for _ in range(processes)]
        waiting = [asyncio.create_task(wait(sync)) for sync in others]
        while (await first.lock("f:name").statistics()).waiting < processes:
            await asyncio.sleep(0.1)
        print(f"{processes:,} processes that wait: {(await _used(redis) - before) / processes / 1e3:.1f} KB each")
        await redis.config_resetstat()
        await asyncio.sleep(SECONDS)
        looks, cpu = await scripts()
        print(f"a look: {cpu / looks:.1f} us, {looks / processes / SECONDS:.2f} a second for each process")
        await redis.config_resetstat()
        await held.release()
        await asyncio.gather(*waiting)
        print(f"a hand-over between two of them: {(await scripts())[1] / processes:.1f} us")


async def look(redis: Redis, sync: Coordinator, names: int) -> None:
    """Print the time that `inspect` takes for ``names`` that are held."""
    leases = [lease for start in range(0, names, 500) for lease in await _held(sync, start, min(start + 500, names))]
    begun = time.perf_counter()
    assert len(await inspect(redis, "n:*", limit=names)) == names
    print(f"{names:,} held names: {time.perf_counter() - begun:.2f} s for a look")
    await asyncio.gather(*(lease.release() for lease in leases))


async def _held(sync: Coordinator, first: int, end: int) -> list[Lease]:
    return await _together(sync.lock(f"n:{number}", ttl=300).acquire() for number in range(first, end))


async def metrics(redis: Redis, pairs: int) -> None:
    """Print the CPU time of a pair without an observer, with an empty one, and with each integration."""
    observers: dict[str, list[Observer]] = {
        "no observer": [],
        "one that does nothing": [lambda event: None],
        "Prometheus": [PrometheusObserver(CollectorRegistry())],
        "OpenTelemetry": [OpenTelemetryObserver(meter_provider=MeterProvider([InMemoryMetricReader()]))],
    }
    for name, observe in observers.items():
        async with Coordinator(redis, observe=observe) as sync, sync.lock("o:first"):
            begun = time.process_time()
            for number in range(pairs):
                async with sync.lock(f"o:{number}"):
                    pass
            print(f"{name}: {(time.process_time() - begun) / pairs * 1e6:.0f} us")


async def run(url: str, many: int, names: int) -> None:
    """Measure all parts at one server."""
    async with Redis.from_url(url) as redis, Coordinator(redis) as sync:
        await memory(redis, sync, many, names)
        await traffic(redis, sync, many)
        await fleet(redis, url, many)
        await look(redis, sync, names // 2)
        await metrics(redis, names)


def main(
    url: Annotated[str, typer.Option(help="The server.")] = "redis://localhost",
    quick: Annotated[bool, typer.Option("--quick", help="Do less of everything.")] = False,
) -> None:
    """Measure what locks take at a server."""
    logging.getLogger("redis_sync_aio").setLevel(logging.ERROR)  # many wait for long
    asyncio.run(run(url, 100 if quick else 1_000, 500 if quick else 20_000))


if __name__ == "__main__":
    typer.run(main)
