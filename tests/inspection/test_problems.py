"""What looks wrong is named, with what it means and what to do; what is just a moment is not."""

from __future__ import annotations

import asyncio
import os
import shlex
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, AsyncSemaphore, Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.inspection import inspect
from redis_sync_aio.testing.faults import Action, FaultProxy
from redis_sync_aio.types import Client
from tests.conftest import MakeClient
from tests.support.body import FAST
from tests.support.inside import ProblemCode, lock_keys, permit_keys, ticket_member
from tests.support.inspecting import seen
from tests.support.programs import ROOT

DEAD = b"vm:7:0123456789abcdef:1"
"""A token of a process that has ended."""
PAGES = ROOT / "docs" / "operations"


async def problem(client: Client, code: ProblemCode, name: str = "x") -> str:
    """Return what is said of the only problem of a name."""
    (found,) = await inspect(client, name)
    assert [it.code for it in found.problems] == [code]
    (said,) = found.problems
    assert str(said) == said.meaning
    return said.meaning


async def test_a_value_of_another_program_without_a_ttl(redis: Redis) -> None:
    await redis.set("x", "data")
    said = await problem(redis, "foreign_without_ttl")
    assert "'data' and no ttl" in said
    assert said.endswith("redis-sync-aio release x --token data")
    await redis.set("app1:{x}", "data")
    (prefixed,) = await inspect(redis, "x", prefix="app1:")
    assert str(prefixed.problems[0]).endswith("redis-sync-aio release 'app1:{x}' --token data")
    (found,) = await inspect(redis, "x")
    assert found.holders[0].foreign
    assert found.holders[0].remaining is None
    assert "x" not in [
        it.name for it in await inspect(redis, "*")
    ]  # any string might be one, so it is not searched for


@pytest.mark.skipif(not PAGES.exists(), reason="the documentation is not next to these tests")
async def test_the_advice_about_another_programs_value_is_the_same_everywhere(redis: Redis, sync: Coordinator) -> None:
    """The problem, the error of a request, its class and the page say it in the same words."""
    await redis.set("x", "data")
    said = await problem(redis, "foreign_without_ttl")
    for timeout in (0, 0.5):
        with pytest.raises(AcquireTimeout) as caught:
            await sync.lock("x").acquire(timeout=timeout)
        assert str(caught.value).endswith(f": {said}")
    advice = said[said.index("If it is data") : said.index(" x --token")]
    for text in ((PAGES / "inspection.md").read_text("utf-8"), AcquireTimeout.__doc__ or ""):
        assert advice in " ".join(text.replace("`", "").split())


async def test_an_empty_value_is_another_programs(redis: Redis) -> None:
    """It is not taken for the token of a grant of which nothing is remembered. It cannot be named, only forced."""
    await redis.set("x", "")
    said = await problem(redis, "foreign_without_ttl")
    assert said.endswith("redis-sync-aio release x --force")
    (found,) = await inspect(redis, "x")
    assert found.holders[0].foreign


async def test_another_programs_lock_with_a_ttl_is_none(redis: Redis, sync: Coordinator) -> None:
    await redis.set("x", "theirs", px=60_000)
    waiting = asyncio.create_task(sync.lock("x").acquire())
    found = await seen(redis, "x", lambda it: it.waiting)
    assert found.problems == ()
    assert found.holders[0].foreign
    assert (found.holders[0].host, found.holders[0].held_for) == (None, None)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_lock_without_a_ttl_whose_process_has_ended(redis: Redis) -> None:
    await redis.set("it's", DEAD)
    await redis.set(lock_keys(b"it's").fence, b"1700000000000000 " + DEAD)
    said = await problem(redis, "holder_disconnected", "it's")
    assert "process 7 on vm" in said
    assert shlex.split(said[said.index("redis-sync-aio") :]) == [
        *("redis-sync-aio", "release", "it's", "--token", DEAD.decode())
    ]


async def test_a_lock_without_a_ttl_of_a_process_that_polls_is_none(make_client: MakeClient, redis: Redis) -> None:
    """It listens to nothing, so nothing tells whether it lives."""
    async with Coordinator(make_client(), push="never") as polling, polling.lock("x", ttl=None):
        (found,) = await inspect(redis, "x")
        assert found.problems == ()
        assert found.holders[0].connected is None
        assert found.holders[0].pid == os.getpid()


