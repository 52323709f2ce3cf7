"""Transactions and what they stand on: round trips, pools of connections, users with few rights."""

from __future__ import annotations

import asyncio
import gc
import warnings
from typing import Any

import pytest
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError

from redis_sync_aio import AsyncLock, Coordinator, Unreachable, transaction, wait_until, watch_retry
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import PartiallyApplied, PermissionDenied, TransactionMisuse
from redis_sync_aio.types import Transaction

from ..conftest import MakeClient
from ..support.body import FAST
from ..support.inside import CheckedOut, turn_key
from ..support.transactions import in_use, increment, watchers


async def test_it_takes_two_round_trips(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """WATCH leaves with the first read, and MULTI to EXEC together; redis-py's own way takes three."""
    sent: list[int] = []
    exchange = CheckedOut.exchange

    async def counted(self: CheckedOut, commands: Any, raw: Any = ()) -> Any:
        sent.append(len(commands))
        return await exchange(self, commands, raw)

    monkeypatch.setattr(CheckedOut, "exchange", counted)
    await transaction(redis, increment, "n")
    assert sent == [4, 3]  # once for each connection: MULTI and EXEC before WATCH, to find out that they are allowed
    sent.clear()
    await transaction(redis, increment, "n")
    assert sent == [2, 3]
    sent.clear()
    await transaction(redis, increment, "n", exactly_once=True)
    assert sent == [2, 4]
    sent.clear()
    await transaction(redis, increment, "n", escalate_after=1)
    assert sent == [3, 3]
    sent.clear()
    async with AsyncLock(redis, "guard") as lease, lease.transaction() as tx:
        tx.multi()
        tx.incr("n")
    assert sent == [3, 3]


async def test_a_small_pool_serves_many_transactions_that_try_again(make_client: MakeClient) -> None:
    """A transaction that finds the pool empty tries again: nothing was done."""
    redis = make_client(max_connections=2)
    await redis.flushall()
    done = await asyncio.gather(*(transaction(redis, increment, "n", attempts=1000) for _ in range(8)))
    assert sorted(one.value for one in done) == list(range(1, 9))
    assert in_use(redis) == 0
    assert await watchers(redis) == 0


async def test_a_blocking_pool_of_one_serves_many(server: EmbeddedServer, redis: Redis) -> None:
    pool = BlockingConnectionPool(
        connection_class=UnixDomainSocketConnection, path=server.unix_socket, max_connections=1
    )
    client = Redis(connection_pool=pool)
    await asyncio.gather(*(transaction(client, increment, "n", attempts=1000) for _ in range(8)))
    assert await redis.get("n") == b"8"
    await pool.aclose()


@pytest.mark.usefixtures("redis")
async def test_transactions_wait_for_a_connection_of_an_exhausted_pool(make_client: MakeClient) -> None:
    """In order, and as long as their timeout; the first one that is given back goes to one of them."""

    async def read(tx: Transaction) -> None:
        await tx.get("n")
        tx.multi()

    async with make_client(max_connections=2) as redis:
        done = await asyncio.gather(*(transaction(redis, read, "n") for _ in range(100)))
        assert [one.attempts for one in done] == [1] * 100
        assert in_use(redis) == 0
        entered, leave = asyncio.Queue[None](), asyncio.Event()

        async def hold(tx: Transaction) -> None:
            await tx.get("n")
            entered.put_nowait(None)
            await leave.wait()
            tx.multi()

        holding = [asyncio.create_task(transaction(redis, hold, "n")) for _ in range(2)]
        await entered.get()
        await entered.get()
        with pytest.raises(Unreachable, match=r"no connection of the pool was free.*max_connections"):
            await transaction(redis, increment, "n", timeout=0.2)
        waiting = [asyncio.create_task(transaction(redis, increment, "n")) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        leave.set()
        async with asyncio.timeout(20):
            assert sorted(one.value for one in await asyncio.gather(*waiting[1:])) == [1, 2]
        await asyncio.gather(*holding)
        assert in_use(redis) == 0


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_bare_client_is_used_in_one_loop_after_the_other(server: EmbeddedServer) -> None:
    """Its idle connections belong to a loop that was closed; a transaction opens them again.

    (Python warns that they were open when the loop was closed.)
    """

    async def use(client: Redis, number: int) -> None:
        assert (await transaction(client, increment, "n")).value == 2 * number + 1
        async with AsyncLock(client, "guard") as lease, lease.transaction() as tx:
            assert int(await tx.get("n") or 0) == 2 * number + 1
            tx.multi()
            tx.incr("n")

    async def empty() -> None:
        async with Redis.from_url(server.url) as redis:
            await redis.flushall()

    def run() -> None:
        client = Redis.from_url(server.url)
        for number in range(3):
            asyncio.run(use(client, number))

    asyncio.run(empty())
    run()
    gc.collect()  # what was left open is warned of in this test


async def test_a_wrong_password_is_reported_immediately(make_client: MakeClient) -> None:
    once = Retry(NoBackoff(), 0)  # redis-py's own attempts, of which transactions wait for the end
    client = make_client(username="nobody", password="wrong", retry=once)
    with pytest.raises(PermissionDenied):
        await transaction(client, increment, "n")


async def test_a_user_without_the_right_to_command_info_reads_by_known_commands(make_client: MakeClient) -> None:
    """Of the others nobody knows whether they write, so they are refused, and the error says what would help."""
    admin: Any = make_client()
    await admin.execute_command("ACL", "SETUSER", "simple", "on", ">secret", "~*", "+@all", "-command")
    client = make_client(username="simple", password="secret")

    async def body(tx: Transaction) -> Any:
        found = await tx.execute_command("HSTRLEN", "h", "f")
        with pytest.raises(TransactionMisuse, match=r"TOUCH before multi.*\+command\|info"):
            await tx.touch("l")
        tx.multi()
        return found

    assert (await transaction(client, body, "h")).value == 0
    await client.aclose()
    await admin.execute_command("ACL", "DELUSER", "simple")


RIGHTS = ("+watch", "+unwatch", "+multi", "+exec", "+get", "+set")


async def test_least_rights(redis: Redis, make_client: MakeClient) -> None:
    """D16: they suffice, also for exactly_once, and without any one of them something is refused."""
    admin: Any = redis
    rule = ("ACL", "SETUSER", "least", "reset", "on", ">secret", "~n", "~{n}:commit:*", "-@all")
    await admin.execute_command(*rule, *RIGHTS)
    client = make_client(username="least", password="secret")

    async def body(tx: Transaction) -> None:
        count = int(await tx.get("n") or 0)
        tx.multi()
        tx.set("n", count + 1)

    async def give_up(tx: Transaction) -> None:
        await tx.get("n")
        raise KeyError

    async def everything() -> None:
        await transaction(client, body, "n", exactly_once=True)
        with pytest.raises(KeyError):
            await transaction(client, give_up, "n")

    await everything()
    for right in RIGHTS:
        if right == "+unwatch":
            continue  # without it the connection is closed instead
        await admin.execute_command(*rule, *(other for other in RIGHTS if other != right))
        with pytest.raises((PermissionDenied, PartiallyApplied, NoPermissionError)):
            await everything()
    await client.aclose()
    await admin.execute_command("ACL", "DELUSER", "least")


async def test_a_loop_that_is_left_gives_its_turn_back(redis: Redis) -> None:
    async def left_early() -> None:
        async for attempt in watch_retry(redis, "n", escalate_after=1):
            async with attempt as tx:
                await tx.get("n")
                held = bool(await redis.exists(turn_key(b"n")))
                await redis.incr("n")
                tx.multi()
                if held:
                    return

    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        await left_early()
        gc.collect()

    async def free() -> bool:
        return not await redis.exists(turn_key(b"n"))

    await wait_until(free, FAST, timeout=15)


async def test_a_pool_that_was_given_to_a_client_outlives_it(server: EmbeddedServer, redis: Redis) -> None:
    """docs/operations/servers.md: its locks stay held until the pool is disconnected."""
    pool = ConnectionPool(connection_class=UnixDomainSocketConnection, path=server.unix_socket)
    client = Redis(connection_pool=pool)
    async with Coordinator(client) as sync:
        lease = await sync.lock("job").acquire()
        await client.aclose()
        await lease.extend(20)
        assert await redis.get("job") == lease.token.encode()
        await pool.disconnect()
        async with asyncio.timeout(9):
            await lease.wait_lost()
        assert lease._grant.reason == "closed"
