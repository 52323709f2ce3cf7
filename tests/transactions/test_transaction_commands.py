"""Transactions: which commands read, which may be queued, and what EXEC answers to them."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, Conflict, transaction
from redis_sync_aio.errors import TransactionMisuse
from redis_sync_aio.types import Transaction

from ..conftest import MakeClient
from ..support.inside import now
from ..support.transactions import in_use, watchers

READS: dict[str, Any] = {
    "sort_ro": lambda tx: tx.sort_ro("list"),
    "sort": lambda tx: tx.sort("list", by="weight_*", get=["#"], desc=True, alpha=True, start=0, num=2),
    "georadius": lambda tx: tx.georadius("places", 0, 0, 1, unit="m"),
    "georadiusbymember": lambda tx: tx.georadiusbymember("places", "here", 1, unit="m"),
    "bitfield get": lambda tx: tx.bitfield("bits").get("u8", 0).execute(),
    "getex": lambda tx: tx.getex("text"),
    "config_get": lambda tx: tx.config_get("maxmemory"),
    "pubsub_numsub": lambda tx: tx.pubsub_numsub("channel"),
    "pubsub_channels": lambda tx: tx.pubsub_channels(),
    "pubsub_numpat": lambda tx: tx.pubsub_numpat(),
    "pubsub_shardnumsub": lambda tx: tx.pubsub_shardnumsub("channel"),
    "slowlog_len": lambda tx: tx.slowlog_len(),
    "slowlog_get": lambda tx: tx.slowlog_get(),
    "latency_latest": lambda tx: tx.latency_latest(),
    "module_list": lambda tx: tx.module_list(),
    "acl_users": lambda tx: tx.acl_users(),
    "acl_getuser": lambda tx: tx.acl_getuser("default"),
    "acl_log": lambda tx: tx.acl_log(1),
    "client_id": lambda tx: tx.client_id(),
    "client_getname": lambda tx: tx.client_getname(),
    "client_list": lambda tx: tx.client_list(),
    "in small letters": lambda tx: tx.execute_command("config get", b"maxmemory"),
    "in two words": lambda tx: tx.execute_command("Config", b"get", "maxmemory"),
    "script exists": lambda tx: tx.execute_command("SCRIPT EXISTS", "ab"),
    "script exists in two words": lambda tx: tx.execute_command("SCRIPT", "EXISTS", "ab"),
    "touch": lambda tx: tx.touch("text"),
}
WRITES: dict[str, Any] = {
    "sort": lambda tx: tx.sort("list", store="n"),
    "sort in small letters": lambda tx: tx.execute_command("SORT", "list", b"store", "n"),
    "georadius": lambda tx: tx.georadius("places", 0, 0, 1, unit="m", store="n"),
    "georadiusbymember": lambda tx: tx.georadiusbymember("places", "here", 1, unit="m", store_dist="n"),
    "bitfield": lambda tx: tx.bitfield("n").get("u8", 0).set("u8", 0, 1).execute(),
    "bitfield incrby": lambda tx: tx.bitfield("n").incrby("u8", 0, 1).execute(),
    "getex": lambda tx: tx.getex("text", ex=1),
    "config_set": lambda tx: tx.config_set("maxmemory", 0),
    "acl_log_reset": lambda tx: tx.acl_log_reset(),
    "slowlog_reset": lambda tx: tx.slowlog_reset(),
    "function_kill": lambda tx: tx.function_kill(),
    "function flush": lambda tx: tx.execute_command("FUNCTION", "FLUSH"),
    "set": lambda tx: tx.set("n", "1"),
    "set in small letters": lambda tx: tx.execute_command(b"set", "n", "1"),
    "xgroup create": lambda tx: tx.execute_command("XGROUP", "CREATE", "n", "group", "$", "MKSTREAM"),
    "xgroup create in one word": lambda tx: tx.execute_command("XGROUP CREATE", "n", "group", "$", "MKSTREAM"),
    "script flush": lambda tx: tx.execute_command("SCRIPT FLUSH"),
    "script load": lambda tx: tx.execute_command("SCRIPT", "LOAD", "return 1"),
    "publish": lambda tx: tx.publish("channel", "message"),
    "eval": lambda tx: tx.eval("return redis.call('SET', KEYS[1], 1)", 1, "n"),
}


async def filled(redis: Redis) -> None:
    await redis.rpush("list", "3", "1", "2")
    await redis.geoadd("places", (0, 0, "here"))
    await redis.set("text", "x")


@pytest.mark.parametrize("name", READS)
async def test_what_only_reads_may_be_read_before_multi(redis: Redis, name: str) -> None:
    """Whatever the server calls it, and however its words come: the reply is the one that the client gets."""
    await filled(redis)

    async def body(tx: Transaction) -> Any:
        found = await READS[name](tx)
        tx.multi()
        tx.set("n", 1)
        return found

    done = await transaction(redis, body, "list", "places", "text", "bits")
    assert (done.attempts, await redis.get("n")) == (1, b"1")
    if not name.startswith(("client", "slowlog", "acl_log")):
        assert done.value == await READS[name](redis)


@pytest.mark.parametrize("name", WRITES)
async def test_what_writes_with_some_options_is_refused_before_multi(redis: Redis, name: str) -> None:
    await filled(redis)

    async def body(tx: Transaction) -> None:
        await WRITES[name](tx)

    with pytest.raises(TransactionMisuse, match="before multi"):
        await transaction(redis, body, "list")
    assert not await redis.exists("n")
    assert await redis.pttl("text") == -1


async def test_pfcount_is_no_conflict_with_itself(redis: Redis) -> None:
    """Redis stores the count in the key when it has computed it: our own change, and nobody else's."""
    await redis.pfadd("visitors", *map(str, range(1000)))

    async def body(tx: Transaction) -> int:
        await tx.watch()
        count = int(await tx.pfcount("visitors"))
        tx.multi()
        tx.set("count", count)
        return count

    done = await transaction(redis, body, "visitors", attempts=1)
    assert (done.value, done.conflicts) == (await redis.pfcount("visitors"), 0)
    async with AsyncLock(redis, "guard") as lease:
        await redis.pfadd("visitors", "one more")
        async with lease.transaction() as tx:
            await tx.watch("visitors")
            count = await tx.pfcount("visitors")
            tx.multi()
        assert count == await redis.pfcount("visitors")


