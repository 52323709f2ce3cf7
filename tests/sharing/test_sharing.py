"""P1, P2, P8: tasks that share what their process holds: handing on, fences, and the turns of others."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, Coordinator, Lease, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action, FaultProxy, anything, script

from ..conftest import MakeClient
from ..support.body import FAST
from ..support.inside import CONTENDED, FENCE_RANGE, hub_of, link_events_of, load, now, tuned
from ..support.inspecting import calls
from ..support.sharing import (
    KEYS,
    NAME,
    busy,
    gets_free,
    in_queue,
    on_wanted,
    process_grant_of,
    shared,
    soon,
    told,
    turns,
    waiters,
)
from ..support.virtual import virtual_time
from ..support.wired import RENEW


def rising(leases: list[Lease]) -> bool:
    """Whether the fences strictly increase."""
    fences = [lease.fence for lease in leases]
    return all(one < two for one, two in itertools.pairwise(fences))


# -- handing on ----------------------------------------------------------------------------------------------


@pytest.mark.real  # counts the commands of the server
@pytest.mark.parametrize(("grants", "sent"), [(6, 2), (10, 3)])
async def test_p2_handing_on_sends_nothing(redis: Redis, sync: Coordinator, grants: int, sent: int) -> None:
    """P2, P8: 60 grants among 10 tasks are one acquire and one release, in the order of asking and under one token.

    Of 100 grants a renewal is sent, for more fences: more than half of the first 128 are used.
    """
    lock = shared(sync)
    async with lock as lease:  # the scripts are known
        await lease.extend(30)
    before = await calls(redis)
    seen: list[tuple[int, Lease]] = []

    async def one(number: int) -> None:
        for _ in range(grants):
            async with lock as lease:
                seen.append((number, lease))
                await asyncio.sleep(0)

    await asyncio.gather(*(one(number) for number in range(10)))
    assert await calls(redis) - before == sent
    assert [number for number, _ in seen] == [*range(10)] * grants
    assert len({lease.token for _, lease in seen}) == 1
    assert rising([lease for _, lease in seen])


async def test_p8_fences_over_ranges(redis: Redis, sync: Coordinator) -> None:
    """P8: 20,000 local grants, more than the largest range: fences rise, each is reserved before it is given."""
    lock = shared(sync)
    async with busy(lock, 4) as leases:
        await wait_until(lambda: len(leases) > 20_000, FAST, timeout=30)
        last = leases[-1].fence
    assert rising(leases)
    assert last <= int((await redis.get(KEYS.fence) or b"").split()[0])
    async with shared(sync) as lease:
        assert lease.fence > leases[-1].fence


async def test_p8_all_that_was_reserved_is_used(redis: Redis, sync: Coordinator) -> None:
    """P8: the last fence that may be given is the one that the server stores, after a grant and after a renewal."""
    async with shared(sync) as lease:
        base = process_grant_of(lease)
        for _ in range(3):
            assert int((await redis.get(KEYS.fence) or b"").split()[0]) == base.last_fence
            before, base.next_fence = base.last_fence, base.half + 1
            base.look()
            await wait_until(lambda: base.last_fence > before, FAST, timeout=5)  # noqa: B023


async def test_p8_fences_that_are_used_up(server: EmbeddedServer, redis: Redis) -> None:
    """P8: the answer with more fences is late: after the last one the base goes back, and all go on with another."""
    async with (
        FaultProxy(server) as proxy,
        proxy.client() as client,
        Coordinator(client) as sync,
    ):
        lock = shared(sync)
        async with lock:
            pass
        held = proxy.on(RENEW, Action.HOLD_REPLY)
        async with busy(lock, 3) as leases:
            await wait_until(lambda: len(leases) >= FENCE_RANGE, FAST, timeout=5)
            await held.fired.wait()
            assert len(leases) == FENCE_RANGE, "nothing is granted beyond the range"
            held.release.set()
            await wait_until(lambda: len(leases) > 2 * FENCE_RANGE, FAST, timeout=5)
        assert rising(leases)
        assert len({lease.token for lease in leases[: FENCE_RANGE + 1]}) == 2


# -- others wait ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("burst", [1, 5])
async def test_p2_at_most_burst_more(redis: Redis, other: Coordinator, burst: int) -> None:
    """P2: from the word that another process waits, ``burst`` grants at most, until it has its turn."""
    async with tuned(redis, burst=burst, slice=60) as sync:
        heard: list[int] = []

        async with busy(shared(sync), 4) as leases:

            def note(deliver: Callable[[], None]) -> None:
                heard.append(len(leases))
                deliver()

            on_wanted(sync, note)
            for _ in range(8):
                heard.clear()
                lease = await soon(asyncio.ensure_future(shared(other).acquire()))
                assert len(leases) <= heard[0] + burst + 1, "the one it was handed to already may not have run"
                await lease.release()


async def test_p2_another_word_does_not_begin_another_burst(redis: Redis, other: Coordinator) -> None:
    async with tuned(redis, burst=2, slice=60) as sync:
        lease = await shared(sync).acquire()
        mine = await waiters(shared(sync), sync, 4)
        theirs = [asyncio.create_task(shared(other).acquire())]
        await told(process_grant_of(lease))
        await lease.release()
        lease = await soon(mine[0])
        theirs.append(asyncio.create_task(shared(other, share=False).acquire()))
        await in_queue(redis, 2)
        await asyncio.sleep(0.1)  # the second word arrives
        await lease.release()
        await (await soon(mine[1])).release()
        lease = await soon(theirs[0])
        assert not mine[2].done()
        for task in (theirs[1], *mine[2:]):
            await lease.release()
            lease = await soon(task)
        await lease.release()


@pytest.mark.parametrize("share", [True, False])
async def test_p2_not_after_slice(redis: Redis, make_client: MakeClient, share: bool) -> None:
    """P2: handed on until ``slice`` has passed since the word, and not after; the waiter may share or not."""
    late = 0.0
    before = now
    with virtual_time(lambda: before() + late):
        async with (
            tuned(redis, burst=10**6, slice=5) as sync,
            Coordinator(make_client(), claim=30) as other,  # its clock is ahead too
        ):
            lease = await shared(sync).acquire()
            base = process_grant_of(lease)
            mine = await waiters(shared(sync), sync, 3)
            theirs = asyncio.create_task(shared(other, share=share).acquire())
            await told(base)
            late = 4.0
            await lease.release()
            second = await soon(mine[0])
            assert process_grant_of(second) is base
            late = 5.1
            await second.release()
            third = await soon(theirs)
            assert not mine[1].done()
            await third.release()
            for task in mine[1:]:
                await (await soon(task)).release()


@pytest.mark.parametrize("order", ["told first", "told in the same turn", "released first"])
async def test_p1_p2_told_and_released(redis: Redis, other: Coordinator, order: str) -> None:
    """P1, P2: the word arrives before the release, right before it, or when the base is gone: it is harmless then."""
    kept: list[Callable[[], None]] = []
    async with tuned(redis, burst=1, slice=60) as sync:
        lease = await shared(sync).acquire()
        base = process_grant_of(lease)
        mine = await waiters(shared(sync), sync, 2)
        on_wanted(sync, kept.append)
        theirs = asyncio.create_task(shared(other).acquire())
        await wait_until(lambda: bool(kept), FAST, timeout=5)
        if order != "released first":
            kept.pop()()
            if order == "told first":
                await turns()
        await lease.release()
        second = await soon(mine[0])
        assert process_grant_of(second) is base, "the first after the word"
        await second.release()
        if order == "released first":
            third = await soon(mine[1])
            assert process_grant_of(third) is base, "the word was not heard"
            await third.release()
        lease = await soon(theirs)
        assert mine[1].done() == (order == "released first")
        for deliver in kept:
            deliver()
        await turns()
        lease.check()
        await lease.release()
        if order != "released first":
            lease = await soon(mine[1])
            assert not process_grant_of(lease).contended
            await lease.release()


async def grants(coordinators: tuple[Coordinator, ...], tasks: tuple[int, ...], number: int) -> list[list[int]]:
    """Let so many tasks of each contend for so many grants; return how many each got."""
    left = number

    async def one(lock: AsyncLock) -> int:
        nonlocal left
        got = 0
        while left > 0:
            async with lock:
                left -= 1
                got += 1
                await asyncio.sleep(0)
        return got

    return await asyncio.gather(
        *(
            asyncio.gather(*(one(shared(sync)) for _ in range(size)))
            for sync, size in zip(coordinators, tasks, strict=True)
        )
    )


async def test_p2_a_lone_task_gets_its_half(redis: Redis, sync: Coordinator, other: Coordinator) -> None:
    """P2: a process with one busy task has as many grants as one with sixteen."""
    (lone,), many = await grants((sync, other), (1, 16), 8000)
    assert 0.4 < lone / (lone + sum(many)) < 0.6


async def test_p2_turns_are_even(redis: Redis, sync: Coordinator, other: Coordinator) -> None:
    """P2: two times sixteen tasks: Jain's index over all of them is 0.95 at least."""
    got = [number for each in await grants((sync, other), (16, 16), 8000) for number in each]
    assert sum(got) ** 2 / (len(got) * sum(number**2 for number in got)) >= 0.95


