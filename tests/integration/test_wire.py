"""P4, FAULTS C1-C5, D3, D9: every operation, with every fault of the wire at every command it sends.

Whatever happens to a command or to its answer, the operation succeeds within `retry_for`: a lock that is ours is
never reported as taken, a lock that was released never as not held; the lock is free when its release returned,
nothing is queued, and the next client gets it at once, under a greater fence.

Each test runs all faults for one operation at the same time, each behind a proxy and on a lock of its own, and
reports every fault that went wrong. A fault counts when the proxy has really taken its action.
"""

from __future__ import annotations

import asyncio
import gc
import ssl
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from redis_sync_aio import Backoff, Coordinator, Lease, wait_until
from redis_sync_aio._scripts import load
from redis_sync_aio.embedded import EmbeddedServer

from ..support.factories import (
    KINDS,
    LOCK,
    PARTS,
    SHARED,
    SHARED_LOCK,
    SHARED_SEMAPHORE,
    Exclusive,
    Kind,
    Part,
    holder,
)
from ..support.proxy import (
    CUT_AFTER,
    CUT_AFTER_REPLY,
    CUT_BEFORE,
    CUT_INSIDE_REPLY,
    DELAY,
    DELAY_REPLY,
    DROP,
    DUPLICATE,
    ERROR,
    PASS,
    SWALLOW_REPLY,
    SWALLOW_REQUEST,
    Action,
    FaultProxy,
    Match,
    Rule,
    anything,
    script,
)
from ..support.resp import Predicate
from ..support.timed import Timed

KNOWN = (*(kind.script(part) for kind in KINDS for part in PARTS), load("lock/force_release"), load("permits/resize"))
"""Every script, but those that the compatible lock has to itself."""


def _of_any_kind(part: Part) -> Predicate:
    ours = [script(kind.script(part).sha) for kind in KINDS]
    return lambda args: any(is_it(args) for is_it in ours)


ACQUIRE, RELEASE, RENEW, INSPECT = (_of_any_kind(part) for part in PARTS)
FORCE = script(load("lock/force_release").sha)
RESPONSE_TIMEOUT = 0.3
RETRY_FOR = 3.0
AT_ONCE = 12
"""So many cases of a sweep share a loop: more would only be late because of each other."""
SOON = Backoff(initial=0.002, cap=0.01)

MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # client options, coordinator options
    "link": ({}, {}),
    "plain": ({"retry": Retry(NoBackoff(), 0)}, {"push": "never"}),
    "plain, retried by redis-py": ({}, {"push": "never"}),
}


@pytest_asyncio.fixture(autouse=True)
async def quiet_loop() -> AsyncIterator[None]:
    """P12: no callback and no task of ours ends with an exception that nobody looks at."""
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    yield
    gc.collect(1)  # what this test has left in cycles
    assert not unhandled, unhandled


@dataclass
class Wired:
    """A coordinator behind a proxy, and another one with a wire of its own."""

    proxy: FaultProxy
    client: Redis
    sync: Coordinator
    direct: Redis
    other: Coordinator
    name: str = "wire"
    kind: Kind = LOCK

    def lock(self, **options: Any) -> Exclusive:
        return self.kind.make(self.sync, self.name, **options)

    def elsewhere(self, **options: Any) -> Exclusive:
        """The same lock, as others see it who are not behind the proxy."""
        return self.kind.make(self.other, self.name, **options)

    async def queued(self, number: int = 1, *, waiting: asyncio.Task[Lease] | None = None) -> None:
        """Wait until so many are in the queue, or until ``waiting`` fails instead."""

        async def enough() -> bool:
            if waiting is not None and waiting.done():
                await waiting
            return (await self.elsewhere().statistics()).waiters >= number

        await wait_until(enough, SOON, timeout=5)

    async def check_held(self, lease: Lease) -> None:
        lease.check()
        assert lease.remaining() > 0
        assert await self.kind.token(self.direct, self.name) == lease.wire_token

    async def check_free(self, last: int) -> None:
        """Nothing is left, and others can go on at once, under a greater fence."""
        found = await self.elsewhere().statistics()
        assert (await holder(self.elsewhere()), found.waiters) == (None, 0), f"left behind: {found}"
        assert await self.direct.zcard(self.kind.polls(self.name)) == 0
        lease = await self.elsewhere().try_acquire()
        assert lease is not None
        assert lease.fence > last
        await lease.release()
        assert await self.kind.empty(self.direct, self.name)


@asynccontextmanager
async def wired(
    server: EmbeddedServer,
    mode: str = "link",
    *,
    name: str = "wire",
    kind: Kind = LOCK,
    client: dict[str, Any] | None = None,
    tls: ssl.SSLContext | None = None,
    **options: Any,
) -> AsyncIterator[Wired]:
    """Set all that up. Scripts are known to the server, so that the faults hit commands that do something."""
    # Many of a sweep may connect at the same time, with several round trips each.
    timeouts: dict[str, Any] = {"socket_timeout": RESPONSE_TIMEOUT, "socket_connect_timeout": 3 * RESPONSE_TIMEOUT}
    client_options, coordinator_options = MODES[mode]
    limits: dict[str, Any] = {"response_timeout": RESPONSE_TIMEOUT, "retry_for": RETRY_FOR}
    assert server.port is not None
    async with (
        FaultProxy((server.host, server.port), tls) as proxy,
        server.client() as direct,
        Redis(host=proxy.host, port=proxy.port, **(timeouts | client_options | (client or {}))) as faulty,
        Coordinator(direct) as other,
        Coordinator(faulty, **(limits | coordinator_options | options)) as sync,
    ):
        for one in KNOWN:
            await direct.script_load(one.source.decode())
        await direct.delete(*kind.keys(name).all)
        yield Wired(proxy, faulty, sync, direct, other, name, kind)


