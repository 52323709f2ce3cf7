"""Permits of processes that share them among their tasks: ranges of fences, and word that somebody waits.

Such a process says so by its token, which ends as ``:<hex of its inbox>:<number>~``.
"""

from __future__ import annotations

from typing import Any

import pytest

from ..support.inside import FENCE_RANGE, MAX_NOTIFIED, WRITER_WEIGHT
from .permits import (
    ALIVE,
    BUSY,
    OTHER,
    OWN,
    PERMITS,
    QUEUE,
    QUEUED,
    STATE,
    TTL,
    Client,
    ask,
    check_kept,
    expire,
    granted,
    holders,
    inbox,
    release,
    run,
    waits,
)

pytestmark = pytest.mark.real

A1, A2, B3 = b"host:1:a:1~", b"host:1:a:2~", b"host:2:b:3~"
AT_A, AT_B = b"rsa:a", b"rsa:b"
LIKE_IT = (b"t~", b"host:a:1", b"host:x:1~", b"host:a:1~ ", b"a:1~", b"host:a:~", b"host::1~", b"~")


async def state(redis: Client, field: bytes) -> Any:
    return await redis.hget(STATE, field)


async def last_fence(redis: Client) -> int:
    return int(await state(redis, b"fence"))


async def renew(redis: Client, token: bytes, *more: int, ttl: int = TTL) -> list[int]:
    """Return all of the reply but the server's time."""
    code, _, *rest = await run(redis, "permits/renew", token, ttl, 1, *more)
    return [code, *rest]


def wanted(messages: list[tuple[bytes, ...]]) -> list[bytes]:
    """Return the numbers in the messages, which have to say that somebody waits, and nothing else."""
    for _, fence, time, duration in messages:
        assert (fence, len(time), duration) == (b"-2", 16, b"0")
    return [message[0] for message in messages]


# -- fences ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "weight"), [(3, 1), (3, 2), (WRITER_WEIGHT, WRITER_WEIGHT)], ids=["permit", "permits", "writer"]
)
async def test_p8_the_first_of_a_range_is_answered_and_the_last_is_stored(
    redis: Client, limit: int, weight: int
) -> None:
    first = await granted(redis, A1, weight=weight, limit=limit)
    assert await last_fence(redis) == first + FENCE_RANGE - 1
    assert (await state(redis, b"=" + A1)).split()[:2] == [b"%d" % weight, b"%d" % first]
    for _ in range(2):
        assert (await ask(redis, A1, weight=weight, limit=limit))[:2] == [OWN, first]
    await release(redis, A1)
    assert await granted(redis, b"other", weight=weight, limit=limit) >= first + FENCE_RANGE
    assert await last_fence(redis) >= first + FENCE_RANGE


@pytest.mark.parametrize("token", LIKE_IT)
async def test_p8_a_holder_that_does_not_share_gets_one_fence(redis: Client, token: bytes) -> None:
    fence = await granted(redis, token)
    assert await last_fence(redis) == fence
    assert await state(redis, b"shared") is None


async def test_p8_ranges_follow_each_other_although_the_clock_stands_still(redis: Client) -> None:
    await granted(redis, b"z", limit=9)
    await redis.hset(STATE, "fence", 1 << 52)
    found = [await granted(redis, token, limit=9) for token in (A1, b"t", A2, B3)]
    first = (1 << 52) + 1
    assert found == [first, first + FENCE_RANGE, first + FENCE_RANGE + 1, first + 2 * FENCE_RANGE + 1]
    assert await last_fence(redis) == first + 3 * FENCE_RANGE


