"""A reader that becomes the writer has two leases on one permit: what happens to one happens to both (P1, P6, P8)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Literal

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
from redis_sync_aio.types import BaseLease

from ..support.body import FAST, for_ever, lost_in
from ..support.inside import Acquisition, Grant, TaskGrant, hub_of, load, permit_keys
from ..support.proxy import SWALLOW_REQUEST, FaultProxy, anything, script

NAME = "config"


@pytest.fixture(params=[False, True], ids=["own permits", "shared"])
def share(request: pytest.FixtureRequest) -> bool:
    """Whether tasks of a process share what it holds."""
    return bool(request.param)


@pytest_asyncio.fixture
async def other(redis: Redis) -> AsyncIterator[AsyncReadWriteLock]:
    """The same lock, on a connection of somebody else."""
    async with Coordinator(redis) as coordinator:
        yield AsyncReadWriteLock(coordinator, NAME)


async def reads_again(rw: AsyncReadWriteLock, other: AsyncReadWriteLock, reader: BaseLease) -> None:
    """It is a reader, here and on the server."""
    reader.check()
    beside = await other.read().acquire(timeout=15)
    found = await rw.statistics()
    assert (found.writer, found.readers) == (None, 2)
    await beside.release()
    await reader.release()


# -- one upgrade at a time ---------------------------------------------------------------------------------


async def test_p1_through_another_lock_object(sync: Coordinator, other: AsyncReadWriteLock, share: bool) -> None:
    rw, again = (AsyncReadWriteLock(sync, NAME, share=share) for _ in range(2))
    reader, theirs = await rw.read().acquire(), await other.read().acquire()
    first = asyncio.create_task(rw.upgrade(reader).__aenter__())
    await asyncio.sleep(0)
    with pytest.raises(WouldDeadlock, match="already"):
        await again.upgrade(reader).__aenter__()
    await theirs.release()
    writer = await first
    with pytest.raises(WouldDeadlock, match="already"):
        await again.upgrade(reader).__aenter__()
    writer.check()
    await writer.release()
    async with again.upgrade(reader):
        pass
    await reader.release()


async def test_p1_through_another_coordinator(sync: Coordinator, other: AsyncReadWriteLock, share: bool) -> None:
    rw = AsyncReadWriteLock(sync, NAME, share=share)
    async with rw.read() as reader, rw.upgrade(reader) as writer:
        with pytest.raises(WouldDeadlock, match="already"):
            await other.upgrade(reader).__aenter__()
        writer.check()


async def test_p1_an_identity_in_two_processes(sync: Coordinator, other: AsyncReadWriteLock) -> None:
    """The second is told that it writes already, but not by an upgrade of its own."""
    rw = AsyncReadWriteLock(sync, NAME)
    reader, theirs = await rw.read().acquire(identity="me"), await other.read().acquire(identity="me")
    async with rw.upgrade(reader) as writer:
        with pytest.raises(WouldDeadlock):
            await other.upgrade(theirs).__aenter__()
        with pytest.raises(WouldDeadlock):
            await other.upgrade(theirs, timeout=0).__aenter__()
        await writer.extend(30)
        assert (await rw.statistics()).writer == "me"
    await reader.release()


async def test_an_identity_twice_in_a_process(sync: Coordinator) -> None:
    rw = AsyncReadWriteLock(sync, NAME)
    reader, twin = await rw.read().acquire(identity="me"), await rw.read().acquire(identity="me")
    async with rw.upgrade(reader):
        with pytest.raises(WouldDeadlock):
            await rw.upgrade(twin).__aenter__()
    async with rw.upgrade(twin):
        pass
    await reader.release()


async def test_two_tasks_of_one_permit(sync: Coordinator) -> None:
    """The second would wait for the first to leave, and the first does for the second."""
    rw, again = (AsyncReadWriteLock(sync, NAME, share=True) for _ in range(2))
    one, two = await rw.read().acquire(), await again.read().acquire()
    first = asyncio.create_task(rw.upgrade(one).__aenter__())
    await asyncio.sleep(0)
    for lock in (rw, again):
        with pytest.raises(WouldDeadlock, match="release this lease"):
            await lock.upgrade(two).__aenter__()
    await two.release()
    await (await first).release()
    await one.release()


async def test_cancelled_it_can_be_tried_again(sync: Coordinator, other: AsyncReadWriteLock, share: bool) -> None:
    rw = AsyncReadWriteLock(sync, NAME, share=share)
    reader, theirs = await rw.read().acquire(), await other.read().acquire()
    first = asyncio.create_task(rw.upgrade(reader).__aenter__())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    await theirs.release()
    async with rw.upgrade(reader, timeout=5):
        pass
    await reads_again(rw, other, reader)


# -- what ends with what -----------------------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", [False, True], ids=["by the body", "by another task"])
async def test_p1_the_reader_is_released_inside(
    sync: Coordinator, other: AsyncReadWriteLock, share: bool, elsewhere: bool
) -> None:
    """Its permit is the writer's: another one may write immediately, so the body must not."""
    rw = AsyncReadWriteLock(sync, NAME, share=share)
    reader = await rw.read().acquire()

    async def body(writer: BaseLease) -> None:
        releasing = asyncio.create_task(reader.release()) if elsewhere else None
        if releasing is None:
            await reader.release()
            with pytest.raises(LeaseLost):
                writer.check()
        else:
            await for_ever()  # its task is cancelled

    await lost_in(rw.upgrade(reader), body)
    await reader.release()
    theirs = await other.write().acquire(timeout=5)
    await theirs.release()


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
    assert await untyped.eval(load("permits/downgrade").source, 4, *keys, writer._grant.wire_token, b"", 0) == 1
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


