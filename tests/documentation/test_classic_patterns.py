"""Locks as books and blogs show them: where each of them fails, and that ours does not (docs/classic-patterns.md).

Semaphores, transactions, the market and Redlock are next to this file: test_classic_semaphores.py,
test_classic_transactions.py, test_classic_market.py, test_classic_redlock.py.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from datetime import timedelta

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import LockNotOwnedError, ResponseError, WatchError

from redis_sync_aio import AcquireTimeout, AsyncLock, Coordinator, LeaseLost, NotHeld, Unreachable, wait_until
from redis_sync_aio.compat import Lock
from redis_sync_aio.embedded import EmbeddedServer

from ..conftest import MakeClient
from ..support import textbook
from ..support.body import FAST
from ..support.child import Crew, Failed
from ..support.crews import crew as crew
from ..support.crews import plain as plain
from ..support.factories import Client
from ..support.inside import Engine
from ..support.proxy import CUT_AFTER, CUT_BEFORE, HOLD, SWALLOW_REQUEST, Action, FaultProxy, anything, command
from ..support.resp import Predicate
from ..support.textbook import Crash, crash, decoded
from ..support.views import holder_of, remaining_of
from ..support.wired import ACQUIRE, RELEASE, wired

pytestmark = pytest.mark.timing
NAME = "lock"
MINUTE = 60_000
CONNECTING = 12
"""More commands than it takes to connect."""
DECIDES: Mapping[str, Predicate] = {"lua": RELEASE, "watch": command("EXEC")}
"""The command that makes a release, by who decides."""
engines = pytest.mark.parametrize("engine", DECIDES)
modes = pytest.mark.parametrize("mode", ["link", "plain"])


async def let_end(redis: Client, name: str = NAME) -> None:
    """Let the lease end now, as if its ttl had run out."""
    await redis.pexpire(name, 0)


# -- basic lock: SET NX / DEL --------------------------------------------------------------------------------


async def test_textbook_a_late_del_frees_the_lock_of_another(plain: Client) -> None:
    assert await textbook.take(plain, NAME, "a", px=MINUTE)
    assert not await textbook.take(plain, NAME, "b", px=MINUTE)
    await let_end(plain)
    assert await textbook.take(plain, NAME, "b", px=MINUTE)
    await textbook.give_back(plain, NAME)  # a does not know that its time was over
    assert await textbook.take(plain, NAME, "c", px=MINUTE), "b is still in, and so is c"


async def test_textbook_ex_is_in_whole_seconds(plain: Client) -> None:
    """EX drops the fraction of a timedelta, and what is left of half a second is no ttl at all."""
    assert await textbook.take(plain, NAME, ex=timedelta(seconds=1.9))
    assert await plain.pttl(NAME) <= 1000
    with pytest.raises(ResponseError, match="invalid expire"):
        await textbook.take(plain, "other", ex=timedelta(seconds=0.5))


async def test_p1_basic_lock(sync: Coordinator, make_client: MakeClient) -> None:
    async with Coordinator(make_client()) as other:
        ours, theirs = AsyncLock(sync, NAME), AsyncLock(other, NAME)
        lease = await ours.acquire()
        assert await theirs.try_acquire() is None
        await lease.release()
        second = await theirs.try_acquire()
        assert second is not None
        await let_end(sync.client)
        third = await ours.acquire(timeout=0)
        with pytest.raises(LeaseLost):
            await second.release()
        third.check()
        await third.release()


@pytest.mark.parametrize("ttl", [2, 0.5, timedelta(seconds=1.9), timedelta(milliseconds=500)], ids=str)
async def test_basic_lock_ttl_is_seconds_or_timedelta(redis: Client, ttl: float | timedelta) -> None:
    async with AsyncLock(redis, NAME, ttl=ttl, auto_renew=False) as lease:
        ms = (ttl.total_seconds() if isinstance(ttl, timedelta) else ttl) * 1000
        assert ms - 400 < await redis.pttl(NAME) <= ms
        assert lease.remaining() <= ms / 1000


# -- identity lock, GET and then DEL ---------------------------------------------------------------------------


async def test_textbook_get_then_del_frees_the_lock_of_another(plain: Client) -> None:
    async def meanwhile() -> None:
        await let_end(plain)
        assert await textbook.take(plain, NAME, "b", px=MINUTE)

    assert await textbook.take(plain, NAME, "a", px=MINUTE)
    assert await textbook.give_back_if_mine(plain, NAME, "a", meanwhile)
    assert await textbook.take(plain, NAME, "c", px=MINUTE), "b is still in, and so is c"


@modes
@engines
async def test_p1_a_release_that_comes_too_late_frees_nobody_elses_lock(
    server: EmbeddedServer, mode: str, engine: str
) -> None:
    """P1: the release is on its way when the lease ends and another one gets the lock: who keeps it."""
    # An answer may take long: a copy sent meanwhile would, when it finds the token gone, take the first for executed.
    async with wired(server, mode, response_timeout=5, client={"socket_timeout": 5}) as w:
        lease = await w.lock(engine=engine).acquire()
        rule = w.proxy.on(DECIDES[engine], HOLD)
        releasing = asyncio.create_task(lease.release())
        await rule.fired.wait()
        await let_end(w.direct, w.name)
        other = await w.elsewhere().acquire(timeout=0)
        rule.release.set()
        with pytest.raises(LeaseLost):
            await releasing
        await w.check_held(other)
        await other.release()


@engines
async def test_p1_identities(server: EmbeddedServer, sync: Coordinator, crew: Crew, engine: Engine) -> None:
    """P1: the right name releases, from whatever process; a wrong one is refused and changes nothing."""
    lock = AsyncLock(sync, NAME, engine=engine)
    with crew.children(2) as children:
        await asyncio.gather(*(child.open(server.url) for child in children))
        one, two = children
        for releaser in children:
            granted = await one.acquire(NAME, 30, identity="worker-7")
            assert granted["token"] == holder_of(await lock.statistics()) == "worker-7"
            with pytest.raises(Failed, match="is not held by 'worker-9' but by 'worker-7'") as caught:
                await two.release_as(NAME, "worker-9")
            assert caught.value.kind == "NotHeld"
            assert holder_of(await lock.statistics()) == "worker-7"
            await releaser.release_as(NAME, "worker-7")
            assert not await lock.locked()
            with pytest.raises(Failed, match="nor by anybody else"):
                await two.release_as(NAME, "worker-7")
        await one.acquire(NAME, 30, identity="worker-7")
        with pytest.raises(NotHeld, match="is not held by 'worker-9' but by 'worker-7'"):
            await lock.release(identity="worker-9")
        await lock.release(identity="worker-7")
        await lock.acquire(identity="worker-7", timeout=0)
        await two.release_as(NAME, "worker-7")
        assert not await lock.locked()


# -- identity lock with WATCH ----------------------------------------------------------------------------------


async def test_textbook_a_release_by_watch_fails_when_its_own_renewal_comes_between(plain: Client) -> None:
    async def renew() -> None:
        await plain.pexpire(NAME, MINUTE)

    assert await textbook.take(plain, NAME, "a", px=MINUTE)
    with pytest.raises(WatchError):
        await textbook.give_back_watching(plain, NAME, "a", renew)
    assert await plain.get(NAME) == "a", "it is nobody's any more, and still there"


@modes
@engines
async def test_p7_a_renewal_that_comes_between_does_not_hinder_a_release(
    server: EmbeddedServer, mode: str, engine: str
) -> None:
    """P7: by a script; or with WATCH, where EXEC is refused, the token is found to be there, and it is repeated."""
    async with wired(server, mode) as w:
        lease = await w.lock(engine=engine).acquire()
        rule = w.proxy.on(DECIDES[engine], HOLD)
        releasing = asyncio.create_task(lease.release())
        await rule.fired.wait()
        await w.direct.pexpire(w.name, MINUTE)
        rule.release.set()
        await releasing
        await w.check_free(lease.fence)


# -- SETNX, then EXPIRE ----------------------------------------------------------------------------------------


async def test_textbook_a_crash_between_setnx_and_expire_locks_forever(plain: Client) -> None:
    with pytest.raises(Crash):
        await textbook.take_in_two_steps(plain, NAME, "a", 10, crash)
    assert await plain.ttl(NAME) == -1
    assert not await textbook.take_in_two_steps(plain, NAME, "b", 10)


async def test_textbook_mending_it_puts_an_end_to_a_lock_that_was_to_have_none(plain: Client) -> None:
    assert await plain.set(NAME, "maintenance, until further notice", nx=True)
    assert not await textbook.take_in_two_steps(plain, NAME, "b", 10, mend=True)
    assert 0 < await plain.ttl(NAME) <= 10, "b has set an end to it"


async def cut_off(server: EmbeddedServer, mode: str, way: Action, number: int, retry_for: float = 2) -> bool:
    """Acquire; after so many commands the client is cut off for good. Return whether it was acquired before."""
    name = f"cut off {mode} {way is CUT_AFTER} {number} {retry_for}"
    patient = {"socket_timeout": 30, "socket_connect_timeout": 30}  # a connection that is not cut is never given up
    async with wired(server, mode, retry_for=retry_for, response_timeout=30, client=patient, name=name) as w:
        rule = w.proxy.on(anything, way, times=None, skip=number)
        try:
            await w.lock().acquire()
        except Unreachable:
            if not rule.acted:  # it was the machine that was too slow
                assert retry_for < 60
                return await cut_off(server, mode, way, number, 5 * retry_for)
            left = await w.direct.pttl(w.name)
            assert left == -2 or 0 < left <= 30_000
            return False
        assert 0 < await w.direct.pttl(w.name) <= 30_000
        return True


@modes
async def test_p12_no_crash_leaves_a_lock_without_a_ttl(server: EmbeddedServer, mode: str) -> None:
    """P12: wherever on its way the client is cut off for good, there is no lock, or it has a ttl."""
    ways, numbers = (CUT_BEFORE, CUT_AFTER), [*range(CONNECTING + 1), 10 * CONNECTING]
    cases = [cut_off(server, mode, way, number) for way in ways for number in numbers]
    ends = await asyncio.gather(*cases)
    for got in (ends[: len(numbers)], ends[len(numbers) :]):
        assert not got[0]
        assert got[-1], "not all points were met"
        assert sorted(got) == got


async def test_p11_a_foreign_lock_without_ttl_is_reported_and_stays_as_it_is(redis: Client, sync: Coordinator) -> None:
    lock = AsyncLock(sync, NAME)
    await redis.set(NAME, "maintenance")
    for timeout in (0, 0.02):
        with pytest.raises(AcquireTimeout) as caught:
            await lock.acquire(timeout=timeout)
        assert caught.value.remaining is None
    seen = await lock.statistics()
    assert (holder_of(seen), seen.holders[0].foreign, remaining_of(seen)) == ("maintenance", True, None)
    assert await redis.pttl(NAME) == -1
    assert await lock.force_release()
    async with lock.acquire(timeout=0):
        assert 0 < await redis.pttl(NAME) <= 30_000


# -- the reply of SETNX is lost, GET to find out -----------------------------------------------------------------


async def test_textbook_redis_py_repeats_set_nx_and_is_refused_by_itself(server: EmbeddedServer, plain: Client) -> None:
    assert server.port is not None
    async with (
        FaultProxy((server.host, server.port)) as proxy,
        Redis(host=proxy.host, port=proxy.port, retry=Retry(NoBackoff(), 1), decode_responses=True) as client,
    ):
        await client.ping()
        proxy.on("SET", CUT_AFTER)
        assert not await textbook.take(client, NAME, "a", px=MINUTE)
    assert await plain.get(NAME) == "a", "refused, and it has it"


async def test_textbook_get_asks_before_the_lost_set_nx_arrives(server: EmbeddedServer, plain: Client) -> None:
    copies: list[list[bytes]] = []

    def set_nx(args: list[bytes]) -> bool:
        copies.extend([args] if command("SET")(args) else [])
        return command("SET")(args)

    assert server.port is not None
    options = {"retry": Retry(NoBackoff(), 0), "socket_timeout": 0.1, "decode_responses": True}
    async with (
        FaultProxy((server.host, server.port)) as proxy,
        Redis(host=proxy.host, port=proxy.port, **options) as client,  # type: ignore[arg-type]
    ):
        await client.ping()
        proxy.on(set_nx, SWALLOW_REQUEST)
        assert not await textbook.take_and_ask(client, NAME, "a", MINUTE)
    await plain.execute_command(*copies[0])  # it was in a socket all the time
    assert await plain.get(NAME) == "a", "it has it, and has gone away"


@modes
@pytest.mark.parametrize("way", [CUT_BEFORE, CUT_AFTER], ids=["before", "after"])
async def test_p4_a_lost_reply_is_found_out_and_a_late_copy_is_spent(
    server: EmbeddedServer, mode: str, way: Action
) -> None:
    """P4: it has the lock and knows it; what was in a socket all the time changes nothing when it arrives."""
    copies: list[list[bytes]] = []

    def acquires(args: list[bytes]) -> bool:
        copies.extend([args] if ACQUIRE(args) else [])
        return ACQUIRE(args)

    async with wired(server, mode) as w:
        w.proxy.on(acquires, way)
        lease = await w.lock().acquire()
        await w.check_held(lease)
        assert await w.elsewhere().try_acquire() is None
        await lease.release()
        assert len(copies) >= 2
        for copy in copies:
            await decoded(w.direct).execute_command(*copy)
        await w.check_free(lease.fence)


# -- an alarm of the process as a timeout -----------------------------------------------------------------------

TIMER, ALARM = signal.ITIMER_VIRTUAL, signal.SIGVTALRM
"""Not ITIMER_REAL: the test runner's own timeouts use that one, and a process has only one of each."""


