"""A random schedule of a few tasks that want one lock, in simulation (see `gate.py`); and how it has to end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from hashlib import sha1
from typing import Any, Literal

import redis

from redis_sync_aio import AcquireTimeout, AsyncLock, Coordinator, Lease, Unreachable
from redis_sync_aio._engine.lua import ticket_token
from redis_sync_aio._keys import lock_keys
from redis_sync_aio._scripts import load
from redis_sync_aio.embedded import EmbeddedServer

from .gate import Command, Gate, Move, Pipe

NAME = "s"
KEYS = lock_keys(NAME.encode())
LEASE = 3600.0
"""Longer than any schedule: what is left behind stays, and no lease ends by itself."""
SCRIPTS = ("acquire", "release", "renew", "force", "inspect")
KINDS = {load(name).sha: name for name in SCRIPTS}

Way = Literal["hold", "timeout", "try", "identity"]
WAYS: tuple[Way, ...] = ("hold", "hold", "hold", "timeout", "try")
IDENTITIES: tuple[Way, ...] = ("identity", "identity", "identity")
"""Only where no answer is lost: then the grant of a cancelled request can not be told from one that lives elsewhere."""
PUSHES: tuple[tuple[Literal["always", "never"], ...], ...] = (
    ("always", "always"),
    ("always", "never"),
    ("never", "never"),
    ("always",),
    ("never",),
)


def sha(words: Command) -> bytes:
    """Return the SHA1 of the script that is called."""
    return words[1] if words[0] == b"EVALSHA" else sha1(words[1]).hexdigest().encode()


class Worker:
    """One task that wants the lock."""

    def __init__(self, schedule: Schedule, number: int, lock: AsyncLock, way: Way) -> None:
        self.schedule, self.number, self.lock, self.way = schedule, number, lock, way
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

    async def run(self) -> str:
        try:
            if self.way == "try":
                lease = await self.lock.try_acquire()
                if lease is None:
                    return "taken"
                async with lease_of(lease):
                    await self.inside(lease)
            else:
                timeout = random.choice((0.01, 0.3, 3.0)) if self.way == "timeout" else None
                identity = f"id {self.number}" if self.way == "identity" else None
                async with self.lock.hold(timeout=timeout, identity=identity) as lease:
                    await self.inside(lease)
        except AcquireTimeout:
            assert self.way == "timeout"
            return "timeout"
        except Unreachable:
            assert self.way == "timeout", "there is always time left"
            return "unreachable"
        return "held"

    async def inside(self, lease: Lease) -> None:
        schedule = self.schedule
        assert not schedule.inside, f"P1: {self} and {schedule.inside} at once"
        assert lease.fence > schedule.fence, "P8"
        schedule.fence = lease.fence
        schedule.inside.add(self)
        try:
            await self.leave.wait()
            lease.check()
        finally:
            schedule.inside.remove(self)


class lease_of:
    """Release at the end."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None:
        await self.lease.release()


