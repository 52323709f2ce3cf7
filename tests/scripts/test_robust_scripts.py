"""The scripts of robust locks and of the gate, one by one, on a real server; each is run twice (P4)."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ResponseError

from ..support.inside import gate_keys, load, robust_keys, ticket_member
from ..support.script_mutants import Client
from .permits import inbox

pytestmark = pytest.mark.real

KEYS = robust_keys(b"s")
NAME, RECORD = KEYS.name, KEYS.record
GATE = gate_keys(b"s").all[0]
TTL = 30_000
DAY = 86_400_000
WEEK = 7 * DAY


async def run(redis: Client, script: str, *arguments: bytes | int) -> Any:
    return await redis.eval(load(script).source, 5, *KEYS.all, *arguments)


async def acquire(redis: Client, token: bytes, identity: bool = False) -> bytes:
    """Return the fence."""
    fence = await run(redis, "lock/acquire", token, TTL, b"", 0, 1 if identity else 0)
    assert isinstance(fence, int), fence
    return b"%d" % fence


def writer(fence: bytes, lease: int = 1) -> bytes:
    """What tells a lease of a grant from others of the same identity."""
    return b"%b.%d" % (fence, lease)


async def adopt(redis: Client, token: bytes, fence: bytes, ttl: int = TTL, lease: int = 1) -> list[Any]:
    found = await run(redis, "robust/adopt", token, fence, ttl, writer(fence, lease))
    assert isinstance(found, list)
    return found


async def record(
    redis: Client,
    token: bytes,
    fence: bytes,
    seq: int,
    progress: bytes,
    undo: bytes = b"",
    ttl: int = TTL,
    lease: int = 1,
) -> int:
    written = (seq, progress, undo, writer(fence, lease))
    code, micros = await run(redis, "robust/record", token, fence, ttl, TTL, *written)
    assert micros > 1 << 50
    return int(code)


async def release(redis: Client, token: bytes, fence: bytes = b"*", broken_off: int = 0, lease: int = 1) -> int:
    of = fence if fence in (b"", b"*") else writer(fence, lease)
    return int(await run(redis, "lock/release", token, b"", 0, of, broken_off))


async def adopted(redis: Client, token: bytes, identity: bool = False) -> bytes:
    fence = await acquire(redis, token, identity)
    assert (await adopt(redis, token, fence))[0] == 1
    return fence


async def crash(redis: Client) -> None:
    assert await redis.delete(NAME) == 1


async def fields(redis: Client) -> list[bytes | None]:
    found = await redis.hmget(RECORD, "token", "fence", "progress", "undo")
    assert isinstance(found, list)
    return found


# -- adopt -------------------------------------------------------------------------------------------------


async def test_p4_adopting_twice_finds_the_same_predecessor(redis: Client) -> None:
    fence = await adopted(redis, b"a b|{}")
    await record(redis, b"a b|{}", fence, 1, b"p", b"u")
    at = await redis.hget(RECORD, "at")
    await crash(redis)
    mine = await acquire(redis, b"b")
    for _ in range(2):
        code, micros, before, seq, progress, undo = await adopt(redis, b"b", mine)
        assert (code, before, seq, progress, undo) == (1, b"%b %b a b|{}" % (fence, at), 0, b"p", b"u")
        assert micros >= int(at)
        assert await fields(redis) == [b"b", mine, b"p", b"u"]
    assert int(await redis.hget(RECORD, "at")) > int(at)


@pytest.mark.parametrize(
    ("ttl", "least", "most"),
    [(TTL, WEEK, WEEK + 3_600_000), (10 * DAY, 20 * DAY, WEEK + 20 * DAY), (0, 3650 * DAY, WEEK + 3650 * DAY)],
)
async def test_the_first_adoption_finds_nothing(redis: Client, ttl: int, least: int, most: int) -> None:
    """Its record outlives a long lease."""
    fence = await acquire(redis, b"a")
    for _ in range(2):
        assert (await adopt(redis, b"a", fence, ttl))[2:] == [b"", 0, b"", b""]
    assert least < await redis.pttl(RECORD) <= most


async def test_only_the_holder_adopts(redis: Client) -> None:
    fence = await acquire(redis, b"a")
    assert (await adopt(redis, b"b", fence))[0] == 2
    await crash(redis)
    assert (await adopt(redis, b"a", fence))[0] == 0
    assert not await redis.exists(RECORD)


async def test_p4_a_late_copy_of_an_identity_s_adoption_changes_nothing(redis: Client) -> None:
    first = await adopted(redis, b"w", identity=True)
    await crash(redis)
    second = await adopted(redis, b"w", identity=True)
    assert second > first
    assert (await adopt(redis, b"w", first))[0] == 2
    assert await record(redis, b"w", first, 9, b"late") == 2
    assert await fields(redis) == [b"w", second, None, None]


# -- record and renew --------------------------------------------------------------------------------------


async def test_p4_recording_twice_and_late_copies(redis: Client) -> None:
    fence = await adopted(redis, b"a")
    for _ in range(2):
        assert await record(redis, b"a", fence, 1, b"one", b"u") == 1
        assert await fields(redis) == [b"a", fence, b"one", b"u"]
    assert await record(redis, b"a", fence, 2, b"two") == 1
    assert await record(redis, b"a", fence, 1, b"one", b"u") == 1, "a late copy is told that it was recorded"
    assert await fields(redis) == [b"a", fence, b"two", b""]
    assert (await adopt(redis, b"a", fence))[3] == 2


async def test_p4_of_two_leases_of_an_identity_the_later_one_writes(redis: Client) -> None:
    """It goes on where the earlier one was, whose words change nothing from then on, copies included."""
    fence = await adopted(redis, b"w", identity=True)
    assert await record(redis, b"w", fence, 7, b"first", b"u") == 1
    for _ in range(2):
        assert (await adopt(redis, b"w", fence, lease=2))[2:] == [b"", 7, b"first", b"u"]
    before = await redis.hgetall(RECORD)
    await redis.pexpire(NAME, 5000)
    assert await record(redis, b"w", fence, 8, b"late") == 3
    assert (await adopt(redis, b"w", fence))[0] == 3, "a late copy of the earlier adoption"
    assert await redis.hgetall(RECORD) == before
    assert await redis.pttl(NAME) <= 5000, "what is refused renews nothing"
    assert await record(redis, b"w", fence, 8, b"second", lease=2) == 1
    assert (await fields(redis))[2:] == [b"second", b""]


async def test_p4_an_adoption_that_is_withdrawn_leaves_the_earlier_lease_the_writer(redis: Client) -> None:
    fence = await adopted(redis, b"w", identity=True)
    assert await record(redis, b"w", fence, 7, b"first") == 1
    assert (await adopt(redis, b"w", fence, lease=2))[0] == 1
    for _ in range(2):
        assert (await run(redis, "robust/adopt", b"w", fence, TTL, writer(fence, 2), 1))[0] in (1, 3)
    assert (await adopt(redis, b"w", fence, lease=2))[0] == 3, "a late copy of what was withdrawn"
    assert await record(redis, b"w", fence, 8, b"more") == 1
    assert await redis.hget(RECORD, "progress") == b"more"
    await redis.delete(NAME, RECORD)
    only = await adopted(redis, b"w", identity=True)
    assert (await run(redis, "robust/adopt", b"w", only, TTL, writer(only), 1))[0] == 1
    assert await record(redis, b"w", only, 1, b"p") == 1, "there is none before it"


async def test_many_leases_of_an_identity_do_not_make_the_record_grow(redis: Client) -> None:
    fence = await adopted(redis, b"w", identity=True)
    for number in range(2, 102):
        assert (await adopt(redis, b"w", fence, lease=number))[0] == 1
    writers = (await redis.hget(RECORD, "writers")).split()
    assert len(b" ".join(writers)) < 900
    assert writers[-40:] == [writer(fence, number) for number in range(62, 102)]
    assert (await adopt(redis, b"w", fence, lease=101))[0] == 1
    assert (await adopt(redis, b"w", fence, lease=62))[0] == 3
    assert await record(redis, b"w", fence, 1, b"last", lease=101) == 1


async def test_a_record_that_was_evicted_is_whose_word_comes_first(redis: Client) -> None:
    fence = await adopted(redis, b"w", identity=True)
    await redis.delete(RECORD)
    assert await record(redis, b"w", fence, 1, b"two", lease=2) == 1
    assert await record(redis, b"w", fence, 2, b"one", lease=1) == 3
    assert await redis.hget(RECORD, "progress") == b"two"


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("fence", b"abc"),
        ("fence", b"12"),
        ("fence", b"12345678901234567"),
        ("fence", b"-123456789012345"),
        ("at", b"9" * 30),
        ("at", b"x"),
        ("seq", b"9e99"),
        ("seq", b""),
        ("seq", b"9999999999999999"),
    ],
)
async def test_what_we_did_not_write_is_refused_and_stays(redis: Client, field: str, wrong: bytes) -> None:
    for token in (b"a", b"b"):  # the one whose record it is, and the next one
        fence = await adopted(redis, b"a")
        if token == b"b":
            await crash(redis)
            fence = await acquire(redis, b"b")
        await redis.hset(RECORD, field, wrong)
        found = await redis.hgetall(RECORD)
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await adopt(redis, token, fence)
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await record(redis, token, fence, 1, b"p")
        assert await redis.hgetall(RECORD) == found
        await redis.delete(*KEYS.all)


async def test_numbers_are_compared_as_numbers(redis: Client) -> None:
    fence = await adopted(redis, b"a")
    assert await record(redis, b"a", fence, 9, b"nine") == 1
    assert await record(redis, b"a", fence, 10, b"ten") == 1
    assert await redis.hget(RECORD, "progress") == b"ten"


async def test_recording_is_a_word_of_one_s_own(redis: Client) -> None:
    """From then on who asks again, or breaks off, does not find or put back the predecessor's."""
    await adopted(redis, b"a")
    await crash(redis)
    fence = await adopted(redis, b"b")
    await record(redis, b"b", fence, 1, b"mine")
    assert (await adopt(redis, b"b", fence))[2] == b""
    assert await release(redis, b"b", fence, broken_off=1) == 1
    assert (await fields(redis))[0] == b"b"


