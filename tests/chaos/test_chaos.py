"""P1, P3, P6, P8 in bulk: processes contend for a few locks while faults of one kind hit them at random.

    python -m pytest -s tests/chaos --chaos-seconds=60 --chaos-seed=7

Each run takes --chaos-seconds and injects at least 100 faults a minute, as many as its seed says; the
seed is printed. Bars, whatever the length: no lease was held when a later one was granted; no fence that did not rise;
no commit of a stale fence taken; no request stuck; who lost a lease lost it for a reason that was injected.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest

from redis_sync_aio.testing.faults import FaultProxy

from ..support.options import OPTIONS
from .field import Field, Worker
from .history import US, History, percentile
from .worker import Doom, wall

SECONDS = OPTIONS.chaos_seconds
SEED = OPTIONS.chaos_seed or 0
FAULTS = SECONDS * 100 / 60
"""The least number of faults."""
SLACK = 5.0
"""Seconds that may pass, at p99 and on a busy machine, until a loss is known, a lost wake-up is made up for, a server
that is back grants, and from the end of a dead holder's lease to the next grant. The real figures are printed."""

pytestmark = [pytest.mark.real, pytest.mark.timeout(90 + 2 * SECONDS)]


class Clock:
    """Says when the run is over: its time is up, and there were faults enough."""

    def __init__(self) -> None:
        self._end = time.monotonic() + SECONDS
        self.faults = 0

    def __bool__(self) -> bool:
        return time.monotonic() < self._end or self.faults < FAULTS


@asynccontextmanager
async def field(
    *,
    ttl: float = 2.0,
    long: float = 0.05,
    patience: float = 30,
    keep: bool = False,
    elect: bool = False,
    servers: int = 1,
) -> AsyncIterator[Field]:
    print(f"--chaos-seed={SEED} --chaos-seconds={SECONDS:g}")
    options = {"ttl": ttl, "long": long, "patience": patience}
    async with Field(SEED, names=4, workers=6, persistent=keep, elect=elect, servers=servers, **options) as field:
        yield field


def judge(history: History, kind: str, faults: int, *, forgetful: bool = False, **figures: float) -> None:
    """Check what holds whatever was done. ``forgetful``: the server lost data, so leases ended unnoticed."""
    longest = history.waits()[0][0]
    shown = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in figures.items())
    print(
        f"{kind}: {faults} faults, {history.sections} sections, {len(history.losses)} leases lost, "
        f"{len(history.refusals) + history.too_late} stale commits refused, longest wait {longest:.3f}; {shown}"
    )
    assert history.errors == []
    assert forgetful or history.overlaps() == []
    assert history.stale() == []
    assert faults >= FAULTS


async def test_p1_p8_a1_a2_a3_killed() -> None:
    """A1-A3: SIGKILL in a section, while waiting, when a grant has just arrived, anywhere.

    Nobody else loses a lease; the next holder has the lock, at p99, within ttl + 5 s of the death.
    """
    await _kill_at_random(elect=False)


@pytest.mark.ci
async def test_p1_p8_elections() -> None:
    """The same of leaders and candidates: each section is a term.

    There are no two leaders at a time, and no term has a lower number than one before it; the next candidate leads, at
    p99, within ttl + 5 s of the death.
    """
    await _kill_at_random(elect=True)


async def _kill_at_random(*, elect: bool) -> None:
    async with field(elect=elect) as f:
        dooms: list[Doom] = ["outside", "inside", "granted", "waiting"]
        await f.populate()
        running = Clock()
        while running:
            worker = await f.spawn(f.random.choice(dooms))
            await asyncio.sleep(f.random.uniform(0.2, 0.5))
            victim = f.random.choice(f.workers[:-1])
            if victim.doom == "outside":
                f.kill(victim)
            else:
                victim.signal(signal.SIGUSR1)
                await f.until(partial(f.gone, victim))
            await f.until(partial(f.born, worker))
            running.faults += 1
        history = await f.end()
        after = history.after_deaths()
        kills = sum(death.doom != "between" for death in f.deaths)
        between = len(f.deaths) - kills
        judge(history, "killed", kills, holders=len(after), given_to_the_dead=between, next_grant=percentile(after))
        assert history.losses == []
        assert percentile(after) <= f.ttl + SLACK


@pytest.mark.ci
async def test_p6_p8_a4_a5_stopped() -> None:
    """A4, A5: SIGSTOP for half the ttl, which loses nothing; for longer, which is known immediately afterwards."""
    async with field(ttl=3.0, long=0.1, patience=60) as f:  # each stopped waiter may cost the others its claim
        stops: dict[int, list[tuple[int, bool]]] = {worker: [] for worker in range(6)}

        async def torment(worker: Worker) -> None:
            while running:
                if f.random.random() < 0.5:
                    worker.signal(signal.SIGSTOP)
                else:
                    worker.signal(signal.SIGUSR2)  # in a section, by itself
                    await f.until(partial(f.stopped, worker, 1 + f.told.count({"stopping": worker.number})))
                long = f.random.random() < 0.4
                await asyncio.sleep(f.ttl * (f.random.uniform(1.2, 1.6) if long else 0.5))  # what is tested
                stops[worker.number].append((worker.signal(signal.SIGCONT), long))
                running.faults += 1
                await asyncio.sleep(f.random.uniform(0.5, 1.5))

        await f.populate()
        running = Clock()
        async with asyncio.TaskGroup() as tasks:
            for worker in f.workers:
                tasks.create_task(torment(worker))
        history = await f.end()
        late: list[float] = []
        for loss in history.losses:
            before = [end for end, long in stops[loss["worker"]] if long and end <= loss["at"]]
            late.append((loss["at"] - max(before, default=0)) / US)
        faults = sum(map(len, stops.values()))
        judge(history, "stopped", faults, lost_after=percentile(late))
        assert percentile(late) <= SLACK