async def test_a_process_that_has_to_poll_by_now_is_not_declared_dead(
    redis: Redis, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Its token says that it listens, and the user has lost that right since: nothing tells this from a dead one."""
    admin: Any = redis
    await admin.execute_command("ACL", "SETUSER", "polls-by-now", "reset", "on", ">secret", "~*", "&*", "+@all")
    client = make_client(username="polls-by-now", password="secret")
    async with Coordinator(client) as sync, sync.lock("x", ttl=None) as lease:
        await admin.execute_command("ACL", "SETUSER", "polls-by-now", "-subscribe")
        await redis.client_kill_filter(_type="pubsub", user="polls-by-now")
        await wait_until(lambda: "redis_sync_aio polls instead" in caplog.text, FAST, timeout=20)
        said = await problem(redis, "holder_disconnected")
        assert "has ended, is cut off, or polls" in said
        assert "polling_instead in its log" in said
        lease.check()


async def test_a_lock_without_a_ttl_whose_process_lives_is_none(redis: Redis, sync: Coordinator) -> None:
    async with sync.lock("x", ttl=None):
        (found,) = await inspect(redis, "x")
        assert found.problems == ()
        assert found.holders[0].connected is True


async def test_tickets_of_the_dead(redis: Redis, sync: Coordinator) -> None:
    pushed = ticket_member(b"rsa:0123456789abcdef", 1, 1000, DEAD)
    async with sync.lock("x"):
        await redis.zadd(lock_keys(b"x").queue, {pushed: 1, ticket_member(b"", 2, 1000, b"polling"): 2})
        said = await problem(redis, "dead_waiters")
        assert said.startswith("2 of its waiters are gone ('polling', vm:7)")
        (found,) = await inspect(redis, "x")
        assert [(it.alive, it.polls) for it in found.waiters] == [(False, False), (False, True)]


async def test_a_queue_without_a_holder(redis: Redis, sync: Coordinator) -> None:
    """Its owner listens, but nobody holds what it waits for."""
    async with sync.lock("other") as lease:
        inbox = b"rsa:" + lease.token.split(":")[2].encode()
        await redis.zadd(lock_keys(b"x").queue, {ticket_member(inbox, 10**6, 1000, b"somebody"): 1})
        assert "requests wait although it is free" in await problem(redis, "queue_without_holder")


async def test_a_lost_fence(redis: Redis, sync: Coordinator) -> None:
    async with sync.lock("x"):
        await redis.delete(lock_keys(b"x").fence)
        assert "noeviction" in await problem(redis, "fence_lost")


@pytest.mark.parametrize("lost", [0, 1], ids=["permits", "state"])
async def test_lost_permits(redis: Redis, sync: Coordinator, lost: int) -> None:
    lease = await sync.semaphore("x", limit=2).acquire()
    await redis.delete(permit_keys(b"x", "sem").all[lost])
    assert "noeviction" in await problem(redis, "permits_lost")
    with pytest.raises(Exception, match="x"):
        await lease.release()


async def test_more_permits_than_there_are(redis: Redis, sync: Coordinator) -> None:
    semaphore = AsyncSemaphore(sync, "x", limit=3)
    async with semaphore.acquire(weight=3):
        await semaphore.resize(1)
        assert "3 permits are held, and the limit is 1" in await problem(redis, "over_limit")


async def test_a_broken_barrier(redis: Redis, sync: Coordinator) -> None:
    """Until it is reset, also while nobody waits."""
    barrier = sync.barrier("x", parties=2)
    await barrier.abort()
    assert "await AsyncBarrier(…).reset()" in await problem(redis, "broken")
    assert [it.name for it in await inspect(redis, "*")] == ["x"]
    await barrier.reset()
    assert await inspect(redis, "x") == ()


async def test_a_clock_that_went_back(redis: Redis, sync: Coordinator) -> None:
    async with sync.lock("x") as lease:
        await redis.set(lock_keys(b"x").fence, f"{lease.fence + 3_600_000_000} {lease.token}")
        assert "seconds ahead of the server's clock" in await problem(redis, "clock_behind")


async def test_a_key_of_another_type(redis: Redis) -> None:
    await redis.hset("x", "field", "value")
    assert "another program uses x" in await problem(redis, "wrong_type")
    await redis.delete("x")
    await redis.set("{x}:sem", "text")
    assert "another program uses {x}:sem" in await problem(redis, "wrong_type")


@pytest.mark.parametrize("code", ["dead_waiters", "fence_lost"])
async def test_what_lasts_a_moment_is_no_problem(
    server: EmbeddedServer, redis: Redis, sync: Coordinator, code: ProblemCode
) -> None:
    """What the first look found is told only if the second one finds it, too."""
    keys = lock_keys(b"x")
    pushed = ticket_member(b"rsa:0123456789abcdef", 1, 1000, DEAD)
    async with (
        sync.lock("x"),
        FaultProxy(server) as proxy,
        proxy.client() as looker,
    ):
        fence = await redis.get(keys.fence)
        assert fence is not None
        if code == "fence_lost":
            await redis.delete(keys.fence)
        else:
            await redis.zadd(keys.queue, {pushed: 1})
        await problem(redis, code)
        seen_once = proxy.on("ZCARD", Action.HOLD_REPLY)
        looking = asyncio.create_task(inspect(looker, "x"))
        await seen_once.fired.wait()
        await redis.set(keys.fence, fence)
        await redis.zrem(keys.queue, pushed)
        seen_once.release.set()
        (found,) = await looking
        assert found.problems == ()
