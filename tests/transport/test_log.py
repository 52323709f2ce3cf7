"""The log: one line with structured facts for each loss, each outage that lasts, each replica."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.sentinel import Sentinel

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncReentrantLock,
    AsyncSemaphore,
    CommandRefused,
    Coordinator,
    Lease,
    LeaseLost,
    Unreachable,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import FaultProxy

from ..support.body import FAST
from ..support.inside import now

NAME = "told"


class Told:
    """What was logged."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def __call__(self, event: str) -> list[Any]:
        return [record for record in self._caplog.records if getattr(record, "event", None) == event]

    def forget(self) -> None:
        self._caplog.clear()

    def all(self) -> list[str]:
        return [str(getattr(record, "event", record.getMessage())) for record in self._caplog.records]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Told]:
    with caplog.at_level(logging.INFO, "redis_sync_aio"):
        yield Told(caplog)


LOCKS: dict[str, Callable[[Coordinator, str], Any]] = {
    "lock": lambda sync, name: AsyncLock(sync, name, ttl=6),
    "shared lock": lambda sync, name: AsyncLock(sync, name, ttl=6, share=True),
    "semaphore": lambda sync, name: AsyncSemaphore(sync, name, limit=2, ttl=6),
    "reader": lambda sync, name: AsyncReadWriteLock(sync, name, ttl=6).read(),
    "writer": lambda sync, name: AsyncReadWriteLock(sync, name, ttl=6, share=True).write(),
    "reentrant": lambda sync, name: AsyncReentrantLock(sync, name, ttl=6),
    "several": lambda sync, name: AsyncMultiLock(sync, [name, f"{name}, another"], ttl=6),
}


@pytest.mark.parametrize("make", LOCKS.values(), ids=LOCKS)
async def test_a_lease_whose_key_is_deleted(
    sync: Coordinator, redis: Redis, told: Told, make: Callable[[Coordinator, str], Any]
) -> None:
    """One line names lock, fence, reason and time; the error has the same facts, also when it was pickled."""
    with pytest.raises(LeaseLost) as caught:  # noqa: PT012
        async with make(sync, NAME) as lease:
            await redis.flushall()
            await asyncio.sleep(60)
    error = caught.value
    (record,) = told("lease_lost")
    assert record.levelname == "WARNING"
    assert (record.lock, record.reason, record.fence, record.tasks) == (error.name, "expired", error.fence, 1)
    assert error.held_for == pytest.approx(record.held, abs=0.5)
    assert error.fence is not None
    assert error.fence <= lease.fence  # pyright: ignore[reportPossiblyUnboundVariable]
    assert error.held_for is not None
    assert 0.05 < error.held_for < 30
    assert "before its time was up" in str(error)
    assert "or the server lost it (a restart, a failover, an eviction, FLUSHALL)" in str(error)
    assert "Others may have held it since. Do not write any more" in str(error)
    assert not error.time_is_up
    assert (record.time_is_up, record.claim) == (False, 0.0)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (str(twin), vars(twin)) == (str(error), vars(error))


@pytest.mark.parametrize("share", [False, True])
async def test_many_readers_of_one_permit(sync: Coordinator, redis: Redis, told: Told, share: bool) -> None:
    """What tasks share is lost once: one line says how many had it. What no task has is lost without a word."""
    side = AsyncReadWriteLock(sync, NAME, ttl=6, share=share).read()
    resting = AsyncLock(sync, "rests", ttl=6, share=True, linger=60)
    async with resting:
        pass
    leases = [await side.acquire() for _ in range(3)]
    await redis.flushall()
    await asyncio.gather(*(lease.wait_lost() for lease in leases))
    records = told("lease_lost")
    assert sum(record.tasks for record in records) == 3
    assert len(records) == (1 if share else 3)


