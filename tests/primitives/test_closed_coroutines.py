"""P5: an acquire whose coroutine is closed, not cancelled, leaves nothing behind, wherever it was.

``close()`` is what the garbage collector calls for a coroutine that nobody awaits any more, and what frameworks call
for one that they give up. GeneratorExit undoes as a cancellation does.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncRedlock,
    AsyncRobustLock,
    Coordinator,
    transaction,
    wait_until,
)
from redis_sync_aio.compat import Lock
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import Transaction

from ..conftest import MakeClient
from ..support.body import FAST, waits
from ..support.primitives import MAKERS, Maker

Acquiring = Coroutine[Any, Any, Any]


@dataclass
class Side:
    """A process: what it acquires, and whether it gets that without waiting."""

    acquire: Callable[[], Acquiring]
    try_acquire: Callable[[], Awaitable[Any]]
    release: Callable[[Any], Awaitable[None]]


Make = Callable[[Coordinator], Side]


def side(primitive: Any) -> Side:
    return Side(primitive.acquire, primitive.try_acquire, lambda lease: lease.release())


def compat(sync: Coordinator) -> Side:
    """As a lock of redis-py's: possession is on the object."""
    lock = Lock(sync.client, "n", timeout=30)

    async def try_acquire() -> object:
        return await lock.acquire(blocking=False) or None

    return Side(lock.acquire, try_acquire, lambda _: lock.release())


def side_of(make: Maker, sync: Coordinator) -> Side:
    return side(make(sync, "n"))


MAKES: dict[str, Make] = {
    **{label: partial(side_of, make) for label, make in MAKERS.items() if label not in ("reader", "redlock")},
    "multi-lock of several slots": lambda sync: side(AsyncMultiLock(sync, ["a", "b", "c"])),
    "redis-py's lock": compat,
}
each = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


def step(acquiring: Acquiring) -> asyncio.Future[Any] | None:
    """Let it run until it waits; return what for. Raises StopIteration, with its result, when it is over."""
    future: Any = acquiring.send(None)
    if future is not None:
        future._asyncio_future_blocking = False  # as a task does that takes it
    return future  # type: ignore[no-any-return]


async def over(future: asyncio.Future[Any] | None) -> None:
    """Wait until what it waits for is there."""
    if future is None:
        await asyncio.sleep(0)
    else:
        async with asyncio.timeout(5):
            await asyncio.wait([future])


async def check_free(there: Side) -> None:
    """Nobody holds it, and nobody is in the queue: else another process would not get it without waiting."""
    got: list[Any] = []

    async def free() -> bool:
        got.append(await there.try_acquire())
        return got[-1] is not None

    await wait_until(free, FAST, timeout=5)
    await there.release(got[-1])


@each
@pytest.mark.parametrize("push", ["auto", "never"])
async def test_closed_at_any_step(redis: Redis, make_client: MakeClient, make: Make, push: Any) -> None:
    """Uncontended: before the answer is there, and when it is and the coroutine has not run since."""
    async with Coordinator(make_client(), push=push) as sync, Coordinator(redis) as other:
        here, there = make(sync), make(other)
        for steps in range(6):
            for answered in (False, True):
                acquiring = here.acquire()
                try:
                    future = step(acquiring)
                    for _ in range(steps):
                        await over(future)
                        future = step(acquiring)
                    if answered:
                        await over(future)
                except StopIteration as end:
                    await here.release(end.value)
                acquiring.close()
                await check_free(there)


@each
@pytest.mark.parametrize("granted", [False, True])
async def test_closed_while_it_waits(redis: Redis, make_client: MakeClient, make: Make, granted: bool) -> None:
    """In the queue, and when it was handed over and the coroutine has not run since."""
    async with Coordinator(redis) as sync, Coordinator(make_client()) as other:
        here, there = make(sync), make(other)
        held = await there.try_acquire()
        acquiring = here.acquire()
        future = step(acquiring)
        for _ in range(4):  # it tries, and then waits
            if future is not None and not await answered_soon(future):
                break
            await over(future)
            future = step(acquiring)
        if granted:
            await there.release(held)
            await over(future)
            acquiring.close()
        else:
            acquiring.close()
            await there.release(held)
        await check_free(there)


