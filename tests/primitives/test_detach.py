"""Leases that change hands: detached by one process, attached by another, and never held by two."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncSemaphore,
    Coordinator,
    Lease,
    LeaseLost,
    NotHeld,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer

from ..support.body import FAST, for_ever, waits
from ..support.inside import now
from ..support.primitives import KINDS, Primitive, each
from ..support.processes import Crew
from ..support.sweep import Outcome, sweep

Movable: TypeAlias = AsyncLock | AsyncSemaphore
Make: TypeAlias = Callable[[Coordinator], Movable]
WAYS: dict[str, Make] = {
    "lock": lambda sync: AsyncLock(sync, "d", ttl=60),
    "semaphore": lambda sync: AsyncSemaphore(sync, "d", limit=2, ttl=60),
}


@pytest.fixture(params=WAYS.values(), ids=list(WAYS))
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


async def test_one_process_acquires_and_another_releases(sync: Coordinator, other: Coordinator, make: Make) -> None:
    """The fence stays, the first lease has ended, and a waiter has it only after the second one is released."""
    lease = await make(sync).acquire()
    token = await lease.detach(ttl=40)
    assert token.isprintable()
    with pytest.raises(NotHeld):
        lease.check()
    await lease.release()  # does nothing
    attached = await make(other).attach(token)
    assert (attached.fence, attached.name) == (lease.fence, "d")
    assert 40 < attached.remaining() < 61
    assert attached.token != lease.token
    assert (await make(sync).try_acquire() is None) is isinstance(make(sync), AsyncLock)
    await attached.release()
    async with asyncio.timeout(20), make(sync) as following:
        assert following.fence > lease.fence


async def test_a_detached_lease_does_not_outlast_its_max_hold(sync: Coordinator, redis: Redis) -> None:
    """A longer ttl is refused, and the lease stays; without a ttl it lasts for what is left."""
    for ttl in (60, None):
        lock = AsyncLock(sync, "d", ttl=ttl, max_hold=20)
        lease = await lock.acquire()
        with pytest.raises(ValueError, match=r"max_hold.*not 25"):
            await lease.detach(ttl=25)
        lease.check()
        before = lease.remaining()
        token = await lease.detach()
        assert 0 < await redis.pttl("d") < before * 1000 + 1000
        attached = await lock.attach(token)
        await (await lock.attach(await attached.detach(ttl=5))).release()


@pytest.mark.parametrize("kind", [AsyncLock, partial(AsyncSemaphore, limit=1)], ids=["lock", "semaphore"])
async def test_detached_late_it_is_held_for_the_rest_of_its_max_hold(
    sync: Coordinator, other: Coordinator, kind: Callable[..., Movable]
) -> None:
    """Its ttl is longer than that, and none was given."""
    lease = await kind(sync, "d", ttl=30, max_hold=30).acquire()
    await asyncio.sleep(20)
    detached = now()
    await lease.detach()
    async with asyncio.timeout(60), kind(other, "d"):
        assert 8 < now() - detached < 12


async def test_a_lock_without_an_end_is_detached_without_one(sync: Coordinator, redis: Redis) -> None:
    lock = sync.lock("d", ttl=None)
    token = await (await lock.acquire()).detach()
    assert await redis.pttl("d") == -1
    attached = await lock.attach(token)
    assert await redis.pttl("d") == -1
    await attached.release()
    assert await redis.exists("d") == 0


async def test_of_several_that_attach_one_gets_it(sync: Coordinator, other: Coordinator, make: Make) -> None:
    """In whatever order they come; nor does another one, after the release."""
    token = await (await make(sync).acquire()).detach()
    found = await asyncio.gather(
        *(make(one).attach(token) for one in (sync, other, sync, other)), return_exceptions=True
    )
    (lease,) = [one for one in found if isinstance(one, Lease)]
    assert sum(isinstance(one, NotHeld) for one in found) == 3
    await lease.release()
    with pytest.raises(NotHeld, match="attached before"):
        await make(other).attach(token)


async def test_the_weight_of_permits_stays(sync: Coordinator, other: Coordinator) -> None:
    gpus = AsyncSemaphore(sync, "gpu", limit=4)
    token = await (await gpus.acquire(weight=3)).detach()
    async with await AsyncSemaphore(other, "gpu", limit=4).attach(token) as attached:
        assert attached.weight == 3
        assert (await gpus.statistics()).held == 3
    assert (await gpus.statistics()).held == 0


async def test_an_attached_lease_is_renewed(sync: Coordinator, other: Coordinator, make: Make) -> None:
    token = await (await make(sync).acquire()).detach()
    async with await make(other).attach(token, ttl=4) as attached:
        await asyncio.sleep(10)
        attached.check()


async def test_a_body_may_detach_its_lease(sync: Coordinator, other: Coordinator, make: Make) -> None:
    """Its end releases nothing then, and its lease is not reported as forgotten."""

    async def handler() -> tuple[int, str]:
        async with make(sync) as lease:
            return lease.fence, await lease.detach()

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        fence, token = await asyncio.create_task(handler())
        gc.collect()
    async with await make(other).attach(token) as attached:
        assert attached.fence == fence


async def test_a_body_in_another_task_ends_when_its_lease_is_detached(sync: Coordinator) -> None:
    entered: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()

    async def body() -> None:
        async with sync.lock("d") as lease:
            entered.set_result(lease)
            await for_ever()

    running = asyncio.create_task(body())
    token = await (await entered).detach()
    with pytest.raises(LeaseLost):
        await running
    await (await sync.lock("d").attach(token)).release()


async def test_waiters_wait_on_and_get_it_in_the_end(sync: Coordinator, other: Coordinator) -> None:
    """A waiter is told when a detached lease ends sooner than it thought."""
    lease = await sync.lock("d", ttl=3600).acquire()
    waiter = asyncio.create_task(other.lock("d").acquire())
    await wait_until(waits(sync.lock("d")), FAST, timeout=20)
    token = await lease.detach(ttl=3600)
    attached = await sync.lock("d", auto_renew=False).attach(token, ttl=2)
    async with asyncio.timeout(5), await waiter as granted:
        assert granted.fence > attached.fence


async def attaches(sync: Coordinator, token: str) -> dict[str, object]:
    """In a child: attach the lock, and report its fence."""
    lease = await sync.lock("d", ttl=60).attach(token)
    return {"fence": lease.fence}


async def detaches(sync: Coordinator) -> dict[str, object]:
    """In a child: acquire the lock, and detach it."""
    lease = await sync.lock("d", ttl=60).acquire()
    return {"fence": lease.fence, "token": await lease.detach()}


@pytest.mark.ci
@pytest.mark.real
async def test_it_survives_the_process_that_detached_it(
    sync: Coordinator, server: EmbeddedServer, redis: Redis, crew: Crew
) -> None:
    """Which is killed; and one that is killed after it attached leaves the lease to its ttl, and nobody else."""
    with crew.children(2) as (api, worker):
        await api.open(server.url)
        await worker.open(server.url)
        found = await api.run(detaches)
        api.kill()
        attached = await worker.run(attaches, found["token"])
        assert attached["fence"] == found["fence"]
        worker.kill()
        with pytest.raises(NotHeld):
            await sync.lock("d").attach(found["token"])
        assert await redis.exists("d") == 1


# -- refusals ----------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[Callable[[Coordinator], Awaitable[Lease]], str]] = {
    "of an identity": (lambda sync: sync.lock("d").acquire(identity="me"), "cannot be detached"),
    "shared": (lambda sync: sync.lock("d", share=True, linger=60).acquire(), "cannot be detached"),
    "lock with WATCH": (lambda sync: sync.lock("d", engine="watch").acquire(), "attaching needs scripts"),
    "permits with WATCH": (lambda sync: sync.semaphore("d", 1, engine="watch").acquire(), "attaching needs scripts"),
}


@pytest.mark.parametrize(("acquire", "words"), REFUSED.values(), ids=REFUSED)
async def test_a_lease_that_stays_where_it_is(
    sync: Coordinator, acquire: Callable[[Coordinator], Awaitable[Lease]], words: str
) -> None:
    """It is held as before."""
    lease = await acquire(sync)
    with pytest.raises(ValueError, match=words):
        await lease.detach()
    lease.check()
    await lease.release()


async def test_a_lease_that_is_not_held_cannot_be_detached(sync: Coordinator, redis: Redis) -> None:
    lease = await sync.lock("d").acquire()
    await lease.release()
    with pytest.raises(NotHeld):
        await lease.detach()
    lease = await sync.lock("d").acquire()
    await redis.set("d", "somebody else")
    with pytest.raises(LeaseLost):
        await lease.detach()


async def test_a_lease_that_ended_cannot_be_attached(sync: Coordinator, make: Make) -> None:
    token = await (await make(sync).acquire()).detach(ttl=3)
    await asyncio.sleep(4)
    with pytest.raises(NotHeld):
        await make(sync).attach(token)
    async with make(sync):
        with pytest.raises(NotHeld):
            await make(sync).attach(token)


async def test_tokens_of_others_are_refused(sync: Coordinator) -> None:
    lease = await sync.lock("d").acquire()
    held = lease.token
    token = await lease.detach()
    for wrong in (held, "", "detached", "detached..", f"{token}0", token[:-1], "detached.%.0123456789ab"):
        with pytest.raises(ValueError, match="attach takes the text"):
            await sync.lock("d").attach(wrong)
    for lock in (sync.lock("e"), sync.semaphore("d", limit=1)):
        with pytest.raises(ValueError, match="another name"):
            await lock.attach(token)
    untyped: Any = token.encode()
    with pytest.raises(TypeError, match="is str"):
        await sync.lock("d").attach(untyped)
    for watched in (sync.lock("d", engine="watch"), sync.semaphore("d", 1, engine="watch")):
        with pytest.raises(ValueError, match=r"attach\(\) needs scripts: engine must be"):
            await watched.attach("any")
    await (await sync.lock("d").attach(token)).release()


# -- P5: the task is cancelled at every suspension point, once and twice: one process has the lease after that ----

twice = pytest.mark.parametrize("twice", [False, pytest.param(True, marks=pytest.mark.ci)], ids=["once", "twice"])


@dataclass
class Hands:
    """The lease of one run, as far as it has come."""

    leases: list[Lease] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)


async def attached(lock: AsyncLock | AsyncSemaphore, token: str) -> Lease | None:
    try:
        found: Lease = await lock.attach(token)
        return found
    except NotHeld:
        return None


@twice
@each(KINDS, "kind")
async def test_a_lease_that_changes_hands_is_with_one(
    sync: Coordinator, other: Coordinator, kind: Primitive, twice: bool
) -> None:
    """It is held where its task says, or by the one that attaches its token."""
    first, second, hands = kind.make(sync, "c", ttl=600), kind.make(other, "c", ttl=600), Hands()

    async def move() -> None:
        hands.leases.append(await first.acquire())
        hands.tokens.append(await hands.leases[0].detach())
        hands.leases.append(await second.attach(hands.tokens[0]))

    async def check(outcome: Outcome[None]) -> None:
        leases, tokens = hands.leases.copy(), hands.tokens.copy()
        hands.leases.clear()
        hands.tokens.clear()
        if tokens and len(leases) == 1:  # on its way: the undoing may be, too
            found: list[Lease] = []

            async def came() -> bool:
                both = await asyncio.gather(attached(first, tokens[0]), attached(second, tokens[0]))
                found.extend(lease for lease in both if lease is not None)
                return bool(found)

            await wait_until(came, FAST, timeout=60)
            leases += found
        if tokens:
            assert len(leases) == 2
            assert leases[0].fence == leases[1].fence
            assert await attached(first, tokens[0]) is None
        if leases:
            leases[-1].check()
            assert (await second.statistics()).fence == leases[-1].fence
            await leases[-1].release()

        async def free() -> bool:
            lease = await second.try_acquire()
            if lease is not None:
                await lease.release()
            return lease is not None

        await wait_until(free, FAST, timeout=60)

    result = await sweep(move, check, twice=twice)
    assert len(result.outcomes) > 9
