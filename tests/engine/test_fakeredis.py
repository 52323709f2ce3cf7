"""P10: fakeredis in the place of a server, as in users' own unit tests: with lupa by scripts, without it with WATCH.

`test_the_same_without_lupa` runs this file once more, in a process that cannot import lupa.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fakeredis import FakeAsyncRedis, FakeServer
from redis.asyncio import Redis

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncReentrantLock,
    AsyncRobustLock,
    AsyncSemaphore,
    CommandRefused,
    Conflict,
    Coordinator,
    LeaseLost,
    Unreachable,
    transaction,
    watch_retry,
)
from redis_sync_aio.compat import Lock
from redis_sync_aio.errors import PartiallyApplied
from redis_sync_aio.types import Transaction

from ..support.inside import close_implicit, hub_of, tuned

pytestmark = pytest.mark.real

LUPA = sys.modules.get("lupa", ...) is not None and importlib.util.find_spec("lupa") is not None
NAME = "fake"


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer()


@pytest_asyncio.fixture(params=[{}, {"decode_responses": True}, {"protocol": 3}], ids=["plain", "decoded", "resp3"])
async def client(fake: FakeServer, request: pytest.FixtureRequest) -> AsyncIterator[Redis]:
    """A client as a user's test makes it. Its implicit coordinator is closed at the end."""
    async with FakeAsyncRedis(server=fake, **request.param) as client:
        yield client
        await close_implicit(client)


@pytest_asyncio.fixture
async def other(fake: FakeServer) -> AsyncIterator[Coordinator]:
    """Another process, as far as the stand-in for a server can tell."""
    async with FakeAsyncRedis(server=fake) as client, Coordinator(client, push="never") as coordinator:
        yield coordinator


async def number(source: Redis | Transaction, key: str) -> int:
    return int(await source.get(key) or 0)


async def increment(tx: Transaction) -> int:
    count = int(await tx.get("n") or 0) + 1
    await asyncio.sleep(0)
    tx.multi()
    tx.set("n", count)
    tx.incr("total")
    return count


# -- transactions ----------------------------------------------------------------------------------------


async def test_p5_a10_all_tasks_are_cancelled(client: Redis) -> None:
    """As at the end of a loop: a task reads replies; what is sent afterwards is sent all the same."""
    async with tuned(client, push="never", response_timeout=1) as sync:
        lease = await AsyncLock(sync, NAME).acquire()
        under_way = asyncio.create_task(AsyncLock(sync, NAME).statistics())
        while not (reading := [it for it in asyncio.all_tasks() if it.get_name() == "redis_sync_aio replies"]):
            await asyncio.sleep(0)
        for task in (under_way, *reading):
            task.cancel()
        await asyncio.wait_for(lease.release(), 15)
        assert not await AsyncLock(sync, NAME).locked()


async def test_transactions_are_exact_under_contention(client: Redis) -> None:
    """The first two meet: both have read before one of them writes."""
    read = 0
    met = asyncio.Event()

    async def meeting(tx: Transaction) -> int:
        nonlocal read
        await number(tx, "n")
        read += 1
        if read == 2:
            met.set()
        await met.wait()
        return await increment(tx)

    done = await asyncio.gather(*(transaction(client, meeting, "n", attempts=200) for _ in range(20)))
    assert sorted(it.value for it in done) == list(range(1, 21))
    assert sum(it.conflicts for it in done) > 0
    assert await number(client, "n") == await number(client, "total") == 20


async def test_the_other_forms_and_options(client: Redis) -> None:
    @watch_retry(client, "stock:{item}", escalate_after=1)
    async def deduct(tx: Transaction, item: int) -> None:
        left = int(await tx.get(f"stock:{item}") or 0) - 1
        tx.multi()
        tx.set(f"stock:{item}", left)

    await asyncio.gather(*(deduct(7) for _ in range(5)))
    replies = []
    async for attempt in watch_retry(client, "stock:7"):
        async with attempt as tx:
            assert await number(tx, "stock:7") == -5
            tx.multi()
            tx.set("stock:7", 1)
        replies.append(attempt.replies)
    assert replies == [(True,)]
    assert (await transaction(client, increment, "n", exactly_once=True)).replies == (True, 1)


async def test_conflicts_and_errors_of_a_transaction(client: Redis) -> None:
    async def interrupted(tx: Transaction) -> None:
        await tx.get("n")
        await client.incr("n")
        tx.multi()
        tx.set("n", 99)

    with pytest.raises(Conflict):
        await transaction(client, interrupted, "n", attempts=2)
    assert await number(client, "n") == 2

    async def wrong_type(tx: Transaction) -> None:
        await tx.watch()
        tx.multi()
        tx.set("n", 5)
        tx.lpush("n", 1)

    with pytest.raises(PartiallyApplied):
        await transaction(client, wrong_type, "n")

    async def cancelled(tx: Transaction) -> None:
        await tx.get("n")
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await transaction(client, cancelled, "n")
    await client.set("n", 7)  # nobody watches it any more
    assert (await transaction(client, increment, "n")).conflicts == 0


