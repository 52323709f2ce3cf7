"""P5: an acquire whose coroutine is closed, not cancelled, leaves nothing behind, wherever it was.

``close()`` is what the garbage collector calls for a coroutine that nobody awaits any more, and what frameworks call
for one that they give up. GeneratorExit undoes as a cancellation does.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from redis_sync_aio import AsyncLock, AsyncMultiLock, Coordinator, transaction, wait_until
from redis_sync_aio.compat import Lock
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import Push, Transaction

from ..conftest import MakeClient
from ..support.body import FAST, waits
from ..support.primitives import ALONE, Primitive, each

Acquiring = Coroutine[Any, Any, Any]
Process = list[Coordinator]


class Compatible:
    """A lock with redis-py's interface: the object has what it acquires."""

    def __init__(self, syncs: Sequence[Coordinator], name: str) -> None:
        self._lock = Lock(syncs[0].client, name, timeout=30)

    def acquire(self) -> Any:
        return self._lock.acquire()

    async def try_acquire(self) -> object:
        return await self._lock.acquire(blocking=False) or None

    async def release(self) -> None:
        await self._lock.release()


EACH = (*ALONE, Primitive("redis-py's lock", Compatible, servers=3))


@pytest_asyncio.fixture(params=["auto", "never"])
async def processes(
    request: pytest.FixtureRequest, make_client: MakeClient, redis: Redis, independent_servers: list[EmbeddedServer]
) -> AsyncIterator[list[Process]]:
    """Two, each with coordinators for three servers. One of them is notified, or polls."""
    async with AsyncExitStack() as stack:

        async def process(push: Push) -> Process:
            clients = [make_client()]
            clients += [await stack.enter_async_context(server.client()) for server in independent_servers]
            return [await stack.enter_async_context(Coordinator(client, push=push)) for client in clients]

        found = [await process(request.param), await process("auto")]
        for sync in found[0][1:]:
            client: Any = sync.client
            await client.flushall()
        yield found


def step(acquiring: Acquiring) -> asyncio.Future[Any] | None:
    """Let it run until it waits; return what for. Raises StopIteration, with its result, when it has ended."""
    future: Any = acquiring.send(None)
    if future is not None:
        future._asyncio_future_blocking = False  # as a task does that takes it
    return future  # type: ignore[no-any-return]


async def answered(future: asyncio.Future[Any] | None) -> bool:
    """Wait for the answer of a server; return False if it waits for a holder instead."""
    if future is None:
        await asyncio.sleep(0)
        return True
    done, _ = await asyncio.wait([future], timeout=0.2)
    return bool(done)


async def release(primitive: Any, got: Any) -> None:
    await (primitive if got is True else got).release()


async def check_free(there: Any) -> None:
    """Nobody holds it, and nobody is in the queue: else another process would not get it without waiting."""
    got: list[Any] = []

    async def free() -> bool:
        got.append(await there.try_acquire())
        return got[-1] is not None

    await wait_until(free, FAST, timeout=5)
    await release(there, got[-1])


@each(EACH)
@pytest.mark.parametrize("at", ["its question", "its answer", "its place", "its grant"])
async def test_closed_at_any_step(processes: list[Process], primitive: Primitive, at: str) -> None:
    """Before an answer is there, and when it is and the coroutine has not run since; the same of a hand-over."""
    here, there = (primitive.make(process if primitive.servers > 1 else process[0]) for process in processes)
    for steps in range(7):
        held = await there.try_acquire() if at in ("its place", "its grant") else None
        acquiring = here.acquire()
        try:
            future = step(acquiring)
            for _ in range(steps):
                if not await answered(future):
                    break
                future = step(acquiring)
            if at == "its answer":
                await answered(future)
            if at == "its grant":
                await release(there, held)
                await answered(future)
                held = None
        except StopIteration as end:
            await release(here, end.value)
        acquiring.close()
        if held is not None:
            await release(there, held)
        await check_free(there)


async def test_collected_while_it_waits(sync: Coordinator, other: Coordinator) -> None:
    """The garbage collector closes it, here or in another thread."""
    here, there = AsyncLock(sync, "n"), AsyncLock(other, "n")
    for elsewhere in (False, True):
        held = await there.acquire()
        acquiring = [here.acquire()]
        step(acquiring[0])
        await wait_until(waits(there), FAST, timeout=5)
        clear(acquiring, elsewhere)
        await held.release()
        await check_free(there)


def clear(running: list[Any], elsewhere: bool) -> None:
    """Drop the last references, here or in another thread."""
    if elsewhere:
        thread = threading.Thread(target=running.clear)
        thread.start()
        thread.join()
    else:
        running.clear()


# In another thread, redis-py misses its event loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("options", [{}, {"exactly_once": True}], ids=["plain", "with a marker"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "in another thread"])
async def test_a_transaction_at_any_step(make_client: MakeClient, options: dict[str, Any], elsewhere: bool) -> None:
    """While it connects, reads, and executes: its connection, the only one of the pool, goes back."""
    steps = 0
    while True:
        client: Any = make_client(max_connections=1)

        async def increment(tx: Transaction) -> None:
            value = int(await tx.get("n") or 0)
            tx.multi()
            tx.set("n", value + 1)

        running = [transaction(client, increment, "n", **options)]
        try:
            future = step(running[0])
            for _ in range(steps):
                assert await answered(future)
                future = step(running[0])
            steps += 1
        except StopIteration:
            assert steps >= 4  # it connects, reads, executes, and gives back
            return
        clear(running, elsewhere)

        async def usable(client: Any = client) -> bool:
            try:
                return bool(await client.ping())
            except RedisConnectionError:  # of redis-py before 7; later a MaxConnectionsError
                return False

        await wait_until(usable, FAST, timeout=5)


# Of transports and connections whose loop nobody ended.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_collected_after_its_loop(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop was closed by hand: there is nothing to undo by, and nothing goes wrong on the way."""
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda it: raised.append(it.exc_value))
    client = Redis.from_url(server.url)
    acquiring: list[Acquiring] = []

    async def begin(share: bool) -> None:
        lock = AsyncLock(client, f"loop {share}", share=share)
        assert not await lock.locked()
        acquiring.extend([lock.acquire(), AsyncMultiLock(client, [f"x {share}", "y"]).acquire()])
        for it in acquiring:
            step(it)

    for share in (False, True):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(begin(share))
        loop.close()
        acquiring.clear()
        gc.collect()
    assert not raised

    async def end() -> None:  # the next use of the client closes the connection of the last loop
        assert not await AsyncLock(client, "end").locked()
        await client.aclose()

    asyncio.run(end())
    gc.collect()  # here, and not in a test to come: that loop's transport says that nobody closed it
