"""P1, P2, P6, P8 and FAULTS A1-A5 over real processes: they wait in line, are killed, are stopped.

A lease lasts for three seconds or more, and verdicts are about order and state, so a busy machine changes none of them.
Tests of a kind wait together. How soon each next grant comes is in test_wire_time, in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncSemaphore, Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action, FaultProxy, script

from ..support.body import FAST, waits
from ..support.inside import load
from ..support.pairwise import first_of
from ..support.processes import Answer, Child, Crew, Failed
from ..support.sharing import turns
from ..support.views import holder_of, tokens

pytestmark = pytest.mark.real
NAME = "shared"
LIMIT = 4
TTL = 3.0
LONG = 90.0
"""Seconds of a lease, or of a claim, whose end no test waits for."""
PATIENCE = 30.0
"""Seconds until a test that hangs fails: less than `LONG`."""


@pytest_asyncio.fixture
async def lock(sync: Coordinator) -> AsyncIterator[AsyncLock]:
    """The lock, from the test's own process."""
    yield AsyncLock(sync, NAME, ttl=30)


@pytest_asyncio.fixture
async def sem(sync: Coordinator) -> AsyncIterator[AsyncSemaphore]:
    """The semaphore, from the test's own process."""
    yield AsyncSemaphore(sync, NAME, limit=LIMIT)


async def opened(server: EmbeddedServer, *children: Child, claim: float | None = LONG) -> None:
    await asyncio.gather(*(child.open(server.url, claim=claim) for child in children))


async def queue_up(
    it: AsyncLock | AsyncSemaphore, *children: Child, weights: tuple[int, ...] = ()
) -> list[asyncio.Future[Answer]]:
    """Let the children ask for it in this order; return once all of them are queued. Slots are called 1, 2, ...."""
    grants: list[asyncio.Future[Answer]] = []
    for number, child in enumerate(children, start=1):
        if weights:
            grants.append(child.permits(NAME, LONG, weights[number - 1], LIMIT, slot=str(number)))
        else:
            grants.append(child.acquire(NAME, LONG, slot=str(number)))
        await wait_until(waits(it, number), FAST, timeout=PATIENCE)
    return grants


async def granted(grant: asyncio.Future[Answer]) -> Answer:
    return await asyncio.wait_for(grant, PATIENCE)


async def is_free(it: AsyncLock | AsyncSemaphore) -> bool:
    found = await it.statistics()
    return (found.held, found.waiting) == (0, 0)


async def test_p2_p8_grants_follow_arrival_over_processes(server: EmbeddedServer, lock: AsyncLock, crew: Crew) -> None:
    holder = await lock.acquire()
    with crew.children(3) as children:
        await opened(server, *children)
        a, b, c = children
        order = (a, b, c, c, a, b, b, c, a)
        grants = await queue_up(lock, *order)
        await holder.release()
        fence, at = holder.fence, 0.0
        for number, child in enumerate(order, start=1):
            found = await granted(grants[number - 1])
            assert not any(later.done() for later in grants[number:])
            assert found.fence > fence
            assert found.at > at
            fence, at = found.fence, found.at
            await child.release(str(number))
    assert await is_free(lock)


# -- A2: killed or stopped while waiting ---------------------------------------------------------------------


@pytest.mark.parametrize("permits", [False, True], ids=["lock", "permits"])
@pytest.mark.parametrize(
    "dead", first_of((0, 2), (0,), (1,), (0, 1)), ids=["every-other", "head", "middle", "first-two"]
)
async def test_p2_a2_killed_waiters_are_skipped(
    server: EmbeddedServer,
    lock: AsyncLock,
    sem: AsyncSemaphore,
    redis: Redis,
    crew: Crew,
    permits: bool,
    dead: tuple[int, ...],
) -> None:
    """Those behind them do not wait for a claim, whatever the dead ones weigh."""
    it = sem if permits else lock
    holder = await (sem.acquire(weight=LIMIT) if permits else lock.acquire())
    with crew.children(4) as children:
        await opened(server, *children)
        grants = await queue_up(it, *children, weights=(3, 4, 2, 1) if permits else ())
        for number in dead:
            await children[number].kill_seen(redis)
        await holder.release()
        fence = holder.fence
        for number, grant in enumerate(grants):
            if number not in dead:
                found = await granted(grant)
                assert found.fence > fence
                fence = found.fence
                await children[number].release(str(number + 1))
    assert await is_free(it)


async def test_p2_a2_a_death_that_the_server_has_not_seen_costs_the_claim(
    server: EmbeddedServer, lock: AsyncLock, crew: Crew
) -> None:
    """The other order: the hand-over is in time, its process is not."""
    holder = await lock.acquire()
    with crew.children(2) as (head, second):
        await opened(server, head, second, claim=1.0)
        _, grant = await queue_up(lock, head, second)
        server.pause()
        try:
            head.kill()
            release = asyncio.create_task(holder.release())
            await turns()  # it is written: the server finds both when it goes on
        finally:
            server.resume()
        await release
        assert (await granted(grant)).fence > holder.fence
        await second.release("2")
    assert await is_free(lock)


