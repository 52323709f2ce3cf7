"""P1, P3, P6, FAULTS C7, C8, D3, D10-D12: the server hangs up, forgets our scripts, stalls, is full.

Every test has a server of its own.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from redis_sync_aio import AsyncLock, Lease, LeaseLost, wait_until
from redis_sync_aio.errors import OutOfMemory

from ..support.body import FAST, for_ever, lost_in
from ..support.inside import now
from ..support.inspecting import calls
from ..support.served import NAME, Served, modes, served
from ..support.wired import RESPONSE_TIMEOUT, SOON
from ..support.wired import quiet_loop as quiet_loop


async def renewed(lease: Lease) -> None:
    first = lease._grant.deadline
    await wait_until(lambda: lease._grant.deadline > first or lease.lost, SOON, timeout=lease._grant.period + 1)
    lease.check()


# -- connections closed by the server ----------------------------------------------------------------------


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


# -- a server that stalls ----------------------------------------------------------------------------------


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
            lease = await asyncio.wait_for(acquiring, 20)
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
        before = await calls(s.admin, "evalsha")

        async def looked() -> bool:
            return await calls(s.admin, "evalsha") > before + 2 or waiting.done()

        await wait_until(looked, SOON, timeout=15)
        assert not waiting.done(), waiting.exception()
        await holder.release()
        lease = await asyncio.wait_for(waiting, 1)
        await lease.release()
        await s.admin.config_set("maxmemory", 0)
        await s.check_free(lease.fence)


# -- P1, P3, P6, P8, FAULTS D1, D2: the server restarts, with its data or without, or loses all keys.


@modes
async def test_restart_with_data(mode: str) -> None:
    """D1: locks, queue and fence survive; the holder goes on, the waiter keeps its place."""
    async with served(mode, poll_cap=60, persistent=True) as s:
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
    """D1, D2: the waiter has it within a second after the server answers again, or after the lease that it kept."""
    async with served(mode, poll_cap=60, persistent=keep, retry_for=10) as s:
        holder = await s.elsewhere(ttl=3, auto_renew=False).acquire()
        waiting = asyncio.create_task(s.lock().acquire())
        await s.queued()
        s.server.kill()
        await holder.wait_lost()
        await asyncio.to_thread(s.server.restart, keep)
        lease = await asyncio.wait_for(waiting, 1.1 + (3 if keep else 0))
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
    async with served(mode, poll_cap=3) as s:
        lease = await s.lock(ttl=6).acquire()
        waiting = asyncio.create_task(s.lock().acquire())
        await s.queued()
        await s.admin.flushall()
        begin = now()
        await lease.wait_lost()
        assert now() - begin <= 6 / 3 + 0.15
        with pytest.raises(LeaseLost):
            await lease.release()
        following = await asyncio.wait_for(waiting, 5)
        assert following.fence > lease.fence
        await s.check_held(following)
        await following.release()
        await s.check_free(following.fence)


# -- P6, P8, FAULTS D2: a server that is short of memory evicts the key of a lock that is held.


TTL = 1.5
ROOM = 2 * 2**20
"""Bytes that the server may use beyond what it uses at the start."""


async def flood(s: Served, policy: str) -> None:
    """Write what is none of ours until the server has evicted the lock; the server says so itself."""
    with suppress(ResponseError):  # it has no such mode, in which it evicts nothing: see `support.virtual`
        await s.admin.config_set("import-mode", "no")
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