async def test_p6_the_writers_permit_is_gone(sync: Coordinator, redis: Redis, share: bool) -> None:
    rw = AsyncReadWriteLock(sync, NAME, share=share)
    reader = await rw.read().acquire()

    async def body(writer: BaseLease) -> None:
        await redis.delete(f"{{{NAME}}}:rw")
        await writer.extend(30)
        await for_ever()

    await lost_in(rw.upgrade(reader), body)
    assert reader.lost


@pytest.mark.timing
async def test_it_reads_again_after_a_stall(sync: Coordinator, other: AsyncReadWriteLock, share: bool) -> None:
    """P6: the writer's lease ended, unheard, and the reader's goes on: so the server hears that it only reads."""
    async with Coordinator(sync.client, claim=0.1) as hasty:
        rw = AsyncReadWriteLock(hasty, NAME, share=share)
        reader, theirs = await rw.read().acquire(), await other.read().acquire()
        upgrading = asyncio.create_task(rw.upgrade(reader).__aenter__())
        await asyncio.sleep(0)
        await wait_until(lambda: _waits(rw), FAST, timeout=5)
        await theirs.release()
        writer = await upgrading
        time.sleep(0.15)  # noqa: ASYNC251
        with pytest.raises(LeaseLost):
            writer.check()
        await wait_until(lambda: _nobody_writes(rw), FAST, timeout=5)
        await reads_again(rw, other, reader)


async def test_p6_the_reader_is_lost_in_the_turn_of_the_grant(
    sync: Coordinator, other: AsyncReadWriteLock, monkeypatch: pytest.MonkeyPatch, share: bool
) -> None:
    """The task that upgrades has not run since: no body begins, and the writer's part is given back."""
    rw = AsyncReadWriteLock(sync, NAME, share=share)
    reader, theirs = await rw.read().acquire(), await other.read().acquire()
    granted = Acquisition._granted

    def lose(ticket: Acquisition, *given: Any) -> None:
        granted(ticket, *given)
        reader._grant.lose("expired")

    monkeypatch.setattr(Acquisition, "_granted", lose)
    upgrading = asyncio.create_task(rw.upgrade(reader).__aenter__())
    await wait_until(lambda: _waits(rw), FAST, timeout=5)
    await theirs.release()
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(upgrading, 5)
    monkeypatch.undo()
    await wait_until(lambda: _nobody_writes(rw), FAST, timeout=5)
    if not isinstance(reader._grant, TaskGrant):  # else its process gives the permit back: no task has it
        await other.read().release(identity=reader.token)  # as that of any lease that is lost it would end with its ttl
    await wait_until(lambda: _is_free(rw), FAST, timeout=5)


async def _is_free(rw: AsyncReadWriteLock) -> bool:
    return not await rw.locked()


