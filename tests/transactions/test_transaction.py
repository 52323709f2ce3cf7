"""Transactions: the three forms, what they return, and what contention does to them (E8)."""

from __future__ import annotations

import asyncio
import gc
import inspect
import warnings
from typing import Any, get_type_hints

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff, NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from redis_sync_aio import (
    AsyncLock,
    Backoff,
    CommandRefused,
    Conflict,
    Coordinator,
    SyncError,
    Unreachable,
    synchronized,
    transaction,
    watch_retry,
)
from redis_sync_aio.errors import PartiallyApplied
from redis_sync_aio.types import Transaction

from ..conftest import MakeClient
from ..support.inside import now
from ..support.transactions import Insufficient, in_use, increment, interrupted, watchers


async def test_it_reads_writes_and_tells_what_it_took(redis: Redis) -> None:
    async def body(tx: Transaction) -> str:
        assert await tx.get("a") is None
        assert await tx.hgetall("h") == {}
        tx.multi()
        tx.set("a", 1)
        await tx.incr("a")  # awaiting what is queued does no harm
        tx.hset("h", mapping={"x": 1})
        return "done"

    done = await transaction(redis, body, "a", "h")
    assert (done.value, done.replies, done.attempts, done.conflicts) == ("done", (True, 2, 1), 1, 0)
    assert 0 < done.elapsed < 5
    assert not done.recovered
    assert not done.escalated
    assert await redis.get("a") == b"2"
    assert await watchers(redis) == 0


async def test_a_conflict_runs_the_whole_body_again(redis: Redis) -> None:
    done = await transaction(redis, interrupted(redis, 3), "n")
    assert (done.value, done.attempts, done.conflicts) == (3, 4, 3)
    assert await redis.get("n") == b"103"


async def test_it_gives_up_after_so_many_attempts(redis: Redis) -> None:
    with pytest.raises(Conflict, match="'n' during 3 of 3 attempts") as caught:
        await transaction(redis, interrupted(redis, 99), "n", attempts=3)
    assert (caught.value.attempts, caught.value.conflicts, caught.value.keys) == (3, 3, ("n",))
    assert caught.value.elapsed < 5
    assert await redis.get("n") == b"3"
    assert await watchers(redis) == 0


async def test_it_gives_up_when_its_time_is_over(redis: Redis) -> None:
    slow = Backoff(initial=0.03, factor=1, cap=0.03, jitter=False)
    with pytest.raises(Conflict) as caught:
        await transaction(redis, interrupted(redis, 99), "n", attempts=99, timeout=0.1, backoff=slow)
    assert 2 <= caught.value.attempts <= 4
    assert caught.value.elapsed < 0.1 + 0.05


async def test_the_bodys_own_error_comes_out_bare(redis: Redis) -> None:
    error = Insufficient()

    async def body(tx: Transaction) -> None:
        await tx.get("n")
        tx.multi()
        tx.set("n", 1)
        raise error

    with pytest.raises(Insufficient) as caught:
        await transaction(redis, body, "n")
    assert caught.value is error
    assert caught.value.__context__ is None
    assert await redis.get("n") is None
    assert await watchers(redis) == 0
    assert in_use(redis) == 0


async def test_a_decorated_function_is_a_transaction_on_keys_of_its_arguments(redis: Redis) -> None:
    @watch_retry(redis, "stock:{item}", "sold", attempts=50)
    async def deduct(tx: Transaction, item: int, n: int = 1) -> int:
        left = int(await tx.get(f"stock:{item}") or 0) - n
        if left < 0:
            raise Insufficient
        tx.multi()
        tx.set(f"stock:{item}", left)
        return left

    await redis.set("stock:7", 2000)
    left = await asyncio.gather(*(deduct(7, n=2) for _ in range(10)))
    assert sorted(left) == list(range(1980, 2000, 2))
    with pytest.raises(Insufficient):
        await deduct(8)
    assert deduct.__name__ == "deduct"


