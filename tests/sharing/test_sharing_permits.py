"""Local sharing of permits (P1, P2, P6, P8): semaphores, read/write locks whose tasks share what the process holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncReadWriteLock,
    AsyncSemaphore,
    Coordinator,
    LeaseLost,
    OutcomeUnknown,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action

from ..support.body import FAST, waits
from ..support.inside import TaskGrant, behind_tickets, hub_of
from ..support.inspecting import calls
from ..support.sharing import on_wanted, process_grant_of, told
from ..support.transactions import proxied
from ..support.views import readers_of, writer_of

NAME = "shared"


def semaphore(sync: Coordinator, limit: int | None = 5, ttl: float = 30.0) -> AsyncSemaphore:
    return AsyncSemaphore(sync, NAME, limit=limit, ttl=ttl, share=True)


@pytest.mark.real  # counts the commands of the server
async def test_permits_are_handed_on_without_a_command(sync: Coordinator, redis: Redis) -> None:
    """P9: 20 tasks, 400 times, 5 permits: 10 scripts, and a renewal of each when it needs more fences."""
    sem, inside, most = semaphore(sync), 0, 0

    async def work() -> None:
        nonlocal inside, most
        for _ in range(20):
            async with sem:
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                inside -= 1

    await redis.config_resetstat()
    await asyncio.gather(*(work() for _ in range(20)))
    assert most == 5
    assert await calls(redis) <= 10 + 5 * 5
    await wait_until(lambda: not hub_of(sync).resources, FAST, timeout=5)
    assert (await sem.statistics()).held == 0


async def test_p1_never_more_than_the_limit_over_processes(sync: Coordinator, other: Coordinator) -> None:
    """P1, P8: two processes with 12 tasks each; fences are unique; both get their share."""
    inside, most, fences, turns = 0, 0, list[int](), [0, 0]

    async def work(number: int, sem: AsyncSemaphore) -> None:
        nonlocal inside, most
        for _ in range(60):
            async with sem.acquire() as lease:
                inside += 1
                most = max(most, inside)
                fences.append(lease.fence)
                turns[number] += 1
                await asyncio.sleep(0)
                lease.check()
                inside -= 1

    both = semaphore(sync), semaphore(other)
    await asyncio.gather(*(work(number, both[number]) for number in (0, 1) for _ in range(12)))
    assert most == 5
    assert len(set(fences)) == len(fences) == 2 * 12 * 60
    assert turns == [720, 720]


async def test_p8_a_permit_that_is_handed_on_has_a_higher_fence(sync: Coordinator) -> None:
    sem = semaphore(sync, 1)
    first = await sem.acquire()
    waiting = [asyncio.create_task(sem.acquire()) for _ in range(3)]
    last = first
    await asyncio.sleep(0)
    for task in waiting:
        await last.release()
        lease = await task
        assert lease.token == first.token, "the same permit on the server"
        assert lease.fence > last.fence
        last = lease
    await last.release()


async def test_p2_another_process_has_its_turn(sync: Coordinator, other: Coordinator) -> None:
    """It waits for one permit of five; all five are busy in a process whose tasks never stop asking."""
    sem, stop = semaphore(sync), False

    async def busy() -> None:
        while not stop:
            async with sem:
                await asyncio.sleep(0)

    tasks = [asyncio.create_task(busy()) for _ in range(20)]
    await wait_until(lambda: len(hub_of(sync).listeners) == 5, FAST, timeout=5)
    for _ in range(20):
        lease = await semaphore(other).acquire(timeout=15)
        await lease.release()
    stop = True
    await asyncio.gather(*tasks)


async def test_p3_word_of_what_is_on_its_way_back(sync: Coordinator, other: Coordinator) -> None:
    """P3: the server names one permit for all that a process holds. That is being given back; the others are meant."""
    sem = semaphore(sync, limit=2)
    first, second = await sem.acquire(), await sem.acquire()
    words: list[Callable[[], None]] = []
    on_wanted(sync, words.append)
    waiting = asyncio.create_task(AsyncSemaphore(other, NAME, limit=2).acquire(weight=2))
    await wait_until(lambda: bool(words), FAST, timeout=5)
    number = process_grant_of(first).number
    giving_back = asyncio.create_task(first.release())
    await asyncio.sleep(0)
    assert not giving_back.done()
    assert number in hub_of(sync).listeners
    words[0]()
    assert process_grant_of(second).contended
    await giving_back
    assert number not in hub_of(sync).listeners
    await second.release()
    await (await asyncio.wait_for(waiting, 5)).release()
    assert not hub_of(sync).listeners


async def test_a_process_may_have_any_number_of_an_unknown_limit(sync: Coordinator, other: Coordinator) -> None:
    """As many as there are, and as soon as they are free."""
    taken = await AsyncSemaphore(other, NAME, limit=100).acquire(weight=60)
    sem = semaphore(sync, limit=None)
    asking = [asyncio.create_task(sem.acquire()) for _ in range(100)]
    await wait_until(lambda: sum(task.done() for task in asking) == 40, FAST, timeout=5)
    await taken.release()
    leases = await asyncio.wait_for(asyncio.gather(*asking), 5)
    assert len({process_grant_of(lease) for lease in leases}) == 100
    assert await sem.try_acquire() is None
    for lease in leases:
        await lease.release()
    assert (await sem.statistics()).held == 0


async def test_weights_have_permits_of_their_own(sync: Coordinator) -> None:
    """P1: what one task of weight 2 gives up is not handed to two of weight 1; nothing is stuck."""
    sem = semaphore(sync, 3)
    heavy = await sem.acquire(weight=2)
    light = await sem.acquire()
    tasks = [asyncio.create_task(sem.acquire(weight=weight)) for weight in (1, 2, 1, 2, 1)]
    await wait_until(waits(sem, 5), FAST, timeout=5)
    await heavy.release()
    await light.release()
    for task in asyncio.as_completed(tasks):
        lease = await task
        assert (await sem.statistics()).held <= 3
        await lease.release()
    await wait_until(lambda: not hub_of(sync).resources, FAST, timeout=5)


@pytest.mark.parametrize("by_itself", [True, False])
async def test_a_lower_limit_reaches_tasks_that_share(sync: Coordinator, other: Coordinator, by_itself: bool) -> None:
    """P1: immediately in the process that sets it, elsewhere with the next renewal; nothing is given until it fits."""
    sem, stop = semaphore(sync, None, ttl=3), False
    await AsyncSemaphore(other, NAME, limit=5).try_acquire()  # which sets the limit, and goes on
    admin = sem if by_itself else semaphore(other, None)

    async def busy() -> None:
        while not stop:
            async with sem:
                await asyncio.sleep(0.001)

    tasks = [asyncio.create_task(busy()) for _ in range(8)]
    await wait_until(lambda: len(hub_of(sync).listeners) == 4, FAST, timeout=5)
    await admin.resize(3)
    await wait_until(lambda: len(hub_of(sync).listeners) == 2, FAST, timeout=5)
    stop = True
    done, _ = await asyncio.wait(tasks, timeout=5)
    assert len(done) == 8


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("idle", [1, 2])
async def test_p3_all_lines_of_a_process_make_room_for_a_waiter(
    sync: Coordinator, other: Coordinator, elsewhere: bool, idle: int
) -> None:
    """P3: a process is told once that somebody waits, whichever of its permits that says; all its lines heed it."""
    sem, stop = semaphore(sync, 3), False

    async def busy() -> None:
        while not stop:
            async with sem.acquire(weight=3 - idle):
                await asyncio.sleep(0)

    async def is_queued() -> bool:  # of the busy ones one has its permit, or none: not any more
        return (await sem.statistics()).waiting + behind_tickets(sem) >= 5

    for _ in range(3):
        stop, held = False, await sem.acquire(weight=idle)
        tasks = [asyncio.create_task(busy()) for _ in range(5)]
        await wait_until(lambda: len(hub_of(sync).listeners) == 2, FAST, timeout=5)
        whole = asyncio.create_task(semaphore(other if elsewhere else sync, 3).acquire(weight=3))
        await wait_until(is_queued, FAST, timeout=5)
        await held.release()
        await (await asyncio.wait_for(whole, 15)).release()
        stop = True
        await asyncio.gather(*tasks)


async def test_a_limit_that_is_changed_by_less_than_a_weight(sync: Coordinator) -> None:
    """P3: two tasks have permits of weight 3 together whether the limit is 7 or 6, and one if it is 5."""
    sem = semaphore(sync, 7)
    first = await sem.acquire(weight=3)
    for limit in (6, 7, 8, 6, 5, 7, 6):
        await sem.resize(limit)
        if limit == 5:
            assert await sem.try_acquire(weight=3) is None
        else:
            await (await sem.acquire(weight=3, timeout=15)).release()
    await first.release()


async def test_p6_a_permit_that_is_lost_is_handed_to_nobody(sync: Coordinator, redis: Redis) -> None:
    sem = semaphore(sync, 1, ttl=3)
    lost = await sem.acquire()
    waiting = asyncio.create_task(sem.acquire())
    await wait_until(waits(sem, 1), FAST, timeout=5)
    await redis.delete(*sem._keys.all)
    lease = await asyncio.wait_for(waiting, 15)
    assert lost.lost
    assert lease.token != lost.token
    with pytest.raises(LeaseLost):
        await lost.release()
    await lease.release()


# -- readers and writers -----------------------------------------------------------------------------------


@pytest.mark.real  # counts the commands of the server
async def test_readers_of_a_process_share_one_permit(sync: Coordinator, redis: Redis) -> None:
    """P9: a hundred readers, one permit, three scripts."""
    rw = AsyncReadWriteLock(sync, NAME, share=True)
    async with rw.read():
        await rw.statistics()  # now the server knows the scripts
    await redis.config_resetstat()
    leases = [await rw.read().acquire() for _ in range(100)]
    assert await calls(redis) <= 2
    assert readers_of(await rw.statistics()) == 1
    assert len({lease.token for lease in leases}) == 1
    for lease in leases:
        lease.check()
        await lease.release()
    assert readers_of(await rw.statistics()) == 0
    assert await calls(redis) <= 2 + 4
    assert not hub_of(sync).resources


async def test_p2_readers_do_not_join_while_a_writer_waits(sync: Coordinator, other: Coordinator) -> None:
    rw, theirs = AsyncReadWriteLock(sync, NAME, share=True), AsyncReadWriteLock(other, NAME, share=True)
    reader = await rw.read().acquire()
    writer = asyncio.create_task(theirs.write().acquire())
    await wait_until(waits(theirs, 1), FAST, timeout=5)
    await rw.statistics()  # over the same connection as the message that somebody waits
    late = asyncio.create_task(rw.read().acquire())
    await wait_until(waits(rw, 2), FAST, timeout=5)
    assert await rw.read().try_acquire() is None
    await reader.release()
    writing = await asyncio.wait_for(writer, 15)
    assert not late.done()
    await writing.release()
    reading = await asyncio.wait_for(late, 15)
    assert reading.fence >= writing.fence > reader.fence
    await reading.release()


@pytest.mark.parametrize("linger", [0.0, 60.0])
async def test_p2_a_writer_that_comes_straight_back_is_behind_the_readers(
    sync: Coordinator, other: Coordinator, linger: float
) -> None:
    """P2: of another process; its own would otherwise have its whole turn, and readers get in once in each.

    A contended writer's lease goes back when it is released: it does not rest, not even for a turn of the loop.
    """
    rw, order = AsyncReadWriteLock(sync, NAME, share=True, linger=linger), list[str]()

    async def read() -> None:
        async with AsyncReadWriteLock(other, NAME, share=True).read():
            order.append("read")

    async with rw.write() as first:
        order.append("write")
        reading = asyncio.create_task(read())
        await told(process_grant_of(first))
    for _ in range(2):  # now, and when the lease is another one
        async with rw.write() as again:
            order.append("write")
            await asyncio.wait_for(reading, 5)  # it had its turn before
            reading = asyncio.create_task(read())
            await told(process_grant_of(again))
    await reading
    assert order == ["write", "read"] * 3


async def test_p1_a_writer_hands_on_to_writers(sync: Coordinator) -> None:
    rw = AsyncReadWriteLock(sync, NAME, share=True)
    value = 0

    async def write() -> None:
        nonlocal value
        async with rw.write():
            seen = value
            await asyncio.sleep(0)
            value = seen + 1

    await asyncio.gather(*(write() for _ in range(50)))
    assert value == 50


async def test_a_late_command_does_not_pass_for_the_next_task(server: EmbeddedServer, redis: Redis) -> None:
    """P10: a guarded commit without an answer may still arrive; the task that is next has another token."""
    async with proxied(server) as (proxy, client), Coordinator(client) as sync:
        lock = AsyncLock(sync, "guarded", share=True)
        first = await lock.acquire()
        waiting = asyncio.create_task(lock.acquire())
        await wait_until(waits(lock, 1), FAST, timeout=5)
        proxy.on("EXEC", Action.CUT_BEFORE)
        with pytest.raises(OutcomeUnknown):  # noqa: PT012
            async with first.transaction() as tx:
                tx.multi()
                tx.set("data", "1")
        await first.release()
        second = await asyncio.wait_for(waiting, 15)
        assert second.token != first.token
        async with second.transaction() as tx:
            tx.multi()
            tx.set("data", "2")
        await second.release()
    assert await redis.get("data") == b"2"


async def test_a_downgraded_writer_is_no_writer_for_those_behind_it(sync: Coordinator) -> None:
    rw = AsyncReadWriteLock(sync, NAME, share=True)
    writer = await rw.write().acquire()
    assert isinstance(writer._grant, TaskGrant)
    waiting = asyncio.create_task(rw.write().acquire())
    await wait_until(waits(rw, 1), FAST, timeout=5)
    await rw.downgrade(writer)
    found = await rw.statistics()
    assert (writer_of(found), readers_of(found), found.waiting) == (None, 1, 1)
    assert not waiting.done()
    writer.check()
    await writer.release()
    await (await asyncio.wait_for(waiting, 15)).release()
