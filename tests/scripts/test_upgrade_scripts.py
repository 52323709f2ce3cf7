"""The scripts that make a reader the writer and a writer a reader, on a real server; each is run twice (P4)."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest

from ..support.inside import WRITER_WEIGHT, permit_keys, ticket_member
from . import permits as tools

Client: TypeAlias = Any
"""A redis.asyncio.Redis; redis-py's types of raw commands differ from version to version."""

KEYS = permit_keys(b"s", "rw")
PERMITS, STATE, QUEUE, POLLS = KEYS.all
TTL = 30_000
TRY, NEXT = b"rsa:x|1", b"rsa:x|2"
BUSY, QUEUED, OWN, SPENT, DEADLOCK, GONE = 0, 2, 3, 4, 7, 8


async def twice(redis: Client, script: str, *arguments: bytes | int) -> tuple[Any, Any]:
    """Run a script twice; the second run must change nothing on the server."""

    async def run() -> Any:
        return await redis.eval(tools.load(script).source, 4, *KEYS.all, *arguments)

    async def state() -> Any:
        return (
            sorted(await redis.zrange(PERMITS, 0, -1)),
            await redis.hgetall(STATE),
            await redis.zrange(QUEUE, 0, -1, withscores=True),
        )

    first = await run()
    before = await state()
    second = await run()
    assert await state() == before
    return first, second


async def read(redis: Client, token: bytes, ticket: bytes = b"") -> Any:
    return (await twice(redis, "permits/acquire", token, TTL, ticket, 60_000 if ticket else 0, 1, WRITER_WEIGHT))[0]


async def write(redis: Client, token: bytes, ticket: bytes = b"") -> Any:
    return (
        await twice(redis, "permits/acquire", token, TTL, ticket, 60_000 if ticket else 0, WRITER_WEIGHT, WRITER_WEIGHT)
    )[0]


async def upgrade(redis: Client, token: bytes, ticket: bytes = b"", attempt: bytes = TRY) -> tuple[Any, Any]:
    return await twice(redis, "permits/upgrade", token, TTL, ticket, 60_000 if ticket else 0, attempt)


async def downgrade(
    redis: Client, token: bytes, ticket: bytes = b"", attempt: bytes = TRY, *, pending: bool = False
) -> tuple[Any, Any]:
    return await twice(redis, "permits/downgrade", token, ticket, int(pending), attempt)


async def weights(redis: Client) -> dict[bytes, int]:
    state = await redis.hgetall(STATE)
    assert int(state[b"used"]) == sum(int(value.split()[0]) for key, value in state.items() if key.startswith(b"="))
    return {key[1:]: int(value.split()[0]) for key, value in state.items() if key.startswith(b"=")}


def polled(token: bytes, weight: int = WRITER_WEIGHT) -> bytes:
    return ticket_member(b"", 1, TTL, token, weight)


async def test_p1_p8_a_lone_reader_becomes_the_writer(redis: Client) -> None:
    """With a new fence; nobody gets in; told again it is the writer already."""
    old = await read(redis, b"a")
    fence, again = await upgrade(redis, b"a")
    assert fence > old
    assert (again[0], again[1]) == (OWN, fence)
    assert 0 < again[2] <= TTL
    assert await weights(redis) == {b"a": WRITER_WEIGHT}
    assert (await read(redis, b"b"))[0] == BUSY
    assert await downgrade(redis, b"a") == (1, 1)
    assert await weights(redis) == {b"a": 1}
    assert await read(redis, b"b") == fence


async def test_p2_it_waits_for_other_readers_ahead_of_everybody(redis: Client) -> None:
    await read(redis, b"a")
    await read(redis, b"b")
    assert (await write(redis, b"w", polled(b"w")))[0] == QUEUED
    assert (await upgrade(redis, b"a"))[0][0] == BUSY  # without a ticket it does not wait
    first, second = await upgrade(redis, b"a", polled(b"a"))
    assert (first[0], second[0]) == (QUEUED, QUEUED)
    assert await redis.zrange(QUEUE, 0, -1) == [polled(b"a"), polled(b"w")]
    assert (await read(redis, b"c"))[0] == BUSY
    assert await twice(redis, "permits/release", b"b", b"", 0) == (1, 0)
    fence, again = await upgrade(redis, b"a", polled(b"a"))
    assert (again[0], again[1]) == (OWN, fence)
    assert await redis.zrange(QUEUE, 0, -1) == [polled(b"w")]


