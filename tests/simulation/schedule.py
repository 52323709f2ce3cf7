"""A random schedule of a few tasks that contend for something, in simulation (see `gate.py`); and how it has to end.

What they contend for is in `schedule_locks.py` and `schedule_transactions.py`.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha1
from typing import Any, Generic, TypeAlias, TypeVar

import redis

from redis_sync_aio import Coordinator
from redis_sync_aio.embedded import EmbeddedServer

from ..support.inside import hub_of, load, was_used
from .gate import Command, Gate, Move, Pipe

LEASE = 3600.0
"""Longer than any schedule: what is left behind stays, and no lease ends by itself."""
SCRIPTS = (
    *("lock/acquire", "lock/release", "lock/renew", "lock/force_release", "lock/acquire_all"),
    *("permits/acquire", "permits/release", "permits/renew", "robust/adopt", "link/read"),
)
KINDS = {load(name).sha: name for name in SCRIPTS}


def sha(words: Command) -> bytes:
    """Return the SHA1 of the script that is called."""
    return words[1] if words[0] == b"EVALSHA" else sha1(words[1]).hexdigest().encode()


class Worker(ABC):
    """One task of a schedule."""

    inside = False
    """It waits until it may ``leave``."""

    def __init__(self, number: int, way: str) -> None:
        self.number, self.way = number, way
        self.leave = asyncio.Event()
        self.cancelled = 0
        self.task: asyncio.Task[str] | None = None

    def __repr__(self) -> str:
        return f"{self.number} ({self.way})"

    def start(self) -> None:
        self.task = asyncio.create_task(self.run(), name=f"worker {self.number}")

    def cancel(self) -> None:
        assert self.task is not None
        self.cancelled += 1
        self.task.cancel()

    @abstractmethod
    async def run(self) -> str:
        """Do what it does; return what came of it."""


async def settled(sync: Coordinator) -> None:
    """Wait until all that goes on in the background is answered."""
    if sync.why_closed is None and was_used(sync):
        await hub_of(sync).manager.releases.in_flight.drained(60)
        # An identity's request that was given up is undone once its answer is there.
        async with asyncio.timeout(60):
            while hub_of(sync).acquisitions or hub_of(sync).resources:
                await asyncio.sleep(0.1)
        await hub_of(sync).manager.releases.in_flight.drained(60)  # what had lingered


W = TypeVar("W", bound=Worker)


class Schedule(ABC, Generic[W]):
    """One run; the seed says everything about it."""

    burst = 0.0
    """How likely the next command of a connection, or the next frame, gets through together with the one before."""

    def __init__(self, gate: Gate, server: Any, seed: int, trace: bool = False) -> None:
        self.gate, self.server, self.seed, self.trace = gate, server, seed, trace
        self.random = random.Random(seed)
        random.seed(seed)  # back-off and jitter
        self.workers: Sequence[W] = ()
        self.happened: Counter[str] = Counter()
        self.faults = self.random.random() < 0.8
        self.killing = self.random.random() < 0.5

    # -- what contends, and for what -----------------------------------------------------------------------

    @abstractmethod
    def begin(self) -> Sequence[W]:
        """Make the clients, and return the tasks."""

    @abstractmethod
    async def check_end(self) -> None:
        """All tasks have ended: see what they left behind."""

    @abstractmethod
    async def close(self) -> None:
        """Close the clients."""

    def permits(self, pipe: Pipe, words: Command) -> bool:
        """Whether a command may still arrive; those that can do harm by what the documentation says may not.

        Half the users may kill their old connections.
        """
        return words[:2] != (b"CLIENT", b"KILL") or self.killing

    # -- one run -------------------------------------------------------------------------------------------

    def run(self) -> None:
        self.server.flushall()
        if self.seed % 10 == 9:
            self.server.script_flush()
        self.gate.permits = self.permits
        if self.seed % 5 == 4:
            self.gate.step = 0
        try:
            self.gate.run(self.main)
        except BaseException as error:
            error.add_note(f"in schedule {self.seed}: run it again with --schedule={self.seed}")
            raise

    async def main(self) -> None:
        self.workers = self.begin()
        self.steps = self.random.randint(20, 120)
        self.done = asyncio.get_running_loop().create_future()
        self.gate.choose = self.choose
        await self.done
        for worker in self.workers:
            worker.leave.set()
            if worker.task is None:
                worker.start()
        async with asyncio.timeout(60):
            await asyncio.wait([worker.task for worker in self.workers if worker.task is not None])
        self.judge()
        await self.check_end()
        await self.close()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, left
        assert all(pipe.lost for pipe in self.gate.pipes), "P12: a connection that nobody closed"

    def judge(self) -> None:
        """P5, P12: everybody ended as he should."""
        for worker in self.workers:
            task = worker.task
            assert task is not None
            if task.cancelled():
                assert worker.cancelled, f"{worker} was cancelled by nobody"
                self.happened["cancelled"] += 1
            else:
                if (error := task.exception()) is not None:
                    raise error
                assert not worker.cancelled, f"P5: the cancellation of {worker} was swallowed"
                self.happened[task.result()] += 1
        assert not any(worker.inside for worker in self.workers)

    # -- what happens --------------------------------------------------------------------------------------

    def choose(self, timeout: float | None) -> None:
        self.steps -= 1
        if self.steps < 0:
            self.calm_down()
            return
        while True:
            moves = self.moves(timeout)
            if not moves:
                self.calm_down()
                return
            weights = [weight for weight, _ in moves]
            move = self.random.choices([move for _, move in moves], weights)[0]
            if self.trace:
                print(f"{self.gate.time:10.3f} {describe(move)}")
            move()
            while self.burst and self.random.random() < self.burst and _again(move):
                move()
            timeout = None
            if self.random.random() < 0.8:
                return  # else something more in the same turn

    def moves(self, timeout: float | None) -> list[Move]:
        moves = self.gate.moves(self.faults)
        for worker in self.workers:
            if worker.task is None:
                moves.append((12, worker.start))
            elif not worker.task.done():
                if worker.inside and not worker.leave.is_set():
                    moves.append((12, worker.leave.set))
                if worker.cancelled < 2:
                    moves.append((1, worker.cancel))
        if timeout is not None and timeout < LEASE / 100:
            moves.append((5, partial(self.pass_time, timeout)))
        if self.faults:
            moves.append((1, self.toggle))
        return moves

    def pass_time(self, timeout: float) -> None:
        self.gate.time += timeout

    def toggle(self) -> None:
        """Nobody can connect, or everybody can again."""
        self.gate.refuse = not self.gate.refuse and self.random.random() < 0.2

    def calm_down(self) -> None:
        """No more faults. What is still in flight on lost connections arrives now or never."""
        self.gate.refuse = False
        for pipe in list(self.gate.pipes):
            if pipe.lost:
                while pipe.up and self.random.random() < 0.7:
                    pipe.deliver_up()
                pipe.forget()
        self.gate.choose = self.gate.calm
        self.done.set_result(None)


def _again(move: Callable[[], object]) -> bool:
    """Whether a connection can do the same once more."""
    pipe = getattr(move, "__self__", None)
    if not isinstance(pipe, Pipe):
        return False
    return bool((move == pipe.deliver_up and pipe.up) or (move == pipe.deliver_down and pipe.down))


def describe(move: Callable[[], object]) -> str:
    """Say in a line what a move does."""
    target = move.func if isinstance(move, partial) else move
    owner = getattr(target, "__self__", None)
    name = getattr(target, "__name__", repr(target))
    if not isinstance(owner, Pipe):
        return f"{name} {owner!r}" if isinstance(owner, Worker) else name
    number = owner._gate.pipes.index(owner)
    what: object = ""
    if name == "deliver_up":
        words = owner.up[0]
        called = words[0] in (b"EVALSHA", b"EVAL")
        what = (KINDS.get(sha(words)), *words[7:]) if called else words[:4]
    elif name == "deliver_down":
        what = owner.down[0][:100]
    return f"{name} {number}{' (lost)' if owner.lost else ''} {what}"


Subject: TypeAlias = Callable[[Gate, Any, int, bool], Schedule[Any]]
"""Makes a schedule of its kind, of gate, server and seed, that prints what happens or not."""


def run(private: EmbeddedServer, subject: Subject, seeds: range, trace: bool = False) -> Counter[str]:
    """Run these schedules; return what happened in them, by kind."""
    happened: Counter[str] = Counter()
    with redis.Redis(unix_socket_path=private.unix_socket) as server:
        for seed in seeds:
            if seed % 10 == 0 or seed == seeds.start:
                for name in SCRIPTS:
                    server.script_load(load(name).source)
            with Gate(private.unix_socket) as gate:
                schedule = subject(gate, server, seed, trace)
                schedule.run()
            happened += schedule.happened
    return happened
