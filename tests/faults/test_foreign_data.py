"""D15: data of another program under a key of ours. Each reader says which key, and leaves what is there alone.

Wrong types are in `primitives/test_inputs`; records and gates in `conformance/test_robust`, `test_fencegate`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from redis_sync_aio import AsyncRobustLock, Coordinator, compat
from redis_sync_aio.errors import WrongKeyType
from redis_sync_aio.inspection import inspect

Use = Callable[[Any], Awaitable[object]]
Make = Callable[[Coordinator, Any], Any]

PRIMITIVES: Mapping[str, tuple[Make, str, tuple[Use, ...]]] = {
    "semaphore": (
        lambda sync, engine: sync.semaphore("n", limit=3, engine=engine),
        "{n}:sem:state",
        (lambda it: it.acquire(timeout=5), lambda it: it.resize(4), lambda it: it.statistics()),
    ),
    "read/write lock": (
        lambda sync, _: sync.read_write_lock("n"),
        "{n}:rw:state",
        (lambda it: it.read().acquire(timeout=5), lambda it: it.write().acquire(timeout=5)),
    ),
    "event": (
        lambda sync, _: sync.event("n"),
        "{n}:event:state",
        (lambda it: it.wait(timeout=5), lambda it: it.set(), lambda it: it.clear(), lambda it: it.is_set()),
    ),
    "latch": (
        lambda sync, _: sync.latch("n", 2),
        "{n}:latch:state",
        (lambda it: it.wait(timeout=5), lambda it: it.count_down()),
    ),
    "barrier": (
        lambda sync, _: sync.barrier("n", 2),
        "{n}:barrier:state",
        (lambda it: it.wait(timeout=5), lambda it: it.reset(), lambda it: it.abort()),
    ),
}
FIELDS: Mapping[str, Mapping[str, str]] = {
    "other fields": {"name": "Ada", "age": "36"},
    "words": {"limit": "many", "used": "few", "fence": "high", "kept": "long"},
    "fractions": {"limit": "2.5", "used": "0", "fence": "0", "kept": "0"},
    "no number": {"limit": "nan", "used": "0", "fence": "0", "kept": "0"},
    "a number beyond all fences": {"limit": "3", "used": "0", "fence": "1" + "0" * 20, "kept": "0"},
}


@pytest.mark.parametrize("engine", ["lua", "watch"])
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("kind", PRIMITIVES)
async def test_a_hash_of_another_program_is_no_state(
    redis: Redis, kind: str, fields: Mapping[str, str], engine: str
) -> None:
    make, key, uses = PRIMITIVES[kind]
    async with Coordinator(redis) as sync:
        for use in uses:
            await redis.hset(key, mapping=dict(fields))  # type: ignore[arg-type]
            with pytest.raises(WrongKeyType, match=re.escape(key)):
                await use(make(sync, engine))
            assert await redis.hgetall(key) == {name.encode(): value.encode() for name, value in fields.items()}
            assert await redis.keys() == [key.encode()], "nothing was written anywhere"
    if "limit" in fields:
        (view,) = await inspect(redis)
        assert [(one.code, key in one.meaning) for one in view.problems] == [("wrong_type", True)]


@pytest.mark.parametrize("engine", ["lua", "watch"])
@pytest.mark.parametrize("text", ["my data", "12", "", "0000000000000001x", "~"])
async def test_a_text_of_another_program_is_no_fence(redis: Redis, text: str, engine: Any) -> None:
    """Neither lost nor taken for the last fence by an acquire, by one that has to wait, or by a look."""
    key = "{n}:fence"
    async with Coordinator(redis) as sync:
        lock = sync.lock("n", engine=engine)
        for holder in (None, "another client"):
            await redis.set(key, text)
            if holder is not None:
                await redis.set("n", holder, px=60_000)
            for use in (lambda: lock.acquire(timeout=5), lock.try_acquire, lock.statistics):
                with pytest.raises(WrongKeyType, match=re.escape(key)):
                    await use()
                assert await redis.get(key) == text.encode()
                assert await redis.exists("n") == (holder is not None)
    (view,) = await inspect(redis, "n")
    assert ("wrong_type", True) in [(one.code, key in one.meaning) for one in view.problems]


async def test_a_text_in_place_of_the_fence_of_a_held_lock_is_told_to_the_next(sync: Coordinator, redis: Redis) -> None:
    lock = sync.lock("n")
    lease = await lock.acquire()
    await redis.set("{n}:fence", "my data")
    with pytest.raises(WrongKeyType, match="fence"):
        await sync.lock("n").acquire(timeout=5, identity="another")
    await lease.release()
    assert await redis.get("{n}:fence") == b"my data"
    assert not await redis.exists("n")


@pytest.mark.parametrize("engine", ["lua", "watch"])
async def test_a_field_that_is_no_permit_is_none(redis: Redis, engine: Any) -> None:
    """Of a token that another program gave a field: it holds nothing, and so it gets a permit."""
    async with Coordinator(redis) as sync:
        semaphore = sync.semaphore("n", limit=3, engine=engine)
        kept = await semaphore.acquire()
        await redis.hset("{n}:sem:state", "=mine", "data")
        await redis.zadd("{n}:sem", {"mine": 9e15})
        lease = await semaphore.acquire(timeout=5, identity="mine")
        await lease.release()
        await kept.release()


async def test_a_hash_of_another_program_is_no_record(sync: Coordinator, redis: Redis) -> None:
    """It has none of the fields of a record: nothing is written between what it has."""
    await redis.hset("{n}:record", mapping={"name": "Ada"})
    with pytest.raises(WrongKeyType, match=re.escape("{n}:record")):
        await AsyncRobustLock(sync, "n").acquire(timeout=5)
    assert await redis.hgetall("{n}:record") == {b"name": b"Ada"}


async def test_compat_raises_the_error_of_redis_py(redis: Redis) -> None:
    await redis.set("{n}:fence", "my data")
    with pytest.raises(ResponseError, match=re.escape("{n}:fence")):
        await compat.Lock(redis, "n").acquire(blocking_timeout=5)
    assert await redis.get("{n}:fence") == b"my data"
