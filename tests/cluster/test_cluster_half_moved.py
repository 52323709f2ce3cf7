"""FAULTS D7: a slot of a Redis Cluster is left half-way between two nodes for a long time."""

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
    LeaseLost,
    wait_until,
)
from redis_sync_aio.testing.servers import SOON
from redis_sync_aio.types import GuardingLease

from ..support.body import FAST, waits
from ..support.pairwise import first_of
from ..support.topologies import Nodes, moved_back, processes

TTL = 30.0
"""Longer than a slot stays half moved here."""
BRIEF = 6.0
"""Shorter than that."""


def side(sync: Coordinator, name: str, engine: Any = "lua") -> AsyncReadWriteLock:
    return AsyncReadWriteLock(sync, name, ttl=TTL, engine=engine)


KINDS: dict[str, Callable[[Coordinator, str, Any], Any]] = {
    "lock": lambda it, name, engine: AsyncLock(it, name, ttl=TTL, engine=engine),
    "shared lock": lambda it, name, _: AsyncLock(it, name, ttl=TTL, share=True),
    "robust lock": lambda it, name, _: AsyncRobustLock(it, name, ttl=TTL),
    "semaphore": lambda it, name, engine: AsyncSemaphore(it, name, limit=1, ttl=TTL, engine=engine),
    "reader": lambda it, name, engine: side(it, name, engine).read(),
    "writer": lambda it, name, engine: side(it, name, engine).write(),
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


async def renewed(lease: GuardingLease, ttl: float = TTL) -> None:
    """Return when it was renewed by itself, twice."""
    for _ in range(2):
        await wait_until(lambda: lease.remaining() < ttl * 0.7, SOON, timeout=ttl)
        await wait_until(lambda: lease.remaining() > ttl * 0.7 or lease.lost, SOON, timeout=ttl)
        lease.check()


async def is_held(nodes: Nodes, name: str) -> bool:
    """Return whether some node has what holds the name, whatever it is."""
    kinds = {name.encode(), f"{{{name}}}:sem".encode(), f"{{{name}}}:rw".encode()}
    slot = nodes.slot(name)
    found = [key for node in nodes.primaries for key in await nodes.call(node, "CLUSTER", "GETKEYSINSLOT", slot, 100)]
    return bool(kinds & set(found))


class Case:
    """One kind of lock, by one way, on a name of its own whose slot is moved."""

    def __init__(self, nodes: Nodes, both: tuple[Coordinator, Coordinator], *way: str) -> None:
        self.kind, self.engine, self.push, self.moved = way
        self.name = nodes.name_at(0, f"half-{'-'.join(way)}-".replace(" ", "-"))
        self.nodes, self.slot = nodes, nodes.slot(self.name)
        self.mine, self.others = (KINDS[self.kind](it, self.name, self.engine) for it in both)

    def __str__(self) -> str:
        return f"{self.kind} by {self.engine}, push {self.push}, {self.moved} moved"

    async def acquire(self) -> None:
        self.lease = await self.mine.acquire(timeout=15)

    async def begin(self) -> None:
        a, b, _ = self.nodes.primaries
        await self.nodes.begin_move(self.slot, a, b)
        if self.moved != NOTHING:
            keys = await self.nodes.call(a, "CLUSTER", "GETKEYSINSLOT", self.slot, 100)
            keys = [self.name] if self.moved == FIRST else keys
            await self.nodes.call(a, "MIGRATE", b.host, b.port, "", 0, 5000, "KEYS", *keys)

    async def use(self) -> None:
        """Find everything refused for now, and nothing changed."""
        self.extended = asyncio.create_task(self.lease.extend(TTL))
        with pytest.raises(CommandRefused, match=r"TRYAGAIN.* slot"):
            await self.others.acquire(timeout=1)
        assert await is_held(self.nodes, self.name), "nothing is taken away"
        assert not self.extended.done()
        self.lease.check()

    async def end(self) -> None:
        a, b, _ = self.nodes.primaries
        await self.nodes.end_move(self.slot, a, b)

    async def use_again(self) -> None:
        """Find that what was put off is done, and all is as before."""
        await asyncio.wait_for(self.extended, 15)
        await renewed(self.lease)
        await self.lease.release()
        again = await self.others.acquire(timeout=8)  # sooner than the lease would end
        assert again.fence >= self.lease.fence
        await again.release()


@pytest.mark.parametrize("group", first_of(*GROUPS))
async def test_p6_what_is_held_stays_held_and_is_renewed_afterwards(
    nodes: Nodes, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever its keys are, if the move ends within the ttl. New requests wait within their time and say why.

    That a node says "not now" is no reason to log that the client cannot connect.
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


@pytest.mark.parametrize("push", ["auto", "never"])
async def test_p1_p6_a_move_that_hangs_for_longer_than_the_ttl_ends_the_lease(
    nodes: Nodes, push: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By its deadline, and the log says why. The next holder comes when the slot has arrived."""
    name = nodes.name_at(0, f"half-for-long-{push}")
    slot, (a, b, _) = nodes.slot(name), nodes.primaries
    async with moved_back(nodes, name), processes(nodes, push=push) as (sync, other):
        lease = await AsyncLock(sync, name, ttl=BRIEF).acquire()
        await nodes.begin_move(slot, a, b)
        waiter = asyncio.create_task(AsyncLock(other, name, ttl=BRIEF).acquire())
        try:
            with pytest.raises(LeaseLost) as caught:
                async with lease:
                    await asyncio.sleep(60)
            assert (caught.value.reason, caught.value.time_is_up) == ("expired", True)
            assert not waiter.done()
        finally:
            await nodes.end_move(slot, a, b)
        following = await asyncio.wait_for(waiter, 15)
        assert following.fence > lease.fence
        await renewed(following, BRIEF)
        await following.release()
    refused = [record for record in caplog.records if getattr(record, "event", "") == "renewal_refused"]
    assert refused
    assert all("TRYAGAIN" in record.getMessage() for record in refused)


async def test_p3_p4_p5_what_waits_for_the_slot(nodes: Nodes) -> None:
    """A release, a downgrade and a waiter have their turn when it has arrived; what is cancelled leaves nothing."""
    name = nodes.name_at(0, "half-waited-for")
    slot, (a, b, _) = nodes.slot(name), nodes.primaries
    async with moved_back(nodes, name), processes(nodes) as (sync, other):
        lock, elsewhere = AsyncLock(sync, name, ttl=TTL), AsyncLock(other, name, ttl=TTL)
        shared = side(sync, f"{{{name}}}:rw")
        lease, writer = await lock.acquire(), await shared.write().acquire()
        waiter = asyncio.create_task(elsewhere.acquire())
        await wait_until(waits(lock), FAST, timeout=15)
        await nodes.begin_move(slot, a, b)
        try:
            put_off = asyncio.gather(lease.release(), shared.downgrade(writer))
            cancelled = asyncio.create_task(elsewhere.acquire())
            for late in (elsewhere, side(other, f"{{{name}}}:rw").read()):
                with pytest.raises(CommandRefused, match=r"TRYAGAIN.* slot"):
                    await late.acquire(timeout=1)
            cancelled.cancel()
            await asyncio.wait([cancelled])
            assert not put_off.done()
            assert not waiter.done()
        finally:
            await nodes.end_move(slot, a, b)
        await asyncio.wait_for(put_off, 10)
        about = await nodes.call(b, "HGET", f"{{{name}}}:rw::rw:state", f"={writer.token}")
        assert about.startswith(b"1 ")
        async with side(other, f"{{{name}}}:rw").read().acquire(timeout=10):
            await renewed(writer)
        await writer.release()
        following = await asyncio.wait_for(waiter, 10)
        assert following.fence > lease.fence
        await following.release()

        async def nothing_left() -> bool:
            return not any([await nodes.call(b, "EXISTS", key) for key in (name, f"{{{name}}}:queue")])

        await wait_until(nothing_left, FAST, timeout=15)
        async with elsewhere.acquire(timeout=5):
            pass
