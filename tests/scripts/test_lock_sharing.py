"""Locks of processes that share them among their tasks: ranges of fences, and word that somebody waits.

Such a process says so by its token, which ends as ``:<hex of its inbox>:<number>~``.
"""

from __future__ import annotations

from ..support.inside import FENCE_RANGE, ticket_member
from ..support.lock_scripts import KEYS, TTL, Client, acquire, holder, polled, run
from .permits import inbox

A1, B2 = b"host:1:a:1~", b"host:2:b:2~"
AT_A, AT_B, ALIVE = b"rsa:a", b"rsa:b", b"rsa:alive"
LIKE_IT = (b"t~", b"host:a:1", b"host:x:1~", b"host:a:1~ ", b"a:1~", b"host:a:~", b"host::1~", b"~")


def wanted(messages: list[tuple[bytes, ...]]) -> list[bytes]:
    """Return the numbers in the messages, which have to say that somebody waits, and nothing else."""
    for _, fence, time, duration in messages:
        assert (fence, len(time), duration) == (b"-2", 16, b"0")
    return [message[0] for message in messages]


async def last_fence(redis: Client) -> int:
    return int((await redis.get(KEYS.fence)).split()[0])


async def test_p8_the_first_of_a_range_is_answered_and_the_last_is_stored(redis: Client) -> None:
    """In the short way; a copy is told the first one again."""
    for token in (A1, B2):
        first = await acquire(redis, token)
        assert await redis.get(KEYS.fence) == b"%d %b" % (first + FENCE_RANGE - 1, token)
        assert (await acquire(redis, token))[:2] == [3, first]
        await run(redis, "lock/release", token, b"")
        assert (await acquire(redis, token))[0] == 4
    assert await acquire(redis, b"t") >= first + FENCE_RANGE


async def test_p8_ranges_follow_each_other_although_the_clock_stands_still(redis: Client) -> None:
    await redis.set(KEYS.fence, b"%d z" % (1 << 52))
    found = []
    for token in (A1, b"t", B2):
        found.append(await acquire(redis, token))
        await run(redis, "lock/release", token, b"")
    first = (1 << 52) + 1
    assert found == [first, first + FENCE_RANGE, first + FENCE_RANGE + 1]
    assert await last_fence(redis) == first + 2 * FENCE_RANGE


async def test_p8_a_holder_that_does_not_share_gets_one_fence(redis: Client) -> None:
    for token in LIKE_IT:
        await redis.flushall()
        assert await acquire(redis, token) == await last_fence(redis), token


async def test_p8_a_pushed_grant_has_the_first_of_a_range(redis: Client) -> None:
    async with inbox(redis, AT_A) as told:
        await acquire(redis, b"x")
        await acquire(redis, A1, ticket_member(AT_A, 1, 20_000, A1))
        await run(redis, "lock/release", b"x", b"")
        ((_, fence, *_),) = await told()
        assert await redis.get(KEYS.fence) == b"%d %b" % (int(fence) + FENCE_RANGE - 1, A1)
        assert (await acquire(redis, A1))[:2] == [3, int(fence)]


async def test_a_holder_that_shares_is_notified_of_a_waiter(redis: Client) -> None:
    """Also when a ticket is repeated; not for a request that goes away."""
    async with inbox(redis, AT_A) as told:
        await acquire(redis, A1)
        assert (await acquire(redis, b"away"))[0] == 0
        assert await told() == []
        for _ in range(2):
            assert (await acquire(redis, b"w", ticket_member(ALIVE, 1, 20_000, b"w")))[0] == 2
            assert (await acquire(redis, b"v", polled(b"v"), 60_000))[0] == 2
            assert wanted(await told()) == [b"1", b"1"]


async def test_a_holder_that_shares_is_notified_that_it_is_taken_by_force(redis: Client) -> None:
    """Whether somebody waits or not; he finds that it is gone when he gives it back."""
    async with inbox(redis, AT_A) as told:
        assert await run(redis, "lock/force_release") == 0
        await acquire(redis, b"a")
        assert await run(redis, "lock/force_release") == 1
        assert await told() == []
        await acquire(redis, A1)
        assert await run(redis, "lock/force_release") == 1
        assert wanted(await told()) == [b"1"]


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


async def test_a_pushed_grant_says_whether_anybody_is_behind(redis: Client) -> None:
    others = (b"0", b"20000")
    async with inbox(redis, AT_A) as told:
        for behind, expected in ((AT_A, (b"2", b"20000")), (ALIVE, others), (b"", others), (None, ())):
            await redis.flushall()
            await acquire(redis, b"x")
            await acquire(redis, A1, ticket_member(AT_A, 1, 20_000, A1))
            if behind is not None:
                await acquire(redis, b"w", ticket_member(behind, 2, 20_000, b"w"), 0 if behind else 60_000)
            await run(redis, "lock/release", b"x", b"")
            ((number, fence, _, duration, *rest),) = await told()
            assert (number, int(fence) > 0, duration) == (b"1", True, b"20000")
            assert tuple(rest) == expected


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
        assert (await run(redis, "lock/renew", B2, TTL, 3))[0] == 2
        assert await last_fence(redis) == last, "none for who does not hold it"
        await run(redis, "lock/force_release")
        last = await last_fence(redis)
        assert (await run(redis, "lock/renew", A1, TTL, 3))[0] == 0
        assert await last_fence(redis) == last
