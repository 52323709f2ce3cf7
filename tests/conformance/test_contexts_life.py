"""P12: coordinators and clients that end while something waits or is held; implicit coordinators.

Waiters and holders get a clear error immediately, what was held is free again, and no task or connection is left.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import anyio
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, AsyncSemaphore, Coordinator, LeaseLost, SyncError, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed
from redis_sync_aio.types import BaseLease, Client

from ..conftest import MakeClient
from ..support.body import FAST, assert_undisturbed, for_ever, lost_in, waits
from ..support.inside import close_implicit, hub_module, hub_of, hubs
from ..support.primitives import Exclusive, Primitive, holder
from ..support.wired import wired

NAME = "life"


@pytest_asyncio.fixture
async def observer(make_client: MakeClient) -> Redis:
    """Looks at the server, whatever becomes of the client under test."""
    return make_client()


@pytest_asyncio.fixture(autouse=True)
async def nothing_left(kind: Primitive, no_task_left: None, observer: Redis) -> AsyncIterator[None]:
    """P12: in the end there are no tasks of ours, no queue, and no implicit coordinator that is closed."""
    yield
    assert await observer.exists(kind.queue(NAME)) == 0
    assert all(found.why_closed is None for found in hubs.values())


def our_tasks() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if "redis_sync_aio" in task.get_name()]


async def no_task_of_ours() -> None:
    await wait_until(lambda: our_tasks() == [], FAST, timeout=5)


Connections = Callable[[int], Awaitable[None]]


@pytest_asyncio.fixture
async def connected(observer: Redis) -> Connections:
    """Wait until there are so many more connections than before the test."""

    async def count() -> int:
        return len([it for it in await observer.client_list() if "S" not in it["flags"]])  # replicas are none

    async def more(number: int) -> None:
        async def so_many() -> bool:
            return await count() == before + number

        await wait_until(so_many, FAST, timeout=5)

    before = await count()
    return more


def overrule(lock: Exclusive) -> Awaitable[object]:
    """Run the command of each kind that changes something for everybody."""
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


async def waiting_and_holding(lock: Exclusive) -> tuple[asyncio.Task[object], list[asyncio.Task[object]]]:
    """Start a task whose body holds the lock, and two that wait for it."""
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
    await asyncio.wait([holding, *waiting], timeout=5)
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


@pytest.mark.parametrize("use", USES)
async def test_use_after_close(kind: Primitive, sync: Coordinator, client: Client, use: str) -> None:
    """Every method says that the coordinator is closed; closing again is no error, entering again is one."""
    unused = Coordinator(client)
    assert (unused.connection_error, unused.connections, unused.why_closed) == (None, 0, None)
    async with kind.make(sync, NAME):
        pass
    for closed in (sync, unused):
        await asyncio.gather(closed.aclose(), closed.aclose())
        await closed.aclose()
        with pytest.raises(CoordinatorClosed):
            await USES[use](kind.make(closed, NAME))
        with pytest.raises(CoordinatorClosed):
            async with closed:
                pass


async def test_close_inside_the_body(kind: Primitive, sync: Coordinator, observer: Redis) -> None:
    """P7: the body that closes is cancelled itself, when the closing is done, and nothing is left in its task."""
    lease, error = await lost_in(kind.make(sync, NAME).acquire(), lambda _: sync.aclose())
    assert error.reason == "closed"
    assert not await kind.held(observer, NAME)
    assert lease.lost


@pytest.mark.parametrize("how", ["task", "anyio", "anyio-group", "asyncio", "twice"])
async def test_a_cancelled_close_is_finished(kind: Primitive, sync: Coordinator, observer: Redis, how: str) -> None:
    """P5: and the cancellation belongs to the task that asked for it."""
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


@pytest.mark.parametrize("mode", ["link", "plain"])
@pytest.mark.parametrize("server_is", ["up", "up, nothing held", "silent"])
@pytest.mark.parametrize("use", UNDER_WAY)
async def test_close_with_a_command_in_flight(
    kind: Primitive, server: EmbeddedServer, server_is: str, mode: str, use: str
) -> None:
    """A task that waits for an answer when the coordinator is closed gets it, or an error; nobody hangs."""
    async with wired(server, mode, kind=kind) as w:
        lock = w.lock()
        lease = await lock.acquire()
        if server_is == "silent":
            w.proxy.black_hole = True
        elif server_is != "up":
            await lease.release()

        async def ask() -> None:
            with suppress(SyncError):
                await UNDER_WAY[use](lock, lease)

        asking = asyncio.create_task(ask())
        await asyncio.sleep(0)
        await w.sync.aclose()
        await asyncio.wait_for(asking, 20)


# -- aclose() of a client ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["link", "link-resp2-decoded", "link-no-socket-timeout", "polling"], indirect=True)
async def test_e4_client_closed_while_waiting_and_holding(
    kind: Primitive, sync: Coordinator, connected: Connections, client: Redis, observer: Redis
) -> None:
    """Like aclose(), and the error names the client; no connection is left open, not even by redis-py's pool."""
    holding, waiting = await waiting_and_holding(kind.make(sync, NAME))
    await client.aclose()
    await assert_told(holding, waiting, "client")
    await no_task_of_ours()
    with pytest.raises(CoordinatorClosed, match="client"):
        await kind.make(sync, NAME).acquire()
    await sync.aclose()
    assert not await kind.held(observer, NAME)
    assert await kind.empty(observer, NAME)
    await connected(-1)  # the client's


