"""P5, P12: ends of bodies, leases and coordinators take the time that they are given, and leave nothing behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncReadWriteLock,
    AsyncSemaphore,
    Coordinator,
    FenceGate,
    LeaseLost,
    Unreachable,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed
from redis_sync_aio.testing.faults import Action, FaultProxy
from redis_sync_aio.types import Engine

from ..conftest import MakeClient
from ..support.body import FAST, for_ever, waits
from ..support.inside import Call, hub_module, hub_of, lock_keys, now
from ..support.primitives import PRIMITIVES, Primitive, each
from ..support.sweep import Outcome, sweep
from ..support.topologies import Nodes
from ..support.wired import MODES, RELEASE, RENEW, wired
from ..support.wired import quiet_loop as quiet_loop
from .conftest import Make

shared_or_not = pytest.mark.parametrize("share", [False, True])
engines = pytest.mark.parametrize("engine", ["lua", "watch"])


# -- a body that fails while Redis is away -----------------------------------------------------------------


@shared_or_not
@pytest.mark.parametrize("how", ["error", "cancelled"])
async def test_an_error_leaves_a_body_in_time_while_redis_is_away(
    server: EmbeddedServer, how: str, share: bool
) -> None:
    """F7: its release continues in the background, and frees the lock when the server is back."""
    async with FaultProxy(server) as proxy, proxy.client() as client:
        sync = Coordinator(client, response_timeout=30, exit_timeout=0.2)
        entered = asyncio.Event()

        async def body() -> None:
            async with AsyncLock(sync, "it", share=share):
                proxy.black_hole = True
                entered.set()
                if how == "error":
                    raise KeyError("of the body")
                await for_ever()

        task = asyncio.create_task(body())
        await entered.wait()
        began = now()
        if how == "cancelled":
            task.cancel()
        await asyncio.wait([task], timeout=20)
        assert task.done()
        assert now() - began < 0.5, "far less than the answer may take"
        proxy.black_hole = False
        with pytest.raises(asyncio.CancelledError if how == "cancelled" else KeyError) as raised:
            await task
        assert "has no answer yet and keeps running" in raised.value.__notes__[0]
        async with asyncio.timeout(20), AsyncLock(sync, "it"):
            pass
        await sync.aclose()


async def test_an_error_that_passes_task_groups_waits_once(server: EmbeddedServer) -> None:
    """F7: for all that it ends on its way: bodies around a group, and those of the tasks that the group cancels."""
    options: dict[str, Any] = {"response_timeout": 600, "retry_for": 600, "exit_timeout": 3}
    async with FaultProxy(server) as proxy, proxy.client() as client, Coordinator(client, **options) as sync:
        entered = [asyncio.Event() for _ in range(3)]

        async def sibling(number: int) -> None:
            async with sync.lock(f"sibling {number}"):
                entered[number].set()
                await for_ever()

        async def level(number: int) -> None:
            async with sync.lock(f"around {number}"), asyncio.TaskGroup() as group:
                group.create_task(sibling(number))
                await entered[number].wait()
                if number < 2:
                    group.create_task(level(number + 1))
                else:
                    proxy.black_hole = True
                    raise KeyError("of the innermost body")

        task = asyncio.create_task(level(0))
        await entered[2].wait()
        began = now()
        await asyncio.wait([task], timeout=60)
        assert 3 <= now() - began < 9, "it would be 18 if each of six bodies waited"
        proxy.black_hole = False
        with pytest.raises(ExceptionGroup) as raised:
            await task
        assert raised.group_contains(KeyError)
        names = [f"{place} {number}" for place in ("sibling", "around") for number in range(3)]

        async def free() -> bool:
            return not await client.exists(*names)

        await wait_until(free, FAST, timeout=30)


@each(PRIMITIVES)
async def test_a_task_that_watches_a_lease_ends_with_its_release(primitive: Primitive, make: Make) -> None:
    """A task group with a watcher in it is left when the lease was released, and is told that it was not lost."""
    lease = await make().acquire()
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        watching = group.create_task(lease.wait_lost())
        await asyncio.sleep(0)
        assert not watching.done()
        await lease.release()
    assert watching.result() is False
    assert lease.lost is False
    assert await lease.wait_lost() is False  # it has ended already


# -- releases ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_a_lease_whose_release_failed(server: EmbeddedServer, mode: str) -> None:
    """It may be released again until it ends; behind the end of its coordinator that is told, and does not hang."""
    async with wired(server, mode, retry_for=0.3) as w:
        lease = await w.lock(ttl=10).acquire()
        w.proxy.refuse = True
        await w.proxy.cut()
        with pytest.raises(Unreachable):
            await lease.release()
        lease.check()
        await w.sync.aclose()
        for use in (lease.release, lambda: lease.extend(5), lease.release):
            with pytest.raises(CoordinatorClosed):
                await asyncio.wait_for(use(), 15)
        await w.direct.delete(w.name)


async def test_p5_a_release_behind_a_renewal_that_was_answered(server: EmbeddedServer) -> None:
    """The server was told to keep it for longer than the first deadline, at which the release is given up."""
    async with wired(server, claim=2.0) as w:  # less than the release is repeated for
        holder = await w.elsewhere().acquire()
        waiting = asyncio.create_task(w.lock(ttl=30).acquire())
        await w.queued()
        renewal = w.proxy.on(RENEW, Action.HOLD)
        release = w.proxy.on(RELEASE, Action.HOLD)
        await holder.release()
        lease = await waiting
        assert lease.remaining() < 10, "for less than the whole ttl at first"
        await asyncio.wait_for(renewal.fired.wait(), 15)
        outage = w.proxy.on("HELLO", Action.CUT_BEFORE, times=None)
        releasing = asyncio.create_task(lease.release())
        await asyncio.sleep(0)
        renewal.release.set()
        await asyncio.wait_for(release.fired.wait(), 15)
        await asyncio.sleep(0.01)  # the renewal is answered
        await w.proxy.cut()
        with pytest.raises(LeaseLost):
            await releasing
        outage.cancel()
        async with asyncio.timeout(5), w.elsewhere() as again:
            assert again.fence > lease.fence


@engines
@pytest.mark.parametrize("slow", [False, True])
async def test_p5_a_release_under_way_when_the_client_is_closed(
    server: EmbeddedServer, redis: Redis, engine: Engine, slow: bool
) -> None:
    """It is executed, although nothing else is held that would be given back."""
    async with FaultProxy(server) as proxy:
        client: Any = proxy.client()
        sync = Coordinator(client, exit_timeout=15)
        lease = await AsyncLock(sync, "left", engine=engine).acquire()
        proxy.latency = 0.2 * slow
        releasing = asyncio.create_task(lease.release())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await client.aclose()
        async with asyncio.timeout(15):
            await releasing
        assert not await redis.exists("left")
        await sync.aclose()


async def test_p5_a_cancelled_request_when_the_client_is_closed(make_client: MakeClient, redis: Redis) -> None:
    clients: list[Redis] = []

    async def ask() -> object:
        clients.append(make_client())
        return await AsyncLock(clients[-1], "left", engine="watch").acquire()

    async def check(outcome: Outcome[object]) -> None:
        await clients[-1].aclose()
        if outcome.value is not None:
            await redis.delete("left")

        async def gone() -> bool:
            closing = any(task.get_name() == "redis_sync_aio close" for task in asyncio.all_tasks())
            return not await redis.exists("left") and not closing

        await wait_until(gone, FAST, timeout=15)

    await sweep(ask, check, ways=["task"])


@engines
async def test_p12_tickets_of_an_identity_that_holds_already(
    redis: Redis, other: Coordinator, make_client: MakeClient, engine: Engine
) -> None:
    """Several poll by one identity; those who find that it has the lock leave the queue, and what keeps them alive."""
    async with Coordinator(make_client(), push="never") as polling:
        for make, queue in (
            (lambda sync: AsyncLock(sync, "left", engine=engine), "{left}:"),
            (lambda sync: AsyncSemaphore(sync, "left", limit=1, engine=engine), "{left}:sem:"),
            (lambda sync: AsyncReadWriteLock(sync, "left").write(), "{left}:rw:"),
        ):
            held = await make(other).acquire()
            waiting = [asyncio.create_task(make(polling).acquire(identity="w")) for _ in range(3)]

            async def queued(queue: str = queue) -> bool:
                return await redis.zcard(f"{queue}queue") >= 3

            await wait_until(queued, FAST, timeout=15)
            await held.release()
            leases = await asyncio.gather(*waiting)
            await leases[0].release()
            assert await redis.exists(f"{queue}queue", f"{queue}polls") == 0


# -- the coordinator ---------------------------------------------------------------------------------------


@shared_or_not
async def test_draining_lets_bodies_end_and_grants_nothing(sync: Coordinator, share: bool) -> None:
    """They are renewed meanwhile, and may release by name; the coordinator closes as soon as nothing is held."""
    sem = AsyncSemaphore(sync, "it", limit=1, ttl=3, share=share)
    leave = asyncio.Event()

    async def body() -> str:
        async with sem as lease:
            await leave.wait()
            lease.check()
            await sem.release()
        return "ended"

    running = asyncio.create_task(body())
    await wait_until(sem.locked, FAST, timeout=5)
    waiting = asyncio.create_task(sem.acquire())
    await wait_until(waits(sem), FAST, timeout=5)
    closing = asyncio.create_task(sync.aclose(drain=30))
    async with asyncio.timeout(20):
        with pytest.raises(CoordinatorClosed):
            await waiting
        for refused in (sem, sync.lock("another"), AsyncLock(sync, "a third", share=True)):
            with pytest.raises(CoordinatorClosed, match="is being closed"):
                await refused.acquire()
        await asyncio.sleep(5)  # longer than the ttl
        assert not closing.done()
        leave.set()
        assert await running == "ended"
        await closing
    assert sync.why_closed is not None


@pytest.mark.parametrize("second", [60, 0.2, 0, None], ids=["as long", "shorter", "not", "nobody else"])
async def test_draining_ends_with_what_is_held_or_after_the_shortest_time(
    sync: Coordinator, second: float | None
) -> None:
    """What is held then is closed."""
    leave = asyncio.Event()

    async def body() -> None:
        async with sync.lock("it"):
            await leave.wait()

    running = asyncio.create_task(body())
    await wait_until(sync.lock("it").locked, FAST, timeout=5)
    times = [0.2] if second is None else [60, second]
    all_of_them = [asyncio.create_task(sync.aclose(drain=drain)) for drain in times]
    await asyncio.sleep(0)
    if second == 60:
        leave.set()
    done, _ = await asyncio.wait(all_of_them, timeout=30)
    assert done == set(all_of_them)
    if second == 60:
        await running
    else:
        with pytest.raises(LeaseLost) as lost:
            await running
        assert lost.value.reason == "closed"


@shared_or_not
async def test_draining_an_idle_one_takes_no_time(sync: Coordinator, redis: Redis, share: bool) -> None:
    """A lease that only rests here for the next task is given back, and not waited for."""
    async with sync.lock("it", share=share, linger=3000 if share else 0):
        pass
    async with asyncio.timeout(30):
        await sync.aclose(drain=3000)
    assert not await redis.exists("it")


async def test_a_cancelled_draining_closes(make_client: MakeClient) -> None:
    sync = Coordinator(make_client())
    lease = await sync.lock("it").acquire()
    closing = asyncio.create_task(sync.aclose(drain=60))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert lease.lost
    assert sync.why_closed is not None


@pytest.mark.parametrize("drain", [-1, float("nan"), "5"])
async def test_a_bad_time_closes_nothing(sync: Coordinator, drain: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="drain"):
        await sync.aclose(drain=drain)
    async with sync.lock("it"):
        pass


async def test_a_call_behind_the_end_in_a_cluster(nodes: Nodes) -> None:
    """It opens no connection to a shard that nobody was connected to."""
    async with nodes.client() as client:
        sync = Coordinator(client)
        async with sync.lock(nodes.name_at(0)):
            pass
        await sync.aclose()
        over = asyncio.get_running_loop().create_future()
        sent = now()
        call = Call(sent, sent + 20, over.set_result)
        keys = lock_keys(nodes.name_at(1).encode())
        hub_of(sync).commands.acquire(keys, b"late", call, ttl_ms=9, ticket=b"", poll_ms=0, more=(0,))
        assert not over.done()  # not before `send` has returned
        answer: Call = await asyncio.wait_for(over, 15)
        assert isinstance(answer.error, CoordinatorClosed)
        assert sync.connections == 1


async def test_a_connection_that_is_only_asked_by_is_not_idle(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """P12: gates and statistics use a connection as well."""
    monkeypatch.setattr(hub_module, "IDLE", 5)
    gate = FenceGate(redis, "only asked")
    first = hub_of(redis)
    for fence in range(1, 31):
        await gate.accept(fence)
        assert hub_of(redis) is first, fence
        await asyncio.sleep(1)
