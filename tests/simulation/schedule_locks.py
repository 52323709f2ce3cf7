"""Random schedules of tasks that want a lock, permits, or one side of a read/write lock."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from redis_sync_aio import (
    AcquireTimeout,
    AsyncLock,
    AsyncReadWriteLock,
    AsyncSemaphore,
    Coordinator,
    Unreachable,
)
from redis_sync_aio.types import GuardingLease

from ..support.inside import (
    WRITER_WEIGHT,
    Acquiring,
    Engine,
    PermitKeys,
    Ticket,
    hub_of,
    lock_keys,
    permit_keys,
    tuned,
    was_used,
)
from .gate import Command, Gate, Pipe
from .schedule import KINDS, LEASE, Schedule, Subject, Worker, settled, sha

NAME = "s"
KEYS = lock_keys(NAME.encode())

Way = Literal["hold", "timeout", "try", "identity"]
WAYS: tuple[Way, ...] = ("hold", "hold", "hold", "timeout", "try")
IDENTITIES: tuple[Way, ...] = ("identity", "identity", "identity")
"""Only where no answer is lost: then the grant of a cancelled request cannot be told from one that lives elsewhere."""
PUSHES: tuple[tuple[Literal["always", "never"], ...], ...] = (
    ("always", "always"),
    ("always", "never"),
    ("never", "never"),
    ("always",),
    ("never",),
)

TALKING = 0.8
"""The commands of a talk leave together, and mostly get through together."""


class Door(NamedTuple):
    """The two ways in."""

    hold: Callable[..., Acquiring[GuardingLease]]
    try_acquire: Callable[..., Coroutine[Any, Any, GuardingLease | None]]


class Wanted(ABC):
    """What is asked for, and how many may have it at a time."""

    limit = 1
    weights: Sequence[int] = (1,)
    fence_each = True
    """Every lease has a fence of its own."""
    burst = 0.0
    """See `Schedule`."""

    @abstractmethod
    def door(self, sync: Coordinator, weight: int) -> Door:
        """Return how it is entered."""

    @abstractmethod
    def left(self, server: Any) -> object:
        """Return what is left on the server but should not be; nothing, if all is well."""

    @abstractmethod
    def late(self, schedule: Acquisitions) -> Callable[[Pipe, Command], bool]:
        """Return what knows whether a command may still arrive."""


class Lock(Wanted):
    """A lock, by scripts or by talks."""

    def __init__(self, engine: Engine = "auto") -> None:
        self.engine: Engine = engine
        self.burst = TALKING if engine == "watch" else 0.0

    def door(self, sync: Coordinator, weight: int) -> Door:
        lock = AsyncLock(sync, NAME, ttl=LEASE, engine=self.engine)
        return Door(lock.acquire, lock.try_acquire)

    def left(self, server: Any) -> object:
        left = set(server.keys(f"*{NAME}*")) - {KEYS.fence}
        return left and f"{left}, held by {server.get(KEYS.name)!r}"

    def late(self, schedule: Acquisitions) -> Callable[[Pipe, Command], bool]:
        if self.engine == "watch":
            return LateTalks(schedule, KEYS.queue).permits
        return LateRequests(schedule).permits


class Permits(Wanted):
    """Permits of a semaphore, or of a read/write lock."""

    keys: PermitKeys = permit_keys(NAME.encode(), "sem")

    def __init__(self, limit: int = 1, weights: Sequence[int] = (1,), engine: Engine = "auto") -> None:
        self.limit, self.weights = limit, weights
        self.engine: Engine = engine
        self.burst = TALKING if engine == "watch" else 0.0

    def door(self, sync: Coordinator, weight: int) -> Door:
        permits = AsyncSemaphore(sync, NAME, limit=self.limit, ttl=LEASE, engine=self.engine)
        return Door(partial(permits.acquire, weight=weight), partial(permits.try_acquire, weight=weight))

    def left(self, server: Any) -> object:
        permits, state = self.keys.all[:2]
        found = server.hgetall(state)
        held = [token for token, of in found.items() if token.startswith(b"=") and not of.startswith(b"0 ")]
        waiting = set(server.keys(f"*{NAME}*")) - {permits, state}
        return held or waiting or (int(found.get(b"used", 0)) and f"used: {found[b'used']}")

    def late(self, schedule: Acquisitions) -> Callable[[Pipe, Command], bool]:
        if self.engine == "watch":
            return LateTalks(schedule, None).permits
        return LatePermits(schedule, self.keys).permits


class ReadWrite(Permits):
    """The sides of a read/write lock: readers weigh 1, a writer weighs it all."""

    keys = permit_keys(NAME.encode(), "rw")
    fence_each = False

    def __init__(self) -> None:
        super().__init__(WRITER_WEIGHT, (1, 1, WRITER_WEIGHT))

    def door(self, sync: Coordinator, weight: int) -> Door:
        lock = AsyncReadWriteLock(sync, NAME, ttl=LEASE)
        side = lock.read() if weight == 1 else lock.write()
        return Door(side.acquire, side.try_acquire)


class LateRequests:
    """Which requests for a lock may arrive.

    One whose connection was lost, and that was answered or undone meanwhile, may not; unless its token holds the lock
    or was the last that did, or its undo found the lock free and nothing was granted since.
    """

    def __init__(self, schedule: Acquisitions) -> None:
        self.schedule, self.server = schedule, schedule.server
        self.over: set[bytes] = set()  # tokens of requests that were undone or answered for good
        self.undone = b""
        self.spent: tuple[bytes, bytes | None] = b"", None

    def permits(self, pipe: Pipe, words: Command) -> bool:
        if words[0] not in (b"EVALSHA", b"EVAL") or len(words) < 9:  # a look at who holds it says no more
            return True
        kind, token, ticket = KINDS.get(sha(words)), words[7], words[8]
        if self.undone:  # by the last command
            if not self.server.exists(KEYS.name, KEYS.queue):
                self.spent = self.undone, self.server.get(KEYS.fence)
            self.undone = b""
        if kind == "lock/release":
            found = Ticket.parse(ticket)
            self.over.update({token, found.token if found else b""})
            self.undone = token if ticket else b""
        elif kind == "lock/acquire":
            if pipe.lost and token in self.over:
                holder, fence = self.server.mget(KEYS.name, KEYS.fence)
                allowed = token in (holder, (fence or b"")[17:]) or (token, fence) == self.spent
                self.schedule.happened["late" if allowed else "too late"] += 1
                return allowed
            if not words[9]:
                self.over.add(token)  # it is not repeated once it is answered, and not undone when it is refused
        return True


class LatePermits:
    """Which requests for permits may arrive: all, but those that were tried once, refused, and so never undone."""

    def __init__(self, schedule: Acquisitions, keys: PermitKeys) -> None:
        self.schedule, self.server, self.keys = schedule, schedule.server, keys
        self.tried: set[bytes] = set()
        self.released: set[bytes] = set()

    def permits(self, pipe: Pipe, words: Command) -> bool:
        if words[0] not in (b"EVALSHA", b"EVAL") or words[2] == b"0":  # without keys: of a handshake
            return True
        kind, token = KINDS.get(sha(words)), words[7]
        if kind == "permits/release":
            self.released.add(token)
        elif kind == "permits/acquire":
            if pipe.lost and token in self.tried | self.released:
                known = self.server.zscore(self.keys.all[0], token) is not None
                allowed = known or token in self.released
                self.schedule.happened["late" if allowed else "too late"] += 1
                return allowed
            if not words[9]:
                self.tried.add(token)
        return True


class LateTalks:
    """Which EXEC of a talk may arrive: all, but those that queue a ticket for a lock that was given up meanwhile.

    Whatever else was done meanwhile has changed a watched key. To give up a ticket that is not there changes none of a
    lock; permits get a tombstone.
    """

    def __init__(self, schedule: Acquisitions, queue: bytes | None) -> None:
        self.schedule, self.queue = schedule, queue

    def permits(self, pipe: Pipe, words: Command) -> bool:
        if words[0] != b"EXEC" or not pipe.lost or pipe.queued is None:
            return True
        tickets = {words[3] for words in pipe.queued if words[:2] == (b"ZADD", self.queue)}
        started = [sync for sync in self.schedule.syncs if was_used(sync)]
        wanted = {ticket._member for sync in started for ticket in hub_of(sync).acquisitions.values()}
        allowed = tickets <= wanted
        self.schedule.happened["late" if allowed else "too late"] += 1
        return allowed


class Holder(Worker):
    """One task that wants it."""

    def __init__(self, schedule: Acquisitions, number: int, door: Door, way: Way, weight: int) -> None:
        super().__init__(number, way)
        self.schedule, self.door, self.weight = schedule, door, weight

    async def run(self) -> str:
        try:
            if self.way == "try":
                lease = await self.door.try_acquire()
                if lease is None:
                    return "taken"
                try:
                    await self.enter(lease)
                finally:
                    await lease.release()
            else:
                timeout = random.choice((0.01, 0.3, 3.0)) if self.way == "timeout" else None
                identity = f"id {self.number}" if self.way == "identity" else None
                async with self.door.hold(timeout=timeout, identity=identity) as lease:
                    await self.enter(lease)
        except AcquireTimeout:
            assert self.way == "timeout"
            return "timeout"
        except Unreachable:
            assert self.way == "timeout", "there is always time left"
            return "unreachable"
        return "held"

    async def enter(self, lease: GuardingLease) -> None:
        self.schedule.check_entry(self, lease)
        self.inside = True
        try:
            await self.leave.wait()
            lease.check()
        finally:
            self.inside = False


class Acquisitions(Schedule[Holder]):
    """A few tasks of a few coordinators want the same."""

    def __init__(self, wanted: Wanted, gate: Gate, server: Any, seed: int, trace: bool = False) -> None:
        super().__init__(gate, server, seed, trace)
        self.wanted = wanted
        self.burst = wanted.burst
        self.syncs: list[Coordinator] = []
        self.fence = 0  # the highest of those who had it alone
        self.fences: set[int] = set()
        self.late = wanted.late(self)

    def begin(self) -> Sequence[Holder]:
        options: dict[str, Any] = {"claim": LEASE, "retry_for": 1e6, "response_timeout": 2 if self.faults else 1e6}
        self.syncs = [tuned(self.gate.client(), push=push, **options) for push in self.random.choice(PUSHES)]
        return [self.holder(number) for number in range(self.random.randint(2, 6))]

    def holder(self, number: int) -> Holder:
        sync = self.random.choice(self.syncs)
        way = self.random.choice(WAYS if self.faults else (*WAYS, *IDENTITIES))
        weights = self.wanted.weights
        weight = self.random.choice(weights) if len(weights) > 1 else weights[0]
        return Holder(self, number, self.wanted.door(sync, weight), way, weight)

    def permits(self, pipe: Pipe, words: Command) -> bool:
        return super().permits(pipe, words) and self.late(pipe, words)

    # -- how it has to be ----------------------------------------------------------------------------------

    def check_entry(self, holder: Holder, lease: GuardingLease) -> None:
        """P1, P8: there is room, and the fence has risen."""
        inside = [other for other in self.workers if other.inside]
        held = sum(other.weight for other in inside)
        assert held + holder.weight <= self.wanted.limit, f"P1: {holder} and {inside} together"
        assert self.check_fence(lease, holder.weight), "P8"

    def check_fence(self, lease: GuardingLease, weight: int) -> bool:
        fence, alone = lease.fence, weight == self.wanted.limit
        if self.wanted.fence_each and fence in self.fences:
            return False
        self.fences.add(fence)
        risen = fence > self.fence if alone or self.wanted.fence_each else fence >= self.fence
        if alone:
            self.fence = fence
        return risen

    async def check_end(self) -> None:
        for sync in self.syncs:
            await settled(sync)
        await self.check_free()

    async def check_free(self) -> None:
        """P5: nothing is left on the server, and the next one has all of it immediately."""
        left = self.wanted.left(self.server)
        assert not left, f"left behind: {left}"
        for sync in self.syncs:
            before = self.gate.time
            lease = await self.wanted.door(sync, self.wanted.limit).try_acquire()
            assert lease is not None, "P5: nothing is left, and it cannot be acquired"
            assert self.gate.time - before < 3, "a lost connection is noticed, and there is another"
            assert self.check_fence(lease, self.wanted.limit), "P8"
            await lease.release()

    async def close(self) -> None:
        for sync in self.syncs:
            await sync.aclose()
            await sync.client.aclose()


LOCK: Subject = partial(Acquisitions, Lock())
LOCK_BY_WATCH: Subject = partial(Acquisitions, Lock("watch"))
PERMITS_BY_WATCH: Subject = partial(Acquisitions, Permits(3, (1, 2, 3), "watch"))
ONE_PERMIT: Subject = partial(Acquisitions, Permits())
PERMITS: Subject = partial(Acquisitions, Permits(3, (1, 2, 3)))
READ_WRITE: Subject = partial(Acquisitions, ReadWrite())
