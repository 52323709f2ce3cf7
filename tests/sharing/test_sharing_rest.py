"""P5, P12: tasks that share what their process holds: what rests, what is told of it, what is refused, other places."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncRobustLock, Coordinator, Lease, LeaseLost, NotHeld, SyncError, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import WrongContext

from ..conftest import MakeClient
from ..support.body import FAST
from ..support.inside import LeaseState, ProcessGrant, TaskGrant, hub_of, now, process_grants, tuned
from ..support.inspecting import calls
from ..support.options import OPTIONS
from ..support.sharing import (
    NAME,
    gets_free,
    in_line,
    in_queue,
    process_grant_of,
    queued,
    shared,
    soon,
    turns,
    waiters,
)
from ..support.views import holder_of

NAMES = 10_000 * OPTIONS.scale


@pytest_asyncio.fixture
async def patient(redis: Redis) -> AsyncIterator[Coordinator]:
    """One whose turns do not end by time, however busy the machine is."""
    async with tuned(redis, slice=60) as coordinator:
        yield coordinator


async def free(redis: Redis) -> bool:
    return not await redis.exists(NAME)


# -- linger --------------------------------------------------------------------------------------------------


@pytest.mark.real  # counts the commands of the server
async def test_p2_nothing_is_sent_while_it_rests(redis: Redis, sync: Coordinator) -> None:
    """P2, P8: a task that comes back within ``linger`` has it immediately, under a greater fence; also from ``try``."""
    lock = shared(sync, linger=60)
    lease = await lock.acquire()
    before = await calls(redis)
    for turn in range(50):
        await lease.release()
        assert not await free(redis)
        following = await lock.try_acquire() if turn % 2 else await lock.acquire()
        assert following is not None
        assert following.fence > lease.fence
        assert process_grant_of(following) is process_grant_of(lease)
        lease = following
    assert await calls(redis) == before
    await lease.release()


async def test_p6_what_rests_can_be_taken_by_force(redis: Redis, sync: Coordinator, other: Coordinator) -> None:
    """P1: nobody gets it here any more once its process has heard of it, however long until the next renewal."""
    lock = shared(sync, linger=60)
    lease = await lock.acquire()
    base = process_grant_of(lease)
    await lease.release()
    assert await shared(other).force_release()
    await wait_until(lambda: base.state is not LeaseState.HELD, FAST, timeout=5)
    following = await lock.acquire()
    assert process_grant_of(following) is not base
    assert await redis.get(NAME) == process_grant_of(following).wire_token
    await following.release()


async def test_p6_what_tasks_have_can_be_taken_by_force(redis: Redis, sync: Coordinator, other: Coordinator) -> None:
    """P1, P6: it is handed on for a slice at most; who has it last is told by its release."""
    lock, lost, ends = shared(sync), 0, False

    async def one() -> None:
        nonlocal lost
        while not ends:
            try:
                async with lock:
                    await asyncio.sleep(0)
            except LeaseLost:
                lost += 1

    tasks = [asyncio.create_task(one()) for _ in range(4)]
    await wait_until(lambda: bool(hub_of(sync).listeners), FAST, timeout=5)
    assert await shared(other).force_release()
    await wait_until(lambda: lost > 0, FAST, timeout=5)
    ends = True
    await asyncio.gather(*tasks)
    assert lost == 1


@pytest.mark.parametrize("linger", [0, 60])
async def test_p3_without_pushes_nothing_is_handed_on_any_more(redis: Redis, sync: Coordinator, linger: float) -> None:
    """P3: the right to listen went, so nobody can tell that others wait: a waiter here gets it by the server."""
    lock = shared(sync, linger=linger)
    lease = await lock.acquire()
    (waiting,) = await waiters(lock, sync, 1)
    if linger:
        resting = await shared(sync, "another", linger=linger).acquire()
        await resting.release()
    untyped: Any = redis
    await untyped.execute_command("ACL", "SETUSER", "default", "resetchannels")
    try:
        await redis.client_kill_filter(_type="pubsub")
        await wait_until(lambda: not hub_of(sync).pushes, FAST, timeout=5)
        await wait_until(lambda: "another" not in {grant.name for grant in process_grants(sync)}, FAST, timeout=5)
        await lease.release()
        following = await soon(waiting)
        assert following.fence > lease.fence
        assert not isinstance(following._grant, TaskGrant) or following._grant.process_grant is not process_grant_of(
            lease
        )
        await following.release()
        await (await soon(asyncio.create_task(lock.acquire()))).release()
        await gets_free(redis)
        assert not hub_of(sync).listeners
    finally:
        await untyped.execute_command("ACL", "SETUSER", "default", "allchannels")


async def test_p6_what_rests_is_renewed(redis: Redis, sync: Coordinator) -> None:
    """P6: it is ours as long as it rests, longer than its ttl."""
    lock = shared(sync, ttl=3, linger=60)
    lease = await lock.acquire()
    base = process_grant_of(lease)
    await lease.release()
    ends = base.deadline
    await wait_until(lambda: base.deadline > ends + 3.6, FAST, timeout=15)
    assert not await free(redis)
    assert process_grant_of(await lock.acquire()) is base


@pytest.mark.parametrize("share", [True, False])
async def test_p3_a_resting_grant_goes_to_another_process_that_asks(
    redis: Redis, sync: Coordinator, other: Coordinator, share: bool
) -> None:
    """P3: another process that asks has it immediately, long before ``linger`` is over, whether it shares or not."""
    await (await shared(sync, linger=60).acquire()).release()
    lease = await soon(asyncio.ensure_future(shared(other, share=share).acquire()))
    lease.check()
    await lease.release()
    await gets_free(redis)


async def test_p3_what_rests_goes_after_linger(redis: Redis, sync: Coordinator) -> None:
    """P3: a foreign lock, which nobody hears of, waits for ``linger`` and no longer."""
    foreign = redis.lock(NAME, timeout=5, sleep=0.001)
    lock = shared(sync, linger=0.1)
    await (await lock.acquire()).release()
    began = now()
    assert await foreign.acquire(blocking_timeout=5)
    assert 0.05 < now() - began < 2
    await foreign.release()
    await wait_until(lambda: not (hub_of(sync).resources or hub_of(sync).listeners), FAST, timeout=5)


async def test_p2_linger_begins_again_with_each_release(redis: Redis, sync: Coordinator) -> None:
    """P2: with each release; one timer does for all of them."""
    lock = shared(sync, linger=0.4)
    lease = await lock.acquire()
    base, began = process_grant_of(lease), now()
    while now() - began < 1:
        await lease.release()
        await asyncio.sleep(0.01)
        lease = await lock.acquire()
        assert process_grant_of(lease) is base
    await lease.release()
    await gets_free(redis)


@pytest.mark.parametrize("how", ["coordinator", "client"])
async def test_p12_what_rests_when_all_is_closed(make_client: MakeClient, redis: Redis, how: str) -> None:
    """P12: it is given back when the coordinator closes, or the client does."""
    client = make_client()
    sync = Coordinator(client)
    await (await shared(sync, linger=60).acquire()).release()
    assert not await free(redis)
    if how == "coordinator":
        await sync.aclose()
    else:
        await client.aclose()
    await gets_free(redis)
    await sync.aclose()


@pytest.mark.parametrize("bare", [True, False])
async def test_p12_what_rests_at_the_end_of_the_loop(server: EmbeddedServer, redis: Redis, bare: bool) -> None:
    """P12: `asyncio.run` ends, and nobody closed anything."""

    async def main() -> None:
        client = server.client()
        async with shared(client if bare else Coordinator(client), linger=60):
            pass
        async with server.client() as observer:
            held.append(not await free(observer))

    held: list[bool] = []
    await asyncio.to_thread(asyncio.run, main())
    assert held == [True]
    await gets_free(redis)


# -- what is told --------------------------------------------------------------------------------------------


async def test_statistics_and_release_by_name(redis: Redis, patient: Coordinator, other: Coordinator) -> None:
    """Waiters of this process count one by one, those of others by their tickets; and who has it here is named."""
    sync, lock = patient, shared(patient)

    async def hold() -> Lease:
        return await lock.acquire()

    holding = asyncio.create_task(hold(), name="the first")
    lease = await holding
    tasks = await waiters(lock, sync, 3)
    theirs = [asyncio.create_task(shared(other).acquire()) for _ in range(4)]
    await in_line(other, 4)
    await in_queue(redis, 1)
    found = await lock.statistics()
    assert (holder_of(found), found.holders[0].foreign, found.waiting) == (lease.token, False, 1)
    (here,), (there,) = sync.statistics(), other.statistics()
    assert (here.holders[0].task, here.waiting, there.holders, there.waiting) == ("the first", 3, (), 4)
    await lock.release()
    first = await soon(tasks[0])
    assert [it.task for it in sync.statistics()[0].holders] == ["waiter 0"]
    assert lock._held() == [first._grant]
    assert lease.remaining() == 0
    with pytest.raises(NotHeld):
        lease.check()
    await lease.release()  # again: nothing happens
    first.check()
    for task in (*tasks[1:], *theirs):
        task.cancel()
    await lock.release()
    with pytest.raises(NotHeld):
        await lock.release()
    await gets_free(redis)


@pytest.mark.ci
@pytest.mark.timeout(120)
async def test_p12_names_that_are_used_once(redis: Redis, sync: Coordinator) -> None:
    """P12: nothing is left of 10,000 names (with --scale=10 of 100,000, which takes 11 seconds).

    But their fences, which the server forgets by itself.
    """
    size = 500
    for chunk in range(0, NAMES, size):

        async def one(number: int) -> None:
            async with shared(sync, f"once {number}"):
                pass

        await asyncio.gather(*(one(number) for number in range(chunk, chunk + size)))
    assert (len(hub_of(sync).resources), len(hub_of(sync).listeners), len(hub_of(sync).acquisitions)) == (0, 0, 0)
    keys: list[bytes] = [key async for key in redis.scan_iter(count=10_000)]
    assert all(key.endswith(b":fence") for key in keys), [key for key in keys if not key.endswith(b":fence")][:5]
    assert len(keys) <= NAMES
    for key in keys[:100]:
        assert await redis.pttl(key) != -1


@pytest.mark.parametrize("share", [True, False])
async def test_p12_nothing_is_left_to_the_garbage_collector(sync: Coordinator, share: bool) -> None:
    """P12: objects that refer to each other would cost each grant more than what they are for."""
    lock = shared(sync, share=share)
    await (await lock.acquire()).release()
    gc.collect()
    gc.disable()
    try:
        for _ in range(50):
            await (await lock.acquire()).release()
        assert gc.collect() < 50
    finally:
        gc.enable()


# -- what is refused, and what is not shared -----------------------------------------------------------------


WRONG: dict[str, tuple[Callable[[Redis], object], type[Exception]]] = {
    "linger without share": (lambda redis: AsyncLock(redis, NAME, linger=1), ValueError),
    "linger < 0": (lambda redis: AsyncLock(redis, NAME, share=True, linger=-1), ValueError),
    "linger without end": (lambda redis: AsyncLock(redis, NAME, share=True, linger=float("inf")), ValueError),
    "linger nan": (lambda redis: AsyncLock(redis, NAME, share=True, linger=float("nan")), ValueError),
    "linger None": (lambda redis: AsyncLock(redis, NAME, share=True, linger=None), TypeError),  # type: ignore[arg-type]
    "share 1": (lambda redis: AsyncLock(redis, NAME, share=1, linger=1), TypeError),  # type: ignore[arg-type]
    "share 0": (lambda redis: AsyncLock(redis, NAME, share=0, linger=1), TypeError),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_what_is_refused(redis: Redis, wrong: str) -> None:
    """Before anything is sent."""
    make, error = WRONG[wrong]
    with pytest.raises(error):
        make(redis)


NOT_SHARED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # of the coordinator, of the lock, of the acquisition
    "ttl=None": ({}, {"ttl": None}, {}),
    "identity": ({}, {}, {"identity": "me {}"}),
    "watch": ({}, {"engine": "watch"}, {}),
    "polling": ({"push": "never"}, {}, {}),
}


@pytest.mark.parametrize("case", NOT_SHARED)
async def test_p1_what_is_not_shared(redis: Redis, case: str) -> None:
    """P1, P2, P5: each waiter has a ticket of his own; all come in order, and nothing is left."""
    of_sync, of_lock, of_acquire = NOT_SHARED[case]
    async with Coordinator(redis, **of_sync) as sync:
        lock = shared(sync, **of_lock)

        def acquire(number: int) -> asyncio.Task[Lease]:
            options = {name: value.format(number) for name, value in of_acquire.items()}
            return asyncio.create_task(lock.acquire(**options))

        held = await acquire(0)
        assert not isinstance(held._grant, TaskGrant | ProcessGrant)
        tasks = []
        for number in range(1, 5):
            tasks.append(acquire(number))
            await wait_until(lambda: is_queued(redis, number), FAST, timeout=5)  # noqa: B023
        tasks.pop(1).cancel()
        await wait_until(lambda: is_queued(redis, 3), FAST, timeout=5)
        for task in tasks:
            await held.release()
            lease = await soon(task)
            assert lease.fence > held.fence
            held = lease
        await held.release()
        await gets_free(redis)
        await wait_until(lambda: is_queued(redis, 0), FAST, timeout=5)
        await wait_until(lambda: not (hub_of(sync).resources or hub_of(sync).acquisitions), FAST, timeout=5)


async def is_queued(redis: Redis, number: int) -> bool:
    return await queued(redis) == number


@pytest.mark.parametrize("other_way", [{"identity": "me"}, {"share": False}, "robust"])
async def test_p1_beside_what_is_shared(redis: Redis, sync: Coordinator, other_way: Any) -> None:
    """P1, P3: of one process, some share and some do not: they exclude each other, and none of them starves."""
    beside: AsyncLock | AsyncRobustLock
    if other_way == "robust":
        beside, identity = AsyncRobustLock(sync, NAME), None
    else:
        identity = other_way.pop("identity", None)
        beside = shared(sync, **other_way)
    inside = 0

    async def one(lock: AsyncLock | AsyncRobustLock, **options: Any) -> None:
        nonlocal inside
        for _ in range(30):
            async with lock.acquire(**options):
                inside += 1
                await asyncio.sleep(0)
                assert inside == 1, "P1"
                inside -= 1

    async with asyncio.timeout(20):
        await asyncio.gather(*(one(shared(sync)) for _ in range(3)), one(beside, identity=identity))
    await gets_free(redis)


# -- other places --------------------------------------------------------------------------------------------


async def refused(use: Callable[[], Any]) -> None:
    with pytest.raises(WrongContext):
        await use()


async def test_p12_another_loop(redis: Redis, sync: Coordinator) -> None:
    """P12: neither a lease nor a base that rests, nor a line, is of use there; and here all is as it was."""
    lock, resting = shared(sync), shared(sync, "resting", linger=60)
    lease = await lock.acquire()
    tasks = await waiters(lock, sync, 2)
    await (await resting.acquire()).release()

    async def elsewhere() -> None:
        for use in (lock.acquire, lock.try_acquire, lease.release, lambda: lease.extend(5), resting.acquire):
            await refused(use)
        await refused(resting.try_acquire)

    await asyncio.to_thread(asyncio.run, elsewhere())
    await turns()
    lease.check()
    assert not any(task.done() for task in tasks)
    await lease.release()
    for task in tasks:
        await (await soon(task)).release()
    await gets_free(redis)
    await (await resting.acquire()).release()


@pytest.mark.real
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_p12_a_fork(redis: Redis, sync: Coordinator) -> None:
    """P12: in the child no lease is released, and nothing that rests or waits is handed out; the parent goes on."""
    lock, resting = shared(sync), shared(sync, "resting", linger=60)
    lease = await lock.acquire()
    tasks = await waiters(lock, sync, 1)
    await (await resting.acquire()).release()
    before = await calls(redis)
    pid = os.fork()
    if pid == 0:
        wrong = 1
        try:
            # The parent's loop runs here, as it is a copy: each of these ends without waiting for it.
            uses = (lease.release, lock.acquire, lock.try_acquire, resting.acquire, resting.try_acquire)
            wrong = sum(not _raises(use()) for use in uses)
        finally:
            os._exit(wrong)
    async with asyncio.timeout(10):
        while os.waitpid(pid, os.WNOHANG) == (0, 0):  # noqa: ASYNC222
            await asyncio.sleep(0.001)
    assert await calls(redis) == before
    lease.check()
    await lease.release()
    await (await soon(tasks[0])).release()
    await gets_free(redis)


def _raises(use: Any) -> bool:
    try:
        use.send(None)
    except WrongContext:
        return True
    except (StopIteration, SyncError):
        return False
    return False
