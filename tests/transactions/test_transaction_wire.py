"""Transactions with every fault of the wire at every command they send (E8, FAULTS C1-C4).

A counter is read and written, and an operation is counted with it in the same MULTI. Whatever happens to a command or
to its answer: what was reported as committed was done once, what failed was not done, and what is not known is said
to be not known. No connection is left in use, or watching.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from redis_sync_aio import (
    AsyncLock,
    CommandRefused,
    Coordinator,
    Lease,
    OutcomeUnknown,
    SyncError,
    Unreachable,
    transaction,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action, Rule
from redis_sync_aio.types import Transaction

from ..support.body import FAST
from ..support.inside import read_through
from ..support.transactions import TIMEOUT, Wired, wired
from ..support.wire_sweep import wire_faults

ANSWERS: dict[str, Action] = {
    "LOADING": Action.answer_error("LOADING Redis is loading the dataset in memory"),
    "READONLY": Action.answer_error("READONLY You can't write against a read only replica."),
    "EXECABORT": Action.answer_error(
        "EXECABORT Transaction discarded because of: MISCONF Errors writing to the AOF file"
    ),
}
FAULTS = wire_faults(TIMEOUT) | ANSWERS
COMMANDS = ("WATCH", "GET", "MULTI", "SET", "INCRBY", "EXEC")
MODES = ("plain", "idempotent", "exactly once", "guarded")


async def run(it: Wired, mode: str, lease: Lease | None) -> None:
    if mode == "guarded":
        assert lease is not None
        async with lease.transaction() as tx:
            await it.body(tx)
    elif mode == "exactly once":
        await transaction(it.client, it.body, it.key, exactly_once=True)
    else:
        await transaction(it.client, it.body, it.key, idempotent=mode == "idempotent")


async def one_fault(server: EmbeddedServer, mode: str, point: str, fault: str) -> bool:
    """Run it once with that fault at that command; return whether the fault came to happen."""
    async with wired(server) as it:
        if mode != "guarded":
            return await _faulted(it, mode, point, fault, None)
        async with Coordinator(it.direct) as own:  # the lock's own commands go straight to the server
            lease = await AsyncLock(own, f"{it.key}:lock").acquire()
            read_through(lease, it.client)
            return await _faulted(it, mode, point, fault, lease)


async def _faulted(it: Wired, mode: str, point: str, fault: str, lease: Lease | None) -> bool:
    rule = it.proxy.on(point, FAULTS[fault])
    outcome: SyncError | None = None
    try:
        await run(it, mode, lease)
    except SyncError as error:
        outcome = error
    if FAULTS[fault] in (Action.SWALLOW_REQUEST, Action.SWALLOW_REPLY):
        await it.proxy.cut()
    await wait_until(lambda: it.proxy.live <= 1, FAST, timeout=15)  # what was in flight has arrived, or never will
    await it.check_clean()
    counted = await it.counted()
    reply_lost = point == "EXEC" and fault not in ("late reply", "cut behind the reply", *ANSWERS)
    if outcome is None:
        assert counted == 1 or (mode == "idempotent" and counted <= 2), counted
    elif isinstance(outcome, OutcomeUnknown):
        assert mode in ("plain", "guarded")
        assert FAULTS[fault] not in ANSWERS.values()
        assert counted <= 1
    else:
        # Only a read of a guarded body is not repeated.
        assert mode == "guarded", repr(outcome)
        assert isinstance(outcome, (Unreachable, CommandRefused))
        assert counted == 0
    if reply_lost and mode == "plain":
        assert isinstance(outcome, OutcomeUnknown), "an answer was lost, and nothing said so"
    if mode == "exactly once":
        assert counted == 1
    return rule.acted > 0


@pytest.mark.parametrize("point", COMMANDS)
@pytest.mark.parametrize("mode", MODES)
async def test_every_fault_at_every_command(server: EmbeddedServer, mode: str, point: str) -> None:
    # An error in place of QUEUED would come with EXECABORT later: the proxy cannot know.
    answers = {"WATCH": ("LOADING", "READONLY"), "GET": ("LOADING", "READONLY"), "EXEC": tuple(ANSWERS)}.get(point, ())
    faults = [fault for fault in FAULTS if fault not in ANSWERS or fault in answers]
    for fault in faults:
        print(fault)
        assert await one_fault(server, mode, point, fault), "the fault did not happen"


# -- the answer to EXEC is lost: both orders ---------------------------------------------------------------


async def test_a_late_exec_is_void_when_the_marker_says_so(server: EmbeddedServer) -> None:
    """FAULTS fact 4: the first EXEC is still in a socket when the body runs again, and arrives after that."""
    async with wired(server) as it:
        late = it.proxy.on("EXEC", Action.HOLD)
        done = await transaction(it.client, it.body, it.key, exactly_once=True)
        assert (done.recovered, done.attempts, done.conflicts, done.value) == (False, 2, 0, 1)
        assert it.proxy.commands["EXEC"] == 2  # the second one, and what its new connection found out
        late.release.set()
        await it.proxy.until(lambda: it.proxy.commands["EXEC"] == 2)
        assert await it.direct.ping()
        assert await it.counted() == 1
        await it.check_clean()


async def test_the_marker_alone_makes_a_late_exec_void(server: EmbeddedServer) -> None:
    """Also when the second run changes nothing that the first one watches, but the marker."""
    async with wired(server) as it:

        async def body(tx: Transaction) -> None:
            await tx.get(it.key)
            tx.multi()
            tx.incr(it.done)

        late = it.proxy.on("EXEC", Action.HOLD)
        done = await transaction(it.client, body, it.key, exactly_once=True)
        assert (done.attempts, done.replies) == (2, (1,))
        late.release.set()
        await it.proxy.until(lambda: it.proxy.commands["EXEC"] == 2)
        assert await it.direct.ping()
        assert await it.direct.get(it.done) == b"1"


async def test_a_late_exec_that_overtakes_the_question_is_found(server: EmbeddedServer) -> None:
    """The other order: EXEC arrives after the timeout, but before the question."""
    async with wired(server) as it:
        late = it.proxy.on("EXEC", Action.HOLD)
        question = it.proxy.on(lambda args: args[0] == b"SET" and b"void" in args, Action.HOLD)
        running = asyncio.create_task(transaction(it.client, it.body, it.key, exactly_once=True))
        await question.fired.wait()
        late.release.set()
        await it.proxy.until(lambda: it.proxy.commands["EXEC"] == 1)
        assert await it.direct.get(it.done) == b"1"
        question.release.set()
        done = await running
        assert (done.recovered, done.replies, done.attempts, done.value) == (True, None, 1, 1)
        assert await it.counted() == 1


async def test_an_executed_exec_is_found_although_the_question_gets_lost_too(server: EmbeddedServer) -> None:
    async with wired(server) as it:
        it.proxy.on("EXEC", Action.CUT_AFTER)
        asked = it.proxy.on(lambda args: args[0] == b"SET" and b"void" in args, Action.CUT_AFTER, times=2)
        done = await transaction(it.client, it.body, it.key, exactly_once=True)
        assert (done.recovered, asked.acted) == (True, 2)
        assert await it.counted() == 1


async def test_an_exec_that_never_came_is_found_although_the_question_gets_lost_too(server: EmbeddedServer) -> None:
    """The first "void" is our own: the second question must not take it for somebody else's."""
    async with wired(server) as it:
        it.proxy.on("EXEC", Action.CUT_BEFORE)
        it.proxy.on(lambda args: args[0] == b"SET" and b"void" in args, Action.CUT_AFTER)
        done = await transaction(it.client, it.body, it.key, exactly_once=True)
        assert (done.recovered, done.attempts) == (False, 2)
        assert await it.counted() == 1


