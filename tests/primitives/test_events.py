"""Events: what observers are told of requests, leases and coordinators. See docs/operations/events-and-logs.md.

That every request has one end is checked after most tests of the suite (`support/balance.py`).
"""

from __future__ import annotations

import asyncio
import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from typing import Any, TypeVar

import pytest
from redis import Redis as SyncRedis
from redis.asyncio import Redis
from redis.exceptions import LockError, LockNotOwnedError

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncReentrantLock,
    Coordinator,
    Lease,
    LeaseLost,
    Unreachable,
    synchronized,
    wait_until,
)
from redis_sync_aio.compat import Lock
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed, WaitTimeout
from redis_sync_aio.instrumentation import (
    ConnectionLost,
    ConnectionRestored,
    Event,
    Granted,
    Lost,
    Released,
    RenewedLate,
    Requested,
    Stalled,
    Withdrawn,
    observe_all,
)
from redis_sync_aio.types import Push

from ..conftest import MakeClient
from ..support.body import FAST, waits
from ..support.inspecting import seen
from ..support.primitives import PRIMITIVES, Primitive, each
from ..support.virtual import VirtualLoop
from .conftest import Make

E = TypeVar("E", bound=Event)
everything = each(PRIMITIVES)
KINDS = {
    "robust lock": "robust",
    "reentrant lock": "reentrant",
    "multi-lock": "multi",
    "redlock": "redlock",
    "readers": "read",
    "writer": "write",
}


def kind_of(primitive: Primitive) -> str:
    """What the events of a primitive call it."""
    label = primitive.label.removeprefix("shared ").removesuffix(" with WATCH").removesuffix(" in one slot")
    return KINDS.get(label, label)


class Told(list[Event]):
    """What was told, but for stalls of a busy machine."""

    def __call__(self, event: Event) -> None:
        if not isinstance(event, (Stalled, RenewedLate)):
            self.append(event)

    def all(self, kind: type[E]) -> list[E]:
        return [event for event in self if isinstance(event, kind)]

    def one(self, kind: type[E]) -> E:
        (event,) = self.all(kind)
        return event

    @property
    def names(self) -> list[str]:
        return [type(event).__name__ for event in self]


