"""P1, P3, P6, P8, FAULTS D1, D2: the server restarts, with its data or without, or loses all keys.

Every test has a server of its own, see test_server_faults.
"""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from redis_sync_aio import Lease, LeaseLost, wait_until

from ..support.body import FAST, for_ever, lost_in
from ..support.inside import now
from ..support.served import modes, served
from ..support.timed import Timed
from ..support.wired import quiet_loop as quiet_loop


@modes
async def test_restart_with_data(mode: str) -> None:
    """D1: locks, queue and fence survive; the holder goes on, the waiter keeps its place."""
    async with served(mode, persistent=True) as s:
        lease = await s.lock(ttl=5).acquire()
        waiting = asyncio.create_task(s.lock().acquire())
        await s.queued()
        await asyncio.to_thread(s.server.restart, True)
        await s.check_held(lease)
        await lease.extend(5)
        assert (await s.elsewhere().statistics()).waiting == 1
        await lease.release()
        following = await asyncio.wait_for(waiting, 1.1)
        assert following.fence > lease.fence
        await following.release()
        await s.check_free(following.fence)


@modes
@pytest.mark.parametrize("keep", [True, False])
async def test_waiter_after_a_long_outage(mode: str, keep: bool) -> None:
    """D1, D2: within a second after the server answers again the waiter has the lock."""
    async with served(mode, persistent=keep) as s:
        holder = await s.elsewhere(ttl=0.2, auto_renew=False).acquire()
        waiting = asyncio.create_task(s.lock().acquire())
        await s.queued()
        s.server.kill()
        await holder.wait_lost()
        await asyncio.to_thread(s.server.restart, keep)
        lease = await asyncio.wait_for(waiting, 1.1)
        assert lease.fence > holder.fence
        await lease.release()
        await s.check_free(lease.fence)


@modes
async def test_restart_without_data(mode: str) -> None:
    """D2, P8: the holder learns at its next renewal that the lock is gone; the fence goes on rising."""
    async with served(mode) as s:
        answers: list[float] = []

        def restart() -> None:
            s.server.restart(False)
            answers.append(now())

        async def body(_: Lease) -> None:
            await asyncio.to_thread(restart)
            await for_ever()

        lease, loss = await lost_in(s.lock(ttl=1.5).acquire(), body)
        lost = now()
        assert loss.reason == "expired"
        await wait_until(lambda: bool(answers), FAST, timeout=15)  # we may know before the thread does
        assert lost - answers[0] <= 1.5 / 3 + 0.5  # the renewal interval, and a reconnect
        other = await s.elsewhere().acquire(timeout=1)
        assert other.fence > lease.fence
        await s.check_held(other)
        await other.release()
        await s.check_free(other.fence)


async def test_restart_hits_no_innocent() -> None:
    """D1: after a restart the id of our old connection is somebody else's; that one is left alone."""
    async with served() as s:
        await (await s.lock().acquire()).release()
        (ours,) = await s.ours()
        await asyncio.to_thread(s.server.restart, False)
        innocent: list[Redis] = []
        while int(ours) not in [int(one["id"]) for one in await s.admin.client_list()]:
            innocent.append(s.server.client(single_connection_client=True))
            await innocent[-1].ping()
        await (await s.lock().acquire()).release()
        alive = [one["id"] for one in await s.admin.client_list()]
        for client in innocent:
            await client.aclose()
        assert ours in alive


@modes
async def test_flushall(mode: str) -> None:
    """D2, P8: the holder finds out at its next renewal, the waiter looks again, and fences go on rising."""
    async with served(mode, poll_cap=0.3) as s:
        lease = await s.lock(ttl=0.6).acquire()
        waiting = asyncio.create_task(s.lock().acquire())
        await s.queued()
        await s.admin.flushall()
        async with Timed() as took:
            await lease.wait_lost()
        assert took.waited <= 0.6 / 3 + 0.15
        with pytest.raises(LeaseLost):
            await lease.release()
        following = await asyncio.wait_for(waiting, 0.5)
        assert following.fence > lease.fence
        await s.check_held(following)
        await following.release()
        await s.check_free(following.fence)
