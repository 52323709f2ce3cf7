"""P1, P4, P6: one identity has one lease, from how many processes it may be used."""

from __future__ import annotations

import asyncio
import math

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncRobustLock, AsyncSemaphore, Coordinator, LeaseLost, NotHeld, wait_until
from redis_sync_aio.embedded import EmbeddedServer

from ..conftest import MakeClient
from ..support.body import FAST
from ..support.factories import KINDS, WATCHED, Kind
from ..support.inside import Call, Commands, Engine, Link, hub_of
from ..support.proxy import CUT_AFTER, CUT_BEFORE, ERROR
from ..support.timed import Timed
from ..support.wired import ACQUIRE, RELEASE, wired
from ..support.wired import quiet_loop as quiet_loop

NAME = "named"
engines = pytest.mark.parametrize("engine", ["lua", "watch"])
modes = pytest.mark.parametrize("mode", ["link", "plain"])
kinds = pytest.mark.parametrize("kind", KINDS, ids=str)


@engines
@pytest.mark.parametrize("max_hold", [None, 0.3])
async def test_joining_a_lease_without_an_end(
    sync: Coordinator, redis: Redis, engine: Engine, max_hold: float | None
) -> None:
    """It is the same lease, and stays without an end on the server; who joins may have set one for itself."""
    first = await AsyncLock(sync, NAME, ttl=None).acquire(identity="w")
    async with Coordinator(redis) as other:
        lock = AsyncLock(other, NAME, ttl=30, engine=engine, max_hold=max_hold)
        for timeout in (0, 5):
            joined = await lock.acquire(identity="w", timeout=timeout)
            assert joined.fence == first.fence
            if max_hold is None:
                assert joined.remaining() == math.inf
                with pytest.raises(ValueError, match="nothing to extend"):
                    await joined.extend(5)
            else:
                assert 0 < joined.remaining() <= max_hold
                await asyncio.wait_for(joined.wait_lost(), 5)
            first.check()
            assert await redis.pttl(NAME) == -1


@pytest.mark.parametrize("robust", [False, True])
async def test_joining_a_foreign_lock_without_an_end(sync: Coordinator, redis: Redis, robust: bool) -> None:
    await redis.set(NAME, "w")
    lease = await (AsyncRobustLock if robust else AsyncLock)(sync, NAME).try_acquire(identity="w")
    assert lease is not None
    assert (lease.remaining(), await redis.pttl(NAME)) == (math.inf, -1)
    await lease.release()
    assert not await redis.exists(NAME)


@engines
@pytest.mark.timing
async def test_joining_without_a_ttl_what_has_an_end(sync: Coordinator, redis: Redis, engine: Engine) -> None:
    """P1: it ends when the server lets it end."""
    await AsyncLock(sync, NAME, ttl=0.5, auto_renew=False).acquire(identity="w")
    async with Coordinator(redis) as other:
        joined = await AsyncLock(other, NAME, ttl=None, engine=engine).acquire(identity="w")
        assert 0 < joined.remaining() <= 0.5
        next_one = await AsyncLock(other, NAME).acquire(timeout=5)
        assert joined.lost
        with pytest.raises(LeaseLost):
            joined.check()
        await next_one.release()


async def test_a_release_that_goes_on_is_executed_before_the_next_acquire(
    make_client: MakeClient, redis: Redis
) -> None:
    """P1: also when the server does not know its script yet."""
    await redis.script_flush()
    async with Coordinator(make_client()) as sync:
        lock = AsyncLock(sync, NAME)
        first = await lock.acquire(identity="w")
        releasing = asyncio.create_task(first.release())
        await asyncio.sleep(0)
        releasing.cancel()
        second = await lock.acquire(identity="w")
        assert second.fence > first.fence
        assert await AsyncLock(redis, NAME).try_acquire() is None
        second.check()
        await second.release()


