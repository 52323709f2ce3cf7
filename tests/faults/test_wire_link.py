"""P3, P5, P12, FAULTS B5, C2, C6, C7: the connection is lost while somebody waits, holds, asks or gives up."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis
from redis.credentials import CredentialProvider

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReentrantLock,
    AsyncSemaphore,
    CommandRefused,
    Coordinator,
    LeaseLost,
    Unreachable,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed
from redis_sync_aio.testing.faults import Action, FaultProxy, anything, arg, command, script
from redis_sync_aio.types import Push

from ..conftest import MakeClient
from ..support.body import FAST, waits
from ..support.inside import Connection, Link, hub_of, load, now, permit_keys
from ..support.primitives import WATCHED_LOCK, Client
from ..support.views import tokens
from ..support.wire_sweep import ANSWERS
from ..support.wired import (
    ACQUIRE,
    FORCE,
    MODES,
    READ,
    RELEASE,
    RENEW,
    RESPONSE_TIMEOUT,
    RETRY_FOR,
    SOON,
    Wired,
    wired,
)
from ..support.wired import quiet_loop as quiet_loop


async def gap(w: Wired) -> None:
    """Lose the connection; there is no other until `refuse` is False again."""
    w.proxy.refuse = True
    await w.proxy.cut()
    await wait_until(lambda: w.sync.connection_error is not None, SOON, timeout=15)


# -- reconnecting ------------------------------------------------------------------------------------------


async def test_rechecks_come_first(server: EmbeddedServer) -> None:
    """P3, C7: on a new connection every lease and every waiter is looked at before anything else is sent."""
    order: list[str] = []
    kinds = {"acquire": ACQUIRE, "release": RELEASE, "renew": RENEW, "inspect": READ}

    def note(args: list[bytes]) -> bool:
        order.extend(f"{kind} {args[3].decode()}" for kind, is_it in kinds.items() if is_it(args))
        return False

    async with wired(server) as w:
        held = [await w.sync.lock(name).acquire() for name in ("held 1", "held 2")]
        foreign = [await w.other.lock(name).acquire() for name in ("waited 1", "waited 2")]
        waiting = [asyncio.create_task(w.sync.lock(name).acquire()) for name in ("waited 1", "waited 2")]
        for one in foreign:
            w.name = one.name
            await w.queued()
        await gap(w)
        looking = asyncio.create_task(w.sync.lock("new").statistics())
        late = asyncio.create_task(w.sync.lock("new").acquire())
        await asyncio.sleep(0)  # both have asked
        w.proxy.on(note, Action.DROP)
        w.proxy.refuse = False
        new = await late
        await looking
        assert sorted(order[:4]) == ["acquire waited 1", "acquire waited 2", "renew held 1", "renew held 2"]
        assert order[4:] == ["inspect new", "acquire new"]
        for one in (*foreign, *held, new):
            await one.release()
        for task in waiting:
            await (await task).release()


async def test_grant_in_the_gap(server: EmbeddedServer) -> None:
    """C7: released while nobody hears us; the waiter has the lock within a second of the way being open again."""
    async with wired(server) as w:
        holder = await w.elsewhere().acquire()
        waiting = asyncio.create_task(w.lock().acquire())
        await w.queued()
        await gap(w)
        await holder.release()
        w.proxy.refuse = False
        start = now()
        lease = await waiting
        assert now() - start <= 1.0
        assert lease.fence > holder.fence
        await lease.release()
        await w.check_free(lease.fence)


async def test_place_in_the_queue_survives(server: EmbeddedServer) -> None:
    """P2, P4: who waited first is first also after its connection was replaced."""
    async with wired(server) as w:
        holder = await w.elsewhere().acquire()
        first = asyncio.create_task(w.lock().acquire())
        await w.queued()
        second = asyncio.create_task(w.elsewhere().acquire())
        await w.queued(2)
        opened = w.sync.connections
        await w.proxy.cut()
        await wait_until(lambda: w.sync.connections > opened, SOON, timeout=15)
        await w.lock().statistics()  # follows the rechecks
        await holder.release()
        lease = await asyncio.wait_for(first, 1)
        assert not second.done()
        await lease.release()
        await (last := await second).release()
        assert holder.fence < lease.fence < last.fence


@pytest.mark.parametrize(("ttl", "poll_cap"), [(30.0, 0.3), (4.0, 100.0)], ids=["poll cap", "remaining lease"])
async def test_lost_push_is_healed(server: EmbeddedServer, ttl: float, poll_cap: float) -> None:
    """P3: a lost grant is found within min(remaining lease of the holder, poll cap)."""
    async with wired(server, poll_cap=poll_cap) as w:
        holder = await w.elsewhere(ttl=ttl, auto_renew=False).acquire()
        waiting = asyncio.create_task(w.lock().acquire())
        await w.queued()
        lost = w.proxy.on_push(anything, Action.DROP)
        await holder.release()
        begin = now()
        lease = await waiting
        assert lost.acted == 1
        assert now() - begin <= min(ttl, poll_cap) + 0.1
        await w.check_held(lease)
        await lease.release()
        await w.check_free(lease.fence)


async def test_cut_ten_times_a_second(server: EmbeddedServer) -> None:
    """C7: 50 waiters, some of them straight to the server; all get the lock, one at a time, and none is stuck."""
    inside, fences = 0, list[int]()

    async with wired(server) as w:

        async def section(number: int) -> None:
            nonlocal inside
            async with (w.lock() if number % 5 else w.elsewhere()).acquire() as lease:
                inside += 1
                assert inside == 1
                fences.append(lease.fence)
                await asyncio.sleep(0.03)  # the section's own work, over which the connection is cut
                inside -= 1

        async def cutter() -> None:
            for _ in range(20):
                await asyncio.sleep(0.1)  # the fault's own rate
                await w.proxy.cut()

        async with asyncio.timeout(15), asyncio.TaskGroup() as tasks:
            tasks.create_task(cutter())
            for number in range(50):
                tasks.create_task(section(number))
        assert fences == sorted(set(fences))
        assert len(fences) == 50
        assert w.sync.connections > 3
        await w.check_free(fences[-1])


async def test_idle_coordinator_stays_away(server: EmbeddedServer) -> None:
    """P9: without a lease and a waiter a lost connection is not replaced; the next use does that."""
    async with wired(server) as w:
        await (await w.lock().acquire()).release()
        opened = w.proxy.connections
        await w.proxy.cut()
        await wait_until(lambda: w.sync.connection_error is not None, SOON, timeout=15)
        lease = await w.lock().acquire()
        assert w.proxy.connections == opened + 1
        await lease.release()
        await w.check_free(lease.fence)


class OutOfOrder(CredentialProvider):
    """Asks somebody else for the password, who is not there."""

    def get_credentials(self) -> tuple[str]:
        raise RuntimeError("the vault is sealed")


@pytest.mark.parametrize("mode", ["link", "plain"])
async def test_connecting_fails_unexpectedly(server: EmbeddedServer, mode: str) -> None:
    """P12: whatever the client's own hooks raise is retried, and told with its cause after `retry_for`."""
    async with wired(server, mode, client={"credential_provider": OutOfOrder()}) as w:
        with pytest.raises(Unreachable, match="the vault is sealed"):
            async with asyncio.timeout(RETRY_FOR + 2):
                await w.lock().acquire()


