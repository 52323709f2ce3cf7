"""Random schedules of tasks that want a lock and share what their process has of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from redis_sync_aio import AsyncLock, Coordinator
from redis_sync_aio.types import GuardingLease

from ..support.inside import TaskGrant, Ticket, hub_of, link_of, tuned, was_used
from .gate import Command, Gate, Pipe
from .schedule import KINDS, LEASE, Subject, sha
from .schedule_locks import IDENTITIES, KEYS, NAME, WAYS, Acquisitions, Door, Holder, Lock

PUSHES: tuple[tuple[Literal["always", "never"], ...], ...] = (
    ("always", "always"),
    ("always", "always", "always"),
    ("always", "never"),
    ("always",),
)
LINGERS = (0.0, 0.0, 1.0)
SLICES = (0.005, 1.0, LEASE)


def prefix(sync: Coordinator) -> bytes:
    return hub_of(sync).endpoint_of(KEYS).token_prefix


class SharedLock(Lock):
    """A lock whose base does not rest, so that it is free when its last lease is released."""

    def door(self, sync: Coordinator, weight: int) -> Door:
        return door(sync, 0.0)


def door(sync: Coordinator, linger: float) -> Door:
    lock = AsyncLock(sync, NAME, ttl=LEASE, share=True, linger=linger)
    return Door(lock.acquire, lock.try_acquire)


class Regular(Holder):
    """One task that wants it a few times in a row."""

    times = 1

    async def run(self) -> str:
        for _ in range(self.times - 1):
            await super().run()
        return await super().run()


class Sharings(Acquisitions):
    """A few tasks of a few coordinators share the same.

    The bound on turns. A process *knows* that others wait when one of their tickets is queued and nothing is in flight
    on its connection, which is up. (What the process sends leaves at the end of a turn of the loop; a task may enter
    several times before that.) From then on it hands its base on ``burst`` times; and one task may have it by then that
    did not run since. So of all tasks that enter by one base while the process knows, there are ``burst`` + 1 at most,
    until a renewal says that nobody waits any more.
    """

    def __init__(self, gate: Gate, server: Any, seed: int, trace: bool = False) -> None:
        super().__init__(SharedLock(), gate, server, seed, trace)
        self.known: Counter[bytes] = Counter()
        """How many entered by the base of that token while their process knew."""
        self.entered: set[bytes] = set()

    def begin(self) -> Sequence[Holder]:
        options: dict[str, Any] = {"claim": LEASE, "retry_for": 1e6, "response_timeout": 2 if self.faults else 1e6}
        choice = self.random.choice
        self.syncs = [
            tuned(self.gate.client(), push=push, burst=self.random.randint(1, 4), slice=choice(SLICES), **options)
            for push in choice(PUSHES)
        ]
        return [self.holder(number) for number in range(self.random.randint(3, 9))]

    def holder(self, number: int) -> Holder:
        sync, linger = self.random.choice(self.syncs), self.random.choice(LINGERS)
        way = self.random.choice(WAYS if self.faults else (*WAYS, *IDENTITIES))
        worker = Regular(self, number, door(sync, linger), way, 1)
        worker.times = self.random.choice((1, 1, 3))
        return worker

    def permits(self, pipe: Pipe, words: Command) -> bool:
        if words[0] in (b"EVALSHA", b"EVAL") and KINDS.get(sha(words)) == "lock/renew":
            self.known.pop(words[7], None)
        return super().permits(pipe, words)

    def check_entry(self, holder: Holder, lease: GuardingLease) -> None:
        super().check_entry(holder, lease)
        grant = lease._grant
        if not isinstance(grant, TaskGrant):
            return
        token = grant.wire_token
        self.happened["handed on"] += token in self.entered
        self.entered.add(token)
        sync = next(sync for sync in self.syncs if was_used(sync) and token.startswith(prefix(sync)))
        if self.knows(sync):
            self.known[token] += 1
            self.happened["in turn"] += 1
            most = hub_of(sync).options.burst + 1
            assert self.known[token] <= most, f"P2: {holder} is one too many while others wait"

    def knows(self, sync: Coordinator) -> bool:
        """Whether others wait, and the process of ``sync`` has heard all that there is to hear."""
        tickets = self.server.zrange(KEYS.queue, 0, -1)
        if all(found and found.token.startswith(prefix(sync)) for found in map(Ticket.parse, tickets)):
            return False
        wire = link_of(sync)._connection
        pipe = wire and wire._transport
        if wire is None or wire.pending or not isinstance(pipe, Pipe):
            return False
        return pipe.subscribed and not (pipe.lost or pipe.ended or pipe.up or pipe.down)


SHARED_LOCK: Subject = partial(Sharings)