async def _waits(rw: AsyncReadWriteLock) -> bool:
    return (await rw.statistics()).waiters == 1


async def _nobody_writes(rw: AsyncReadWriteLock) -> bool:
    return (await rw.statistics()).writer is None


@pytest.mark.timing
async def test_it_reads_again_after_an_outage(share: bool) -> None:
    """P4: the end of the upgrade had no answer, and the reader's lease outlived that."""
    with EmbeddedServer(persistent=True) as server:
        async with server.client() as redis, Coordinator(redis, retry_for=0.3) as sync:
            rw = AsyncReadWriteLock(sync, NAME, ttl=3, share=share)
            reader = await rw.read().acquire()
            upgrade = rw.upgrade(reader)
            with pytest.raises(Unreachable):
                async with upgrade:
                    server.kill()
            assert upgrade._grant is not None
            with pytest.raises(LeaseLost):  # P1: nobody may count on it when others get in
                upgrade._grant.check()
            server.restart(keep_data=True)
            with suppress(Unreachable):
                await wait_until(lambda: _nobody_writes(rw), FAST, timeout=10)
            assert await _nobody_writes(rw)
            ends = reader._grant.deadline
            await wait_until(
                lambda: reader._grant.deadline > ends + 2, FAST, timeout=5
            )  # P6: it is renewed as a reader
            reader.check()
            await reader.release()


# -- one deadline ------------------------------------------------------------------------------------------


async def test_p6_the_writer_is_cut_short(sync: Coordinator, share: bool) -> None:
    """The reader is renewed by the new deadline, not by the one it had."""
    rw = AsyncReadWriteLock(sync, NAME, ttl=3, share=share)
    reader = await rw.read().acquire()
    async with rw.upgrade(reader) as writer:
        await writer.extend(1.5)
        assert reader.remaining() <= 1.5
    await wait_until(lambda: reader.remaining() > 1.5, FAST, timeout=15)
    await reader.release()


@pytest.mark.timing
async def test_p6_the_reader_is_cut_short(sync: Coordinator, other: AsyncReadWriteLock, share: bool) -> None:
    """So is the writer, and does not believe in more."""
    rw = AsyncReadWriteLock(sync, NAME, ttl=3, auto_renew=False, share=share)
    reader = await rw.read().acquire()

    async def body(writer: BaseLease) -> None:
        await reader.extend(0.1)
        assert writer.remaining() <= 0.1
        await for_ever()

    await lost_in(rw.upgrade(reader), body)
    await (await other.write().acquire(timeout=5)).release()


async def test_p6_the_reader_is_extended(sync: Coordinator) -> None:
    rw = AsyncReadWriteLock(sync, NAME, ttl=5, auto_renew=False)
    reader = await rw.read().acquire()
    async with rw.upgrade(reader) as writer:
        await reader.extend(30)
        assert writer.remaining() > 20
    assert reader.remaining() > 20
    await reader.release()


async def _is_renewed(lease: BaseLease) -> None:
    first = lease._grant.deadline
    await wait_until(lambda: lease._grant.deadline > first, FAST, timeout=5)


@pytest.mark.timing
async def test_p6_both_are_renewed(sync: Coordinator, share: bool) -> None:
    """Through an upgrade that is longer than any of their leases, and after it."""
    rw = AsyncReadWriteLock(sync, NAME, ttl=0.3, share=share)
    reader = await rw.read().acquire()
    for _ in range(2):
        async with rw.upgrade(reader) as writer:
            await _is_renewed(writer)
            await _is_renewed(reader)
    await _is_renewed(reader)
    await reader.release()


async def test_p8_a_reader_that_was_the_writer_has_the_fence_of_its_writes(
    sync: Coordinator, other: AsyncReadWriteLock
) -> None:
    """Two readers with the same fence saw the same state."""
    rw = AsyncReadWriteLock(sync, NAME)
    reader = await rw.read().acquire()
    read_before = reader.fence
    async with rw.upgrade(reader) as writer:
        assert writer.fence > read_before
    theirs = await other.read().acquire()
    assert theirs.fence == reader.fence == writer.fence
    await theirs.release()
    await reader.release()


