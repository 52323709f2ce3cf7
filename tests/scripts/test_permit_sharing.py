"""Permits of processes that share them among their tasks: ranges of fences, and word that somebody waits.

Such a process says so by its token, which ends as ``:<hex of its inbox>:<number>~``.
"""

from __future__ import annotations

from typing import Any

import pytest

from ..support.inside import MAX_NOTIFIED
from .permits import (
    A1,
    A2,
    ALIVE,
    AT_A,
    AT_B,
    B3,
    BUSY,
    LIKE_IT,
    PERMITS,
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
    wanted,
)

pytestmark = pytest.mark.real


async def state(redis: Client, field: bytes) -> Any:
    return await redis.hget(STATE, field)


async def last_fence(redis: Client) -> int:
    return int(await state(redis, b"fence"))


async def renew(redis: Client, token: bytes, *more: int, ttl: int = TTL) -> list[int]:
    """Return all of the reply but the server's time."""
    code, _, *rest = await run(redis, "permits/renew", token, ttl, 1, *more)
    return [code, *rest]


# -- fences ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", LIKE_IT)
async def test_p8_a_holder_that_does_not_share_gets_one_fence(redis: Client, token: bytes) -> None:
    fence = await granted(redis, token)
    assert await last_fence(redis) == fence
    assert await state(redis, b"shared") is None


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


# -- renewals ----------------------------------------------------------------------------------------------


async def test_p8_a_renewal_reserves_fences_that_are_not_before_the_clock_nor_the_last_one(redis: Client) -> None:
    await granted(redis, A1)
    await redis.hset(STATE, "fence", 7)
    assert (await renew(redis, A1, 10))[1] > (await redis.time())[0] * 1_000_000 - 60_000_000
    await redis.hset(STATE, "fence", 1 << 52)
    assert await renew(redis, A1, 10) == [1, (1 << 52) + 1, 0]
    assert await last_fence(redis) == (1 << 52) + 10


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


async def test_a_renewal_keeps_the_fences_it_reserves(redis: Client) -> None:
    """Also those far ahead of the clock: they must not be forgotten before it has caught up."""
    day = 24 * 3_600_000
    await granted(redis, A1)
    await renew(redis, A1, day * 1000, ttl=5_000_000)
    assert await redis.pttl(STATE) > day
    await check_kept(redis, 5_000_000)
