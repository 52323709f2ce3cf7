"""P6: a lease that is gone says so immediately, and never takes anything from the present holder.

FAULTS A6 (blocked loop), B8, C4 (server silent), D2 (key deleted, FLUSHALL), E4 (client closed).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, Coordinator, LeaseLost, NotHeld, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import LossReason
from redis_sync_aio.testing.faults import FaultProxy
from redis_sync_aio.types import GuardingLease

from ..support.body import FAST, assert_undisturbed, for_ever, lost_in, waits
from ..support.inside import now
from ..support.primitives import ALONE, EVERY, KINDS, Primitive, each, on_one_server
from ..support.virtual import stall

NAME = "loss"
TTL = 3.0

Push = Literal["auto", "never"]
Fault = Callable[[Primitive, Redis], Awaitable[object]]
every = each(on_one_server(EVERY), "kind")
alone = each(on_one_server(ALONE), "kind")
FAULTS: dict[str, Fault] = {
    "deleted": lambda kind, redis: kind.vanish(redis, NAME),
    "overwritten": lambda kind, redis: kind.take_over(redis, NAME),
    "flushed": lambda kind, redis: redis.flushall(),
}


@pytest.fixture(params=FAULTS)
def fault(request: pytest.FixtureRequest) -> str:
    """What another client does to the lease."""
    return str(request.param)


@pytest.fixture
def reason(fault: str, kind: Primitive) -> LossReason:
    """How it is found out."""
    return kind.taken if fault == "overwritten" else "expired"


async def holder(kind: Primitive, redis: Redis) -> tuple[object, bool]:
    """Who holds it, and whether that ends by itself."""
    return await kind.token(redis, NAME), await kind.left_ms(redis, NAME) > 0


async def gone(kind: Primitive, redis: Redis, lease: GuardingLease) -> bool:
    """The server dropped the lease. Its deadline is a little later than ours, by the way of the request."""
    return await kind.token(redis, NAME) not in lease.token.encode().split()  # a lock of several has several


async def assert_lost(kind: Primitive, lease: GuardingLease, reason: LossReason, redis: Redis) -> None:
    """Everything a lease can be asked says that it is lost, and asking changes nothing on the server."""
    await wait_until(lambda: gone(kind, redis, lease), FAST, timeout=5)
    before = await holder(kind, redis)
    assert lease.lost
    await asyncio.wait_for(lease.wait_lost(), 1)
    assert lease.remaining() == 0
    for ask in (lease.release, lambda: lease.extend(5)):
        with pytest.raises(LeaseLost) as caught:
            await ask()
        assert (caught.value.name, caught.value.reason) == (NAME, reason)
    with pytest.raises(LeaseLost) as caught:
        lease.check()
    assert caught.value.reason == reason
    assert await holder(kind, redis) == before


@every
async def test_a_loss_cancels_the_body(
    kind: Primitive, sync: Coordinator, redis: Redis, fault: str, reason: LossReason
) -> None:
    """P6, D2: known within one renewal interval + 0.1 s."""
    ttl = 3.0

    async def body(_: GuardingLease) -> None:
        await FAULTS[fault](kind, redis)
        begin = now()
        try:
            await for_ever()
        finally:
            assert now() - begin < ttl / 3 + 0.1

    lease, error = await lost_in(kind.make(sync, NAME, ttl=ttl), body)
    assert (error.name, error.reason) == (NAME, reason)
    await assert_lost(kind, lease, reason, redis)


@every
@pytest.mark.asks_on_release
async def test_a_loss_found_by_the_release(
    kind: Primitive, sync: Coordinator, redis: Redis, fault: str, reason: LossReason
) -> None:
    """P6: a body that ends before the next renewal learns of the loss from its own release."""
    lease, error = await lost_in(kind.make(sync, NAME), lambda _: FAULTS[fault](kind, redis))
    assert error.reason == reason
    await assert_lost(kind, lease, reason, redis)


@every
async def test_a_loss_found_by_extend(
    kind: Primitive, sync: Coordinator, redis: Redis, fault: str, reason: LossReason
) -> None:
    """P6: extend() of a lease that is gone is a loss like any other: the body is cancelled, too."""
    extending: list[asyncio.Task[None]] = []

    async def body(lease: GuardingLease) -> None:
        await FAULTS[fault](kind, redis)
        extending.append(asyncio.create_task(lease.extend(5)))
        await for_ever()

    lease, _ = await lost_in(kind.make(sync, NAME), body)
    with pytest.raises(LeaseLost) as caught:
        await extending[0]
    assert caught.value.reason == reason
    await assert_lost(kind, lease, reason, redis)


@pytest.mark.parametrize("push", ["auto", "never"])
async def test_silence_beyond_the_ttl(kind: Primitive, server: EmbeddedServer, redis: Redis, push: Push) -> None:
    """P6, C6: lost at the deadline, not before and not after, although no server can be asked."""
    async with FaultProxy(server) as proxy, proxy.client() as client, Coordinator(client, push=push) as sync:
        due = 0.0

        async def body(lease: GuardingLease) -> None:
            nonlocal due
            proxy.black_hole = True
            due = now() + lease.remaining()
            try:
                await for_ever()
            finally:
                assert 0 <= now() - due < 0.01
                proxy.black_hole = False

        lease, error = await lost_in(kind.make(sync, NAME, ttl=10), body)
        assert error.reason == "unreachable"
        await assert_lost(kind, lease, "unreachable", redis)
        async with kind.make(sync, NAME) as successor:
            assert successor.fence > lease.fence


@pytest.mark.parametrize("push", ["auto", "never"])
async def test_silence_for_less_than_the_ttl(kind: Primitive, server: EmbeddedServer, redis: Redis, push: Push) -> None:
    """P6: unknown is not lost. Renewals without an answer are repeated, and the lease survives."""
    async with FaultProxy(server) as proxy, proxy.client() as client, Coordinator(client, push=push) as sync:
        lease = await kind.make(sync, NAME, ttl=10).acquire()
        proxy.black_hole = True
        await asyncio.sleep(5)
        assert not lease.lost
        proxy.black_hole = False
        await wait_until(lambda: lease.remaining() > 8, FAST, timeout=5)
        await lease.release()


EXPIRES: dict[str, tuple[float, dict[str, Any], float | None]] = {
    "renewed until max_hold": (6.75, {"ttl": 3, "max_hold": 6.75}, None),
    "not renewed": (TTL, {"ttl": TTL, "auto_renew": False}, None),
    "shortened, and not renewed": (TTL, {"ttl": 30, "auto_renew": False}, TTL),
}


@every
@pytest.mark.parametrize("how", EXPIRES)
async def test_it_expires(kind: Primitive, sync: Coordinator, redis: Redis, how: str) -> None:
    """P6: lost at that time, here and on the server, however well the renewals go."""
    most, options, extended = EXPIRES[how]

    async def body(lease: GuardingLease) -> None:
        if extended is not None:
            await lease.extend(extended)
            assert lease.remaining() <= extended
        await for_ever()

    begin = now()
    lease, error = await lost_in(kind.make(sync, NAME, **options), body)
    assert most - 0.01 <= now() - begin < most + 0.01
    assert error.reason == "expired"
    await assert_lost(kind, lease, "expired", redis)


@alone
async def test_a_late_release_leaves_the_successor_alone(kind: Primitive, sync: Coordinator, redis: Redis) -> None:
    """P1, P8: A's lease expires, B acquires, A releases: B keeps the lock, and its fence is greater."""
    first = await kind.make(sync, NAME, ttl=3, auto_renew=False).acquire()
    async with Coordinator(redis) as other:
        second = await kind.make(other, NAME).acquire(timeout=10)
        theirs = await kind.token(redis, NAME)
        for _ in range(2):
            with pytest.raises(LeaseLost):
                await first.release()
            await asyncio.wait_for(first.wait_lost(), 1)
        assert await kind.token(redis, NAME) == theirs
        assert second.fence > first.fence
        await second.extend(5)
        await second.release()


