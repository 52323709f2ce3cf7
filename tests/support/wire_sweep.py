"""One operation under each fault of the wire, at each command that it sends."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from redis_sync_aio import wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action, Match, Rule, anything
from redis_sync_aio.types import BaseLease

from .primitives import LOCK, SEMAPHORE, Primitive
from .wired import ACQUIRE, RELEASE, RENEW, RESPONSE_TIMEOUT, RETRY_FOR, SOON, Wired, wired

C = TypeVar("C")
LIMIT = 5
SEVERAL = replace(SEMAPHORE, label="semaphore(5)", own={"limit": LIMIT})


def wire_faults(timeout: float) -> dict[str, Action]:
    """Return the faults of the wire for a command whose reply is awaited for ``timeout`` seconds."""
    return {
        "cut before": Action.CUT_BEFORE,
        "cut after": Action.CUT_AFTER,
        "cut inside the reply": Action.CUT_INSIDE_REPLY,
        "cut behind the reply": Action.CUT_AFTER_REPLY,
        "black-holed request": Action.SWALLOW_REQUEST,
        "swallowed reply": Action.SWALLOW_REPLY,
        "late reply": Action.delay_reply(timeout / 3),
        "reply later than the timeout": Action.delay_reply(timeout * 2),
    }


WIRE: dict[str, Action] = wire_faults(RESPONSE_TIMEOUT) | {"twice": Action.DUPLICATE}
ANSWERS: dict[str, Action] = {
    text.split(" ")[0]: Action.answer_error(text)
    for text in (
        "LOADING Redis is loading the dataset in memory",
        "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "CLUSTERDOWN The cluster is down",
        "READONLY You can't write against a read only replica.",
        "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "NOREPLICAS Not enough good replicas to write.",
        "NOSCRIPT No matching script. Please use EVAL.",
    )
}
PUSHES: dict[str, Action] = {
    "push dropped": Action.DROP,
    "cut before the push": Action.CUT_BEFORE,
    "late push": Action.delay(0.1),
}

Arm = Callable[[Match], Rule]
Operation = Callable[[Wired, Arm], Awaitable[int]]
"""Does something, with the rule armed at the right moment; returns the last fence. What it held is released."""


async def _let_go(w: Wired, lease: BaseLease) -> int:
    await w.check_held(lease)
    await lease.release()
    return lease.fence


async def acquire_free(w: Wired, arm: Arm) -> int:
    arm(ACQUIRE)
    return await _let_go(w, await w.lock().acquire())


async def try_acquire(w: Wired, arm: Arm) -> int:
    arm(ACQUIRE)
    lease = await w.lock().try_acquire()
    assert lease is not None, "not acquired, although it was free"
    return await _let_go(w, lease)


async def acquire_contended(w: Wired, arm: Arm) -> int:
    holder = await w.elsewhere().acquire()
    arm(ACQUIRE)
    waiting = asyncio.create_task(w.lock().acquire())
    await w.queued(waiting=waiting)
    await holder.release()
    lease = await waiting
    assert lease.fence > holder.fence
    return await _let_go(w, lease)


async def acquire_pushed(w: Wired, arm: Arm) -> int:
    holder = await w.elsewhere().acquire()
    waiting = asyncio.create_task(w.lock().acquire())
    await w.queued(waiting=waiting)
    arm(anything)
    await holder.release()
    lease = await waiting
    assert lease.fence > holder.fence
    return await _let_go(w, lease)


async def release(w: Wired, arm: Arm) -> int:
    lease = await w.lock().acquire()
    arm(RELEASE)
    return await _let_go(w, lease)


async def release_to_waiter(w: Wired, arm: Arm) -> int:
    lease = await w.lock().acquire()
    waiting = asyncio.create_task(w.elsewhere().acquire())
    await w.queued(waiting=waiting)
    arm(RELEASE)
    fence = await _let_go(w, lease)
    async with asyncio.timeout(15):
        following = await waiting
    assert following.fence > fence
    return await _let_go(w, following)


async def renew(w: Wired, arm: Arm) -> int:
    lease = await w.lock(ttl=3).acquire()  # renewed after 1 s; a connection is given up and opened again meanwhile
    rule, first = arm(RENEW), lease._grant.deadline
    await rule.fired.wait()
    await wait_until(lambda: lease._grant.deadline > first or lease.lost, SOON)
    return await _let_go(w, lease)


async def extend(w: Wired, arm: Arm) -> int:
    lease = await w.lock(ttl=300).acquire()
    arm(RENEW)
    await lease.extend(200)
    assert lease.remaining() <= 200
    assert 150_000 < await w.kind.left_ms(w.direct, w.name) < 250_000  # one of two ttls: a stall makes keys too young
    return await _let_go(w, lease)


async def hold(w: Wired, arm: Arm) -> int:
    arm(anything)
    async with w.lock().acquire() as lease:
        await w.check_held(lease)
    return lease.fence


@dataclass
class Case:
    """One operation under one fault."""

    operation: Operation
    mode: str
    fault: str
    action: Action
    skip: int = 0
    push: bool = False
    kind: Primitive = LOCK
    acted: int = 0

    def __str__(self) -> str:
        return f"{self.operation.__name__} of a {self.kind}, {self.mode}: {self.fault} at command {self.skip + 1}"

    async def run(self, server: EmbeddedServer, **options: Any) -> None:
        async with wired(server, self.mode, name=str(self), kind=self.kind, **options) as w:
            rules: list[Rule] = []

            def arm(match: Match) -> Rule:
                on = w.proxy.on_push if self.push else w.proxy.on
                rules.append(on(match, self.action, skip=self.skip))
                return rules[-1]

            async with asyncio.timeout(options.get("retry_for", RETRY_FOR) + 2):
                fence = await self.operation(w, arm)
            self.acted = sum(rule.acted for rule in rules)
            await w.check_free(fence)


async def failures(cases: Sequence[C], run: Callable[[C], Awaitable[object]]) -> list[tuple[C, BaseException]]:
    """Run many cases, twelve at a time; return those that failed, and how."""
    at_once = asyncio.Semaphore(12)

    async def one(case: C) -> None:
        async with at_once:
            await run(case)

    ends = await asyncio.gather(*map(one, cases), return_exceptions=True)
    return [(case, end) for case, end in zip(cases, ends, strict=True) if end is not None]


async def sweep(server: EmbeddedServer, cases: Iterable[Case], **options: Any) -> int:
    """Run all cases; return how many faults were injected."""
    cases = list(cases)
    wrong = await failures(cases, lambda case: case.run(server, **options))
    for case, error in wrong:
        print(f"-- {case}")
        traceback.print_exception(error)
    assert not wrong, "\n".join(f"{case}: {error!r}" for case, error in wrong)
    return sum(case.acted for case in cases)


OPERATIONS = (acquire_free, try_acquire, acquire_contended, release, release_to_waiter, renew, extend)