@pytest.mark.parametrize("push", ["auto", "never"])
async def test_options_that_redis_py_refuses(push: Push) -> None:
    """P12: they come out as an error of ours, with redis-py's words."""
    limits: dict[str, Any] = {"retry_for": 0.1, "response_timeout": 0.1}
    async with Redis(protocol=9) as client, Coordinator(client, push=push, **limits) as sync:
        with pytest.raises(Unreachable, match="protocol must be"):
            await sync.lock("never").acquire()


async def test_foreign_message_in_the_inbox(server: EmbeddedServer) -> None:
    """P12: a message that is none of ours is ignored; neither the connection nor a waiter suffers."""
    async with wired(server) as w:
        holder = await w.elsewhere().acquire()
        waiting = asyncio.create_task(w.lock().acquire())
        await w.queued()
        opened = w.sync.connections
        for channel in await w.direct.pubsub_channels("rsa:*"):
            for garbage in (b"x", b"1 2 3", b"1 2 3 4 5", b"\xff 1 1 1", b"-1 -1 -1 -1", b"0 0 0 0"):
                await w.direct.publish(channel, garbage)
        await holder.release()
        lease = await asyncio.wait_for(waiting, 2)
        assert w.sync.connections == opened
        await lease.release()
        await w.check_free(lease.fence)