async def test_p8_readers_have_no_range_but_the_last_of_the_writer(redis: Client) -> None:
    first = await granted(redis, A1, limit=WRITER_WEIGHT)
    assert await last_fence(redis) == first, "the very first reader"
    assert await granted(redis, B3, limit=WRITER_WEIGHT) == first
    assert await state(redis, b"shared") == b"1", "readers are told that somebody waits, too"
    for token in (A1, B3):
        await release(redis, token)
    writes = await granted(redis, A1, weight=WRITER_WEIGHT, limit=WRITER_WEIGHT)
    await release(redis, A1)
    assert await granted(redis, b"r", limit=WRITER_WEIGHT) == writes + FENCE_RANGE - 1
    assert await granted(redis, B3, limit=WRITER_WEIGHT) == writes + FENCE_RANGE - 1


async def test_p8_a_pushed_grant_has_the_first_of_a_range(redis: Client) -> None:
    async with inbox(redis, AT_A) as told:
        await granted(redis, b"x", weight=2)
        await waits(redis, A1, AT_A)
        await release(redis, b"x")
        ((_, fence, *_),) = await told()
        assert await state(redis, b"=" + A1) == b"1 " + fence
        assert await last_fence(redis) == int(fence) + FENCE_RANGE - 1
        assert await state(redis, b"shared") == b"1"


# -- somebody waits ----------------------------------------------------------------------------------------


async def test_each_process_is_told_once_that_somebody_waits(redis: Client) -> None:
    """By the number of the permit that ends first; also when a ticket is repeated; not for a request that goes away."""
    async with inbox(redis, AT_A, AT_B) as told:
        await granted(redis, b"t", limit=4)
        await ask(redis, A2, limit=4, ttl=2 * TTL)
        await ask(redis, A1, limit=4, ttl=3 * TTL)
        await ask(redis, B3, limit=4, ttl=4 * TTL)
        assert await told() == []
        assert (await ask(redis, b"away", limit=4))[0] == BUSY
        assert await told() == []
        ticket = await waits(redis, b"w", limit=4)
        assert wanted(await told()) == [b"2", b"3"]
        await waits(redis, b"v", b"", limit=4)
        assert (await ask(redis, b"w", ticket, limit=4))[0] == QUEUED
        assert wanted(await told()) == [b"2", b"3", b"2", b"3"]
        await release(redis, A2)
        await told()
        await waits(redis, b"u", limit=4)
        assert wanted(await told()) == [b"1", b"3"]


async def test_readers_and_writers_that_share_are_told_that_somebody_waits(redis: Client) -> None:
    async with inbox(redis, AT_A, AT_B) as told:
        for token in (A1, B3):
            await granted(redis, token, limit=WRITER_WEIGHT)
        await waits(redis, b"w", weight=WRITER_WEIGHT, limit=WRITER_WEIGHT)
        assert sorted(wanted(await told())) == [b"1", b"3"]
        await redis.flushall()
        await granted(redis, A1, weight=WRITER_WEIGHT, limit=WRITER_WEIGHT)
        await waits(redis, b"r", limit=WRITER_WEIGHT)
        assert wanted(await told()) == [b"1"]


async def test_an_undone_request_is_not_notified_and_hides_no_other(redis: Client) -> None:
    async with inbox(redis, AT_A, AT_B) as told:
        await release(redis, A1, pending=True)
        await release(redis, B3, pending=True)
        await ask(redis, A2, weight=2, ttl=100 * TTL)
        await waits(redis, b"w")
        assert wanted(await told()) == [b"2"]


async def test_a_permit_that_is_over_is_nobodys(redis: Client) -> None:
    async with inbox(redis, AT_A, AT_B) as told:
        await granted(redis, A1, weight=2)
        await expire(redis, A1)
        await granted(redis, b"x", weight=2)
        await waits(redis, b"w")
        assert await told() == []


async def test_a_holder_that_the_same_request_made_is_notified_as_well(redis: Client) -> None:
    """A request that settles the queue first, and then has to wait for that."""
    async with inbox(redis, AT_A) as told:
        await granted(redis, b"x", weight=2)
        await waits(redis, A1, AT_A, weight=2)
        await expire(redis, b"x")
        await waits(redis, b"w")
        grant, *rest = await told()
        assert int(grant[1]) > 0
        assert wanted(rest) == [b"1"]