def stall(seconds: float) -> None:
    """Let time pass while the loop is blocked."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.pass_time(seconds)


@pytest.fixture
def told() -> Iterator[Told]:
    events = Told()
    with observe_all(events):
        yield events


# -- locks with redis-py's interface ------------------------------------------------------------------------


async def test_a_lock_of_redis_py_is_told_like_a_lock(told: Told, redis: Redis, make_client: MakeClient) -> None:
    """One request, however often it asks, to its release; a waiter had to wait; what is refused says why."""
    lock, another = Lock(redis, "x:1", timeout=60), Lock(make_client(), "x:1", timeout=60)
    assert await lock.acquire()
    assert told.one(Granted).token == lock.local.token.decode()
    assert not await another.acquire(blocking=False)
    assert not await another.acquire(blocking_timeout=0.001)
    assert [it.outcome for it in told.all(Withdrawn)] == ["taken", "timeout"]
    waiting = asyncio.create_task(another.acquire())
    await seen(redis, "x:1", lambda it: it.waiting)
    await lock.release()
    await waiting
    assert [it.contended for it in told.all(Granted)] == [False, True]
    await another.release()
    assert len(told.all(Released)) == 2
    assert told.all(Lost) == []
    assert {(it.kind, it.name, it.pattern) for it in told} == {("lock", "x:1", "x:*")}
    assert len(told.all(Requested)) == 4


@pytest.mark.parametrize("asks", ["release", "reacquire"])
async def test_a_lock_of_redis_py_that_was_taken_is_lost(told: Told, redis: Redis, asks: str) -> None:
    """Nothing renews it, so its loss is told by the first call that finds it out; once."""
    lock = Lock(redis, "x", timeout=60)
    assert await lock.acquire()
    await redis.set("x", "theirs")
    with pytest.raises(LockNotOwnedError):
        await getattr(lock, asks)()
    assert (told.one(Lost).reason, told.one(Lost).time_is_up) == ("taken", False)
    with pytest.raises(LockError):
        await lock.release()
    assert told.names == ["Requested", "Granted", "Lost"]


async def test_a_lock_of_redis_py_that_nobody_releases_has_an_end(told: Told, redis: Redis) -> None:
    """It was forgotten, although it is held until its timeout."""
    lock = Lock(redis, "x", timeout=60)
    assert await asyncio.create_task(lock.acquire())
    del lock
    gc.collect()
    await wait_until(lambda: bool(told.all(Lost)), FAST, timeout=15)
    assert told.one(Lost).reason == "forgotten"


# -- one request, one story --------------------------------------------------------------------------------


@everything
async def test_a_lease_is_told_from_its_request_to_its_release(primitive: Primitive, make: Make, told: Told) -> None:
    """Whatever it is made of: it is one request."""
    async with make() as lease:
        fence, token = lease.fence, lease.token
    assert told.names == ["Requested", "Granted", "Released"]
    granted, released = told.one(Granted), told.one(Released)
    assert (granted.fence, granted.token, granted.contended) == (fence, token, False)
    assert {event.kind for event in told} == {kind_of(primitive)}
    assert {event.name for event in told} == {lease.name}
    assert len({event.request for event in told}) == len({event.server for event in told}) == 1
    assert told[0].time <= told[1].time <= told[2].time
    assert granted.waited == pytest.approx(told[1].time - told[0].time)
    assert released.held == pytest.approx(told[2].time - told[1].time)


@each(one for one in PRIMITIVES if kind_of(one) not in ("read", "redlock"))
async def test_a_wait_is_told_as_contended(primitive: Primitive, make: Make, told: Told, sync: Coordinator) -> None:
    """A Redlock is left out: it waits by requests of its own, and may find all servers free."""
    holders = [await make().acquire() for _ in range(1 if primitive.alone else 4)]
    told.clear()
    waiter = asyncio.create_task(make().acquire())  # a task of its own: a reentrant lock belongs to a task
    await wait_until(lambda: _waiting(sync, primitive, make), FAST, timeout=30)
    assert told.names == ["Requested"]
    for lease in holders:
        await lease.release()
    await (await waiter).release()
    granted = told.one(Granted)
    assert granted.request == told[0].request
    assert granted.contended
    assert granted.waited > 0
    assert told.names.count("HandedOver") == ("shared" in primitive.label)
    assert told.names.count("Released") == len(holders) + 1


async def _waiting(sync: Coordinator, primitive: Primitive, make: Make) -> bool:
    sides = kind_of(primitive) in ("read", "write")
    found = await (sync.read_write_lock("it") if sides else make()).statistics()
    behind = any(not it.token for view in sync.statistics() for it in view.waiters)  # another task of this process
    return behind or any(one.waiting for one in (found if isinstance(found, tuple) else [found]))


async def test_a_wait_whose_time_is_up_is_withdrawn(sync: Coordinator, told: Told) -> None:
    """For what waits, and acquires nothing, as for what is acquired."""
    with pytest.raises(WaitTimeout) as caught:
        await sync.event("it").wait(timeout=0.1)
    withdrawn = told.one(Withdrawn)
    assert (withdrawn.kind, withdrawn.outcome, withdrawn.error) == ("event", "timeout", caught.value)


@everything
@pytest.mark.parametrize("how", ["timeout", "cancelled", "taken", "closed"])
async def test_a_request_without_a_lease_is_withdrawn(
    primitive: Primitive, make: Make, told: Told, sync: Coordinator, how: str
) -> None:
    number = 1 if primitive.alone else 4
    if kind_of(primitive) == "read":
        blocker: Any = sync.read_write_lock("it").write()
        number = 1
    else:
        blocker = make()

    async def hold() -> list[Lease]:  # in a task that lives on: a reentrant lock belongs to a task
        return [await blocker.acquire() for _ in range(number)]

    held = await asyncio.create_task(hold())
    told.clear()
    with suppress(AcquireTimeout, asyncio.CancelledError, CoordinatorClosed):
        if how == "taken":
            assert await make().try_acquire() is None
        elif how == "timeout":
            await make().acquire(timeout=0.1)
        else:
            task = asyncio.create_task(make().acquire())
            await wait_until(lambda: "Requested" in told.names, FAST, timeout=30)
            if how == "cancelled":
                task.cancel()
            else:
                await sync.aclose()
            await task
    withdrawn = told.one(Withdrawn)
    assert told.one(Requested).request == withdrawn.request
    assert withdrawn.outcome == ("error" if how == "closed" else how)
    assert withdrawn.waited == pytest.approx(withdrawn.time - told.one(Requested).time)
    expected = {"timeout": AcquireTimeout, "closed": CoordinatorClosed}.get(how, type(None))
    assert isinstance(withdrawn.error, expected)
    assert told.all(Granted) == []
    for lease in held:
        with suppress(LeaseLost, CoordinatorClosed):
            await lease.release()


async def test_a_server_that_is_gone_withdraws_a_request_and_loses_a_lease(told: Told) -> None:
    with EmbeddedServer(port=0) as server:
        address = f"127.0.0.1:{server.port}"
        async with server.client() as client, Coordinator(client, retry_for=2, response_timeout=2) as sync:
            lease = await sync.lock("held", ttl=1).acquire()
            server.kill()
            with pytest.raises(Unreachable):
                await sync.lock("asked").acquire()
            await lease.wait_lost()
    withdrawn, lost = told.one(Withdrawn), told.one(Lost)
    assert (withdrawn.name, withdrawn.outcome) == ("asked", "error")
    assert isinstance(withdrawn.error, Unreachable)
    assert lost.name == "held"
    assert lost.reason in ("unreachable", "late")  # late: if this machine stood still meanwhile
    assert told.one(ConnectionLost).server == address


# -- losses ------------------------------------------------------------------------------------------------


@everything
@pytest.mark.parametrize("reason", ["expired", "late", "closed", "forgotten"])
async def test_a_lost_lease_is_told_once_and_is_not_released(
    primitive: Primitive, make: Make, told: Told, redis: Redis, sync: Coordinator, reason: str
) -> None:
    """Its keys are deleted, its time is up, its coordinator is closed, or nobody has it any more.

    A Redlock outlives a loss on one server of three.
    """
    one_of_three = primitive.servers > 1 and reason in ("expired", "closed")
    lease: Any = None
    if reason == "forgotten":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            await asyncio.create_task(_acquire_and_forget(make))
            gc.collect()
            await wait_until(lambda: "Lost" in told.names, FAST, timeout=30)
    else:
        lease = await make(ttl=3, auto_renew=reason == "expired").acquire()
        if reason == "expired":
            await redis.flushall()
        elif reason == "closed":
            await sync.aclose()
        if one_of_three:
            await lease.release()
            assert told.names == ["Requested", "Granted", "Released"]
            return
        await lease.wait_lost()
    lost = told.one(Lost)
    assert told.names == ["Requested", "Granted", "Lost"]
    assert lost.held == pytest.approx(told[2].time - told[1].time)
    if reason == "late":
        assert lost.time_is_up
    else:
        assert lost.reason == reason
    if lease is not None:
        with pytest.raises(LeaseLost) as caught:
            lease.check()
        assert (lost.reason, lost.time_is_up) == (caught.value.reason, caught.value.time_is_up)


async def _acquire_and_forget(make: Make) -> None:
    await make(ttl=3).acquire()


# -- what is one request -----------------------------------------------------------------------------------


async def test_a_reentrant_lock_is_one_request_until_its_last_lease_is_released(sync: Coordinator, told: Told) -> None:
    lock = AsyncReentrantLock(sync, "again")
    async with lock:
        async with lock:
            pass
        assert told.names == ["Requested", "Granted"]
    assert told.names == ["Requested", "Granted", "Released"]


async def test_tasks_that_share_have_a_request_each(sync: Coordinator, told: Told) -> None:
    """What a task gets from another one is told as handed over, and what it takes from rest as well."""
    lock = AsyncLock(sync, "shared", share=True, linger=60)
    first = await lock.acquire()
    waiters = [asyncio.create_task(lock.acquire()) for _ in range(2)]
    await wait_until(lambda: told.names.count("Requested") == 3, FAST, timeout=30)
    await first.release()
    for waiter in waiters:
        await (await waiter).release()
    async with lock:
        pass
    assert len({event.request for event in told}) == 4
    assert [told.names.count(name) for name in ("Requested", "HandedOver", "Granted", "Released")] == [4, 3, 4, 4]
    assert [event.contended for event in told.all(Granted)] == [False, True, True, False]


# -- patterns ----------------------------------------------------------------------------------------------


async def test_a_pattern_groups_names(redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    """By the part before the first colon, by a template, or by a function; if that has no opinion, by the rule."""
    told = Told()

    def pattern_of(name: str) -> str | None:
        if name == "wrong":
            raise ValueError(name)
        return "order" if name.startswith("o-") else None

    @synchronized(redis, "user:{user_id}:{what}")
    async def charge(user_id: int, what: str) -> None:
        pass

    async with Coordinator(redis) as sync:
        with observe_all(told, pattern_of=pattern_of):
            for name in ("orders:42", "nightly", "a:b:c", "{user:7}:x", "o-1", "wrong", "wrong"):
                async with sync.lock(name):
                    pass
            async with sync.multi_lock(["account:1", "account:2", "bank"]):
                pass
            await charge(7, what="card")
    assert [event.pattern for event in told.all(Granted)] == [
        *("orders:*", "nightly", "a:*", "{user:*", "order", "wrong", "wrong"),
        *("account:*, bank", "user:{user_id}:{what}"),
    ]
    assert [getattr(record, "event", None) for record in caplog.records] == ["observer_failed"]


async def test_the_line_of_the_log_has_the_facts_of_the_event(
    redis: Redis, sync: Coordinator, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    """By the same names, and with the same request."""
    lease = await sync.lock("x", ttl=600).acquire()
    await redis.delete("x")
    with pytest.raises(LeaseLost):
        await lease.extend(600)
    lost = told.one(Lost)
    (record,) = [it for it in caplog.records if getattr(it, "event", "") == "lease_lost"]
    own = {field.name for field in fields(Lost)} - {field.name for field in fields(Event)}
    assert own <= vars(record).keys()
    facts = vars(record)
    assert (facts["lock"], facts["reason"], facts["request"]) == (lost.name, lost.reason, lost.request)
    assert facts["time_is_up"] is lost.time_is_up is False


async def test_what_was_let_in_is_never_lost(sync: Coordinator, told: Told) -> None:
    """Not even if the server does not answer any more: it holds nothing."""
    await sync.event("x").set()
    await sync.latch("x", count=1).count_down()
    for pass_it in (sync.event("x").wait, sync.latch("x", count=1).wait, sync.barrier("x", parties=1).wait):
        await pass_it()
        assert told.names == ["Requested", "Granted", "Released"]
        told.clear()


# -- the coordinator ---------------------------------------------------------------------------------------


async def test_a_blocked_loop_is_told_as_a_stall_and_a_late_renewal(
    redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """The line of the log says the same of the renewal, in the same words."""
    told: list[Event] = []
    async with Coordinator(redis, observe=told.append) as sync, sync.lock("busy", ttl=60) as lease:
        await lease.extend(6)  # due after two seconds: it is more than two seconds late after five
        stall(5)
        await wait_until(lambda: any(isinstance(event, RenewedLate) for event in told), FAST, timeout=30)
    late = next(event for event in told if isinstance(event, RenewedLate))
    granted = next(event for event in told if isinstance(event, Granted))
    assert late.request == granted.request
    assert late.lateness > 2
    assert late.left < 6
    record = next(it for it in caplog.records if getattr(it, "event", "") == "renewal_late")
    assert {name: vars(record)[name] for name in ("lateness", "left", "request")} == {
        name: getattr(late, name) for name in ("lateness", "left", "request")
    }
    assert max(event.seconds for event in told if isinstance(event, Stalled)) > 3


async def test_a_connection_that_is_lost_and_restored(redis: Redis, sync: Coordinator, told: Told) -> None:
    async with sync.lock("held"), sync.semaphore("also", limit=1):
        await redis.client_kill_filter(skipme=True, _type="pubsub")
        await wait_until(lambda: "ConnectionRestored" in told.names, FAST, timeout=30)
    lost, restored = told.one(ConnectionLost), told.one(ConnectionRestored)
    assert (lost.server, lost.name, lost.request) == (restored.server, "", 0)
    assert restored.rechecked == 2
    assert restored.after == pytest.approx(restored.time - lost.time, abs=0.5)


# -- observers ---------------------------------------------------------------------------------------------


async def test_an_observer_that_raises_is_logged_once_and_changes_nothing(
    redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """The other observers are told all the same."""
    told = Told()

    def raises(event: Event) -> None:
        raise RuntimeError(event.name)

    async with Coordinator(redis, observe=[raises, told]) as sync:
        for _ in range(2):
            async with sync.lock("x"):
                pass
            assert await sync.lock("x").try_acquire() is not None
            await sync.lock("x").release()
    assert told.names == ["Requested", "Granted", "Released"] * 4
    (record,) = caplog.records
    assert getattr(record, "event", None) == "observer_failed"
    assert "RuntimeError" in caplog.text


class Stop(BaseException):
    """What no `except Exception` catches, as what `pytest.fail` raises."""


@pytest.mark.parametrize("push", ["auto", "never"])
async def test_what_is_no_exception_comes_out_of_the_loop(make_client: MakeClient, push: Push) -> None:
    """An observer is called in tasks and in callbacks. Leases are acquired, released and lost all the same."""
    loop, raised, wanted = asyncio.get_running_loop(), list[object](), list[type[Event]]()
    loop.set_exception_handler(lambda _, context: raised.append(context["exception"]))

    def stops(event: Event) -> None:
        wanted.append(type(event))
        raise Stop(event)

    def no_pattern(name: str) -> str:
        raise Stop(name)

    with observe_all(stops, pattern_of=no_pattern):
        async with Coordinator(make_client(), push=push) as sync, asyncio.timeout(60):
            lock = sync.lock("x")
            async with lock:
                waiting = asyncio.create_task(lock.acquire())
                await wait_until(waits(lock), FAST)
                with pytest.raises(AcquireTimeout):
                    await asyncio.create_task(sync.lock("x").acquire(timeout=0.01))
            lease = await waiting
            await sync.client.delete("x")
            with pytest.raises(LeaseLost):
                await lease.extend(30)
            assert await lock.try_acquire() is not None
        await asyncio.sleep(0)
    events = [error.args[0] for error in raised if isinstance(error, Stop) and isinstance(error.args[0], Event)]
    assert [type(event) for event in events] == wanted
    assert {Requested, Granted, Released, Withdrawn, Lost} <= set(wanted)
    assert len(raised) > len(wanted)  # those of the pattern


def test_an_observer_may_end_the_program(server: EmbeddedServer) -> None:
    """The bodies end, and nothing stays held."""

    def ends(event: Event) -> None:
        if isinstance(event, Granted) and event.name == "second":
            raise SystemExit(3)

    async def main() -> None:
        async with Coordinator.from_url(server.url, observe=ends) as sync, sync.lock("first"), sync.lock("second"):
            await asyncio.Event().wait()

    with pytest.raises(SystemExit):
        asyncio.run(main())
    with SyncRedis.from_url(server.url) as admin:
        assert admin.exists("first", "second") == 0


async def test_all_coordinators_are_observed_those_made_before_and_implicit_ones_too(redis: Redis) -> None:
    told = Told()
    async with Coordinator(redis) as before:
        with observe_all(told):
            async with before.lock("a"), AsyncLock(redis, "b"):
                pass
        async with before.lock("c"):
            pass
    assert [f"{type(event).__name__} {event.name}" for event in told] == [
        *("Requested a", "Granted a", "Requested b", "Granted b", "Released b", "Released a"),
    ]


async def test_an_observer_gets_whole_stories_only(sync: Coordinator) -> None:
    """What began before it was attached is not told, and nothing is after it was closed."""
    told = Told()
    for wrong in (1, [print, "x"]):
        untyped: Any = wrong
        with pytest.raises(TypeError):
            Coordinator(sync.client, observe=untyped)
    early = await sync.lock("early").acquire()
    attached = observe_all(told)
    late = await sync.lock("late").acquire()
    await early.release()
    assert told.names == ["Requested", "Granted"]
    attached.close()
    attached.close()
    await late.release()
    assert told.names == ["Requested", "Granted"]


@pytest.mark.real
async def test_loops_of_other_threads_are_observed(server: EmbeddedServer, told: Told) -> None:
    """Each tells in its own thread; observers come and go meanwhile."""

    async def work(number: int) -> None:
        async with server.client() as client:
            for turn in range(20):
                async with AsyncLock(client, f"{number}:{turn}"):
                    pass

    threads = [asyncio.to_thread(asyncio.run, work(number)) for number in range(3)]
    working = asyncio.gather(*threads)
    while not working.done():
        with observe_all(Told()):
            await asyncio.sleep(0)
    await working
    for number in range(3):
        names = [type(event).__name__ for event in told if event.pattern == f"{number}:*"]
        assert names == ["Requested", "Granted", "Released"] * 20


async def run(program: str, *arguments: str) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, *arguments)
    assert await process.wait() == 0


UNOBSERVED = """
import asyncio, sys
from redis.asyncio import Redis
from redis_sync_aio import AsyncLock, AsyncMultiLock, AsyncSemaphore

async def main():
    async with Redis.from_url(sys.argv[1]) as redis:
        shared = AsyncSemaphore(redis, "b", limit=1, share=True)
        for lock in AsyncLock(redis, "a"), shared, AsyncMultiLock(redis, ["c"]):
            async with lock:
                pass

asyncio.run(main())
made = [name for name in sys.modules if name in ("redis_sync_aio._core.events", "redis_sync_aio._core.observers")]
assert not made, made
"""


@pytest.mark.ci
@pytest.mark.real
async def test_nothing_is_made_for_events_while_nobody_observes(server: EmbeddedServer) -> None:
    """Not even the classes of the events are there."""
    await run(UNOBSERVED, server.url)
