"""AsyncReadWriteLock: readers or one writer, phase-fair, leases, fences, downgrade (P1-P8)."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncReadWriteLock,
    Coordinator,
    LeaseLost,
    NotHeld,
    Unreachable,
    WouldDeadlock,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action, FaultProxy, anything, script
from redis_sync_aio.types import BaseLease, WriteLease

from ..support.body import FAST, waits
from ..support.inside import FENCE_RANGE, behind_tickets, load, permit_keys
from ..support.sweep import Outcome, sweep
from ..support.views import readers_of, writer_of
from ..support.wired import wired

NAME = "config"


@pytest.fixture(params=[False, True], ids=["own permits", "shared"])
def share(request: pytest.FixtureRequest) -> bool:
    """Whether tasks of a process share what it holds."""
    return bool(request.param)


@pytest.fixture
def rw(sync: Coordinator, share: bool) -> AsyncReadWriteLock:
    """The lock under test."""
    return AsyncReadWriteLock(sync, NAME, share=share)


@pytest_asyncio.fixture
async def other(redis: Redis, share: bool) -> AsyncIterator[AsyncReadWriteLock]:
    """The same lock, on a connection of somebody else."""
    async with Coordinator(redis) as coordinator:
        yield AsyncReadWriteLock(coordinator, NAME, share=share)


@pytest_asyncio.fixture
async def unshared(redis: Redis) -> AsyncIterator[AsyncReadWriteLock]:
    """The same lock in a process that shares nothing."""
    async with Coordinator(redis) as coordinator:
        yield AsyncReadWriteLock(coordinator, NAME)


async def waiting_for(rw: AsyncReadWriteLock) -> int:
    """Count the requests in the queue, and the tasks of this process behind them."""
    return (await rw.statistics()).waiting + behind_tickets(rw)


async def queued(rw: AsyncReadWriteLock, number: int) -> None:
    """Wait until so many wait."""

    async def enough() -> bool:
        return await waiting_for(rw) >= number

    await wait_until(enough, FAST, timeout=5)


async def line_up(rw: AsyncReadWriteLock, *sides: str) -> list[asyncio.Task[BaseLease]]:
    """Let readers and writers queue in this order."""
    tasks: list[asyncio.Task[BaseLease]] = []
    for side in sides:
        before = await waiting_for(rw)
        tasks.append(asyncio.create_task((rw.read() if side == "read" else rw.write()).acquire(timeout=20)))
        await queued(rw, before + 1)
    return tasks


async def check_free(rw: AsyncReadWriteLock) -> None:
    """Nobody reads, writes or waits, and the next writer has it immediately."""
    lease = await rw.write().acquire(timeout=5)
    await lease.release()
    after = await rw.statistics()
    assert (writer_of(after), readers_of(after), after.waiting) == (None, 0, 0), after
    assert not await rw.locked()


# -- exclusion and order -------------------------------------------------------------------------------------


async def test_p1_readers_together_writers_alone(rw: AsyncReadWriteLock, other: AsyncReadWriteLock) -> None:
    """30 tasks on two connections: a writer never meets anybody, readers do meet each other; 0 lost updates."""
    inside = {"read": 0, "write": 0}
    most_readers = 0
    value = 0
    dice = random.Random(7)

    async def read(lock: AsyncReadWriteLock) -> None:
        nonlocal most_readers
        async with lock.read() as lease:
            inside["read"] += 1
            most_readers = max(most_readers, inside["read"])
            seen = value
            assert inside["write"] == 0
            await asyncio.sleep(0.001)
            assert (inside["write"], value) == (0, seen)
            inside["read"] -= 1
            lease.check()

    async def write(lock: AsyncReadWriteLock) -> None:
        nonlocal value
        async with lock.write():
            inside["write"] += 1
            assert inside == {"read": 0, "write": 1}
            seen = value
            await asyncio.sleep(0.001)
            value = seen + 1
            assert inside == {"read": 0, "write": 1}
            inside["write"] -= 1

    async def work(lock: AsyncReadWriteLock) -> int:
        written = 0
        for _ in range(6):
            if dice.random() < 0.25:
                await write(lock)
                written += 1
            else:
                await read(lock)
        return written

    written = await asyncio.gather(*(work(lock) for lock in (rw, other) for _ in range(15)))
    assert value == sum(written)
    assert most_readers > 2
    await check_free(rw)


@pytest.mark.tickets
async def test_p2_phases(rw: AsyncReadWriteLock) -> None:
    """A waiting writer is not passed by later readers; readers in a row get in by one release."""
    first = await rw.read().acquire()
    tasks = await line_up(rw, "write", "read", "read", "write", "read")
    assert await rw.read().try_acquire() is None  # nobody barges
    assert [it.access for it in (await rw.statistics()).waiters] == ["write", "read", "read", "write", "read"]
    await first.release()
    writer = await tasks[0]
    assert not any(task.done() for task in tasks[1:])
    await writer.release()
    readers = [await tasks[1], await tasks[2]]
    assert readers_of(await rw.statistics()) == 2
    assert not tasks[3].done()
    for reader in readers:
        await reader.release()
    await (await tasks[3]).release()
    await (await tasks[4]).release()
    await check_free(rw)


async def test_p8_fences(rw: AsyncReadWriteLock, redis: Redis, share: bool) -> None:
    """Writers' fences rise; a reader has that of the last writer; losing everything on the server changes nothing.

    A process that shares gets a range of fences for its writers; readers have the last of it.
    """
    one = await rw.read().acquire()
    two = await rw.read().acquire()
    assert one.fence == two.fence
    await one.release()
    await two.release()
    async with rw.write() as writer:
        assert writer.fence > one.fence
    async with rw.read() as reader:
        assert writer.fence <= reader.fence <= writer.fence + (FENCE_RANGE if share else 0)
    await redis.flushall()
    async with rw.read() as reader:
        assert reader.fence > writer.fence
    async with rw.write() as later:
        assert later.fence > reader.fence


# -- downgrade -----------------------------------------------------------------------------------------------


async def test_a_side_releases_what_is_its_own(rw: AsyncReadWriteLock) -> None:
    """The two have the same keys; a lease that was downgraded is a reader's."""
    writer = await rw.write().acquire()
    with pytest.raises(NotHeld, match="neither does any other task"):
        await rw.read().release()
    await rw.downgrade(writer)
    with pytest.raises(NotHeld, match="neither does any other task"):
        await rw.write().release()
    await rw.read().release()
    await check_free(rw)


