"""P1, P4, P5, FAULTS C1-C5, D3, D9: faults of the wire that meet several permits, or a request that was undone.

A semaphore of one permit goes through the sweeps of test_wire.py. Here are weights, a release that grants several,
a resize, and late copies of requests: no permit is left without a holder, none is released twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from redis_sync_aio import AcquireTimeout, AsyncSemaphore, Lease, Unreachable
from redis_sync_aio.embedded import EmbeddedServer

from ..support.factories import Client
from ..support.inside import load
from ..support.pairwise import first_of
from ..support.proxy import CUT_AFTER, CUT_BEFORE, PASS, SWALLOW_REPLY, Action, script
from ..support.wire_sweep import ANSWERS, LIMIT, SEVERAL, WIRE, Arm, Case, Operation, sweep
from ..support.wired import ACQUIRE, RELEASE, Wired, wired
from ..support.wired import quiet_loop as quiet_loop

RESIZE = script(load("permits/resize").sha)
modes = pytest.mark.parametrize("mode", ["link", "plain"])


def ours(w: Wired) -> AsyncSemaphore:
    """The semaphore behind the proxy."""
    return AsyncSemaphore(w.sync, w.name, limit=LIMIT)


def theirs(w: Wired) -> AsyncSemaphore:
    """The same one, on a good connection; with the server's limit."""
    return AsyncSemaphore(w.other, w.name, limit=None)


async def check_all_free(w: Wired) -> int:
    """Nobody holds any, nobody waits, and the whole can be had. Return its fence."""
    found = await theirs(w).statistics()
    assert (found.held, found.waiting, found.holders) == (0, 0, ()), found
    whole = await theirs(w).try_acquire(weight=LIMIT)
    assert whole is not None
    await whole.release()
    return whole.fence


async def held(w: Wired, *leases: Lease) -> None:
    """These and no others."""
    found = await theirs(w).statistics()
    assert {one.token: one.weight for one in found.holders} == {one.token: one.weight for one in leases}
    assert found.held == sum(one.weight for one in leases)
    for lease in leases:
        lease.check()


# -- the operations ----------------------------------------------------------------------------------------


async def weighted_contended(w: Wired, arm: Arm) -> int:
    """A heavy request waits for two holders, and a light one behind it for nothing else."""
    one, two = await ours(w).acquire(weight=3), await theirs(w).acquire(weight=2)
    arm(ACQUIRE)
    heavy = asyncio.create_task(ours(w).acquire(weight=4))
    await w.queued()
    light = asyncio.create_task(theirs(w).acquire())
    await w.queued(2)
    await two.release()
    await one.release()
    leases = await heavy, await light
    await held(w, *leases)
    for lease in leases:
        await lease.release()
    return await check_all_free(w)


async def release_to_several(w: Wired, arm: Arm) -> int:
    """The release whose answer is lost has granted three waiters; the next copy of it grants nobody else."""
    kept, lease = await ours(w).acquire(), await ours(w).acquire(weight=4)
    waiting = []
    for number, weight in enumerate((1, 2, 1, 1), start=1):
        waiting.append(asyncio.create_task(theirs(w).acquire(weight=weight)))
        await w.queued(number)
    arm(RELEASE)
    await lease.release()
    async with asyncio.timeout(1):
        leases = [await task for task in waiting[:3]]
    await held(w, kept, *leases)
    assert not waiting[3].done()
    await kept.release()
    leases.append(await waiting[3])
    for one in leases:
        await one.release()
    return await check_all_free(w)


async def resize(w: Wired, arm: Arm) -> int:
    """Growing grants who fits, once."""
    holder = await theirs_of(w, LIMIT).acquire(weight=4)
    waiting = []
    for number, weight in enumerate((2, 1, 3), start=1):
        waiting.append(asyncio.create_task(theirs(w).acquire(weight=weight)))
        await w.queued(number)
    admin = ours(w)
    arm(RESIZE)
    await admin.resize(7)
    leases = [await waiting[0], await waiting[1]]
    await held(w, holder, *leases)
    assert (await admin.get_limit(), admin.limit) == (7, 7)
    await admin.resize(LIMIT)
    for one in (holder, *leases):
        await one.release()
    await (await waiting[2]).release()
    return await check_all_free(w)


async def pause(w: Wired, arm: Arm) -> int:
    """A limit of 0 grants nothing, also when its reply is lost and it is set twice; it is raised again by them."""
    holder = await theirs_of(w, LIMIT).acquire(weight=LIMIT)
    waiting = asyncio.create_task(theirs(w).acquire(weight=2))
    await w.queued(1)
    admin = ours(w)
    arm(RESIZE)
    await admin.resize(0)
    await holder.release()
    assert (await admin.get_limit(), admin.limit) == (0, 0)
    found = await admin.statistics()
    assert (found.held, found.waiting) == (0, 1)
    await theirs(w).resize(LIMIT)
    await (await waiting).release()
    await admin.resize(LIMIT)
    return await check_all_free(w)


