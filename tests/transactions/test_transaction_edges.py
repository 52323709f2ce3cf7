"""Transactions at their edges: what is refused before `multi`, what a later run says of an earlier one, lost turns."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import anyio
import pytest
from redis.asyncio import Redis
from redis.exceptions import DataError

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncSemaphore,
    CommandRefused,
    Conflict,
    Coordinator,
    Lease,
    NotHeld,
    OutcomeUnknown,
    Unreachable,
    transaction,
    wait_until,
    watch_retry,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import PartiallyApplied, TransactionMisuse
from redis_sync_aio.testing.faults import Action
from redis_sync_aio.types import Transaction

from ..conftest import MakeClient
from ..support.body import FAST
from ..support.inside import TURN_TTL, now
from ..support.transactions import in_use, proxied, watchers

# -- before multi() ------------------------------------------------------------------------------------------


async def test_the_server_is_asked_once_for_each_command(redis: Redis, server: EmbeddedServer) -> None:
    """Whatever it is about, in whatever encoding."""
    async with proxied(server, encoding="ascii") as (proxy, client):

        async def body(tx: Transaction) -> None:
            for number in range(5):
                await tx.touch(b"key:\xff%d" % number)
                await tx.execute_command("SCRIPT", "EXISTS", "ab")
            with pytest.raises(TransactionMisuse, match="without a name"):
                await tx.execute_command("")
            tx.multi()

        await transaction(client, body, "k")
        assert proxy.commands["COMMAND"] == 3  # TOUCH, SCRIPT, SCRIPT|EXISTS


async def test_a_busy_server_is_asked_again_what_a_command_does(redis: Redis, server: EmbeddedServer) -> None:
    """D9: the answer "not now" says nothing of the command."""
    async with proxied(server) as (proxy, client):
        proxy.on("COMMAND", Action.answer_error("BUSY Redis is busy running a script."), times=1)

        async def body(tx: Transaction) -> None:
            await tx.get("k")
            await tx.incr("n")
            tx.multi()

        with pytest.raises(CommandRefused, match="BUSY"):
            await transaction(client, body, "k", attempts=1)
        with pytest.raises(TransactionMisuse, match="before multi"):
            await transaction(client, body, "k", attempts=2)
    assert await redis.get("n") is None


async def test_a_bad_argument_is_an_error_of_the_body(redis: Redis) -> None:
    """It comes out as from the client, once; not as a failed connection."""
    runs = 0

    async def body(tx: Transaction) -> None:
        nonlocal runs
        runs += 1
        await tx.get(None)  # type: ignore[arg-type]

    with pytest.raises(DataError):
        await transaction(redis, body, "k")
    assert runs == 1
    async with AsyncLock(redis, "guard") as lease:
        with pytest.raises(DataError):
            async with lease.transaction() as tx:
                await tx.get(None)  # type: ignore[arg-type]
        assert not await watchers(redis)


async def test_a_guarded_transaction_has_a_beginning(redis: Redis) -> None:
    """A forgotten `async with` is told, and takes no connection."""
    async with AsyncLock(redis, "guard") as lease:
        before = in_use(redis)
        tx = lease.transaction()
        with pytest.raises(TransactionMisuse, match="async with"):
            await tx.get("k")
        with pytest.raises(TransactionMisuse, match="async with"):
            tx.multi()
        assert in_use(redis) == before
    assert not await watchers(redis)


def test_keys_of_a_function_without_a_name(make_client: MakeClient) -> None:
    """E2: the message is about the template."""

    async def move(tx: Transaction, item: int) -> None: ...

    with pytest.raises(ValueError, match=r"refers to 'nope', which .*move\(\) does not take"):
        watch_retry(make_client(), "a:{nope}")(partial(move))


# -- an EXEC without an answer, and a later run --------------------------------------------------------------


async def test_an_idempotent_body_that_is_not_committed_again_may_have_been(
    redis: Redis, server: EmbeddedServer
) -> None:
    """P12: who gives up, while Redis is away, does not say that nothing was written."""
    async with proxied(server) as (proxy, client):
        proxy.on("EXEC", Action.CUT_AFTER)
        proxy.on("WATCH", Action.CUT_BEFORE, times=None, skip=1)

        async def body(tx: Transaction) -> None:
            await tx.get("k")
            tx.multi()
            tx.set("k", "paid")

        with pytest.raises(OutcomeUnknown, match="earlier EXEC") as raised:
            await transaction(client, body, "k", idempotent=True, attempts=3, backoff=FAST)
        assert isinstance(raised.value.__cause__, Unreachable)
    assert await redis.get("k") == b"paid"


@pytest.mark.parametrize("in_turn", [False, True], ids=["in conflict", "waiting for a turn"])
async def test_giving_up_hides_no_unknown_outcome(redis: Redis, server: EmbeddedServer, in_turn: bool) -> None:
    """P12: the same when later runs meet others, with the whole story as its cause."""
    limits: dict[str, Any] = {"timeout": 0.5, "escalate_after": 1} if in_turn else {"attempts": 3}
    async with proxied(server) as (proxy, client):
        proxy.on("EXEC", Action.CUT_AFTER)
        runs = 0

        async def body(tx: Transaction) -> None:
            nonlocal runs
            runs += 1
            await tx.get("k")
            if runs > 1:
                await redis.set("k", "other")
                if in_turn:
                    await redis.set("{k}:turn", "somebody's")
            tx.multi()
            tx.set("paid", "yes")

        with pytest.raises(OutcomeUnknown, match="earlier EXEC") as raised:
            await transaction(client, body, "k", idempotent=True, backoff=FAST, **limits)
        why = raised.value.__cause__
        assert isinstance(why, Conflict)
        assert not in_turn or (runs == 2 and isinstance(why.__cause__, AcquireTimeout))
        await redis.delete("{k}:turn")
    assert await redis.get("paid") == b"yes"


# -- replies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exactly_once", [False, True])
async def test_a_reply_that_is_no_text_is_told_as_one(
    redis: Redis, make_client: MakeClient, exactly_once: bool
) -> None:
    """It was committed: an error of the decoder would look like one of the body, after which nothing was."""
    await redis.set("bytes", b"\xff")
    client = make_client(decode_responses=True)

    async def body(tx: Transaction) -> None:
        await tx.get("n")
        tx.multi()
        tx.incr("n")
        tx.getset("bytes", "text")
        tx.getset("bytes", "more")

    with pytest.raises(PartiallyApplied, match="all commands were executed") as raised:
        await transaction(client, body, "n", exactly_once=exactly_once)
    one, unread, text = raised.value.replies
    assert (one, text) == (1, "text")
    assert isinstance(unread, UnicodeDecodeError)
    assert await redis.get("n") == b"1"
    assert not in_use(client)
    await client.aclose()


async def test_replies_of_every_shape_are_decoded_as_the_client_does(make_client: MakeClient) -> None:
    """The replies of EXEC are read as bytes."""
    for protocol in (2, 3):
        client: Any = make_client(decode_responses=True, protocol=protocol)
        await client.flushall()

        async def body(tx: Any) -> None:
            await tx.get("n")
            tx.multi()
            tx.hset("h", mapping={"é": "ü", "b": "2"})
            tx.sadd("s", "x")
            tx.rpush("l", "1", "é")
            tx.lpop("l", 2)
            tx.zadd("z", {"m": 1.5}, incr=True)
            tx.spop("s", 1)
            tx.eval("return {1, {'é'}, redis.status_reply('OK')}", 0)

        done = await transaction(client, body, "n")
        plain = client.pipeline(transaction=True)
        await client.flushall()
        plain.hset("h", mapping={"é": "ü", "b": "2"})
        plain.sadd("s", "x")
        plain.rpush("l", "1", "é")
        plain.lpop("l", 2)
        plain.zadd("z", {"m": 1.5}, incr=True)
        plain.spop("s", 1)
        plain.eval("return {1, {'é'}, redis.status_reply('OK')}", 0)
        assert list(done.replies or ()) == await plain.execute()
        await client.aclose()


# -- turns ---------------------------------------------------------------------------------------------------


async def test_a_turn_that_was_lost_is_taken_again(redis: Redis, make_client: MakeClient) -> None:
    """Who lost it stands in the queue again; it does not race the one who has it."""
    others = make_client()
    theirs = AsyncLock(others, "{k}:turn", ttl=5)
    runs = 0
    held: list[Lease] = []

    async def body(tx: Transaction) -> None:
        nonlocal runs
        runs += 1
        await tx.get("k")
        if runs == 2:  # it has the turn, and now somebody else gets it
            await theirs.force_release()
            held.append(await theirs.acquire(timeout=5))
            await asyncio.sleep(TURN_TTL / 2)  # a renewal tells it of the loss
        if runs < 3:
            await redis.incr("k")
        tx.multi()

    running = asyncio.ensure_future(transaction(redis, body, "k", escalate_after=1, timeout=20))
    async with asyncio.timeout(10):
        while not held or (await theirs.statistics()).waiting < 1:
            await asyncio.sleep(0.01)
    assert not running.done()
    await held[0].release()
    done = await running
    assert (done.attempts, done.conflicts, done.escalated) == (3, 2, True)
    await others.aclose()


# -- guarded commits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [False, True])
async def test_p10_a_commit_under_way_is_not_executed_under_the_next_lease(
    redis: Redis, server: EmbeddedServer, share: bool
) -> None:
    """P10: a body that ends while its commit is in flight hands nothing on by which that would still be valid."""
    async with proxied(server) as (proxy, client), Coordinator(client) as sync:
        lock = AsyncLock(sync, "account", ttl=10, share=share)
        on_its_way = proxy.on("EXEC", Action.HOLD)

        async def commit(lease: Any) -> None:
            async with lease.transaction() as tx:
                tx.multi()
                tx.set("balance", "late")

        async with lock as lease:
            committing = asyncio.ensure_future(commit(lease))
            await asyncio.wait_for(on_its_way.fired.wait(), 5)
            following = asyncio.ensure_future(lock.acquire())
            await asyncio.sleep(0)
        theirs = await asyncio.wait_for(following, 5)
        on_its_way.release.set()
        with pytest.raises(NotHeld):
            await committing
        assert await redis.get("balance") is None
        await theirs.release()


async def test_a_guarded_commit_gives_up_when_its_coordinator_does(server: EmbeddedServer) -> None:
    """`retry_for` holds for it, too."""
    async with (
        proxied(server) as (proxy, client),
        Coordinator(client, retry_for=0.3) as sync,
        AsyncLock(sync, "guard", ttl=60) as lease,
    ):
        proxy.on("WATCH", Action.CUT_BEFORE, times=None)
        began = now()
        with pytest.raises(Unreachable):  # noqa: PT012
            async with lease.transaction() as tx:
                tx.multi()
                tx.incr("n")
        assert now() - began < 3


async def test_a_commit_beside_a_busy_semaphore_has_an_end(redis: Redis, make_client: MakeClient) -> None:
    """It is tried for the coordinator's `retry_for`, while others acquire and release at each of its moments."""
    others = make_client()
    async with Coordinator(redis, retry_for=1) as sync:
        busy = AsyncSemaphore(sync, "busy", limit=3)
        theirs = AsyncSemaphore(others, "busy", limit=3)
        async with busy as lease:
            tx = lease.transaction()
            execute = tx._session.execute

            async def met(queue: Any) -> Any:
                await (await theirs.acquire()).release()
                await asyncio.sleep(0.02)
                return await execute(queue)

            tx._session.execute = met  # type: ignore[method-assign]
            began = now()
            with pytest.raises(Conflict, match="'busy' itself was touched") as raised:  # noqa: PT012
                async with tx:
                    tx.multi()
                    tx.set("n", 1)
            assert 0.5 < now() - began < 3
            assert raised.value.conflicts > 2
    assert await redis.get("n") is None
    await others.aclose()