def alarm_lock(client: Client, name: str, who: str) -> textbook.AlarmLock:
    return textbook.AlarmLock(client, name, who, 60, TIMER, ALARM)


async def test_textbook_the_alarm_rings_in_whatever_task_runs(plain: Client) -> None:
    waiting, rung = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        waiting.set()
        await rung.wait()

    await textbook.take(plain, NAME, "holder", px=MINUTE)
    patient = asyncio.create_task(alarm_lock(plain, NAME, "patient").acquire(3600, wait))
    await waiting.wait()
    with pytest.raises(textbook.LockAcquireError):  # here, in a task that wants no lock
        signal.raise_signal(ALARM)
    assert not patient.done(), "its time is over, and nobody has told it"

    waiting.clear()
    free = alarm_lock(plain, "other", "b")
    await free.acquire(7200, textbook.nothing)
    assert signal.getitimer(TIMER) == (0, 0), "nobody's alarm is set any more: the patient waits forever"
    await free.release()
    with pytest.raises(textbook.LockReleaseError):
        await free.release()
    patient.cancel()
    await asyncio.wait([patient])


async def test_textbook_no_alarms_beside_the_main_thread(plain: Client, server: EmbeddedServer) -> None:
    async def lock() -> None:
        async with server.client() as client:
            await alarm_lock(client, "free", "a").acquire(1, textbook.nothing)

    with pytest.raises(ValueError, match="main thread"):
        await asyncio.to_thread(asyncio.run, lock())