# -- no answer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["no answer", "cancelled"])
@pytest.mark.timing
async def test_p5_a_downgrade_without_an_answer_is_made_good(how: str, share: bool) -> None:
    """Its renewals as a reader do not keep a writer's permit on the server: other readers get in."""
    with EmbeddedServer() as server:
        async with (
            server.client() as direct,
            FaultProxy(upstream=server.unix_socket) as proxy,
            Redis.from_url(proxy.url) as client,
            Coordinator(client, retry_for=0.3, response_timeout=0.3) as sync,
        ):
            rw = AsyncReadWriteLock(sync, NAME, ttl=3, share=share)
            lease = await rw.write().acquire()
            swallowed = proxy.on(script(load("permits/downgrade").sha), SWALLOW_REQUEST, times=None)
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
            theirs = await AsyncReadWriteLock(direct, NAME).read().acquire(timeout=2.5)
            lease.check()
            assert lease.weight == 1
            await theirs.release()
            await lease.release()


class _CancelledAtItsGrant:
    """The future of a task, which is cancelled in the very turn in which it ends."""

    def __init__(self, future: Any, task: asyncio.Task[Any]) -> None:
        self._future, self._task = future, task

    def done(self) -> bool:
        return bool(self._future.done())

    def set_exception(self, error: Exception) -> None:
        self._future.set_exception(error)

    def set_result(self, lease: Grant | None) -> None:
        self._future.set_result(lease)
        self._task.cancel()


@pytest.mark.timing
async def test_p5_cancelled_in_the_turn_of_its_grant_and_no_answer_to_that() -> None:
    """The server is told that the reader reads for longer than `retry_for`."""
    with EmbeddedServer() as server:
        async with (
            server.client() as direct,
            FaultProxy(upstream=server.unix_socket) as proxy,
            Redis.from_url(proxy.url) as client,
            Coordinator(client, retry_for=0.2, response_timeout=0.2) as sync,
        ):
            rw = AsyncReadWriteLock(sync, NAME, ttl=3)
            reader = await rw.read().acquire()

            async def upgrade() -> None:
                async with rw.upgrade(reader):
                    pass

            swallowed = proxy.on(script(load("permits/downgrade").sha), SWALLOW_REQUEST, times=None)
            task = asyncio.create_task(upgrade())
            await asyncio.sleep(0)
            (ticket,) = hub_of(sync).acquisitions.values()
            ticket.taker = _CancelledAtItsGrant(ticket.taker, task)
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0.5)  # longer than retry_for
            swallowed.cancel()
            theirs = await AsyncReadWriteLock(direct, NAME).read().acquire(timeout=2.5)
            reader.check()
            await theirs.release()
            await reader.release()


@pytest.mark.timing
async def test_p1_nobody_counts_on_the_writers_lease_when_its_end_had_no_answer(share: bool) -> None:
    """P1: others read by then. And the reader's is renewed again."""
    with EmbeddedServer() as server:
        async with (
            server.client() as direct,
            FaultProxy(upstream=server.unix_socket) as proxy,
            Redis.from_url(proxy.url) as client,
            Coordinator(client, retry_for=0.3, response_timeout=0.3) as sync,
        ):
            rw = AsyncReadWriteLock(sync, NAME, ttl=2, share=share)
            reader = await rw.read().acquire()
            upgrade = rw.upgrade(reader)
            await upgrade.__aenter__()
            swallowed = proxy.on(script(load("permits/downgrade").sha), SWALLOW_REQUEST, times=None)
            with pytest.raises(Unreachable):
                await upgrade.__aexit__(None, None, None)
            swallowed.cancel()
            theirs = await AsyncReadWriteLock(direct, NAME).read().acquire(timeout=2.5)
            assert upgrade._grant is not None
            with pytest.raises(LeaseLost):
                upgrade._grant.check()
            ends = reader._grant.deadline
            await wait_until(lambda: reader._grant.deadline > ends + 1, FAST, timeout=5)
            await theirs.release()
            async with rw.upgrade(reader, timeout=5):
                pass
            await reader.release()