async def test_a_marker_of_another_kind_or_none_means_not_known(server: EmbeddedServer) -> None:
    async with wired(server) as it:
        lost = it.proxy.on("EXEC", Action.HOLD_REPLY)
        question = it.proxy.on(lambda args: args[0] == b"SET" and b"void" in args, Action.HOLD)
        running = asyncio.create_task(transaction(it.client, it.body, it.key, exactly_once=True))
        await question.fired.wait()
        (marker,) = await it.direct.keys(f"{{{it.key}}}:commit:*")
        assert 0 < await it.direct.pttl(marker) < 120_000
        await it.direct.set(marker, "of somebody else")
        question.release.set()
        lost.release.set()
        await asyncio.wait([running], timeout=0.1)
        assert not running.done()  # it asks on, up to its patience: nothing is claimed that is not known
        running.cancel()
        await asyncio.wait([running])
        await it.check_clean()


async def test_a_void_exec_at_the_last_attempt_is_not_called_unknown(server: EmbeddedServer) -> None:
    async with wired(server) as it:
        it.proxy.on("EXEC", Action.CUT_BEFORE)
        with pytest.raises(Unreachable, match="nothing was written"):
            await transaction(it.client, it.body, it.key, exactly_once=True, attempts=1)
        assert await it.counted() == 0
        await it.check_clean()