def theirs_of(w: Wired, limit: int) -> AsyncSemaphore:
    """As `theirs`, for the first use."""
    return AsyncSemaphore(w.other, w.name, limit=limit)


@pytest.mark.parametrize("mode", first_of("link", "plain"))
@pytest.mark.parametrize("operation", first_of(weighted_contended, release_to_several, resize, pause))
async def test_sweep_of_several_permits(server: EmbeddedServer, operation: Operation, mode: str) -> None:
    """C1-C5, D3, D9: 18 faults for each of 3 operations, in 2 modes: 108 in all."""
    faults = WIRE | ANSWERS
    cases = [Case(operation, mode, fault, faults[fault], kind=SEVERAL) for fault in faults]
    assert await sweep(server, cases) == len(cases) == 18


# -- late copies -------------------------------------------------------------------------------------------


async def repeated_and_released(w: Wired, arm: Arm) -> None:
    arm(ACQUIRE)
    lease = await ours(w).acquire(weight=2)
    await held(w, lease)
    await lease.release()


async def queued_and_released(w: Wired, arm: Arm) -> None:
    holder = await theirs_of(w, LIMIT).acquire(weight=LIMIT)
    arm(ACQUIRE)
    waiting = asyncio.create_task(ours(w).acquire(weight=2))
    await w.queued()
    await holder.release()
    lease = await waiting
    await held(w, lease)
    await lease.release()


async def cancelled_while_it_asks(w: Wired, arm: Arm) -> None:
    await ours(w).statistics()  # connected
    rule = arm(ACQUIRE)
    acquiring = asyncio.create_task(ours(w).acquire(weight=2))
    await rule.fired.wait() if rule.action is not PASS else await asyncio.sleep(0)
    acquiring.cancel()
    await asyncio.wait([acquiring])


async def cancelled_while_queued(w: Wired, arm: Arm) -> None:
    holder = await theirs_of(w, LIMIT).acquire(weight=LIMIT)
    arm(ACQUIRE)
    waiting = asyncio.create_task(ours(w).acquire(weight=2))
    await w.queued()
    waiting.cancel()
    await asyncio.wait([waiting])
    await holder.release()


async def timed_out(w: Wired, arm: Arm) -> None:
    holder = await theirs_of(w, LIMIT).acquire(weight=LIMIT)
    arm(ACQUIRE)
    with pytest.raises((AcquireTimeout, Unreachable)):
        await ours(w).acquire(weight=2, timeout=0.5)
    await holder.release()


COPIED: tuple[tuple[Callable[[Wired, Arm], Awaitable[None]], Action], ...] = (
    (repeated_and_released, CUT_AFTER),
    (repeated_and_released, CUT_BEFORE),
    (repeated_and_released, SWALLOW_REPLY),
    (repeated_and_released, ANSWERS["LOADING"]),
    (queued_and_released, CUT_AFTER),
    (queued_and_released, SWALLOW_REPLY),
    (cancelled_while_it_asks, CUT_AFTER),
    (cancelled_while_it_asks, SWALLOW_REPLY),
    (cancelled_while_queued, PASS),
    (cancelled_while_queued, CUT_AFTER),
    (timed_out, PASS),
    (timed_out, CUT_AFTER),
)


@modes
async def test_p4_late_copies_of_what_is_over_find_it_spent(server: EmbeddedServer, mode: str) -> None:
    """P4, B4: every copy of an acquire that was repeated or undone, arriving after the end: no ghost permit."""
    for number, (operation, action) in enumerate(COPIED):
        copies: list[list[bytes]] = []

        def acquires(args: list[bytes], copies: list[list[bytes]] = copies) -> bool:
            if ACQUIRE(args):
                copies.append(args)
            return ACQUIRE(args)

        async with wired(server, mode, name=f"late {number}", kind=SEVERAL) as w:
            await (await theirs_of(w, LIMIT).acquire()).release()
            await operation(w, lambda _, w=w, action=action, match=acquires: w.proxy.on(match, action))  # type: ignore[misc]
            await ours(w).statistics()  # whatever undoes it was executed before
            assert copies
            direct: Client = w.direct
            for copy in copies * 2:
                reply = await direct.execute_command(*copy)
                assert isinstance(reply, list), f"granted: {operation.__name__}, {action}"
                assert reply[0] == 4, f"not spent: {operation.__name__}, {action}"
            await check_all_free(w)


@modes
@pytest.mark.parametrize("fault", ["LOADING", "cut after"])
async def test_p4_an_identity_is_never_spent(server: EmbeddedServer, mode: str, fault: str) -> None:
    """P4: its request was repeated, it was released; it is granted again immediately."""
    async with wired(server, mode, kind=SEVERAL) as w:
        fence = 0
        for _ in range(3):
            w.proxy.on(ACQUIRE, (WIRE | ANSWERS)[fault])
            lease = await ours(w).acquire(weight=2, identity="worker-7")
            assert lease.fence > fence
            fence = lease.fence
            await lease.release()
            async with asyncio.timeout(1), ours(w).acquire(identity="worker-7") as again:
                assert again.fence > fence
                fence = again.fence
        await check_all_free(w)
