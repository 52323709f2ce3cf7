"""P1, P2, P6, P8 and FAULTS A1-A6 over real processes: they wait in line, are killed, stopped, blocked."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, Coordinator, Lease, wait_until
from redis_sync_aio.embedded import EmbeddedServer

from ..support.body import FAST, waits
from ..support.child import Answer, Child, Crew, Failed
from ..support.inside import load
from ..support.pairwise import first_of
from ..support.proxy import HOLD, HOLD_REPLY, FaultProxy, script
from ..support.sharing import turns
from ..support.views import holder_of, remaining_of

pytestmark = pytest.mark.timing
NAME = "shared"
SLACK = 0.2
"""FAULTS A1: seconds that the next grant may come later than the end of a dead holder's lease."""

Die = Callable[[Child], object]
by_own_hand = pytest.param(lambda child: (child.ask("die", "it"), child.process.wait()), id="inside")
from_outside = pytest.param(lambda child: child.kill(), id="outside")


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew() as crew:
        yield crew


@pytest_asyncio.fixture
async def lock(sync: Coordinator) -> AsyncIterator[AsyncLock]:
    """The lock, from the test's own process."""
    yield AsyncLock(sync, NAME, ttl=30)


async def opened(server: EmbeddedServer, children: list[Child], claim: float | None = 2.0) -> None:
    await asyncio.gather(*(child.open(server.url, claim=claim) for child in children))


async def queue_up(lock: AsyncLock, *children: Child, ttl: float = 5.0) -> list[asyncio.Future[Answer]]:
    """Let the children ask for the lock in this order; return once all of them are queued."""
    grants: list[asyncio.Future[Answer]] = []
    before = (await lock.statistics()).waiting
    for number, child in enumerate(children, start=before + 1):
        grants.append(child.acquire(NAME, ttl, slot=str(number)))
        await wait_until(waits(lock, number), FAST, timeout=15)
    return grants


async def free(lock: AsyncLock) -> bool:
    found = await lock.statistics()
    return not bool(found.held) and found.waiting == 0


# -- order ---------------------------------------------------------------------------------------------------


async def test_p2_p8_grants_follow_arrival_over_processes(server: EmbeddedServer, lock: AsyncLock, crew: Crew) -> None:
    holder = await lock.acquire()
    with crew.children(3) as children:
        await opened(server, children)
        a, b, c = children
        order = (a, b, c, c, a, b, b, c, a, a, b, c)
        grants = await queue_up(lock, *order)
        await holder.release()
        fence, at = holder.fence, 0.0
        for number, (child, grant) in enumerate(zip(order, grants, strict=True), start=1):
            done, _ = await asyncio.wait(grants, timeout=5, return_when=asyncio.FIRST_COMPLETED)
            assert done == {grant}
            granted = grant.result()
            assert granted.fence > fence
            assert granted.at > at
            fence, at = granted.fence, granted.at
            grants = [later for later in grants if later is not grant]
            await child.release(str(number))
    assert await free(lock)


# -- A2: killed while waiting --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dead", first_of((0, 2), (0,), (1,), (0, 1)), ids=["every-other", "head", "middle", "first-two"]
)
async def test_p2_a2_killed_waiters_are_skipped(
    server: EmbeddedServer, lock: AsyncLock, redis: Redis, crew: Crew, dead: tuple[int, ...]
) -> None:
    holder = await lock.acquire()
    with crew.children(4) as children:
        await opened(server, children)
        grants = await queue_up(lock, *children)
        for number in dead:
            await children[number].kill_seen(redis)
        fence = holder.fence
        begin = time.monotonic()
        await holder.release()
        for number, grant in enumerate(grants):
            if number in dead:
                assert not grant.done() or grant.cancelled()
                continue
            granted = await asyncio.wait_for(grant, 20)
            assert granted.at - begin < SLACK
            assert granted.fence > fence
            fence = granted.fence
            begin = (await children[number].release(str(number + 1))).at
    assert await free(lock)