async def test_an_error_from_before_a_conflict_does_not_count_after_it(server: EmbeddedServer) -> None:
    """Redis answered in between. So what is in its way later is tried for ``retry_for`` again."""
    loading = Action.answer_error("LOADING Redis is loading the dataset in memory")
    async with wired(server, socket_timeout=5) as it, Coordinator(it.client, retry_for=1.2) as sync:
        it.proxy.on("WATCH", loading)
        refused: list[Rule] = []

        async def body(tx: Transaction) -> int:
            count = int(await tx.get(it.key) or 0) + 1
            if not refused:
                await asyncio.sleep(1.3)  # longer than the first failures may last
                await it.direct.set(it.key, 7)
                await it.direct.set(it.done, 7)
                refused.append(it.proxy.on("WATCH", loading))
            tx.multi()
            tx.set(it.key, count)
            tx.incr(it.done)
            return count

        done = await transaction(sync, body, it.key)
        assert (done.value, done.conflicts) == (8, 1)
        assert refused[0].acted == 1
        assert await it.counted() == 8
        await it.check_clean()


async def test_a_marker_is_not_trusted_for_ever(server: EmbeddedServer) -> None:
    """A minute after EXEC a "done" is forgotten: that none is there does not say that nothing was written."""
    async with wired(server, socket_timeout=1000) as it:
        lost = it.proxy.on("EXEC", Action.HOLD)
        running = asyncio.create_task(transaction(it.client, it.body, it.key, exactly_once=True))
        await lost.fired.wait()
        await asyncio.sleep(100)
        await it.proxy.cut()
        with pytest.raises(OutcomeUnknown):
            await running


async def test_markers_leave_nothing_for_long(server: EmbeddedServer) -> None:
    async with wired(server) as it:
        for _ in range(3):
            await transaction(it.client, it.body, it.key, exactly_once=True)
        markers = await it.direct.keys(f"{{{it.key}}}:commit:*")
        assert len(markers) == 3
        assert all([0 < await it.direct.pttl(marker) < 120_000 for marker in markers])


# -- between WATCH and EXEC --------------------------------------------------------------------------------


async def test_a_connection_that_is_lost_after_watch_is_not_opened_again_for_exec(server: EmbeddedServer) -> None:
    """redis-py would connect again without a word, and EXEC would watch nothing."""
    async with wired(server) as it:
        turns = 0

        async def body(tx: Transaction) -> int:
            nonlocal turns
            turns += 1
            count = int(await tx.get(it.key) or 0)
            if turns == 1:
                await it.client.connection_pool.disconnect()
                await it.direct.incrby(it.key, 10)
                await it.direct.incrby(it.done, 10)
            tx.multi()
            tx.set(it.key, count + 1)
            tx.incr(it.done)
            return count

        done = await transaction(it.client, body, it.key)
        assert (done.attempts, done.conflicts, done.value) == (2, 0, 10)
        assert await it.counted() == 11
        await it.check_clean()


async def test_exec_is_not_sent_on_a_connection_whose_end_is_known(server: EmbeddedServer) -> None:
    """So it certainly was not executed, and is tried again."""
    async with wired(server) as it:
        turns = 0

        async def body(tx: Transaction) -> None:
            nonlocal turns
            turns += 1
            await tx.get(it.key)
            if turns == 1:
                connection: Any = tx._session.opened()._connection
                await it.proxy.cut()
                await wait_until(connection._reader.at_eof, FAST, timeout=15)
            tx.multi()
            tx.incr(it.key)
            tx.incr(it.done)

        assert (await transaction(it.client, body, it.key)).attempts == 2
        assert await it.counted() == 1


@pytest.mark.parametrize("point", ["WATCH", "EXEC"])
async def test_another_connection_may_lead_to_another_server(server: EmbeddedServer, point: str) -> None:
    """A server that refuses all writes is no longer the primary: its connection is not used again."""
    async with wired(server) as it:
        it.proxy.on(point, Action.answer_error("READONLY You can't write against a read only replica."))
        assert (await transaction(it.client, it.body, it.key)).attempts == 2
        assert it.proxy.commands["CLIENT"] > 0, "another connection has said who it is"
        assert await it.counted() == 1


async def test_exec_refused_does_nothing_and_leaves_no_multi_open(server: EmbeddedServer) -> None:
    async with wired(server) as it:
        it.proxy.on("EXEC", Action.answer_error("NOPERM User has no permissions to run the 'exec' command"))
        with pytest.raises(CommandRefused, match="NOPERM"):
            await transaction(it.client, it.body, it.key)
        assert await it.counted() == 0
        await it.check_clean()
        assert await it.client.incr("x") == 1  # and not "QUEUED"
