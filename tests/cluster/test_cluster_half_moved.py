"""FAULTS D7: a slot of a Redis Cluster is left half-way between two nodes, for as long as nobody looks after it."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from redis_sync_aio import (
    AsyncLock,
    AsyncReadWriteLock,
    AsyncRobustLock,
    AsyncSemaphore,
    CommandRefused,
    Coordinator,
    wait_until,
)
from redis_sync_aio.types import GuardingLease

from ..support.body import FAST, waits
from ..support.clusters import SOON, Nodes, moved_back, processes
from ..support.pairwise import first_of

pytestmark = pytest.mark.timing
TTL = 4.0
"""Of many that are renewed at the same time: none is lost on a machine that is busy with all of them."""
BRIEF = 2.0
"""Of a single one."""
RENEWALS = 4
"""So many take longer than a ttl."""

Take = Callable[[Coordinator, str, Any, float], Awaitable[GuardingLease]]


def side(sync: Coordinator, name: str, engine: Any, ttl: float = TTL) -> AsyncReadWriteLock:
    return AsyncReadWriteLock(sync, name, ttl=ttl, engine=engine)


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
    *((kind, "watch", "auto", NOTHING) for kind in ("lock", "semaphore")),
    *((kind, "lua", "never", NOTHING) for kind in ("lock", "robust lock", "semaphore", "writer")),
    *(
        (kind, engine, push, ALL)
        for kind in ("lock", "semaphore")
        for engine, push in (("watch", "auto"), ("lua", "never"))
    ),
    *(("lock", engine, push, FIRST) for engine in ("lua", "watch") for push in ("auto", "never")),
]
GROUPS = {
    "scripts": [("lua", "auto")],
    "polling": [("lua", "never")],
    "with WATCH": [("watch", "auto"), ("watch", "never")],
}


async def renewed(lease: GuardingLease, times: int = RENEWALS) -> None:
    """Return when it was renewed so many times."""
    for _ in range(times):
        before = lease._grant.deadline

        async def later(before: float = before) -> bool:
            lease.check()
            return lease._grant.deadline > before

        await wait_until(later, SOON, timeout=15)


async def free(nodes: Nodes, name: str) -> bool:
    """Return whether nobody holds the name, whatever it is, at any node."""
    held = {name.encode(), f"{{{name}}}:sem".encode(), f"{{{name}}}:rw".encode()}
    slot = nodes.slot(name)
    found = [key for node in nodes.primaries for key in await nodes.say(node, "CLUSTER", "GETKEYSINSLOT", slot, 100)]
    return not held & set(found)


class Case:
    """One kind of lock, by one way, on a name of its own whose slot is moved."""

    def __init__(self, nodes: Nodes, both: tuple[Coordinator, Coordinator], *way: str) -> None:
        self.kind, self.engine, self.push, self.moved = way
        self.name = nodes.name_at(0, f"half-{'-'.join(way)}-".replace(" ", "-"))
        self.nodes, self.slot = nodes, nodes.slot(self.name)
        self.sync, self.other = both

    def __str__(self) -> str:
        return f"{self.kind} by {self.engine}, push {self.push}, {self.moved} moved"

    async def acquire(self) -> None:
        self.lease = await KINDS[self.kind](self.sync, self.name, self.engine, 15)

    async def begin(self) -> None:
        a, b, _ = self.nodes.primaries
        await self.nodes.begin_move(self.slot, a, b)
        if self.moved != NOTHING:
            keys = await self.nodes.say(a, "CLUSTER", "GETKEYSINSLOT", self.slot, 100)
            keys = [self.name] if self.moved == FIRST else keys
            await self.nodes.say(a, "MIGRATE", b.host, b.port, "", 0, 5000, "KEYS", *keys)

    async def use(self) -> None:
        await renewed(self.lease)
        with pytest.raises(CommandRefused, match=r"TRYAGAIN.* slot"):
            await asyncio.wait_for(KINDS[self.kind](self.other, self.name, self.engine, 1.5), 9)
        await self.lease.release()
        assert await free(self.nodes, self.name)

    async def end(self) -> None:
        a, b, _ = self.nodes.primaries
        await self.nodes.end_move(self.slot, a, b)

    async def use_again(self) -> None:
        again = await KINDS[self.kind](self.other, self.name, self.engine, 15)
        assert again.fence >= self.lease.fence
        await again.release()


@pytest.mark.parametrize("group", first_of(*GROUPS))
async def test_p6_what_is_held_is_renewed_and_released(
    nodes: Nodes, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever its keys are. New requests wait within their time and say why; afterwards all is as before.

    Many kinds at the same time, each on a name of its own: what takes time is to wait for renewals. That a node says
    "not now" is no reason to log that the client cannot connect.
    """
    wrong: dict[str, BaseException] = {}

    async def each(cases: list[Case], step: Callable[[Case], Awaitable[None]]) -> None:
        """Take a step with all that went well so far."""
        well = [case for case in cases if str(case) not in wrong]
        ends = await asyncio.gather(*map(step, well), return_exceptions=True)
        wrong.update({str(case): end for case, end in zip(well, ends, strict=True) if end is not None})

    async with AsyncExitStack() as stack:
        ways = [way for way in WAYS if way[1:3] in GROUPS[group]]
        both = {push: await stack.enter_async_context(processes(nodes, push=push)) for push in {way[2] for way in ways}}
        cases = [Case(nodes, both[way[2]], *way) for way in ways]
        assert len({case.slot for case in cases}) == len(cases)
        for case in cases:
            await stack.enter_async_context(moved_back(nodes, case.name))
        await each(cases, Case.acquire)
        try:
            for case in cases:
                await case.begin()
            await each(cases, Case.use)
        finally:
            for case in cases:
                await case.end()
        await each(cases, Case.use_again)
    for name, error in wrong.items():
        print(f"-- {name}")
        traceback.print_exception(error)
    assert not wrong, "\n".join(f"{name}: {error!r}" for name, error in wrong.items())
    assert not [record for record in caplog.records if getattr(record, "event", "") == "connecting_failed"]


async def test_p6_a_writer_writes_on_and_is_downgraded(nodes: Nodes) -> None:
    """It is renewed as a writer, and then as a reader."""
    name = nodes.name_at(0, "half-downgraded")
    slot, (a, b, _) = nodes.slot(name), nodes.primaries
    async with moved_back(nodes, name), processes(nodes) as (sync, other):
        lock = side(sync, name, "lua", BRIEF)
        async with lock.write() as lease:
            try:
                await nodes.begin_move(slot, a, b)
                await renewed(lease)
                await lock.downgrade(lease)
                about = await nodes.say(a, "HGET", f"{{{name}}}:rw:state", f"={lease.token}")
                assert about.startswith(b"1 ")
                await renewed(lease, 1)
            finally:
                await nodes.end_move(slot, a, b)
            async with side(other, name, "lua", BRIEF).read().acquire(timeout=10):
                lease.check()


async def test_p3_a_waiter_has_its_turn_when_the_slot_has_arrived(nodes: Nodes) -> None:
    """The release could not hand over, as the queue was out of sight: the waiter asks again, in its place."""
    name = nodes.name_at(0, "half-waited-for")
    slot, (a, b, _) = nodes.slot(name), nodes.primaries
    async with moved_back(nodes, name), processes(nodes) as (sync, other):
        lock = AsyncLock(sync, name, ttl=BRIEF)
        lease = await lock.acquire()
        waiter = asyncio.create_task(AsyncLock(other, name, ttl=BRIEF).acquire())
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