async def test_p2_it_need_not_look_after_those_behind_it(redis: Client) -> None:
    """It is the first from now on, though another one was when it came."""
    async with tools.inbox(redis):
        await read(redis, b"a")
        await read(redis, b"b")
        assert (await write(redis, b"w", ticket_member(tools.ALIVE, 1, TTL, b"w", WRITER_WEIGHT)))[0] == QUEUED
        answers = await upgrade(
            redis, b"a", ticket_member(tools.ALIVE, 2, TTL, b"a", WRITER_WEIGHT), tools.ALIVE + b"|2"
        )
        assert [answer[::4] for answer in answers] == [[QUEUED, 0], [QUEUED, 0]]


async def test_a_second_upgrade_is_refused_immediately(redis: Client) -> None:
    await read(redis, b"a")
    await read(redis, b"b")
    await upgrade(redis, b"a", polled(b"a"))
    assert [answer[0] for answer in await upgrade(redis, b"b", polled(b"b"))] == [DEADLOCK, DEADLOCK]
    assert await redis.zcard(QUEUE) == 1
    assert await weights(redis) == {b"a": 1, b"b": 1}


async def test_a_dead_one_is_passed(redis: Client) -> None:
    """P2: nobody listens at its inbox."""
    await read(redis, b"a")
    await read(redis, b"b")
    dead = ticket_member(b"rsa:nobody", 1, TTL, b"a", WRITER_WEIGHT)
    await redis.zadd(QUEUE, {dead: -1})
    assert (await upgrade(redis, b"b", polled(b"b")))[0][0] == QUEUED
    assert await redis.zrange(QUEUE, 0, -1) == [polled(b"b")]


@pytest.mark.parametrize("token", [b"nobody", b""])
async def test_an_upgrade_without_a_reader_is_refused(redis: Client, token: bytes) -> None:
    await read(redis, b"a")
    assert [answer[0] for answer in await upgrade(redis, token, polled(token))] == [GONE, GONE]
    assert await downgrade(redis, token) == (0, 0)
    assert await weights(redis) == {b"a": 1}
    assert await redis.zcard(QUEUE) == 0


async def test_p1_a_reader_that_is_gone_does_not_become_the_writer(redis: Client) -> None:
    """Its ticket goes as well, and those behind it get in."""
    inbox = redis.pubsub()
    await inbox.subscribe("rsa:alive")
    await inbox.get_message(timeout=5)
    await read(redis, b"a")
    await read(redis, b"b")
    ticket = ticket_member(b"rsa:alive", 7, TTL, b"a", WRITER_WEIGHT)
    assert (await upgrade(redis, b"a", ticket))[0][0] == QUEUED
    assert (
        await redis.eval(
            tools.load("permits/acquire").source, 4, *KEYS.all, b"c", TTL, polled(b"c", 1), 60_000, 1, WRITER_WEIGHT
        )
    )[0] == QUEUED
    assert await twice(redis, "permits/release", b"a", b"", 0) == (1, 0)
    messages: list[list[bytes]] = []
    await redis.publish("rsa:alive", "the end")
    while (message := await inbox.get_message(timeout=60))["data"] != b"the end":
        messages.append(message["data"].split()[:2])
    assert messages[-1] == [b"7", b"-1"]  # it is to ask why
    assert await redis.zrange(QUEUE, 0, -1) == [polled(b"c", 1)]
    await inbox.aclose()


async def test_a_withdrawn_ticket_lets_readers_in(redis: Client) -> None:
    """P5: the upgrade was cancelled; the reader reads on."""
    await read(redis, b"a")
    await read(redis, b"b")
    await upgrade(redis, b"a", polled(b"a"))
    assert (await read(redis, b"c"))[0] == BUSY
    assert await downgrade(redis, b"a", polled(b"a")) == (1, 1)
    assert isinstance(await read(redis, b"c"), int)
    assert await weights(redis) == {b"a": 1, b"b": 1, b"c": 1}


async def test_p6_an_upgrade_never_shortens(redis: Client) -> None:
    await read(redis, b"a")
    until = await redis.zscore(PERMITS, b"a")
    await redis.eval(tools.load("permits/upgrade").source, 4, *KEYS.all, b"a", 100, b"", 0, TRY)
    assert await redis.zscore(PERMITS, b"a") == until


# -- copies that arrive late ---------------------------------------------------------------------------------