# -- the faults --------------------------------------------------------------------------------------------

WIRE: dict[str, Action] = {
    "cut before": CUT_BEFORE,
    "cut after": CUT_AFTER,
    "cut inside the reply": CUT_INSIDE_REPLY,
    "cut behind the reply": CUT_AFTER_REPLY,
    "black-holed request": SWALLOW_REQUEST,
    "swallowed reply": SWALLOW_REPLY,
    "late reply": DELAY_REPLY(RESPONSE_TIMEOUT / 3),
    "reply later than the timeout": DELAY_REPLY(RESPONSE_TIMEOUT * 2),
    "twice": DUPLICATE,
}
ANSWERS: dict[str, Action] = {
    text.split(" ")[0]: ERROR(text)
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
PUSHES: dict[str, Action] = {"push dropped": DROP, "cut before the push": CUT_BEFORE, "late push": DELAY(0.1)}

Arm = Callable[[Match], Rule]
Operation = Callable[[Wired, Arm], Awaitable[int]]
"""Does something, with the rule armed at the right moment; returns the last fence. What it held is released."""


# -- the operations ----------------------------------------------------------------------------------------


async def _let_go(w: Wired, lease: Lease) -> int:
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
    async with asyncio.timeout(2):
        following = await waiting
    assert following.fence > fence
    return await _let_go(w, following)


async def renew(w: Wired, arm: Arm) -> int:
    lease = await w.lock(ttl=3).acquire()  # renewed after 1 s; a connection is given up and opened again meanwhile
    rule, first = arm(RENEW), lease.deadline
    await rule.fired.wait()
    await wait_until(lambda: lease.deadline > first or lease.lost.is_set(), SOON)
    return await _let_go(w, lease)


async def extend(w: Wired, arm: Arm) -> int:
    lease = await w.lock(ttl=30).acquire()
    arm(RENEW)
    await lease.extend(20)
    assert lease.remaining() <= 20
    assert 15_000 < await w.kind.left_ms(w.direct, w.name) <= 20_000
    return await _let_go(w, lease)


async def hold(w: Wired, arm: Arm) -> int:
    arm(anything)
    async with w.lock().hold() as lease:
        await w.check_held(lease)
    return lease.fence


# -- the sweep ---------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One operation under one fault."""

    operation: Operation
    mode: str
    fault: str
    action: Action
    skip: int = 0
    push: bool = False
    kind: Kind = LOCK
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

            async with asyncio.timeout(RETRY_FOR + 2):
                fence = await self.operation(w, arm)
            self.acted = sum(rule.acted for rule in rules)
            await w.check_free(fence)


async def sweep(server: EmbeddedServer, cases: Iterable[Case], **options: Any) -> int:
    """Run all cases; return how many faults were injected."""
    cases = list(cases)
    at_once = asyncio.Semaphore(AT_ONCE)

    async def run(case: Case) -> None:
        async with at_once:
            await case.run(server, **options)

    async with Timed() as took:
        ends = await asyncio.gather(*map(run, cases), return_exceptions=True)
    wrong = [(case, end) for case, end in zip(cases, ends, strict=True) if end is not None]
    for case, end in wrong:
        print(f"-- {case}")
        traceback.print_exception(end)
    assert not wrong, "\n".join(
        [f"the loop stood still for {took.stood:.2f} s of {took.seconds:.2f}", *(f"{c}: {end!r}" for c, end in wrong)]
    )
    return sum(case.acted for case in cases)


OPERATIONS = (acquire_free, try_acquire, acquire_contended, release, release_to_waiter, renew, extend)
kinds = pytest.mark.parametrize("kind", [*KINDS, SHARED_LOCK, SHARED_SEMAPHORE], ids=str)


@kinds
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_sweep(server: EmbeddedServer, operation: Operation, kind: Kind) -> None:
    """C1-C5, D3, D9: 18 faults for each of 7 operations, in 3 modes (2 for a semaphore, 1 if shared): 882 in all."""
    faults, modes = WIRE | ANSWERS, [*MODES][: 3 if kind is LOCK else 1 if kind in SHARED else 2]
    cases = [Case(operation, mode, fault, faults[fault], kind=kind) for mode in modes for fault in faults]
    assert await sweep(server, cases) == len(cases) == 18 * len(modes)


@kinds
async def test_sweep_of_the_push(server: EmbeddedServer, kind: Kind) -> None:
    """P3, C7: the grant itself is lost or late; the waiter heals."""
    cases = [Case(acquire_pushed, "link", fault, PUSHES[fault], push=True, kind=kind) for fault in PUSHES]
    assert await sweep(server, cases, poll_cap=0.3) == len(cases) == 3


@pytest.mark.parametrize("mode", MODES)
async def test_sweep_of_the_whole(server: EmbeddedServer, mode: str) -> None:
    """C1-C5: the 1st, 2nd, … command of connecting, acquiring and releasing: 220 faults in the 3 modes."""
    faults = WIRE | {"LOADING": ANSWERS["LOADING"]}
    async with wired(server, mode) as w:
        await hold(w, lambda _: w.proxy.on(anything, PASS))
        commands = sum(w.proxy.commands.values())
    cases = [Case(hold, mode, fault, faults[fault], skip) for skip in range(commands) for fault in faults]
    connecting = 9 if int(version("redis").split(".")[0]) >= 8 else 8  # redis-py 7 sends one command less
    assert await sweep(server, cases) == len(cases) >= (connecting if mode == "link" else 4) * len(faults)
