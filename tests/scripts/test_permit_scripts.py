"""The scripts of permits on a real server: examples, and what random histories (tests/simulation) do not show."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from redis.exceptions import ResponseError

from redis_sync_aio.embedded import EmbeddedServer

from ..support.inside import WRITER_WEIGHT, ticket_member
from .permits import (
    ALIVE,
    BUSY,
    DEAD,
    KEYS,
    MISMATCH,
    OTHER,
    OWN,
    PERMITS,
    POLLS,
    QUEUE,
    QUEUED,
    SPENT,
    STATE,
    TTL,
    Client,
    ask,
    check_kept,
    commands,
    dump,
    everything,
    expire,
    fill,
    granted,
    holders,
    inbox,
    release,
    renew,
    resize,
    run,
    waits,
)

pytestmark = pytest.mark.real


# A script that drops nothing of what is over would never end with the crowds below: this test is the first.
@pytest.mark.parametrize("came_first", [True, False], ids=["acquired before", "undone before it came"])
async def test_p4_a_copy_that_arrives_after_its_undoing_is_spent(redis: Client, came_first: bool) -> None:
    if came_first:
        await granted(redis, b"a", weight=2)
    for expected in (int(came_first), 0):
        assert await release(redis, b"a", pending=True) == expected
    ticket = ticket_member(ALIVE, 1, 20_000, b"a", 2)
    for _ in range(2):
        assert (await ask(redis, b"a", ticket, weight=2))[0] == SPENT
        assert await renew(redis, b"a") == 0
    assert (await holders(redis), await redis.zcard(QUEUE)) == ({}, 0)
    await granted(redis, b"b", weight=2)
    await expire(redis, b"a")
    assert (await ask(redis, b"c"))[0] == BUSY
    assert await redis.zrange(PERMITS, 0, -1) == [b"b"], "tombstones go like permits"


# -- resize ------------------------------------------------------------------------------------------------


async def refused(redis: Client, token: bytes, limit: int, whose: bytes = b"") -> tuple[int, bool]:
    """Acquire, and it must be refused for its limit; return that of the server, and whether a resize set it."""
    code, found, left, _, resized = await run(redis, "permits/acquire", token, TTL, b"", 0, 1, limit, whose)
    assert (code, left) == (MISMATCH, -1)
    return found, resized == 1


async def test_the_first_resize_sets_the_limit(redis: Client) -> None:
    """It is remembered for ten years at least, and no request changes it."""
    assert await resize(redis, 5) == 0
    for whose in (b"", b"set"):
        assert await refused(redis, b"a", 4, whose) == (5, True)
    assert await redis.pttl(STATE) > 315_360_000_000
    await granted(redis, b"a", limit=5)
    assert await redis.pttl(PERMITS) > 315_360_000_000
    await redis.delete(PERMITS)  # lost: so is what is known of the permits, but not the limit
    assert await refused(redis, b"b", 4) == (5, True)


# -- how long the keys last ---------------------------------------------------------------------------------

DAY_MS = 86_400_000


async def after_a_waiter(redis: Client, then: Awaitable[Any]) -> None:
    """Let one wait for a permit of a day, which ``then`` grants it."""
    await granted(redis, b"b")
    async with inbox(redis):
        assert (await ask(redis, b"c", ticket_member(ALIVE, 1, DAY_MS, b"c", 1), ttl=DAY_MS))[0] == QUEUED
        await then
    assert b"c" in await holders(redis)


LASTING: dict[str, Callable[[Client], Awaitable[Any]]] = {
    "acquire": lambda redis: ask(redis, b"b", ttl=DAY_MS),
    "renew": lambda redis: renew(redis, b"a", DAY_MS),
    "attach": lambda redis: run(redis, "permits/attach", b"b", DAY_MS, b"a"),
    "release": lambda redis: after_a_waiter(redis, release(redis, b"a")),
    "resize": lambda redis: after_a_waiter(redis, resize(redis, 3)),
}


@pytest.mark.parametrize("grant", LASTING.values(), ids=LASTING)
async def test_p1_the_keys_outlive_a_permit_of_a_day(redis: Client, grant: Callable[[Client], Awaitable[Any]]) -> None:
    """Whichever script sets its end: a short permit, whose keys last for an hour or so, came before."""
    await granted(redis, b"a")
    assert await redis.pttl(STATE) < DAY_MS // 2
    await grant(redis)
    assert await redis.zscore(PERMITS, (await redis.zrange(PERMITS, -1, -1))[0]) > await micros(redis) + TTL * 2000
    await check_kept(redis, DAY_MS)


# -- readers and writers -----------------------------------------------------------------------------------


async def downgraded(redis: Client, token: bytes) -> None:
    """Make a reader of a writer, twice (P4)."""
    for _ in range(2):
        assert await run(redis, "permits/downgrade", token) == 1


async def test_p1_p8_a_writer_reads_on_under_its_fence(redis: Client) -> None:
    """Others read with it, under the same fence; a reader stays one."""
    fence = await granted(redis, b"a", weight=WRITER_WEIGHT, limit=WRITER_WEIGHT)
    until = await redis.zscore(PERMITS, b"a")
    assert (await ask(redis, b"b", limit=WRITER_WEIGHT))[0] == BUSY
    await downgraded(redis, b"a")
    assert await holders(redis) == {b"a": 1}
    assert await redis.zscore(PERMITS, b"a") == until
    assert await granted(redis, b"b", limit=WRITER_WEIGHT) == fence
    await downgraded(redis, b"b")
    assert await holders(redis) == {b"a": 1, b"b": 1}


async def test_p6_the_renewal_of_a_writer_that_became_a_reader_says_so(redis: Client) -> None:
    """P1: the same identity, in another process, made a reader of it. A reader's renewal is as good as before."""
    await granted(redis, b"a", weight=WRITER_WEIGHT, limit=WRITER_WEIGHT)
    assert await renew(redis, b"a", least=WRITER_WEIGHT) == 1
    await downgraded(redis, b"a")
    until = await redis.zscore(PERMITS, b"a")
    assert await renew(redis, b"a", least=WRITER_WEIGHT) == 0
    assert await redis.zscore(PERMITS, b"a") == until
    assert await renew(redis, b"a") == 1


