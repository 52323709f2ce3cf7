"""P4, FAULTS C1-C5, D9 for the WATCH engine: every operation, with every fault at the commands of its talks.

An error answer in the place of MULTI, of a queued command or of EXEC is not tried: a real server that gives one does
not leave the transaction open behind it, as a proxy would.
"""

from __future__ import annotations

from itertools import product

import pytest

from redis_sync_aio.embedded import EmbeddedServer

from ..support.factories import WATCHED, WATCHED_LOCK, Kind
from ..support.pairwise import each_value
from ..support.proxy import DUPLICATE, Action, Match, Rule
from ..support.wire_sweep import (
    ANSWERS,
    PUSHES,
    WIRE,
    Arm,
    Case,
    Operation,
    acquire_contended,
    acquire_free,
    acquire_pushed,
    extend,
    release,
    release_to_waiter,
    renew,
    sweep,
)
from ..support.wired import Wired
from ..support.wired import quiet_loop as quiet_loop

OPERATIONS = (acquire_free, acquire_contended, release, release_to_waiter, renew, extend)
REFUSED = {name: action for name, action in ANSWERS.items() if name != "NOSCRIPT"}
kinds = pytest.mark.parametrize("kind", WATCHED, ids=str)


def at(command: bytes, operation: Operation) -> Operation:
    """Return the operation with its fault at the first such command after the moment it would be armed."""

    async def watching(w: Wired, arm: Arm) -> int:
        def arm_here(_: Match) -> Rule:
            return arm(lambda words: words[0] == command)

        return await operation(w, arm_here)

    watching.__name__ = f"{command.decode()} of {operation.__name__}"
    return watching


def faults_at(command: bytes) -> dict[str, Action]:
    if command == b"WATCH":
        return WIRE | REFUSED
    return {name: action for name, action in WIRE.items() if action is not DUPLICATE or command == b"EXEC"}


CASES = [
    *(
        (op, kind, "link", command)
        for op in OPERATIONS
        for kind in WATCHED
        for command in (b"WATCH", b"MULTI", b"EXEC")
    ),
    *product(OPERATIONS, (WATCHED_LOCK,), ("plain",), (b"WATCH", b"EXEC")),
]


@pytest.mark.parametrize(("operation", "kind", "mode", "command"), each_value(CASES))
async def test_sweep(server: EmbeddedServer, operation: Operation, kind: Kind, mode: str, command: bytes) -> None:
    """C1-C5, D9: 34 faults for each of 6 operations and 2 kinds over the link; 26 of the lock on pooled connections."""
    faults = faults_at(command)
    cases = [Case(at(command, operation), mode, fault, action, kind=kind) for fault, action in faults.items()]
    assert await sweep(server, cases) == len(cases) == {b"WATCH": 17, b"MULTI": 8, b"EXEC": 9}[command]


@kinds
async def test_sweep_of_the_push(server: EmbeddedServer, kind: Kind) -> None:
    """P3, C7: the grant itself is lost or late; the waiter heals."""
    cases = [Case(acquire_pushed, "link", fault, PUSHES[fault], push=True, kind=kind) for fault in PUSHES]
    assert await sweep(server, cases, poll_cap=0.3) == len(cases) == 3