async def answered_soon(future: asyncio.Future[Any]) -> bool:
    """Return whether it is the answer of the server, not that of a holder."""
    done, _ = await asyncio.wait([future], timeout=0.2)
    return bool(done)


async def test_collected_while_it_waits(sync: Coordinator, other: Coordinator) -> None:
    """Nobody has it any more: the garbage collector closes it, here or in another thread."""
    here, there = AsyncLock(sync, "n"), AsyncLock(other, "n")
    for elsewhere in (False, True):
        held = await there.acquire()
        acquiring = [here.acquire()]
        step(acquiring[0])
        await wait_until(waits(there), FAST, timeout=5)
        if elsewhere:
            thread = threading.Thread(target=acquiring.clear)
            thread.start()
            thread.join()
        else:
            acquiring.clear()
        await held.release()
        await check_free(side(there))


TRANSACTIONS: dict[str, dict[str, Any]] = {"plain": {}, "with a marker": {"exactly_once": True}}


# In another thread, redis-py misses its event loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("options", TRANSACTIONS.values(), ids=TRANSACTIONS)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["closed", "collected in another thread"])
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
                await over(future)
                future = step(running[0])
            steps += 1
        except StopIteration:
            assert steps >= 4  # it connects, reads, executes, and gives back
            return
        if elsewhere:
            thread = threading.Thread(target=running.clear)
            thread.start()
            thread.join()
        else:
            running.pop().close()

        async def usable(client: Any = client) -> bool:
            try:
                return bool(await client.ping())
            except RedisConnectionError:  # of redis-py before 7; later a MaxConnectionsError
                return False

        await wait_until(usable, FAST, timeout=5)


async def test_what_ends_after_that_is_no_unretrieved_error(
    sync: Coordinator, other: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    """A release, and the adoption of a robust lock's record, go on; nobody is there to hear of their errors."""
    here, robust = AsyncLock(sync, "n"), AsyncRobustLock(sync, "r")
    lease = await here.acquire()
    assert await AsyncLock(other, "n").force_release()
    acquiring = robust.acquire()
    await over(step(acquiring))
    for closed in (acquiring, lease.release()):
        step(closed)
        closed.close()
    await check_free(side(AsyncRobustLock(other, "r")))
    assert lease.lost
    gc.collect()
    assert "never retrieved" not in caplog.text


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


@pytest.fixture(scope="module")
def three() -> Iterator[list[EmbeddedServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(EmbeddedServer()) for _ in range(3)]


@pytest_asyncio.fixture
async def redlocks(three: list[EmbeddedServer]) -> AsyncIterator[list[AsyncRedlock]]:
    """One lock on three servers, as two processes have it."""
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(2):
            clients = [await stack.enter_async_context(Redis.from_url(server.url)) for server in three]
            made.append(
                AsyncRedlock([await stack.enter_async_context(Coordinator(client)) for client in clients], "everywhere")
            )
        yield made


async def test_a_redlock_that_is_closed_at_any_step(redlocks: list[AsyncRedlock]) -> None:
    """Free, and held by another one."""
    here, there = redlocks
    for held in (False, True):
        for steps in range(8):
            lease = await there.acquire() if held else None
            acquiring = here.acquire()
            try:
                future = step(acquiring)
                for _ in range(steps):
                    if future is not None and not await answered_soon(future):
                        break
                    await over(future)
                    future = step(acquiring)
            except StopIteration as end:
                await end.value.release()
            acquiring.close()
            if lease is not None:
                await lease.release()
            await check_free(side(there))