# -- out of memory -----------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def starved() -> AsyncIterator[Client]:
    """A client of a server of its own, which the test lets run out of memory."""
    async with EmbeddedServer() as server, server.client() as client:
        yield client


FULL = re.compile("OOM|maxmemory")


async def starve(redis: Client) -> None:
    await redis.config_set("maxmemory", 1)


async def test_out_of_memory_nothing_new_is_granted_or_queued_or_set(starved: Client) -> None:
    await granted(starved, b"a")
    before = await everything(starved)
    await starve(starved)
    pushed, polled = (ticket_member(inbox, 1, 20_000, b"b", 1) for inbox in (ALIVE, b""))
    for ticket, weight in ((b"", 1), (pushed, 1), (pushed, 2), (polled, 1), (polled, 2)):
        with pytest.raises(ResponseError, match=FULL):
            await ask(starved, b"b", ticket, weight=weight)
    with pytest.raises(ResponseError, match=FULL):
        await resize(starved, 3)
    assert await release(starved, b"late", pending=True) == 0
    assert (await ask(starved, b"b", weight=2))[0] == BUSY
    assert await everything(starved) == before


async def test_out_of_memory_the_first_request_of_all_is_refused_too(starved: Client) -> None:
    await starve(starved)
    with pytest.raises(ResponseError, match=FULL):
        await ask(starved, b"a", ticket_member(ALIVE, 1, 20_000, b"a", 1))
    assert await starved.exists(*KEYS.all) == 0


async def test_out_of_memory_holders_and_waiters_go_on(starved: Client) -> None:
    """Release, renewal and hand-over work, also to a poller; and so does undoing."""
    async with inbox(starved) as told:
        await granted(starved, b"a")
        await granted(starved, b"z")
        first = await waits(starved, b"b", weight=2)
        polled = await waits(starved, b"c", b"")
        await waits(starved, b"d")
        await starve(starved)
        for _ in range(2):
            assert await renew(starved, b"a", 90_000) == 1
            assert (await ask(starved, b"b", first, weight=2))[0] == QUEUED
            assert (await ask(starved, b"a"))[0] == OWN
        assert await starved.zrange(PERMITS, -1, -1) == [b"a"]
        assert await release(starved, b"z", pending=True) == 1
        assert await release(starved, b"a") == 1
        assert await holders(starved) == {b"b": 2}
        assert await release(starved, b"b") == 1
        await granted(starved, b"c", polled)
        assert await holders(starved) == {b"c": 1, b"d": 1}
        assert await starved.exists(QUEUE, POLLS) == 0
        assert [message[0] for message in await told() if int(message[1]) > 0] == [b"1", b"3"]


