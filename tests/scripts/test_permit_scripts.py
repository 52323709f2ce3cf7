"""The scripts of permits, one by one, on a real server; each is run twice (P4)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from ..support.inside import PAUSED_LIMIT, TOMBSTONE_MS, ticket_member
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
    TOO_HEAVY,
    TTL,
    Client,
    ask,
    check_kept,
    everything,
    expire,
    granted,
    holders,
    inbox,
    release,
    renew,
    resize,
    run,
    waits,
)

# -- one script after the other ----------------------------------------------------------------------------


async def test_p1_weights_are_granted_up_to_the_limit(redis: Client) -> None:
    await granted(redis, b"a", weight=2, limit=3)
    await granted(redis, b"b", limit=3)
    for _ in range(2):
        code, _, left, _, soon = await ask(redis, b"c", limit=3)
        assert (code, soon) == (BUSY, 0)
        assert 0 < left <= TTL
    assert await holders(redis) == {b"a": 2, b"b": 1}


async def test_p1_what_does_not_fit_whole_is_not_granted(redis: Client) -> None:
    await granted(redis, b"a", limit=3)
    assert (await ask(redis, b"b", weight=3, limit=3))[0] == BUSY
    assert await holders(redis) == {b"a": 1}


async def test_p4_acquiring_twice_answers_the_same_and_changes_nothing(redis: Client) -> None:
    fence = await granted(redis, b"a", weight=2)
    before = await everything(redis)
    code, again, left, _, weight = await ask(redis, b"a", weight=1, ttl=5 * TTL)
    assert (code, again, weight) == (OWN, fence, 2)
    assert 0 < left <= TTL
    assert await everything(redis) == before


@pytest.mark.parametrize("name", [ALIVE, b""], ids=["pushed", "polled"])
async def test_p4_queueing_twice_keeps_the_place(redis: Client, name: bytes) -> None:
    async with inbox(redis):
        await granted(redis, b"a", weight=2)
        first, second = await waits(redis, b"b", name), await waits(redis, b"c", name)
        assert (await ask(redis, b"b", first))[0] == QUEUED
        assert await redis.zrange(QUEUE, 0, -1) == [first, second]
        assert set(await redis.zrange(POLLS, 0, -1)) == (set() if name else {first, second})


async def test_p4_releasing_twice_changes_nothing_more(redis: Client) -> None:
    await granted(redis, b"a")
    await granted(redis, b"b")
    assert await release(redis, b"a") == 1
    for token in (b"a", b"never"):
        assert await release(redis, token) == 0
    assert await holders(redis) == {b"b": 1}


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


async def test_a_tombstone_lasts_for_a_minute(redis: Client) -> None:
    seconds, micros = await redis.time()
    await release(redis, b"a", pending=True)
    until = await redis.zscore(PERMITS, b"a") - (seconds * 1_000_000 + micros)
    assert TOMBSTONE_MS * 1000 <= until < (TOMBSTONE_MS + 20_000) * 1000
    await check_kept(redis, TOMBSTONE_MS)


async def test_p4_renewing_twice_sets_the_same_remaining_time(redis: Client) -> None:
    await granted(redis, b"a")
    for _ in range(2):
        assert await renew(redis, b"a", 5_000_000) == 1
        assert TTL < (await ask(redis, b"a"))[2] <= 5_000_000
        await check_kept(redis, 5_000_000)
    assert await renew(redis, b"b") == 0
    await expire(redis, b"a")
    for _ in range(2):
        assert await renew(redis, b"a") == 0
    assert await holders(redis) == {}


async def test_a_limit_that_differs_is_refused_and_changes_nothing(redis: Client) -> None:
    await granted(redis, b"a", limit=2)
    before = await everything(redis)
    for _ in range(2):
        assert (await ask(redis, b"b", ticket_member(ALIVE, 1, 20_000, b"b", 1), limit=3))[:2] == [MISMATCH, 2]
    assert await everything(redis) == before
    await granted(redis, b"c", limit=0)


async def test_without_any_limit_there_is_nothing_to_grant(redis: Client) -> None:
    for _ in range(2):
        assert (await ask(redis, b"a", limit=0))[:2] == [MISMATCH, 0]
    assert await redis.exists(*KEYS.all) == 0


async def test_a_holder_or_waiter_is_not_refused_for_a_limit_that_was_changed_meanwhile(redis: Client) -> None:
    async with inbox(redis):
        await granted(redis, b"a", weight=2)
        ticket = await waits(redis, b"b")
        await resize(redis, 1)
        assert (await ask(redis, b"a", weight=2))[0] == OWN
        assert (await ask(redis, b"b", ticket))[0] == QUEUED
        await expire(redis, b"a")
        assert (await ask(redis, b"a", weight=2))[:2] == [MISMATCH, 1], "it holds nothing any more"


async def test_what_can_never_fit_is_refused(redis: Client) -> None:
    await granted(redis, b"a")
    for _ in range(2):
        assert (await ask(redis, b"b", ticket_member(ALIVE, 1, 20_000, b"b", 3), weight=3))[:2] == [TOO_HEAVY, 2]
    assert (await holders(redis), await redis.zcard(QUEUE)) == ({b"a": 1}, 0)


# -- P2, P3: who is next -----------------------------------------------------------------------------------


async def test_p2_a_heavy_head_is_not_overtaken_by_light_ones(redis: Client) -> None:
    async with inbox(redis) as told:
        for token in (b"a", b"b"):
            await granted(redis, token, weight=2, limit=4)
        await waits(redis, b"heavy", weight=4, limit=4)
        await waits(redis, b"light", limit=4)
        await release(redis, b"a")
        assert (await ask(redis, b"barger", limit=4))[0] == BUSY
        assert await holders(redis) == {b"b": 2}
        await release(redis, b"b")
        assert await holders(redis) == {b"heavy": 4}
        await release(redis, b"heavy")
        assert await holders(redis) == {b"light": 1}
        assert [message[0] for message in await told() if int(message[1]) > 0] == [b"1", b"2"]


async def test_p3_one_release_grants_all_that_fit_once_each(redis: Client) -> None:
    async with inbox(redis) as told:
        await granted(redis, b"a", weight=4, limit=4)
        for token, weight in ((b"b", 1), (b"c", 2), (b"d", 1), (b"e", 1)):
            await waits(redis, token, weight=weight, limit=4)
        for expected in (1, 0):
            assert await release(redis, b"a") == expected
            assert await holders(redis) == {b"b": 1, b"c": 2, b"d": 1}
        messages = await told()
        fences = [int(message[1]) for message in messages]
        assert [message[0] for message in messages] == [b"1", b"2", b"3"]
        assert fences == sorted(set(fences)), "P8"
        behind = [(b"20000", b"%d" % next_one, b"20000") for next_one in (2, 3, 4)]
        assert [message[3:] for message in messages] == behind
        assert await redis.zrange(PERMITS, 0, 0, withscores=True) == [(b"b", float(int(messages[0][2]) + 20_000_000))]


async def test_p3_the_next_one_elsewhere_is_told_when_to_look(redis: Client) -> None:
    async with inbox(redis, ALIVE, OTHER) as told:
        await granted(redis, b"a", weight=2)
        await waits(redis, b"b", weight=2)
        await waits(redis, b"c", OTHER, weight=2)
        await release(redis, b"a")
        grant, note = await told()
        assert (grant[0], grant[4:]) == (b"1", (b"0", b"20000"))
        assert (note[0], note[1], note[3]) == (b"2", b"0", b"20000")


@pytest.mark.parametrize("finder", ["acquire", "release", "renew", "resize"])
async def test_p2_an_expired_permit_goes_to_the_first_waiter_whichever_client_looks(redis: Client, finder: str) -> None:
    async with inbox(redis):
        await granted(redis, b"a", weight=2)
        await waits(redis, b"b", weight=2)
        await expire(redis, b"a")
        answers: dict[str, Callable[[], Awaitable[object]]] = {
            "acquire": lambda: ask(redis, b"barger", weight=2),
            "release": lambda: release(redis, b"a"),
            "renew": lambda: renew(redis, b"a"),
            "resize": lambda: resize(redis, 2),
        }
        await answers[finder]()
        assert (await holders(redis), await redis.zcard(QUEUE)) == ({b"b": 2}, 0)


async def test_p2_waiters_whose_inbox_nobody_hears_are_skipped(redis: Client) -> None:
    async with inbox(redis) as told:
        await granted(redis, b"a", weight=2)
        for token, name in ((b"x", DEAD), (b"b", ALIVE), (b"y", DEAD), (b"c", ALIVE)):
            await waits(redis, token, name)
        await release(redis, b"a")
        assert await holders(redis) == {b"b": 1, b"c": 1}
        assert [message[0] for message in await told() if int(message[1]) > 0] == [b"2", b"4"]


async def test_p2_a_dead_heavy_waiter_does_not_keep_out_waiters_that_fit(redis: Client) -> None:
    async with inbox(redis):
        await granted(redis, b"a", weight=2, limit=3)
        await waits(redis, b"x", DEAD, weight=2, limit=3)
        await granted(redis, b"b", limit=3)
        assert await redis.zcard(QUEUE) == 0


async def test_p2_a_living_heavy_waiter_is_told_when_the_first_permit_is_over(redis: Client) -> None:
    async with inbox(redis) as told:
        await granted(redis, b"a")
        await granted(redis, b"b")
        await waits(redis, b"heavy", weight=2)
        await release(redis, b"a")
        ((number, fence, _, left),) = await told()
        assert (number, fence) == (b"1", b"0")
        assert 0 < int(left) <= TTL


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


async def test_p3_a_waiter_behind_one_of_its_own_process_dies_with_it(redis: Client) -> None:
    async with inbox(redis) as told:
        await granted(redis, b"a")
        await granted(redis, b"b")
        await waits(redis, b"heavy", weight=2)
        await waits(redis, b"light")
        await release(redis, b"b")
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


async def test_p2_a_living_poller_is_waited_for_and_a_dead_one_is_not(redis: Client) -> None:
    await granted(redis, b"a", weight=2)
    first, second = await waits(redis, b"b", b""), await waits(redis, b"c", b"")
    await release(redis, b"a")
    code, _, left, _, soon = await ask(redis, b"c", second)
    assert (code, soon) == (QUEUED, 0)
    assert 0 < left <= 60_000, "until b counts as dead"
    assert (await ask(redis, b"barger"))[0] == BUSY
    await redis.zadd(POLLS, {first: 1})
    await granted(redis, b"c", second)
    assert await redis.exists(QUEUE, POLLS) == 0


async def test_p2_a_poller_takes_its_turn_itself_and_those_behind_it_theirs(redis: Client) -> None:
    async with inbox(redis):
        await granted(redis, b"a", weight=2)
        polled = await waits(redis, b"b", b"")
        await waits(redis, b"c")
        await release(redis, b"a")
        assert await holders(redis) == {}
        await granted(redis, b"b", polled)
        assert await holders(redis) == {b"b": 1, b"c": 1}


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


async def test_withdrawing_a_ticket_lets_those_behind_it_pass(redis: Client) -> None:
    async with inbox(redis):
        await granted(redis, b"a")
        heavy = await waits(redis, b"heavy", weight=2)
        await waits(redis, b"light")
        for _ in range(2):
            assert await release(redis, b"", heavy) == 0
            assert await holders(redis) == {b"a": 1, b"light": 1}


# -- resize ------------------------------------------------------------------------------------------------


async def test_growing_grants_the_waiters_that_fit_immediately(redis: Client) -> None:
    async with inbox(redis):
        await granted(redis, b"a", weight=2)
        for token in (b"b", b"c", b"d"):
            await waits(redis, token)
        assert await resize(redis, 4) == 2
        assert await resize(redis, 4) == 4
        assert await holders(redis) == {b"a": 2, b"b": 1, b"c": 1}


async def test_shrinking_takes_nothing_and_grants_nothing_until_it_fits(redis: Client) -> None:
    async with inbox(redis):
        for token in (b"a", b"b", b"c"):
            await granted(redis, token, limit=3)
        await waits(redis, b"d", limit=3)
        for before in (3, 1):
            assert await resize(redis, 1) == before
        for token in (b"a", b"b"):
            await release(redis, token)
            assert b"d" not in await holders(redis)
        await release(redis, b"c")
        assert await holders(redis) == {b"d": 1}


async def test_a_waiter_that_became_too_heavy_is_told_to_ask_and_hears_why(redis: Client) -> None:
    async with inbox(redis) as told:
        await granted(redis, b"a", weight=3, limit=3)
        ticket = await waits(redis, b"heavy", weight=3, limit=3)
        await waits(redis, b"light", limit=3)
        await resize(redis, 2)
        assert [message[:2] for message in await told()] == [(b"1", b"-1")]
        assert (await ask(redis, b"heavy", ticket, weight=3, limit=2))[:2] == [TOO_HEAVY, 2]
        await release(redis, b"a")
        assert await holders(redis) == {b"light": 1}


async def refused(redis: Client, token: bytes, limit: int, whose: bytes = b"") -> tuple[int, bool]:
    """Acquire, and it must be refused for its limit; return that of the server, and whether a resize set it."""
    code, found, left, _, resized = await run(redis, "permits/acquire", token, TTL, b"", 0, 1, limit, whose)
    assert (code, left) == (MISMATCH, -1)
    return found, resized == 1


async def test_a_paused_semaphore_grants_nothing_until_a_resize(redis: Client) -> None:
    """Nothing is too heavy for it, and nobody in the queue is told anything."""
    async with inbox(redis) as told:
        await granted(redis, b"a", weight=2)
        await waits(redis, b"b")
        for before in (2, PAUSED_LIMIT):
            assert await resize(redis, PAUSED_LIMIT) == before
        assert await renew(redis, b"a") == 1
        await release(redis, b"a")
        await waits(redis, b"heavy", weight=10**9, limit=0)
        await waits(redis, b"c", limit=PAUSED_LIMIT)
        assert (await ask(redis, b"d", limit=0))[0] == BUSY
        assert (await holders(redis), await told()) == ({}, [])
        await resize(redis, 2)
        assert await holders(redis) == {b"b": 1, b"c": 1}


async def test_a_pause_that_no_resize_has_set_is_stored_while_somebody_waits(redis: Client) -> None:
    async with inbox(redis):
        ticket = await waits(redis, b"a", limit=PAUSED_LIMIT)
        assert await redis.hget(STATE, "limit") == b"%d" % PAUSED_LIMIT
        assert await redis.pttl(STATE) > 3_600_000
        assert await refused(redis, b"b", 2) == (PAUSED_LIMIT, False)
        await release(redis, b"", ticket)
        await granted(redis, b"b")
        assert await refused(redis, b"c", PAUSED_LIMIT) == (2, False)


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


async def test_an_implied_limit_gives_way_when_nobody_holds_or_waits(redis: Client) -> None:
    await granted(redis, b"a", limit=2)
    assert await refused(redis, b"b", 3) == (2, False)
    await release(redis, b"a")
    await granted(redis, b"b", limit=3)
    polled = await waits(redis, b"w", b"", weight=3, limit=3)
    await release(redis, b"b")
    assert await refused(redis, b"d", 2) == (3, False)
    await redis.zadd(POLLS, {polled: 1})
    await granted(redis, b"d")  # the dead waiter is dropped, and its limit gives way
    assert int(await redis.hget(STATE, "limit")) == 2


@pytest.mark.parametrize(("limit", "grants"), [(4, 2), (1, 0)])
async def test_a_request_may_set_an_implied_limit(redis: Client, limit: int, grants: int) -> None:
    """Those who wait get what a higher one frees, before the request itself; a lower one takes nothing away."""
    async with inbox(redis) as told:
        for token in (b"a", b"b"):
            await granted(redis, token)
        for token in (b"w", b"x"):
            await waits(redis, token)
        code, *_ = await run(redis, "permits/acquire", b"n", TTL, b"", 0, 1, limit, b"set")
        assert code == BUSY
        assert len([message for message in await told() if int(message[1]) > 0]) == grants
    assert (int(await redis.hget(STATE, "limit")), len(await holders(redis))) == (limit, 2 + grants)


async def test_a_request_may_keep_the_limit_of_the_server(redis: Client) -> None:
    await granted(redis, b"a")
    assert isinstance(await run(redis, "permits/acquire", b"b", TTL, b"", 0, 1, 5, b"keep"), int)
    assert (await run(redis, "permits/acquire", b"c", TTL, b"", 0, 1, 5, b"keep"))[0] == BUSY
    assert int(await redis.hget(STATE, "limit")) == 2


async def test_a_waiter_that_leaves_takes_its_poll_along_when_the_queue_was_lost(redis: Client) -> None:
    """Also an identity, which may hold a permit by another request."""
    await granted(redis, b"a", limit=1)
    ticket = ticket_member(b"", 1, TTL, b"a", 1)
    await redis.zadd(POLLS, {ticket: 1})
    assert await release(redis, b"a", ticket) == 1
    assert await redis.exists(POLLS) == 0


async def test_p4_a_late_copy_of_a_granted_request_sets_no_limit(redis: Client) -> None:
    """Its first copy set the limit; another client has set a higher one since."""
    request = (b"late", TTL, b"", 0, 1, 2, b"set")
    assert isinstance(await run(redis, "permits/acquire", *request), int)
    assert isinstance(await run(redis, "permits/acquire", b"other", TTL, b"", 0, 1, 5, b"set"), int)
    assert (await run(redis, "permits/acquire", *request))[0] == OWN
    assert await redis.hget(STATE, "limit") == b"5"
