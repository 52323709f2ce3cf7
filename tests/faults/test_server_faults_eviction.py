"""P6, P8, FAULTS D2: a server that is short of memory evicts the key of a lock that is held.

Every test has a server of its own, see test_server_faults.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest

from redis_sync_aio import Lease, wait_until

from ..support.body import for_ever, lost_in
from ..support.inside import now
from ..support.served import NAME, Served, modes, served
from ..support.wired import SOON

TTL = 1.5
ROOM = 2 * 2**20
"""Bytes that the server may use beyond what it uses at the start."""


async def flood(s: Served, policy: str) -> None:
    """Write what is none of ours until the server has evicted the lock; the server says so itself."""
    await s.admin.config_set("maxmemory", (await s.admin.info("memory"))["used_memory"] + ROOM)
    await s.admin.config_set("maxmemory-policy", policy)
    for number in itertools.count():
        # With a ttl longer than the lock's: volatile-ttl evicts what would end first.
        pipe = s.admin.pipeline(transaction=False)
        for part in range(50):
            pipe.set(f"foreign:{number}:{part}", b"x" * 2000, ex=3600)
        pipe.exists(NAME)
        if not (await pipe.execute())[-1]:
            break
    assert (await s.admin.info("stats"))["evicted_keys"] > 0
    await s.admin.config_set("maxmemory", 0)


@modes
@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_d2_the_lock_is_evicted(mode: str, policy: str) -> None:
    """The holder learns at its next renewal that its lease is lost, its body is cancelled; fences go on rising."""
    async with served(mode) as s:
        evicted: list[float] = []

        async def body(lease: Lease) -> None:
            await flood(s, policy)
            evicted.append(now())
            assert lease._grant.deadline - now() > 0, "the flood took too long: the lease ended by itself"
            await for_ever()

        lease, loss = await lost_in(s.lock(ttl=TTL).acquire(), body)
        assert loss.reason == "expired"
        assert now() - evicted[0] <= TTL / 3 + 0.1
        other = await s.elsewhere().acquire(timeout=1)
        assert other.fence > lease.fence
        await s.check_held(other)
        await other.release()
        await s.check_free(other.fence)


@modes
async def test_d2_evicted_and_taken_by_another(mode: str) -> None:
    """Somebody else may have the lock before the holder knows; its fence is greater, and nobody takes it away."""
    async with served(mode) as s:
        taken: list[Lease] = []
        ttl = 2 * TTL

        async def body(lease: Lease) -> None:
            first = lease._grant.deadline
            await wait_until(lambda: lease._grant.deadline > first, SOON, timeout=15)  # so none is due for a while
            await flood(s, "allkeys-lru")
            taken.append(await s.elsewhere().acquire(timeout=1))
            assert taken[0].fence > lease.fence
            await asyncio.wait_for(for_ever(), ttl / 3 + 0.1)

        _, loss = await lost_in(s.lock(ttl=ttl).acquire(), body)
        assert loss.reason == "taken"
        await s.check_held(taken[0])
        await taken[0].release()
        await s.check_free(taken[0].fence)