async def test_out_of_memory_a_holder_that_shares_gets_more_fences_and_is_notified(starved: Client) -> None:
    """A renewal reserves fences, and who is queued still has the holder told."""
    token = b"host:1:a:1~"
    async with inbox(starved, b"rsa:a") as told:
        first = await granted(starved, token, weight=2)
        ticket = await waits(starved, b"w")
        await told()
        await starve(starved)
        code, _, more, waiting = await run(starved, "permits/renew", token, 90_000, 1, 50)
        assert (code, waiting) == (1, 1)
        assert more > first
        assert int(await starved.hget(STATE, "fence")) == more + 49
        assert (await ask(starved, b"w", ticket))[0] == QUEUED
        assert [message[:2] for message in await told()] == [(b"1", b"-2")]


# -- lost, foreign and mortal keys -------------------------------------------------------------------------


async def all_mortal(redis: Client) -> None:
    for key in await redis.keys():
        assert await redis.pttl(key) > 0, key


@pytest.mark.parametrize("lost", [PERMITS, STATE])
async def test_when_a_key_of_the_permits_is_lost_nobody_holds_any(redis: Client, lost: bytes) -> None:
    """And nothing stays used forever, also when there are new holders before it is full."""
    first = await granted(redis, b"a", limit=3)
    await redis.delete(lost)
    assert await renew(redis, b"a") == 0
    await all_mortal(redis)
    await granted(redis, b"a", limit=3)
    await redis.delete(lost)
    assert await granted(redis, b"b", limit=3) > first
    assert await holders(redis) == {b"b": 1}
    await granted(redis, b"c", weight=2, limit=3)
    assert (await ask(redis, b"a", limit=3))[0] == BUSY


@pytest.mark.parametrize("key", KEYS.all)
async def test_a_foreign_key_in_the_way_changes_nothing(redis: Client, key: bytes) -> None:
    await granted(redis, b"a")
    await granted(redis, b"b")
    await expire(redis, b"b")
    await redis.delete(key)
    await redis.set(key, "foreign")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await ask(redis, b"c", ticket_member(b"", 1, 20_000, b"c", 2), weight=2)
    assert await redis.get(key) == b"foreign"
    if key == QUEUE:
        assert await holders(redis) == {b"a": 1, b"b": 1}, "also what is over"


BY: dict[str, tuple[Any, ...]] = {
    "who comes": ("permits/acquire", b"d", TTL, ticket_member(b"", 9, 20_000, b"d", 1), 60_000, 1, 3),
    "who goes": ("permits/release", b"", ticket_member(ALIVE, 2, 20_000, b"c", 1), 0),
    "who releases": ("permits/release", b"a", b"", 0),
    "who undoes": ("permits/release", b"a", b"", 1),
    "a renewal": ("permits/renew", b"a", TTL, 1),
    "a resize": ("permits/resize", 4),
}


@pytest.mark.parametrize("by", BY)
async def test_a_foreign_key_in_place_of_polls_changes_nothing(redis: Client, by: str) -> None:
    """No script stops half-way: what is over stays, and so do a dead waiter and one that fits now, with the sum."""
    async with inbox(redis) as told:
        await granted(redis, b"a", weight=2, limit=3)
        await granted(redis, b"b", limit=3)
        await waits(redis, b"dead", DEAD, limit=3)
        await waits(redis, b"c", limit=3)
        await waits(redis, b"polling", b"", limit=3)
        await expire(redis, b"b")
        await redis.set(POLLS, "foreign")
        before = await dump(redis)
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await run(redis, *BY[by])
        assert await dump(redis) == before
        assert await told() == []


# -- crowds ------------------------------------------------------------------------------------------------


async def test_ten_thousand_permits_may_expire_together(redis: Client) -> None:
    """More than Lua can unpack."""
    await fill(redis, 10_000, 10_000, until=1)
    await granted(redis, b"a", weight=5_000, limit=10_000)
    assert await holders(redis) == {b"a": 5_000}


async def test_five_thousand_waiters_are_granted_by_one_release(redis: Client) -> None:
    async with inbox(redis) as told:
        await granted(redis, b"a", weight=5_000, limit=5_000)
        await redis.zadd(QUEUE, {ticket_member(ALIVE, n, 20_000, b"t%d" % n, 1): n for n in range(1, 5_001)})
        await release(redis, b"a")
        assert len(await holders(redis)) == 5_000
        assert [int(message[0]) for message in await told()] == list(range(1, 5_001))


