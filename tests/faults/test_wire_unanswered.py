"""P4, P8, FAULTS C4, D9: a call whose time is up says what is known of it, and in time."""

from __future__ import annotations

from typing import Any

import pytest

from redis_sync_aio import CommandRefused, Unreachable
from redis_sync_aio.embedded import EmbeddedServer

from ..support.partitions import Partition, heal, modes, part, partitions
from ..support.proxy import CUT_AFTER, ERROR, SWALLOW_REPLY, Match
from ..support.timed import timed
from ..support.wired import ACQUIRE, RELEASE, Wired, wired
from ..support.wired import quiet_loop as quiet_loop

RETRY_FOR = 0.4
READONLY = ERROR("READONLY You can't write against a read only replica.")
PATIENT: dict[str, Any] = {
    "client": {"socket_timeout": None, "socket_connect_timeout": None},
    "retry_for": RETRY_FOR,
    "response_timeout": 5,
}
"""An answer may take longer than all attempts together."""
LONGER = {**PATIENT, "retry_for": 1.5}
"""There is a second attempt, even if the machine stands still for a moment."""


def refused_then_silent(w: Wired, match: Match) -> None:
    """Refuse the first attempt; execute the second, and tell nobody."""
    w.proxy.on(match, READONLY)
    w.proxy.on(match, SWALLOW_REPLY)


@modes
@partitions
async def test_the_whole_time_counts(server: EmbeddedServer, mode: str, kind: Partition) -> None:
    """C4: retry_for bounds the waiting, however long an answer may take."""
    async with wired(server, mode, **PATIENT) as w:
        await (await w.lock().acquire()).release()
        await part(w, kind)

        async def refused() -> None:
            with pytest.raises(Unreachable):
                await w.lock().acquire()

        seconds, _ = await timed(refused)
        assert seconds < RETRY_FOR + 0.4
        heal(w)
        await w.proxy.cut()


@modes
async def test_refused_all_the_time(server: EmbeddedServer, mode: str) -> None:
    """D9: nothing was changed, and that is what is said, unless the time ends in the middle of an attempt."""
    async with wired(server, mode, **PATIENT) as w:
        rule = w.proxy.on(ACQUIRE, READONLY, times=None)
        found = set[type[Exception]]()
        for _ in range(3):
            with pytest.raises((CommandRefused, Unreachable), match="READONLY") as raised:
                await w.lock().acquire()
            found.add(raised.type)
        assert CommandRefused in found
        assert rule.acted > 3
        await w.check_free(0)


@modes
async def test_refused_and_then_silent(server: EmbeddedServer, mode: str) -> None:
    """D9: the last attempt may have been executed, so nobody says that nothing was changed."""
    async with wired(server, mode, **LONGER) as w:
        refused_then_silent(w, ACQUIRE)
        with pytest.raises(Unreachable, match="before that it answered READONLY"):
            await w.lock().acquire()
        await w.proxy.cut()
        async with w.elsewhere().acquire(timeout=5) as lease:  # it was withdrawn
            pass
        await w.check_free(lease.fence)


@modes
async def test_a_release_refused_and_then_silent(server: EmbeddedServer, mode: str) -> None:
    """P4: it was executed; the second one finds the key gone, and knows why."""
    async with wired(server, mode, **LONGER) as w:
        lease = await w.lock(ttl=30).acquire()
        refused_then_silent(w, RELEASE)
        with pytest.raises(Unreachable, match="before that it answered READONLY"):
            await lease.release()
        await w.proxy.cut()
        await lease.release()
        await w.check_free(lease.fence)


@modes
async def test_silent_and_then_refused(server: EmbeddedServer, mode: str) -> None:
    """P4, D9: who is refused in the end hears that an earlier copy may have done it; a second release knows why."""
    async with wired(server, mode, **{**PATIENT, "retry_for": 5}) as w:
        lease = await w.lock(ttl=30).acquire()
        w.proxy.on(RELEASE, CUT_AFTER)
        w.proxy.on(RELEASE, ERROR("OOM command not allowed when used memory > 'maxmemory'."))
        with pytest.raises(CommandRefused, match="an earlier copy, whose reply was lost, may have"):
            await lease.release()
        await lease.release()
        await w.check_free(lease.fence)