@every
async def test_a_loss_is_only_an_event_if_wanted(kind: Primitive, sync: Coordinator, redis: Redis) -> None:
    """on_lost="event": the body runs on, `lost` is True, and LeaseLost is raised at its end."""

    async def body(lease: GuardingLease) -> None:
        listeners = [asyncio.create_task(lease.wait_lost()) for _ in range(3)]
        await asyncio.sleep(0)
        await kind.take_over(redis, NAME)
        done, _ = await asyncio.wait(listeners, timeout=10)
        assert [one.result() for one in done] == [True] * 3
        assert lease.lost is True
        await assert_undisturbed()

    lease, error = await lost_in(kind.make(sync, NAME, ttl=4, on_lost="event").acquire(), body)
    assert error.reason == kind.taken
    await assert_lost(kind, lease, kind.taken, redis)


@every
async def test_a_release_is_no_loss(kind: Primitive, sync: Coordinator) -> None:
    """`lost` stays False after a release, which ends `wait_lost`; check() and extend() say that it was released."""
    async with kind.make(sync, NAME) as lease:
        pass
    assert not lease.lost
    with pytest.raises(NotHeld):
        lease.check()
    with pytest.raises(NotHeld):
        await lease.extend(1)
    await lease.release()
    assert not await asyncio.wait_for(lease.wait_lost(), 5)
    assert not lease.lost


