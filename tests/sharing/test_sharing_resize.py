"""P1, P3: the limit is changed while tasks share permits: nobody hangs, or is refused for it who waited before."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncSemaphore, Coordinator, Lease, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import LimitMismatch
from redis_sync_aio.testing.faults import Action, FaultProxy, script

from ..support.body import FAST, waits
from ..support.inside import behind_tickets, cohorts_of, hub_of, load, now
from ..support.sharing import process_grant_of, soon

NAME = "shared"
RESIZE = script(load("permits/resize").sha)
both_ways = pytest.mark.parametrize("share", [True, False])


def semaphore(sync: Coordinator, limit: int | None, *, share: bool = True) -> AsyncSemaphore:
    return AsyncSemaphore(sync, NAME, limit=limit, share=share)


async def hold(sem: AsyncSemaphore, number: int) -> list[Lease]:
    """Acquire so many, one after the other."""
    return [await sem.acquire(timeout=5) for _ in range(number)]


async def line(sem: AsyncSemaphore, number: int, weight: int = 1, before: int = 0) -> list[asyncio.Task[Lease]]:
    """Start so many tasks, which wait behind those who waited ``before``."""
    tasks = [asyncio.create_task(sem.acquire(weight=weight)) for _ in range(number)]
    await wait_until(waits(sem, before + number), FAST, timeout=5)
    return tasks


async def turn_by_turn(sem: AsyncSemaphore, leases: list[Lease], tasks: list[asyncio.Task[Lease]], limit: int) -> None:
    """Release one after the other until all tasks had their turn: there are ``limit`` permits, once so few are held."""
    left, leases = list(tasks), list(leases)
    while leases or left:
        if not leases:
            await asyncio.wait_for(asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED), 5)
        leases += [task.result() for task in left if task.done()]
        left = [task for task in left if not task.done()]
        before = len(leases)
        await leases.pop(0).release()
        assert (await sem.statistics()).held <= max(limit, before - 1), "P1"


async def all_free(sem: AsyncSemaphore, sync: Coordinator) -> None:
    """Nothing is held, and nobody waits."""
    await wait_until(lambda: not hub_of(sync).resources, FAST, timeout=5)
    found = await sem.statistics()
    assert (found.held, found.waiting) == (0, 0)


# -- room ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [50, 1000, 3])
async def test_room_where_only_the_server_knows_the_limit(sync: Coordinator, other: Coordinator, limit: int) -> None:
    theirs = await semaphore(other, 100).acquire()
    sem = semaphore(sync, None)
    (lease,) = await hold(sem, 1)
    await sem.resize(limit)
    await lease.release()
    await theirs.release()
    leases = await hold(sem, min(limit, 16))
    for one in leases:
        await one.release()
    await all_free(sem, sync)


async def test_room_after_another_process_changed_the_limit(sync: Coordinator, other: Coordinator) -> None:
    """To the server it is a change, and to those who share it is none."""
    sem = semaphore(sync, 10)
    (lease,) = await hold(sem, 1)
    await semaphore(other, None).resize(1000)
    await sem.resize(10)
    leases = [lease, *await hold(sem, 9)]
    assert await sem.try_acquire() is None
    for one in leases:
        await one.release()
    await all_free(sem, sync)


@pytest.mark.parametrize("limit", [4, 1])
async def test_room_when_the_answer_is_lost(server: EmbeddedServer, redis: Redis, limit: int) -> None:
    """The answer to its repetition says that the limit was the new one before."""
    async with (
        FaultProxy(server) as proxy,
        proxy.client() as client,
        Coordinator(client) as sync,
    ):
        sem = semaphore(sync, 2)
        leases = await hold(sem, 2)
        tasks = await line(sem, 6)
        lost = proxy.on(RESIZE, Action.CUT_AFTER)
        await sem.resize(limit)
        assert lost.fired.is_set()
        if limit == 4:
            leases += [await soon(task) for task in tasks[:2]]
            tasks = tasks[2:]
        await turn_by_turn(sem, leases, tasks, limit)
        await all_free(sem, sync)


async def test_all_permits_are_asked_for_where_only_the_server_knows_the_limit(
    sync: Coordinator, other: Coordinator
) -> None:
    """Where only the server knows the limit."""
    await (await semaphore(other, 20).acquire()).release()
    sem = semaphore(sync, None)
    first = await sem.acquire(weight=20, timeout=5)
    tasks = await line(sem, 2, 20)
    assert await sem.try_acquire(weight=20) is None
    await turn_by_turn(sem, [first], tasks, 20)
    await all_free(sem, sync)


# -- waiters -------------------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("admin", ["itself", "another one", "that takes the server's"])
async def test_a_waiter_gets_in_when_the_limit_is_raised(sync: Coordinator, share: bool, admin: str) -> None:
    """By the object they wait at, or by another one of this process."""
    sem = semaphore(sync, 2, share=share)
    leases = await hold(sem, 2)
    tasks = await line(sem, 4)
    by = sem if admin == "itself" else semaphore(sync, 2 if admin == "another one" else None, share=share)
    await by.resize(4)
    leases += [await soon(task) for task in tasks[:2]]
    assert not any(task.done() for task in tasks[2:])
    assert await by.try_acquire() is None
    await turn_by_turn(sem, leases, tasks[2:], 4)
    await all_free(sem, sync)


@both_ways
async def test_a_waiter_stays_in_line_when_the_limit_is_lowered(sync: Coordinator, share: bool) -> None:
    sem = semaphore(sync, 4, share=share)
    leases = await hold(sem, 4)
    tasks = await line(sem, 6)
    await sem.resize(2)
    await turn_by_turn(sem, leases, tasks, 2)
    await all_free(sem, sync)


@both_ways
async def test_a_waiter_gets_nothing_from_its_own_process_while_it_is_paused(sync: Coordinator, share: bool) -> None:
    """What tasks release goes to the server. All wait on, and get in when the limit is raised."""
    sem = semaphore(sync, 3, share=share)
    leases = await hold(sem, 3)
    tasks = await line(sem, 5)
    await sem.resize(0)
    for lease in leases:
        await lease.release()
    found = await sem.statistics()
    assert (found.limit, found.held) == (0, 0)
    assert not any(task.done() for task in tasks)
    await sem.resize(3)
    await turn_by_turn(sem, [], tasks, 3)
    await all_free(sem, sync)


@both_ways
async def test_a_waiter_for_more_than_the_new_limit_is_refused(sync: Coordinator, share: bool) -> None:
    sem = semaphore(sync, 4, share=share)
    lease = await sem.acquire(weight=3)
    tasks = await line(sem, 2, 3)
    await sem.resize(2)
    await lease.release()
    for task in tasks:
        with pytest.raises(LimitMismatch, match="a weight of 3 never fits into its limit of 2") as caught:
            await soon(task)
        assert (caught.value.expected, caught.value.found) == (4, 2)
    await (await sem.acquire(weight=2, timeout=5)).release()
    await all_free(sem, sync)


async def test_back_and_forth(sync: Coordinator) -> None:
    """New ones are in the same line, whatever the limit was when the others came."""
    sem = semaphore(sync, 2)
    leases = await hold(sem, 2)
    tasks = list[asyncio.Task[Lease]]()
    for limit in (3, 2, 1, 2, 5, 1, 2):
        tasks += await line(sem, 2, before=(await sem.statistics()).waiting + behind_tickets(sem))
        await sem.resize(limit)
    assert list(cohorts_of(hub_of(sync).resources[sem._keys.id])) == [(1, 2, None)]
    await turn_by_turn(sem, leases, tasks, 2)
    await all_free(sem, sync)


async def test_a_request_while_the_limit_is_being_changed_is_not_refused(sync: Coordinator, other: Coordinator) -> None:
    """Its request reaches the server behind the change, with the old limit: that is an error of nobody else."""
    theirs = await semaphore(other, 3, share=False).acquire(weight=3)
    sem = semaphore(sync, 3)
    await sem.resize(3)  # so that the server knows the script
    tasks = await line(sem, 2)
    resizing = asyncio.create_task(sem.resize(4))
    tasks.append(asyncio.create_task(sem.acquire()))
    await resizing
    leases = [await soon(tasks[0])]
    await theirs.release()
    leases += [await soon(task) for task in tasks[1:]]
    for lease in leases:
        await lease.release()
    await all_free(sem, sync)


@both_ways
async def test_a_try_while_the_limit_is_being_changed_has_to_ask_again(sync: Coordinator, share: bool) -> None:
    sem = semaphore(sync, 3, share=share)
    await sem.resize(3)  # so that the server knows the script
    (lease,) = await hold(sem, 1)
    resizing = asyncio.create_task(sem.resize(4))
    trying = asyncio.create_task(sem.try_acquire())
    await resizing
    with pytest.raises(LimitMismatch, match="its limit became 4 while this was asked for: ask again") as caught:
        await trying
    assert (caught.value.expected, caught.value.found) == (4, 4)
    await lease.release()
    await all_free(sem, sync)


# -- other objects -------------------------------------------------------------------------------------------


@both_ways
async def test_a_request_with_the_old_limit_is_refused(sync: Coordinator, other: Coordinator, share: bool) -> None:
    """He is refused, in this process as in another one, also if he had permits together with others before."""
    sem, same, theirs = (semaphore(one, 2, share=share) for one in (sync, sync, other))
    leases = [await sem.acquire(), await same.acquire()]
    tasks = await line(sem, 1)
    await sem.resize(4)
    leases.append(await soon(tasks[0]))
    for old in (same, theirs):
        for ask in (old.acquire, old.try_acquire):
            with pytest.raises(LimitMismatch, match=r"its limit is 4, not 2: resize\(\) set it") as caught:
                await ask()
            assert (caught.value.expected, caught.value.found) == (2, 4)
    await same.resize(4)
    leases += await hold(same, 1)
    assert await sem.try_acquire() is None
    for lease in leases:
        await lease.release()
    await all_free(sem, sync)


async def test_a_waiter_with_the_old_limit_in_another_process_is_refused(sync: Coordinator, other: Coordinator) -> None:
    """Its tasks wait without a ticket; when they need one it is refused for its limit."""
    sem, theirs = semaphore(sync, 2), semaphore(other, 2)
    leases = await hold(theirs, 2)
    tasks = await line(theirs, 2)
    await sem.resize(3)
    (mine,) = await hold(sem, 1)
    waiting = await line(sem, 3)
    await wait_until(lambda: all(now() > process_grant_of(lease).yield_at for lease in leases), FAST, timeout=5)
    for lease in leases:
        await lease.release()
    for task in tasks:
        with pytest.raises(LimitMismatch, match="its limit is 3, not 2") as caught:
            await soon(task)
        assert (caught.value.expected, caught.value.found) == (2, 3)
    await turn_by_turn(sem, [mine], waiting, 3)
    await all_free(sem, sync)


async def test_two_lines_of_one_limit(sync: Coordinator, other: Coordinator) -> None:
    """One was there before another process changed the limit: nobody hangs, and afterwards there is room for both."""
    old, new = semaphore(sync, 2), semaphore(sync, 4)
    leases = await hold(old, 2)
    tasks = await line(old, 2)
    await semaphore(other, None).resize(4)
    leases += await hold(new, 2)
    tasks += await line(new, 2, before=2)
    await old.resize(4)
    assert list(cohorts_of(hub_of(sync).resources[new._keys.id])) == [(1, 2, None), (1, 4, None)]
    for lease in leases:
        await lease.release()
    for task in tasks:
        with suppress(LimitMismatch):  # of the old one, if its turn was over
            await (await soon(task)).release()
    for sem in (old, new):
        for lease in await hold(sem, 4):
            await lease.release()
    await all_free(new, sync)
