"""What scripts do for writers only, on a real server: the previous fence, the downgrade; each runs twice (P4)."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest

from ..support.inside import WRITER_WEIGHT, permit_keys
from . import permits as tools

pytestmark = pytest.mark.real

Client: TypeAlias = Any
"""A redis.asyncio.Redis; redis-py's types of raw commands differ from version to version."""

KEYS = permit_keys(b"s", "rw")
PERMITS, STATE, QUEUE, POLLS = KEYS.all
TTL = 30_000
BUSY, GRANTED, QUEUED, OWN = range(4)


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


async def acquire(redis: Client, token: bytes, weight: int, ticket: bytes = b"") -> Any:
    poll_ms = 60_000 if ticket else 0
    return (await twice(redis, "permits/acquire", token, TTL, ticket, poll_ms, weight, WRITER_WEIGHT))[0]


async def release(redis: Client, token: bytes) -> None:
    assert await redis.eval(tools.load("permits/release").source, 4, *KEYS.all, token, b"", 0) == 1


async def downgrade(redis: Client, token: bytes) -> tuple[Any, Any]:
    return await twice(redis, "permits/downgrade", token)


async def weights(redis: Client) -> dict[bytes, int]:
    state = await redis.hgetall(STATE)
    assert int(state[b"used"]) == sum(int(value.split()[0]) for key, value in state.items() if key.startswith(b"="))
    return {key[1:]: int(value.split()[0]) for key, value in state.items() if key.startswith(b"=")}


async def test_p1_p8_a_writer_reads_on_under_its_fence(redis: Client) -> None:
    """Others read with it, under the same fence; a reader stays one."""
    _, fence, *_ = await acquire(redis, b"a", WRITER_WEIGHT)
    until = await redis.zscore(PERMITS, b"a")
    assert (await acquire(redis, b"b", 1))[0] == BUSY
    assert await downgrade(redis, b"a") == (1, 1)
    assert await weights(redis) == {b"a": 1}
    assert await redis.zscore(PERMITS, b"a") == until
    assert await acquire(redis, b"b", 1) == fence
    assert await downgrade(redis, b"b") == (1, 1)
    assert await weights(redis) == {b"a": 1, b"b": 1}


async def test_p6_the_renewal_of_a_writer_that_became_a_reader_says_so(redis: Client) -> None:
    """P1: the same identity, in another process, made a reader of it. A reader's renewal is as good as before."""
    await acquire(redis, b"a", WRITER_WEIGHT)
    assert await tools.renew_of(redis, KEYS, b"a", WRITER_WEIGHT) == 1
    await downgrade(redis, b"a")
    until = await redis.zscore(PERMITS, b"a")
    assert await tools.renew_of(redis, KEYS, b"a", WRITER_WEIGHT) == 0
    assert await redis.zscore(PERMITS, b"a") == until
    assert await tools.renew_of(redis, KEYS, b"a", 1) == 1