async def test_p2_a2_a_stopped_waiter_costs_its_claim(
    server: EmbeddedServer, lock: AsyncLock, redis: Redis, crew: Crew
) -> None:
    """By default that is less than 5 seconds, whatever the ttl. Its stale grant is none: it stands in line again."""
    holder = await lock.acquire()
    with crew.children(2) as (head, second):
        await opened(server, head, second, claim=None)
        stale, grant = await queue_up(lock, head, second)
        head.stop()
        await holder.release()
        assert await redis.pttl(NAME) < 5000
        found = await granted(grant)
        head.go_on()
        await wait_until(waits(lock, 1), FAST, timeout=PATIENCE)  # it asked again
        assert not stale.done()
        assert holder_of(await lock.statistics()) == found["token"]
        await second.ask("check", "2")
        await second.release("2")
        again = await granted(stale)
        assert again.fence > found.fence
        await head.ask("check", "1")
        await head.release("1")
    assert await is_free(lock)


# -- A1, A3: killed while holding ----------------------------------------------------------------------------


async def test_p1_a1_a_killed_holder_costs_its_remaining_lease(
    server: EmbeddedServer, sync: Coordinator, crew: Crew
) -> None:
    """Killed from outside, or in the middle of its section. Of permits, those of others are not disturbed."""

    async def of_a_lock(child: Child, by_own_hand: bool) -> None:
        lock = AsyncLock(sync, f"{NAME} {by_own_hand}".replace(" ", "-"))
        dead = await child.acquire(lock.name, TTL)
        waiter = asyncio.create_task(lock.acquire())
        await wait_until(waits(lock), FAST, timeout=PATIENCE)
        if by_own_hand:
            child.ask("die", "it")
            await asyncio.to_thread(child.process.wait)
        else:
            child.kill()
        async with asyncio.timeout(PATIENCE), await waiter as lease:
            assert lease.fence > dead.fence
        assert await is_free(lock)

    async def of_permits(child: Child) -> None:
        sem = AsyncSemaphore(sync, "permits", limit=LIMIT)
        kept = await sem.acquire()
        dead = await child.permits(sem.name, TTL, 3, LIMIT)
        waiting = [asyncio.create_task(sem.acquire(weight=weight)) for weight in (2, 1)]
        await wait_until(waits(sem, 2), FAST, timeout=PATIENCE)
        child.kill()
        async with asyncio.timeout(PATIENCE):
            for task in waiting:
                async with await task as lease:
                    assert lease.fence > dead.fence
        kept.check()
        await kept.release()
        assert await is_free(sem)

    with crew.children(3) as (one, two, three):
        await opened(server, one, two, three)
        await asyncio.gather(of_a_lock(one, False), of_a_lock(two, True), of_permits(three))


async def test_p1_a3_killed_between_grant_and_bookkeeping(
    server: EmbeddedServer, sync: Coordinator, redis: Redis, crew: Crew
) -> None:
    """The server has granted, in its reply or by a push; the process never heard of it. The key ends all the same."""

    async def killed(child: Child, proxy: FaultProxy, pushed: bool) -> None:
        lock = AsyncLock(sync, "pushed" if pushed else "replied")
        holder = await lock.acquire()
        await child.open(proxy.url, claim=TTL)
        if pushed:
            rule = proxy.on_push(lambda _: True, Action.HOLD)
        else:
            await holder.release()
            rule = proxy.on(script(load("lock/acquire").sha), Action.HOLD_REPLY)
        grant = child.acquire(lock.name, TTL)
        if pushed:
            await wait_until(waits(lock), FAST, timeout=PATIENCE)
            await holder.release()
        await asyncio.wait_for(rule.fired.wait(), PATIENCE)
        assert await redis.get(lock.name) is not None
        assert not grant.done()
        child.kill()
        async with lock.acquire(timeout=PATIENCE) as lease:
            assert lease.fence > holder.fence
        rule.release.set()
        assert await is_free(lock)

    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(FaultProxy(server.unix_socket)) for _ in range(2)]
        with crew.children(2) as (one, two):
            await asyncio.gather(killed(one, proxies[0], False), killed(two, proxies[1], True))


# -- A4, A5: stopped while holding ---------------------------------------------------------------------------


