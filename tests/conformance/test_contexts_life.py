"""P12, FAULTS E4: coordinators and clients that end while something waits or is held; implicit coordinators.

Waiters and holders get a clear error immediately, what was held is free again, and no task or connection is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal

import anyio
import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncSemaphore, Coordinator, LeaseLost, SyncError, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed
from redis_sync_aio.types import BaseLease

from ..conftest import MakeClient
from ..support.body import FAST, assert_undisturbed, for_ever, lost_in, waits
from ..support.contexts import NAME, connections, our_tasks, same
from ..support.contexts import nothing_left as nothing_left
from ..support.contexts import observer as observer
from ..support.factories import Exclusive, Kind
from ..support.inside import close_implicit, hub_of

pytestmark = pytest.mark.timing


def overrule(lock: Exclusive) -> Awaitable[object]:
    """The command of each kind that changes something for everybody."""
    return lock.resize(1) if isinstance(lock, AsyncSemaphore) else lock.force_release()


USES: dict[str, Callable[[Exclusive], Awaitable[object]]] = {
    "acquire": lambda lock: lock.acquire(),
    "acquire-timeout": lambda lock: lock.acquire(timeout=1),
    "try_acquire": lambda lock: lock.try_acquire(),
    "hold": lambda lock: lock.acquire().__aenter__(),
    "lock": lambda lock: lock.__aenter__(),
    "release": lambda lock: lock.release(),
    "release-identity": lambda lock: lock.release(identity="worker-7"),
    "overrule": lambda lock: overrule(lock),
    "locked": lambda lock: lock.locked(),
    "statistics": lambda lock: lock.statistics(),
}


async def waiting_and_holding(kind: Kind, sync: Coordinator) -> tuple[asyncio.Task[object], list[asyncio.Task[object]]]:
    """A task whose body holds the lock, and two that wait for it."""
    lock = kind.make(sync, NAME)
    running = asyncio.Event()

    async def hold() -> object:
        async def body(_: object) -> None:
            running.set()
            await for_ever()

        return await lost_in(lock.acquire(), body)

    async def wait(timeout: float | None) -> object:
        return await lock.acquire(timeout=timeout)

    holding = asyncio.create_task(hold())
    await running.wait()
    waiting = [asyncio.create_task(wait(None)), asyncio.create_task(wait(30))]
    await wait_until(waits(lock, 2), FAST, timeout=5)
    return holding, waiting


async def assert_told(holding: asyncio.Task[object], waiting: list[asyncio.Task[object]], word: str) -> None:
    """Bodies lose their lease because it was closed, waiters are told so."""
    await asyncio.wait([holding, *waiting], timeout=1)
    result = holding.result()
    assert isinstance(result, tuple)
    assert isinstance(result[1], LeaseLost)
    assert result[1].reason == "closed"
    for task in waiting:
        error = task.exception()
        assert type(error) is CoordinatorClosed
        assert word in str(error)
        assert repr(NAME) in str(error)
    assert len({id(task.exception()) for task in waiting}) == len(waiting), "each its own: notes and tracebacks are"


# -- aclose() of a coordinator -----------------------------------------------------------------------------


async def test_p12_close_while_waiting_and_holding(kind: Kind, sync: Coordinator, observer: Redis) -> None:
    """P12: waiters get CoordinatorClosed, bodies LeaseLost "closed", and the lock is free when aclose() returns."""
    holding, waiting = await waiting_and_holding(kind, sync)
    await sync.aclose()
    assert await kind.empty(observer, NAME)
    assert our_tasks() == []
    await assert_told(holding, waiting, "closed")
    assert hub_of(sync).resources == {}


async def test_p12_close_hands_over(kind: Kind, sync: Coordinator, observer: Redis) -> None:
    """P2, P12: a waiter elsewhere has the lock when the holder's coordinator is closed, before any waiter of it."""
    await kind.make(sync, NAME).acquire()
    own = asyncio.create_task(kind.make(sync, NAME).acquire())
    await wait_until(waits(kind.make(sync, NAME)), FAST, timeout=5)
    async with Coordinator(observer) as other:
        theirs = asyncio.create_task(kind.make(other, NAME).acquire())
        await wait_until(waits(kind.make(other, NAME), 1 if kind.share else 2), FAST, timeout=5)
        await sync.aclose()
        lease = await asyncio.wait_for(theirs, 15)
        assert await kind.token(observer, NAME) == lease._grant.wire_token
        await lease.release()
    with pytest.raises(CoordinatorClosed):
        await own


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("used_before", [False, True])
async def test_p12_use_after_close(kind: Kind, sync: Coordinator, use: str, used_before: bool) -> None:
    """P12: every method says that the coordinator is closed, also of a lock that was used before."""
    lock = kind.make(sync, NAME)
    if used_before:
        async with lock:
            pass
    await sync.aclose()
    with pytest.raises(CoordinatorClosed):
        await USES[use](lock)