async def test_p4_a_late_downgrade_leaves_the_next_upgrade_alone(redis: Client) -> None:
    """P1: it ends what it was sent for, and nothing that the same reader did since."""
    await read(redis, b"a")
    await upgrade(redis, b"a")
    assert await downgrade(redis, b"a") == (1, 1)
    await upgrade(redis, b"a", attempt=NEXT)
    for pending in (False, True):
        assert await downgrade(redis, b"a", pending=pending) == (1, 1)
    assert await downgrade(redis, b"a", attempt=b"") == (1, 1)  # of one who had acquired it for writing
    assert await weights(redis) == {b"a": WRITER_WEIGHT, TRY: 0}
    assert await downgrade(redis, b"a", attempt=NEXT) == (1, 1)
    assert await weights(redis) == {b"a": 1, TRY: 0}


async def test_p4_a_late_upgrade_finds_itself_spent(redis: Client) -> None:
    """P1, P5: nobody would know that the reader is the writer; and no ticket is left in the queue."""
    await read(redis, b"a")
    await upgrade(redis, b"a")
    assert await downgrade(redis, b"a", pending=True) == (1, 1)
    for ticket in (b"", polled(b"a")):
        assert [answer[0] for answer in await upgrade(redis, b"a", ticket)] == [SPENT, SPENT]
    assert await redis.zcard(QUEUE) == 0
    fence, _ = await upgrade(redis, b"a", attempt=NEXT)
    assert isinstance(fence, int)
    assert (await upgrade(redis, b"a"))[0][0] == SPENT
    assert await weights(redis) == {b"a": WRITER_WEIGHT, TRY: 0}


async def test_p4_an_upgrade_that_never_arrived_is_undone_for_good(redis: Client) -> None:
    await read(redis, b"a")
    assert await downgrade(redis, b"a", polled(b"a"), pending=True) == (1, 1)
    assert (await upgrade(redis, b"a", polled(b"a")))[0][0] == SPENT
    assert await weights(redis) == {b"a": 1, TRY: 0}


async def test_p1_one_permit_is_upgraded_by_one_attempt(redis: Client) -> None:
    """An identity that reads in two processes: the second is told, whichever way the first came to write."""
    fence = await read(redis, b"a")
    fence, _ = await upgrade(redis, b"a")
    assert [answer[0] for answer in await upgrade(redis, b"a", polled(b"a"), NEXT)] == [DEADLOCK, DEADLOCK]
    assert (await upgrade(redis, b"a"))[0][:2] == [OWN, fence]
    await downgrade(redis, b"a")
    await twice(redis, "permits/release", b"a", b"", 0)
    await write(redis, b"a")
    assert (await upgrade(redis, b"a"))[0][0] == DEADLOCK
    assert await downgrade(redis, b"a") == (1, 1)
    assert await weights(redis) == {b"a": WRITER_WEIGHT}, "it was not upgraded"
    assert await downgrade(redis, b"a", attempt=b"") == (1, 1)
    assert await weights(redis) == {b"a": 1}


async def test_p4_granted_in_its_turn_it_is_the_same_attempt(redis: Client) -> None:
    """P4: by the release of the other reader; a repeated request is told so, and its own release ends it."""
    async with tools.inbox(redis) as told:
        await read(redis, b"a")
        await read(redis, b"b")
        ticket, attempt = ticket_member(tools.ALIVE, 7, TTL, b"a", WRITER_WEIGHT), tools.ALIVE + b"|7"
        assert (await upgrade(redis, b"a", ticket, attempt))[0][0] == QUEUED
        assert await twice(redis, "permits/release", b"b", b"", 0) == (1, 0)
        assert [message[0] for message in await told()][-1:] == [b"7"]
        assert (await upgrade(redis, b"a", ticket, attempt))[0][0] == OWN
        assert await downgrade(redis, b"a") == (1, 1)
        assert await weights(redis) == {b"a": WRITER_WEIGHT}
        assert await downgrade(redis, b"a", attempt=attempt) == (1, 1)
        assert await weights(redis) == {b"a": 1}


async def test_p6_the_renewal_of_a_writer_that_became_a_reader_says_so(redis: Client) -> None:
    """P1: the same identity, in another process, made a reader of it. A reader's renewal is as good as before."""
    await write(redis, b"a")
    assert await tools.renew_of(redis, KEYS, b"a", WRITER_WEIGHT) == 1
    await downgrade(redis, b"a", attempt=b"")
    until = await redis.zscore(PERMITS, b"a")
    assert await tools.renew_of(redis, KEYS, b"a", WRITER_WEIGHT) == 0
    assert await redis.zscore(PERMITS, b"a") == until
    assert await tools.renew_of(redis, KEYS, b"a", 1) == 1
    await upgrade(redis, b"a")
    assert await tools.renew_of(redis, KEYS, b"a", 1) == 1