@alone
async def test_renewals_keep_a_lease_alive(kind: Primitive, sync: Coordinator, redis: Redis) -> None:
    """P6: over many ttls; the server never sees the key gone."""
    async with kind.make(sync, NAME, ttl=7) as lease:
        begin, token = now(), await kind.token(redis, NAME)
        assert token is not None
        while now() - begin < 15:
            assert await kind.token(redis, NAME) == token
            assert 0 < lease.remaining() <= 7
            lease.check()
            await asyncio.sleep(0.1)
    assert not await kind.held(redis, NAME)


async def test_renewals_keep_a_handed_over_lease_alive(kind: Primitive, sync: Coordinator, redis: Redis) -> None:
    """P6: the first renewal extends a claim, or a handed over lease, to its full ttl."""
    lock = kind.make(sync, NAME, ttl=7.5)
    async with Coordinator(redis, claim=3) as other:
        first = await lock.acquire()
        waiting = asyncio.create_task(kind.make(other, NAME, ttl=7.5).acquire())
        await wait_until(waits(lock), FAST, timeout=5)
        await first.release()
        second = await waiting
        assert second.remaining() <= 3
        await wait_until(lambda: second.remaining() > 4.5, FAST, timeout=5)
        await asyncio.sleep(12)
        second.check()
        await second.release()


async def test_a_ttl_of_its_own_is_renewed_too(sync: Coordinator) -> None:
    """P6: acquire(ttl=…) of a lock that has none otherwise: renewed like any lease. (A semaphore has a ttl.)"""
    lease = await AsyncLock(sync, NAME, ttl=None).acquire(ttl=4)
    await asyncio.sleep(10)
    lease.check()
    await lease.release()


@every
async def test_extend_longer(kind: Primitive, sync: Coordinator, redis: Redis) -> None:
    """extend() makes a lease longer, here and on the server."""
    async with kind.make(sync, NAME, ttl=4, auto_renew=False) as lease:
        await lease.extend(10)
        assert 5 < lease.remaining() <= 10
        assert 5000 < await kind.left_ms(redis, NAME) < 11_000


async def test_renewals_go_on_with_the_new_ttl(kind: Primitive, sync: Coordinator, redis: Redis) -> None:
    """After extend(ttl) the renewals use that ttl."""
    lease = await kind.make(sync, NAME, ttl=300).acquire()
    await lease.extend(30)
    for _ in range(20):
        await asyncio.sleep(3)
        assert 0 < await kind.left_ms(redis, NAME) < 150_000  # of the two ttls; a stall makes keys too young
    lease.check()
    await lease.release()


@pytest.mark.parametrize("kind", KINDS, ids=str)  # WATCH takes one at a time
async def test_two_hundred_leases_are_renewed_in_one_write(
    kind: Primitive, sync: Coordinator, writes: list[bytes]
) -> None:
    """P9, E7."""
    leases = await asyncio.gather(*(kind.make(sync, f"n{n}", ttl=3).acquire() for n in range(200)))
    await asyncio.sleep(1.5)  # the first renewals send the script itself
    writes.clear()
    await asyncio.sleep(3)
    renewals = b"".join(writes).count(b"EVALSHA")
    assert renewals >= 2 * 200
    assert len(writes) * 50 <= renewals
    for lease in leases:
        lease.check()


async def test_a_loop_blocked_for_less_than_the_ttl(
    kind: Primitive, sync: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    """A6: the renewal catches up, nothing is lost, and a warning says what happened."""
    with caplog.at_level(logging.WARNING, "redis_sync_aio"):
        async with kind.make(sync, NAME, ttl=6) as lease:
            stall(4.4)
            lease.check()
            await wait_until(lambda: lease.remaining() > 4, FAST, timeout=5)
    (record,) = caplog.records
    assert "late" in record.getMessage()
    assert NAME in record.getMessage()


@every
async def test_a_loop_blocked_beyond_the_ttl(kind: Primitive, sync: Coordinator, redis: Redis) -> None:
    """A6: known right after the before any await; the body is cancelled at its next one."""
    finished: list[GuardingLease] = []

    async def body(lease: GuardingLease) -> None:
        stall(4.5)
        assert lease.lost
        assert lease.remaining() == 0
        with pytest.raises(LeaseLost):
            lease.check()
        await asyncio.sleep(6)
        finished.append(lease)

    lease, error = await lost_in(kind.make(sync, NAME, ttl=TTL), body)
    assert not finished
    assert error.reason == "late"
    assert re.search(r"blocked, for at least \d\.\d seconds", str(error))
    assert TTL < error.stalled < (error.held_for or 0) < 5
    await assert_lost(kind, lease, "late", redis)


async def test_a_release_after_a_block_beyond_the_ttl(kind: Primitive, sync: Coordinator) -> None:
    """A6, P7: the release in the body raises LeaseLost, and no cancellation is left for later awaits."""

    async def body(lease: GuardingLease) -> None:
        stall(4.8)
        await lease.release()

    await lost_in(kind.make(sync, NAME, ttl=3), body)
