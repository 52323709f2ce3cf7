"""FAULTS D7: a slot of a Redis Cluster is left half-way between two nodes, for as long as nobody looks after it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from redis_sync_aio import (
    AsyncLock,
    AsyncReadWriteLock,
    AsyncRobustLock,
    AsyncSemaphore,
    CommandRefused,
    Coordinator,
    Lease,
    wait_until,
)

from ..support.body import FAST, waits
from ..support.clusters import Nodes, moved_back, processes

pytestmark = pytest.mark.timing
TTL = 2.0
RENEWALS = 5
"""So many take longer than a ttl."""

Take = Callable[[Coordinator, str, Any, float], Awaitable[Lease]]


def side(sync: Coordinator, name: str, engine: Any) -> AsyncReadWriteLock:
    return AsyncReadWriteLock(sync, name, ttl=TTL, engine=engine)


KINDS: dict[str, Take] = {
    "lock": lambda it, name, engine, wait: AsyncLock(it, name, ttl=TTL, engine=engine).acquire(timeout=wait),
    "shared lock": lambda it, name, _, wait: AsyncLock(it, name, ttl=TTL, share=True).acquire(timeout=wait),
    "robust lock": lambda it, name, _, wait: AsyncRobustLock(it, name, ttl=TTL).acquire(timeout=wait),
    "semaphore": lambda it, name, engine, wait: AsyncSemaphore(it, name, limit=1, ttl=TTL, engine=engine).acquire(
        timeout=wait
    ),
    "reader": lambda it, name, engine, wait: side(it, name, engine).read().acquire(timeout=wait),
    "writer": lambda it, name, engine, wait: side(it, name, engine).write().acquire(timeout=wait),
}
NOTHING, ALL, FIRST = "nothing", "all", "the first key"
WAYS = [
    *((kind, "lua", "auto", moved) for kind in KINDS for moved in (NOTHING, ALL)),
    *((kind, "watch", "auto", NOTHING) for kind in ("lock", "semaphore", "reader", "writer")),
    *((kind, "lua", "never", NOTHING) for kind in ("lock", "robust lock", "semaphore", "writer")),
    *(
        (kind, engine, push, ALL)
        for kind in ("lock", "semaphore")
        for engine, push in (("watch", "auto"), ("lua", "never"))
    ),
    *(("lock", engine, push, FIRST) for engine in ("lua", "watch") for push in ("auto", "never")),
]


async def renewed(lease: Lease, times: int = RENEWALS) -> None:
    """Return when it was renewed so many times."""
    for _ in range(times):
        before = lease._grant.deadline

        async def later(before: float = before) -> bool:
            lease.check()
            return lease._grant.deadline > before

        await wait_until(later, FAST, timeout=2 * TTL)


async def free(nodes: Nodes, name: str) -> bool:
    """Return whether nobody holds the name, whatever it is, at any node."""
    held = {name.encode(), f"{{{name}}}:sem".encode(), f"{{{name}}}:rw".encode()}
    slot = nodes.slot(name)
    found = [key for node in nodes.primaries for key in await nodes.say(node, "CLUSTER", "GETKEYSINSLOT", slot, 100)]
    return not held & set(found)


@pytest.mark.parametrize(("kind", "engine", "push", "moved"), WAYS)
async def test_p6_what_is_held_is_renewed_and_released(
    nodes: Nodes, kind: str, engine: str, push: Any, moved: str
) -> None:
    """Wherever its keys are. New requests wait within their time and say why; afterwards all is as before."""
    name = nodes.name_at(0, f"half-{kind}-{engine}-{push}-{moved}".replace(" ", "-"))
    slot, (a, b, _) = nodes.slot(name), nodes.primaries
    async with moved_back(nodes, name), processes(nodes, push=push) as (sync, other):
        lease = await KINDS[kind](sync, name, engine, 5)
        await nodes.begin_move(slot, a, b)
        try:
            keys = await nodes.say(a, "CLUSTER", "GETKEYSINSLOT", slot, 100)
            if moved != NOTHING:
                keys = [name] if moved == FIRST else keys
                await nodes.say(a, "MIGRATE", b.host, b.port, "", 0, 5000, "KEYS", *keys)
            await renewed(lease)
            with pytest.raises(CommandRefused, match=r"TRYAGAIN.* slot"):
                await asyncio.wait_for(KINDS[kind](other, name, engine, 0.5), 5)
            await lease.release()
            assert await free(nodes, name)
        finally:
            await nodes.end_move(slot, a, b)
        again = await KINDS[kind](other, name, engine, 10)
        assert again.fence >= lease.fence
        await again.release()


@pytest.mark.parametrize("engine", ["lua", "watch"])
async def test_p6_an_upgraded_reader_writes_on_and_is_downgraded(nodes: Nodes, engine: Any) -> None:
    """Its permit is one, so it is renewed and given back as a writer, and then as a reader."""
    name = nodes.name_at(0, f"half-upgraded-{engine}")
    slot, (a, b, _) = nodes.slot(name), nodes.primaries
    async with moved_back(nodes, name), processes(nodes) as (sync, other):
        lock = side(sync, name, engine)
        async with lock.read() as reading:
            try:
                async with lock.upgrade(reading) as writing:
                    await nodes.begin_move(slot, a, b)
                    await renewed(writing)
                about = await nodes.say(a, "HGET", f"{{{name}}}:rw:state", f"={reading.token}")
                assert about.startswith(b"1 ")
                await renewed(reading, 1)
            finally:
                await nodes.end_move(slot, a, b)
            async with side(other, name, engine).read().hold(timeout=10):
                reading.check()


async def test_p3_a_waiter_has_its_turn_when_the_slot_has_arrived(nodes: Nodes) -> None:
    """The release could not hand over, as the queue was out of sight: the waiter asks again, in its place."""
    name = nodes.name_at(0, "half-waited-for")
    slot, (a, b, _) = nodes.slot(name), nodes.primaries
    async with moved_back(nodes, name), processes(nodes) as (sync, other):
        lock = AsyncLock(sync, name, ttl=TTL)
        lease = await lock.acquire()
        waiter = asyncio.create_task(AsyncLock(other, name, ttl=TTL).acquire())
        await wait_until(waits(lock), FAST, timeout=15)
        await nodes.begin_move(slot, a, b)
        try:
            await renewed(lease)
            await lease.release()
            assert not waiter.done()
        finally:
            await nodes.end_move(slot, a, b)
        following = await asyncio.wait_for(waiter, 10)
        assert following.fence > lease.fence
        await following.release()