async def test_recording_renews_unless_told_otherwise(redis: Client) -> None:
    fence = await adopted(redis, b"a")
    await redis.pexpire(NAME, 5000)
    await redis.pexpire(KEYS.fence, 5000)
    await record(redis, b"a", fence, 1, b"p", ttl=0)
    assert await redis.pttl(NAME) <= 5000
    await redis.pexpire(RECORD, 5000)
    await record(redis, b"a", fence, 2, b"p")
    assert TTL - 1000 < await redis.pttl(NAME) <= TTL
    assert await redis.pttl(KEYS.fence) > 3_000_000
    assert await redis.pttl(RECORD) > WEEK


async def test_only_the_holder_records_and_a_lock_that_is_gone_is_handed_on(redis: Client) -> None:
    fence = await adopted(redis, b"a")
    ticket = ticket_member(b"", 1, TTL, b"next")
    assert await record(redis, b"b", fence, 1, b"p") == 2
    await run(redis, "lock/acquire", b"next", TTL, ticket, 1, 0)
    await crash(redis)
    await redis.delete(KEYS.polls)  # it polls no more
    assert await record(redis, b"a", fence, 1, b"p") == 0
    assert await redis.zcard(KEYS.queue) == 0, "the queue was settled"
    assert await fields(redis) == [b"a", fence, None, None]