async def test_p12_a_timeout_is_the_tasks_own(sync: Coordinator, server: EmbeddedServer) -> None:
    """P12: each task's own ends its own waiting, in any thread; signals are left alone."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    timers = [signal.getitimer(which) for which in (signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)]
    lock, ended = AsyncLock(sync, NAME), list[float]()

    async def wait(timeout: float) -> None:
        with pytest.raises(AcquireTimeout, match=NAME):
            await lock.acquire(timeout=timeout)
        ended.append(timeout)

    async def elsewhere() -> None:
        async with server.client() as client:
            with pytest.raises(AcquireTimeout):
                await AsyncLock(client, NAME).acquire(timeout=0.03)

    holder = await lock.acquire()
    patient = asyncio.create_task(lock.acquire(timeout=3600))
    await asyncio.gather(wait(0.09), wait(0.03), wait(0.06), asyncio.to_thread(asyncio.run, elsewhere()))
    assert ended == [0.03, 0.06, 0.09]
    assert not patient.done()
    await holder.release()
    await (await patient).release()
    assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers
    assert [signal.getitimer(which) for which in (signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)] == timers


async def test_p7_release_errors_have_names(redis: Redis, sync: Coordinator) -> None:
    """What the textbook calls LockReleaseError: not held, lost, or in redis-py's words."""
    lock = AsyncLock(sync, NAME)
    with pytest.raises(NotHeld):
        await lock.release()
    lease = await lock.acquire()
    await redis.set(NAME, "somebody else", px=MINUTE)
    with pytest.raises(LeaseLost) as caught:
        await lease.release()
    assert caught.value.reason == "taken"
    await redis.delete(NAME)
    compatible = Lock(redis, NAME, timeout=10)
    assert await compatible.acquire()
    await redis.set(NAME, "somebody else", px=MINUTE)
    with pytest.raises(LockNotOwnedError):
        await compatible.release()


async def test_p3_a_lock_that_is_free_again_wakes_its_waiters(redis: Client, sync: Coordinator) -> None:
    """P3: the textbooks poll; here the end of a lease, or a DEL by hand, is noticed by the waiters."""
    lock = AsyncLock(sync, NAME)
    await redis.set(NAME, "theirs", px=MINUTE)
    waiting = asyncio.create_task(lock.acquire(timeout=5))

    async def queued() -> bool:
        return (await lock.statistics()).waiting == 1

    await wait_until(queued, FAST, timeout=15)
    await redis.delete(NAME)
    await (await waiting).release()