async def test_the_signature_of_a_decorated_function_is_the_callers(redis: Redis) -> None:
    """The transaction is not in it. So decorators and frameworks that read it see what callers pass."""

    @synchronized(redis, "lock:{item}", timeout=5)
    @watch_retry(redis, "stock:{item}")
    async def deduct(tx: Transaction, item: int, n: int = 1) -> str:
        assert await AsyncLock(redis, f"lock:{item}").locked()
        await tx.watch()
        tx.multi()
        tx.decrby(f"stock:{item}", n)
        return "done"

    assert await deduct(7, 2) == await deduct(n=1, item=7) == "done"
    assert await redis.get("stock:7") == b"-3"
    assert str(inspect.signature(deduct)) == "(item: 'int', n: 'int' = 1) -> 'str'"
    assert get_type_hints(deduct) == {"item": int, "n": int, "return": str}

    @watch_retry(redis, "stock:{numbers[0]}")
    async def deduct_all(*numbers: Any) -> None:
        tx: Transaction = numbers[0]
        await tx.watch()
        tx.multi()
        tx.set("stock:5", numbers[1])

    await deduct_all(5)
    assert await redis.get("stock:5") == b"5"
    assert list(inspect.signature(deduct_all).parameters) == ["numbers"]


async def test_a_loop_ends_with_the_commit(redis: Redis) -> None:
    turns, last = 0, None
    async for attempt in watch_retry(redis, "n"):
        async with attempt as tx:
            turns += 1
            count = int(await tx.get("n") or 0)
            if turns < 3:
                await redis.incr("n")
            tx.multi()
            tx.set("n", count + 10)
        assert (attempt.committed is not None) == (turns == 3)
        last = attempt
    assert last is not None
    assert last.committed is not None
    assert (last.committed.conflicts, last.replies) == (2, (True,))
    assert await redis.get("n") == b"12"


async def test_a_loop_that_is_left_without_a_commit_says_so(redis: Redis) -> None:
    async def left_early() -> str:
        async for attempt in watch_retry(redis, "n"):
            async with attempt as tx:
                await tx.get("n")
                await redis.incr("n")
                tx.multi()
                tx.set("n", 5)
                return "nobody will know"
        return "never"

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await left_early()
        gc.collect()
    assert sum("not tried again" in str(one.message) for one in caught) == 1
    assert await redis.get("n") == b"1"


async def test_nothing_to_write_confirms_what_was_read(redis: Redis) -> None:
    turns = 0

    async def body(tx: Transaction) -> tuple[Any, Any]:
        nonlocal turns
        turns += 1
        first = await tx.get("a")
        if turns == 1:
            await redis.mset({"a": 1, "b": 1})
        second = await tx.get("b")
        tx.multi()
        return first, second

    done = await transaction(redis, body, "a", "b")
    assert (done.value, done.replies, done.conflicts) == ((b"1", b"1"), (), 1)


async def test_more_keys_may_be_watched(redis: Redis) -> None:
    turns = 0

    async def body(tx: Transaction) -> None:
        nonlocal turns
        turns += 1
        which = "x" if await tx.get("which") is None else "y"
        await tx.watch(which, "which")
        value = await redis.get(which)  # read in another way: that is what watch() is for
        if turns == 1:
            await redis.incr(which)
        tx.multi()
        tx.set(which, int(value or 0) + 10)

    done = await transaction(redis, body, "which")
    assert done.conflicts == 1
    assert await redis.get("x") == b"11"


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode", [False, True])
async def test_replies_look_as_from_the_client(make_client: MakeClient, protocol: int, decode: bool) -> None:
    redis = make_client(protocol=protocol, decode_responses=decode)
    await redis.flushall()
    await redis.zadd("z", {"a": 1.5, "b": 2})
    await redis.hset("h", mapping={"f": "v"})
    seen: list[Any] = []

    async def body(tx: Transaction) -> None:
        seen.append(await tx.zrange("z", 0, -1, withscores=True))
        seen.append(await tx.hgetall("h"))
        seen.append(await tx.type("z"))
        seen.append(await tx.object("encoding", "z"))
        seen.append([one async for one in tx.scan_iter("z*")])
        seen.append(await tx.time() is not None)
        seen.append(type(await tx.dump("h")))
        tx.multi()
        tx.zincrby("z", 1.5, "a")
        tx.expire("z", 100)
        tx.zadd("z", {"c": 3}, nx=True)

    done = await transaction(redis, body, "z", "h")
    expected: list[Any] = [
        await redis.zrange("z", 0, -2, withscores=True),
        await redis.hgetall("h"),
        await redis.type("z"),
        await redis.object("encoding", "z"),
        ["z" if decode else b"z"],
        True,
        bytes,
    ]
    assert seen[1:] == expected[1:]
    assert [list(pair) for pair in seen[0]] == [["a" if decode else b"a", 1.5], ["b" if decode else b"b", 2.0]]
    assert done.replies == (3.0, True, 1)


