"""Transactions of users who may not do all of it, and of clients that have no time limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncMultiLock, Coordinator, OutcomeUnknown, transaction, watch_retry
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import PartiallyApplied, PermissionDenied
from redis_sync_aio.testing.faults import Action, FaultProxy
from redis_sync_aio.types import Transaction

from ..conftest import MakeClient
from ..support.inside import now
from ..support.transactions import in_use, increment, prove, proxied, watchers, wired


@asynccontextmanager
async def user(redis: Redis, make_client: MakeClient, *rights: str) -> AsyncIterator[Redis]:
    """A client whose user has all rights but those that ``rights`` take away."""
    admin: Any = redis
    await admin.execute_command("ACL", "SETUSER", "few", "reset", "on", ">secret", "~*", "&*", "+@all", *rights)
    client = make_client(username="few", password="secret")
    yield client
    await client.aclose()
    await admin.execute_command("ACL", "DELUSER", "few")


async def by_function(client: Redis) -> None:
    await transaction(client, increment, "n")


async def exactly_once(client: Redis) -> None:
    await transaction(client, increment, "n", exactly_once=True)


async def by_loop(client: Redis) -> None:
    async for attempt in watch_retry(client, "n"):
        async with attempt as tx:
            await increment(tx)


async def by_turns(client: Redis) -> None:
    async with Coordinator(client) as sync:
        await transaction(sync, increment, "n", escalate_after=1)


async def guarded(client: Redis) -> None:
    async with Coordinator(client) as sync, AsyncLock(sync, "lock") as lease, lease.transaction() as tx:
        tx.multi()
        tx.set("n", 1)


async def guarded_that_reads(client: Redis) -> None:
    async with Coordinator(client) as sync, AsyncLock(sync, "lock") as lease, lease.transaction() as tx:
        await increment(tx)


FORMS = (by_function, exactly_once, by_loop, by_turns, guarded, guarded_that_reads)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("command", ["multi", "exec"])
async def test_a_user_without_the_right_to_multi_or_exec_writes_nothing(
    redis: Redis, make_client: MakeClient, form: Callable[[Redis], Awaitable[None]], command: str
) -> None:
    """Without MULTI its writes would be executed one by one, over what others wrote since it read."""
    async with user(redis, make_client, f"-{command}") as client:
        await redis.set("n", "old")
        await redis.set("n", 7)
        with pytest.raises(PermissionDenied, match=f"'{command}'"):
            await form(client)
        assert await redis.get("n") == b"7"
        assert in_use(client) == 0
        assert await watchers(redis) == 0
        assert await client.echo("mine") == b"mine"  # no MULTI is left open


async def test_it_is_found_out_once_for_each_connection(redis: Redis, server: EmbeddedServer) -> None:
    """Not for each transaction; and again when a connection may lead to another server, with other rules."""
    async with proxied(server) as (proxy, client):
        proxy.commands.clear()
        for _ in range(3):
            await transaction(client, increment, "n")
        assert proxy.commands["EXEC"] == 3
        await client.connection_pool.disconnect()
        await transaction(client, increment, "n")
        assert proxy.commands["EXEC"] == 5
    assert await redis.get("n") == b"4"


@pytest.mark.parametrize("command", ["MULTI", "EXEC"])
async def test_what_is_lost_while_it_finds_out_is_tried_again(
    redis: Redis, server: EmbeddedServer, command: str
) -> None:
    """Nothing was written yet, so nothing is in doubt."""
    async with FaultProxy(server) as proxy, proxy.client() as client:
        proxy.on(command, Action.CUT_BEFORE)
        done = await transaction(client, increment, "n")
        assert (done.value, done.attempts) == (1, 2)
    assert await redis.get("n") == b"1"


async def test_a_right_that_is_taken_away_later_is_told_with_what_was_done(
    redis: Redis, make_client: MakeClient
) -> None:
    """The rest that cannot be found out before: the error says what was executed."""
    async with user(redis, make_client) as client:
        await prove(client)
        admin: Any = redis
        await admin.execute_command("ACL", "SETUSER", "few", "-multi")
        with pytest.raises(PartiallyApplied, match="MULTI was refused") as caught:
            await transaction(client, increment, "n")
        assert caught.value.replies == (b"OK",)


@pytest.mark.parametrize("push", ["never", "auto"])
async def test_a_lock_by_watch_finds_it_out_for_each_connection(
    redis: Redis, make_client: MakeClient, push: Literal["never", "auto"]
) -> None:
    """Also on the next one, which may lead to another server: what was proven there is proven nowhere else."""
    async with user(redis, make_client) as client, Coordinator(client, push=push) as sync:
        lock = AsyncLock(sync, "lock", engine="watch")
        await (await lock.acquire()).release()
        admin: Any = redis
        await admin.execute_command("ACL", "SETUSER", "few", "-multi")
        await admin.execute_command("CLIENT", "KILL", "USER", "few")
        await redis.flushall()
        with pytest.raises(PermissionDenied, match="'multi'"):
            await lock.acquire(timeout=10)
        assert await redis.dbsize() == 0


# -- the marker --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", ["GET", "SET"])
async def test_a_server_that_refuses_to_tell_is_not_asked_for_twenty_seconds(
    server: EmbeddedServer, refused: str
) -> None:
    """A user may set the marker and not read it: waiting does not give it that right."""
    async with wired(server) as it:
        why = "NOPERM User few has no permissions"
        it.proxy.on("EXEC", Action.CUT_BEFORE)
        it.proxy.on(
            lambda words: (
                words[0] == refused.encode() and b":commit:" in words[1] and (refused == "GET" or b"void" in words)
            ),
            Action.answer_error(why),
            times=None,
        )
        began = now()
        with pytest.raises(OutcomeUnknown, match=r"marker .* NOPERM") as caught:
            await transaction(it.client, it.body, it.key, exactly_once=True)
        assert now() - began < 10
        assert isinstance(caught.value.__cause__, PermissionDenied)
        await it.check_clean()


# -- time limits -------------------------------------------------------------------------------------------


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit where the client has none is short, so that no test has to wait for its end."""
    for module in ("settings", "checkout"):
        monkeypatch.setattr(f"redis_sync_aio._client.{module}.DEFAULT_TIMEOUT", 0.3, raising=False)