# -- giving up in the gap ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["cancelled", "timed out"])
async def test_ticket_of_a_waiter_that_gives_up_in_the_gap(server: EmbeddedServer, way: str) -> None:
    """P5: it had looked again, without success, before it gave up; its place in the queue goes all the same."""
    async with wired(server, poll_cap=0.1) as w:
        holder = await w.elsewhere().acquire()
        other = await w.sync.lock("other").acquire()  # so that the coordinator comes back by itself
        waiting = asyncio.create_task(w.lock().acquire(timeout=0.6 if way == "timed out" else None))
        await w.queued()
        await gap(w)
        await asyncio.sleep(0.3)  # three times the poll cap: it has looked again
        if way == "cancelled":
            waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        w.proxy.refuse = False
        await other.release()
        await holder.release()
        await w.check_free(holder.fence)


@pytest.mark.parametrize("mode", ["link", "plain"])
async def test_clean_up_is_not_overtaken(server: EmbeddedServer, mode: str) -> None:
    """P5, B4: a request that is in flight for long, and arrives after what undid it, takes nothing."""
    async with wired(server, mode) as w:
        await (await w.lock().acquire()).release()
        late = w.proxy.on(ACQUIRE, Action.HOLD)
        undone = w.proxy.on(RELEASE, Action.PASS)
        acquiring = asyncio.create_task(w.lock().acquire())
        await late.fired.wait()
        acquiring.cancel()
        await asyncio.gather(acquiring, return_exceptions=True)
        await w.proxy.until(lambda: undone.acted > 0)  # on a new connection, when the old one was given up
        await w.lock().statistics()
        passed = w.proxy.commands["EVALSHA"]
        late.release.set()
        with suppress(TimeoutError):  # it gets there, or its connection is gone
            await asyncio.wait_for(w.proxy.until(lambda: w.proxy.commands["EVALSHA"] > passed), 0.2)
        await w.check_free(0)


@pytest.mark.parametrize("mode", ["link", "plain"])
async def test_client_closed_in_the_gap(server: EmbeddedServer, mode: str) -> None:
    """P12, E4: holders and waiters hear of it immediately, although there is no connection that could be closed."""
    async with wired(server, mode) as w:
        lease = await w.lock(ttl=1).acquire()
        waiting = asyncio.create_task(w.lock().acquire())
        await w.queued(waiting=waiting)
        w.proxy.refuse = True
        await w.proxy.cut()
        await asyncio.sleep(RESPONSE_TIMEOUT)
        await w.client.aclose()
        async with asyncio.timeout(0.1):
            await lease.wait_lost()
            with pytest.raises(CoordinatorClosed, match="client"):
                await waiting
        with pytest.raises(LeaseLost) as raised:
            lease.check()
        assert raised.value.reason == "closed"