async def test_p6_a4_stopped_beyond_the_ttl(
    server: EmbeddedServer, sync: Coordinator, redis: Redis, crew: Crew
) -> None:
    """After SIGCONT it knows before anything else, its body is cancelled, and it takes nothing from the new holder."""

    async def in_its_body(child: Child, name: str, itself: bool) -> None:
        stopped = await child.ask("body", "it", name, TTL)
        if itself:
            woken = child.ask("stop", "it")  # it looks without an await in between
            await wait_until(child.stands_still, FAST, timeout=PATIENCE)
        else:
            child.stop()
            woken = child.ask("lease", "it")
        first = child.ask("lease", "it")  # it is in its pipe: what it reads first when it continues
        async with AsyncLock(sync, name, ttl=30).acquire(timeout=PATIENCE) as lease:
            assert lease.fence > stopped.fence
            child.go_on()
            assert (await granted(woken))["lost"] is True
            read, ended = await granted(first), await granted(child.ask("ended", "it"))
            assert 0 < ended["cancelled_at"] < read.at
            assert ended["raised"] == "LeaseLost"
            for verb in ("release", "check"):
                with pytest.raises(Failed, match="LeaseLost"):
                    await child.ask(verb, "it")
            assert await redis.get(name) == lease.token.encode()

    async def about_to_release(child: Child, name: str) -> None:
        """The release that was in its pipe when it was stopped does not free the lock of another one either."""
        await child.acquire(name, TTL)
        child.stop()
        release = child.release()
        async with AsyncLock(sync, name, ttl=30).acquire(timeout=PATIENCE) as lease:
            child.go_on()
            with pytest.raises(Failed, match="was lost"):
                await release
            assert await redis.get(name) == lease.token.encode()

    async def of_permits(child: Child, name: str) -> None:
        sem = AsyncSemaphore(sync, name, limit=LIMIT)
        await child.permits(name, TTL, 3, LIMIT)
        child.stop()
        leases = [await sem.acquire(weight=weight, timeout=PATIENCE) for weight in (1, 3)]
        child.go_on()
        with pytest.raises(Failed, match="LeaseLost"):
            await child.release()
        assert set(tokens((await sem.statistics()).holders)) == {lease.token for lease in leases}
        for lease in leases:
            await lease.release()
        assert await is_free(sem)

    with crew.children(4) as (one, two, three, four):
        await opened(server, one, two, three, four)
        await asyncio.gather(
            in_its_body(one, "outside", False),
            in_its_body(two, "inside", True),
            about_to_release(three, "releasing"),
            of_permits(four, "permits"),
        )


async def test_p6_a5_stopped_for_half_the_ttl(server: EmbeddedServer, redis: Redis, crew: Crew) -> None:
    """Nothing is lost, though renewals were due."""
    ttl = 12.0

    async def left_less(name: str) -> bool:
        return int(await redis.pttl(name)) < ttl * 500

    async def left_more(name: str) -> bool:
        return int(await redis.pttl(name)) > ttl * 700

    async def torment(number: int, child: Child) -> None:
        slots = [f"{NAME}{number}{slot}" for slot in range(3)]  # also the names of their locks
        leases = [await child.ask("body", slot, slot, ttl) for slot in slots]
        child.stop()
        await wait_until(partial(left_less, slots[0]), FAST, timeout=PATIENCE)
        child.go_on()
        for slot, lease in zip(slots, leases, strict=True):
            assert (await child.ask("lease", slot))["lost"] is False
            await wait_until(partial(left_more, slot), FAST, timeout=PATIENCE)
            assert await redis.get(slot) == lease.token
            assert (await child.ask("leave", slot))["raised"] == ""

    with crew.children(2) as children:
        await opened(server, *children)
        await asyncio.gather(*(torment(number, child) for number, child in enumerate(children)))


@pytest.mark.ci
async def test_p1_p8_contending_for_permits_one_dies_now_and_then(
    server: EmbeddedServer, sem: AsyncSemaphore, crew: Crew
) -> None:
    """By the times of grants and releases there are never more than the limit, and fences are unique.

    The same of locks is tests/chaos.
    """
    events: list[tuple[float, int]] = []
    fences: list[int] = []

    async def work(child: Child, number: int, die_at: int) -> None:
        for turn in range(10):
            weight = 1 + (number + turn) % 3
            found = await granted(child.permits(NAME, TTL, weight, LIMIT))
            fences.append(found.fence)
            if turn == die_at:
                events.extend([(found.at, weight), (found.at, -weight)])
                child.kill()
                return
            checked = await child.ask("check", "it")
            events.extend([(found.at, weight), (checked.at, -weight)])
            await child.release()

    with crew.children(4) as children:
        await opened(server, *children, claim=TTL)
        await asyncio.gather(*(work(child, number, 3 * number + 2) for number, child in enumerate(children)))
    used = peak = 0
    for _, change in sorted(events):
        used += change
        peak = max(peak, used)
    assert used == 0
    assert 1 < peak <= LIMIT
    assert len(fences) == len(set(fences))
    async with sem.acquire(weight=LIMIT, timeout=PATIENCE) as lease:
        assert lease.fence > max(fences)
