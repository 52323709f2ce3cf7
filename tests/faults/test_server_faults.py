"""P1, P3, P6, FAULTS C7, C8, D3, D10-D12: the server hangs up, forgets our scripts, stalls, is full.

Every test has a server of its own.
"""

from __future__ import annotations

import asyncio

import pytest

from redis_sync_aio import AsyncLock, Lease, wait_until
from redis_sync_aio.errors import OutOfMemory

from ..support.body import for_ever, lost_in
from ..support.inside import now
from ..support.served import NAME, modes, served
from ..support.wired import RESPONSE_TIMEOUT, SOON
from ..support.wired import quiet_loop as quiet_loop


async def renewed(lease: Lease) -> None:
    first = lease._grant.deadline
    await wait_until(lambda: lease._grant.deadline > first or lease.lost, SOON, timeout=lease._grant.period + 1)
    lease.check()


# -- connections closed by the server ----------------------------------------------------------------------


async def test_client_kill_while_holding() -> None:
    """P6, C7: the lease is looked at on the next connection, and goes on."""
    async with served() as s:
        lease = await s.lock(ttl=2).acquire()
        opened, first = s.sync.connections, lease._grant.deadline
        await s.kill_ours()
        await s.reconnected(opened)
        await wait_until(lambda: lease._grant.deadline > first, SOON, timeout=0.3)  # long before it was due
        await s.check_held(lease)
        await lease.release()
        await s.check_free(lease.fence)


async def test_client_kill_while_waiting() -> None:
    """P3, C7: killed in the moment of the release, or before; the waiter has the lock within a second."""
    async with served() as s:
        for _ in range(5):
            holder = await s.elsewhere().acquire()
            waiting = asyncio.create_task(s.lock().acquire())
            await s.queued()
            await asyncio.gather(s.kill_ours(), holder.release())
            lease = await asyncio.wait_for(waiting, 1.1)
            await s.check_held(lease)
            await lease.release()
            await s.check_free(lease.fence)


async def test_output_buffer_limit() -> None:
    """C8: closed as a slow consumer, the waiter comes back and has the lock within a second."""
    flood = "for _ = 1, 2000 do redis.call('PUBLISH', ARGV[1], '0 0 0 0') end"
    async with served() as s:
        holder = await s.elsewhere().acquire()
        waiting = asyncio.create_task(s.lock().acquire())
        await s.queued()
        await s.admin.config_set("client-output-buffer-limit", "pubsub 64kb 64kb 1")
        opened = s.sync.connections
        for inbox in await s.admin.pubsub_channels("rsa:*"):
            await s.admin.eval(flood, 0, inbox)
        await s.reconnected(opened)
        await holder.release()
        lease = await asyncio.wait_for(waiting, 1)
        await lease.release()
        await s.check_free(lease.fence)


async def _acquire_after(begin: asyncio.Event, lock: AsyncLock) -> Lease:
    await begin.wait()
    return await lock.acquire()


@modes
@pytest.mark.parametrize("what", ["first use", "waiting"])
async def test_max_clients(mode: str, what: str) -> None:
    """D11: no connection to be had; within a second after there is one, the waiter has the lock."""
    async with served(mode) as s:
        holder = await s.elsewhere().acquire()
        begin = asyncio.Event()
        acquiring = asyncio.create_task(_acquire_after(begin, s.lock()))
        if what == "waiting":
            begin.set()
            await s.queued()
        most = str((await s.admin.config_get("maxclients"))["maxclients"])
        await s.admin.config_set("maxclients", 1)
        await s.kill_ours()
        begin.set()
        rejected = "rejected_connections"

        async def refused() -> bool:
            return bool((await s.admin.info("stats"))[rejected] > 2)

        await wait_until(refused, SOON, timeout=15)
        await holder.release()
        await s.admin.config_set("maxclients", most)
        lease = await asyncio.wait_for(acquiring, 1.1)
        await lease.release()
        await s.check_free(lease.fence)


# -- scripts -----------------------------------------------------------------------------------------------


@modes
async def test_script_flush_at_any_moment(mode: str) -> None:
    """D3: no command notices that the server has forgotten its script; neither does a hand-over."""
    async with served(mode, poll_cap=60) as s:
        flush = s.admin.script_flush
        fence = 0
        for _ in range(5):
            await flush()
            lease = await s.lock(ttl=3).acquire()
            await flush()
            waiting = asyncio.create_task(s.lock().acquire())
            await s.queued()
            await flush()
            await renewed(lease)
            await flush()
            await lease.extend(30)
            await flush()
            await lease.release()
            following = await asyncio.wait_for(waiting, 5)
            assert fence < lease.fence < following.fence
            await flush()
            assert await s.lock().locked()
            await flush()
            await following.release()
            fence = following.fence
        await s.check_free(fence)


@modes
async def test_script_flush_under_load(mode: str) -> None:
    """D3, P1: nor do 5 tasks that contend."""
    async with served(mode) as s:
        inside, done = 0, 0

        async def section() -> None:
            nonlocal inside, done
            for _ in range(5):
                async with s.lock():
                    inside += 1
                    assert inside == 1
                    await asyncio.sleep(0)
                    inside -= 1
            done += 1

        async with asyncio.TaskGroup() as tasks:
            for _ in range(5):
                tasks.create_task(section())
            while done < 5:
                await s.admin.script_flush()
        await s.check_free(0)