@pytest.mark.parametrize("mode", MODES)
async def test_no_answer_to_the_script_itself(server: EmbeddedServer, mode: str) -> None:
    """P4, C3, D3: the server does not know the script, takes its source, and is not heard: that is no refusal."""
    async with wired(server, mode) as w:
        w.proxy.on(ACQUIRE, ANSWERS["NOSCRIPT"])
        unheard = w.proxy.on("EVAL", Action.SWALLOW_REPLY)
        lease = await w.lock().acquire()
        assert unheard.acted == 1
        await w.check_held(lease)
        await lease.release()  # in full, behind an acquire that got no answer
        lease = await w.lock().acquire()
        w.proxy.on(RELEASE, ANSWERS["NOSCRIPT"])
        unheard = w.proxy.on("EVAL", Action.SWALLOW_REPLY)
        await lease.release()
        assert unheard.acted == 1
        await w.check_free(lease.fence)


@pytest.mark.parametrize("code", ["LOADING", "READONLY"])
async def test_refused_after_a_lost_grant(server: EmbeddedServer, code: str) -> None:
    """P4, C2, D9: granted, the answer lost, and "not now" ever after: what is given up is undone as well.

    Nobody says that nothing was changed.
    """
    async with wired(server, retry_for=0.4) as w:
        w.proxy.on(ACQUIRE, Action.CUT_AFTER)
        later = w.proxy.on(ACQUIRE, ANSWERS[code], times=None)
        with pytest.raises(Unreachable, match=f"before that it answered {code}"):
            await w.lock().acquire()
        assert later.acted > 0

        async def free() -> bool:
            return not await w.elsewhere().locked()

        await wait_until(free, SOON, timeout=15)
        await w.check_free(0)


async def test_refused_while_waiting(server: EmbeddedServer) -> None:
    """P4, D9: so is the place in the queue."""
    async with wired(server, retry_for=0.4, poll_cap=0.1) as w:
        holder = await w.elsewhere().acquire()
        waiting = asyncio.create_task(w.lock().acquire())
        await w.queued()
        w.proxy.on(ACQUIRE, ANSWERS["MISCONF"], times=None)
        with pytest.raises((CommandRefused, Unreachable), match="MISCONF"):  # the latter in the middle of an attempt
            await waiting
        await w.lock().statistics()  # follows whatever undoes it
        await holder.release()
        await w.check_free(holder.fence)


@pytest.mark.parametrize("mode", ["link", "plain", "plain, retried by redis-py"])
async def test_force_release_is_sent_once(server: EmbeddedServer, mode: str) -> None:
    """P4: forcing twice would hit the next holder; so a lost answer is reported, and the next holder is left alone."""
    async with wired(server, mode) as w:
        holder = await w.elsewhere().acquire()
        waiting = asyncio.create_task(w.elsewhere().acquire())
        await w.queued()
        sent = w.proxy.on(FORCE, Action.CUT_AFTER)
        with pytest.raises(Exception, match=r"may have been executed or not|did not answer"):
            await AsyncLock(w.sync, w.name).force_release()
        following = await waiting
        await w.lock().statistics()  # whatever else was sent has been executed
        assert sent.hits == 1
        await w.check_held(following)
        await following.release()
        await w.check_free(holder.fence)


async def test_wire_of_another_lock_does_not_matter(server: EmbeddedServer) -> None:
    """P12: an error answer for one name says nothing about another one on the same connection."""
    async with wired(server) as w:
        w.proxy.on(lambda args: ACQUIRE(args) and arg("bad")(args), ANSWERS["BUSY"], times=3)
        bad = asyncio.create_task(w.sync.lock("bad").acquire())
        good = await w.lock().acquire(timeout=1)
        await good.release()
        await (await bad).release()
        await w.check_free(good.fence)