@pytest.mark.real
async def test_a_loop_that_was_blocked(sync: Coordinator, told: Told) -> None:
    """The server was not asked, so nothing is said about it: the deadline passed while the loop was blocked.

    Tasks notice it by `check` or at their exit, all in the turn of the loop after that.
    """
    inside, unblocked, loop = asyncio.Semaphore(0), asyncio.Event(), asyncio.get_running_loop()
    kinds: dict[str, Any] = {
        "lock": lambda name: AsyncLock(sync, name, ttl=3),
        "shared lock": lambda name: AsyncLock(sync, name, ttl=3, share=True),
        "reader": lambda name: AsyncReadWriteLock(sync, name, ttl=3).read(),
        "several": lambda name: AsyncMultiLock(sync, [name, f"{name}, another"], ttl=3),
    }
    cases = list(product(kinds, ("check", "exit")))

    async def hold(kind: str, noticed_by: str) -> None:
        async with kinds[kind](f"{kind}, {noticed_by}") as lease:
            inside.release()
            await unblocked.wait()
            if noticed_by == "check":
                lease.check()

    holding = [asyncio.create_task(hold(*case)) for case in cases]
    for _ in cases:
        await inside.acquire()
    loop.call_soon(time.sleep, 3.5)
    unblocked.set()
    ends = await asyncio.gather(*holding, return_exceptions=True)
    for case, end in zip(cases, ends, strict=True):
        assert isinstance(end, LeaseLost), case
        assert_late(end, told)


def assert_late(error: LeaseLost, told: Told) -> None:
    """It says what is known, in the log as well, and no more than that."""
    assert error.reason == "late", error
    assert error.time_is_up
    assert 0.5 < error.stalled < 60
    assert "blocked, for at least" in str(error)
    assert "Do not write any more" in str(error)
    for unknown in ("gone", "released elsewhere", "key deleted", "network"):
        assert unknown not in str(error)
    (record,) = [record for record in told("lease_lost") if record.lock == error.name]
    assert record.reason == "late"
    assert record.stalled == pytest.approx(error.stalled, abs=30)


@pytest.mark.parametrize("refused", [False, True])
async def test_a_lease_that_is_not_renewed(sync: Coordinator, redis: Redis, told: Told, refused: bool) -> None:
    """Its time is up: no key was deleted, and this process was not late. Refused renewals have lines of their own."""
    with pytest.raises(LeaseLost, match="its time was up") as caught:  # noqa: PT012
        async with AsyncLock(sync, NAME, ttl=6, auto_renew=refused):
            if refused:
                async with redis.pipeline() as pipe:  # in one step: a renewal in between would find nothing
                    pipe.delete(NAME)
                    pipe.rpush(NAME, "data")  # another program's
                    await pipe.execute()
            await asyncio.sleep(60)
    assert (caught.value.reason, caught.value.time_is_up, caught.value.stalled) == ("expired", True, 0.0)
    (record,) = told("lease_lost")
    assert (record.reason, record.time_is_up) == ("expired", True)
    assert "renewal_refused" in str(caught.value)
    assert [("WRONGTYPE" in it.getMessage()) for it in told("renewal_refused")[:1]] == [True] * refused


@pytest.mark.real
async def test_a_server_that_hangs(told: Told) -> None:
    """It is the server that did not answer, not this process that was late."""
    with EmbeddedServer(port=0) as server:
        async with server.client() as client, Coordinator(client) as sync:
            with pytest.raises(LeaseLost) as caught:  # noqa: PT012
                async with AsyncLock(sync, NAME, ttl=3):
                    server.pause()
                    try:
                        await asyncio.sleep(60)
                    finally:
                        server.resume()
    assert caught.value.reason == "unreachable"
    assert "server and the network" in str(caught.value)
    assert [record.reason for record in told("lease_lost")] == ["unreachable"]


@pytest.mark.real
async def test_a_server_that_is_away_for_long(told: Told) -> None:
    """Said once when it has lasted more than a second, and once when it is over, with the address; each time."""
    with EmbeddedServer(port=0) as server:
        address = f"127.0.0.1:{server.port}"
        async with server.client() as client, Coordinator(client) as sync:
            for times in (1, 2):
                lease = await AsyncLock(sync, NAME, ttl=60).acquire()
                server.kill()
                await wait_until(lambda: len(told("connection_lost")) == times, FAST, timeout=30)  # noqa: B023
                server.start()
                await wait_until(lambda: len(told("connection_restored")) == times, FAST, timeout=30)  # noqa: B023
                await wait_until(lambda: lease.lost, FAST, timeout=30)  # noqa: B023
    lost, back = told("connection_lost")[0], told("connection_restored")[0]
    assert (lost.levelname, back.levelname) == ("WARNING", "WARNING")
    assert lost.server == back.server == address
    assert 1.0 <= lost.seconds <= back.after
    assert "ConnectionError" in lost.getMessage()