async def test_a_server_that_is_down(client: Redis, fake: FakeServer, other: Coordinator) -> None:
    fake.connected = False
    with pytest.raises(Unreachable):
        await transaction(client, increment, "n", timeout=0.05)
    patience, hub_of(other).retry_for = hub_of(other).retry_for, 0.05
    with pytest.raises(Unreachable):
        await other.lock(NAME).acquire()
    fake.connected, hub_of(other).retry_for = True, patience
    assert (await transaction(client, increment, "n")).value == 1
    async with other.lock(NAME):
        pass


# -- locks -----------------------------------------------------------------------------------------------


async def test_one_at_a_time_in_order(client: Redis, other: Coordinator) -> None:
    order: list[int] = []
    inside = 0

    async def work(number: int) -> None:
        nonlocal inside
        async with AsyncLock(client if number % 2 else other, NAME) as lease:
            inside += 1
            assert inside == 1
            order.append(lease.fence)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*map(work, range(8)))
    assert order == sorted(set(order))


async def test_a_lost_lease_cancels_the_body(client: Redis, other: Coordinator) -> None:
    lock = AsyncLock(client, NAME, ttl=3)

    async def body() -> None:
        async with lock:
            await other.lock(NAME).force_release()
            await asyncio.Event().wait()

    with pytest.raises(LeaseLost, match=NAME):
        await body()
    held = await other.lock(NAME).acquire()
    with pytest.raises(AcquireTimeout):
        await lock.acquire(timeout=0.05)
    await held.release()


async def test_all_primitives(client: Redis, other: Coordinator) -> None:
    async with AsyncSemaphore(client, "permits", limit=2).acquire(weight=2) as lease:
        assert await AsyncSemaphore(other, "permits", limit=2).try_acquire() is None
        assert lease.fence
    again = AsyncReentrantLock(client, "again")
    async with again, again:
        assert await other.lock("again").try_acquire() is None
    async with AsyncMultiLock(client, ["a", "b"]):
        assert await other.lock("b").try_acquire() is None
    assert await client.keys("permits") == await client.keys("[ab]") == []


async def test_read_write_locks_need_scripts(client: Redis, other: Coordinator) -> None:
    book, theirs = AsyncReadWriteLock(client, "book"), AsyncReadWriteLock(other, "book")
    if not LUPA:
        with pytest.raises(CommandRefused, match="a read/write lock needs scripts"):
            await book.write().acquire()
        return
    async with book.read() as reading, theirs.read():
        assert await theirs.write().try_acquire() is None
        assert reading.remaining() > 0
    async with book.write():
        assert await theirs.read().try_acquire() is None
    assert await client.keys("book") == []


async def test_robust_locks_need_scripts(client: Redis) -> None:
    lock = AsyncRobustLock(client, NAME)
    if not LUPA:
        with pytest.raises(CommandRefused, match="the server has no scripts"):
            await lock.acquire()
        return
    async with lock as lease:
        await lease.record({"step": 1})
    assert not await lock.locked()


async def test_the_drop_in(client: Redis, other: Coordinator) -> None:
    lock = client.lock(NAME, timeout=10, lock_class=Lock)
    async with lock:
        assert await lock.extend(5)
        assert await lock.reacquire()
        assert await lock.owned()
        assert await other.lock(NAME).try_acquire() is None
        assert await client.lock(NAME, lock_class=Lock).acquire(blocking_timeout=0.05) is False
    assert await client.lock(NAME).acquire(blocking=False)  # redis-py's own
    assert await lock.acquire(blocking_timeout=0.05) is False


# -- how it says so --------------------------------------------------------------------------------------


async def test_it_says_that_it_polls_unless_that_was_asked_for(
    client: Redis, other: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "redis_sync_aio"):
        async with other.lock(NAME):
            pass
        quiet = len(caplog.messages)
        async with AsyncLock(client, NAME):
            pass
    said = [message.split(" (")[0] for message in caplog.messages]
    polls, watches = "redis_sync_aio polls instead of being woken", "redis_sync_aio uses WATCH instead of scripts"
    assert quiet == (0 if LUPA else 1)
    assert said == ([polls] if LUPA else [watches, polls, watches])


FORK = """
import asyncio, fakeredis, os
from redis_sync_aio import AsyncLock

async def main():
    client = fakeredis.FakeAsyncRedis()
    async with AsyncLock(client, "forked"):
        if not (child := os.fork()):
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    await client.aclose()

asyncio.run(main())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
async def test_a_process_that_uses_it_may_fork() -> None:
    code, output = await _run("-W", "ignore::DeprecationWarning", "-c", FORK)
    assert code == 0
    assert output.startswith("redis_sync_aio polls instead of being woken")
    assert len(output.splitlines()) == 1


WITHOUT_LUPA = """
import sys
sys.modules["lupa"] = None
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.ci
@pytest.mark.skipif(not LUPA, reason="this is that other process")
async def test_the_same_without_lupa() -> None:
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", __file__, "-k", "not fork"]
    code, output = await _run("-c", WITHOUT_LUPA, *options)
    assert code == 0, output


async def _run(*arguments: str) -> tuple[int | None, str]:
    """Run Python, and return exit code and output."""
    kept: dict[str, Any] = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=Path(__file__).parents[2], env=kept,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    return process.returncode, output.decode()