# -- a server that stalls ----------------------------------------------------------------------------------


@pytest.mark.real
@modes
async def test_short_pause(mode: str) -> None:
    """D12: nothing is lost while the server does not answer for a while."""
    async with served(mode) as s:
        lease = await s.lock(ttl=1.5).acquire()
        waiting = asyncio.create_task(s.lock().acquire())
        await s.queued()
        await s.admin.client_pause(200)
        await lease.extend(1.5)  # answered when the pause is over
        await renewed(lease)
        await s.check_held(lease)
        await lease.release()
        following = await asyncio.wait_for(waiting, 1)
        await following.release()
        await s.check_free(following.fence)


@pytest.mark.real
@modes
async def test_pause_longer_than_the_ttl(mode: str) -> None:
    """D12, P6: `lost` at the deadline; what the server still grants late is none, and nothing stays behind."""
    async with served(mode) as s:
        late = list[asyncio.Task[Lease]]()

        async def body(_: Lease) -> None:
            await s.admin.client_pause(1000)
            late.append(asyncio.create_task(s.lock(ttl=0.4).acquire()))
            await for_ever()

        lease, loss = await lost_in(s.lock(ttl=0.4).acquire(), body)
        assert loss.reason == "unreachable"
        assert abs(now() - lease._grant.deadline) <= 0.05
        second = await asyncio.wait_for(late[0], 3)
        await s.check_held(second)
        assert second.fence > lease.fence
        await second.release()
        await s.check_free(second.fence)


@pytest.mark.real
@modes
@pytest.mark.parametrize("given_up", [True, False])
async def test_stopped_server(mode: str, given_up: bool) -> None:
    """D12, B4: asked while the server stands still, and perhaps given up: it goes on, and reads all that was sent."""
    async with served(mode) as s:
        await (await s.lock().acquire()).release()
        s.server.pause()
        acquiring = asyncio.create_task(s.lock().acquire())
        await asyncio.wait([acquiring], timeout=2.5 * RESPONSE_TIMEOUT)  # sent again on other connections
        if given_up:
            acquiring.cancel()
        s.server.resume()
        if not given_up:
            lease = await asyncio.wait_for(acquiring, 1.1)
            await s.check_held(lease)
            await lease.release()

        async def free() -> bool:
            return not await s.elsewhere().locked()

        await wait_until(free, SOON, timeout=15)
        await s.check_free(0)


# -- a server that is full ---------------------------------------------------------------------------------


@modes
async def test_out_of_memory_takes_nothing(mode: str) -> None:
    """D10: a lock that is not granted leaves nothing; when there is memory again it is."""
    async with served(mode) as s:
        await s.admin.config_set("maxmemory", 1)
        with pytest.raises(OutOfMemory, match=NAME):
            await s.lock().acquire()
        with pytest.raises(OutOfMemory, match=NAME):
            await s.lock().try_acquire()
        assert [key for key in await s.admin.keys() if "fence" not in str(key)] == []
        await s.admin.config_set("maxmemory", 0)
        lease = await s.lock().acquire()
        await lease.release()
        await s.check_free(lease.fence)


async def test_out_of_memory_gives_back_all() -> None:
    """D10, P3: 100 renewals, 100 releases, 100 hand-overs to those who waited before, with no memory left."""
    names = [f"{NAME} {number}" for number in range(100)]
    async with served() as s:
        leases = [await s.sync.lock(name).acquire() for name in names]
        waiting = [asyncio.create_task(s.other.lock(name).acquire()) for name in names]
        await asyncio.gather(*(s.other.lock(name).statistics() for name in names))  # all are queued now
        await s.admin.config_set("maxmemory", 1)
        await asyncio.gather(*(lease.extend(20) for lease in leases))
        await asyncio.gather(*(lease.release() for lease in leases))
        following = await asyncio.wait_for(asyncio.gather(*waiting), 2)
        assert [after.fence > before.fence for before, after in zip(leases, following, strict=True)] == [True] * 100
        await asyncio.gather(*(lease.release() for lease in following))
        assert [key for key in await s.admin.keys() if "fence" not in str(key)] == []
        await s.admin.config_set("maxmemory", 0)


async def test_a_waiter_outlasts_out_of_memory() -> None:
    """D10, P2: a waiter that looks again then keeps its place; it needs no memory to have it."""
    async with served(poll_cap=0.05) as s:
        holder = await s.elsewhere().acquire()
        waiting = asyncio.create_task(s.lock().acquire())
        await s.queued()
        await s.admin.config_set("maxmemory", 1)
        before = (await s.admin.info("commandstats"))["cmdstat_evalsha"]["calls"]

        async def looked() -> bool:
            calls = (await s.admin.info("commandstats"))["cmdstat_evalsha"]["calls"]
            return bool(calls > before + 2) or waiting.done()

        await wait_until(looked, SOON, timeout=15)
        assert not waiting.done(), waiting.exception()
        await holder.release()
        lease = await asyncio.wait_for(waiting, 1)
        await lease.release()
        await s.admin.config_set("maxmemory", 0)
        await s.check_free(lease.fence)