async def test_p12_close_again(kind: Kind, sync: Coordinator) -> None:
    """Twice, at the same time, and never used: no error; but a closed one is not entered again."""
    async with kind.make(sync, NAME):
        pass
    await asyncio.gather(sync.aclose(), sync.aclose())
    await sync.aclose()
    with pytest.raises(CoordinatorClosed):
        async with sync:
            pass


async def test_p12_close_never_used(kind: Kind, client: Redis) -> None:
    sync = Coordinator(client)
    assert (sync.connection_error, sync.connections, sync.why_closed) == (None, 0, None)
    await sync.aclose()
    with pytest.raises(CoordinatorClosed):
        await kind.make(sync, NAME).acquire()


async def test_p12_leases_after_close(kind: Kind, sync: Coordinator) -> None:
    """P6: a lease without a body knows it, too; a released one stays released."""
    released = await kind.make(sync, NAME).acquire()
    await released.release()
    lease = await kind.make(sync, NAME).acquire()
    await sync.aclose()
    await released.release()
    assert lease.lost
    for ask in (lease.release, lambda: lease.extend(1)):
        with pytest.raises(LeaseLost) as caught:
            await ask()
        assert caught.value.reason == "closed"


async def test_p7_close_inside_the_body(kind: Kind, sync: Coordinator, observer: Redis) -> None:
    """P7: the body that closes is cancelled itself, when the closing is done, and nothing is left in its task."""
    lease, error = await lost_in(kind.make(sync, NAME).acquire(), lambda _: sync.aclose())
    assert error.reason == "closed"
    assert not await kind.held(observer, NAME)
    assert lease.lost


@pytest.mark.parametrize("how", ["task", "anyio", "anyio-group", "asyncio", "twice"])
async def test_p5_close_cancelled(kind: Kind, sync: Coordinator, observer: Redis, how: str) -> None:
    """P5: the closing goes on, and the cancellation belongs to the task that asked for it."""
    await kind.make(sync, NAME).acquire()
    loop = asyncio.get_running_loop()
    if how == "anyio":
        with anyio.CancelScope() as scope:
            loop.call_soon(scope.cancel)
            await sync.aclose()
        assert scope.cancelled_caught
    elif how == "anyio-group":
        async with anyio.create_task_group() as group:
            group.start_soon(sync.aclose)
            await asyncio.sleep(0)
            group.cancel_scope.cancel()
    elif how == "asyncio":
        with pytest.raises(TimeoutError):  # noqa: PT012
            async with asyncio.timeout(60) as timeout:
                timeout.reschedule(0)
                await sync.aclose()
    else:
        closing = asyncio.create_task(sync.aclose())
        for _ in range(2 if how == "twice" else 1):
            await asyncio.sleep(0)
            closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    assert not await kind.held(observer, NAME)
    assert our_tasks() == []
    await assert_undisturbed()


UNDER_WAY: dict[str, Callable[[Exclusive, BaseLease], Awaitable[object]]] = {
    "statistics": lambda lock, _: lock.statistics(),
    "release-identity": lambda lock, _: lock.release(identity="worker-7"),
    "overrule": lambda lock, _: overrule(lock),
    "extend": lambda _, lease: lease.extend(1),
    "lease.release": lambda _, lease: lease.release(),
    "try_acquire": lambda lock, _: lock.try_acquire(),
}