async def test_p9_the_cost_does_not_grow_with_the_permits_held(redis: Client) -> None:
    """The number of commands inside the scripts; each of them is O(log permits) at most."""
    costs = []
    for number in (10, 20_000):
        await redis.flushall()
        await fill(redis, number, number + 1)
        await redis.config_resetstat()
        await granted(redis, b"a", ticket_member(ALIVE, 1, 20_000, b"a", 1), limit=number + 1)
        await renew(redis, b"a")
        assert (await ask(redis, b"b", limit=number + 1))[0] == BUSY
        await release(redis, b"a")
        costs.append(await commands(redis))
    assert costs[0] == costs[1] < 60


# -- tombstones --------------------------------------------------------------------------------------------


async def test_of_very_many_that_were_undone_some_are_looked_at(redis: Client) -> None:
    """P9: who asks does not pay for all of them; he looks again when those are over."""
    await ask(redis, b"a", limit=1, ttl=3_600_000)
    costs = []
    for number in (70, 700):
        for one in range(number):
            await release(redis, b"undone%d" % one, pending=True)
        await redis.config_resetstat()
        assert 50_000 < (await ask(redis, b"b", limit=1))[2] <= 60_000
        costs.append(await commands(redis))
    assert costs[0] == costs[1]


# -- identities, fences, a look ----------------------------------------------------------------------------


async def micros(redis: Client) -> int:
    """Return the time of the server, in microseconds."""
    seconds, rest = await redis.time()
    return int(seconds * 1_000_000 + rest)


async def repeated(redis: Client, token: bytes, ticket: bytes, weight: int, former: int) -> Any:
    """Repeat a request whose ticket had the place ``former``."""
    return await run(redis, "permits/acquire", token, TTL, ticket, 0, weight, 3, b"", b"", former)


@pytest.mark.parametrize(("first", "second"), [(1, 3), (3, 1), (2, 2)], ids=["more", "less", "as much"])
async def test_an_identity_that_waits_twice_is_granted_once(redis: Client, first: int, second: int) -> None:
    """The second ticket is thrown out, and its owner told to ask again: it hears of the first one's permit."""
    async with inbox(redis) as told:
        await granted(redis, b"a", weight=4, limit=4)
        for weight in (first, second):
            await waits(redis, b"me", weight=weight, limit=4)
        await release(redis, b"a")
        assert await holders(redis) == {b"me": first}
        fences = [int(message[1]) for message in await told()]
        assert fences[-1] == -1
        assert (await ask(redis, b"me", weight=second, limit=4))[::4] == [OWN, first]
        assert await redis.zcard(QUEUE) == 0


async def test_p4_renewing_what_is_granted_just_then_answers_the_same_twice(redis: Client) -> None:
    async with inbox(redis):
        await granted(redis, b"a", weight=2)
        await waits(redis, b"b")
        await expire(redis, b"a")
        for _ in range(2):
            assert await renew(redis, b"b") == 1


async def test_p8_a_fence_ahead_of_the_clock_is_kept_until_the_clock_caught_up(redis: Client) -> None:
    hours = 2 * 3_600_000
    await granted(redis, b"a")
    await redis.hset(STATE, "fence", ((await redis.time())[0] * 1000 + hours) * 1000)
    await granted(redis, b"b")
    await check_kept(redis, 0)
    assert await redis.pttl(STATE) > hours
    await redis.delete(PERMITS)
    await release(redis, b"a")
    assert await redis.pttl(STATE) > hours


