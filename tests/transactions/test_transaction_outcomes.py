"""Transactions: what is said at their end, of this run and of earlier ones; turns that do not help; loops; groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest
import pytest_asyncio
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from redis_sync_aio import (
    AsyncLock,
    Backoff,
    Conflict,
    Coordinator,
    LeaseLost,
    OutcomeUnknown,
    SyncError,
    Unreachable,
    transaction,
    watch_retry,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import PartiallyApplied, TransactionMisuse
from redis_sync_aio.testing.faults import Action
from redis_sync_aio.types import Committed, Transaction

from ..support.body import FAST
from ..support.inside import now, turn_key
from ..support.inspecting import calls
from ..support.transactions import Insufficient, Wired, in_use, increment, interrupted, prove, watchers, wired


@pytest_asyncio.fixture
async def it(server: EmbeddedServer) -> AsyncIterator[Wired]:
    async with wired(server, socket_timeout=5) as it:
        await it.direct.flushall()
        yield it


# -- a later run of an idempotent body -----------------------------------------------------------------------


async def misuses(tx: Transaction, key: str) -> None:
    await tx.set(key, 1)


async def forgets_multi(tx: Transaction, key: str) -> None:
    await tx.get(key)


async def fails_in_part(tx: Transaction, key: str) -> None:
    await tx.get(key)
    tx.multi()
    tx.lpush(key, 1)


async def fails(tx: Transaction, key: str) -> None:
    await tx.get(key)
    raise Insufficient


async def reads_what_is_no_list(tx: Transaction, key: str) -> None:
    await tx.lrange(key, 0, -1)


Later = Callable[[Transaction, str], Awaitable[None]]


async def twice(it: Wired, later: Later) -> None:
    """The answer to the first EXEC is lost; the second run does what ``later`` does."""
    runs = 0

    async def body(tx: Transaction) -> None:
        nonlocal runs
        runs += 1
        if runs > 1:
            await later(tx, it.key)
            return
        await it.body(tx)

    it.proxy.on("EXEC", Action.CUT_AFTER)
    await transaction(it.client, body, it.key, idempotent=True)


@pytest.mark.parametrize("later", [misuses, forgets_multi, fails_in_part], ids=lambda it: it.__name__)
async def test_an_error_of_ours_does_not_hide_an_earlier_commit(it: Wired, later: Later) -> None:
    """What a run says of itself is not said of the one before, whose writes were made."""
    with pytest.raises(OutcomeUnknown, match=r"earlier EXEC .* a later run ended with") as caught:
        await twice(it, later)
    assert isinstance(caught.value.__cause__, (TransactionMisuse, PartiallyApplied))
    assert await it.counted() == 1
    await it.check_clean()


@pytest.mark.parametrize("later", [fails, reads_what_is_no_list], ids=lambda it: it.__name__)
async def test_an_error_of_the_bodys_own_comes_with_a_note_of_it(it: Wired, later: Later) -> None:
    """P7: it comes out bare, and says what else is to be known."""
    with pytest.raises((Insufficient, ResponseError)) as caught:
        await twice(it, later)
    assert "an earlier run of this body may have been committed" in "".join(caught.value.__notes__)
    assert await it.counted() == 1


async def test_without_an_earlier_run_there_is_no_note(redis: Redis) -> None:
    with pytest.raises(Insufficient) as caught:
        await transaction(redis, lambda tx: fails(tx, "n"), "n", idempotent=True)
    assert not hasattr(caught.value, "__notes__")


async def test_an_attempt_that_is_not_entered_does_not_hide_it_either(it: Wired) -> None:
    it.proxy.on("EXEC", Action.CUT_AFTER)
    runs = 0
    with pytest.raises(OutcomeUnknown, match="earlier EXEC") as caught:  # noqa: PT012
        async for attempt in watch_retry(it.client, it.key, idempotent=True):
            runs += 1
            if runs == 1:
                async with attempt as tx:
                    await it.body(tx)
    assert isinstance(caught.value.__cause__, TransactionMisuse)
    assert await it.counted() == 1


# -- advice --------------------------------------------------------------------------------------------------


OWN_ADVICE: dict[str, dict[str, Any]] = {
    "idempotent": {"idempotent": True, "attempts": 1},
    "exactly_once": {"exactly_once": True},
}


@pytest.mark.parametrize("option", OWN_ADVICE)
async def test_nobody_is_told_to_do_what_it_does(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr("redis_sync_aio._transactions.exec_replies.RETRY_FOR", 0.3)
    async with wired(server) as it:
        it.proxy.on("EXEC", Action.CUT_AFTER)
        it.proxy.on(lambda words: b"void" in words, Action.CUT_BEFORE, times=None)
        with pytest.raises(OutcomeUnknown) as caught:
            await transaction(it.client, it.body, it.key, **OWN_ADVICE[option])
        assert f"{option}=True" not in str(caught.value)
        assert "exactly_once=True" not in str(caught.value)
        assert "look at the data" in str(caught.value)


async def test_advice_for_conflicts_is_about_what_was_used_up(redis: Redis) -> None:
    slow = Backoff(initial=0.3, factor=1, cap=0.3, jitter=False)
    with pytest.raises(Conflict) as by_attempts:
        await transaction(redis, interrupted(redis, 9), "n", attempts=2)
    with pytest.raises(Conflict) as in_time:
        await transaction(redis, interrupted(redis, 9), "n", "m", timeout=0.1, backoff=slow)
    with pytest.raises(Conflict) as by_turns:
        await transaction(redis, interrupted(redis, 9), "n", attempts=2, escalate_after=1)
    assert str(by_attempts.value).endswith(
        "Allow more attempts, or let it take turns with the others (escalate_after=3)"
    )
    assert "Allow more time (deadline), or watch fewer keys, or let it take turns" in str(in_time.value)
    assert str(by_turns.value).endswith(
        "Allow more attempts, or let all who often write these keys take turns, too (escalate_after)"
    )


# -- next to writers that take no turns ----------------------------------------------------------------------


async def test_a_turn_that_does_not_help_does_not_end_the_back_off(redis: Redis) -> None:
    """Who has the turn and is disturbed all the same waits as if it had none: attempts last as long as without."""
    pauses = Backoff(initial=0.4, factor=1, cap=0.4, jitter=False)
    began = now()
    done = await transaction(redis, interrupted(redis, 4), "n", attempts=5, escalate_after=1, backoff=pauses)
    assert (done.conflicts, done.escalated) == (4, True)
    assert now() - began >= 3 * 0.4  # none before the turn was taken, and then one for each conflict


async def test_the_turn_itself_costs_no_pause(redis: Redis) -> None:
    """Nobody else is in the way any more, as far as anybody knows."""
    pauses = Backoff(initial=30, factor=1, cap=30, jitter=False)
    async with asyncio.timeout(10):
        done = await transaction(redis, interrupted(redis, 1), "n", escalate_after=1, backoff=pauses)
    assert (done.conflicts, done.escalated) == (1, True)
    assert await redis.exists(turn_key(b"n")) in (0, 1)  # it is given back in the background


# -- the loop ------------------------------------------------------------------------------------------------


async def test_a_body_error_that_is_caught_inside_the_loop_is_not_the_end_of_it(redis: Redis) -> None:
    """Nothing was written, and the loop would end as after a commit."""
    rounds = 0
    with pytest.raises(TransactionMisuse, match="ended by Insufficient in its body, which was caught inside the loop"):  # noqa: PT012
        async for attempt in watch_retry(redis, "n"):
            rounds += 1
            try:
                async with attempt as tx:
                    await fails(tx, "n")
            except Insufficient:
                pass
    assert rounds == 1
    assert in_use(redis) == 0
    assert await watchers(redis) == 0


async def test_nor_is_a_cancellation_by_a_scope_inside_the_loop(redis: Redis) -> None:
    with pytest.raises(TransactionMisuse, match="caught inside the loop: nothing was written"):  # noqa: PT012
        async for attempt in watch_retry(redis, "n"):
            with anyio.move_on_after(0):
                async with attempt as tx:
                    await increment(tx)
    assert await redis.get("n") is None


async def test_nor_one_that_meets_exec(it: Wired) -> None:
    """Then nobody knows whether it was executed."""
    rule = it.proxy.on("EXEC", Action.HOLD_REPLY)
    with pytest.raises(OutcomeUnknown, match="with EXEC in flight"):  # noqa: PT012
        async for attempt in watch_retry(it.client, it.key):
            with anyio.CancelScope() as scope:
                async with asyncio.TaskGroup() as group:
                    group.create_task(_cancel(rule, scope))
                    async with attempt as tx:
                        await it.body(tx)
    assert await it.counted() == 1


async def _cancel(rule: Any, scope: anyio.CancelScope) -> None:
    await rule.fired.wait()
    scope.cancel()


async def test_a_loop_may_be_left_after_an_error(redis: Redis) -> None:
    """By `break`. And an error of the transaction says all: who catches that knows how it ended."""
    async for attempt in watch_retry(redis, "n"):
        try:
            async with attempt as tx:
                await fails(tx, "n")
        except Insufficient:
            break
    conflicts = 0
    async for attempt in watch_retry(redis, "n", attempts=1):
        try:
            async with attempt as tx:
                await interrupted(redis, 1)(tx)
        except Conflict:
            conflicts += 1
    assert conflicts == 1


# -- groups --------------------------------------------------------------------------------------------------


async def test_an_error_in_a_group_is_tried_again_as_a_bare_one_is(it: Wired) -> None:
    """A body may read inside a TaskGroup."""
    runs = 0

    async def body(tx: Transaction) -> None:
        nonlocal runs
        runs += 1
        async with asyncio.TaskGroup() as group:
            group.create_task(_read(tx, it.key))
        tx.multi()
        tx.incr(it.key)
        tx.incr(it.done)

    it.proxy.on("GET", Action.CUT_BEFORE)
    done: Committed[None] = await transaction(it.client, body, it.key)
    assert (done.attempts, runs, await it.counted()) == (2, 2, 1)
    it.proxy.on("GET", Action.CUT_BEFORE, times=None)
    with pytest.raises(Unreachable):
        await transaction(it.client, body, it.key, attempts=2, backoff=FAST)


async def _read(tx: Transaction, key: str) -> None:
    await tx.get(key)


async def test_a_group_with_an_error_of_the_bodys_own_comes_out_as_it_is(it: Wired) -> None:
    runs = 0

    async def body(tx: Transaction) -> None:
        nonlocal runs
        runs += 1
        try:
            await tx.get(it.key)
        except Unreachable as error:
            raise ExceptionGroup("both", [error, Insufficient()]) from None

    it.proxy.on("GET", Action.CUT_BEFORE)
    with pytest.raises(ExceptionGroup, match="both"):
        await transaction(it.client, body, it.key)
    assert runs == 1


# -- guarded commits of a lease that tasks share ---------------------------------------------------------------


async def conflicts(it: Wired, tx: Transaction) -> None:
    await tx.watch(it.key)
    await it.direct.set(it.key, "theirs")
    tx.multi()


async def ends_without_multi(it: Wired, tx: Transaction) -> None:
    await tx.get(it.key)


async def is_refused(it: Wired, tx: Transaction) -> None:
    tx.multi()
    tx.execute_command("NOSUCHCOMMAND")


async def fails_when_it_runs(it: Wired, tx: Transaction) -> None:
    await it.direct.set(it.key, "text")
    tx.multi()
    tx.lpush(it.key, 1)


async def is_lost_before_exec(it: Wired, tx: Transaction) -> None:
    await tx.watch(it.key)
    it.proxy.on("EXEC", Action.answer_error("READONLY You can't write against a read only replica."))
    tx.multi()


async def is_cancelled_before_exec(it: Wired, tx: Transaction) -> None:
    tx.multi()
    rule = it.proxy.on("WATCH", Action.HOLD)
    task = asyncio.current_task()
    assert task is not None
    asyncio.ensure_future(rule.fired.wait()).add_done_callback(lambda _: task.cancel())


CERTAIN = (
    conflicts,
    ends_without_multi,
    is_refused,
    fails_when_it_runs,
    is_lost_before_exec,
    is_cancelled_before_exec,
)


async def calls_of(it: Wired, lock: AsyncLock, body: Callable[[Wired, Transaction], Awaitable[None]] | None) -> int:
    """How many scripts it takes until a second task has what the first one had, after such a commit of it."""
    lease = await lock.acquire()
    if body is not None:
        with pytest.raises((SyncError, asyncio.CancelledError)) as caught:
            async with lease.transaction() as tx:
                await body(it, tx)
        assert not isinstance(caught.value, (LeaseLost, OutcomeUnknown))
    following = asyncio.ensure_future(lock.acquire())
    await asyncio.sleep(0)
    before = await calls(it.direct)
    await lease.release()
    theirs = await following
    after = await calls(it.direct)
    await theirs.release()
    return after - before


@pytest.mark.real  # counts the commands of the server
@pytest.mark.parametrize("body", CERTAIN, ids=lambda body: body.__name__)
async def test_a_lease_whose_guarded_commit_certainly_ended_is_handed_on_as_before(
    it: Wired, body: Callable[[Wired, Transaction], Awaitable[None]]
) -> None:
    """From task to task, without a command. Only what may still be executed keeps it from that."""
    async with Coordinator(it.client) as sync:
        lock = AsyncLock(sync, "guard", share=True)
        assert await calls_of(it, lock, None) == 0
        assert await calls_of(it, lock, body) == 0
        await prove(it.client)
        it.proxy.on("EXEC", Action.CUT_AFTER)
        lease = await lock.acquire()
        with pytest.raises(OutcomeUnknown):
            async with lease.transaction() as tx:
                tx.multi()
        following = asyncio.ensure_future(lock.acquire())
        await asyncio.sleep(0)
        before = await calls(it.direct)
        await lease.release()
        await (await following).release()
        assert await calls(it.direct) > before