class Schedule:
    """One run; the seed says everything about it."""

    def __init__(self, gate: Gate, server: Any, seed: int, trace: bool = False) -> None:
        self.gate, self.server, self.seed, self.trace = gate, server, seed, trace
        self.random = random.Random(seed)
        random.seed(seed)  # back-off and jitter
        self.inside: set[Worker] = set()
        self.fence = 0
        self.workers: list[Worker] = []
        self.over: set[bytes] = set()  # tokens of requests that were undone or answered for good
        self.undone = b""
        self.spent: tuple[bytes, bytes | None] = b"", None
        self.happened: Counter[str] = Counter()
        self.faults = self.random.random() < 0.8
        self.killing = self.random.random() < 0.5

    def run(self) -> None:
        self.server.flushall()
        if self.seed % 10 == 9:
            self.server.script_flush()
        self.gate.permits = self.permits
        try:
            self.gate.run(self.main)
        except BaseException as error:
            error.add_note(f"in schedule {self.seed}: run it again with REDIS_SYNC_AIO_SCHEDULE={self.seed}")
            raise

    async def main(self) -> None:
        options: dict[str, Any] = {"claim": LEASE, "retry_for": 1e6, "response_timeout": 2 if self.faults else 1e6}
        syncs = [Coordinator(self.gate.client(), push=push, **options) for push in self.random.choice(PUSHES)]
        for number in range(self.random.randint(2, 6)):
            lock = AsyncLock(self.random.choice(syncs), NAME, ttl=LEASE)
            self.workers.append(
                Worker(self, number, lock, self.random.choice(WAYS if self.faults else (*WAYS, *IDENTITIES)))
            )
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
        for sync in syncs:
            await self.settled(sync)
        await self.check_free(syncs)
        for sync in syncs:
            await sync.close()
            await sync.client.aclose()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, left
        assert all(pipe.lost for pipe in self.gate.pipes), "P12: a connection that nobody closed"

    async def settled(self, sync: Coordinator) -> None:
        """Wait until all that goes on in the background is answered."""
        if sync.why_closed is None and hasattr(sync, "renewals"):
            await sync.renewals.under_way.drained(60)
            # An identity's request that was given up is undone once its answer is there.
            async with asyncio.timeout(60):
                while sync.tickets or sync.locals:
                    await asyncio.sleep(0.1)

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
        assert not self.inside

    async def check_free(self, syncs: list[Coordinator]) -> None:
        """P5: nothing is left on the server, and whoever comes next has the lock at once."""
        left = self.server.keys(f"*{NAME}*")
        assert set(left) <= {KEYS.fence}, f"left behind: {left}, held by {self.server.get(KEYS.name)!r}"
        for sync in syncs:
            before = self.gate.time
            lease = await AsyncLock(sync, NAME, ttl=LEASE).try_acquire()
            assert lease is not None
            assert self.gate.time - before < 3, "a lost connection is noticed, and there is another"
            assert lease.fence > self.fence, "P8"
            self.fence = lease.fence
            await lease.release()

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
            timeout = None
            if self.random.random() < 0.8:
                return  # else something more in the same turn

    def moves(self, timeout: float | None) -> list[Move]:
        moves = self.gate.moves(self.faults)
        for worker in self.workers:
            if worker.task is None:
                moves.append((12, worker.start))
            elif not worker.task.done():
                if worker in self.inside and not worker.leave.is_set():
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
        """No more faults. What is still under way on lost connections arrives now or never."""
        self.gate.refuse = False
        for pipe in list(self.gate.pipes):
            if pipe.lost:
                while pipe.up and self.random.random() < 0.7:
                    pipe.deliver_up()
                pipe.forget()
        self.gate.choose = self.gate.calm
        self.done.set_result(None)

    def permits(self, pipe: Pipe, words: Command) -> bool:
        """Whether a command may still arrive; those that can do harm by what the documentation says may not.

        That is a request whose connection was lost and that was answered or undone meanwhile, unless its token
        holds the lock or was the last that did, or its undo found the lock free and nothing was granted since.
        Half the users may kill their old connections.
        """
        if words[:2] == (b"CLIENT", b"KILL") and not self.killing:
            return False
        if words[0] not in (b"EVALSHA", b"EVAL"):
            return True
        kind, token, ticket = KINDS.get(sha(words)), words[7], words[8]
        if self.undone:  # by the last command
            if not self.server.exists(KEYS.name, KEYS.queue):
                self.spent = self.undone, self.server.get(KEYS.fence)
            self.undone = b""
        if kind == "release":
            self.over.update({token, ticket_token(ticket) if ticket else b""})
            self.undone = token if ticket else b""
        elif kind == "acquire":
            if pipe.lost and token in self.over:
                holder, fence = self.server.mget(KEYS.name, KEYS.fence)
                allowed = token in (holder, (fence or b"")[17:]) or (token, fence) == self.spent
                self.happened["late" if allowed else "too late"] += 1
                return allowed
            if not words[9]:
                self.over.add(token)  # it is not repeated once it is answered, and not undone when it is refused
        return True


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
        what = (KINDS.get(sha(words)), *words[7:]) if called else words[:2]
    elif name == "deliver_down":
        what = owner.down[0][:100]
    return f"{name} {number}{' (lost)' if owner.lost else ''} {what}"


def run(private: EmbeddedServer, seeds: range, trace: bool = False) -> Counter[str]:
    """Run these schedules; return what happened in them, by kind."""
    happened: Counter[str] = Counter()
    with redis.Redis(unix_socket_path=private.unix_socket) as server:
        for seed in seeds:
            for name in SCRIPTS:
                if seed % 10 == 0 or seed == seeds.start:
                    server.script_load(load(name).source)
            with Gate(private.unix_socket) as gate:
                schedule = Schedule(gate, server, seed, trace)
                schedule.run()
            happened += schedule.happened
    return happened