@kinds
async def test_a_release_that_was_refused_for_now_is_executed_before_the_next_acquire(
    server: EmbeddedServer, kind: Kind
) -> None:
    """P1: what is sent about a name while an earlier command waits to be sent again stays behind it."""
    async with wired(server, kind=kind, retry_for=60) as w:
        link, first = hub_of(w.sync).link, await w.lock().acquire(identity="w")
        assert isinstance(link, Link)
        refused = w.proxy.on(RELEASE, ERROR("BUSY Redis is busy running a script."), times=None)
        releasing = asyncio.create_task(first.release())
        await wait_until(lambda: bool(link._deferred.delayed), FAST, timeout=15)
        acquiring = asyncio.create_task(w.lock().acquire(identity="w"))
        await asyncio.sleep(0)
        refused.cancel()
        second = await acquiring
        await releasing
        assert second.fence > first.fence
        await w.check_held(second)
        await second.release()
        await w.check_free(second.fence)


@pytest.mark.timing
async def test_p6_joining_a_lease_that_lasts_longer_than_the_ttl(sync: Coordinator, redis: Redis) -> None:
    """It is renewed by the own ttl in time, and ended by the own ``max_hold`` in time."""
    await AsyncLock(sync, NAME, ttl=2, auto_renew=False).acquire(identity="w")
    async with Coordinator(redis) as other:
        joined = await AsyncLock(other, NAME, ttl=0.4).acquire(identity="w")
        brief = await AsyncLock(other, NAME, ttl=30, max_hold=0.2).acquire(identity="w")
        async with Timed() as took:
            await brief.wait_lost()
        assert took.waited < 0.5
        await asyncio.sleep(2.2)
        joined.check()
        await joined.release()


@pytest.mark.parametrize("kind", [*KINDS, *WATCHED], ids=str)
@pytest.mark.timing
async def test_a_waiter_with_an_identity_gets_the_grant_as_soon_as_another_one_does(
    sync: Coordinator, other: Coordinator, kind: Kind
) -> None:
    """As who asks while it is held; not when they look again, 2 seconds later."""
    lock, elsewhere = kind.make(sync, NAME), kind.make(other, NAME)
    holder = await elsewhere.acquire()
    tasks = [asyncio.create_task(lock.acquire(identity="w")) for _ in range(3)]

    async def queued() -> bool:
        return (await elsewhere.statistics()).waiting >= 3

    await wait_until(queued, FAST, timeout=5)
    await holder.release()
    leases = await asyncio.wait_for(asyncio.gather(*tasks), 1)
    assert len({lease.fence for lease in leases}) == 1
    await leases[0].release()
    assert not await elsewhere.locked()


async def test_a_reconnect_keeps_the_order_behind_what_was_refused(server: EmbeddedServer) -> None:
    """P1: the release is refused for now, and the acquire behind it loses its connection, and so is sent again."""
    async with wired(server) as w:
        first = await w.lock().acquire(identity="w")
        w.proxy.on(RELEASE, ERROR("LOADING Redis is loading the dataset in memory"), times=1)
        cut = w.proxy.on(ACQUIRE, CUT_BEFORE, times=1)
        releasing = asyncio.create_task(first.release())
        acquiring = asyncio.create_task(w.lock().acquire(identity="w"))
        await cut.fired.wait()
        w.proxy.refuse = True
        await asyncio.sleep(0.05)  # longer than the pause before the release is sent again
        w.proxy.refuse = False
        await releasing
        second = await acquiring
        assert second.fence > first.fence
        await w.check_held(second)
        await second.release()
        await w.check_free(second.fence)


@kinds
@modes
async def test_p4_a_release_by_identity_without_an_answer(server: EmbeddedServer, mode: str, kind: Kind) -> None:
    async with wired(server, mode, kind=kind) as w:
        lease = await w.elsewhere().acquire(identity="w")
        rule = w.proxy.on(RELEASE, CUT_AFTER, times=1)
        await w.lock().release(identity="w")
        assert rule.acted == 1
        await w.check_free(lease.fence)
        with pytest.raises(NotHeld):
            await w.lock().release(identity="w")


def test_only_what_may_be_asked_for_again_is_sent_in_full_at_first() -> None:
    """An uncontended release stays as short as it is."""

    class Silent:
        pushes = True

        def send(self, call: Call) -> None: ...

    engine = Commands(Silent())  # type: ignore[arg-type]
    keys = AsyncSemaphore(Redis(), NAME, limit=1)._keys
    for again in (False, True):
        call = Call(0.0, 1.0, lambda _: None)
        engine.release(keys, b"t", call, undoes=again)
        assert call.undoes == again