async def test_p4_renewing_keeps_the_record(redis: Client) -> None:
    await adopted(redis, b"a")
    for _ in range(2):
        await redis.pexpire(RECORD, 5000)
        assert (await run(redis, "lock/renew", b"a", 5000))[0] == 1
        assert 0 < await redis.pttl(NAME) <= 5000
        assert await redis.pttl(RECORD) > WEEK
    assert (await run(redis, "lock/renew", b"b", 5000))[0] == 2
    await crash(redis)
    assert (await run(redis, "lock/renew", b"a", 5000))[0] == 0
    await acquire(redis, b"b")  # not adopted yet
    await redis.pexpire(RECORD, 5000)
    assert (await run(redis, "lock/renew", b"b", 5000))[0] == 1
    assert await redis.pttl(RECORD) <= 5000, "it is the record of another"


# -- release -----------------------------------------------------------------------------------------------


async def test_p4_releasing_twice(redis: Client) -> None:
    fence = await adopted(redis, b"a")
    await record(redis, b"a", fence, 1, b"p")
    assert await release(redis, b"a", fence) == 1
    assert not await redis.exists(NAME, RECORD)
    other = await adopted(redis, b"b")
    for of in (fence, other, b"*"):
        assert await release(redis, b"a", of) == 2
    assert await fields(redis) == [b"b", other, None, None]
    await crash(redis)
    assert await release(redis, b"b", other) == 0
    assert await redis.exists(RECORD), "its lease ended before: that is no clean release"


async def test_a_grant_that_was_never_adopted_leaves_the_record(redis: Client) -> None:
    fence = await adopted(redis, b"w", identity=True)
    await crash(redis)
    await acquire(redis, b"w", identity=True)
    assert await release(redis, b"w", b"") == 1
    assert await fields(redis) == [b"w", fence, None, None]
    second = await adopted(redis, b"x")
    assert await release(redis, b"x", second, broken_off=1) == 1
    await acquire(redis, b"w", identity=True)  # the record is what was found: put back, and nobody's to write
    assert await release(redis, b"w", b"") == 1
    assert await fields(redis) == [b"w", fence, None, None]


@pytest.mark.parametrize("undo", [b"", b"u", None], ids=["progress", "undo", "nothing"])
async def test_a_release_by_an_earlier_lease_of_the_identity_is_not_clean(redis: Client, undo: bytes | None) -> None:
    """It does not know what the later one recorded, nor whether that is done. An empty record does not stay."""
    fence = await adopted(redis, b"w", identity=True)
    await adopt(redis, b"w", fence, lease=2)
    if undo is not None:
        await record(redis, b"w", fence, 1, b"p", undo, lease=2)
    assert await release(redis, b"w", fence) == 1
    assert not await redis.exists(NAME, *([RECORD] if undo is None else []))
    assert await fields(redis) == ([None] * 4 if undo is None else [b"w", fence, b"p", undo])


