"""Robust locks and gates under faults: processes killed and stopped, a wire that loses answers, a full server."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncRobustLock, Compensation, Coordinator, FenceGate, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import OutOfMemory, StaleFence, StaleWriter
from redis_sync_aio.testing.faults import Action, FaultProxy, script
from redis_sync_aio.types import UndoSteps

from ..support.body import FAST, waits
from ..support.inside import load, robust_keys
from ..support.processes import Child, Crew, Failed
from ..support.served import served
from ..support.wire_sweep import ANSWERS, WIRE, failures
from ..support.wired import RETRY_FOR, SOON, Wired, quiet_loop, wired

__all__ = ["quiet_loop"]  # a fixture

NAME = "robust"
TTL = 3.0


# -- processes ---------------------------------------------------------------------------------------------


@pytest.mark.real
async def test_a1_a4_killed_twice_or_stopped(
    server: EmbeddedServer, redis: Redis, sync: Coordinator, crew: Crew
) -> None:
    """The third knows how far the first was; who is stopped beyond the ttl cannot record any more."""

    async def killed_twice(first: Child, second: Child) -> None:
        lock = AsyncRobustLock(sync, "killed")
        one = await first.robust("killed", TTL)
        assert one["abandoned"] is None
        await first.ask("record", "it", '{"charged":120}')
        waiting = second.robust("killed", TTL)
        await wait_until(waits(lock), FAST, timeout=30)
        first.kill()
        two = await waiting
        assert two["abandoned"] == one.fence
        second.kill()
        async with lock.acquire(timeout=30) as lease:
            found = lease.abandoned
            assert found is not None
            assert (found.token.encode(), found.fence) == (two.token, two.fence)
            assert found.progress == {"charged": 120}
        async with lock as lease:
            assert lease.abandoned is None

    async def stopped(child: Child) -> None:
        lock, gate = AsyncRobustLock(sync, "stopped"), FenceGate(sync, "stopped")
        late = await child.robust("stopped", TTL)
        await child.ask("record", "it", '{"by":"first"}')
        await gate.accept(late.fence)
        child.stop()
        async with lock.acquire(timeout=30) as lease:
            assert lease.abandoned is not None
            assert lease.abandoned.fence == late.fence
            await lease.record({"by": "second"})
            await gate.accept(lease)
            child.go_on()
            with pytest.raises(Failed, match="LeaseLost"):
                await child.ask("record", "it", '{"by":"late"}')
            with pytest.raises(StaleFence):
                await gate.accept(late.fence)
            assert await redis.hget(robust_keys(b"stopped").record, "progress") == b'{"by":"second"}'

    with crew.children(3) as (one, two, three):
        await asyncio.gather(*(child.open(server.url) for child in (one, two, three)))
        await asyncio.gather(killed_twice(one, two), stopped(three))


@pytest.mark.real
async def test_a3_killed_in_the_middle_of_the_adoption(
    server: EmbeddedServer, redis: Redis, sync: Coordinator, crew: Crew
) -> None:
    """Granted, and never heard of: in either order of adoption and death the progress is there."""

    async def killed(child: Child, proxy: FaultProxy, adopted: bool) -> None:
        name = f"adopted-{adopted}"
        lock = AsyncRobustLock(sync, name)
        left = await lock.acquire()
        await left.record({"step": 1})
        await redis.delete(name)
        left._grant.manager.forget(left._grant)
        await child.open(proxy.url)
        rule = proxy.on(script(load("robust/adopt").sha), Action.HOLD_REPLY if adopted else Action.HOLD)
        grant = child.robust(name, TTL)
        await asyncio.wait_for(rule.fired.wait(), 30)
        token = await redis.get(name)
        child.kill()
        assert not grant.done()
        async with lock.acquire(timeout=30) as lease:
            assert lease.abandoned is not None
            assert lease.abandoned.token.encode() == (token if adopted else left._grant.wire_token)
            assert lease.progress == {"step": 1}
        rule.release.set()

    async with FaultProxy(server.unix_socket) as one, FaultProxy(server.unix_socket) as two:
        with crew.children(2) as children:
            await asyncio.gather(killed(children[0], one, False), killed(children[1], two, True))


# -- the wire ----------------------------------------------------------------------------------------------


async def left_behind(w: Wired, name: str) -> int:
    """Somebody records something, and is gone."""
    lease = await AsyncRobustLock(w.other, name).acquire()
    await lease.record({"step": 1})
    await w.direct.delete(name)
    lease._grant.manager.forget(lease._grant)
    return lease.fence


async def work(w: Wired, name: str) -> None:
    """Everything that a robust lock does; all of it has its effect exactly once, as far as anybody can tell."""
    before = await left_behind(w, name)
    record = robust_keys(name.encode()).record
    steps, ran = UndoSteps(), []

    @steps.step("undo")
    async def undo(*, number: int) -> None:
        ran.append(number)

    lease = await AsyncRobustLock(w.sync, name).acquire()
    assert lease.abandoned is not None
    assert lease.abandoned.fence == before
    assert lease.progress == {"step": 1}
    await lease.record({"step": 2})
    assert await w.direct.hget(record, "progress") == b'{"step":2}'
    await lease.extend(20)  # a renewal, now
    undoing = Compensation(lease, steps)
    with pytest.raises(KeyError):  # noqa: PT012
        async with undoing:
            await undoing.push("undo", number=1)
            await undoing.push("undo", number=2)
            raise KeyError
    assert undoing.errors is None
    assert ran == [2, 1]
    lease.check()
    await lease.release()
    assert not await w.direct.exists(name, record)
    async with AsyncRobustLock(w.other, name) as following:
        assert following.abandoned is None
        assert following.fence > lease.fence
    gate = FenceGate(w.sync, name)
    await gate.accept(following)
    with pytest.raises(StaleFence):
        await gate.accept(lease)
    assert await gate.highest() == following.fence


COMMANDS = {"robust/adopt": 1, "robust/record": 5, "lock/renew": 1, "lock/release": 1, "fence_gate/accept": 3}
"""The scripts that `work` sends, and how often at least."""


async def one_fault(server: EmbeddedServer, mode: str, command: str, skip: int, fault: str, action: Action) -> None:
    name = f"{command}-{skip}-{fault}".replace(" ", "-")
    async with asyncio.timeout(30), wired(server, mode, name=name) as w:
        await w.direct.delete(*robust_keys(name.encode()).all)  # of an earlier run of this case, which went wrong
        for one in COMMANDS:
            await w.direct.script_load(load(one).source.decode())
        rule = w.proxy.on(script(load(command).sha), action, skip=skip)
        await work(w, name)
        assert rule.acted, "the fault did not happen"


@pytest.mark.parametrize("mode", [pytest.param("link", marks=pytest.mark.ci), "plain"])
async def test_p4_every_fault_at_every_command(server: EmbeddedServer, mode: str) -> None:
    """FAULTS C1-C5, D3, D9: 9 faults of the wire at 11 commands (5 without pushes), 9 error answers at 2 of them."""
    points = [(command, skip) for command, count in COMMANDS.items() for skip in range(count if mode == "link" else 1)]
    cases = [(*point, *fault) for point in points for fault in WIRE.items()]
    if mode == "link":
        cases += [(command, 0, *fault) for command in ("robust/adopt", "robust/record") for fault in ANSWERS.items()]
    wrong = await failures(cases, lambda case: one_fault(server, mode, *case))
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(f"{case}: {error!r}" for case, error in wrong)
    assert len(cases) == (117 if mode == "link" else 45)


@pytest.mark.parametrize("mode", ["link", "plain"])
async def test_an_adoption_that_is_never_answered_gives_the_lock_back(server: EmbeddedServer, mode: str) -> None:
    async with wired(server, mode, name=NAME) as w:
        before = await left_behind(w, NAME)
        await AsyncLock(w.sync, "warm").locked()
        rule = w.proxy.on(script(load("robust/adopt").sha), Action.SWALLOW_REQUEST, times=100)
        with pytest.raises(Unreachable):
            await AsyncRobustLock(w.sync, NAME).acquire(timeout=0.1)
        assert rule.acted
        async with AsyncRobustLock(w.other, NAME).acquire(timeout=RETRY_FOR) as lease:
            assert lease.abandoned is not None
            assert lease.abandoned.fence == before


@pytest.mark.parametrize("mode", ["link", "plain"])
async def test_an_adoption_that_another_one_overtook_takes_nothing_from_it(server: EmbeddedServer, mode: str) -> None:
    """Its answer was lost, and while it is sent again another process adopts the record for the same identity.

    Then that one writes. The acquisition is refused, and ends nothing, since the identity holds the lock still.
    """
    async with wired(server, mode, name=NAME) as w:
        await w.direct.script_load(load("robust/adopt").source.decode())
        answer = w.proxy.on(script(load("robust/adopt").sha), Action.HOLD_REPLY)
        acquiring = asyncio.create_task(AsyncRobustLock(w.sync, NAME).acquire(identity="w"))
        await answer.fired.wait()
        w.proxy.refuse = True
        await w.proxy.cut()
        later = await AsyncRobustLock(w.other, NAME).acquire(identity="w")
        await later.record({"step": 1})
        w.proxy.refuse = False
        with pytest.raises(StaleWriter):
            await asyncio.wait_for(acquiring, 10)
        await AsyncLock(w.sync, NAME).statistics()  # behind whatever the refused one has sent
        await later.record({"step": 2})
        assert await w.direct.hget(robust_keys(NAME.encode()).record, "progress") == b'{"step":2}'
        later.check()
        await later.release()
        assert not await w.direct.exists(NAME, robust_keys(NAME.encode()).record)


async def test_p5_a_grant_that_a_namesake_has_joined_stays(server: EmbeddedServer) -> None:
    """Its own request is cancelled while the record is adopted, and the other lease is there by then."""
    async with wired(server, name=NAME) as w:
        await w.direct.script_load(load("robust/adopt").source.decode())
        lock = AsyncRobustLock(w.sync, NAME)
        assert not await lock.locked()
        own, joined = (
            w.proxy.on(script(load("robust/adopt").sha), action) for action in (Action.HOLD_REPLY, Action.PASS)
        )
        first, second = (asyncio.create_task(lock.acquire(identity="me")) for _ in range(2))
        await joined.fired.wait()
        first.cancel()
        own.release.set()
        await asyncio.wait([first])
        assert first.cancelled()
        lease = await second
        await lock.statistics()  # behind whatever undoes the cancelled one
        lease.check()
        assert await AsyncRobustLock(w.other, NAME).try_acquire() is None
        await lease.release()
        assert not await lock.locked()


# -- a server that is full ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["link", "plain"])
async def test_d10_out_of_memory(mode: str) -> None:
    """Nothing new is granted, and says so. What was granted before is recorded, handed over, adopted and released."""
    async with served(mode) as s:
        lock, other = AsyncRobustLock(s.sync, NAME), AsyncRobustLock(s.other, NAME)
        lease = await lock.acquire()
        waiting = asyncio.create_task(other.acquire())
        await wait_until(waits(other), SOON, timeout=15)
        await s.admin.config_set("maxmemory", 1)
        await lease.record({"step": 1})
        with pytest.raises(OutOfMemory):
            await AsyncRobustLock(s.sync, "another").acquire()
        with pytest.raises(OutOfMemory):
            await FenceGate(s.sync, NAME).accept(lease)
        lease._grant.body_failed = True
        await lease.release()
        following = await asyncio.wait_for(waiting, 2)
        assert following.abandoned is not None
        assert following.abandoned.fence == lease.fence
        assert following.progress == {"step": 1}
        await following.release()
        await s.admin.config_set("maxmemory", 0)
        async with lock as last:
            assert last.abandoned is None