async def test_p3_what_woken_tasks_send_leaves_in_the_turn_that_wakes_them(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer wakes tasks that release immediately: in the same turn of the loop that is written."""
    seen: list[str | int] = []
    flush = Connection._flush

    def spy(connection: Connection) -> None:
        if connection._out:
            seen.append(len(connection._out))
        flush(connection)

    async with server.client() as client, Coordinator(client) as sync:
        locks = [AsyncLock(sync, f"turn:{number}") for number in range(5)]
        loop = asyncio.get_running_loop()

        async def pair(lock: AsyncLock) -> None:
            lease = await lock.acquire()
            loop.call_soon(seen.append, "the next turn")
            await lease.release()

        await asyncio.gather(*map(pair, locks))  # scripts and connection are there now
        seen.clear()
        monkeypatch.setattr(Connection, "_flush", spy)
        await asyncio.gather(*map(pair, locks))
    assert seen[0] == 5, "the acquires together"
    assert seen[1] != "the next turn"
    assert (sum(it for it in seen if isinstance(it, int)), seen.count("the next turn")) == (10, 5)


async def test_p12_a_request_before_the_script_is_known_leaves_no_tombstone(server: EmbeddedServer) -> None:
    """A copy that was refused was not executed: the one that brings the source is the first, and nothing is undone."""
    async with server.client() as client, Coordinator(client) as sync:
        crowd = [AsyncSemaphore(sync, "newcomers", limit=2) for _ in range(6)]

        async def pair(semaphore: AsyncSemaphore) -> None:
            await (await semaphore.acquire()).release()

        await pair(crowd[0])
        await client.script_flush()
        await asyncio.gather(*map(pair, crowd))
        permits = permit_keys(b"newcomers", "sem").all[0]
        assert await client.zrange(permits, 0, -1) == []


# -- P1, P3, P12, FAULTS C6, C7: one connection takes another one's place.


async def reconnected(w: Wired) -> None:
    opened = w.sync.connections
    await w.proxy.cut()
    await wait_until(lambda: w.sync.connections > opened, SOON, timeout=15)


@pytest.mark.parametrize("lives", [False, True, "elsewhere", "longer"])
async def test_only_our_own_old_connection_is_killed(
    server: EmbeddedServer, make_client: MakeClient, lives: bool | str
) -> None:
    """After a restart its id is somebody else's; after a failover, too. Who hears all channels is not taken for it."""
    async with wired(server) as w:
        monitor = make_client().pubsub()
        await monitor.psubscribe("*")
        stranger = make_client(single_connection_client=True)
        await stranger.initialize()
        link = hub_of(w.sync).link
        assert isinstance(link, Link)
        lease = await w.lock().acquire()
        if lives:
            inbox = make_client(client_name="old").pubsub()
            await inbox.subscribe(link._handshake.inbox)  # stands for the old connection
            await inbox.get_message(timeout=5)
            (known,) = [int(one["id"]) for one in await w.direct.client_list() if one["name"] == "old"]
        else:
            known = await stranger.client_id()
        newest = link._handshake._newest
        assert newest is not None
        link._handshake._newest = ("elsewhere", 1) if lives == "elsewhere" else newest[0], known
        if lives == "longer":  # the first connection that would kill it is cut before
            w.proxy.on("PUBSUB", Action.CUT_BEFORE)
        await reconnected(w)
        assert link.alone is (lives != "elsewhere")

        async def gone() -> bool:
            return known not in [int(one["id"]) for one in await w.direct.client_list()]

        assert await gone() is (lives in (True, "longer"))
        await w.check_held(lease)
        await lease.release()
        await monitor.aclose()  # type: ignore[no-untyped-call]


@pytest.mark.real  # in virtual time a key may have too little time left
async def test_p1_p6_by_watch_the_time_of_a_talk_is_its_own(server: EmbeddedServer) -> None:
    """A conflict's pause that outlasts its connection does not touch what was begun again on the next one."""
    async with wired(server, kind=WATCHED_LOCK) as w:
        fence = w.kind.keys(w.name).all[2]
        for _ in range(12):
            await (await w.lock(ttl=5).acquire()).release()
            acquiring = asyncio.create_task(w.lock(ttl=5, auto_renew=False).acquire())
            for _ in range(8):  # until the pause is at its longest
                rule = w.proxy.on(command("EXEC"), Action.HOLD, times=1)
                await rule.fired.wait()
                await w.direct.set(fence, await w.direct.get(fence) or b"")
                rule.release.set()
            await asyncio.sleep(0.001)
            await w.proxy.cut()
            slow = w.proxy.on(command("EXEC"), Action.HOLD_REPLY, skip=1, times=1)  # the first: a proof
            await slow.fired.wait()
            await asyncio.sleep(0.03)
            slow.release.set()
            lease = await acquiring
            left = await w.direct.pttl(w.name) / 1000
            assert lease.remaining() <= left + 0.001
            await lease.release()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="there are no eager tasks")
