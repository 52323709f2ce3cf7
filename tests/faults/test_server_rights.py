"""FAULTS D16: the rights that docs/operations/servers.md lists suffice, and without any one something fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from redis_sync_aio import (
    AsyncLock,
    AsyncReadWriteLock,
    AsyncRobustLock,
    AsyncSemaphore,
    Coordinator,
    FenceGate,
    wait_until,
)
from redis_sync_aio.errors import PermissionDenied, PushUnavailable
from redis_sync_aio.types import WriteSide

from ..support.inside import hub_of
from ..support.rights import CHANNELS, KEYS, LOCKS, PAGE, PERMITS_TOO, SHARDED_TOO, every_permit
from ..support.served import ORDERS, Served, everything, modes, served_to, user
from ..support.wired import SOON
from ..support.wired import quiet_loop as quiet_loop

pytestmark = pytest.mark.real  # in virtual time other commands are sent

SENT = "+evalsha +eval +subscribe +publish"  # by us; without the last two: push="never"
ROBUST_TOO = "+hmget +hset"
PERMITS = f"{LOCKS.replace('+get +set ', '')} {PERMITS_TOO}"
"""Semaphores and read/write locks: what they use besides the above, and without what they do not."""

Use = Callable[..., Awaitable[None]]


def rights(commands: str) -> str:
    """Return the rule for primitives called ``orders:…``. ``+client|id +client|kill`` may be added: a new connection
    then retires the one it replaces, in case that one hangs."""
    return f"resetkeys {KEYS} {CHANNELS} -@all {SENT} {commands}"


def uses(s: Served) -> dict[str, tuple[str, Use]]:
    """Return what is used: the commands it needs, and all that it does."""
    return {"locks": (LOCKS, everything), "permits": (PERMITS, partial(every_permit, s.admin))}


@modes
@pytest.mark.parametrize("what", ["locks", "permits"])
async def test_least_rights(mode: str, what: str) -> None:
    """D16: they suffice."""
    async with served_to(mode=mode) as s:
        commands, use = uses(s)[what]
        await user(s, rights(commands))
        await use(s.sync)
        assert not await s.admin.exists(ORDERS)


@pytest.mark.parametrize("what", ["locks", "permits"])
async def test_less_than_the_least_rights(what: str) -> None:
    """D16, P12: and they are the least: without any one of them something is refused, by an error that says so."""
    async with served_to() as s:
        commands, use = uses(s)[what]
        for missing in f"{SENT} {commands}".split()[1:]:  # without +evalsha scripts are sent in full
            await user(s, rights(commands), f"-{missing[1:]}")
            await s.admin.flushall()
            await s.admin.script_flush()
            async with Coordinator(s.client, push="always") as woken, Coordinator(s.client, push="never") as polling:
                with pytest.raises((PermissionDenied, PushUnavailable), match=f"'{missing[1:]}'"):
                    await use(woken, polling)


@pytest.mark.parametrize("what", ["lock", "semaphore", "writer"])
async def test_least_rights_for_sharing(what: str) -> None:
    """D16: they suffice, also for renewals, and when somebody waits."""
    shared: dict[str, Any] = {"share": True, "ttl": 3}
    async with served_to() as s, Coordinator(s.admin) as elsewhere:
        await user(s, rights(LOCKS if what == "lock" else PERMITS))
        kinds: dict[str, Callable[..., AsyncLock | AsyncSemaphore | WriteSide]] = {
            "lock": AsyncLock,
            "semaphore": partial(AsyncSemaphore, limit=1),
            "writer": lambda *names, **options: AsyncReadWriteLock(*names, **options).write(),
        }
        make = kinds[what]
        ours, other = make(s.sync, ORDERS, **shared), make(elsewhere, ORDERS)
        lease = await ours.acquire(timeout=60)
        waiting = asyncio.create_task(other.acquire(timeout=60))
        first = lease._grant.deadline
        await wait_until(lambda: lease._grant.deadline > first, SOON, timeout=15)
        await wait_until(lambda: bool(hub_of(elsewhere).resource(other._keys).acquisitions), SOON, timeout=15)
        await lease.release()
        again = asyncio.create_task(ours.acquire(timeout=60))
        await (await waiting).release()
        await (await again).release()


async def test_rights_for_robust_locks() -> None:
    """D16: those of locks and two more suffice; without one of them nothing is granted, and it is said why."""
    async with served_to() as s:
        lock = AsyncRobustLock(s.sync, ORDERS)
        await user(s, rights(f"{LOCKS} {ROBUST_TOO}"))
        async with lock.acquire(timeout=60) as lease:
            await lease.record({"a": 1})
            await lease.extend(20)
        await FenceGate(s.sync, ORDERS).accept(lease)
        for missing in ("hmget", "hset"):
            await user(s, rights(f"{LOCKS} {ROBUST_TOO}"), f"-{missing}")
            with pytest.raises(PermissionDenied, match=f"'{missing}'"):
                await lock.acquire(timeout=60)

            async def given_back() -> bool:
                return not await s.admin.exists(ORDERS)

            await wait_until(given_back, SOON, timeout=15)


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not next to these tests")
def test_the_documentation_tells_them() -> None:
    text = " ".join(PAGE.read_text().split())
    for words in (KEYS, CHANNELS, SENT, LOCKS, PERMITS_TOO, ROBUST_TOO, SHARDED_TOO):
        assert words in text