async def test_p2_a2_a_death_that_the_server_has_not_seen_costs_the_claim(
    server: EmbeddedServer, lock: AsyncLock, crew: Crew
) -> None:
    """The other order: the hand-over is in time, its process is not."""
    claim = 0.3
    holder = await lock.acquire()
    with crew.children(2) as children:
        await opened(server, children, claim)
        head, second = children
        _, grant = await queue_up(lock, head, second)
        server.pause()
        try:
            head.kill()
            release = asyncio.create_task(holder.release())
            await turns()  # it is written: the server finds both when it goes on
        finally:
            server.resume()
        begin = time.monotonic()
        await release
        granted = await asyncio.wait_for(grant, 20)
        assert granted.at - begin < claim + SLACK
        await second.release("2")
    assert await free(lock)


async def test_p2_a2_a_stopped_waiter_costs_less_than_five_seconds(
    server: EmbeddedServer, lock: AsyncLock, crew: Crew
) -> None:
    """By default, whatever the ttl."""
    holder = await lock.acquire()
    with crew.children(2) as children:
        await opened(server, children, None)
        head, second = children
        _, grant = await queue_up(lock, head, second, ttl=30)
        head.stop()
        begin = time.monotonic()
        await holder.release()
        granted = await asyncio.wait_for(grant, 20)
        assert granted.at - begin < 5
        head.go_on()
        await second.release("2")


async def test_p2_a2_a_stopped_waiter_costs_its_claim(server: EmbeddedServer, lock: AsyncLock, crew: Crew) -> None:
    """Its stale grant is none: after SIGCONT it stands in line again, and its later fence is the greater."""
    claim = 0.3
    holder = await lock.acquire()
    with crew.children(2) as children:
        await opened(server, children, claim)
        head, second = children
        stale, grant = await queue_up(lock, head, second)
        head.stop()
        begin = time.monotonic()
        await holder.release()
        granted = await asyncio.wait_for(grant, 20)
        assert claim - 0.01 < granted.at - begin < claim + SLACK
        head.go_on()
        await wait_until(waits(lock, 1), FAST, timeout=15)  # it asked again
        assert not stale.done()
        assert holder_of(await lock.statistics()) == granted["token"]
        await second.ask("check", "2")
        begin = time.monotonic()
        await second.release("2")
        again = await asyncio.wait_for(stale, 20)
        assert begin < again.at < begin + SLACK
        assert again.fence > granted.fence
        await head.ask("check", "1")
        await head.release("1")
    assert await free(lock)


# -- A1, A3: killed while holding ----------------------------------------------------------------------------


@pytest.mark.parametrize("die", [by_own_hand, from_outside])
async def test_p1_a1_killed_holder_costs_its_remaining_lease(
    server: EmbeddedServer, lock: AsyncLock, crew: Crew, die: Die
) -> None:
    ttl = 0.3
    with crew.children(3) as children:
        await opened(server, children)
        fence = 0
        for child in children:
            granted = await child.acquire(NAME, ttl)
            assert granted.fence > fence
            waiter = asyncio.create_task(lock.acquire())
            await wait_until(waits(lock), FAST, timeout=15)
            die(child)
            begin, remaining = time.monotonic(), remaining_of(await lock.statistics()) or 0.0
            assert remaining <= ttl
            lease = await asyncio.wait_for(waiter, 20)
            assert remaining - 0.02 < time.monotonic() - begin < remaining + SLACK
            assert lease.fence > granted.fence
            fence = lease.fence
            await lease.release()
    assert await free(lock)


@pytest.mark.parametrize("pushed", [False, True], ids=["reply", "push"])
async def test_p1_a3_killed_between_grant_and_bookkeeping(
    server: EmbeddedServer, lock: AsyncLock, redis: Redis, crew: Crew, pushed: bool
) -> None:
    """The server has granted, the process never heard of it: the key ends with its ttl, or its claim."""
    ttl = 0.3
    assert server.port is not None
    async with FaultProxy((server.host, server.port)) as proxy:
        with crew.children(3) as children:
            for child in children:
                await child.open(proxy.url, claim=ttl)
                await child.acquire("warm", ttl)
                if pushed:
                    holder = await lock.acquire()
                    rule = proxy.on_push(lambda _: True, HOLD)
                    [grant] = await queue_up(lock, child, ttl=ttl)
                    await holder.release()
                else:
                    rule = proxy.on(script(load("lock/acquire").sha), HOLD_REPLY)
                    grant = child.acquire(NAME, ttl)
                await asyncio.wait_for(rule.fired.wait(), 20)
                assert await redis.get(NAME) is not None
                assert not grant.done()
                child.kill()
                begin = time.monotonic()
                lease = await asyncio.wait_for(lock.acquire(), 20)
                assert time.monotonic() - begin < ttl + SLACK
                await lease.release()
                rule.release.set()
    assert await free(lock)