async def test_p3_a_shorter_permit_is_told_to_the_first_waiter_that_listens(redis: Client) -> None:
    """It hears when the first permit ends; a longer one is told to nobody."""
    async with inbox(redis) as told:
        await ask(redis, b"a", limit=2)
        await ask(redis, b"b", limit=2)
        await waits(redis, b"dead", DEAD)
        await waits(redis, b"w")
        await renew(redis, b"a", 2 * TTL)
        assert await told() == []
        for token, ttl, first in ((b"a", TTL // 2, TTL // 2), (b"b", 5000, 5000), (b"a", 10_000, 5000)):
            await renew(redis, token, ttl)
            ((number, fence, _, ms),) = await told()
            assert (number, fence) == (b"2", b"0")
            assert first - 4000 < int(ms) <= first


async def test_p3_a_waiter_behind_a_living_heavy_one_looks_from_time_to_time(redis: Client) -> None:
    """FAULTS A2: that one may die unnoticed. The next is told once that there is room, and its answers say so, too."""
    async with inbox(redis, ALIVE, OTHER) as told:
        await granted(redis, b"a", limit=4)
        await granted(redis, b"b", weight=3, limit=4)
        heavy = await waits(redis, b"heavy", weight=4, limit=4)
        light = await waits(redis, b"light", OTHER, limit=4)
        assert (await ask(redis, b"light", light, limit=4))[-1] == 0, "nothing is free"
        assert await told() == []
        await release(redis, b"b")
        assert [message[:2] for message in await told()] == [(b"1", b"0"), (b"2", b"-1")]
        assert (await ask(redis, b"light", light, limit=4))[-1] == 2
        assert (await ask(redis, b"another", limit=4))[-1] == 2
        assert (await ask(redis, b"heavy", heavy, weight=4, limit=4))[-1] == 0, "it would be granted by a release"
        await renew(redis, b"a")
        assert [message[:2] for message in await told()] == [(b"1", b"0")] * 3


async def test_p3_a_waiter_behind_a_heavy_one_learns_of_room_by_itself(redis: Client) -> None:
    """Its own request finds that something is over: it need not be told."""
    async with inbox(redis, ALIVE, OTHER) as told:
        await granted(redis, b"a")
        await granted(redis, b"b")
        await waits(redis, b"heavy", weight=2)
        light = await waits(redis, b"light", OTHER)
        await expire(redis, b"b")
        assert (await ask(redis, b"light", light))[-1] == 2
        assert [message[:2] for message in await told()] == [(b"1", b"0")]


async def test_p3_another_heavy_first_one_is_watched_as_well(redis: Client) -> None:
    """There was room before, and the first one is dead: who comes to be the second is told."""
    async with inbox(redis, ALIVE, OTHER) as told:
        await granted(redis, b"a", weight=2, limit=4)
        await granted(redis, b"b", limit=4)
        await redis.zadd(QUEUE, {ticket_member(DEAD, 1, 20_000, b"dead", 3): 1})
        await redis.zadd(QUEUE, {ticket_member(ALIVE, 2, 20_000, b"heavy", 3): 2})
        await redis.zadd(QUEUE, {ticket_member(OTHER, 3, 20_000, b"light", 1): 3})
        await release(redis, b"b")
        assert [message[:2] for message in await told()] == [(b"2", b"0"), (b"3", b"-1")]


async def test_a_waiter_that_leaves_takes_its_poll_along_when_the_queue_was_lost(redis: Client) -> None:
    """Also an identity, which may hold a permit by another request."""
    await granted(redis, b"a", limit=1)
    ticket = ticket_member(b"", 1, TTL, b"a", 1)
    await redis.zadd(POLLS, {ticket: 1})
    assert await release(redis, b"a", ticket) == 1
    assert await redis.exists(POLLS) == 0


async def test_p2_a_ticket_that_was_passed_over_gets_what_is_free_before_a_heavy_one_behind_it(redis: Client) -> None:
    await granted(redis, b"a", limit=3)
    async with inbox(redis, OTHER):
        light = ticket_member(ALIVE, 7, 20_000, b"l", 1)
        former = await micros(redis) - 1
        heavy = await waits(redis, b"heavy", OTHER, weight=3, limit=3)
        assert isinstance(await repeated(redis, b"l", light, 1, former), int)
        assert await redis.zrange(QUEUE, 0, -1) == [heavy]


async def test_a_client_that_may_not_publish_leaves_the_turn_to_its_owner(redis: Client) -> None:
    await redis.execute_command("ACL", "SETUSER", "muted", "on", "nopass", "~*", "+@all", "resetchannels")
    async with inbox(redis) as told:
        await granted(redis, b"a", weight=2)
        ticket = await waits(redis, b"b")
        where = {name: redis.get_connection_kwargs()[name] for name in ("host", "port")}
        async with type(redis)(**where, username="muted", password="any") as muted:
            assert await release(muted, b"a") == 1
            for _ in range(2):
                code, _, left, _, soon = await ask(muted, b"c")
                assert (code, left, soon) == (BUSY, -1, 1), "look again soon: nobody will wake you"
        assert await redis.zrange(QUEUE, 0, -1) == [ticket]
        assert await redis.pttl(QUEUE) > 0
        assert await told() == []
        await granted(redis, b"b", ticket)
