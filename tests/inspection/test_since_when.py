"""The queue says since when each request waits, by the server's clock, and its order does not depend on that clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncReadWriteLock, AsyncSemaphore, Coordinator, wait_until
from redis_sync_aio.types import Engine
from tests.support.body import FAST
from tests.support.inside import lock_keys, permit_keys, ticket_member
from tests.support.inspecting import seen

ENGINES = pytest.mark.parametrize("engine", ["lua", "watch"])
KINDS = pytest.mark.parametrize(
    ("kind", "engine"), [("lock", "lua"), ("lock", "watch"), ("sem", "lua"), ("sem", "watch"), ("rw", "lua")]
)
FAR = 1 << 52
"""Microseconds: a time long after these tests."""


def made(kind: str, sync: Coordinator, engine: Engine) -> Any:
    """Return what one at a time holds."""
    if kind == "lock":
        return AsyncLock(sync, "x", engine=engine)
    if kind == "sem":
        return AsyncSemaphore(sync, "x", limit=1, engine=engine)
    return AsyncReadWriteLock(sync, "x").write()


def queue_of(kind: str) -> bytes:
    """Return the key of its queue."""
    if kind == "lock":
        return lock_keys(b"x").queue
    return permit_keys(b"x", "sem" if kind == "sem" else "rw").all[2]


async def server_time(redis: Redis) -> int:
    """Return the server's time in microseconds."""
    seconds, micros = await redis.time()
    return int(seconds) * 1_000_000 + int(micros)


async def scores(redis: Redis, kind: str, number: int) -> list[int]:
    """Wait until so many tickets are in the queue; return their scores in order."""

    async def so_many() -> list[int] | None:
        found: Any = await redis.zrange(queue_of(kind), 0, -1, withscores=True)
        return [int(score) for _, score in found] if len(found) == number else None

    found = await wait_until(so_many, FAST, timeout=20)
    assert found is not None
    return found


@KINDS
async def test_a_ticket_says_when_it_came(
    redis: Redis, sync: Coordinator, other: Coordinator, kind: str, engine: Engine
) -> None:
    """Its score is the server's time of the request, and stays when the request is repeated."""
    async with made(kind, sync, engine):
        times, waiting = [await server_time(redis)], []
        for number in (1, 2, 3):  # the second and third take a shorter way
            waiting.append(asyncio.create_task(made(kind, other, engine).acquire()))
            came = (await scores(redis, kind, number))[-1]
            times.append(await server_time(redis))
            assert times[-2] <= came <= times[-1]
        view = await seen(redis, "x", lambda it: len(it.waiters) == 3)
        waited = [it.waited or 0 for it in view.waiters]
        assert waited == sorted(waited, reverse=True)
        assert waited[-1] > 0
    for task in waiting:
        await (await task).release()


@KINDS
async def test_a_clock_that_is_behind_lets_nobody_barge(
    redis: Redis, sync: Coordinator, other: Coordinator, kind: str, engine: Engine
) -> None:
    """P2: behind a ticket of a later time the next one is a microsecond later."""
    weight = {"lock": 1, "sem": 1, "rw": 2**31 - 1}[kind]
    queue = queue_of(kind)
    polls = queue.removesuffix(b"queue") + b"polls"
    early = [ticket_member(b"", number, 1000, b"early%d" % number, weight) for number in (1, 2)]
    async with made(kind, sync, engine):
        await redis.zadd(polls, dict.fromkeys(early, FAR))  # alive
        await redis.zadd(queue, {early[0]: FAR, early[1]: FAR + 5})
        waiting = asyncio.create_task(made(kind, other, engine).acquire())
        assert await scores(redis, kind, 3) == [FAR, FAR + 5, FAR + 6]
        behind = asyncio.create_task(made(kind, other, engine).acquire())
        assert await scores(redis, kind, 4) == [FAR, FAR + 5, FAR + 6, FAR + 7]
        await redis.zrem(queue, *early)
    for task in (waiting, behind):
        await (await task).release()


@ENGINES
async def test_tickets_of_an_older_version_keep_their_places(
    redis: Redis, sync: Coordinator, other: Coordinator, engine: Engine
) -> None:
    """Their scores count from 1, and do not say when they came; newer tickets stand behind them."""
    old = ticket_member(b"", 1, 1000, b"old")
    async with made("lock", sync, engine):
        await redis.zadd(queue_of("lock"), {old: 1})
        waiting = asyncio.create_task(made("lock", other, engine).acquire())
        view = await seen(redis, "x", lambda it: len(it.waiters) == 2)
        assert view.waiters[0].token == "old"
        assert view.waiters[0].waited is None
        assert view.waiters[1].waited is not None
    await (await waiting).release()