async def test_downgrade(rw: AsyncReadWriteLock, share: bool) -> None:
    """No gap: a writer at the head stays out, readers at the head get in."""
    lease = await rw.write().acquire()
    waiting = await line_up(rw, "read", "write")
    await rw.downgrade(lease)
    reader = await asyncio.wait_for(waiting[0], 5)
    found = await rw.statistics()
    assert (writer_of(found), readers_of(found), found.waiting) == (None, 2, 1)
    assert lease.fence <= reader.fence <= lease.fence + (FENCE_RANGE if share else 0)
    await lease.extend(20)
    await lease.release()
    await reader.release()
    await (await waiting[1]).release()
    await check_free(rw)


async def test_identities(rw: AsyncReadWriteLock, other: AsyncReadWriteLock) -> None:
    """The same identity again is the same reader; on the other side it would wait for itself."""
    one = await rw.read().acquire(identity="worker-7")
    again = await other.read().acquire(identity="worker-7")
    assert (one.token, one.fence) == (again.token, again.fence)
    assert readers_of(await rw.statistics()) == 1
    with pytest.raises(WouldDeadlock, match="for reading"):
        await rw.write().acquire(identity="worker-7")
    with pytest.raises(NotHeld):
        await rw.read().release(identity="worker-8")
    await other.read().release(identity="worker-7")
    assert not await rw.locked()
    with pytest.raises(LeaseLost):
        await one.release()


async def reads_again(rw: AsyncReadWriteLock, other: AsyncReadWriteLock, reader: BaseLease) -> None:
    """It is a reader, here and on the server."""
    reader.check()
    beside = await other.read().acquire(timeout=15)
    found = await rw.statistics()
    assert (writer_of(found), readers_of(found)) == (None, 2)
    await beside.release()
    await reader.release()


async def test_p1_a_downgrade_ends_the_others_of_that_identity(sync: Coordinator, other: AsyncReadWriteLock) -> None:
    rw = AsyncReadWriteLock(sync, NAME)
    writer, twin = await rw.write().acquire(identity="me"), await rw.write().acquire(identity="me")
    await rw.downgrade(writer)
    with pytest.raises(LeaseLost):
        twin.check()
    await reads_again(rw, other, writer)


async def test_p6_a_downgrade_elsewhere_is_noticed(sync: Coordinator, other: AsyncReadWriteLock) -> None:
    """P1: by the next renewal. What the other process reads by goes on."""
    rw = AsyncReadWriteLock(sync, NAME)
    writer, twin = await rw.write().acquire(identity="me"), await other.write().acquire(identity="me")
    assert twin.fence == writer.fence
    await rw.downgrade(writer)
    with pytest.raises(LeaseLost):
        await twin.extend(30)
    assert twin.lost
    await writer.extend(30)
    await reads_again(rw, other, writer)


