"""Transactions: what cannot work is refused, with a word on what to do instead, and writes nothing (E1, E2)."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis as redis_py
import redis.exceptions
from redis.asyncio import Redis, RedisCluster
from redis.exceptions import DataError

from redis_sync_aio import Backoff, Coordinator, Lease, transaction, watch_retry
from redis_sync_aio.errors import TransactionMisuse
from redis_sync_aio.types import Transaction

from ..conftest import MakeClient
from ..support.transactions import in_use, increment, watchers


async def no_multi(tx: Transaction) -> None:
    await tx.get("n")


async def nothing_read(tx: Transaction) -> None:
    tx.multi()
    tx.set("n", 1)


async def twice_multi(tx: Transaction) -> None:
    await tx.get("n")
    tx.multi()
    tx.multi()


async def reads_late(tx: Transaction) -> None:
    await tx.get("n")
    tx.multi()
    await tx.get("n")


async def watches_late(tx: Transaction) -> None:
    await tx.get("n")
    tx.multi()
    await tx.watch("n")


async def blocks(tx: Transaction) -> None:
    await tx.blpop(["n"])


async def blocks_reading(tx: Transaction) -> None:
    await tx.xread({"n": 0}, block=10)


async def selects(tx: Transaction) -> None:
    await tx.select(1)


async def unwatches(tx: Transaction) -> None:
    await tx.unwatch()


async def executes(tx: Transaction) -> None:
    await tx.get("n")
    await tx.execute_command("EXEC")


async def two_at_once(tx: Transaction) -> None:
    first = asyncio.ensure_future(tx.get("n"))
    try:
        await asyncio.gather(first, tx.get("m"))
    finally:
        await first


async def multi_meanwhile(tx: Transaction) -> None:
    reading = asyncio.ensure_future(tx.get("n"))
    await asyncio.sleep(0)
    try:
        tx.multi()
    finally:
        await asyncio.gather(reading, return_exceptions=True)


async def made_before_multi(tx: Transaction) -> None:
    await tx.get("n")
    late = tx.get("n")
    tx.multi()
    await late


MISUSE: dict[str, tuple[Callable[[Transaction], Awaitable[object]], str]] = {
    "no multi": (no_multi, "ended without multi"),
    "nothing read": (nothing_read, "before anything was read"),
    "multi twice": (twice_multi, "call tx.multi\\(\\) once"),
    "a read after multi": (reads_late, "read before tx.multi"),
    "watch after multi": (watches_late, "after multi"),
    "blocking": (blocks, "BLPOP cannot block"),
    "blocking read": (blocks_reading, "XREAD cannot block"),
    "select": (selects, "SELECT would change a connection"),
    "unwatch": (unwatches, "not for the body"),
    "exec": (executes, "EXEC is not for the body"),
    "two together": (two_at_once, "two commands at the same time"),
    "multi meanwhile": (multi_meanwhile, "await it first"),
    "made before multi": (made_before_multi, "after multi"),
}


@pytest.mark.parametrize("name", MISUSE)
async def test_misuse_is_refused_and_writes_nothing(redis: Redis, name: str) -> None:
    body, words = MISUSE[name]
    await redis.set("n", 7)
    with pytest.raises(TransactionMisuse, match=words):
        await transaction(redis, body, "n")
    assert await redis.get("n") == b"7"
    assert await redis.dbsize() == 1
    assert in_use(redis) == 0
    assert await watchers(redis) == 0


async def test_nested_transactions_of_one_task_are_refused_others_are_not(make_client: MakeClient) -> None:
    redis, other = make_client(max_connections=2), make_client()
    await redis.flushall()

    async def outer(tx: Transaction) -> list[int]:
        await tx.get("outer")
        with pytest.raises(TransactionMisuse, match="inside the body of another one"):
            await transaction(redis, increment, "n")
        child = await asyncio.create_task(_value(transaction(redis, increment, "n")))
        elsewhere = (await transaction(other, increment, "n")).value
        tx.multi()
        tx.set("outer", 1)
        return [child, elsewhere]

    assert (await transaction(redis, outer, "outer")).value == [1, 2]
    assert (await transaction(redis, increment, "n")).value == 3  # and afterwards it may begin another one


async def _value(running: Awaitable[Any]) -> int:
    value: int = (await running).value
    return value


async def test_a_transaction_is_over_with_its_body(redis: Redis) -> None:
    kept: list[Transaction] = []

    async def body(tx: Transaction) -> None:
        kept.append(tx)
        await tx.get("n")
        tx.multi()

    await transaction(redis, body, "n")
    for use in (lambda: kept[0].get("n"), kept[0].multi, lambda: kept[0].set("n", 1)):
        with pytest.raises(TransactionMisuse, match="as long as the body"):
            use()
    with pytest.raises(TransactionMisuse, match="as long as the body"):
        await kept[0].watch("m")
    assert "ended" in repr(kept[0])


async def test_a_bad_value_is_refused_where_it_is_queued(redis: Redis) -> None:
    seen: list[str] = []

    async def body(tx: Transaction) -> None:
        await tx.get("n")
        tx.multi()
        tx.set("n", 1)
        try:
            tx.set("n", None)  # type: ignore[arg-type]
        finally:
            seen.append("there")

    with pytest.raises(DataError):
        await transaction(redis, body, "n")
    assert seen == ["there"]
    assert await redis.get("n") is None


async def test_a_command_that_the_body_leaves_behind_gives_the_connection_back(redis: Redis) -> None:
    left: list[asyncio.Task[Any]] = []

    async def body(tx: Transaction) -> None:
        left.append(asyncio.ensure_future(tx.get("n")))
        await asyncio.sleep(0)
        raise KeyError

    with pytest.raises(KeyError):
        await transaction(redis, body, "n")
    assert in_use(redis) <= 1
    await asyncio.wait(left)
    assert in_use(redis) == 0
    assert await watchers(redis) == 0
    assert (await transaction(redis, increment, "n")).value == 1


def _not_async(tx: Transaction) -> int:
    return 5


CALLS: dict[str, tuple[Callable[[Any], Awaitable[object]], type[Exception], str]] = {
    "no keys": (lambda c: transaction(c, increment), ValueError, "no keys"),
    "an int for a key": (lambda c: transaction(c, increment, 5), TypeError, "a key must be str or bytes"),  # type: ignore[arg-type]
    "an empty key": (lambda c: transaction(c, increment, ""), ValueError, "a key must not be empty"),
    "no attempts": (lambda c: transaction(c, increment, "n", attempts=0), ValueError, "attempts"),
    "half an attempt": (lambda c: transaction(c, increment, "n", attempts=0.5), TypeError, "attempts"),  # type: ignore[arg-type]
    "true attempts": (lambda c: transaction(c, increment, "n", attempts=True), TypeError, "attempts"),
    "a negative deadline": (lambda c: transaction(c, increment, "n", timeout=-1), ValueError, "timeout"),
    "no end": (lambda c: transaction(c, increment, "n", timeout=math.nan), ValueError, "timeout"),
    "text for a deadline": (lambda c: transaction(c, increment, "n", timeout="5"), TypeError, "timeout"),  # type: ignore[arg-type]
    "a number for a backoff": (lambda c: transaction(c, increment, "n", backoff=0.1), TypeError, "backoff"),  # type: ignore[arg-type]
    "idempotent": (lambda c: transaction(c, increment, "n", idempotent=1), TypeError, "idempotent"),  # type: ignore[arg-type]
    "exactly_once": (lambda c: transaction(c, increment, "n", exactly_once=1), TypeError, "exactly_once"),  # type: ignore[arg-type]
    "both": (
        lambda c: transaction(c, increment, "n", idempotent=True, exactly_once=True),
        ValueError,
        "exclude each other",
    ),
    "escalate immediately": (lambda c: transaction(c, increment, "n", escalate_after=0), ValueError, "escalate_after"),
    "not callable": (lambda c: transaction(c, "n", "n"), TypeError, "body"),  # type: ignore[arg-type]
    "not async": (lambda c: transaction(c, _not_async, "n"), TypeError, "coroutine function"),  # type: ignore[arg-type]
    "a sync client": (lambda c: transaction(redis_py.Redis(), increment, "n"), TypeError, "synchronous"),  # type: ignore[arg-type]
    "a pipeline": (lambda c: transaction(c.pipeline(), increment, "n"), TypeError, "expected a redis"),
}


@pytest.mark.real  # counts the commands of the server
@pytest.mark.parametrize("name", CALLS)
async def test_bad_arguments_fail_at_the_call(redis: Redis, name: str) -> None:
    call, error, words = CALLS[name]
    before = (await redis.info("stats"))["total_commands_processed"]
    with pytest.raises(error, match=words):
        await call(redis)
    assert (await redis.info("stats"))["total_commands_processed"] == before + 1


async def test_keys_in_several_slots_of_a_cluster_are_refused() -> None:
    cluster = RedisCluster(host="127.0.0.1", port=1)
    with pytest.raises(ValueError, match=r"'a', 'b' are in several hash slots of the cluster.* common hash tag"):
        await transaction(cluster, increment, "a", "b")
    with pytest.raises(ValueError, match="several hash slots"):
        aiter(watch_retry(cluster, "a", "b"))
    with pytest.raises(ValueError, match="braces"):  # there would be other keys next to it
        await transaction(cluster, increment, "a}{b", escalate_after=1)
    await cluster.aclose()


async def test_bad_decorations_fail_at_decoration(redis: Redis) -> None:
    async def deduct(tx: Transaction, item: int) -> None: ...

    async def nothing() -> None: ...

    with pytest.raises(ValueError, match=r"refers to 'user', which .*deduct\(\) does not take"):
        watch_retry(redis, "stock:{user}")(deduct)
    with pytest.raises(ValueError, match="refers to 'tx', which"):
        watch_retry(redis, "stock:{tx}")(deduct)
    with pytest.raises(TypeError, match="must be str"):
        watch_retry(redis, b"stock")(deduct)
    with pytest.raises(TypeError, match="first one must be the transaction"):
        watch_retry(redis, "stock")(nothing)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="first one must be the transaction"):
        watch_retry(redis, "stock")(_by_name_only)  # type: ignore[arg-type]
    for template in ("stock:{item!z}", "stock:{item:{width}}"):
        with pytest.raises(ValueError):
            watch_retry(redis, template)(deduct)
    with pytest.raises(TypeError, match="not a coroutine function"):
        watch_retry(redis, "stock")(_not_async)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attempts"):
        watch_retry(redis, "stock", attempts=-1)
    with pytest.raises(TypeError, match="missing a required argument"):
        await watch_retry(redis, "stock:{item}")(deduct)()  # type: ignore[call-arg]


async def _by_name_only(*, tx: Transaction) -> None: ...


async def _without_entering(redis: Redis, each: Callable[[Any], Awaitable[object]]) -> None:
    rounds = 0
    async for attempt in watch_retry(redis, "n", attempts=3):
        rounds += 1
        assert rounds == 1
        await each(attempt)


async def _enter_in_vain(attempt: Any) -> None:
    with pytest.raises(TransactionMisuse, match="inside the body of another one"):
        await attempt.__aenter__()


async def _pass(attempt: Any) -> None: ...


async def test_an_attempt_that_was_not_entered_ends_the_loop(redis: Redis) -> None:
    """Nothing would ever count it, nor wait in between: the loop would not end, nor let others run."""
    expected = pytest.raises(TransactionMisuse, match="enter the attempt: `async with attempt as tx`")

    async def outer(tx: Transaction) -> None:
        with expected:
            await _without_entering(redis, _enter_in_vain)
        await increment(tx)

    with expected:
        await _without_entering(redis, _pass)
    await transaction(redis, outer, "n")
    assert await redis.get("n") == b"1"
    assert in_use(redis) == 0


async def _commits(tx: Any) -> None:
    tx.multi()
    tx.set("n", 8)
    await tx.commit()


async def _reads_and_commits(tx: Any) -> None:
    await tx.get("n")
    await _commits(tx)


async def _guarded(lease: Lease) -> None:
    async with lease.transaction() as tx:
        await _commits(tx)


async def test_the_commit_is_not_for_the_body(redis: Redis) -> None:
    """Nor anything else that ends it: what a body sees is what it may call."""
    await redis.set("n", 7)
    async with Coordinator(redis) as sync:
        lease = await sync.lock("lock").acquire()
        for running in (transaction(redis, _reads_and_commits, "n"), _guarded(lease)):
            with pytest.raises(AttributeError, match="no attribute 'commit'"):
                await running
        await redis.set(lease._grant.keys.all[0], "overtaken")
        with pytest.raises(AttributeError, match="no attribute 'commit'"):
            await _guarded(lease)
    assert await redis.get("n") == b"7"
    assert in_use(redis) == 0
    assert await watchers(redis) == 0
    ours = {name for name in vars(Transaction) if not name.startswith("_")}
    asked_by_redis_py = {"execute_command", "get_connection_kwargs", "get_encoder"}
    assert ours == {*asked_by_redis_py, "multi", "unwatch", "watch"}


async def test_the_same_key_twice_is_one_and_any_callable_is_a_body(redis: Redis) -> None:
    async def add(count: int, tx: Transaction) -> int:
        value = int(await tx.get("n") or 0) + count
        tx.multi()
        tx.set("n", value)
        return value

    assert (await transaction(redis, functools.partial(add, 2), "n", b"n")).value == 2
    assert (await transaction(redis, lambda tx: add(3, tx), "n", backoff=Backoff())).value == 5
