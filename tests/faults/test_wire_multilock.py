"""P4 for several locks together: every fault of the wire of test_wire.py, at the commands of a multi-lock.

Whatever happens to a command or its answer, all locks are acquired, under one lease, and all are free after it.
"""

from __future__ import annotations

import asyncio

import pytest

from redis_sync_aio import AsyncLock, AsyncMultiLock, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import PermissionDenied

from ..support.inside import load, lock_keys
from ..support.proxy import ERROR, Action, script
from ..support.timed import failures
from ..support.views import holder_of
from ..support.wire_sweep import ANSWERS, WIRE
from ..support.wired import RELEASE, SOON, Wired, quiet_loop, wired

__all__ = ["quiet_loop"]  # a fixture

CASES: dict[str, tuple[str, str, int]] = {
    # names, script, how many calls of it pass by unharmed
    "one script": ("{{{0}}}:1 {{{0}}}:2 {{{0}}}:3", "lock/acquire_all", 0),
    "the first of three": ("{0}:1 {0}:2 {0}:3", "lock/acquire", 0),
    "the last of three": ("{0}:1 {0}:2 {0}:3", "lock/acquire", 2),
    "a release": ("{{{0}}}:1 {{{0}}}:2 {{{0}}}:3", "lock/release", 1),
}


async def acquire_and_release(w: Wired, names: list[str], command: str, skip: int, action: Action) -> None:
    lock = AsyncMultiLock(w.sync, names)
    rule = w.proxy.on(script(load(command).sha), action, skip=skip)
    lease = await lock.acquire()
    lease.check()
    for name, fence in lease.fences.items():
        found = await AsyncLock(w.other, name).statistics()
        assert holder_of(found) in lease.token.split(), f"{name} is not ours"
        assert found.fence == fence
    await lease.release()
    assert rule.acted, "the fault did not happen"


async def check_free(w: Wired, names: list[str]) -> None:
    async def free() -> bool:
        found = await AsyncMultiLock(w.other, names).statistics()
        return not any(one.held or one.waiting for one in found)

    await wait_until(free, SOON, timeout=15)


async def one_fault(server: EmbeddedServer, mode: str, case: str, fault: str, action: Action) -> None:
    template, command, skip = CASES[case]
    names = template.format(f"{case} {fault}".replace(" ", "-")).split()
    async with asyncio.timeout(30), wired(server, mode, name=names[0]) as w:
        for name in names:  # of an earlier run of this case, which went wrong
            await w.direct.delete(*lock_keys(name.encode()).all)
        await w.direct.script_load(load("lock/acquire_all").source.decode())
        await acquire_and_release(w, names, command, skip, action)
        await check_free(w, names)


@pytest.mark.parametrize("mode", ["link", "plain"])
@pytest.mark.parametrize("case", CASES)
async def test_p4_every_fault(server: EmbeddedServer, mode: str, case: str) -> None:
    faults = [*(WIRE | ANSWERS).items()]
    wrong = await failures(faults, lambda fault: one_fault(server, mode, case, *fault))
    assert not wrong, "\n".join(f"{fault}: {error!r}" for (fault, _), error in wrong)


@pytest.mark.parametrize("mode", ["link", "plain"])
@pytest.mark.parametrize("which", range(2))
async def test_p4_a_release_that_was_done_in_part_is_tried_again(server: EmbeddedServer, mode: str, which: int) -> None:
    """One of the two was refused. The other one is free, which is no loss."""
    names = ["first", "second"]
    async with wired(server, mode, name=names[0]) as w:
        lease = await AsyncMultiLock(w.sync, names).acquire()
        refused = names[which].encode()
        w.proxy.on(lambda args: RELEASE(args) and refused in args, ERROR("NOPERM not permitted"))
        with pytest.raises(PermissionDenied):
            await lease.release()
        assert lease.remaining() > 0
        await lease.release()
        await check_free(w, names)