# -- cancellation --------------------------------------------------------------------------------------------


async def test_p5_a_cancellation_from_outside_in_a_cancelled_scope_stays_due(
    redis: Redis, server: EmbeddedServer
) -> None:
    """P5: the body's error leaves (P7), and the task is cancelled at its next await behind anyio's scope."""
    async with proxied(server, socket_timeout=0.5) as (proxy, client):
        steps: list[str] = []

        async def body(tx: Transaction) -> None:
            await tx.get("k")
            proxy.black_hole = True
            await asyncio.sleep(0.02)
            raise KeyError

        async def work() -> None:
            try:
                with anyio.move_on_after(0.05):
                    await transaction(client, body, "k")
            except KeyError:
                steps.append("error")
            await asyncio.sleep(5)
            steps.append("not cancelled")

        task = asyncio.ensure_future(work())
        await wait_until(lambda: bool(steps), FAST, timeout=10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert steps == ["error"]
        proxy.black_hole = False


async def test_b3_waiting_in_a_cancelled_scope_costs_nothing(redis: Redis, server: EmbeddedServer) -> None:
    """FAULTS B3: anyio repeats its cancellation in each turn of the loop, which must not become a busy loop."""
    async with proxied(server, socket_timeout=0.6) as (proxy, client):

        async def body(tx: Transaction) -> None:
            await tx.get("k")
            proxy.black_hole = True
            raise KeyError

        turns = 0
        loop = asyncio.get_running_loop()

        def count() -> None:
            nonlocal turns
            turns += 1

        select = loop._selector.select  # type: ignore[attr-defined]

        def counted(timeout: float | None = None) -> Any:
            count()
            return select(timeout)

        loop._selector.select = counted  # type: ignore[attr-defined]
        try:
            with pytest.raises(KeyError):
                with anyio.move_on_after(0.05):
                    await transaction(client, body, "k")
        finally:
            loop._selector.select = select  # type: ignore[attr-defined]
        assert turns < 200
        proxy.black_hole = False