@pytest.mark.parametrize("way", ["refused", "silent"])
async def test_an_outage_that_ends_while_nothing_needs_the_server(server: EmbeddedServer, told: Told, way: str) -> None:
    """Its warning is revoked by the next connection, with the time since it began."""
    async with FaultProxy(server) as proxy, proxy.client() as client, Coordinator(client, retry_for=6) as sync:
        await (await sync.lock(NAME).acquire()).release()
        proxy.refuse, proxy.black_hole = way == "refused", way == "silent"
        await proxy.cut()
        begun = now()
        with pytest.raises(Unreachable):
            await sync.lock(NAME).acquire()
        assert len(told("connection_lost")) == 1
        await asyncio.sleep(60)
        assert told("connection_restored") == []
        proxy.refuse = proxy.black_hole = False
        await (await sync.lock(NAME).acquire()).release()
        (back,) = told("connection_restored")
        assert back.after == pytest.approx(now() - begun, abs=5)
        assert len(told("connection_lost")) == 1


async def test_a_connection_that_is_lost_for_a_moment(redis: Redis, sync: Coordinator, told: Told) -> None:
    """A connection that is back soon is not worth a line."""
    async with AsyncLock(sync, NAME) as lease:
        await redis.client_kill_filter(skipme=True, _type="pubsub")
        await wait_until(lambda: sync.connections > 1, FAST, timeout=30)
        await lease.extend(30)
    assert told.all() == []


@pytest.mark.real
async def test_a_replica(told: Told) -> None:
    """One warning, however often the server refuses."""
    with EmbeddedServer(port=0) as primary, EmbeddedServer(port=0) as replica:
        address = f"127.0.0.1:{replica.port}"
        async with replica.client() as client, Coordinator(client, retry_for=2) as sync:
            await client.replicaof("127.0.0.1", str(primary.port))
            with pytest.raises(CommandRefused, match="READONLY"):
                await AsyncLock(sync, NAME).acquire()
            assert sync.connections > 2
    (record,) = told("read_only")
    assert record.levelname == "WARNING"
    assert record.server == address
    assert "READONLY" in record.getMessage()
    assert set(told.all()) == {"read_only"}


async def test_a_coordinator_says_where_it_leads_to() -> None:
    """And not how it gets in there."""
    for url, where in {
        "redis://me:secret@example.com:7001/3": "example.com:7001, db 3",
        "rediss://me:secret@example.com": "example.com:6379",
        "unix://me:secret@/run/redis.sock": "unix:/run/redis.sock",
    }.items():
        client = Redis.from_url(url)
        coordinator = Coordinator(client)
        assert repr(coordinator) == f"<Coordinator of {where}>"
        await coordinator.aclose()
        assert repr(coordinator) == f"<Coordinator of {where}, closed>"
        await client.aclose()
    made: Any = Sentinel
    sentinel = made([("localhost", 1)], password="secret").master_for("orders", password="secret")
    assert repr(Coordinator(sentinel)) == "<Coordinator of 'orders' of Sentinel>"
    cluster = RedisCluster("example.com", 7001, password="secret")
    assert repr(Coordinator(cluster)) == "<Coordinator of a cluster at example.com:7001>"


async def test_a_long_wait_for_a_lock(sync: Coordinator, other: Coordinator, told: Told) -> None:
    """One line for many waiters: who holds it, and how many wait."""

    async def wait_long(share: bool, elsewhere: bool) -> None:
        name = f"{NAME} {share} {elsewhere}"
        holding = AsyncLock(other if elsewhere else sync, name, share=share)
        lock = AsyncLock(sync, name, share=share)
        held = await asyncio.create_task(holding.acquire())
        waiting = [asyncio.create_task(lock.acquire()) for _ in range(3)]

        def about() -> list[Any]:
            return [record for record in told("waiting_long") if record.lock == name]

        await wait_until(lambda: bool(about()), FAST, timeout=30)
        await asyncio.sleep(30)
        (record,) = about()
        assert (record.levelname, record.lock, record.itself) == ("WARNING", name, False)
        assert record.seconds >= 10
        assert held.token in record.holder
        assert record.waiting == (1 if share and elsewhere else 3) or record.waiting == 3
        assert ("of this process" in record.holder) is not elsewhere
        await held.release()
        for task in waiting:
            await (await task).release()

    await asyncio.gather(*(wait_long(*case) for case in product((False, True), repeat=2)))