async def test_p4_a_renewal_that_was_overtaken_by_the_downgrade(sync: Coordinator, redis: Redis) -> None:
    """P6: it was sent by a writer, and finds a reader. That is no loss."""
    rw = AsyncReadWriteLock(sync, NAME)
    writer = await rw.write().acquire()
    keys = permit_keys(NAME.encode(), "rw").all
    untyped: Any = redis
    assert await untyped.eval(load("permits/downgrade").source, 4, *keys, writer._grant.wire_token) == 1
    extending = asyncio.create_task(writer.extend(30))
    await asyncio.sleep(0)
    writer._grant.become_reader()
    await extending
    writer.check()
    await writer.extend(40)
    assert writer.remaining() > 30
    await writer.release()


@pytest.mark.parametrize("writes", [False, True])
async def test_p6_an_identity_is_released_by_the_other_side(sync: Coordinator, writes: bool) -> None:
    """It has one permit; the lease of this process knows that it is over."""
    rw = AsyncReadWriteLock(sync, NAME)
    own, opposite = (rw.write(), rw.read()) if writes else (rw.read(), rw.write())
    lease = await own.acquire(identity="me")
    await opposite.release(identity="me")
    assert lease.remaining() == 0
    assert not await rw.locked()


@pytest.mark.parametrize("how", ["no answer", "cancelled"])
async def test_p5_a_downgrade_without_an_answer_is_made_good(
    server: EmbeddedServer, redis: Redis, how: str, share: bool
) -> None:
    """Its renewals as a reader do not keep a writer's permit on the server: other readers get in."""
    async with (
        FaultProxy(server) as proxy,
        proxy.client() as client,
        Coordinator(client, retry_for=0.3, response_timeout=0.3) as sync,
    ):
        rw = AsyncReadWriteLock(sync, NAME, ttl=3, share=share)
        lease = await rw.write().acquire()
        swallowed = proxy.on(script(load("permits/downgrade").sha), Action.SWALLOW_REQUEST, times=None)
        downgrading = asyncio.create_task(rw.downgrade(lease))
        if how == "cancelled":
            await asyncio.wait_for(swallowed.fired.wait(), 5)
            downgrading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await downgrading
        else:
            with pytest.raises(Unreachable):
                await downgrading
        swallowed.cancel()
        theirs = await AsyncReadWriteLock(redis, NAME).read().acquire(timeout=2.5)
        lease.check()
        assert lease.weight == 1
        await theirs.release()
        await lease.release()


async def test_p1_a_downgrade_without_an_answer_does_not_meet_a_later_writer_of_its_name(
    server: EmbeddedServer, redis: Redis
) -> None:
    """P1: an identity that was granted the writer's again, elsewhere, is not made a reader by what is sent late."""
    async with (
        FaultProxy(server) as proxy,
        proxy.client() as client,
        Coordinator(client, retry_for=2, response_timeout=2) as sync,
    ):
        rw, theirs = AsyncReadWriteLock(sync, NAME, ttl=6), AsyncReadWriteLock(redis, NAME, ttl=10)
        lease = await rw.write().acquire(identity="worker-7")
        swallowed = proxy.on(anything, Action.SWALLOW_REQUEST, times=None)
        with pytest.raises(Unreachable):
            await rw.downgrade(lease)
        await asyncio.wait_for(lease.wait_lost(), 10)
        anew = await theirs.write().acquire(identity="worker-7", timeout=5)
        swallowed.cancel()
        assert writer_of(await rw.statistics()) == "worker-7"  # behind whatever is sent late
        await asyncio.sleep(3)
        assert writer_of(await rw.statistics()) == "worker-7"
        await anew.release()


async def test_only_a_writer_of_this_lock_becomes_a_reader_and_only_once(
    sync: Coordinator, other: AsyncReadWriteLock, share: bool
) -> None:
    """The error says which lease it takes; a reader's lease goes on, that of a writer of another name too."""
    rw = AsyncReadWriteLock(sync, NAME, share=share)
    writer = await rw.write().acquire()
    await rw.downgrade(writer)
    with pytest.raises(NotHeld, match=r"not a writer's lease .*downgrade\(\) takes one of write\(\)"):
        await rw.downgrade(writer)
    await reads_again(rw, other, writer)
    with pytest.raises(NotHeld, match="released"):
        await rw.downgrade(writer)
    async with AsyncReadWriteLock(sync, "another").write() as elsewhere:
        with pytest.raises(NotHeld, match="not a writer's lease"):
            await rw.downgrade(elsewhere)
        elsewhere.check()


# -- cancellation --------------------------------------------------------------------------------------------


async def write_and_downgrade(rw: AsyncReadWriteLock) -> None:
    async with rw.write() as writer:
        await rw.downgrade(writer)


