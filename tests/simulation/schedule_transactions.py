"""Random schedules of tasks that increment a counter by transactions, and sign a ledger with the same EXEC."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

from redis.asyncio import Redis

from redis_sync_aio import Coordinator, OutcomeUnknown, transaction
from redis_sync_aio.types import Transaction

from ..support.inside import lock_keys, turn_key
from .gate import Command, Gate, Pipe
from .schedule import KINDS, LEASE, Schedule, Subject, Worker, settled, sha

COUNT, LEDGER = "n", "ledger"
WAYS = ("plain", "exactly once", "exactly once")
TURN = lock_keys(turn_key(COUNT.encode())).all[:2]
EACH = 2
"""So many transactions one after the other."""


async def increment(tx: Transaction) -> int:
    count = int(await tx.get(COUNT) or 0) + 1
    tx.multi()
    tx.set(COUNT, count)
    return count


class Writer(Worker):
    """One task with a few transactions. Before each commit it waits until it may go on."""

    def __init__(self, schedule: Transactions, number: int, client: Redis | Coordinator, way: str) -> None:
        super().__init__(number, way)
        self.schedule, self.client = schedule, client
        self.committed: list[str] = []

    async def run(self) -> str:
        outcome = "committed"
        for turn in range(EACH):
            name = f"{self.number}.{turn}"

            async def body(tx: Transaction, name: str = name) -> None:
                count = int(await tx.get(COUNT) or 0)
                self.inside = True
                try:
                    await self.leave.wait()
                finally:
                    self.inside = False
                tx.multi()
                tx.set(COUNT, count + 1)
                tx.rpush(LEDGER, name)

            try:
                done = await transaction(
                    self.client,
                    body,
                    COUNT,
                    attempts=10**6,
                    timeout=1e6,
                    exactly_once=self.way == "exactly once",
                    escalate_after=1 if self.schedule.turns else None,
                )
            except OutcomeUnknown:
                outcome = "unknown"
            else:
                self.committed.append(name)
                self.schedule.happened["conflict"] += done.conflicts
                self.schedule.happened["recovered"] += done.recovered
                self.schedule.happened["escalated"] += done.escalated
        return outcome


class Transactions(Schedule[Writer]):
    """A few tasks of a few clients increment the same counter."""

    burst = 0.6

    def __init__(self, gate: Gate, server: Any, seed: int, trace: bool = False, *, turns: bool = False) -> None:
        super().__init__(gate, server, seed, trace)
        self.turns = turns
        self.clients: list[Redis] = []
        self.syncs: list[Coordinator] = []

    def run(self) -> None:
        with patch.multiple(import_module("redis_sync_aio._transaction"), TURN_TTL=LEASE, TURN_MAX=LEASE):
            super().run()

    def begin(self) -> Sequence[Writer]:
        timeout = 2 if self.faults else None
        self.clients = [self.gate.client(socket_timeout=timeout) for _ in range(self.random.randint(1, 2))]
        if self.turns:
            self.syncs = [Coordinator(client, claim=LEASE, retry_for=1e6) for client in self.clients]
        choice: Sequence[Redis | Coordinator] = self.syncs or self.clients
        return [
            Writer(self, number, self.random.choice(choice), self.random.choice(WAYS))
            for number in range(self.random.randint(2, 5))
        ]

    def permits(self, pipe: Pipe, words: Command) -> bool:
        """A turn that is taken late ends with its ttl: no schedule lives to see that."""
        late = (
            pipe.lost
            and words[0] in (b"EVALSHA", b"EVAL")
            and KINDS.get(sha(words)) in ("lock/acquire", "lock/acquire_all")
        )
        return super().permits(pipe, words) and not late

    async def check_end(self) -> None:
        """E8: all that was reported was done, nothing twice, no update lost; no connection is in use, or watches."""
        for sync in self.syncs:
            await settled(sync)
        await asyncio.sleep(1)  # what was in flight has arrived
        left = self.server.exists(*TURN)
        assert not left, "left behind: the turn, or a place in its queue"
        for sync in self.syncs:
            await sync.aclose()
        signed = [name.decode() for name in self.server.lrange(LEDGER, 0, -1)]
        count = int(self.server.get(COUNT) or 0)
        assert len(signed) == len(set(signed)), f"E8: done twice: {signed}"
        assert count == len(signed), f"E8: lost updates: {count} of {signed}"
        assert {name for worker in self.workers for name in worker.committed} <= set(signed), "E8: reported, not done"
        for client in self.clients:
            pool: Any = client.connection_pool
            assert not pool._in_use_connections, "E8: left in use"
        watching = [pipe for pipe in self.gate.pipes if pipe.watching and not pipe.lost]
        assert not watching, "E8: left watching"
        for number, client in enumerate(self.clients):
            before = self.gate.time
            assert (await transaction(client, increment, COUNT)).value == count + number + 1
            assert self.gate.time - before < 3, "a lost connection is noticed, and there is another"

    async def close(self) -> None:
        for client in self.clients:
            await client.aclose()


TRANSACTION: Subject = Transactions
BY_TURNS: Subject = partial(Transactions, turns=True)