@pytest.mark.ci
async def test_p3_p6_c6_c7_cut() -> None:
    """C6, C7: connections cut by the server and on the way, and processes cut off for longer than the ttl.

    Only who was cut off loses leases, at their deadline; no request is stuck.
    """
    async with field(long=0.1 / (1 + OPTIONS.chaos_share)) as f, AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(FaultProxy(f.server.unix_socket)) for _ in range(3)]
        cut_off: set[int] = set()

        def url(number: int) -> str:
            return proxies[number].url if number < len(proxies) else f.server.url

        async def partition(number: int) -> None:
            cut_off.add(number)
            proxies[number].refuse = True
            await proxies[number].cut()
            await asyncio.sleep(f.ttl * f.random.uniform(0.5, 2))  # what is tested
            proxies[number].refuse = False

        async def kill(number: int) -> None:
            for one in await f.admin.client_list():
                if one["name"] == f"worker-{number}":
                    await f.admin.client_kill_filter(_id=one["id"])

        async def cut(number: int) -> None:
            await proxies[number].cut()

        async def torment(number: int, *ways: Callable[[int], object]) -> None:
            while running:
                await asyncio.sleep(f.random.uniform(0.3, 2))
                await f.random.choice(ways)(number)  # type: ignore[misc]
                running.faults += 1

        await f.populate(url)
        running = Clock()
        async with asyncio.TaskGroup() as tasks:
            for worker in f.workers:
                ways = (kill, cut, partition) if worker.number < len(proxies) else (kill,)
                tasks.create_task(torment(worker.number, *ways))
        history = await f.end()
        # From when the event loop had its turn: what else this machine is doing is not our subject.
        in_body = [loss for loss in history.losses if loss["where"] == "body"]
        late = [loss["late"] - min(max(loss["late"], 0.0), loss["lag"]) for loss in in_body]
        early = min(late, default=0.0)
        judge(history, "cut", running.faults, lost_in_body=len(late), at_deadline_plus=percentile(late), at_least=early)
        assert {loss["worker"] for loss in history.losses} <= cut_off
        assert {loss["lost"] for loss in in_body} <= {"unreachable"}
        assert early >= -0.05, "no lease is lost before its end"
        assert percentile(late) <= SLACK
        assert history.waits()[0][0] <= f.ttl + SLACK


@pytest.mark.ci
@pytest.mark.parametrize("keep", [True, False], ids=["with-data", "without-data"])
async def test_p1_p8_d1_d2_restarted(keep: bool) -> None:
    """D1, D2: the server is killed and starts again with all it had (AOF), or with nothing.

    Each lock is granted again. With data no lease is lost. Without, leases are lost, and
    two may be held at a time; a holder that is overtaken then knows by its next renewal, and its commits are refused.
    """
    async with field(ttl=3.0, keep=keep) as f:
        back: list[int] = []
        outages: list[float] = []
        await f.populate()
        running = Clock()
        while running:
            begin = wall()
            await asyncio.to_thread(f.server.restart, keep)
            back.append(wall())
            outages.append((back[-1] - begin) / US)
            running.faults += 1
            await asyncio.sleep(f.random.uniform(0.2, 0.6))
        history = await f.end()
        first = history.first_grants(back)
        known = [refusal["lost_after"] / US for refusal in history.refusals if refusal["held"]]
        kind = "restarted " + ("with data" if keep else "without data")
        judge(
            history, kind, len(back), forgetful=not keep, outage=max(outages), overtaken=len(known),
            first_grant=percentile(first), known=percentile(known),
        )  # fmt: skip
        assert percentile(first) <= SLACK
        if keep:
            assert history.losses == []
        assert percentile(known) <= f.ttl / 3 + SLACK


@pytest.mark.ci
async def test_p1_p8_e9_redlock() -> None:
    """E9: of five servers two at a time are stopped, or killed and started again with their data; workers are killed.

    No lease overlaps another, fences rise, and no request is stuck.
    """
    async with field(ttl=3.0, keep=True, servers=5) as f:
        servers = [f.server, *f.others]

        async def torment(turn: int) -> None:
            while running:
                server = servers.pop(f.random.randrange(len(servers)))
                if f.random.random() < 0.7:
                    await asyncio.to_thread(server.pause)
                    await asyncio.sleep(f.random.choice([0.05, 0.3, 1]))  # what is tested
                    await asyncio.to_thread(server.resume)
                else:
                    await asyncio.to_thread(server.restart, True)
                servers.append(server)
                running.faults += 1
                await asyncio.sleep(f.random.uniform(0, 0.3) * turn)

        async def replace() -> None:
            while running:
                await asyncio.sleep(f.random.uniform(0.2, 1))
                worker = await f.spawn("outside")
                await f.until(partial(f.born, worker))
                victim = f.random.choice(f.workers[:-1])
                victim.signal(signal.SIGKILL)
                f.workers.remove(victim)
                running.faults += 1

        await f.populate()
        running = Clock()
        async with asyncio.TaskGroup() as tasks:
            for turn in (1, 2):
                tasks.create_task(torment(turn))
            tasks.create_task(replace())
        history = await f.end()
        judge(history, "Redlock", running.faults)
        assert history.sections > running.faults / 2
