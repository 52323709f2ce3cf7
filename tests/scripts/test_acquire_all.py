"""lock/acquire_all.lua on a real server: what random histories (tests/simulation) do not show."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ResponseError

from ..support.inside import LockKeys, joined_keys, load, lock_keys
from ..support.script_mutants import Client
from .permits import dump

pytestmark = pytest.mark.real

LOCKS = [lock_keys(b"{m}%d" % number) for number in range(3)]
TTL = 30_000
BUSY, OWN, SPENT = 0, 3, 4


async def acquire_all(redis: Client, numbers: bytes = b"1 2 3", ttl: int = TTL) -> Any:
    keys = joined_keys(LOCKS)
    assert keys is not None
    return await redis.eval(load("lock/acquire_all").source, len(keys.all), *keys.all, ttl, b"t", numbers)


async def acquire(redis: Client, keys: LockKeys, token: bytes) -> Any:
    return await redis.eval(load("lock/acquire").source, 4, *keys.all, token, TTL, b"", 0, 0)


async def holders(redis: Client) -> list[bytes | None]:
    return [await redis.get(keys.name) for keys in LOCKS]


def codes(answers: list[Any]) -> list[int]:
    return [answer if isinstance(answer, int) else answer[0] for answer in answers]


async def test_p4_twice_answers_the_same_and_changes_nothing(redis: Client) -> None:
    fences = await acquire_all(redis)
    await redis.pexpire(LOCKS[0].name, 5000)
    before = await dump(redis)
    for _ in range(2):
        answers = await acquire_all(redis)
        assert codes(answers) == [OWN] * 3
        assert [answer[1] for answer in answers] == fences
        assert 0 < answers[0][2] <= 5000
        assert await dump(redis) == before


async def test_p4_a_copy_after_one_was_lost_does_not_take_it_back(redis: Client) -> None:
    await acquire_all(redis)
    await redis.delete(LOCKS[1].name)
    for _ in range(2):
        assert codes(await acquire_all(redis)) == [OWN, SPENT, OWN]
        assert await holders(redis) == [b"t1", None, b"t3"]
    await acquire(redis, LOCKS[1], b"other")
    for _ in range(2):
        assert codes(await acquire_all(redis)) == [OWN, BUSY, OWN]
        assert await holders(redis) == [b"t1", b"other", b"t3"]


async def test_without_a_ttl_they_last_forever(redis: Client) -> None:
    await acquire_all(redis, ttl=0)
    assert [await redis.pttl(keys.name) for keys in LOCKS] == [-1] * 3
    assert [answer[2] for answer in await acquire_all(redis, ttl=0)] == [-1] * 3


@pytest.mark.parametrize("part", ["name", "queue", "fence"])
@pytest.mark.parametrize("which", range(3))
async def test_a_foreign_key_in_the_way_changes_nothing(redis: Client, which: int, part: str) -> None:
    await redis.hset(getattr(LOCKS[which], part), "a", "b")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await acquire_all(redis)
    assert await redis.exists(*(keys.name for keys in LOCKS)) == (part == "name")


def test_only_locks_of_one_hash_slot_are_joined() -> None:
    assert joined_keys([lock_keys(b"a"), lock_keys(b"b")]) is None
    assert joined_keys([lock_keys(b"a"), lock_keys(b"{a}:1"), lock_keys(b"x{a}")]) is not None
