"""The scripts of locks on a real server: what random histories (tests/simulation) do not show."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
from redis.exceptions import ResponseError

from ..support.inside import FENCE_RANGE, POLLERS_TICKET, load, lock_keys, ticket_member
from ..support.script_mutants import Client
from .permits import A1, ALIVE, AT_A, B3, LIKE_IT, dump, inbox, wanted

pytestmark = pytest.mark.real

KEYS = lock_keys(b"s")
TTL = 30_000


async def run(redis: Client, script: str, *arguments: bytes | int) -> Any:
    return await redis.eval(load(script).source, 4, *KEYS.all, *arguments)


async def acquire(redis: Client, token: bytes, ticket: bytes = b"", poll_ms: int = 0) -> Any:
    return await run(redis, "lock/acquire", token, TTL, ticket, poll_ms, 0)


def polled(token: bytes) -> bytes:
    return ticket_member(b"", 1, TTL, token)


async def holder(redis: Client) -> bytes | None:
    found = await redis.get(KEYS.name)
    assert found is None or isinstance(found, bytes)
    return found


@pytest.mark.parametrize("behind", [False, True], ids=["no queue", "behind a dead waiter"])
async def test_p8_the_fence_that_a_redlock_asks_for(redis: Client, behind: bool) -> None:
    """Granted as it is if it is ahead of the clock and of the last fence, and not more than ten seconds."""

    async def granted(ahead: float) -> tuple[int, int]:
        seconds, micros = await redis.time()
        asked = (seconds * 1_000_000 + micros) + round(ahead * 1_000_000)
        if behind:  # it is dropped, and uses up a fence
            await redis.zadd(KEYS.queue, {ticket_member(b"rsa:gone", 1, TTL, b"gone"): 1})
        token = b"%d" % asked
        fence = await run(redis, "lock/acquire", token, TTL, b"", 0, 0, b"", b"", b"%016d" % asked)
        await run(redis, "lock/release", token, b"")
        return fence, asked

    fence, asked = await granted(9)
    assert fence == asked
    last, asked = await granted(-1)
    assert fence < last <= fence + 2, "the last fence is greater"
    await redis.delete(KEYS.fence)
    for ahead in (-1, 11):
        fence, asked = await granted(ahead)
        assert abs(fence - asked) > 500_000, "the clock counts"


async def test_p2_a_ticket_that_was_passed_over_has_its_place_again(redis: Client) -> None:
    """Its turn came while nobody listened. It is ahead of all that came later, also when the lock is free."""

    async def repeated(former: int) -> Any:
        return await run(redis, "lock/acquire", b"w", TTL, polled(b"w"), 60_000, 0, b"", former)

    await acquire(redis, b"a")
    former = (await acquire(redis, b"w", polled(b"w"), 60_000))[3]
    await run(redis, "lock/release", b"", polled(b"w"), 0)
    assert (await acquire(redis, b"late", polled(b"late"), 60_000))[0] == 2
    for new in (1, 0):
        assert (await repeated(former))[:2] == [2, new]
        assert await redis.zrange(KEYS.queue, 0, -1) == [polled(b"w"), polled(b"late")]
    await run(redis, "lock/release", b"", polled(b"w"), 0)
    assert (await repeated(1 << 52))[:2] == [2, 1], "the clock went back, or it is another server's"
    assert await redis.zrange(KEYS.queue, 0, -1) == [polled(b"late"), polled(b"w")]
    assert await redis.zscore(KEYS.queue, polled(b"w")) < 1 << 52
    await run(redis, "lock/release", b"", polled(b"w"), 0)
    await run(redis, "lock/release", b"a", b"", 0)
    assert isinstance(await repeated(former), int)
    assert await redis.zrange(KEYS.queue, 0, -1) == [polled(b"late")]


@pytest.mark.parametrize("key", [KEYS.queue, KEYS.fence])
async def test_a_foreign_key_in_the_way_changes_nothing(redis: Client, key: bytes) -> None:
    await redis.hset(key, "a", "b")
    with pytest.raises(Exception, match="WRONGTYPE"):
        await acquire(redis, b"a")
    assert await holder(redis) is None


BY: dict[str, tuple[Any, ...]] = {
    "who begins to poll": ("lock/acquire", b"d", TTL, polled(b"d"), 5000, 0),
    "who polls again": ("lock/acquire", b"b", TTL, polled(b"b"), 5000, 0),
    "who goes": ("lock/release", b"", ticket_member(b"rsa:x", 2, TTL, b"c")),
    "who releases": ("lock/release", b"a", b""),
    "force": ("lock/force_release",),
}


@pytest.mark.parametrize("by", BY)
async def test_a_foreign_key_in_place_of_polls_changes_nothing(redis: Client, by: str) -> None:
    """No script stops half-way: out of the queue, or in it, and no more than that."""
    await acquire(redis, b"a")
    await acquire(redis, b"b", polled(b"b"), 5000)
    await acquire(redis, b"c", ticket_member(b"rsa:x", 2, TTL, b"c"))
    if by == "who polls again":
        await redis.delete(KEYS.name)
    await redis.set(KEYS.polls, "foreign")
    before = await dump(redis)
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await run(redis, *BY[by])
    assert await dump(redis) == before


def test_every_script_has_a_header_and_fits_a_screen() -> None:
    """Each subject has a folder; parts of scripts are in include/, where a part may be longer."""
    folders = [entry for entry in files("redis_sync_aio._scripts").iterdir() if entry.is_dir()]
    subjects = {folder.name: folder for folder in folders if folder.name not in ("include", "__pycache__")}
    assert sorted(subjects) == ["barrier", "fence_gate", "link", "lock", "permits", "robust"]
    for folder in subjects.values():
        for path in folder.iterdir():
            text = path.read_text("utf-8")
            assert len(text.splitlines()) <= 40, path.name
            for part in ("-- KEYS ", "-- REPLY ", "-- REPLAY ", "-- COST "):
                assert part in text, (path.name, part)


# -- left free for clients that poll -------------------------------------------------------------------------

OPEN = POLLERS_TICKET


async def busy(redis: Client, since_ms: int) -> None:
    """The lock is held by ``a``, waited for, and handed over without a break since so many milliseconds ago."""
    await redis.flushdb()
    await acquire(redis, b"a")
    await acquire(redis, b"b", ticket_member(b"rsa:alive", 1, 20_000, b"b"))
    seconds, micros = await redis.time()
    await redis.zadd(KEYS.polls, {OPEN: seconds * 1000 + micros // 1000 - since_ms})


async def test_p3_waiters_hear_until_when_a_busy_lock_is_left_free(redis: Client) -> None:
    async with inbox(redis, ALIVE) as told:
        await busy(redis, 5000)
        assert await run(redis, "lock/release", b"a", b"", 0, 150) == 1
        assert await holder(redis) is None
        ((number, fence, _, ms, *_),) = await told()
        assert (number, fence, ms) == (b"1", b"0", b"150")


async def test_a_foreign_key_in_place_of_polls_does_not_keep_a_lock(redis: Client) -> None:
    await busy(redis, 5000)
    await redis.set(KEYS.polls, "foreign")
    assert await run(redis, "lock/release", b"a", b"", 0, 150) == 1
    assert (await holder(redis), await redis.get(KEYS.polls)) == (None, b"foreign")


async def test_p8_a_fence_ahead_of_the_clock_is_remembered_until_the_clock_has_caught_up(redis: Client) -> None:
    """The clock went back by two hours; when it goes ahead again the fence must not be gone. Renewals keep it, too."""
    hour = 3_600_000
    seconds, micros = await redis.time()
    last = (seconds + 7200) * 1_000_000 + micros
    await redis.set(KEYS.fence, f"{last} z", px=hour)
    assert await acquire(redis, b"a") == last + 1
    assert 2.9 * hour < await redis.pttl(KEYS.fence) < 3.1 * hour
    assert (await run(redis, "lock/renew", b"a", 5000))[0] == 1
    assert await redis.pttl(KEYS.fence) > 2.9 * hour


async def test_p3_a_shorter_lease_is_told_to_the_first_waiter_that_listens(redis: Client) -> None:
    """Also when the first in the queue is dead, and when the lease had no end; a longer one is told to nobody."""
    async with inbox(redis) as told:
        await acquire(redis, b"a")
        for number, where in enumerate((b"rsa:dead", ALIVE, ALIVE)):
            await acquire(redis, b"w%d" % number, ticket_member(where, number, 20_000, b"w%d" % number))
        assert (await run(redis, "lock/renew", b"a", 2 * TTL))[0] == 1
        assert (await run(redis, "lock/renew", b"a", 7000))[0] == 1
        await redis.persist(KEYS.name)
        assert (await run(redis, "lock/renew", b"a", 9000))[0] == 1
        assert [(*it[:2], *it[3:]) for it in await told()] == [(b"1", b"0", b"7000"), (b"1", b"0", b"9000")]


async def test_a_clock_that_went_back_begins_again(redis: Client) -> None:
    await busy(redis, -1_000_000)
    await run(redis, "lock/release", b"a", b"", 0, 150)
    seconds, _ = await redis.time()
    assert await redis.zscore(KEYS.polls, OPEN) < (seconds + 2) * 1000
    assert 0 < await redis.pttl(KEYS.polls) <= 600_000


# -- of processes that share them --------------------------------------------------------------------------


async def last_fence(redis: Client) -> int:
    return int((await redis.get(KEYS.fence)).split()[0])


async def test_p8_a_holder_that_does_not_share_gets_one_fence(redis: Client) -> None:
    for token in LIKE_IT:
        await redis.flushall()
        assert await acquire(redis, token) == await last_fence(redis), token


async def test_a_holder_that_takes_its_turn_itself_is_notified_of_those_behind(redis: Client) -> None:
    async with inbox(redis, AT_A) as told:
        for others in (True, False):
            await redis.flushall()
            ticket = ticket_member(AT_A, 1, 20_000, A1)
            await acquire(redis, b"x")
            await acquire(redis, A1, ticket)
            if others:
                await acquire(redis, b"w", polled(b"w"), 60_000)
            await redis.delete(KEYS.name)
            assert isinstance(await acquire(redis, A1, ticket), int)
            assert await holder(redis) == A1
            assert wanted(await told()) == ([b"1"] if others else [])


async def test_p8_a_renewal_reserves_more_fences_and_says_whether_anybody_waits(redis: Client) -> None:
    async with inbox(redis, AT_A):
        first = await acquire(redis, A1)
        last = first + FENCE_RANGE - 1
        assert (await run(redis, "lock/renew", A1, TTL, 0))[::2] == [1, 0]
        assert await last_fence(redis) == last
        for number in (1, 5000):
            code, _, more, waiting = await run(redis, "lock/renew", A1, TTL, number)
            assert (code, waiting) == (1, 0)
            assert more > last
            last = more + number - 1
            assert await redis.get(KEYS.fence) == b"%d %b" % (last, A1)
        await acquire(redis, b"w", ticket_member(ALIVE, 1, 20_000, b"w"))
        assert (await run(redis, "lock/renew", A1, TTL, 0))[2:] == [0, 1]
        assert (await run(redis, "lock/renew", A1, TTL, 3))[3] == 1
        assert len(await run(redis, "lock/renew", A1, TTL)) == 2, "who does not share does not ask"
        last = await last_fence(redis)
        assert (await run(redis, "lock/renew", B3, TTL, 3))[0] == 2
        assert await last_fence(redis) == last, "none for who does not hold it"
        await run(redis, "lock/force_release")
        last = await last_fence(redis)
        assert (await run(redis, "lock/renew", A1, TTL, 3))[0] == 0
        assert await last_fence(redis) == last