async def test_p12_eager_tasks(make_client: MakeClient) -> None:
    """A connection that fails immediately, in an eager task, is tried again."""
    client = make_client()
    pool: Client = client.connection_pool
    make = pool.make_connection
    loop = asyncio.get_running_loop()

    def failing() -> None:
        pool.make_connection = make
        raise RuntimeError("no credentials yet")

    async with Coordinator(client, retry_for=5) as sync:
        hub_of(sync).check()
        pool.make_connection = failing
        loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined, unused-ignore]
        try:
            async with asyncio.timeout(5), AsyncLock(sync, "eager"):
                pass
        finally:
            loop.set_task_factory(None)


# -- P4, P5: the connection is lost with a request in flight, and the next one is refused: the waiters po


FALL = "{fall}:1"
LOCKS: dict[str, Callable[[Coordinator], AsyncLock | AsyncReentrantLock | AsyncMultiLock]] = {
    "lock": lambda sync: AsyncLock(sync, FALL),
    "reentrant": lambda sync: AsyncReentrantLock(sync, FALL),
    "multi": lambda sync: AsyncMultiLock(sync, [FALL, "{fall}:2"]),
    "multi of several slots": lambda sync: AsyncMultiLock(sync, [FALL, "other"]),
}


@pytest_asyncio.fixture
async def proxy(server: EmbeddedServer, redis: Redis) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(server) as running:
        yield running


@pytest_asyncio.fixture
async def sync(proxy: FaultProxy) -> AsyncIterator[Coordinator]:
    async with (
        proxy.client() as client,
        Coordinator(client, response_timeout=1) as coordinator,
    ):
        yield coordinator


def no_more_pushes(proxy: FaultProxy) -> None:
    proxy.on(
        "SUBSCRIBE",
        Action.answer_error("NOPERM this user has no permissions to run the 'subscribe' command"),
        times=None,
    )


@pytest.mark.parametrize("kind", LOCKS)
@pytest.mark.parametrize("timeout", [0, 5])
async def test_p4_granted_and_the_answer_lost(proxy: FaultProxy, sync: Coordinator, kind: str, timeout: float) -> None:
    lock = LOCKS[kind](sync)
    await (await lock.acquire()).release()
    for name in ("lock/acquire", "lock/acquire_all"):
        proxy.on(script(load(name).sha), Action.CUT_AFTER)
    no_more_pushes(proxy)
    lease = await lock.acquire(timeout=timeout)
    lease.check()
    await lease.release()
    assert not await lock.locked()


async def test_p2_queued_and_the_connection_lost(proxy: FaultProxy, sync: Coordinator, redis: Redis) -> None:
    """The ticket of the lost connection does not stay behind."""
    lock = AsyncLock(sync, FALL)
    async with Coordinator(redis) as other:
        rival = AsyncLock(other, FALL)
        holder = await rival.acquire()
        waiting = asyncio.create_task(lock.acquire(timeout=10))
        await wait_until(waits(rival), FAST, timeout=15)
        (before,) = tokens((await rival.statistics()).waiters)
        no_more_pushes(proxy)
        await proxy.cut()

        async def queued_anew() -> bool:
            waiters = tokens((await rival.statistics()).waiters)
            return len(waiters) == 1 and waiters[0] != before

        await wait_until(queued_anew, FAST, timeout=15)
        await holder.release()
        await (await waiting).release()
        assert not await rival.locked()
