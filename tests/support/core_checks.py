"""Checks of the Python core in simulation (see `gate.py`), for `tests/mutation/test_core_mutants.py`."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import pytest
import redis
from redis.asyncio import Redis

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncRobustLock,
    CommandRefused,
    Coordinator,
    Lease,
    LeaseLost,
    Unreachable,
)
from redis_sync_aio.embedded import EmbeddedServer

from .gate import Command, Gate, Pipe
from .inside import link_of, load, tuned
from .schedule import KINDS, SCRIPTS, run, sha
from .schedule_locks import LOCK
from .views import holder_of

Check = Callable[["Sim"], Awaitable[None]]
Trial: TypeAlias = Callable[[Gate, Any], Callable[[], Coroutine[Any, Any, None]]]
"""Makes the main function of a run behind a gate, with a client of the server."""
Found: TypeAlias = tuple[str, BaseException] | None
"""The trial that failed, and what it raised."""


@dataclass
class Sim:
    """Two coordinators of one lock, and what is to happen on the way."""

    gate: Gate
    server: Any
    link: bool
    rules: list[tuple[str, Callable[[Pipe], object]]] = field(default_factory=list)
    sync: Coordinator = field(init=False)
    other: Coordinator = field(init=False)
    client: Redis = field(init=False)

    @asynccontextmanager
    async def coordinators(self, **options: Any) -> AsyncIterator[None]:
        options = {"push": "always" if self.link else "never", "response_timeout": 1000, **options}
        async with (
            self.gate.client() as self.client,
            self.gate.client() as client,
            tuned(self.client, **options) as self.sync,
            Coordinator(client, response_timeout=1000) as self.other,
        ):
            yield
            assert self.server.keys("{l}:[qp]*") == [], "left behind"

    def on(self, kind: str, act: Callable[[Pipe], object]) -> None:
        """Do something when the next command of this kind gets to the server; False: refuse it."""
        self.rules.append((kind, act))

    def permits(self, pipe: Pipe, words: Command) -> bool:
        if words[0] in (b"EVALSHA", b"EVAL"):
            for rule in self.rules:
                if rule[0] == KINDS.get(sha(words)):
                    self.rules.remove(rule)
                    return rule[1](pipe) is not False
        return True

    def later(self, seconds: float) -> Callable[[Pipe], None]:
        """It takes its time."""

        def pass_time(_: Pipe) -> None:
            self.gate.time += seconds

        return pass_time

    def cut(self, _: Pipe) -> None:
        """The connections of `sync` are lost once this is executed, and its answer with them."""
        asyncio.get_running_loop().call_soon(self.cut_now)

    def cut_now(self, _: Pipe | None = None) -> None:
        for pipe in self.pipes():
            pipe.cut()

    def pipes(self) -> list[Pipe]:
        other = link_of(self.other)._connection
        return [pipe for pipe in self.gate.pipes if not (other and other._transport is pipe)]

    def refuse(self, _: Pipe) -> bool:
        return False

    async def waiting(self, **options: Any) -> asyncio.Task[Lease]:
        """Start to acquire, and return once the request is answered."""
        task = asyncio.create_task(AsyncLock(self.sync, "l", **options).acquire())
        await asyncio.sleep(0.5)
        return task

    async def check_free(self) -> None:
        found = await AsyncLock(self.other, "l").statistics()
        assert (holder_of(found), found.waiting) == (None, 0)


async def check_the_deadline_counts_from_the_send(sim: Sim) -> None:
    async with sim.coordinators():
        sim.on("lock/acquire", sim.later(3))
        lease = await AsyncLock(sim.sync, "l", ttl=10).acquire()
        assert 6 < lease.remaining() <= 7
        sim.on("lock/renew", sim.later(4))
        await lease.extend(20)
        assert 15 < lease.remaining() <= 16
        await lease.release()


async def check_the_deadline_of_a_push(sim: Sim) -> None:
    async with sim.coordinators(claim=20):
        held = await AsyncLock(sim.other, "l").acquire()
        waiting = await sim.waiting(ttl=10, auto_renew=False)
        sim.on("lock/release", sim.later(5))
        await held.release()
        lease = await waiting
        assert lease.remaining() <= (4.6 if sim.link else 10)
        await lease.release()


async def check_a_push_from_the_future(sim: Sim) -> None:
    """Then nothing but the server can say how long the lease lasts."""
    sim.gate.step = 0
    async with sim.coordinators():
        held = await AsyncLock(sim.other, "l").acquire()
        waiting = asyncio.create_task(AsyncLock(sim.sync, "l", ttl=10, auto_renew=False).acquire())
        await asyncio.sleep(0.001)
        time.sleep(0.01)  # noqa: ASYNC251 - of the server's time, none of ours
        if sim.link:
            sim.on("lock/acquire", sim.later(1))
        await held.release()
        lease = await waiting
        assert not sim.rules
        assert lease.remaining() <= (9 if sim.link else 10)
        await lease.release()


async def check_a_grant_later_than_its_ttl_is_none(sim: Sim) -> None:
    async with sim.coordinators():
        sim.on("lock/acquire", sim.later(3))
        lease = await AsyncLock(sim.sync, "l", ttl=2).acquire()
        lease.check()
        await lease.release()


async def check_a_claim_that_is_almost_over_is_none(sim: Sim) -> None:
    """It would end before its first renewal is answered, and with it the body. The request is sent again."""
    # Without a link, a poll may be in flight while the release takes its time: it is sent again, too.
    async with sim.coordinators(claim=300, retry_for=1000):
        held = await AsyncLock(sim.other, "l", ttl=600).acquire()
        waiting = await sim.waiting(ttl=600)
        sim.on("lock/release", sim.later(296.5))  # of 300, of which the fiftieth part is 6
        with suppress(Unreachable):  # so late is its answer
            await held.release()
        lease = await waiting
        assert lease.remaining() > 250
        await lease.release()


async def check_the_claim(sim: Sim) -> None:
    for auto_renew, claim in ((True, 12), (False, 60)):
        async with sim.coordinators(claim=12):
            held = await AsyncLock(sim.other, "l").acquire()
            waiting = await sim.waiting(ttl=60, auto_renew=auto_renew)
            await held.release()
            lease = await waiting
            if sim.link:
                assert claim - 1 < sim.server.pttl("l") / 1000 <= claim
            await asyncio.sleep(2.5)
            assert 50 < lease.remaining() <= 60, "renewed after a sixth of the claim, for the whole ttl"
            await lease.release()


def soon(act: Callable[[], object], _: Pipe) -> None:
    """Once the command is executed, and before its answer arrives."""
    asyncio.get_running_loop().call_soon(act)


async def check_a_cancelled_request_leaves_nothing(sim: Sim) -> None:
    for identity in (None, "me"):
        async with sim.coordinators():
            assert not await AsyncLock(sim.sync, "l").locked()
            asking = asyncio.create_task(AsyncLock(sim.sync, "l").acquire(identity=identity))
            sim.on("lock/acquire", partial(soon, asking.cancel))
            await asyncio.wait([asking])
            assert asking.cancelled()
            await asyncio.sleep(0.1)
            await sim.check_free()


async def check_a_cancelled_request_takes_nothing_from_its_namesakes(sim: Sim) -> None:
    """Neither from one that asks next nor from one that asks at the same time; and if that is cancelled, too, …"""
    for beside, both in ((False, False), (True, False), (True, True)):
        async with sim.coordinators():
            lock = AsyncLock(sim.sync, "l")
            assert not await lock.locked()
            first = asyncio.create_task(lock.acquire(identity="me", ttl=5))
            second = asyncio.create_task(lock.acquire(identity="me")) if beside else None
            sim.on("lock/acquire", partial(soon, first.cancel))
            if second is not None and both:
                sim.on("lock/acquire", partial(soon, second.cancel))
            await asyncio.wait([first])
            assert first.cancelled()
            second = second or asyncio.create_task(lock.acquire(identity="me"))
            await asyncio.wait([second])
            await asyncio.sleep(0.1)
            if both:
                assert second.cancelled()
            else:
                assert second.result().remaining() > (0 if beside else 20), "what was cancelled decides nothing"
                assert await AsyncLock(sim.other, "l").try_acquire() is None
                await second.result().release()
            await sim.check_free()


async def check_a_grant_that_a_namesake_has_joined_stays(sim: Sim) -> None:
    """Its own request is cancelled while it adopts the record, and the other lease is there by then."""
    async with sim.coordinators():
        lock = AsyncRobustLock(sim.sync, "l")
        assert not await lock.locked()
        first, second = (asyncio.create_task(lock.acquire(identity="me")) for _ in range(2))
        sim.on("robust/adopt", lambda _: None)  # its own
        sim.on("robust/adopt", partial(soon, first.cancel))
        await asyncio.wait([first])
        assert first.cancelled()
        lease = await second
        await asyncio.sleep(0.1)
        lease.check()
        assert await AsyncRobustLock(sim.other, "l").try_acquire() is None
        await lease.release()
        await sim.check_free()


async def check_a_wait_that_is_over_leaves_nothing(sim: Sim) -> None:
    async with sim.coordinators():
        held = await AsyncLock(sim.other, "l").acquire()
        with pytest.raises(AcquireTimeout):
            await AsyncLock(sim.sync, "l").acquire(timeout=1)
        await asyncio.sleep(0.1)
        assert (await AsyncLock(sim.other, "l").statistics()).waiting == 0
        await held.release()
        await sim.check_free()


async def check_a_lost_answer_to_a_request(sim: Sim) -> None:
    async with sim.coordinators():
        sim.on("lock/acquire", sim.cut)
        async with asyncio.timeout(5):
            lease = await AsyncLock(sim.sync, "l").acquire()
        await lease.release()


async def check_a_lost_answer_to_a_release(sim: Sim) -> None:
    async with sim.coordinators():
        lease = await AsyncLock(sim.sync, "l").acquire()
        sim.on("lock/release", sim.cut)
        await lease.release()


async def check_a_lost_answer_to_force_release(sim: Sim) -> None:
    async with sim.coordinators():
        lease = await AsyncLock(sim.other, "l").acquire()
        sim.on("lock/force_release", sim.cut)
        with pytest.raises(Unreachable):
            await AsyncLock(sim.sync, "l").force_release()
        with pytest.raises(LeaseLost):
            await lease.release()


async def check_a_grant_in_the_gap(sim: Sim) -> None:
    async with sim.coordinators(poll_cap=1000, claim=600):
        held = await AsyncLock(sim.other, "l", ttl=600).acquire()
        waiting = await sim.waiting(ttl=600)
        sim.on("lock/release", sim.cut_now)
        await held.release()
        async with asyncio.timeout(5):
            await (await waiting).release()


async def check_a_dead_holder(sim: Sim) -> None:
    async with sim.coordinators(poll_cap=5):
        await AsyncLock(sim.other, "l", ttl=600, auto_renew=False).acquire()
        waiting = await sim.waiting()
        sim.server.delete("l")
        async with asyncio.timeout(6):
            await (await waiting).release()


async def check_an_unknown_renewal_is_no_loss(sim: Sim) -> None:
    async with sim.coordinators(retry_for=2):
        lease = await AsyncLock(sim.sync, "l", ttl=60).acquire()
        sim.on("lock/renew", sim.refuse)
        await asyncio.sleep(21)
        assert not lease.lost
        await asyncio.sleep(10)
        assert lease.remaining() > 40, "another renewal came through"
        sim.gate.refuse = True
        sim.cut_now()
        with pytest.raises(Unreachable):
            await lease.extend(60)
        assert not lease.lost
        sim.gate.refuse = False
        await asyncio.sleep(5)
        await lease.release()


async def check_a_refused_extension_changes_nothing(sim: Sim) -> None:
    async with sim.coordinators(retry_for=2):
        lease = await AsyncLock(sim.sync, "l", ttl=60, auto_renew=False).acquire()
        sim.on("lock/renew", sim.refuse)
        with pytest.raises(CommandRefused):
            await lease.extend(1)
        assert 50 < lease.remaining() <= 60
        sim.on("lock/renew", sim.cut)
        sim.gate.refuse = True
        with pytest.raises(Unreachable):
            await lease.extend(20)  # it was executed, and nobody knows
        sim.gate.refuse = False
        await asyncio.sleep(5)
        await AsyncLock(sim.sync, "l").locked()
        sim.on("lock/renew", sim.refuse)
        with pytest.raises(CommandRefused):
            await lease.extend(1)
        assert 5 < lease.remaining() <= 20
        await lease.release()


async def check_a_reconnect_finds_the_lease_gone(sim: Sim) -> None:
    if sim.link:
        async with sim.coordinators():
            lease = await AsyncLock(sim.sync, "l", ttl=600).acquire()
            sim.server.delete("l")
            sim.cut_now()
            await asyncio.sleep(5)
            assert lease.lost


async def hold_until_lost(sim: Sim, ends: BaseException | None = None, **options: Any) -> float:
    """Hold the lock; return how long the body ran before it was cancelled."""
    began = sim.gate.time
    try:
        async with AsyncLock(sim.sync, "l", **options):
            try:
                await asyncio.sleep(100)
            finally:
                began = sim.gate.time - began
                if ends is not None:
                    raise ends
    except LeaseLost:
        pass
    return began


async def check_max_hold_ends_the_body(sim: Sim) -> None:
    async with sim.coordinators():
        assert 4.9 < await hold_until_lost(sim, ttl=2, max_hold=5) < 5.1


async def check_the_deadline_ends_the_body(sim: Sim) -> None:
    async with sim.coordinators():
        ran = asyncio.create_task(hold_until_lost(sim, ttl=3))
        await asyncio.sleep(0.5)
        sim.gate.refuse = True
        sim.cut_now()
        assert 2.9 < await ran < 3.1
        sim.gate.refuse = False


async def check_the_error_of_the_body_leaves(sim: Sim) -> None:
    async with sim.coordinators():
        with pytest.raises(KeyError) as raised:
            await hold_until_lost(sim, KeyError("mine"), ttl=2, max_hold=5)
        assert "lost" in raised.value.__notes__[0]


async def check_a_cancellation_from_outside_leaves(sim: Sim) -> None:
    for loss_first in (True, False):
        async with sim.coordinators():
            losing = asyncio.create_task(hold_until_lost(sim, ttl=60))
            await asyncio.sleep(1)
            if not loss_first:
                losing.cancel()
            lease = AsyncLock(sim.sync, "l")._resource().leases
            next(iter(lease)).lose("taken")
            if loss_first:
                losing.cancel()
            await asyncio.wait([losing])
            assert losing.cancelled()
            sim.server.delete("l")


async def check_close_releases(sim: Sim) -> None:
    async with sim.coordinators():
        await AsyncLock(sim.sync, "l").acquire()
        await sim.sync.aclose()
        assert not sim.server.exists("l")


def check_schedules(server: EmbeddedServer) -> None:
    run(server, LOCK, range(200))


def of(check: Check, link: bool) -> Trial:
    """Return the trial that makes this check."""

    def begin(gate: Gate, server: Any) -> Callable[[], Coroutine[Any, Any, None]]:
        sim = Sim(gate, server, link)
        gate.permits = sim.permits

        async def main() -> None:
            async with asyncio.timeout(500):
                await check(sim)

        return main

    return begin


CHECKS: dict[str, Check] = {
    name: check
    for name, check in list(globals().items())
    if name.startswith("check_") and inspect.iscoroutinefunction(check)
}


def failing(
    private: EmbeddedServer,
    trials: Iterable[tuple[str, Trial]],
    schedules: Callable[[EmbeddedServer], object] = lambda _: None,
) -> Found:
    """Run the trials, each on an empty server, then the schedules; return what failed first, and what it raised."""
    # Whatever broken code does to a check; Failed is what pytest.raises raises.
    anything = (Exception, asyncio.CancelledError, pytest.fail.Exception)
    with redis.Redis(unix_socket_path=private.unix_socket) as server:
        for name in SCRIPTS:
            server.script_load(load(name).source)
        for name, trial in trials:
            server.flushall()
            with Gate(private.unix_socket) as gate:
                try:
                    gate.run(trial(gate, server))
                except anything as error:
                    return name, error
    try:
        schedules(private)
    except anything as error:
        return "schedules", error
    return None


def all_pass(found: Found) -> None:
    """Raise what a trial raised without any mutant."""
    if found is not None:
        raise found[1]


def is_caught(found: Found) -> None:
    """Fail unless a trial failed."""
    assert found is not None, "no check notices"
    print("caught by", found[0], repr(found[1])[:200])