@pytest.mark.parametrize("push", ["auto", "never"])
@pytest.mark.parametrize("server_is", ["up", "up, nothing held", "silent"])
@pytest.mark.parametrize("use", UNDER_WAY)
async def test_p12_close_with_a_command_under_way(
    kind: Kind, server_is: str, push: Literal["auto", "never"], use: str
) -> None:
    """P12: a task that waits for an answer when the coordinator is closed gets it, or an error; nobody hangs."""
    async with EmbeddedServer(port=0) as server, server.client() as client:
        sync = Coordinator(client, push=push, response_timeout=0.1)
        lock = kind.make(sync, NAME)
        lease = await lock.acquire()
        if server_is == "silent":
            server.pause()
        elif server_is != "up":
            await lease.release()

        async def ask() -> None:
            with suppress(SyncError):
                await UNDER_WAY[use](lock, lease)

        asking = asyncio.create_task(ask())
        await asyncio.sleep(0)
        await sync.aclose()
        done, _ = await asyncio.wait([asking], timeout=20)
        if server_is == "silent":
            server.resume()
        asking.cancel()
        await asyncio.wait([asking])
        assert done, "it hangs"
        asking.result()


# -- aclose() of a client ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["link", "link-resp2-decoded", "link-no-socket-timeout", "polling"], indirect=True)
async def test_e4_client_closed_while_waiting_and_holding(
    kind: Kind, sync: Coordinator, client: Redis, observer: Redis
) -> None:
    """E4: like aclose(), and the error names the client; no connection is left open, not even by redis-py's pool."""
    holding, waiting = await waiting_and_holding(kind, sync)
    await client.aclose()
    await assert_told(holding, waiting, "client")
    await wait_until(lambda: our_tasks() == [], FAST, timeout=5)
    with pytest.raises(CoordinatorClosed, match="client"):
        await kind.make(sync, NAME).acquire()
    await sync.aclose()
    assert not await kind.held(observer, NAME)
    assert await kind.empty(observer, NAME)
    await wait_until(lambda: same(connections(observer), 0), FAST, timeout=5)


async def test_e4_client_of_an_implicit_coordinator_closed(kind: Kind, redis: Redis, observer: Redis) -> None:
    """E4: waiters and bodies are told, nothing runs on; the client works again when redis-py's does."""
    lock = kind.make(redis, NAME)
    running = asyncio.Event()

    async def body(_: object) -> None:
        running.set()
        await for_ever()

    losing = asyncio.create_task(lost_in(lock.acquire(), body))
    await running.wait()
    waiting = asyncio.create_task(lock.acquire())
    await wait_until(waits(lock), FAST, timeout=5)
    await redis.aclose()
    _, error = await asyncio.wait_for(losing, 15)
    assert error.reason == "closed"
    with pytest.raises(CoordinatorClosed, match="client"):
        await waiting
    await wait_until(lambda: our_tasks() == [], FAST, timeout=5)
    await wait_until(lambda: same(connections(observer), 0), FAST, timeout=5)
    await observer.delete(*kind.keys(NAME).all)
    async with lock:
        assert await kind.held(redis, NAME)
    await close_implicit(redis)


async def test_e4_server_never_there(kind: Kind, make_client: MakeClient) -> None:
    """E4, P12: waiting for the first connection when the client is closed, or the time is up: no task is left."""
    client = Redis(unix_socket_path="/nowhere/at.all")
    async with Coordinator(client, retry_for=0.1) as sync:
        with pytest.raises(Unreachable):
            await kind.make(sync, NAME).acquire(timeout=0.05)
    assert our_tasks() == []
    async with Coordinator(client, retry_for=60) as sync:
        acquiring = asyncio.create_task(kind.make(sync, NAME).acquire())
        await asyncio.sleep(0)
    with pytest.raises(CoordinatorClosed):
        await acquiring
    assert our_tasks() == []
    await client.aclose()