# -- A4: stopped for longer than the ttl ---------------------------------------------------------------------


@pytest.mark.parametrize("itself", [False, True], ids=["outside", "inside"])
async def test_p6_a4_stopped_beyond_the_ttl(
    server: EmbeddedServer, sync: Coordinator, redis: Redis, crew: Crew, itself: bool
) -> None:
    """After SIGCONT it knows immediately, its body is cancelled, and it takes nothing from the new holder."""

    async def stop_beyond(child: Child, name: str) -> None:
        stopped = await child.ask("body", "it", name, 3)
        await child.ask("check", "it")
        if itself:
            woken = child.ask("stop", "it")  # it looks without an await in between
            child.wait_stopped()
        else:
            child.stop()
            woken = child.ask("lease", "it")
        first = child.ask("wall")  # it is in its pipe: what it reads first when it continues
        lock = AsyncLock(sync, name, ttl=30)
        lease = await asyncio.wait_for(lock.acquire(), 20)
        assert lease.fence > stopped.fence
        begin = child.go_on()
        assert (await asyncio.wait_for(woken, 20))["lost"] is True
        read = await asyncio.wait_for(first, 20)
        ended = await asyncio.wait_for(child.ask("ended", "it"), 20)
        assert begin < ended["cancelled_at"] < read.at
        assert ended["raised"] == "LeaseLost"
        await assert_harmless(child)
        assert await redis.get(name) == lease.token.encode()
        lease.check()
        await lease.release()
        assert await free(lock)

    with crew.children(3) as children:
        await opened(server, children)
        await asyncio.gather(*(stop_beyond(child, f"{NAME}{number}") for number, child in enumerate(children)))


async def assert_harmless(child: Child) -> None:
    """Nothing the child does with its lost lease works."""
    for verb in ("release", "check"):
        with pytest.raises(Failed) as caught:
            await child.ask(verb, "it")
        assert caught.value.kind == "LeaseLost"


async def test_p6_a4_released_right_after_waking_up(
    server: EmbeddedServer, lock: AsyncLock, redis: Redis, crew: Crew
) -> None:
    """The release that was already in its pipe when it was stopped does not free another's lock either."""
    with crew.children(1) as children:
        await opened(server, children)
        child = children[0]
        await child.acquire(NAME, 0.2)
        child.stop()
        release = child.release()
        lease = await asyncio.wait_for(lock.acquire(), 20)
        child.go_on()
        with pytest.raises(Failed, match="was lost"):
            await release
        assert await redis.get(NAME) == lease.token.encode()
        await lease.release()


async def test_p1_a4_a_late_release_frees_nobody_elses_lock(
    server: EmbeddedServer, lock: AsyncLock, redis: Redis, crew: Crew
) -> None:
    """Sent in good time, in flight for longer than the ttl: the server looks at its token."""
    assert server.port is not None
    async with FaultProxy((server.host, server.port)) as proxy:
        with crew.children(1) as children:
            child = children[0]
            await child.open(proxy.url)
            await child.acquire("warm", 5)
            await child.release()
            await child.acquire(NAME, 0.3)
            rule = proxy.on(script(load("lock/release").sha), HOLD)
            release = child.release()
            await asyncio.wait_for(rule.fired.wait(), 20)
            lease = await asyncio.wait_for(lock.acquire(), 20)
            rule.release.set()
            with pytest.raises(Failed) as caught:
                await asyncio.wait_for(release, 20)
            assert caught.value.kind in ("LeaseLost", "Unreachable")
            await child.ask("open", proxy.url, 2.0)  # on the same way, after the release
            assert await redis.get(NAME) == lease.token.encode()
            await lease.release()


