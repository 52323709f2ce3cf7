"""P4 for what is made of a lock: every fault of the wire at every command of handing a lease over, of work that is done
once, and of an election.

Whatever happens to a command or to its answer, within `retry_for`: a detached lease is attached by exactly one, under
the fence that it had; a slot and a request run exactly once, and are known to have; a leader is the only one, and the
next candidate leads when it has resigned. The lock is free after that, and nothing is queued.
"""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any, Literal

import pytest

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncRobustLock,
    AsyncSemaphore,
    LeaderElection,
    LeaseLost,
    NotHeld,
    OutcomeUnknown,
    idempotent,
    once,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import RunInterrupted
from redis_sync_aio.jobs import OnCrash
from redis_sync_aio.testing import steal
from redis_sync_aio.testing.faults import Action, Rule, anything

from ..support.pairwise import first_of
from ..support.primitives import LOCK, SEMAPHORE, Exclusive, Primitive
from ..support.wire_sweep import WIRE, Arm, Case, Operation, failures, sweep
from ..support.wired import MARK, MODES, RETRY_FOR, SOON, Wired, wired
from ..support.wired import quiet_loop as quiet_loop


def movable(lock: Exclusive) -> AsyncLock | AsyncSemaphore:
    assert not isinstance(lock, AsyncRobustLock)
    return lock


# -- leases that change hands ------------------------------------------------------------------------------


async def detach(w: Wired, arm: Arm) -> int:
    lease = await movable(w.lock()).acquire()
    arm(anything)
    token = await lease.detach()
    with pytest.raises(NotHeld):
        lease.check()
    attached = await movable(w.elsewhere()).attach(token)
    assert attached.fence == lease.fence
    await attached.release()
    return lease.fence


async def attach(w: Wired, arm: Arm) -> int:
    detached = await movable(w.elsewhere()).acquire()
    token = await detached.detach()
    await w.lock().locked()  # connected
    arm(anything)
    lease = await movable(w.lock()).attach(token)
    assert lease.fence == detached.fence
    with pytest.raises(NotHeld):
        await movable(w.elsewhere()).attach(token)
    await w.check_held(lease)
    await lease.release()
    return lease.fence


@pytest.mark.ci
@pytest.mark.parametrize("kind", [LOCK, SEMAPHORE], ids=str)
@pytest.mark.parametrize("operation", [detach, attach])
async def test_a_lease_changes_hands_once(server: EmbeddedServer, operation: Operation, kind: Primitive) -> None:
    cases = [Case(operation, mode, fault, WIRE[fault], kind=kind) for mode in MODES for fault in WIRE]
    assert await sweep(server, cases) == len(cases) == 27


# -- elections ---------------------------------------------------------------------------------------------


async def lead(w: Wired, arm: Arm) -> int:
    """Lead, alone, and resign at the end of the body; the candidate that waits leads after that."""
    election, rival = LeaderElection(w.sync, w.name), LeaderElection(w.other, w.name)
    await w.lock().locked()  # connected
    arm(anything)
    async with election.lead() as term:
        found = await rival.leader()
        assert found is not None
        assert found.term == term.number
        with pytest.raises(AcquireTimeout):
            await rival.lead(timeout=0).__aenter__()
    async with rival.lead(timeout=0) as following:
        assert following.number > term.number
    return following.number


async def resign(w: Wired, arm: Arm) -> int:
    """Resign in the middle of the body; a candidate that waits leads when that returns."""
    election, rival = LeaderElection(w.sync, w.name), LeaderElection(w.other, w.name)
    async with election.lead() as term:
        following = asyncio.create_task(rival.lead().__aenter__())
        await w.queued()
        arm(anything)
        assert await election.resign()
    number = (await following).number
    assert number > term.number
    assert await rival.resign()
    return number


# -- work that is done once --------------------------------------------------------------------------------


async def run_once(w: Wired, arm: Arm, on_crash: OnCrash) -> int:
    await _prepared(w)
    arm(anything)
    async with once(w.sync, w.name, on_crash=on_crash) as lease:
        assert lease is not None, "the slot was not run"
        await w.check_held(lease)
    async with once(w.other, w.name, on_crash=on_crash) as second:
        assert second is None, "the slot is run twice"
    return lease.fence


async def once_or_skipped(w: Wired, arm: Arm) -> int:
    return await run_once(w, arm, "skip")


async def once_or_again(w: Wired, arm: Arm) -> int:
    return await run_once(w, arm, "again")


async def execute_once(w: Wired, arm: Arm, on_crash: Literal["again", "raise"]) -> int:
    await _prepared(w)
    arm(anything)
    runs = 0

    async def work() -> int:
        nonlocal runs
        runs += 1
        return runs

    for sync in (w.sync, w.sync, w.other):
        assert await idempotent(sync, w.name, on_crash=on_crash)(work)() == 1
    assert runs == 1
    return (await w.elsewhere().statistics()).fence or 0