async def test_e4_client_of_an_implicit_coordinator_closed(
    kind: Primitive, redis: Redis, connected: Connections, observer: Redis
) -> None:
    """Waiters and bodies are told, nothing runs on; the client works again when redis-py's does."""
    lock = kind.make(redis, NAME)
    holding, waiting = await waiting_and_holding(lock)
    await redis.aclose()
    await assert_told(holding, waiting, "client")
    await no_task_of_ours()
    await connected(-1)
    await observer.delete(*kind.keys(NAME).all)
    async with lock:
        assert await kind.held(redis, NAME)
    await close_implicit(redis)


async def test_e4_server_never_there(kind: Primitive) -> None:
    """Waiting for the first connection when the client is closed, or the time is up: no task is left."""
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


# -- implicit coordinators ---------------------------------------------------------------------------------


async def test_one_implicit_coordinator_for_each_client(kind: Primitive, redis: Redis, connected: Connections) -> None:
    """P9: all locks of a client share one connection, next to the client's pool."""
    locks = [kind.make(redis, f"{NAME}{n}") for n in range(5)]
    leases = await asyncio.gather(*(lock.acquire() for lock in locks))
    await connected(1)
    for lease in leases:
        await lease.release()
    assert hub_of(redis) is locks[0]._hub
    await close_implicit(redis)
    await connected(0)


async def test_an_idle_implicit_coordinator_closes_and_starts_again(
    kind: Primitive, redis: Redis, connected: Connections
) -> None:
    """It closes its connection when nothing was used for a while: short uses and statistics() keep it."""
    lock = kind.make(redis, NAME)
    for _ in range(2):
        first = hub_of(redis)
        for pause in (0.5, 0.9, 0.99):
            async with lock:
                pass
            await asyncio.sleep(pause * hub_module.IDLE)
            assert await holder(lock) is None
            assert hub_of(redis) is first
        lease = await lock.acquire()
        await asyncio.sleep(3 * hub_module.IDLE)
        lease.check()
        assert hub_of(redis) is first  # held: not idle
        await lease.release()
        await asyncio.sleep(2.1 * hub_module.IDLE)
        assert not hubs
        await connected(0)
        await no_task_of_ours()
        with pytest.raises(CoordinatorClosed):
            first.check()


async def test_uses_that_meet_the_end_of_an_idle_coordinator(
    kind: Primitive, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A use never meets the closing."""
    monkeypatch.setattr(hub_module, "IDLE", 0.01)
    lock = kind.make(redis, NAME)
    for pause in (0.0090, 0.0095, 0.0099, 0.01, 0.0101, 0.0105, 0.02):
        async with lock:
            pass
        await asyncio.sleep(pause)
        assert await holder(lock) is None
        await asyncio.sleep(pause)
    await asyncio.sleep(1)
    assert not hubs
    await no_task_of_ours()


@pytest.mark.parametrize("timeout", [0, 0.1])
async def test_a_name_that_could_not_be_had_is_forgotten(
    kind: Primitive, redis: Redis, sync: Coordinator, timeout: float
) -> None:
    """The coordinator is idle then, and closes."""
    held = await kind.make(sync, NAME).acquire()
    with pytest.raises(AcquireTimeout) as caught:
        await kind.make(redis, NAME).acquire(timeout=timeout)
    assert 0 < (caught.value.remaining or 0) <= 30.05  # keys may be younger than virtual time
    coordinator = hub_of(redis)
    await wait_until(lambda: not (coordinator.resources or coordinator.acquisitions), FAST, timeout=5)
    await held.release()


@pytest.mark.real
@pytest.mark.parametrize("ends", ["idle", "held", "waiting"])
def test_nothing_is_pending_when_the_loop_closes(
    kind: Primitive, server: EmbeddedServer, ends: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """asyncio.run() with an implicit coordinator: the lock is released at the end, and nothing complains."""

    async def main() -> None:
        client = server.client()
        lock = kind.make(client, NAME)
        lease = await lock.acquire()
        if ends == "idle":
            await lease.release()
        elif ends == "waiting":
            task = asyncio.create_task(lock.acquire())
            await wait_until(waits(lock), FAST, timeout=5)
            assert not task.done()
        if ends != "held":
            await client.aclose(close_connection_pool=False)

    async def look() -> bool:
        async with server.client() as client:
            return await kind.empty(client, NAME)

    with suppress(CoordinatorClosed):
        asyncio.run(main())
    gc.collect()
    assert asyncio.run(look())
    assert capfd.readouterr().err == ""
