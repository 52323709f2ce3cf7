"""AsyncReentrantLock: who is the owner, how often it may acquire, and what a loss does to all that are inside."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import permutations
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, AsyncLock, AsyncReentrantLock, Coordinator, NotHeld, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import WrongContext
from redis_sync_aio.types import BaseLease

from ..conftest import MakeClient
from ..support.body import FAST, lost_in
from ..support.inside import lease_groups
from ..support.views import holder_of

NAME = "reentrant"
TTL = 0.3


@pytest.fixture(params=["link", "polling", "cluster"])
def way(request: pytest.FixtureRequest) -> str:
    """What differs here is only whether a waiter is woken: two ways will do."""
    return str(request.param)


@pytest.fixture
def lock(sync: Coordinator) -> AsyncReentrantLock:
    return AsyncReentrantLock(sync, NAME)


@pytest_asyncio.fixture
async def rival(redis: Redis) -> AsyncIterator[AsyncLock]:
    """The same lock, as another process sees it."""
    async with Coordinator(redis) as other:
        yield AsyncLock(other, NAME)


async def elsewhere(run: Callable[[], Awaitable[Any]]) -> Any:
    """Run it in a task of its own."""

    async def inside() -> Any:
        return await run()

    return await asyncio.create_task(inside())


async def scripts_run(redis: Redis) -> int:
    stats = await redis.info("commandstats")
    return sum(int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"]) for command in ("eval", "evalsha"))


def queued(lock: AsyncLock | AsyncReentrantLock, count: int) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        return (await lock.statistics()).waiting == count

    return condition


# -- the same owner ----------------------------------------------------------------------------------------


@pytest.mark.real
async def test_p1_p9_the_same_task_acquires_again_without_a_command(lock: AsyncReentrantLock, redis: Redis) -> None:
    async with lock as outer:
        before = await scripts_run(redis)
        async with lock as middle, lock.acquire(timeout=0) as inner:
            assert await lock.try_acquire() is not None
            assert lock.depth() == 4
            assert await scripts_run(redis) == before
            await lock.release()
        assert outer.fence == middle.fence == inner.fence
        assert outer.token == middle.token == inner.token
        outer.check()
        for left in (middle, inner):
            with pytest.raises(NotHeld):
                left.check()
        assert await scripts_run(redis) == before
        assert holder_of(await lock.statistics()) == outer.token
    assert lock.depth() == 0
    assert not await lock.locked()


async def test_p1_any_object_of_that_name_and_coordinator_is_the_same_lock(sync: Coordinator) -> None:
    """Helpers that make their own lock object do not wait for their caller."""

    async def helper(depth: int) -> int:
        async with AsyncReentrantLock(sync, NAME if depth % 2 else NAME.encode()).acquire(timeout=5) as lease:
            return lease.fence if depth == 0 else await helper(depth - 1)

    async with AsyncReentrantLock(sync, NAME) as lease:
        assert await helper(20) == lease.fence


async def test_p1_a_wrapped_function_may_call_itself(lock: AsyncReentrantLock, rival: AsyncLock) -> None:
    @lock.wrap
    async def factorial(n: int) -> int:
        assert await rival.try_acquire() is None
        return n * await factorial(n - 1) if n > 1 else 1

    assert await factorial(4) == 24
    assert not await lock.locked()


async def test_p1_other_tasks_and_children_wait(lock: AsyncReentrantLock, sync: Coordinator, rival: AsyncLock) -> None:
    """P1: a child task does not inherit; nor does an AsyncLock of that name in this process, or another process."""
    async with lock, lock:
        assert await elsewhere(lock.try_acquire) is None
        with pytest.raises(AcquireTimeout):
            await elsewhere(lambda: lock.acquire(timeout=0))
        with pytest.raises(AcquireTimeout) as caught:
            await elsewhere(lambda: lock.acquire(timeout=0.01))
        assert caught.value.name == NAME
        assert await AsyncLock(sync, NAME).try_acquire() is None
        assert await rival.try_acquire() is None
        child = asyncio.create_task(lock.acquire(timeout=5))
        await wait_until(queued(lock, 1), FAST, timeout=5)
    await (await child).release()


async def test_p1_only_one_task_is_inside_at_a_time(lock: AsyncReentrantLock, rival: AsyncLock) -> None:
    inside: list[object] = []
    count = 0

    async def section(depth: int) -> None:
        nonlocal count
        async with lock.acquire(timeout=20):
            inside.append(asyncio.current_task())
            await asyncio.sleep(0)
            assert set(inside) == {asyncio.current_task()}
            if depth:
                await section(depth - 1)
            count += 1
            inside.pop()

    async def stranger() -> None:
        async with rival.acquire(timeout=20):
            assert not inside

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(section(2))
            group.create_task(stranger())
    assert count == 24


async def test_p2_an_owner_that_released_all_waits_behind_the_others(
    lock: AsyncReentrantLock, rival: AsyncLock
) -> None:
    async with lock:
        waiting = asyncio.create_task(rival.acquire(timeout=5))
        await wait_until(queued(lock, 1), FAST, timeout=5)
        async with lock:
            pass
        assert not waiting.done()
    assert await lock.try_acquire() is None
    await (await waiting).release()


# -- owners by name ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", ["request-7", ("a", 1), 0, False])
async def test_p1_a_named_owner_may_be_many_tasks(lock: AsyncReentrantLock, owner: object) -> None:
    async with lock.acquire(identity=owner) as outer:
        assert lock.depth() == 0, "the task itself is another owner"
        inner = await elsewhere(lambda: lock.acquire(timeout=0, identity=owner))
        assert inner.fence == outer.fence
        assert await lock.try_acquire() is None
        assert await lock.try_acquire(identity="somebody else") is None
        assert lock.depth(identity=owner) == 2
    assert await lock.locked(), "the other task is still inside"
    await elsewhere(lambda: lock.release(identity=owner))
    assert not await lock.locked()


async def test_p1_a_child_that_is_asked_to_shares_with_its_parent(lock: AsyncReentrantLock) -> None:
    parent = asyncio.current_task()
    async with lock as lease:

        async def child() -> int:
            async with lock.acquire(timeout=0, identity=parent) as inner:
                return inner.fence

        assert list(await asyncio.gather(child(), child())) == [lease.fence, lease.fence]
        assert lock.depth() == 1


async def test_p1_coordinators_are_different_owners(sync: Coordinator, redis: Redis) -> None:
    """Two coordinators are two processes, as far as a lock is concerned."""
    async with Coordinator(redis) as other, AsyncReentrantLock(sync, NAME).acquire(identity="x"):
        assert await AsyncReentrantLock(other, NAME).try_acquire(identity="x") is None


async def test_an_implicit_coordinator_serves_all_lock_objects(client: Redis) -> None:
    async with AsyncReentrantLock(client, NAME) as outer, AsyncReentrantLock(client, NAME).acquire(timeout=0) as inner:
        assert inner.fence == outer.fence


# -- releasing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(permutations(range(3))))
async def test_p1_released_in_any_order(lock: AsyncReentrantLock, rival: AsyncLock, order: tuple[int, ...]) -> None:
    """Each lease counts once, however often it is released; the last one frees the lock."""
    leases = [await lock.acquire() for _ in range(3)]
    for number, index in enumerate(order, 1):
        assert await rival.try_acquire() is None
        for _ in range(2):
            await leases[index].release()
            assert lock.depth() == 3 - number
        assert [lease.remaining() > 0 for lease in leases].count(True) == 3 - number
    assert not await lock.locked()


async def test_releasing_by_the_lock_goes_from_the_inside_out(lock: AsyncReentrantLock) -> None:
    leases = [await lock.acquire(), await lock.acquire()]
    with pytest.raises(NotHeld, match="this task"):
        await elsewhere(lock.release)
    with pytest.raises(NotHeld, match="'x'"):
        await lock.release(identity="x")
    await lock.release()
    assert [lease.remaining() > 0 for lease in leases] == [True, False]
    await lock.release()
    with pytest.raises(NotHeld):
        await lock.release()
    assert not await lock.locked()


async def test_leases_nobody_refers_to_still_count(lock: AsyncReentrantLock, rival: AsyncLock) -> None:
    await lock.acquire()
    await lock.acquire()
    gc.collect()
    assert lock.depth() == 2
    await lock.release()
    assert await rival.try_acquire() is None
    await lock.release()
    assert not await lock.locked()


async def test_a_section_left_by_an_exit_stack_in_another_task(lock: AsyncReentrantLock) -> None:
    stack = AsyncExitStack()
    await stack.enter_async_context(lock)
    await stack.enter_async_context(lock.acquire())
    await elsewhere(stack.aclose)
    assert not await lock.locked()
    assert lock.depth() == 0


@pytest_asyncio.fixture
async def held(lock: AsyncReentrantLock) -> AsyncIterator[BaseLease]:
    """Held during a test, by an owner that the test knows: set-up, test and tear-down are different tasks."""
    async with lock.acquire(identity="fixture") as lease:
        yield lease
    assert not await lock.locked()


async def test_a_fixture_and_its_test_share_a_named_owner(held: BaseLease, lock: AsyncReentrantLock) -> None:
    assert await lock.try_acquire() is None
    async with lock.acquire(timeout=0, identity="fixture") as lease:
        assert lease.fence == held.fence


async def test_extending_any_lease_extends_all(lock: AsyncReentrantLock, redis: Redis) -> None:
    async with lock.acquire(ttl=5) as outer:
        async with lock as inner:
            await inner.extend(60)
            assert 50 < inner.remaining() <= 60
            assert 50 < outer.remaining() <= 60
        with pytest.raises(NotHeld):
            await inner.extend(60)
        assert 55_000 < await redis.pttl(NAME) < 61_000


async def test_p6_leases_of_all_levels_follow_the_renewals(sync: Coordinator) -> None:
    lock = AsyncReentrantLock(sync, NAME, ttl=TTL)
    async with lock as outer, lock as inner:
        await asyncio.sleep(3 * TTL)
        for lease in (outer, inner):
            lease.check()
            assert lease.remaining() > 0


# -- leftovers, inputs -------------------------------------------------------------------------------------


async def test_p12_nothing_is_kept_of_a_task(lock: AsyncReentrantLock) -> None:
    def ours() -> int:
        return len([key for key in lease_groups if isinstance(key, tuple) and key[1] is lock._client])

    def mine() -> int:  # the former owner may still be on its way out
        task = asyncio.current_task()
        assert task is not None
        return len([key for key in lease_groups if isinstance(key, tuple) and key[-1] == weakref.ref(task)])

    async def section() -> None:
        async with lock.acquire(timeout=20), lock:
            assert mine() == 1
        assert mine() == 0

    await asyncio.gather(*(section() for _ in range(20)))
    assert ours() == 0


async def test_p12_a_task_that_forgot_to_release_is_not_kept_alive(make_client: MakeClient) -> None:
    sync = Coordinator(make_client())
    lock = AsyncReentrantLock(sync, NAME)
    task = asyncio.create_task(lock.acquire())
    await task
    gone = weakref.ref(task)
    del task
    await asyncio.sleep(0)  # the loop itself knows it until the end of this turn
    gc.collect()
    assert gone() is None
    assert await lock.locked()
    await sync.aclose()
    gc.collect()
    assert not [key for key in lease_groups if isinstance(key, tuple) and key[1] is sync]


def test_a9_an_owner_belongs_to_one_event_loop(server: EmbeddedServer) -> None:
    """A9: what an owner held when its loop ended was released then; in the next loop it begins again."""
    client = server.client()
    lock = AsyncReentrantLock(client, NAME)
    leases: list[BaseLease] = []

    async def forget_to_release() -> None:
        for depth in (1, 2):
            leases.append(await lock.acquire(timeout=5, identity="x"))
            assert lock.depth(identity="x") == depth

    for _ in range(2):
        asyncio.run(forget_to_release())
        assert all(lease.lost for lease in leases)
    with pytest.raises(WrongContext):
        lock.depth()


async def test_e1_e2_bad_arguments_fail_at_the_call(lock: AsyncReentrantLock, redis: Redis) -> None:
    bad: list[Any] = [-1, "5", float("nan"), True]
    async with lock:  # inside, where neither is used
        for value in bad:
            with pytest.raises((TypeError, ValueError)):
                await lock.acquire(timeout=value)
            with pytest.raises((TypeError, ValueError)):
                await lock.try_acquire(ttl=value)
            with pytest.raises((TypeError, ValueError)):
                lock.acquire(ttl=value)
    unhashable: Any = []
    wrong: Any = "never"
    wrongs: list[dict[str, Any]] = [{"owner": unhashable}, {"on_lost": wrong}, {"timeout": -1}]
    for options in wrongs:
        with pytest.raises((TypeError, ValueError)):
            lock.acquire(**options)
    with pytest.raises(TypeError):
        await lock.acquire(identity=unhashable)
    names: list[Any] = ["", "x" * 9000, None, 7]
    for name in names:
        with pytest.raises((TypeError, ValueError)):
            AsyncReentrantLock(redis, name)


async def test_what_it_says_of_itself(lock: AsyncReentrantLock) -> None:
    assert lock.name == NAME
    assert repr(lock) == f"<AsyncReentrantLock {NAME!r} ttl=30.0>"

    async def body(_: BaseLease) -> None:
        assert await lock.force_release()
        assert not await lock.locked()

    await lost_in(lock, body)
