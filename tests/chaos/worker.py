"""A process that contends for locks without a pause, tells what it sees, and may die at a chosen point.

`nursery` is the process that forks the workers, one for each line of its standard input: all is imported there,
so a worker starts in milliseconds and a run can kill hundreds. Whatever a worker has to tell is one line of JSON on
the standard output they share, each in one write. Times are microseconds of the wall clock, which the servers of the
same machine share: a fence is, as a rule, the server's time at the grant.

One task of each worker contends for each name. A section commits its fence twice to a resource that refuses
whatever is older than what it has seen: when it begins, and when it is about to end.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncRedlock, Coordinator, LeaderElection, LeaseLost
from redis_sync_aio.types import BaseLease

from ..support.balance import Ledger
from ..support.inside import Engine, Resource, now

Doom = Literal["outside", "inside", "granted", "waiting"]
"""Where a worker dies: anywhere, by the parent's hand; by its own: in a section that has begun; when a grant has
arrived, before anything is made of it; when the server has queued it."""

Enter = Callable[..., AbstractAsyncContextManager[BaseLease]]
"""What makes the context of a section."""

COMMIT = """
-- KEYS log, last; ARGV kind, fence, token, wall clock in us, worker
local last = redis.call('GET', KEYS[2])
if last then
  local fence, token = string.match(last, '^(%d+) (%S+)')
  if ARGV[2] < fence or (ARGV[2] == fence and ARGV[3] ~= token) then return last end
