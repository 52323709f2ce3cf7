"""P4, FAULTS C1-C5, D3, D9: every operation, with every fault of the wire at every command it sends.

Whatever happens to a command or to its answer, the operation succeeds within `retry_for`: a lock that is ours is
never reported as taken, a lock that was released never as not held; the lock is free when its release returned,
nothing is queued, and the next client gets it immediately, under a greater fence.

Each test runs all faults for one operation at the same time, each behind a proxy and on a lock of its own, and
reports every fault that went wrong. A fault counts when the proxy has really taken its action.
"""

from __future__ import annotations

from importlib.metadata import version
from itertools import product

import pytest

from redis_sync_aio.embedded import EmbeddedServer

from ..support.factories import KINDS, LOCK, SEMAPHORE, SHARED_LOCK, SHARED_SEMAPHORE, Kind
from ..support.pairwise import each_value, first_of
from ..support.proxy import PASS, anything
from ..support.wire_sweep import ANSWERS, OPERATIONS, PUSHES, WIRE, Case, Operation, acquire_pushed, hold, sweep
from ..support.wired import MODES, wired
from ..support.wired import quiet_loop as quiet_loop

kinds = pytest.mark.parametrize("kind", [*KINDS, SHARED_LOCK, SHARED_SEMAPHORE], ids=str)


CASES = [
    *product(OPERATIONS, (LOCK,), MODES),
    *product(OPERATIONS, (SEMAPHORE,), ("link", "plain")),
    *product(OPERATIONS, (SHARED_LOCK, SHARED_SEMAPHORE), ("link",)),
]


@pytest.mark.parametrize(("operation", "kind", "mode"), each_value(CASES))
async def test_sweep(server: EmbeddedServer, operation: Operation, kind: Kind, mode: str) -> None:
    """C1-C5, D3, D9: 18 faults for each of 7 operations, in 3 modes (2 for a semaphore, 1 if shared): 882 in all."""
    faults = WIRE | ANSWERS
    cases = [Case(operation, mode, fault, faults[fault], kind=kind) for fault in faults]
    assert await sweep(server, cases) == len(cases) == 18


@kinds
async def test_sweep_of_the_push(server: EmbeddedServer, kind: Kind) -> None:
    """P3, C7: the grant itself is lost or late; the waiter heals."""
    cases = [Case(acquire_pushed, "link", fault, PUSHES[fault], push=True, kind=kind) for fault in PUSHES]
    assert await sweep(server, cases, poll_cap=0.3) == len(cases) == 3


@pytest.mark.parametrize("mode", first_of(*reversed(MODES)))
async def test_sweep_of_the_whole(server: EmbeddedServer, mode: str) -> None:
    """C1-C5: the 1st, 2nd, … command of connecting, acquiring and releasing: 220 faults in the 3 modes."""
    faults = WIRE | {"LOADING": ANSWERS["LOADING"]}
    async with wired(server, mode, response_timeout=5, client={"socket_timeout": 5}) as w:  # so that it repeats nothing
        await hold(w, lambda _: w.proxy.on(anything, PASS))
        commands = sum(w.proxy.commands.values())
    cases = [Case(hold, mode, fault, faults[fault], skip) for skip in range(commands) for fault in faults]
    connecting = 9 if int(version("redis").split(".")[0]) >= 8 else 8  # redis-py 7 sends one command less
    assert await sweep(server, cases) == len(cases) >= (connecting if mode == "link" else 4) * len(faults)
