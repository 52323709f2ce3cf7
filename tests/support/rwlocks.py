"""Readers and writers for the tests of faults."""

from __future__ import annotations

from redis_sync_aio import AsyncReadWriteLock, wait_until

from .inside import load
from .wired import SOON, Wired

SCRIPT = "permits/downgrade"


async def both(w: Wired) -> tuple[AsyncReadWriteLock, AsyncReadWriteLock]:
    """The lock behind the proxy, and the same one on a good connection; the server knows the script."""
    await w.direct.script_load(load(SCRIPT).source.decode())
    return AsyncReadWriteLock(w.sync, w.name), AsyncReadWriteLock(w.other, w.name)


async def queued(rw: AsyncReadWriteLock, number: int) -> None:
    """Wait until so many are in the queue."""

    async def enough() -> bool:
        return (await rw.statistics()).waiting >= number

    await wait_until(enough, SOON, timeout=15)