# -- the word is lost ----------------------------------------------------------------------------------------


async def test_p3_the_word_is_lost_and_a_renewal_says_it(redis: Redis, other: Coordinator) -> None:
    """P3: nobody hears that others wait; the next renewal says so."""
    async with tuned(redis, slice=60) as sync:
        swallowed: list[object] = []
        on_wanted(sync, swallowed.append)
        lock = shared(sync, ttl=5)
        lease = await lock.acquire()
        tasks = await waiters(lock, sync, 2)
        theirs = asyncio.create_task(shared(other).acquire())
        await wait_until(lambda: bool(swallowed), FAST, timeout=5)
        assert not process_grant_of(lease).contended
        await told(process_grant_of(lease))
        for task in (*tasks, theirs):
            await lease.release()
            lease = await soon(task)
        await lease.release()


async def test_p3_the_word_is_lost_with_the_connection(server: EmbeddedServer, redis: Redis) -> None:
    """P3: after a reconnect it is said again, long before a renewal is due."""
    async with (
        FaultProxy(server) as proxy,
        proxy.client() as client,
        tuned(client, slice=60) as sync,
        Coordinator(redis) as other,
    ):
        lease = await shared(sync, ttl=600).acquire()
        lost = proxy.on_push(anything, Action.DROP)
        theirs = asyncio.create_task(shared(other).acquire())
        await lost.fired.wait()
        assert not process_grant_of(lease).contended
        await proxy.cut()
        await told(process_grant_of(lease))
        await lease.release()
        await (await soon(theirs)).release()


