"""Transactions of many tasks and processes: totals are exact, whichever take turns and whichever do not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, Conflict, Coordinator, transaction, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import PermissionDenied
from redis_sync_aio.types import Transaction

from ..conftest import MakeClient
from ..support.body import FAST
from ..support.inside import turn_key
from ..support.processes import Crew
from ..support.transactions import increment, interrupted

TASKS = 32


async def count_up(sync: Coordinator, key: str, after: str) -> dict[str, object]:
    """In a child: count ``key`` up in transactions of many tasks; by turns ``after`` conflicts (0: never)."""
    client: Any = sync.client
    conflicts = escalated = 0
    disturbed = max(1, int(after))  # so many attempts of each meet a conflict, however slow the machine is

    async def one() -> None:
        nonlocal conflicts, escalated
        attempts = 0

        async def body(tx: Transaction) -> None:
            nonlocal attempts
            attempts += 1
            count = int(await tx.get(key) or 0)
            if attempts <= disturbed:
                await client.incrby(key, 0)  # a write, which leaves the value
            tx.multi()
            tx.set(key, count + 1)

        done = await transaction(sync, body, key, attempts=100_000, escalate_after=int(after) or None)
        conflicts += done.conflicts
        escalated += done.escalated

    await asyncio.gather(*(one() for _ in range(TASKS)))
    return {"conflicts": conflicts, "escalated": escalated}


@pytest.mark.real  # processes
@pytest.mark.parametrize(
    "after",
    [
        pytest.param((0, 0), id="optimistic", marks=pytest.mark.ci),
        pytest.param((3, 3), id="by turns", marks=pytest.mark.ci),
        pytest.param((2, 0), id="mixed"),
    ],
)
async def test_totals_of_64_tasks_in_two_processes_are_exact(
    server: EmbeddedServer, redis: Redis, crew: Crew, after: tuple[int, int]
) -> None:
    """With plain redis-py, which knows of no turns, as a third."""

    async def foreign(pipe: Any) -> None:
        count = int(await pipe.get("n") or 0)
        pipe.multi()
        pipe.set("n", count + 1)

    with crew.children(2) as children:
        for child in children:
            await child.open(server.url)
        running = [child.run(count_up, "n", own) for child, own in zip(children, after, strict=True)]
        for _ in range(10):
            await redis.transaction(foreign, "n", watch_delay=0.001)
        answers = await asyncio.gather(*running)
    assert int(await redis.get("n") or 0) == 2 * TASKS + 10
    assert sum(one["conflicts"] for one in answers) > 0
    for answer, own in zip(answers, after, strict=True):
        assert (answer["escalated"] > 0) == (own > 0)


async def test_after_so_many_conflicts_it_has_the_turn_until_it_commits(redis: Redis) -> None:
    seen: list[bool] = []

    async def body(tx: Transaction) -> None:
        seen.append(bool(await redis.exists(turn_key(b"n"))))
        count = int(await tx.get("n") or 0)
        if len(seen) < 6:
            await redis.incr("n")
        tx.multi()
        tx.set("n", count + 100)

    done = await transaction(redis, body, "n", escalate_after=3)
    assert seen == [False, False, False, True, True, True]
    assert (done.conflicts, done.escalated, await redis.get("n")) == (5, True, b"105")
    await wait_until(lambda: _free(redis), FAST, timeout=15)


async def _free(redis: Redis) -> bool:
    return not await redis.exists(turn_key(b"n"))


@pytest.mark.real  # counts the commands of the server
async def test_a_transaction_that_finds_a_turn_taken_takes_its_own(redis: Redis, sync: Coordinator) -> None:
    """Without a conflict of its own, and without a round trip more when nobody has the turn."""
    await redis.config_resetstat()
    await transaction(redis, increment, "n", escalate_after=3)
    commands = await redis.info("commandstats")
    assert commands["cmdstat_exists"]["calls"] == 1
    assert "cmdstat_evalsha" not in commands

    lock = AsyncLock(sync, turn_key(b"n"))
    lease = await lock.acquire()
    polite = asyncio.create_task(transaction(redis, increment, "n", escalate_after=3))

    async def waits() -> bool:
        return (await lock.statistics()).waiting == 1

    await wait_until(waits, FAST, timeout=15)
    assert (await transaction(redis, increment, "n")).value == 2  # who knows of no turns goes on
    await lease.release()
    done = await polite
    assert (done.value, done.attempts, done.conflicts, done.escalated) == (3, 1, 0, True)


async def test_waiting_for_the_turn_ends_with_the_deadline(redis: Redis, sync: Coordinator) -> None:
    lock = AsyncLock(sync, turn_key(b"n"))
    lease = await lock.acquire()
    with pytest.raises(Conflict, match="others had the turn on 'n'") as caught:
        async with asyncio.timeout(10):
            await transaction(redis, increment, "n", escalate_after=1, timeout=0.05)
    assert (caught.value.attempts, caught.value.conflicts) == (1, 0)
    assert 0.05 <= caught.value.elapsed < 2
    assert (await lock.statistics()).waiting == 0
    await lease.release()


async def test_a_turn_that_is_lost_does_no_harm(redis: Redis) -> None:
    turns = 0

    async def body(tx: Transaction) -> None:
        nonlocal turns
        turns += 1
        count = int(await tx.get("n") or 0)
        if turns < 3:
            await redis.incr("n")
            await redis.delete(turn_key(b"n"))
        tx.multi()
        tx.set("n", count + 100)

    done = await transaction(redis, body, "n", escalate_after=1)
    assert (done.conflicts, await redis.get("n")) == (2, b"102")


async def test_several_keys_have_one_turn_each_and_no_deadlock(redis: Redis) -> None:
    async def swap(tx: Transaction, first: str, second: str) -> None:
        one, two = await tx.mget(first, second)
        tx.multi()
        tx.mset({first: int(two or 0) + 1, second: int(one or 0) + 1})

    async def many(first: str, second: str) -> None:
        for _ in range(5):
            await transaction(
                redis, lambda tx: swap(tx, first, second), first, second, attempts=10_000, escalate_after=1
            )

    async with asyncio.timeout(20):
        await asyncio.gather(*(many(*pair) for pair in (("a", "b"), ("b", "a")) * 4))
    first, second = await redis.mget("a", "b")
    assert int(first or 0) + int(second or 0) == 2 * 40


async def test_whose_user_may_not_lock_is_told_so(make_client: MakeClient, redis: Redis) -> None:
    acl: Any = redis
    await acl.execute_command("ACL", "SETUSER", "plain", "on", ">secret", "~n", "&*", "+@all")
    plain = make_client(username="plain", password="secret")
    assert (await transaction(plain, interrupted(redis, 1), "n")).conflicts == 1
    async with Coordinator(plain) as own:
        with pytest.raises(PermissionDenied):
            await transaction(own, interrupted(redis, 2), "n", escalate_after=1)
    await plain.aclose()
    await acl.execute_command("ACL", "DELUSER", "plain")