@pytest.mark.usefixtures("hurry")
async def test_a_client_without_a_time_limit_waits_for_its_answer(server: EmbeddedServer) -> None:
    """redis-py waits for it without an end, and so do transactions: they have no limit of their own."""
    async with wired(server, socket_timeout=None) as it:
        rule = it.proxy.on("EXEC", Action.HOLD_REPLY)
        running = asyncio.ensure_future(transaction(it.client, it.body, it.key))
        await rule.fired.wait()
        await asyncio.wait([running], timeout=1.5)
        assert not running.done()
        rule.release.set()
        assert (await running).value == 1


async def test_the_limit_of_a_coordinator_is_an_argument(server: EmbeddedServer) -> None:
    """It holds for transactions, too, whatever the client says."""
    async with wired(server, socket_timeout=None) as it, Coordinator(it.client, response_timeout=0.5) as sync:
        it.proxy.on("EXEC", Action.SWALLOW_REPLY)
        with pytest.raises(OutcomeUnknown):
            async with asyncio.timeout(4):
                await transaction(sync, it.body, it.key)
        await prove(it.client)
        async with AsyncMultiLock(sync, ["{l}:1", "{l}:2"]) as lease:
            it.proxy.on("EXEC", Action.SWALLOW_REPLY)
            with pytest.raises(OutcomeUnknown):
                async with asyncio.timeout(4), lease.transaction() as tx:
                    await it.body(tx)


@pytest.mark.usefixtures("hurry")
async def test_a_clean_up_has_an_end_without_a_time_limit(server: EmbeddedServer) -> None:
    """The body's error does not wait for a server that says nothing to UNWATCH."""

    async def fails(tx: Transaction) -> None:
        await tx.get("n")
        raise KeyError

    async with wired(server, socket_timeout=None) as it:
        it.proxy.on("UNWATCH", Action.SWALLOW_REPLY)
        with pytest.raises(KeyError):
            async with asyncio.timeout(10):
                await transaction(it.client, fails, it.key)


@pytest.mark.usefixtures("hurry")
async def test_a_lost_question_is_asked_again_without_a_time_limit(server: EmbeddedServer) -> None:
    """`exactly_once` has 20 seconds to find out: one silent connection does not take all of them."""
    async with wired(server, socket_timeout=None) as it:
        it.proxy.on("EXEC", Action.CUT_BEFORE)
        it.proxy.on(lambda words: words[0] == b"SET" and b"void" in words, Action.SWALLOW_REPLY)
        done = await transaction(it.client, it.body, it.key, exactly_once=True)
        assert (done.attempts, await it.counted()) == (2, 1)