async def test_p9_only_those_whose_permits_end_first_are_told(redis: Client) -> None:
    limit = MAX_NOTIFIED + 2
    async with inbox(redis, AT_A, AT_B) as told:
        for number in range(MAX_NOTIFIED - 1):
            await granted(redis, b"t%d" % number, limit=limit)
        await ask(redis, A1, limit=limit, ttl=2 * TTL)
        await ask(redis, B3, weight=2, limit=limit, ttl=3 * TTL)
        await waits(redis, b"w", limit=limit)
        assert wanted(await told()) == [b"1"]


async def test_p9_without_sharing_no_holder_that_shares_is_looked_for(redis: Client) -> None:
    """Not even those that hold are read; and once is forever, as long as the state is kept."""
    async with inbox(redis, AT_A, AT_B) as told:
        await granted(redis, b"x", weight=2)
        await redis.zadd(PERMITS, {A1: 1 << 52})  # who is not supposed to be there
        await waits(redis, b"w")
        assert await told() == []
        await redis.flushall()
        await granted(redis, B3)
        await release(redis, B3)
        assert await state(redis, b"shared") == b"1"


async def test_what_was_lost_is_not_shared_any_more_until_it_is_again(redis: Client) -> None:
    async with inbox(redis, AT_A, AT_B) as told:
        await granted(redis, A1, weight=2)
        await redis.delete(PERMITS)
        await granted(redis, b"x", weight=2)
        assert await state(redis, b"shared") is None
        await redis.delete(PERMITS)
        await granted(redis, A1, weight=2)
        await redis.delete(PERMITS)
        await granted(redis, B3, weight=2)
        assert await state(redis, b"shared") == b"1"
        await waits(redis, b"w")
        assert wanted(await told()) == [b"3"]


@pytest.mark.parametrize("behind", [ALIVE, b""], ids=["pushed", "polled"])
async def test_a_holder_that_takes_its_turn_itself_is_notified_of_those_behind(redis: Client, behind: bytes) -> None:
    async with inbox(redis, AT_A, ALIVE) as told:
        await granted(redis, b"x", weight=2)
        ticket = await waits(redis, A1, AT_A, weight=2)
        await waits(redis, b"w", behind, weight=2)
        await expire(redis, b"x")
        await granted(redis, A1, ticket, weight=2)
        messages = [message for message in await told() if message[1] != b"0"]
        assert wanted(messages) == [b"1"]


async def test_a_holder_that_takes_its_turn_itself_is_not_notified_if_all_behind_fit(redis: Client) -> None:
    async with inbox(redis, AT_A, ALIVE) as told:
        await granted(redis, b"x", weight=2)
        ticket = await waits(redis, A1, AT_A)
        await waits(redis, b"w")
        await expire(redis, b"x")
        await granted(redis, A1, ticket)
        assert [int(message[1]) > 0 for message in await told()] == [True]
        assert await holders(redis) == {A1: 1, b"w": 1}


@pytest.mark.parametrize("behind", [AT_A, ALIVE, b"", None], ids=["its own", "somebody else", "a poller", "nobody"])
async def test_a_pushed_grant_says_whether_anybody_is_behind(redis: Client, behind: bytes | None) -> None:
    async with inbox(redis, AT_A) as told:
        await granted(redis, b"x", weight=2)
        await waits(redis, A1, AT_A, weight=2)
        if behind is not None:
            await waits(redis, b"w", behind, weight=2)
        await release(redis, b"x")
        ((number, fence, _, duration, *rest),) = await told()
        assert (number, int(fence) > 0, duration) == (b"1", True, b"20000")
        assert rest == ([] if behind is None else [b"2" if behind == AT_A else b"0", b"20000"])


