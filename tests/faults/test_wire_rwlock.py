"""P1, P4, FAULTS C1-C5, D3, D9: faults of the wire that meet readers that become the writer, and back.

Readers and writers themselves are permits, whose faults are in test_wire.py and test_wire_permits.py.
"""

from __future__ import annotations

import asyncio

import pytest

from redis_sync_aio import AsyncReadWriteLock
from redis_sync_aio.embedded import EmbeddedServer

from ..support.inside import load
from ..support.pairwise import first_of
from ..support.proxy import script
from ..support.rwlocks import SCRIPT, both, queued
from ..support.views import readers_of, writer_of
from ..support.wire_sweep import ANSWERS, SEVERAL, WIRE, Arm, Case, Operation, sweep
from ..support.wired import Wired
from ..support.wired import quiet_loop as quiet_loop

DOWNGRADE = script(load(SCRIPT).sha)


async def check_free(rw: AsyncReadWriteLock, last: int) -> int:
    """Nobody reads, writes or waits; the next writer has it immediately, under a greater fence."""
    found = await rw.statistics()
    assert (writer_of(found), readers_of(found), found.waiting) == (None, 0, 0), found
    writer = await rw.write().try_acquire()
    assert writer is not None
    assert writer.fence > last
    await writer.release()
    return writer.fence


async def downgrade(w: Wired, arm: Arm) -> int:
    """Without a gap: a writer that waits stays out."""
    ours, theirs = await both(w)
    writer = await ours.write().acquire()
    waiting = asyncio.create_task(theirs.write().acquire())
    await queued(theirs, 1)
    arm(DOWNGRADE)
    await ours.downgrade(writer)
    found = await theirs.statistics()
    assert (writer_of(found), readers_of(found), found.waiting) == (None, 1, 1)
    writer.check()
    await writer.release()
    last = await waiting
    assert last.fence > writer.fence
    await last.release()
    return await check_free(theirs, last.fence)


@pytest.mark.parametrize("mode", first_of("link", "plain"))
@pytest.mark.parametrize("operation", [downgrade])
async def test_sweep_of_readers_and_writers(server: EmbeddedServer, operation: Operation, mode: str) -> None:
    """C1-C5, D3, D9: 18 faults, in 2 modes: 36 in all."""
    faults = WIRE | ANSWERS
    cases = [Case(operation, mode, fault, faults[fault], kind=SEVERAL) for fault in faults]
    assert await sweep(server, cases) == len(cases) == 18
