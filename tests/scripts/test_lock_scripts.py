"""The scripts of the lock, one by one, on a real server; each is run twice (P4)."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
from redis.exceptions import ResponseError

from ..support.inside import POLLERS_TICKET, ticket_member
from ..support.lock_scripts import KEYS, TTL, Client, acquire, holder, polled, run


async def test_p1_a_free_lock_is_granted_and_a_second_token_refused(redis: Client) -> None:
    fence = await acquire(redis, b"a")
    assert isinstance(fence, int)
    assert (await acquire(redis, b"b"))[0] == 0
    assert await holder(redis) == b"a"
    assert 0 < await redis.pttl(KEYS.name) <= TTL


async def test_p4_acquiring_twice_answers_the_same_and_changes_nothing(redis: Client) -> None:
    fence = await acquire(redis, b"a")
    await redis.pexpire(KEYS.name, 5000)
    code, again, left, _, _ = await acquire(redis, b"a")
    assert (code, again) == (3, fence)
    assert 0 < left <= 5000
    assert int((await redis.get(KEYS.fence)).split()[0]) == fence


async def test_p4_queueing_twice_keeps_the_place(redis: Client) -> None:
    await acquire(redis, b"a")
    for token in (b"b", b"c", b"b"):
        assert (await acquire(redis, token, polled(token), 5000))[0] == 2
    assert await redis.zrange(KEYS.queue, 0, -1) == [polled(b"b"), polled(b"c")]


async def test_p4_a_copy_that_arrives_after_the_release_takes_nothing(redis: Client) -> None:
    await acquire(redis, b"a")
    assert await run(redis, "lock/release", b"a", b"") == 1
    for _ in range(2):
        assert (await acquire(redis, b"a"))[0] == 4
    assert await holder(redis) is None


async def test_p4_releasing_twice_changes_nothing_more(redis: Client) -> None:
    await acquire(redis, b"a")
    assert await run(redis, "lock/release", b"a", b"") == 1
    assert await run(redis, "lock/release", b"a", b"") == 0
    await acquire(redis, b"b")
    assert await run(redis, "lock/release", b"a", b"") == 2
    assert await holder(redis) == b"b"


async def test_p4_renewing_twice_sets_the_same_remaining_time(redis: Client) -> None:
    await acquire(redis, b"a")
    for _ in range(2):
        assert (await run(redis, "lock/renew", b"a", 5000))[0] == 1
        assert 0 < await redis.pttl(KEYS.name) <= 5000
    assert (await run(redis, "lock/renew", b"b", 5000))[0] == 2
    await redis.delete(KEYS.name)
    assert (await run(redis, "lock/renew", b"a", 5000))[0] == 0
    assert await holder(redis) is None


async def test_an_identity_may_acquire_again_after_its_release(redis: Client) -> None:
    first = await acquire(redis, b"w", identity=True)
    assert (await acquire(redis, b"w", identity=True))[:2] == [3, first]
    await run(redis, "lock/release", b"w", b"")
    assert await acquire(redis, b"w", identity=True) > first


async def test_p8_fences_rise_although_the_clock_went_back(redis: Client) -> None:
    future = 1 << 52
    await redis.set(KEYS.fence, b"%d x" % future)
    fences = []
    for token in (b"a", b"b", b"c"):
        fences.append(await acquire(redis, token))
        await run(redis, "lock/release", token, b"")
    assert fences == [future + 1, future + 2, future + 3]


async def test_p8_fences_rise_although_the_counter_was_lost(redis: Client) -> None:
    fences = []
    for token in (b"a", b"b", b"c"):
        fences.append(await acquire(redis, token))
        await redis.flushall()
    assert fences == sorted(set(fences))


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


async def test_p2_a_lock_whose_holder_is_gone_belongs_to_the_head_of_the_queue(redis: Client) -> None:
    """Nobody barges: also a lone try_acquire settles first, and finds the lock reserved."""
    await acquire(redis, b"a")
    await acquire(redis, b"b", polled(b"b"), 60_000)
    await redis.delete(KEYS.name)
    code, _, left, _, soon = await acquire(redis, b"barger")
    assert (code, left, soon) == (0, -2, 1)
    assert isinstance(await acquire(redis, b"b", polled(b"b"), 60_000), int)
    assert await redis.exists(KEYS.queue, KEYS.polls) == 0


async def test_p2_a_polling_waiter_that_stopped_polling_is_skipped(redis: Client) -> None:
    await acquire(redis, b"a")
    await acquire(redis, b"dead", polled(b"dead"), 60_000)
    await acquire(redis, b"b", polled(b"b"), 60_000)
    await redis.zadd(KEYS.polls, {polled(b"dead"): 1})
    await run(redis, "lock/release", b"a", b"")
    assert isinstance(await acquire(redis, b"b", polled(b"b"), 60_000), int)
    assert await redis.exists(KEYS.queue, KEYS.polls) == 0


async def test_p2_a_release_skips_waiters_whose_inbox_nobody_hears(redis: Client) -> None:
    async with redis.pubsub() as pubsub:
        await pubsub.subscribe("rsa:alive")
        assert (await pubsub.get_message(timeout=5))["type"] == "subscribe"
        await acquire(redis, b"a")
        for number, (inbox, token) in enumerate(((b"rsa:dead", b"x"), (b"rsa:alive", b"y"), (b"rsa:dead", b"z"))):
            await acquire(redis, token, ticket_member(inbox, number, 20_000, token))
        assert await run(redis, "lock/release", b"a", b"") == 1
        assert await holder(redis) == b"y"
        assert 0 < await redis.pttl(KEYS.name) <= 20_000, "the claim, not the whole ttl"
        message = await pubsub.get_message(timeout=5)
        number, fence, _, duration, *behind = message["data"].split()
        assert (number, duration, behind) == (b"1", b"20000", [b"0", b"20000"]), "somebody else waits behind"
        assert int(fence) == int((await redis.get(KEYS.fence)).split()[0])


@pytest.mark.parametrize("same", [True, False], ids=["same inbox", "another inbox"])
async def test_p2_the_next_in_line_is_told_for_how_long_the_new_holder_has_it(redis: Client, same: bool) -> None:
    async with redis.pubsub() as pubsub:
        await pubsub.subscribe("rsa:alive", "rsa:other")
        for _ in range(2):
            await pubsub.get_message(timeout=5)
        await acquire(redis, b"a")
        await acquire(redis, b"b", ticket_member(b"rsa:alive", 1, 20_000, b"b"))
        await acquire(redis, b"c", ticket_member(b"rsa:alive" if same else b"rsa:other", 2, 700, b"c"))
        await run(redis, "lock/release", b"a", b"")
        grant = (await pubsub.get_message(timeout=5))["data"].split()
        assert (grant[0], grant[3], grant[4:]) == (b"1", b"20000", [b"2" if same else b"0", b"20000"])
        if not same:  # a message of its own
            message = await pubsub.get_message(timeout=5)
            note = message["data"].split()
            assert (message["channel"], note[0], note[1], note[3]) == (b"rsa:other", b"2", b"0", b"20000")


async def test_withdrawing_a_ticket_leaves_the_holder_alone_and_is_idempotent(redis: Client) -> None:
    await acquire(redis, b"a")
    await acquire(redis, b"b", polled(b"b"), 60_000)
    for _ in range(2):
        assert await run(redis, "lock/release", b"b", polled(b"b")) == 2
        assert await redis.exists(KEYS.queue, KEYS.polls) == 0
    assert await holder(redis) == b"a"


async def test_force_takes_it_from_anybody_and_the_next_waiter_is_served(redis: Client) -> None:
    assert await run(redis, "lock/force_release") == 0
    await redis.set(KEYS.name, "foreign")
    assert await run(redis, "lock/force_release") == 1
    assert await holder(redis) is None


async def test_every_key_has_a_ttl(redis: Client) -> None:
    await acquire(redis, b"a")
    await acquire(redis, b"b", polled(b"b"), 60_000)
    for key in KEYS.all:
        assert await redis.pttl(key) > 0, key


async def test_a_foreign_holder_is_told_apart(redis: Client) -> None:
    """P11: soon = 1, since the release of a foreign lock wakes nobody."""
    await redis.set(KEYS.name, "foreign", px=5000)
    code, _, left, _, soon = await acquire(redis, b"b", ticket_member(b"rsa:x", 1, 20_000, b"b"))
    assert (code, soon) == (2, 1)
    assert 0 < left <= 5000


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
    before = await everything(redis)
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await run(redis, *BY[by])
    assert await everything(redis) == before


async def everything(redis: Client) -> dict[bytes, bytes]:
    return {key: await redis.dump(key) for key in await redis.keys()}


@pytest.mark.parametrize("token", [b"a|b", b"\x00\xff", b"a b\r\nc", b"%d %s", b"0"])
async def test_tokens_may_hold_any_bytes(redis: Client, token: bytes) -> None:
    await acquire(redis, b"first")
    await acquire(redis, token, polled(token), 60_000)
    await run(redis, "lock/release", b"first", b"")
    assert isinstance(await acquire(redis, token, polled(token), 60_000), int)
    assert (await acquire(redis, token))[0] == 3
    assert await run(redis, "lock/release", token, b"") == 1


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
    async with redis.pubsub() as pubsub:
        await pubsub.subscribe("rsa:alive")
        assert (await pubsub.get_message(timeout=5))["type"] == "subscribe"
        await acquire(redis, b"a")
        for number, inbox in enumerate((b"rsa:dead", b"rsa:alive", b"rsa:alive")):
            await acquire(redis, b"w%d" % number, ticket_member(inbox, number, 20_000, b"w%d" % number))
        assert (await run(redis, "lock/renew", b"a", 2 * TTL))[0] == 1
        assert (await run(redis, "lock/renew", b"a", 7000))[0] == 1
        await redis.persist(KEYS.name)
        assert (await run(redis, "lock/renew", b"a", 9000))[0] == 1
        await redis.publish("rsa:alive", "the end")
        told = [(await pubsub.get_message(timeout=5))["data"].split() for _ in range(3)]
        assert [(one[:2], one[3:]) for one in told[:2]] == [([b"1", b"0"], [b"7000"]), ([b"1", b"0"], [b"9000"])]
        assert told[2] == [b"the", b"end"]


async def test_the_answer_says_whether_a_ticket_is_new_in_the_queue(redis: Client) -> None:
    """So a waiter learns that the queue was lost."""
    await acquire(redis, b"a")
    assert [(await acquire(redis, b"b", polled(b"b"), 60_000))[:2] for _ in range(2)] == [[2, 1], [2, 0]]
    await redis.delete(KEYS.queue)
    assert (await acquire(redis, b"b", polled(b"b"), 60_000))[:2] == [2, 1]


# -- left free for clients that poll -------------------------------------------------------------------------

OPEN = POLLERS_TICKET


async def busy(redis: Client, since_ms: int) -> None:
    """The lock is held by ``a``, waited for, and handed over without a break since so many milliseconds ago."""
    await redis.flushdb()
    await acquire(redis, b"a")
    await acquire(redis, b"b", ticket_member(b"rsa:alive", 1, 20_000, b"b"))
    seconds, micros = await redis.time()
    await redis.zadd(KEYS.polls, {OPEN: seconds * 1000 + micros // 1000 - since_ms})


async def test_a_busy_lock_is_left_free_once_in_the_inbox_of_the_first(redis: Client) -> None:
    """It is reserved for clients without a ticket; the first waiter hears for how long, and has it then."""
    async with redis.pubsub() as pubsub:
        await pubsub.subscribe("rsa:alive")
        await pubsub.get_message(timeout=5)
        for gap, since, left_free in ((0, 5000, False), (150, 1000, False), (150, 1500, True)):
            await busy(redis, since)
            assert await run(redis, "lock/release", b"a", b"", 0, gap) == 1
            assert (await redis.exists(KEYS.name) == 0) is left_free
            message = (await pubsub.get_message(timeout=5))["data"].split()
            assert (message[:2] == [b"1", b"0"]) is left_free
        assert message[3] == b"150"
    assert (await acquire(redis, b"c"))[0] == 0, "ours do not take it"
    assert (await acquire(redis, b"b", ticket_member(b"rsa:alive", 1, 20_000, b"b")))[:2] == [2, 0]
    assert await redis.zrange(KEYS.queue, 0, 0) == [OPEN]
    until = await redis.zscore(KEYS.polls, OPEN)
    seconds, micros = await redis.time()
    assert 0 <= until - (seconds * 1000 + micros // 1000) + 1000 <= 1150
    await redis.zadd(KEYS.polls, {OPEN: 1})  # it is over
    assert isinstance(await acquire(redis, b"b", ticket_member(b"rsa:alive", 1, 20_000, b"b")), int)
    assert await redis.exists(KEYS.polls, KEYS.queue) == 0


async def test_a_release_without_waiters_ends_that_a_lock_is_busy(redis: Client) -> None:
    await busy(redis, 5000)
    await redis.delete(KEYS.queue)
    assert await run(redis, "lock/release", b"a", b"", 0, 150) == 1
    assert await redis.exists(*KEYS.all[:2], KEYS.polls) == 0


async def test_a_clock_that_went_back_begins_again(redis: Client) -> None:
    await busy(redis, -1_000_000)
    await run(redis, "lock/release", b"a", b"", 0, 150)
    seconds, _ = await redis.time()
    assert await redis.zscore(KEYS.polls, OPEN) < (seconds + 2) * 1000
    assert 0 < await redis.pttl(KEYS.polls) <= 600_000


async def test_a_foreign_key_in_place_of_polls_does_not_keep_a_lock(redis: Client) -> None:
    await busy(redis, 5000)
    await redis.set(KEYS.polls, "foreign")
    assert await run(redis, "lock/release", b"a", b"", 0, 150) == 1
    assert (await holder(redis), await redis.get(KEYS.polls)) == (None, b"foreign")


async def test_p4_a_request_behind_too_many_is_refused_and_queued_ones_stay(redis: Client) -> None:
    async def ask(token: bytes, most: int) -> Any:
        return await run(redis, "lock/acquire", token, TTL, polled(token), 5000, 0, most)

    await acquire(redis, b"a")
    assert (await ask(b"b", 1))[0] == 2
    before = await redis.zrange(KEYS.queue, 0, -1, withscores=True)
    for _ in range(2):
        code, waiting, left, _, look = await ask(b"c", 1)
        assert (code, waiting, look) == (7, 1, 0)
        assert 0 < left <= TTL
        assert (await ask(b"b", 1))[:2] == [2, 0], "it has a place, and keeps it"
    assert await redis.zrange(KEYS.queue, 0, -1, withscores=True) == before
    assert await redis.zcard(KEYS.polls) == 1
    assert (await ask(b"c", 2))[:2] == [2, 1]