async def test_a_client_that_may_not_publish_can_wait_all_the_same(redis: Client) -> None:
    await redis.execute_command("ACL", "SETUSER", "muted", "on", "nopass", "~*", "+@all", "resetchannels")
    async with inbox(redis, AT_A, OTHER) as told:
        await granted(redis, A1, weight=2)
        where = {name: redis.get_connection_kwargs()[name] for name in ("host", "port")}
        async with type(redis)(**where, username="muted", password="any") as muted:
            await waits(muted, b"w")
        assert await redis.zcard(QUEUE) == 1
        assert await told() == []


# -- renewals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "weight"), [(3, 2), (WRITER_WEIGHT, WRITER_WEIGHT)], ids=["permits", "writer"])
async def test_p8_a_renewal_reserves_more_fences(redis: Client, limit: int, weight: int) -> None:
    first = await granted(redis, A1, weight=weight, limit=limit)
    own = await state(redis, b"=" + A1)
    assert await renew(redis, A1, 0) == [1, 0, 0]
    assert await last_fence(redis) == first + FENCE_RANGE - 1
    for number in (1, 5000):
        last = await last_fence(redis)
        code, more, waiting = await renew(redis, A1, number)
        assert (code, waiting) == (1, 0)
        assert more > last
        assert await last_fence(redis) == more + number - 1
    assert await state(redis, b"=" + A1) == own
    assert (await ask(redis, A1, weight=weight, limit=limit))[:2] == [OWN, first]
    last = await last_fence(redis)
    await release(redis, A1)
    assert await granted(redis, b"t", weight=weight, limit=limit) > last


async def test_p8_a_renewal_reserves_fences_that_are_not_before_the_clock_nor_the_last_one(redis: Client) -> None:
    await granted(redis, A1)
    await redis.hset(STATE, "fence", 7)
    assert (await renew(redis, A1, 10))[1] > (await redis.time())[0] * 1_000_000 - 60_000_000
    await redis.hset(STATE, "fence", 1 << 52)
    assert await renew(redis, A1, 10) == [1, (1 << 52) + 1, 0]
    assert await last_fence(redis) == (1 << 52) + 10


async def test_p8_a_renewal_has_no_fences_for_readers(redis: Client) -> None:
    fence = await granted(redis, A1, limit=WRITER_WEIGHT)
    assert await renew(redis, A1, 50) == [1, 0, 0]
    assert await granted(redis, b"r", limit=WRITER_WEIGHT) == fence == await last_fence(redis)


async def test_a_renewal_says_whether_anybody_waits(redis: Client) -> None:
    async with inbox(redis):
        await granted(redis, A1, weight=2)
        assert await renew(redis, A1, 0) == [1, 0, 0]
        ticket = await waits(redis, b"w")
        for _ in range(2):
            assert await renew(redis, A1, 0) == [1, 0, 1]
        assert await renew(redis, A1) == [1], "who does not share does not ask"
        assert (await renew(redis, A1, 7))[2] == 1
        await release(redis, b"", ticket)
        assert await renew(redis, A1, 0) == [1, 0, 0]
        await waits(redis, b"w")
        await run(redis, "permits/resize", 3)
        assert await renew(redis, A1, 0) == [1, 0, 0], "who waited fits now"
        await run(redis, "permits/resize", 2)
        assert await renew(redis, A1, 0) == [1, 0, 1], "the limit was lowered below what is held"


async def test_p4_a_renewal_of_what_is_gone_reserves_nothing(redis: Client) -> None:
    last = await granted(redis, A1) + FENCE_RANGE - 1
    assert await renew(redis, A2, 5) == [0]
    await release(redis, A1, pending=True)
    for number in (0, 5):
        assert await renew(redis, A1, number) == [0]
    assert await last_fence(redis) == last


async def test_a_renewal_keeps_the_fences_it_reserves(redis: Client) -> None:
    """Also those far ahead of the clock: they must not be forgotten before it has caught up."""
    day = 24 * 3_600_000
    await granted(redis, A1)
    await renew(redis, A1, day * 1000, ttl=5_000_000)
    assert await redis.pttl(STATE) > day
    await check_kept(redis, 5_000_000)
