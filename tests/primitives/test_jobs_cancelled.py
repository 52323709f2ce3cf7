"""P5 for what is made of a lock: the task is cancelled at every suspension point, once and twice.

A lease that changes hands is with exactly one process after that: the first one, the second one, or any that attaches
it. A slot, or a request, has run or runs again by the rule that its caller chose, and never twice beyond that. Nothing
stays locked or queued.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncSemaphore,
    Coordinator,
    Lease,
    NotHeld,
    idempotent,
    once,
    wait_until,
)
from redis_sync_aio.errors import RunInterrupted
from redis_sync_aio.jobs import OnCrash

from ..support.body import FAST
from ..support.primitives import KINDS, Primitive, each
from ..support.sweep import Outcome, sweep

NAME = "c"
twice = pytest.mark.parametrize("twice", [False, pytest.param(True, marks=pytest.mark.ci)], ids=["once", "twice"])


@dataclass
class Hands:
    """The lease of one run, as far as it has come."""

    leases: list[Lease] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)


async def attached(lock: AsyncLock | AsyncSemaphore, token: str) -> Lease | None:
    try:
        found: Lease = await lock.attach(token)
        return found
    except NotHeld:
        return None


@twice
@each(KINDS, "kind")
async def test_a_lease_that_changes_hands_is_with_one(
    sync: Coordinator, other: Coordinator, kind: Primitive, twice: bool
) -> None:
    """It is held where its task says, or by the one that attaches its token."""
    first, second, hands = kind.make(sync, NAME, ttl=600), kind.make(other, NAME, ttl=600), Hands()

    async def move() -> None:
        hands.leases.append(await first.acquire())
        hands.tokens.append(await hands.leases[0].detach())
        hands.leases.append(await second.attach(hands.tokens[0]))

    async def check(outcome: Outcome[None]) -> None:
        leases, tokens = hands.leases.copy(), hands.tokens.copy()
        hands.leases.clear()
        hands.tokens.clear()
        if tokens and len(leases) == 1:  # on its way: the undoing may be, too
            found: list[Lease] = []

            async def came() -> bool:
                both = await asyncio.gather(attached(first, tokens[0]), attached(second, tokens[0]))
                found.extend(lease for lease in both if lease is not None)
                return bool(found)

            await wait_until(came, FAST, timeout=60)
            leases += found
        if tokens:
            assert len(leases) == 2
            assert leases[0].fence == leases[1].fence
            assert await attached(first, tokens[0]) is None
        if leases:
            leases[-1].check()
            assert (await second.statistics()).fence == leases[-1].fence
            await leases[-1].release()

        async def free() -> bool:
            lease = await second.try_acquire()
            if lease is not None:
                await lease.release()
            return lease is not None

        await wait_until(free, FAST, timeout=60)

    result = await sweep(move, check, twice=twice)
    assert len(result.outcomes) > 9


@dataclass
class Runs:
    """How often the work has begun, and how often it has come to its end."""

    begun: int = 0
    ended: int = 0

    async def work(self) -> int:
        self.begun += 1
        await asyncio.sleep(0)
        self.ended += 1
        return self.ended


async def settled(redis: Redis, sync: Coordinator) -> None:
    """Wait until the lock is free, and nothing is queued."""
    for _ in range(2):  # behind what was in flight, and behind what undoes that
        await sync.lock(NAME).locked()

    async def free() -> bool:
        return not await redis.exists(NAME, f"{{{NAME}}}:queue", f"{{{NAME}}}:polls")

    await wait_until(free, FAST, timeout=60)


@twice
@pytest.mark.parametrize("on_crash", ["skip", "again"])
async def test_a_slot_runs_by_the_rule(
    sync: Coordinator, other: Coordinator, redis: Redis, on_crash: OnCrash, twice: bool
) -> None:
    """ "skip": at most once. "again": until it has come to its end. Nobody else has it after that."""
    runs = Runs()

    async def run(by: Coordinator = sync) -> None:
        async with once(by, NAME, on_crash=on_crash) as lease:
            if lease is not None:
                await runs.work()

    async def check(outcome: Outcome[None]) -> None:
        await settled(redis, sync)
        before = Runs(runs.begun, runs.ended)
        await run(other)
        if on_crash == "skip":
            assert runs.begun <= 1
        else:
            assert runs.ended == 1 or before.ended == 1
        if not outcome.cancelled:
            assert (runs.begun, runs.ended) == (1, 1)
        begun = runs.begun
        await run(other)
        assert runs.begun == begun, "it is not done after all"
        runs.begun = runs.ended = 0
        await redis.flushall()

    assert len((await sweep(run, check, twice=twice)).outcomes) > 9


@twice
@pytest.mark.parametrize("on_crash", ["again", "raise"])
async def test_a_request_is_executed_by_the_rule(
    sync: Coordinator, other: Coordinator, redis: Redis, on_crash: Literal["again", "raise"], twice: bool
) -> None:
    """What its first caller did not hear of is found by the next one: a result, that it was interrupted, or nothing."""
    runs = Runs()

    async def run(by: Coordinator = sync) -> int | None:
        try:
            return await idempotent(by, NAME, on_crash=on_crash)(runs.work)()
        except RunInterrupted:
            return None

    async def check(outcome: Outcome[int | None]) -> None:
        await settled(redis, sync)
        before = runs.ended
        result = await run(other)
        if on_crash == "raise":
            assert runs.begun <= 1
        else:
            assert result in (before, before + 1)
            assert result == runs.ended
        if not outcome.cancelled:
            assert (result, outcome.value, runs.begun) == (1, 1, 1)
        begun = runs.begun
        assert await run(other) == result
        assert runs.begun == begun
        runs.begun = runs.ended = 0
        await redis.flushall()

    assert len((await sweep(run, check, twice=twice)).outcomes) > 9