async def test_what_was_released_before_it_became_the_writer_was_not_lost(
    sync: Coordinator, other: AsyncReadWriteLock
) -> None:
    """The error says so."""
    rw = AsyncReadWriteLock(sync, NAME)
    reader, theirs = await rw.read().acquire(), await other.read().acquire()
    waiting = asyncio.create_task(rw.upgrade(reader).__aenter__())
    async with asyncio.timeout(5):
        while not (await rw.statistics()).waiters:
            await asyncio.sleep(0.01)
    await reader.release()
    with pytest.raises(NotHeld, match="was released before"):
        await waiting
    await theirs.release()


async def test_a_writer_that_releases_the_reader_is_cancelled(sync: Coordinator, share: bool) -> None:
    """P7: the writer's lease ended with it, by the task's own hand."""
    rw = AsyncReadWriteLock(sync, NAME, share=share)
    reader = await rw.read().acquire()
    went_on = False
    with pytest.raises(LeaseLost):  # noqa: PT012
        async with rw.upgrade(reader):
            await reader.release()
            await asyncio.sleep(5)
            went_on = True
    assert not went_on
    await (await rw.write().acquire(timeout=5)).release()


@pytest.mark.timing
async def test_a_release_of_the_writer_in_its_body_raises_unreachable_without_an_answer(share: bool) -> None:
    """By Unreachable, as of any lease, and not by a cancellation; the end of the body says that it is lost."""
    with EmbeddedServer() as server:
        async with (
            FaultProxy(upstream=server.unix_socket) as proxy,
            Redis.from_url(proxy.url) as client,
            Coordinator(client, retry_for=0.3, response_timeout=0.3) as sync,
        ):
            rw = AsyncReadWriteLock(sync, NAME, ttl=5, share=share)
            reader = await rw.read().acquire()
            swallowed = proxy.on(script(load("permits/downgrade").sha), SWALLOW_REQUEST, times=None)
            told = False
            with pytest.raises(LeaseLost):  # noqa: PT012
                async with rw.upgrade(reader) as writer:
                    with pytest.raises(Unreachable):
                        await writer.release()
                    await asyncio.sleep(0)
                    told = True
            assert told
            swallowed.cancel()
            reader.check()
            await reader.release()


@pytest.mark.timing
async def test_p1_a_downgrade_without_an_answer_does_not_meet_a_later_writer_of_its_name(redis: Redis) -> None:
    """P1: an identity that was granted the writer's again, elsewhere, is not made a reader by what is sent late."""
    with EmbeddedServer() as server:
        async with (
            server.client() as direct,
            FaultProxy(upstream=server.unix_socket) as proxy,
            Redis.from_url(proxy.url) as client,
            Coordinator(client, retry_for=0.2, response_timeout=0.2) as sync,
        ):
            rw, theirs = AsyncReadWriteLock(sync, NAME, ttl=0.6), AsyncReadWriteLock(direct, NAME, ttl=10)
            lease = await rw.write().acquire(identity="worker-7")
            swallowed = proxy.on(anything, SWALLOW_REQUEST, times=None)
            with pytest.raises(Unreachable):
                await rw.downgrade(lease)
            await asyncio.wait_for(lease.wait_lost(), 5)
            anew = await theirs.write().acquire(identity="worker-7", timeout=5)
            swallowed.cancel()
            assert (await rw.statistics()).writer == "worker-7"  # behind whatever is sent late
            await asyncio.sleep(0.3)
            assert (await rw.statistics()).writer == "worker-7"
            await anew.release()


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("engine", ["lua", "watch"])
async def test_downgrade_of_an_upgrade(
    sync: Coordinator, other: AsyncReadWriteLock, share: bool, engine: Literal["lua", "watch"]
) -> None:
    """It ends the upgrade inside its body: others read again, the reader's lease goes on, and the exit is quiet."""
    rw = AsyncReadWriteLock(sync, NAME, share=share, engine=engine)
    reader = await rw.read().acquire()
    async with rw.upgrade(reader) as writer:
        assert await other.read().try_acquire() is None
        await rw.downgrade(writer)
        with pytest.raises(NotHeld):
            writer.check()
        with pytest.raises(NotHeld):
            await rw.downgrade(writer)
        beside = await other.read().acquire(timeout=5)
        await beside.release()
    await reads_again(rw, other, reader)
    with pytest.raises(NotHeld, match="not a writer's lease"):
        await rw.downgrade(await other.read().acquire())
