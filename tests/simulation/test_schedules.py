"""B1, B2, B4, C1, C2, C7, E8: random schedules, in simulation (see `tests/simulation/gate.py`).

A few tasks of a few coordinators want the same: a lock, permits, a side of a read/write lock; or they increment a
counter by transactions. A seeded choice decides what happens next: which connection gets its next command or frame
through, or is cut, whether the server notices, what was in flight on it arriving late or never; who starts, leaves, is
cancelled; that time passes, and so timeouts, retries and healing. Afterwards the gate is calm, and everything has to
come to a good end.

    python -m pytest tests/simulation/test_schedules.py --schedules=2000

runs so many of each kind, and

    python -m pytest tests/simulation/test_schedules.py --schedule=1234 -k "random and permits" -s

runs that one schedule and prints what happens in it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from redis_sync_aio import AsyncLock, Coordinator, LeaseLost, Unreachable
from redis_sync_aio._client.redis_py import pooled
from redis_sync_aio._engine import commands, watch_dialogue
from redis_sync_aio._leases.acquisition import Acquisition
from redis_sync_aio._leases.cohort import Cohort
from redis_sync_aio._leases.resource import Resource
from redis_sync_aio._leases.shared_grant import Holdings
from redis_sync_aio._transactions.attempts import Attempts
from redis_sync_aio._transactions.exec_replies import CommitMarker
from redis_sync_aio._transactions.watch_session import WatchSession
from redis_sync_aio.embedded import EmbeddedServer

from ..support.inside import Call, Commands, Script, load
from ..support.mutants import Mutant
from ..support.options import OPTIONS
from ..support.script_mutants import mutated
from .gate import Command, Gate, Pipe
from .schedule import KINDS, Subject, run
from .schedule_locks import LOCK, LOCK_BY_WATCH, NAME, ONE_PERMIT, PERMITS, PERMITS_BY_WATCH, READ_WRITE
from .schedule_sharing import SHARED_LOCK
from .schedule_transactions import BY_TURNS, TRANSACTION

SUBJECTS: dict[str, tuple[Subject, int]] = {
    "lock": (LOCK, 150),
    "lock with watch": (LOCK_BY_WATCH, 40),
    "shared lock": (SHARED_LOCK, 100),
    "one permit": (ONE_PERMIT, 50),
    "permits": (PERMITS, 60),
    "permits with watch": (PERMITS_BY_WATCH, 50),
    "read and write": (READ_WRITE, 60),
    "transaction": (TRANSACTION, 60),
    "transaction by turns": (BY_TURNS, 30),
}
"""And how many schedules of each with --run-ci; a third of them without it. --schedules overrules that."""


@pytest.fixture(scope="module")
def private() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


AT_ONCE = 250
"""So many schedules are one test, but for the first."""
ENOUGH = {"lock": 1500}
"""In so many schedules even what is rare happens: a grant that arrives too late. 500, unless the subject is here: of
1,000 schedules of a lock about 2 admit a late request."""


def parts(subject: str) -> Iterator[range]:
    """The seeds of the schedules of one subject, test by test. The first ones show whether enough happens in them."""
    number = OPTIONS.schedules or SUBJECTS[subject][1] // (1 if OPTIONS.run_ci else 3)
    first = min(number, max(SUBJECTS[subject][1], ENOUGH.get(subject, 500)))
    yield range(first)
    for start in range(first, number, AT_ONCE):
        yield range(start, min(start + AT_ONCE, number))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("subject", "seeds"),
    [
        pytest.param(subject, seeds, id=f"{subject}-{seeds.start}" if seeds.start else subject)
        for subject in SUBJECTS
        for seeds in parts(subject)
    ],
)
def test_random_schedules(private: EmbeddedServer, subject: str, seeds: range) -> None:
    """0 ghosts, 0 stuck, 0 swallowed cancellations, 0 overlaps, 0 transactions lost or done twice."""
    make, _ = SUBJECTS[subject]
    if OPTIONS.schedule is not None:
        print(run(private, make, range(OPTIONS.schedule, OPTIONS.schedule + 1), trace=True))
        return
    happened, number = run(private, make, seeds), len(seeds)
    print(happened)
    if seeds.start or number < SUBJECTS[subject][1]:
        return
    assert happened["cancelled"] > number
    if subject.startswith("transaction"):
        assert happened["committed"] > number
        assert min(happened["conflict"], happened["recovered"], happened["unknown"]) > number / 40
    else:
        assert happened["held"] > number / 3
        assert min(happened["timeout"], happened["taken"]) > number / 20
        if subject == "shared lock":  # few requests, so few of them late; but then, few grants need one
            assert happened["handed on"] > number
            assert happened["in turn"] > number / 5
        elif number >= ENOUGH.get(subject, 500):
            assert happened["late"]


async def send_once(client: Any, words: tuple[Any, ...]) -> Any:
    """Run one command on a pooled connection, once."""
    connection: Any = await pooled(client)
    try:
        await connection.send_command(*words)
        return await connection.read_response(disable_decoding=True)
    finally:
        await client.connection_pool.release(connection)


def elsewhere(
    self: Commands,
    keys: Any,
    token: bytes,
    call: Call,
    *,
    ticket: bytes = b"",
    **_: object,
) -> None:
    """As `Commands.release`, but an undo overtakes what it undoes: another connection, and no word of it."""
    words = (token, ticket, b"0")
    call.of(keys, load(keys.kind.release), words)
    link: Any = self.link
    if ticket:
        sending = asyncio.create_task(send_once(link._connector._client, call.command(with_source=True)))
        sending.add_done_callback(lambda sent: _settle(call, sent))
    else:
        link.send(call)


def _settle(call: Call, sent: asyncio.Task[Any]) -> None:
    if sent.cancelled() or sent.exception() is not None:
        call.fail(Unreachable("the connection was lost"))
    else:
        call.answer(sent.result())


def in_script(name: str, old: str, new: str) -> Callable[[pytest.MonkeyPatch], None]:
    """As `Mutant`, of a script."""

    def changed(wanted: str) -> Script:
        return mutated(name, old, new) if wanted == name else load(wanted)

    return lambda patch: patch.setattr(commands, "load", changed)


def undo_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Resource, "undo", lambda *_, **__: None)


def leave_no_tombstone(patch: pytest.MonkeyPatch) -> None:
    Mutant(Commands, "release", 'b"1" if pending else b"0"', 'b"0"').apply(patch)


def only_looked_at(patch: pytest.MonkeyPatch) -> None:
    """The marker is taken for void when it is not there, and nothing makes it so."""
    Mutant(CommitMarker, "_ask", 'self._set(VOID, "NX")', '("PING",)').apply(patch)
    Mutant(CommitMarker, "find_out", "value == VOID", "value != DONE").apply(patch)


BROKEN: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "nothing is undone": ("lock", undo_nothing),
    "the undo may come first": ("lock", lambda patch: patch.setattr(Commands, "release", elsewhere)),
    "a grant that meets the cancellation stays": (
        "lock",
        Mutant(Acquisition, "task_cancelled", "self._decline(self._lease)").apply,
    ),
    "the budget of a shared lock does not count": (
        "shared lock",
        Mutant(Holdings, "_may_go_on", "grant.budget > 0", "True").apply,
    ),
    "a task that is cancelled keeps what it was handed": (
        "shared lock",
        Mutant(Cohort, "task_cancelled", "lease.give_back()").apply,
    ),
    "by talks nothing is undone": ("lock with watch", undo_nothing),
    "a commit that failed is taken for done": (
        "lock with watch",
        Mutant(
            watch_dialogue, "commit", "return None if replies is None else", "return [] if replies is None else"
        ).apply,
    ),
    "a permit is not undone": ("one permit", undo_nothing),
    "a permit that is undone leaves no tombstone": ("one permit", leave_no_tombstone),
    "there is always room for one": ("one permit", in_script("permits/acquire", "used + weight <= limit", "true")),
    "of several permits none is undone": ("permits", undo_nothing),
    "a heavy permit is as light as any": (
        "permits",
        in_script("permits/acquire", "used + weight <= limit", "used + 1 <= limit"),
    ),
    "by talks no permit is undone": ("permits with watch", undo_nothing),
    "a reader is not undone": ("read and write", undo_nothing),
    "readers do not keep a writer out": (
        "read and write",
        in_script("permits/acquire", "used + weight <= limit", "used + 1 <= limit"),
    ),
    "nothing is watched": (
        "transaction",
        Mutant(WatchSession, "send", '("WATCH", *self._to_watch)', '("PING",)').apply,
    ),
    "what is unknown is repeated": (
        "transaction",
        Mutant(Attempts, "_unanswered", "elif executed is None and not self._terms.idempotent:", "elif False:").apply,
    ),
    "the turn is not given back": ("transaction by turns", Mutant(Attempts, "_finish", "self._turn.give_back()").apply),
    "a marker is only looked at": ("transaction", only_looked_at),
}
"""What is broken, and which schedules find out."""


@pytest.mark.ci
@pytest.mark.parametrize("broken", BROKEN)
def test_schedules_find_what_is_broken(private: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    subject, breaks = BROKEN[broken]
    breaks(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError, LeaseLost)) as raised:
        run(private, SUBJECTS[subject][0], range(2000))
    found = raised.type is not AssertionError or str(raised.value).startswith(
        ("left behind", "P1", "P2", "P5", "P8", "E8")
    )
    assert found, "no task gets in, a ghost stays, two are in, or a fence falls"
    print(str(raised.value)[:200], *raised.value.__notes__)


def test_an_identity_that_gave_up_does_not_ask_again(private: EmbeddedServer) -> None:
    """P5: of two identities that gave up, one is cleaned up before the other: that is no reason to look again.

    It would queue the other again, behind its clean-up, where a grant would find nobody.
    """
    asked: Counter[bytes] = Counter()

    def count(_: Pipe, words: Command) -> bool:
        if words[0] == b"EVALSHA" and KINDS[words[1]] == "lock/acquire":
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