end
redis.call('SET', KEYS[2], ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. ARGV[4])
redis.call('RPUSH', KEYS[1], table.concat(ARGV, ' '))
return ''
"""


@dataclass(frozen=True)
class Job:
    """What a worker is to do."""

    number: int
    locks: str  # URL of the server under attack
    resource: str  # URL of the server that keeps the resource
    names: list[str]
    ttl: float
    patience: float  # seconds that a request may wait; longer means that something is stuck
    long: float  # share of the sections that last long enough for renewals
    seed: int
    doom: Doom = "outside"
    engine: Engine = "auto"
    elect: bool = False  # each name is an election, and a section is a term
    others: tuple[str, ...] = ()  # URLs of the other servers of a Redlock
    share: bool = False  # two tasks for each name share what the process holds, and let it linger

    def line(self) -> bytes:
        """Return the job as the line that the nursery reads."""
        return json.dumps(asdict(self)).encode() + b"\n"


def wall() -> int:
    """Return the time in microseconds."""
    return time.time_ns() // 1000


def tell(**what: object) -> None:
    """Tell the parent, in one write: it arrives whole or not at all."""
    os.write(1, json.dumps(what).encode() + b"\n")


class Worker:
    """One process."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.random = random.Random(job.seed)
        self.finish = asyncio.Event()
        self.resource: Redis
        self.sections = 0
        self.armed = False
        self.pausing = False
        self.lags: deque[float] = deque(maxlen=30)

    async def run(self) -> None:
        job = self.job
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.finish.set)
        loop.add_signal_handler(signal.SIGUSR1, self.arm)
        loop.add_signal_handler(signal.SIGUSR2, self.pause)
        loop.set_exception_handler(lambda _, context: tell(error="unhandled: " + repr(context)))
        client = Redis.from_url(job.locks, client_name=f"worker-{job.number}")
        # No timeout: redis-py before Python 3.12 may swallow a cancellation when it has one.
        self.resource = Redis.from_url(job.resource, socket_timeout=None)
        ledger = Ledger()
        observe = ledger if job.number % 2 else None  # to observe takes other paths through the package
        async with AsyncExitStack() as stack, client, self.resource, Coordinator(client, observe=observe) as sync:
            servers = [sync]
            for url in job.others:
                other = await stack.enter_async_context(Redis.from_url(url, client_name=f"worker-{job.number}"))
                servers.append(await stack.enter_async_context(Coordinator(other)))
            loop.call_soon(self.pulse, loop.time())
            tell(born=job.number)
            async with asyncio.TaskGroup() as tasks:
                for name in job.names:
                    if job.elect:
                        who = f"worker-{job.number}"
                        election = LeaderElection(sync, name, label=who, ttl=job.ttl, engine=job.engine)
                        tasks.create_task(self.contend(name, election.lead))
                        continue
                    if job.others:
                        tasks.create_task(self.contend(name, AsyncRedlock(servers, name, ttl=job.ttl).acquire))
                        continue
                    linger = 0.005 * job.share
                    lock = AsyncLock(sync, name, ttl=job.ttl, engine=job.engine, share=job.share, linger=linger)
                    for _ in range(1 + job.share):
                        tasks.create_task(self.contend(name, lock.acquire))
        for wrong in ledger.found():
            tell(worker=job.number, error=wrong)
        tell(worker=job.number, ended=True, sections=self.sections)

    def pulse(self, due: float) -> None:
        """Note by how much the event loop is late."""
        loop = asyncio.get_running_loop()
        self.lags.append(loop.time() - due)
        loop.call_later(0.01, self.pulse, loop.time() + 0.01)

    # -- death -----------------------------------------------------------------------------------------

    def arm(self) -> None:
        """Die at the next occasion."""
        self.armed = True
        if self.job.doom == "granted":
            setattr(Resource, "hold", lambda local, *_: self.die(local.name))  # noqa: B010
        elif self.job.doom == "waiting":
            setattr(Resource, "queued", lambda local, *_: self.die(local.name))  # noqa: B010

    def die(self, name: str) -> Any:
        tell(dead=self.job.number, at=wall(), doom=self.job.doom, name=name)
        os.kill(os.getpid(), signal.SIGKILL)

    def pause(self) -> None:
        """Stop in the next section that has begun."""
        self.pausing = True

    # -- contention ------------------------------------------------------------------------------------

    async def contend(self, name: str, hold: Enter) -> None:
        while not self.finish.is_set():
            asked = wall()
            try:
                await self.section(name, hold, asked)
            except LeaseLost:
                pass  # told where it was noticed
            except Exception as error:
                tell(worker=self.job.number, error=f"{type(error).__name__}: {error}", name=name, asked=asked)

    async def section(self, name: str, hold: Enter, asked: int) -> None:
        lease: BaseLease | None = None
        where = "body"
        try:
            async with hold(timeout=self.job.patience) as lease:
                if await self.commit("begin", lease, asked):
                    if self.armed and self.job.doom == "inside":
                        self.die(name)
                    if self.pausing:
                        self.pausing = False
                        tell(stopping=self.job.number)
                        os.kill(os.getpid(), signal.SIGSTOP)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self.duration()):
                            await self.finish.wait()
                    await self.commit("end", lease, asked)
                where = "release"
        except BaseException:
            if lease is not None and lease.lost:
                await self.lost(lease, where)
            raise
        self.sections += 1

    def duration(self) -> float:
        """Seconds; mostly short, now and then long enough for renewals."""
        if self.random.random() < self.job.long:
            return self.random.uniform(0.3, 1.5) * self.job.ttl
        return self.random.uniform(0, 0.03)

    async def commit(self, kind: str, lease: BaseLease, asked: int) -> bool:
        """Write to the resource; return whether it took it. A refusal while the lease is held is an overlap."""
        at = wall()
        lease.check()  # so it was held at `at`
        refusal = await self.write(kind, lease, at)
        if refusal is None:
            return True
        held = not lease.lost  # still
        refused = wall()
        if held:  # ends by the next renewal at the latest
            async with asyncio.timeout(self.job.patience):
                await self.overtaken(lease)
        tell(**refusal, asked=asked, held=held, lost_after=wall() - refused)
        lease.check()
        return False

    async def write(self, kind: str, lease: BaseLease, at: int) -> dict[str, object] | None:
        """Write to the resource; return what is to be told if it refuses."""
        name, job = lease.name, self.job
        keys = f"log:{name}", f"last:{name}"
        token = str(job.number) if job.others else lease.token  # that of a Redlock changes as servers join
        answer = await self.resource.eval(COMMIT, 2, *keys, kind, lease.fence, token, at, job.number)
        if not answer:
            return None
        newer, token, since = answer.decode().split()
        return {
            "refused": kind, "name": name, "worker": job.number, "fence": lease.fence, "newer": int(newer),
            "since": int(since), "token": token,
        }  # fmt: skip

    async def overtaken(self, lease: BaseLease) -> None:
        """Wait until the lease is lost, with no regard to the cancellation that this causes."""
        try:
            await lease.wait_lost()
        except asyncio.CancelledError:
            if not lease.lost:
                raise

    async def lost(self, lease: BaseLease, where: str) -> None:
        """Tell of a lost lease, and write once more, as who does not look would: that is what fences are for."""
        at, late, lag = wall(), now() - lease._grant.deadline, max(self.lags)
        refusal = await self.write("late", lease, at)
        tell(
            lost=lease._grant.loss().reason, name=lease.name, fence=lease.fence, worker=self.job.number, at=at,
            late=late, lag=lag, where=where, too_late=refusal is not None,
        )  # fmt: skip


def nursery() -> None:
    """Fork a worker for each line. They are not reaped, so no process id is used twice."""
    die_with_parent()
    while line := sys.stdin.buffer.readline():
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            try:
                asyncio.run(Worker(Job(**json.loads(line))).run())
            except BaseException as error:
                tell(error=f"a worker died of {error!r}")
                os._exit(1)
            os._exit(0)
        tell(pid=pid)
    os.killpg(0, signal.SIGKILL)  # our own group: us and what is left of it


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    nursery()