# -- A5, A6: stopped or blocked for less ---------------------------------------------------------------------


async def test_p6_a5_stopped_for_half_the_ttl(server: EmbeddedServer, redis: Redis, crew: Crew) -> None:
    """Nothing is lost, 20 times: four leases of each of five processes."""
    ttl = 6.0

    async def torment(number: int, child: Child) -> None:
        slots = [f"{NAME}{number}{slot}" for slot in range(4)]  # also the names of their locks
        granted = [await child.ask("body", slot, slot, ttl) for slot in slots]
        child.stop()
        await asyncio.sleep(ttl / 2)  # what is tested
        child.go_on()
        for slot, grant in zip(slots, granted, strict=True):
            assert (await child.ask("lease", slot))["lost"] is False
            assert await redis.get(slot) == grant.token
            await wait_until(partial(renewed, redis, slot, ttl), FAST, timeout=15)
            assert (await child.ask("leave", slot))["raised"] == ""

    with crew.children(5) as children:
        await opened(server, children)
        await asyncio.gather(*(torment(number, child) for number, child in enumerate(children)))


async def renewed(redis: Redis, name: str, ttl: float) -> bool:
    return int(await redis.pttl(name)) > ttl * 900


async def test_p6_a6_loop_blocked_for_half_the_ttl(server: EmbeddedServer, redis: Redis, crew: Crew) -> None:
    """Nothing is lost, in three processes."""
    ttl = 4.0

    async def torment(child: Child, name: str) -> None:
        granted = await child.ask("body", "it", name, ttl)
        assert (await child.ask("block", "it", ttl / 2))["lost"] is False
        await wait_until(lambda: renewed(redis, name, ttl), FAST, timeout=15)
        assert await redis.get(name) == granted.token
        assert (await child.ask("leave", "it"))["raised"] == ""

    with crew.children(3) as children:
        await opened(server, children)
        await asyncio.gather(*(torment(child, f"{NAME}{number}") for number, child in enumerate(children)))


async def test_p6_a6_loop_blocked_beyond_the_ttl(
    server: EmbeddedServer, lock: AsyncLock, redis: Redis, crew: Crew
) -> None:
    """Known without a look at the server, and before the body can go on."""
    ttl = 0.2
    with crew.children(1) as children:
        await opened(server, children)
        child = children[0]
        blocked = await child.ask("body", "it", NAME, ttl)
        answer = child.ask("block", "it", ttl * 2)
        lease = await asyncio.wait_for(lock.acquire(), 20)
        first = child.ask("wall")  # it is in its pipe: what it reads first when it continues
        assert lease.fence > blocked.fence
        woken = await answer
        assert woken["lost"] is True
        read = await asyncio.wait_for(first, 20)
        ended = await asyncio.wait_for(child.ask("ended", "it"), 20)
        assert ended["cancelled_at"] < read.at
        assert ended["raised"] == "LeaseLost"
        await assert_harmless(child)
        assert await redis.get(NAME) == lease.token.encode()
        await lease.release()
    assert await free(lock)


async def test_p1_p8_contending_processes_one_dies_now_and_then(
    server: EmbeddedServer, lock: AsyncLock, crew: Crew
) -> None:
    """No two live leases: every acquisition reads, checks and writes a counter that nothing else protects."""
    history: list[tuple[float, float, int]] = []

    async def work(child: Child, slot: str, die_at: int) -> None:
        for turn in range(12):
            granted = await asyncio.wait_for(child.acquire(NAME, 0.3, slot), 10)
            if turn == die_at:
                history.append((granted.at, granted.at, granted.fence))
                child.kill()
                return
            await child.ask("check", slot)
            released = await child.ask("check", slot)
            history.append((granted.at, released.at, granted.fence))
            await child.release(slot)

    with crew.children(4) as children:
        await opened(server, children, claim=0.3)
        await asyncio.gather(*(work(child, "it", 3 * number + 3) for number, child in enumerate(children)))
    history.sort(key=lambda entry: entry[2])
    for (_, end, fence), (begin, _, later) in itertools.pairwise(history):
        assert begin > end
        assert later > fence
    lease: Lease = await lock.acquire(timeout=2)
    await lease.release()
