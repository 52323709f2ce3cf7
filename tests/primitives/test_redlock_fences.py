"""The fences of AsyncRedlock: they rise, whatever the clocks of servers say and whatever some forget (P8)."""

from __future__ import annotations

import asyncio

import pytest

from redis_sync_aio import Unreachable, wait_until
from redis_sync_aio.testing.faults import Action

from ..support.wired import RENEW
from ..support.wired import quiet_loop as quiet_loop
from .redlocks import (
    NAME,
    SOMETIMES,
    Node,
    Process,
    hasty,
    in_microseconds,
    joined_by_two,
    nothing_left,
    paused,
    process,
    put_ahead,
    redlock,
)
from .redlocks import five as five
from .redlocks import nodes as nodes
from .redlocks import one as one
from .redlocks import two as two


async def test_p8_a_server_whose_clock_is_an_hour_ahead(
    one: Process, nodes: list[Node], caplog: pytest.LogCaptureFixture
) -> None:
    """No lease has its fence, and no other server learns it; it holds the lock all the same. It is logged once."""
    ahead = await put_ahead(nodes[1], 3600)
    fences = []
    for _ in range(3):
        async with redlock(one) as lease:
            assert lease.held_on == 5
            fences.append(lease.fence)
        for node in (*nodes[:1], *nodes[2:]):
            assert await node.fence() < in_microseconds(60)
    assert fences == sorted(set(fences))
    assert fences[-1] < in_microseconds(60) < ahead
    (record,) = [record for record in caplog.records if getattr(record, "event", "") == "fence_ahead"]
    assert (record.__dict__["server"], record.__dict__["servers"]) == (2, 5)
    assert 3500 < record.__dict__["seconds"] <= 3600


async def test_p8_fences_rise_when_the_one_that_is_ahead_is_all_that_remembers(nodes: list[Node]) -> None:
    """Three servers. The first one, an hour ahead, and the second one answer; then the second one forgets, and the
    first one hangs. What the second and the third grant is more than what was granted before."""
    three = nodes[:3]
    await put_ahead(three[0], 3600)
    fences: list[int] = []
    async with process(three) as coordinators:
        lock = hasty(coordinators, ttl=1)
        await three[2].kill()
        with pytest.raises(
            Unreachable, match=r"differ by more than 10 seconds \(no\. 1: \+3[56]\d\d s, no\. 2: \+0 s\)"
        ):
            fences += [(await lock.acquire(timeout=3)).fence]  # held no more once the second one has forgotten it
        await three[1].restart()
        await three[2].start_empty()
        with paused(three[:1]):
            async with lock.acquire(timeout=10) as lease:
                fences.append(lease.fence)
    assert fences == sorted(set(fences))


@pytest.mark.parametrize("forgets", ["flushed", "restarted"])
async def test_p8_servers_that_join_stand_in_for_those_that_forget(
    one: Process, nodes: list[Node], forgets: str
) -> None:
    """Three of five grant a fence, two join, and two of the first forget all. The next majority has one that knows."""
    for node in nodes[:3]:
        await put_ahead(node, 9)  # else the clocks of the others would pass the fence by themselves
    lease = await joined_by_two(one, nodes)
    assert [await node.fence() >= lease.fence for node in nodes] == [True] * 5
    await lease.release()
    await nothing_left(nodes)
    for node in nodes[:2]:
        await (node.restart() if forgets == "restarted" else node.direct.flushall())
    for node in (nodes[2], nodes[4]):
        await node.kill()
    async with hasty(one).acquire(timeout=5) as second:
        assert second.held_on == 3
        assert second.fence > lease.fence


async def test_p8_a_late_grant_with_a_lower_fence_does_not_join(one: Process, nodes: list[Node]) -> None:
    """That server does not know the fence. It is given back, and asked again until its clock is near the fence."""
    for node in nodes[:4]:
        await put_ahead(node, 15)
    await redlock(one).locked()
    with paused(nodes[4:]):
        lease = await redlock(one, ttl=6).acquire()
        assert lease.fence > in_microseconds(14)
    await asyncio.sleep(4)
    assert lease.held_on == 4
    assert await nodes[4].direct.get(NAME) is None
    await wait_until(lambda: lease.held_on == 5, SOMETIMES, timeout=30)
    assert await nodes[4].fence() >= lease.fence
    await lease.release()
    await nothing_left(nodes)


async def test_p8_one_that_is_ahead_does_not_stand_for_one_that_was_not_told(nodes: list[Node]) -> None:
    """All three hold it, but the fence could be raised on one of two only: nobody has it, all is given back."""
    await put_ahead(nodes[1], 3600)
    await put_ahead(nodes[2], 5)
    async with process(nodes[:3], response_timeout=5) as coordinators:
        lock = hasty(coordinators, ttl=5)
        rule = nodes[0].proxy.on(RENEW, Action.HOLD)
        assert await lock.try_acquire() is None
        assert rule.fired.is_set()
        rule.cancel()
        rule.release.set()
        await nothing_left(nodes)
        async with lock as lease:
            assert lease.held_on == 3


async def test_a_grant_that_no_lease_uses_is_not_reported_as_lost(
    nodes: list[Node], caplog: pytest.LogCaptureFixture
) -> None:
    """One server grants it and hangs before it knows the fence. What it granted ends unreleased, and no task had it."""
    await put_ahead(nodes[1], 5)
    async with process(nodes[:3], response_timeout=5) as coordinators:
        rule = nodes[0].proxy.on(RENEW, Action.HOLD)
        acquiring = asyncio.create_task(hasty(coordinators, ttl=1).acquire())
        await asyncio.wait_for(rule.fired.wait(), 5)
        with paused(nodes[:1]):
            lease = await acquiring
            assert lease.held_on == 2
            await asyncio.sleep(1.5)  # until the grant of the first server has certainly ended
            assert "was lost" not in caplog.text
            await lease.release()
        rule.cancel()
        rule.release.set()
    await nothing_left(nodes)