async def test_p3_the_word_is_lost_with_the_answer_to_the_request(server: EmbeddedServer, redis: Redis) -> None:
    """P3: who has to ask again whether it has it hears that others wait."""
    async with (
        FaultProxy(server) as proxy,
        proxy.client() as client,
        Coordinator(client) as sync,
        Coordinator(redis) as other,
    ):
        for each in (sync, other):
            await (await shared(each).acquire()).release()
        lost = proxy.on(script(load("lock/acquire").sha), Action.CUT_AFTER)
        proxy.refuse = True
        asking = asyncio.create_task(shared(sync, ttl=600).acquire())
        await lost.fired.wait()
        theirs = asyncio.create_task(shared(other).acquire())
        await in_queue(redis, 1)
        proxy.refuse = False
        lease = await asyncio.wait_for(asking, 60)
        await asyncio.sleep(0.5)  # long before a renewal is due
        assert process_grant_of(lease).contended
        await lease.release()
        await (await soon(theirs)).release()


@pytest.mark.parametrize("pushed", [False, True], ids=["reply", "push"])
async def test_p2_the_word_comes_before_the_grant(
    redis: Redis, sync: Coordinator, other: Coordinator, pushed: bool
) -> None:
    """P2: as Redis 6.2 may send it, in a packet before the answer: it is not forgotten when that comes."""
    holder = await AsyncLock(other, NAME).acquire() if pushed else None
    acquiring = asyncio.create_task(shared(sync).acquire())
    await turns(1)
    if holder is not None:
        await in_queue(redis, 1)
    [number] = hub_of(sync).acquisitions
    link_events_of(sync).link_pushed(b"%d %d 0 0" % (number, CONTENDED))
    if holder is not None:
        await holder.release()
    lease = await soon(acquiring)
    assert process_grant_of(lease).contended
    await lease.release()
    await gets_free(redis)
