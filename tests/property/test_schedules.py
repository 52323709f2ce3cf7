"""B1, B2, B4, C1, C2, C7: random schedules, in simulation (see `tests/support/gate.py`).

A few tasks of a few coordinators want one lock. A seeded choice decides what happens next: which connection gets
its next command or frame through, or is cut, whether the server notices, what was under way on it arriving late or
never; who starts, leaves, is cancelled; that time passes, and so timeouts, retries and healing. Afterwards
the gate is calm, and everything has to come to a good end.

    REDIS_SYNC_AIO_SCHEDULE=1234 python -m pytest tests/property/test_schedules.py -k random -s

runs that one schedule and prints what happens in it.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from redis_sync_aio import AsyncLock, Coordinator
from redis_sync_aio._engine.lua import LuaEngine
from redis_sync_aio._link.call import Call
from redis_sync_aio._link.plain import PlainExecutor
from redis_sync_aio._waiting.local import LocalName
from redis_sync_aio._waiting.ticket import Ticket
from redis_sync_aio.embedded import EmbeddedServer

from ..support.gate import Command, Gate, Pipe
from ..support.mutants import Mutant
from ..support.schedule import KINDS, NAME, run

SCHEDULES = 2000


@pytest.fixture(scope="module")
def private() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


def test_random_schedules(private: EmbeddedServer) -> None:
    """0 ghosts, 0 stuck, 0 swallowed cancellations, 0 overlaps in 2,000 schedules."""
    if seed := os.environ.get("REDIS_SYNC_AIO_SCHEDULE"):
        print(run(private, range(int(seed), int(seed) + 1), trace=True))
        return
    happened = run(private, range(SCHEDULES))
    print(happened)
    assert happened["cancelled"] > SCHEDULES
    assert happened["held"] > SCHEDULES
    assert happened["late"] > 5
    assert min(happened["timeout"], happened["taken"]) > 100


def elsewhere(
    self: LuaEngine,
    keys: Any,
    token: bytes,
    ticket: bytes,
    sent: float,
    expires: float,
    done: Any,
    about: object = None,
    pending: bool = False,
) -> Call:
    """As `LuaEngine.release`, but an undo overtakes what it undoes: another connection, and no word of it."""
    call = Call(keys, self._scripts[keys.family].release, (token, ticket, b"0"), sent, expires, done)
    call.about = about
    executor: Any = self.executor
    (PlainExecutor(executor._client, 2) if ticket else executor).send(call)
    return call


BROKEN: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "nothing is undone": lambda patch: patch.setattr(LocalName, "undo", lambda *_, **__: None),
    "the undo may come first": lambda patch: patch.setattr(LuaEngine, "release", elsewhere),
    "the undo leaves no tombstone": Mutant(LuaEngine, "release", 'b"1" if pending else b"0"', 'b"0"').apply,
    "a grant that meets the cancellation stays": Mutant(Ticket, "abandon", "self._give_back(self._lease)").apply,
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_schedules_find_what_is_broken(
    private: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None]
) -> None:
    broken(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError)) as raised:
        run(private, range(SCHEDULES))
    assert raised.type is TimeoutError or "left behind" in str(raised.value), "nobody can get in, or a ghost stays"
    print(raised.value, *raised.value.__notes__)


def test_who_gave_up_does_not_ask_again(private: EmbeddedServer) -> None:
    """P5: of two identities that gave up, one is cleaned up before the other: that is no reason to look again.

    It would queue the other anew, behind its clean-up, where a grant would find nobody.
    """
    asked: Counter[bytes] = Counter()

    def count(_: Pipe, words: Command) -> bool:
        if words[0] == b"EVALSHA" and KINDS[words[1]] == "acquire":
            asked[words[7]] += 1
        return True

    async def main() -> None:
        async with gate.client() as client, Coordinator(client) as sync:
            lock = AsyncLock(sync, NAME)
            async with lock:
                waiting = [asyncio.create_task(lock.acquire(identity=who)) for who in ("first", "second")]
                while not any(pipe.up for pipe in gate.pipes):
                    await asyncio.sleep(0)
                for task in waiting:
                    task.cancel()
                await asyncio.sleep(1)
                assert (asked[b"first"], asked[b"second"]) == (1, 1)

    with Gate(private.unix_socket) as gate:
        gate.permits = count
        gate.run(main)
