"""Guarded commits: writes of a holder that was overtaken are never made, whenever that happened (A4, D2)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncReentrantLock,
    AsyncSemaphore,
    Conflict,
    Coordinator,
    LeaseLost,
    NotHeld,
    OutcomeUnknown,
    Unreachable,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import TransactionMisuse
from redis_sync_aio.testing.faults import Action, Rule
from redis_sync_aio.types import GuardingLease

from ..conftest import MakeClient
from ..support.body import FAST
from ..support.inside import read_through
from ..support.options import OPTIONS
from ..support.processes import Answer, Child, Crew, Failed
from ..support.transactions import Wired, in_use, watchers, wired

OVERTAKES = 15 * OPTIONS.scale
"""How often a holder is stopped and overtaken. Before a release: --scale=60."""

Make = Callable[[Coordinator, str], Awaitable[GuardingLease]]


async def _both(sync: Coordinator, name: str) -> GuardingLease:
    return await AsyncMultiLock(sync, [f"{{{name}}}:1", f"{{{name}}}:2"]).acquire()


async def _nested(sync: Coordinator, name: str) -> GuardingLease:
    lock = AsyncReentrantLock(sync, name)
    await lock.acquire()
    return await lock.acquire()


KINDS: dict[str, Make] = {
    "lock": lambda sync, name: AsyncLock(sync, name).acquire(),
    "lock without ttl": lambda sync, name: AsyncLock(sync, name, ttl=None).acquire(),
    "identity": lambda sync, name: AsyncLock(sync, name).acquire(identity="worker-7"),
    "permits": lambda sync, name: AsyncSemaphore(sync, name, limit=3).acquire(weight=2),
    "reader": lambda sync, name: AsyncReadWriteLock(sync, name).read().acquire(),
    "writer": lambda sync, name: AsyncReadWriteLock(sync, name).write().acquire(),
    "reentrant": _nested,
    "multi-lock": _both,
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest_asyncio.fixture
async def it(server: EmbeddedServer) -> AsyncIterator[Wired]:
    async with wired(server, socket_timeout=5) as it:
        await it.direct.flushall()
        yield it


@pytest_asyncio.fixture
async def own(it: Wired) -> AsyncIterator[Coordinator]:
    """Locks whose own commands go straight to the server."""
    async with Coordinator(it.direct) as own:
        yield own


async def acquired(it: Wired, own: Coordinator, kind: str = "lock") -> GuardingLease:
    """A lease whose guarded commits go through the proxy."""
    lease = await KINDS[kind](own, f"{it.key}:lock")
    read_through(lease, it.client)
    return lease


async def commit(it: Wired, lease: GuardingLease) -> None:
    async with lease.transaction() as tx:
        tx.multi()
        tx.incr(it.key)
        tx.incr(it.done)
    assert tx.replies == (1, 1)


async def held_before_exec(it: Wired, lease: GuardingLease) -> tuple[asyncio.Task[None], Rule]:
    """A commit that is kept between the comparison of the token and MULTI."""
    rule = it.proxy.on("MULTI", Action.HOLD)
    committing = asyncio.create_task(commit(it, lease))
    await rule.fired.wait()
    return committing, rule


@each_kind
async def test_it_commits_while_the_lease_holds(it: Wired, own: Coordinator, kind: str) -> None:
    lease = await acquired(it, own, kind)
    await commit(it, lease)
    assert await it.counted() == 1
    lease.check()
    await lease.release()
    await it.check_clean()


@each_kind
async def test_nothing_is_written_when_it_is_lost_before(it: Wired, own: Coordinator, kind: str) -> None:
    lease = await acquired(it, own, kind)
    await it.direct.flushall()
    with pytest.raises(LeaseLost):
        await commit(it, lease)
    assert lease.lost
    assert await it.counted() == 0
    await it.check_clean()


@each_kind
async def test_nothing_is_written_when_it_is_lost_between_check_and_exec(
    it: Wired, own: Coordinator, kind: str
) -> None:
    lease = await acquired(it, own, kind)
    committing, rule = await held_before_exec(it, lease)
    await it.direct.flushall()
    rule.release.set()
    with pytest.raises(LeaseLost):
        await committing
    assert lease.lost
    assert await it.counted() == 0
    await it.check_clean()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "lock without ttl"])
async def test_a_renewal_between_check_and_exec_is_no_loss(it: Wired, own: Coordinator, kind: str) -> None:
    lease = await acquired(it, own, kind)
    committing, rule = await held_before_exec(it, lease)
    await lease.extend(20)
    rule.release.set()
    await committing
    assert await it.counted() == 1
    assert it.proxy.commands["EXEC"] == 2
    await lease.release()


async def test_other_holders_of_a_semaphore_do_not_matter(it: Wired, own: Coordinator) -> None:
    lease = await acquired(it, own, "permits")
    committing, rule = await held_before_exec(it, lease)
    async with AsyncSemaphore(own, f"{it.key}:lock", limit=3):
        rule.release.set()
        await committing
    assert await it.counted() == 1
    await lease.release()


async def test_what_was_a_writers_guards_no_writes_as_a_readers(it: Wired, own: Coordinator) -> None:
    lock = AsyncReadWriteLock(own, f"{it.key}:lock")
    writer = await lock.write().acquire()
    read_through(writer, it.client)
    committing, rule = await held_before_exec(it, writer)
    state = writer._grant.keys.all[1]
    await it.direct.hset(state, b"=" + writer._grant.wire_token, f"1 {writer.fence}")
    rule.release.set()
    with pytest.raises(LeaseLost):
        await committing
    assert await it.counted() == 0


async def test_the_tombstone_of_a_permit_guards_nothing(it: Wired, own: Coordinator) -> None:
    lease = await acquired(it, own, "permits")
    await it.direct.hset(lease._grant.keys.all[1], b"=" + lease._grant.wire_token, f"0 {lease.fence}")
    with pytest.raises(LeaseLost):
        await commit(it, lease)
    assert await it.counted() == 0


async def test_an_identity_that_asked_again_for_more_still_holds(it: Wired, own: Coordinator) -> None:
    permits = AsyncSemaphore(own, f"{it.key}:lock", limit=3)
    first = await permits.acquire(weight=1, identity="worker-7")
    second = await permits.acquire(weight=3, identity="worker-7")
    for lease in (first, second):
        async with lease.transaction() as tx:
            tx.multi()
            tx.incr(it.done)
    assert await it.direct.get(it.done) == b"2"
    await second.release()


async def test_another_holder_is_told_apart_from_nobody(it: Wired, own: Coordinator) -> None:
    lease = await acquired(it, own)
    await it.direct.set(f"{it.key}:lock", "somebody else", px=10_000)
    with pytest.raises(LeaseLost) as caught:  # noqa: PT012
        async with lease.transaction() as tx:
            tx.multi()
            tx.set(it.done, 1)
    assert caught.value.reason == "taken"
    assert await it.direct.get(it.done) is None


async def test_what_it_read_and_its_costs(it: Wired, own: Coordinator) -> None:
    """Reads are immediate; with a read before, no round trip more; without, one (and never a command of the lock)."""
    lease = await AsyncLock(own, f"{it.key}:lock").acquire()
    read_through(lease, it.client)
    await it.client.ping()
    it.proxy.commands.clear()
    async with lease.transaction() as tx:
        assert await tx.get(it.key) is None
        tx.multi()
        tx.set(it.key, 5)
    assert tx.replies == (True,)
    assert it.proxy.commands == {"WATCH": 1, "TIME": 1, "GET": 2, "MULTI": 1, "SET": 1, "EXEC": 1}
    await lease.release()


@pytest.mark.parametrize("at", ["WATCH", "MULTI"])
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
async def test_a_cancellation_at_the_end_of_the_block_is_raised_after_the_commit(
    it: Wired, at: str, again: bool
) -> None:
    """What the body has done is recorded, whichever command is in flight; the lease is released after that."""
    async with Coordinator(it.direct, exit_timeout=20) as own:
        lease = await acquired(it, own)
        rule = it.proxy.on(at, Action.HOLD)

        async def work() -> None:
            async with lease, lease.transaction() as tx:
                tx.multi()
                tx.incr(it.done)

        working = asyncio.create_task(work())
        await rule.fired.wait()
        working.cancel()
        await asyncio.sleep(0)
        if again:
            working.cancel()
            await asyncio.sleep(0)
        assert not working.done()
        rule.release.set()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert await it.direct.get(it.done) == b"1"
        assert await own.lock(f"{it.key}:lock").try_acquire() is not None


async def test_a_cancelled_commit_takes_no_longer_than_the_exit_timeout(it: Wired) -> None:
    """Then the cancellation is raised; nothing was written, since EXEC was not sent."""
    async with Coordinator(it.direct, exit_timeout=0.2) as own:
        lease = await acquired(it, own)
        rule = it.proxy.on("WATCH", Action.HOLD)
        committing = asyncio.create_task(commit(it, lease))
        await rule.fired.wait()
        committing.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(20):
                await committing
        rule.release.set()
        await lease.release()
    assert await it.direct.get(it.done) is None


async def test_a_key_of_the_bodys_own_is_a_conflict(it: Wired, own: Coordinator) -> None:
    lease = await AsyncLock(own, f"{it.key}:lock").acquire()
    with pytest.raises(Conflict, match=f"The lease on '{it.key}:lock' still holds") as caught:  # noqa: PT012
        async with lease.transaction() as tx:
            await tx.watch(it.key)
            count = int(await tx.get(it.key) or 0)
            await it.direct.incr(it.key)
            tx.multi()
            tx.set(it.key, count + 10)
    assert caught.value.keys == (it.key,)
    lease.check()
    assert await it.direct.get(it.key) == b"1"


async def test_a_renewal_is_a_conflict_only_if_a_key_is_watched(redis: Redis) -> None:
    """Nobody touched that key, and EXEC does not tell: the error does not say that somebody did."""
    async with AsyncLock(redis, "guard") as lease:
        async with lease.transaction() as tx:
            await tx.get("n")
            await lease.extend(40)
            tx.multi()
            tx.set("n", 1)
        assert tx.replies == (True,)
        with pytest.raises(Conflict, match=r"'n', or 'guard' itself was touched .*without tx\.watch\(\)"):  # noqa: PT012
            async with lease.transaction() as tx:
                await tx.watch("n")
                await lease.extend(50)
                tx.multi()
                tx.set("n", 2)
    assert await redis.get("n") == b"1"


async def test_the_bodys_own_error_and_misuse(redis: Redis) -> None:
    async with AsyncLock(redis, "guard") as lease:
        with pytest.raises(KeyError):  # noqa: PT012
            async with lease.transaction() as tx:
                tx.multi()
                tx.set("n", 1)
                raise KeyError
        with pytest.raises(TransactionMisuse, match="ended without multi"):
            async with lease.transaction() as tx:
                await tx.get("n")
        with pytest.raises(TransactionMisuse, match="SET before multi"):
            async with lease.transaction() as tx:
                await tx.set("n", 1)
        used = lease.transaction()
        async with used:
            used.multi()
        with pytest.raises(TransactionMisuse, match="as long as the body"):
            await used.__aenter__()
        async with lease.transaction() as tx:
            with pytest.raises(TransactionMisuse, match="inside the body of another one"):
                async with lease.transaction():
                    pass
            tx.multi()
    with pytest.raises(NotHeld):
        async with lease.transaction():
            pass
    assert await redis.get("n") is None
    assert await watchers(redis) == 0


async def test_a_connection_lost_before_exec_is_replaced_while_the_lease_holds(it: Wired, own: Coordinator) -> None:
    lease = await acquired(it, own)
    it.proxy.on("WATCH", Action.CUT_BEFORE, times=2)
    await commit(it, lease)
    assert await it.counted() == 1
    it.proxy.on("EXEC", Action.CUT_AFTER)
    with pytest.raises(OutcomeUnknown):  # noqa: PT012
        async with lease.transaction() as tx:
            tx.multi()
            tx.incr(it.done)
    assert await it.direct.get(it.done) == b"2"
    it.proxy.on("GET", Action.CUT_BEFORE)
    with pytest.raises(Unreachable):  # noqa: PT012
        async with lease.transaction() as tx:
            await tx.get("x")
            tx.multi()
    await it.check_clean()


async def test_it_gives_up_at_the_deadline_of_the_lease(it: Wired, own: Coordinator) -> None:
    lease = await AsyncLock(own, f"{it.key}:lock", ttl=3, auto_renew=False).acquire()
    read_through(lease, it.client)
    it.proxy.refuse = True
    await it.proxy.cut()
    with pytest.raises(LeaseLost):
        await commit(it, lease)


async def test_the_loss_cancels_the_body_of_the_lease(make_client: MakeClient, redis: Redis) -> None:
    with pytest.raises(LeaseLost):  # noqa: PT012
        async with AsyncLock(redis, "guard") as lease:
            other = asyncio.create_task(asyncio.sleep(60))
            try:
                await redis.delete("guard")
                async with lease.transaction() as tx:
                    tx.multi()
            finally:
                other.cancel()
            raise AssertionError("it went on")
    assert in_use(redis) <= 2


# -- real processes, really stopped ------------------------------------------------------------------------


async def count_late(sync: Coordinator, name: str, key: str, ttl: str, guarded: str) -> dict[str, object]:
    """In a child: count ``key`` up under a lock, but stop after the last check of the lease, before the write."""
    client: Any = sync.client
    lease = await AsyncLock(sync, name, ttl=float(ttl), auto_renew=False).acquire()
    if guarded == "guarded":
        async with lease.transaction() as tx:
            count = int(await tx.get(key) or 0)
            tx.multi()
            tx.set(key, count + 1)
            execute = tx._session.execute

            async def late(queue: Any) -> Any:
                os.kill(os.getpid(), signal.SIGSTOP)
                return await execute(queue)

            tx._session.__dict__["execute"] = late
    else:
        count = int(await client.get(key) or 0)
        lease.check()
        os.kill(os.getpid(), signal.SIGSTOP)
        await client.set(key, count + 1)
    return {}


async def _stopped(child: Child, late: asyncio.Future[Answer]) -> bool:
    """Wait until it stands still; return False if it was too slow to get as far as that within its lease."""
    await wait_until(lambda: child.stands_still() or late.done(), FAST, timeout=10)
    return not late.done() or not isinstance(late.exception(), Failed)


@pytest.mark.real  # a process
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["guarded", "unguarded"])
async def test_a_holder_that_is_stopped_beyond_its_lease_overwrites_nothing(
    server: EmbeddedServer, redis: Redis, crew: Crew, way: str
) -> None:
    """Stopped by SIGSTOP after its last check, overtaken, and continued. Without the guard the same loses updates."""
    done = refused = overtakes = 0
    with crew.children(1) as (child,):
        await child.open(server.url)
        while overtakes < OVERTAKES:
            late = child.run(count_late, "guard", "count", 0.03, way)
            if not await _stopped(child, late):
                continue
            overtakes += 1
            async with AsyncLock(redis, "guard").acquire(timeout=5) as lease, lease.transaction() as tx:
                count = int(await tx.get("count") or 0)
                tx.multi()
                tx.set("count", count + 1)
            done += 1
            child.go_on()
            try:
                await late
                done += 1
            except Failed as error:
                refused += error.kind == "LeaseLost"
    lost = done - int(await redis.get("count") or 0)
    if way == "guarded":
        assert (lost, refused) == (0, OVERTAKES)
    else:
        assert lost == OVERTAKES  # every one of them: this is what the guard is for