async def test_a_coordinator_and_a_single_connection_client_will_do(make_client: MakeClient) -> None:
    redis = make_client(single_connection_client=True)
    await redis.flushall()
    assert (await transaction(redis, increment, "n")).value == 1
    async with Coordinator(redis) as sync:
        assert (await transaction(sync, increment, "n")).value == 2


async def test_a_refused_write_writes_nothing(redis: Redis) -> None:
    async def body(tx: Transaction) -> None:
        await tx.get("n")
        tx.multi()
        tx.set("n", 1)
        tx.execute_command("NOSUCHCOMMAND", "n")

    with pytest.raises(CommandRefused, match="unknown command"):
        await transaction(redis, body, "n")
    assert await redis.get("n") is None


async def test_a_write_that_fails_when_it_runs_is_told_with_all_replies(redis: Redis) -> None:
    async def body(tx: Transaction) -> None:
        await tx.get("n")
        tx.multi()
        tx.set("n", 1)
        tx.lpush("n", 2)
        tx.incr("n")

    with pytest.raises(PartiallyApplied, match=r"command 2 of 3 \(LPUSH\) failed .* 2 of 3 commands were") as caught:
        await transaction(redis, body, "n")
    first, second, third = caught.value.replies
    assert (first, third) == (True, 2)
    assert "WRONGTYPE" in str(second)
    assert await redis.get("n") == b"2"


async def test_an_error_of_a_read_is_the_clients(redis: Redis) -> None:
    await redis.lpush("n", 1)
    with pytest.raises(Exception, match="WRONGTYPE") as caught:
        await transaction(redis, increment, "n")
    assert not isinstance(caught.value, SyncError)
    assert await watchers(redis) == 0


async def test_a_server_out_of_reach_is_tried_again_within_the_deadline(make_client: MakeClient) -> None:
    redis = Redis(host="127.0.0.1", port=1, retry=Retry(NoBackoff(), 0))
    with pytest.raises(Unreachable, match="nothing was written"):
        await transaction(redis, increment, "n", timeout=0.1)
    await redis.aclose()


UNREACHED: Any = (RedisConnectionError, OSError)
"""What such a client tries again: redis-py before 7 does not count a refused connection, an OSError, unless told."""


async def test_a_server_out_of_reach_is_not_tried_forever(make_client: MakeClient) -> None:
    """Not even with any number of attempts, nor by a client that itself tries for long."""
    redis = Redis(host="127.0.0.1", port=1, retry=Retry(ConstantBackoff(0.1), 2, UNREACHED))
    async with Coordinator(redis, retry_for=0.3, push="never") as sync:
        begin = now()
        with pytest.raises(Unreachable, match="nothing was written"):
            await transaction(sync, increment, "n", attempts=1_000_000)
        assert 0.3 < now() - begin < 3
        begin = now()
        with pytest.raises(Unreachable, match="nothing was written"):
            await transaction(sync, increment, "n", attempts=1_000_000, timeout=2)
        assert now() - begin > 1.5
    await redis.aclose()


async def test_no_attempt_begins_after_the_time_for_it() -> None:
    """The time that redis-py took to connect, again and again, counts, too."""
    redis = Redis(host="127.0.0.1", port=1, retry=Retry(ConstantBackoff(0.1), 4, UNREACHED))
    async with Coordinator(redis, retry_for=0.3, push="never") as sync:
        bodies = 0

        async def body(tx: Transaction) -> None:
            nonlocal bodies
            bodies += 1
            await tx.get("n")

        with pytest.raises(Unreachable, match="nothing was written"):
            await transaction(sync, body, "n")
        assert bodies == 1
    await redis.aclose()


async def test_a_long_body_takes_no_time_from_later_retries(redis: Redis) -> None:
    """What comes after it is tried again for as long as after a short one."""
    async with Coordinator(redis, retry_for=0.2) as sync:
        bodies = 0

        async def body(tx: Transaction) -> None:
            nonlocal bodies
            bodies += 1
            await tx.get("n")
            if bodies == 1:
                await asyncio.sleep(0.3)
                await redis.client_kill_filter(_type="normal", skipme=True)
            tx.multi()
            tx.set("n", bodies)

        assert (await transaction(sync, body, "n")).attempts == 2