async def test_a_task_that_waits_for_itself(sync: Coordinator, told: Told) -> None:
    """The log says so: nothing else would ever happen."""
    lock = AsyncLock(sync, NAME, ttl=30)

    async def twice() -> None:
        await lock.acquire()
        await lock.acquire()

    task = asyncio.create_task(twice(), name="the culprit")
    await wait_until(lambda: bool(told("waiting_long")), FAST, timeout=30)
    (record,) = told("waiting_long")
    assert record.itself
    assert "the culprit" in record.holder
    assert "it waits for itself" in record.getMessage()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await lock.release()


async def test_long_waits_for_permits(sync: Coordinator, other: Coordinator, told: Told) -> None:
    """Of a semaphore it is said how many permits are held; of a read/write lock, who reads or writes."""
    rw = AsyncReadWriteLock(other, "config", ttl=30)
    held = await AsyncSemaphore(other, NAME, limit=3, ttl=30).acquire(weight=3), await rw.read().acquire()
    waiting = [
        asyncio.create_task(AsyncSemaphore(sync, NAME, limit=3).acquire()),
        asyncio.create_task(AsyncReadWriteLock(sync, "config").write().acquire()),
    ]
    await wait_until(lambda: len(told("waiting_long")) == 2, FAST, timeout=30)
    by_lock = {record.lock: record.holder for record in told("waiting_long")}
    assert by_lock[NAME].startswith("3 of its 3 permits are held")
    assert by_lock["config"] == f"{held[1].token!r} read"
    for lease in held:
        await lease.release()
    for task in waiting:
        await (await task).release()


async def test_a_queue_that_moves(sync: Coordinator, other: Coordinator, told: Told) -> None:
    """Each waits long, none is the first for long: that is noticed, too. And short waits say nothing."""
    lock = AsyncLock(sync, NAME, ttl=30)

    async def work(seconds: float) -> None:
        async with lock:
            await asyncio.sleep(seconds)

    await asyncio.gather(*(work(1) for _ in range(5)))
    assert told("waiting_long") == []
    await asyncio.gather(*(work(2.5) for _ in range(12)))
    (record,) = told("waiting_long")
    assert record.waiting > 1


@pytest.mark.ci
@pytest.mark.real
async def test_more_leases_than_one_process_can_renew(sync: Coordinator, told: Told) -> None:
    """The server answers all the while, so nobody is sent to look at it, or at the network."""
    locks = [AsyncLock(sync, f"{NAME}:{number}", ttl=60) for number in range(10_000)]
    leases: list[Lease] = []
    for first in range(0, len(locks), 500):
        leases += await asyncio.gather(*(lock.acquire() for lock in locks[first : first + 500]))
    await asyncio.gather(*(lease.extend(0.3) for lease in leases), return_exceptions=True)
    await wait_until(lambda: sum(lease.lost for lease in leases) > 1000, FAST, timeout=60)
    for lease in leases:
        with suppress(LeaseLost, Unreachable):
            await lease.release()
    records = told("lease_lost")
    told.forget()  # thousands of lines
    reasons = [record.reason for record in records]
    assert reasons.count("late") > 0.6 * len(reasons)
    message = next(record.getMessage() for record in records if record.reason == "late")
    assert "hold fewer leases in one process" in message
    assert "network" not in message


class Stop(BaseException):
    """As what `pytest.fail` raises."""


@pytest.mark.parametrize("error", [RuntimeError, Stop])
async def test_a_filter_that_raises_breaks_nothing(redis: Redis, error: type[BaseException]) -> None:
    """A filter or record factory of the application has a defect: the connection, and what it serves, go on.

    What is no Exception comes out of the event loop.
    """
    logger, seen, raised = logging.getLogger("redis_sync_aio"), list[object](), list[type[object]]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: raised.append(type(context["exception"])))

    def broken(record: logging.LogRecord) -> bool:
        seen.append(getattr(record, "event", None))
        raise error("a filter of the application")

    logger.addFilter(broken)
    try:
        async with asyncio.timeout(60), Coordinator(redis) as sync:
            kept, lost = await sync.lock("kept").acquire(), await sync.lock("lost").acquire()
            await redis.set("lost", "another")
            with pytest.raises(LeaseLost):
                await lost.extend(30)
            assert sync.connection_error is None
            await kept.release()
    finally:
        logger.removeFilter(broken)
    assert "lease_lost" in seen
    assert raised == ([] if error is RuntimeError else [error] * len(seen))