class Word(str, Enum):  # noqa: UP042  # whose `str` is another word
    EXEC = "EXEC"


@pytest.mark.parametrize(
    "words",
    [
        *(("\tEXEC",), ("EXEC\n",), (" exec",), (b"\x0bEXEC",), (b"EXEC\x0c",), (bytearray(b"EXEC"),)),
        *((memoryview(b"exec"),), (Word.EXEC,), ("\tDISCARD",), ("\tUNWATCH",), ("\tSELECT", 1), ("\r\nBLPOP", "n", 0)),
        *(("\t", "EXEC"), ("", "EXEC"), (5,), (None,)),
    ],
    ids=lambda words: "" if isinstance(words[0], memoryview) else repr(words),
)
@pytest.mark.parametrize("late", [False, True])
async def test_no_spelling_hides_a_command(redis: Redis, words: tuple[Any, ...], late: bool) -> None:
    """What is looked at is what is sent."""

    async def body(tx: Transaction) -> None:
        await tx.get("n")
        if late:
            tx.multi()
            tx.set("n", 1)
        await tx.execute_command(*words)

    with pytest.raises(TransactionMisuse):
        await transaction(redis, body, "n")
    assert await redis.get("n") is None
    assert in_use(redis) == 0
    assert await watchers(redis) == 0


# -- reads that are queued -----------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode", [False, True])
async def test_what_is_read_after_multi_is_answered_by_exec(
    make_client: MakeClient, protocol: int, decode: bool
) -> None:
    """The classics: take all of a list and delete it; count, and set a time to live; keep what is deleted."""
    redis: Any = make_client(protocol=protocol, decode_responses=decode)
    await redis.flushall()
    await redis.rpush("inbox", "a", "b")
    await redis.hset("h", mapping={"f": "1"})
    dump = await redis.dump("h")

    async def body(tx: Transaction) -> None:
        await tx.watch()
        tx.multi()
        tx.lrange("inbox", 0, -1)
        tx.delete("inbox")
        tx.incr("visits")
        tx.ttl("visits")
        tx.hgetall("h")
        tx.dump("h")
        tx.delete("h")

    done = await transaction(redis, body, "inbox")
    a, b, f, one = ("a", "b", "f", "1") if decode else (b"a", b"b", b"f", b"1")
    assert done.replies == ([a, b], 1, 1, -1, {f: one}, dump, 1)
    assert not await redis.exists("inbox", "h")


async def test_a_use_of_a_reply_before_exec_is_refused(redis: Redis) -> None:
    """Nothing that looks like an answer may decide about what is written."""
    uses: list[Any] = [
        bool,
        int,
        float,
        str,
        bytes,
        len,
        list,
        lambda it: it == b"1",
        lambda it: it != b"1",
        lambda it: it < 1,
        lambda it: it[0],
        lambda it: b"1" in it,
        lambda it: f"{it}",
    ]

    async def body(tx: Transaction) -> None:
        await tx.get("n")
        tx.multi()
        queued: Any = tx.incr("n")
        assert await queued is queued  # redis-py's types ask for an `await`
        assert "INCR" in repr(queued)
        for use in uses:
            with pytest.raises(TransactionMisuse, match="reply to INCRBY is not known before EXEC"):
                use(queued)
        with pytest.raises(TransactionMisuse, match=r"GET was awaited after multi\(\)"):
            await tx.get("n")

    assert (await transaction(redis, body, "n")).replies == (1, b"1")


# -- many keys -----------------------------------------------------------------------------------------------


async def test_many_keys_are_watched_in_linear_time_and_listed_in_part(redis: Redis) -> None:
    """Each key was compared with all before it: seconds in which nothing else ran. And a message had all of them."""
    names = [f"key:{number}" for number in range(40_000)]

    async def body(tx: Transaction) -> None:
        began = now()
        await tx.watch(*names, *names)
        assert now() - began < 4
        await redis.incr("key:7")
        tx.multi()

    async with AsyncLock(redis, "guard") as lease:
        with pytest.raises(Conflict, match=r"'key:0', 'key:1', .*'key:9' and 39,990 more, or 'guard'") as guarded:
            async with lease.transaction() as tx:
                await body(tx)
    with pytest.raises(Conflict, match=r"'key:0', 'key:1', .*'key:9' and 39,990 more during 1 of 1") as caught:
        await transaction(redis, body, *names, attempts=1)
    for error in (guarded.value, caught.value):
        assert len(error.keys) == 40_000
        assert len(str(error)) < 1000