async def write_behind_readers(rw: AsyncReadWriteLock) -> None:
    async def write() -> None:
        async with rw.write():
            pass

    async with asyncio.TaskGroup() as group, AsyncExitStack() as readers:
        for _ in range(3):
            await readers.enter_async_context(rw.read())
        group.create_task(write())
        await queued(rw, 1)


Operation = Callable[[AsyncReadWriteLock], Coroutine[Any, Any, None]]


@pytest.mark.parametrize("operation", [write_and_downgrade, write_behind_readers])
async def test_p5_sweep(rw: AsyncReadWriteLock, operation: Operation) -> None:
    """Cancelled at every suspension point, in three ways, once and twice: nothing stays behind."""

    async def check(_: Outcome[None]) -> None:
        await check_free(rw)

    for twice in (False, True):
        await sweep(lambda: operation(rw), check, twice=twice)


# -- a writer learns the fence of the one before it (P8): whether what it read is still true -------------------


async def read(rw: AsyncReadWriteLock) -> int:
    async with rw.read() as reader:
        return reader.fence


async def write(rw: AsyncReadWriteLock) -> WriteLease:
    async with rw.write() as writer:
        return writer


@pytest.mark.parametrize("written_before", [False, True])
async def test_nobody_wrote_between_the_read_and_the_write(
    rw: AsyncReadWriteLock, unshared: AsyncReadWriteLock, written_before: bool
) -> None:
    """Also where the reader was the first to use the name, and others read meanwhile, here and elsewhere."""
    if written_before:
        await write(unshared)
    fence = await read(rw)
    assert await read(rw) == await read(unshared) == fence
    assert (await write(rw)).previous_fence == fence


@pytest.mark.parametrize("here", [False, True], ids=["elsewhere", "in this process"])
async def test_another_wrote_between_the_read_and_the_write(
    rw: AsyncReadWriteLock, unshared: AsyncReadWriteLock, here: bool
) -> None:
    """And what is read after it has its fence."""
    fence = await read(rw)
    between = await write(rw if here else unshared)
    writer = await write(rw)
    assert writer.previous_fence is not None
    assert writer.previous_fence >= between.fence > fence
    assert await read(rw) >= writer.fence


async def test_another_wrote_while_this_one_waited(rw: AsyncReadWriteLock, unshared: AsyncReadWriteLock) -> None:
    """The grant is pushed, by a writer or by a reader, and says it, too."""
    fence = await read(rw)
    for side in (unshared.write(), unshared.read()):
        between = await side.acquire()
        waiting = asyncio.create_task(rw.write().acquire())
        await wait_until(waits(unshared), FAST, timeout=30)
        await between.release()
        writer = await asyncio.wait_for(waiting, 30)
        assert writer.previous_fence == between.fence > fence
        await writer.release()
        fence = writer.previous_fence or 0


async def test_tasks_that_share_know_each_others_fences(rw: AsyncReadWriteLock, share: bool) -> None:
    """Each writer has the fence of the one before it as its previous one, across many ranges of fences."""
    fences: list[tuple[int | None, int]] = []

    async def change() -> None:
        for _ in range(40):
            async with rw.write() as writer:
                fences.append((writer.previous_fence, writer.fence))

    async with asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(change())
    for (_, earlier), (previous, fence) in itertools.pairwise(fences):
        assert previous is not None
        assert earlier <= previous < fence
        assert share or previous == earlier


async def test_a_downgraded_writer_that_wrote_again_alone(sync: Coordinator) -> None:
    rw = AsyncReadWriteLock(sync, NAME)
    lease = await rw.write().acquire()
    await rw.downgrade(lease)
    await lease.release()
    assert (await write(rw)).previous_fence == lease.fence


async def test_an_identity_that_joins_knows_it_too(sync: Coordinator, unshared: AsyncReadWriteLock) -> None:
    fence = (await write(unshared)).fence
    first = await AsyncReadWriteLock(sync, NAME).write().acquire(identity="me")
    again = await unshared.write().acquire(identity="me")
    assert first.previous_fence == again.previous_fence == fence
    await again.release()


async def test_a_server_that_lost_its_keys_knows_of_no_writer(rw: AsyncReadWriteLock, redis: Redis) -> None:
    for _ in range(2):
        assert (await write(rw)).previous_fence is None
        await redis.flushall()


async def test_p3_a_repeated_request_is_answered_with_the_same_fences(server: EmbeddedServer) -> None:
    async with wired(server) as w:
        rw = AsyncReadWriteLock(w.sync, NAME)
        before = await write(AsyncReadWriteLock(w.other, NAME))
        lost = w.proxy.on(script(load("permits/acquire").sha), Action.CUT_AFTER, times=1)
        async with rw.write() as writer:
            assert lost.fired.is_set()
            assert writer.previous_fence == before.fence < writer.fence
