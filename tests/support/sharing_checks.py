"""Checks of local sharing in simulation (see `gate.py`), for `tests/mutation/test_sharing_mutants.py`."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from redis_sync_aio import AcquireTimeout, AsyncLock, Lease, LeaseLost
from redis_sync_aio.embedded import EmbeddedServer

from .core_checks import Check, Sim
from .gate import Pipe
from .inside import IN_ONE_TURN, link_events_of
from .schedule import run
from .schedule_sharing import SHARED_LOCK
from .sharing import process_grant_of


def lock(sim: Sim, other: bool = False, **options: Any) -> AsyncLock:
    return AsyncLock(sim.other if other else sim.sync, "l", **{"ttl": 60, "share": True, **options})


async def line(sim: Sim, number: int, **options: Any) -> list[asyncio.Task[Lease]]:
    """Start so many tasks that acquire, by one object; they wait when this returns."""
    one = lock(sim, **options)
    tasks = [asyncio.create_task(one.acquire()) for _ in range(number)]
    await asyncio.sleep(0.1)
    return tasks


async def theirs(sim: Sim) -> asyncio.Task[Lease]:
    """Let another process wait, and ours hear of it."""
    task = asyncio.create_task(lock(sim, other=True).acquire())
    await asyncio.sleep(0.1)
    return task


async def in_time(task: asyncio.Task[Lease], seconds: float = 1) -> Lease:
    async with asyncio.timeout(seconds):
        return await asyncio.shield(task)


async def check_nothing_is_handed_on_after_the_deadline(sim: Sim) -> None:
    async with sim.coordinators():
        lease = await lock(sim).acquire()
        tasks = await line(sim, 2)
        sim.gate.time += 61  # stopped
        sim.server.set("l", "foreign", px=600_000)
        with pytest.raises(LeaseLost):
            await lease.release()
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in tasks), "P1"
        sim.server.delete("l")
        for task in tasks:
            await (await in_time(task, 20)).release()


async def check_nothing_is_taken_from_what_rests_after_the_deadline(sim: Sim) -> None:
    async with sim.coordinators():
        await (await lock(sim, linger=600).acquire()).release()
        sim.gate.time += 61
        sim.server.set("l", "foreign", px=600_000)
        (task,) = await line(sim, 1)
        assert not task.done(), "P1"
        sim.server.delete("l")
        await (await in_time(task, 20)).release()


async def check_burst(sim: Sim) -> None:
    async with sim.coordinators(burst=2, slice=1000):
        lease = await lock(sim).acquire()
        tasks = await line(sim, 4)
        other = await theirs(sim)
        await lease.release()
        lease = await in_time(tasks[0])
        third = asyncio.create_task(lock(sim, other=True, share=False).acquire())  # another word
        await asyncio.sleep(0.1)
        await lease.release()
        lease = await in_time(tasks[1])
        await lease.release()
        lease = await in_time(other)
        assert not tasks[2].done(), "P2"
        await lease.release()
        await (await in_time(third)).release()
        for task in tasks[2:]:
            await (await in_time(task)).release()


async def check_who_takes_it_often_in_one_turn_is_put_off(sim: Sim) -> None:
    async with sim.coordinators():
        one, taken, inside = lock(sim, linger=600), 0, 0
        async with one as lease:
            process_grant_of(lease)._reserved(lease.fence + 1, 1_000_000)

        async def often(pauses: bool) -> None:
            nonlocal taken
            while not inside and taken < 20 * IN_ONE_TURN:
                async with one:
                    taken += 1
                if pauses and taken % IN_ONE_TURN == 0:  # or it stands in the line itself
                    await asyncio.sleep(0)

        async def once(lease: Lease | None) -> None:
            nonlocal inside
            inside = inside or taken
            if lease is not None:
                await lease.release()

        async def wait() -> None:
            await once(await one.acquire())

        async def look() -> None:
            await once(await one.try_acquire())

        for other, pauses in ((wait, False), (wait, True), (look, False), (look, True)):
            taken = inside = 0
            async with asyncio.timeout(20):
                await asyncio.gather(often(pauses), other())
            assert inside <= 2 * IN_ONE_TURN, "P2"


async def check_slice(sim: Sim) -> None:
    async with sim.coordinators(burst=1000, slice=1):
        lease = await lock(sim).acquire()
        tasks = await line(sim, 2)
        other = await theirs(sim)
        await asyncio.sleep(0.7)
        await lease.release()
        lease = await in_time(tasks[0])
        await asyncio.sleep(0.3)
        await lease.release()
        lease = await in_time(other)
        assert not tasks[1].done(), "P2"
        await lease.release()
        await (await in_time(tasks[1])).release()


async def check_overstaying(sim: Sim) -> None:
    for options in ({"ttl": 10, "auto_renew": False}, {"max_hold": 10}):
        async with sim.coordinators():
            first = await lock(sim).acquire()
            (own,) = await line(sim, 1, **options)
            (after,) = await line(sim, 1)
            await first.release()
            lease = await in_time(own)
            assert process_grant_of(lease) is process_grant_of(first)
            await asyncio.sleep(9.8)
            lease.check()
            assert not after.done()
            await asyncio.sleep(0.3)
            with pytest.raises(LeaseLost):
                lease.check()
            following = await in_time(after)
            assert following._grant.wire_token != lease._grant.wire_token, "P1: it may go on writing"
            assert following.fence > lease.fence
            await following.release()


async def check_what_is_left_behind_is_not_handed_on(sim: Sim) -> None:
    async with sim.coordinators(slice=1000):
        lease = await lock(sim).acquire()
        tasks = await line(sim, 3)
        lease._grant.committing(1)
        await lease.release()
        first = await in_time(tasks[0])
        assert first._grant.wire_token != lease._grant.wire_token, "P10: a late command of its"
        await asyncio.sleep(0.1)
        assert sim.server.zcard("{l}:queue") == 0, "P2: one lock, one base"
        await first.release()
        for task in tasks[1:]:
            await (await in_time(task)).release()


async def check_a_loss_is_handed_to_nobody(sim: Sim) -> None:
    async with sim.coordinators():
        lease = await lock(sim).acquire()
        tasks = await line(sim, 2)
        sim.server.set("l", "foreign", px=600_000)
        await asyncio.sleep(25)
        assert lease.lost
        assert not any(task.done() for task in tasks), "P1"
        sim.server.delete("l")
        for task in tasks:
            await (await in_time(task, 20)).release()


async def check_those_who_left_do_not_count(sim: Sim) -> None:
    async with sim.coordinators():
        held = await lock(sim, other=True).acquire()
        tasks = await line(sim, 3)
        for task in tasks[:2]:
            task.cancel()
        with pytest.raises(AcquireTimeout):
            await lock(sim).acquire(timeout=1)
        await asyncio.sleep(0.1)
        assert sim.server.zcard("{l}:queue") == 1, "P5"
        tasks[2].cancel()
        await asyncio.sleep(0.1)
        assert sim.server.zcard("{l}:queue") == 0, "P5"
        await held.release()
        await sim.check_free()


async def check_who_left_is_passed_over(sim: Sim) -> None:
    async with sim.coordinators():
        lease = await lock(sim).acquire()
        tasks = await line(sim, 3)
        tasks[0].cancel()
        await lease.release()
        tasks[1].cancel()  # it has it already, and did not run since
        await (await in_time(tasks[2])).release()
        await sim.check_free()


async def check_fences_are_reserved(sim: Sim) -> None:
    async with sim.coordinators():
        fences: list[int] = []
        sim.on("lock/renew", lambda _: True)
        for _ in range(2000):
            sim.on("lock/renew", sim.refuse)  # the ranges are used up

        async def one() -> None:
            for _ in range(500):
                async with lock(sim) as lease:
                    fences.append(lease.fence)
                    assert int(sim.server.get("{l}:fence").split()[0]) >= lease.fence, "P8"
                    await asyncio.sleep(0)

        await asyncio.gather(one(), one())
        assert sorted(set(fences)) == fences, "P8"
        sim.rules.clear()


async def check_what_rests(sim: Sim) -> None:
    async with sim.coordinators():
        lease = await lock(sim, linger=50).acquire()
        await lease.release()
        await asyncio.sleep(40)
        again = await lock(sim, linger=50).acquire()
        assert process_grant_of(again) is process_grant_of(lease)
        await again.release()
        await asyncio.sleep(40)
        assert sim.server.exists("l")
        await asyncio.sleep(11)
        assert not sim.server.exists("l")
        await (await lock(sim, linger=50).acquire()).release()
        await (await in_time(await theirs(sim))).release()


async def check_the_word_that_was_lost(sim: Sim) -> None:
    async with sim.coordinators():
        lease = await lock(sim).acquire()
        sim.on("lock/acquire", sim.cut)  # the other one's
        other = await theirs(sim)
        await asyncio.sleep(2)
        assert process_grant_of(lease).contended, "P3"
        await lease.release()
        await (await in_time(other)).release()


async def check_the_word_that_was_lost_with_the_grant(sim: Sim) -> None:
    async with sim.coordinators():
        for of in (False, True):
            await (await lock(sim, of).acquire()).release()  # it is connected

        def cut(pipe: Pipe) -> None:
            sim.gate.refuse = True
            sim.cut(pipe)

        sim.on("lock/acquire", cut)
        asking = asyncio.create_task(lock(sim).acquire())
        await asyncio.sleep(0.01)
        assert sim.gate.refuse
        other = await theirs(sim)
        sim.gate.refuse = False
        lease = await in_time(asking, 5)
        await asyncio.sleep(0.5)
        assert process_grant_of(lease).contended, "P3"
        await lease.release()
        await (await in_time(other, 20)).release()


async def check_an_ended_lease_hands_on_nothing(sim: Sim) -> None:
    async with sim.coordinators():
        lease = await lock(sim, ttl=10, auto_renew=False).acquire()
        await lease.extend(5)
        process_grant_of(lease).deadline += 100  # its base has time
        (task,) = await line(sim, 1)
        sim.gate.time += 6  # and nothing ran
        with pytest.raises(LeaseLost):
            await lease.release()
        assert (await in_time(task, 20))._grant.wire_token != lease._grant.wire_token, "P1"
        await task.result().release()


async def check_who_takes_what_rests_has_it_alone(sim: Sim) -> None:
    async with sim.coordinators():
        await (await lock(sim, linger=50).acquire()).release()
        lease = await lock(sim).acquire()
        (task,) = await line(sim, 1)
        assert not task.done(), "P1"
        await lease.release()
        await (await in_time(task)).release()


async def check_nothing_rests_long_while_others_wait(sim: Sim) -> None:
    async with sim.coordinators(slice=1000):
        lease = await lock(sim, linger=50).acquire()
        other = await theirs(sim)
        await lease.release()
        await (await in_time(other)).release()


async def check_a_grant_for_those_who_just_left(sim: Sim) -> None:
    async with sim.coordinators():
        held = await lock(sim, other=True).acquire()
        (task,) = await line(sim, 1)
        let_in = link_events_of(sim.sync).link_pushed

        def pushed(payload: bytes) -> None:
            task.cancel()
            let_in(payload)

        link_events_of(sim.sync).link_pushed = pushed  # type: ignore[method-assign]
        await held.release()
        await asyncio.wait([task])
        await asyncio.sleep(0.5)
        await sim.check_free()


async def check_close_gives_back_what_rests(sim: Sim) -> None:
    async with sim.coordinators():
        await (await lock(sim, linger=50).acquire()).release()
        await sim.sync.aclose()
        assert not sim.server.exists("l")


def check_schedules(server: EmbeddedServer) -> None:
    run(server, SHARED_LOCK, range(300))


CHECKS: dict[str, Check] = {
    name: check
    for name, check in list(globals().items())
    if name.startswith("check_") and inspect.iscoroutinefunction(check)
}
