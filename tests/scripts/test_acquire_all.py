"""lock/acquire_all.lua on a real server: all or none, twice (P4), and never past those who wait (P2)."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ResponseError

from ..support.inside import LockKeys, joined_keys, load, lock_keys, ticket_member
from ..support.script_mutants import Client

pytestmark = pytest.mark.real

LOCKS = [lock_keys(b"{m}%d" % number) for number in range(3)]
TTL = 30_000
BUSY, OWN, SPENT = 0, 3, 4


async def acquire_all(redis: Client, numbers: bytes = b"1 2 3", ttl: int = TTL) -> Any:
    keys = joined_keys(LOCKS)
    assert keys is not None
    return await redis.eval(load("lock/acquire_all").source, len(keys.all), *keys.all, ttl, b"t", numbers)


async def single(redis: Client, script: str, keys: LockKeys, *arguments: bytes | int) -> Any:
    return await redis.eval(load(script).source, 4, *keys.all, *arguments)


async def acquire(redis: Client, keys: LockKeys, token: bytes, ticket: bytes = b"", poll_ms: int = 0) -> Any:
    return await single(redis, "lock/acquire", keys, token, TTL, ticket, poll_ms, 0)


async def holders(redis: Client) -> list[bytes | None]:
    return [await redis.get(keys.name) for keys in LOCKS]


async def everything(redis: Client) -> dict[bytes, Any]:
    """All that the server knows, but for remaining times."""
    found = {}
    for key in await redis.keys():
        kind = await redis.type(key)
        found[key] = await (redis.get(key) if kind == b"string" else redis.zrange(key, 0, -1, withscores=True))
    return found


def codes(answers: list[Any]) -> list[int]:
    return [answer if isinstance(answer, int) else answer[0] for answer in answers]


async def test_p1_free_locks_are_all_granted(redis: Client) -> None:
    answers = await acquire_all(redis)
    assert all(isinstance(fence, int) for fence in answers)
    assert await holders(redis) == [b"t1", b"t2", b"t3"]
    for keys, fence in zip(LOCKS, answers, strict=True):
        assert 0 < await redis.pttl(keys.name) <= TTL
        assert await redis.get(keys.fence) == b"%d t%d" % (fence, LOCKS.index(keys) + 1)
        assert (await acquire(redis, keys, b"other"))[0] == BUSY


@pytest.mark.parametrize("taken", range(3))
async def test_p1_one_that_is_taken_keeps_the_others_free(redis: Client, taken: int) -> None:
    await acquire(redis, LOCKS[taken], b"other")
    before = await everything(redis)
    for _ in range(2):
        answers = await acquire_all(redis)
        assert codes(answers) == [BUSY] * 3
        assert [answer[2] > 0 for answer in answers] == [number == taken for number in range(3)]
        assert await everything(redis) == before


async def test_p4_twice_answers_the_same_and_changes_nothing(redis: Client) -> None:
    fences = await acquire_all(redis)
    await redis.pexpire(LOCKS[0].name, 5000)
    before = await everything(redis)
    for _ in range(2):
        answers = await acquire_all(redis)
        assert codes(answers) == [OWN] * 3
        assert [answer[1] for answer in answers] == fences
        assert 0 < answers[0][2] <= 5000
        assert await everything(redis) == before


async def test_p4_a_copy_after_the_release_takes_nothing(redis: Client) -> None:
    await acquire_all(redis)
    for number, keys in enumerate(LOCKS, 1):
        assert await single(redis, "lock/release", keys, b"t%d" % number, b"", b"0") == 1
    before = await everything(redis)
    for _ in range(2):
        assert codes(await acquire_all(redis)) == [SPENT] * 3
        assert await everything(redis) == before


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


async def test_p2_a_lock_whose_holder_is_gone_belongs_to_its_next_waiter(redis: Client) -> None:
    """The script settles every name first, and so hands over; then nothing is left for itself."""
    async with redis.pubsub() as pubsub:
        await pubsub.subscribe("rsa:alive")
        assert (await pubsub.get_message(timeout=5))["type"] == "subscribe"
        await acquire(redis, LOCKS[1], b"a")
        await acquire(redis, LOCKS[1], b"b", ticket_member(b"rsa:alive", 1, 20_000, b"b"))
        await redis.delete(LOCKS[1].name)
        assert codes(await acquire_all(redis)) == [BUSY] * 3
        assert await holders(redis) == [None, b"b", None]
        assert (await pubsub.get_message(timeout=5))["data"].split()[0] == b"1"
        assert codes(await acquire_all(redis)) == [BUSY] * 3


async def test_p2_a_lock_that_is_reserved_for_a_polling_waiter_is_not_free(redis: Client) -> None:
    ticket = ticket_member(b"", 1, TTL, b"b")
    await acquire(redis, LOCKS[2], b"a")
    await acquire(redis, LOCKS[2], b"b", ticket, 60_000)
    await redis.delete(LOCKS[2].name)
    for _ in range(2):
        assert codes(await acquire_all(redis)) == [BUSY] * 3
        assert await holders(redis) == [None] * 3
    assert isinstance(await acquire(redis, LOCKS[2], b"b", ticket, 60_000), int)


async def test_p2_a_dead_waiter_is_skipped(redis: Client) -> None:
    await acquire(redis, LOCKS[0], b"a")
    await acquire(redis, LOCKS[0], b"dead", ticket_member(b"rsa:nobody", 1, 20_000, b"dead"))
    await redis.delete(LOCKS[0].name)
    assert all(isinstance(fence, int) for fence in await acquire_all(redis))
    assert not await redis.exists(LOCKS[0].queue)


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