@pytest.mark.parametrize("given", ["right", "other", "any"])
async def test_the_record_of_another_fence_stays(redis: Client, given: str) -> None:
    fence = await adopted(redis, b"w", identity=True)
    await record(redis, b"w", fence, 1, b"p")
    said = {"right": fence, "other": b"1234567890123456", "any": b"*"}[given]
    assert await release(redis, b"w", said) == 1
    assert await redis.exists(RECORD) == (given == "other")


async def test_broken_off_before_a_word_of_its_own_puts_back_what_was_found(redis: Client) -> None:
    first = await adopted(redis, b"a")
    await record(redis, b"a", first, 1, b"p", b"u")
    before = await redis.hgetall(RECORD)
    await crash(redis)
    second = await adopted(redis, b"b")
    await redis.pexpire(RECORD, 5000)
    assert await release(redis, b"b", second, broken_off=1) == 1
    assert await redis.hgetall(RECORD) == {**before, b"seq": b"0", b"writers": b""}
    assert await redis.pttl(RECORD) > WEEK - 1000


@pytest.mark.parametrize(
    ("broken_off", "progress", "undo", "stays"),
    [(0, b"p", b"", False), (0, b"p", b"u", True), (1, b"p", b"", True), (1, b"", b"u", True), (1, b"", b"", False)],
)
async def test_what_stays_after_a_release(
    redis: Client, broken_off: int, progress: bytes, undo: bytes, stays: bool
) -> None:
    fence = await adopted(redis, b"a")
    await record(redis, b"a", fence, 1, progress, undo)
    assert await release(redis, b"a", fence, broken_off) == 1
    assert bool(await redis.exists(RECORD)) == stays
    assert not await redis.exists(NAME)


async def test_undo_steps_that_were_found_stay_after_a_clean_release(redis: Client) -> None:
    first = await adopted(redis, b"a")
    await record(redis, b"a", first, 1, b"", b"u")
    await crash(redis)
    second = await adopted(redis, b"b")
    assert await release(redis, b"b", second) == 1
    assert await fields(redis) == [b"a", first, b"", b"u"]


async def test_a_release_hands_on(redis: Client) -> None:
    fence = await adopted(redis, b"a")
    async with inbox(redis):
        await run(redis, "lock/acquire", b"b", TTL, ticket_member(b"rsa:alive", 1, 20_000, b"b"), 0, 0)
        assert await release(redis, b"a", fence) == 1
    assert await redis.get(NAME) == b"b"
    assert not await redis.exists(RECORD)


# -- what is in the way ------------------------------------------------------------------------------------


async def test_a_foreign_key_in_the_way_changes_nothing(redis: Client) -> None:
    fence = await acquire(redis, b"a")
    await redis.set(RECORD, "mine", px=5000)
    await redis.pexpire(NAME, 4000)
    for _ in range(2):
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await adopt(redis, b"a", fence)
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await record(redis, b"a", fence, 1, b"p")
        assert await redis.pttl(NAME) <= 4000
        assert (await run(redis, "lock/renew", b"a", TTL))[0] == 1
        await redis.pexpire(NAME, 4000)
        assert await redis.get(RECORD) == b"mine"
        assert await redis.pttl(RECORD) <= 5000
    assert await release(redis, b"a", fence) == 1
    assert await redis.get(RECORD) == b"mine"


# -- the gate ----------------------------------------------------------------------------------------------


async def gate(redis: Client, fence: bytes, ttl: int = TTL) -> bytes:
    found = await redis.eval(load("fence_gate/accept").source, 1, GATE, fence, ttl)
    assert isinstance(found, bytes)
    return found


async def test_a_gate_lasts_from_the_last_pass_on(redis: Client) -> None:
    fence = b"1000000000000001"
    for ttl in (TTL, 2 * TTL):
        await gate(redis, fence, ttl)
        assert ttl - 1000 < await redis.pttl(GATE) <= ttl
    await gate(redis, b"1000000000000002", TTL)
    assert await redis.pttl(GATE) <= TTL
    await gate(redis, fence, 3 * TTL)
    await gate(redis, b"", 3 * TTL)
    assert await redis.pttl(GATE) <= TTL


@pytest.mark.parametrize("foreign", [b"12", b"12345678901234567", b"123456789012345x", b"-123456789012345"])
async def test_a_gate_refuses_what_is_not_a_fence(redis: Client, foreign: bytes) -> None:
    await redis.set(GATE, foreign)
    for fence in (b"", b"1000000000000001"):
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await gate(redis, fence)
    assert await redis.get(GATE) == foreign
    assert await redis.pttl(GATE) == -1