async def idempotent_or_again(w: Wired, arm: Arm) -> int:
    return await execute_once(w, arm, "again")


async def idempotent_or_raise(w: Wired, arm: Arm) -> int:
    return await execute_once(w, arm, "raise")


async def _prepared(w: Wired) -> None:
    """Connect, and delete the mark of an earlier run of the case."""
    await w.lock().locked()
    await w.direct.delete(f"{{{w.name}}}:mark")


ELECTIONS = (lead, resign)
JOBS = (once_or_skipped, once_or_again, idempotent_or_again, idempotent_or_raise)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("operation", "mode"),
    [*product(ELECTIONS, ("link", "plain")), *product(JOBS, ("link",)), (once_or_again, "plain")],
)
async def test_every_fault_at_every_command(server: EmbeddedServer, operation: Operation, mode: str) -> None:
    """Each command after connecting: those of the lock, and those that read and write the mark."""
    async with wired(server, mode, response_timeout=5, client={"socket_timeout": 5}) as w:  # so that it repeats nothing
        before = 0

        def count(_: object) -> Any:
            nonlocal before
            before = sum(w.proxy.commands.values())
            return w.proxy.on(anything, Action.PASS)

        await operation(w, count)
        commands = sum(w.proxy.commands.values()) - before
    cases = [Case(operation, mode, fault, WIRE[fault], skip) for skip in range(commands) for fault in WIRE]
    assert await sweep(server, cases) == len(cases) >= len(WIRE)


@pytest.mark.parametrize("operation", JOBS)
async def test_a_mark_whose_answer_is_lost(server: EmbeddedServer, operation: Operation) -> None:
    """It was written, or not; either way the slot or the request is not run twice, and not passed over."""

    async def run(fault: str) -> None:
        async with wired(server, name=f"{operation.__name__} {fault}") as w, asyncio.timeout(60):
            fence = await operation(w, lambda _: w.proxy.on(MARK, WIRE[fault]))
            await w.check_free(fence)

    faults = ["cut after", "black-holed request", "swallowed reply"]
    wrong = await failures(faults, run)
    assert not wrong, wrong


@pytest.mark.parametrize("loss", first_of("noticed", "none", "found by a repetition"))
async def test_a_mark_that_is_never_answered(server: EmbeddedServer, loss: str) -> None:
    """What is not known is said to be not known, also when the lease was lost after that.

    The coordinator notices the loss and cancels the body. A repetition that is answered finds it, and all is known.
    """
    rules: list[Rule] = []
    patient = {"socket_timeout": 30, "socket_connect_timeout": 30}
    retry_for = RETRY_FOR if loss == "none" else 60
    async with wired(server, response_timeout=30, retry_for=retry_for, client=patient) as w:

        def arm(_: object) -> Rule:
            found = loss == "found by a repetition"
            rules.append(w.proxy.on(MARK, Action.CUT_AFTER, times=2 if found else None, skip=1))  # the first one reads
            if found:
                rules.append(w.proxy.on(MARK, Action.HOLD, times=1, skip=1))  # the third that writes
            return rules[0]

        running = asyncio.create_task(once_or_skipped(w, arm))
        # At the second one the task knows that the answer to the first one was lost.
        await wait_until(lambda: bool(rules) and rules[0].acted > 1, SOON, timeout=20)
        if loss == "found by a repetition":
            await asyncio.wait_for(rules[1].fired.wait(), 20)
            await w.direct.ping()  # by now the renewal that the new connection began with has been executed
            await w.direct.set(w.name, "somebody else", px=60_000)
            rules[1].release.set()
        elif loss == "noticed":
            await steal(w.sync, w.name)
        with pytest.raises(LeaseLost if loss == "found by a repetition" else OutcomeUnknown) as raised:
            await running
    assert isinstance(raised.value.__cause__, LeaseLost) is (loss == "noticed")


async def test_the_error_of_a_request_is_raised_though_its_mark_cannot_be_deleted(server: EmbeddedServer) -> None:
    """P7: with a note, and the next call finds out that a run did not come to its end."""
    async with wired(server, retry_for=60, response_timeout=60) as w:
        await _prepared(w)

        @idempotent(w.sync, w.name, on_crash="raise")
        async def work() -> None:
            w.proxy.on(MARK, Action.answer_error("NOPERM not any more"), times=None)
            raise ValueError("it failed")

        with pytest.raises(ValueError, match="it failed") as failed:
            await work()
        assert "the next call may get RunInterrupted" in "".join(failed.value.__notes__)
        with pytest.raises(RunInterrupted):
            await idempotent(w.other, w.name, on_crash="raise")(work)()
