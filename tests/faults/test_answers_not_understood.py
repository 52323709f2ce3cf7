"""P12: an answer or a message that cannot be used ends one call with an error, and costs nobody else anything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncRobustLock,
    AsyncSemaphore,
    Coordinator,
    SyncError,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action, script
from redis_sync_aio.types import BaseLease

from ..support.body import FAST, waits
from ..support.inside import Engine, LinkEvents, hub_of, link, load, lock_keys, tuned
from ..support.topologies import Nodes
from ..support.wired import Wired, wired
from ..support.wired import quiet_loop as quiet_loop

NONSENSE = Action(reply=lambda it: it.rewrite(lambda _: b"*1\r\n$1\r\nx\r\n"))
"""The server does what it is asked, and its answer becomes a list that says nothing."""

Operation = Callable[[Wired], Awaitable[object]]


async def acquires(w: Wired) -> object:
    return await w.sync.lock("one").acquire()


async def tries(w: Wired) -> object:
    return await w.sync.lock("one").try_acquire()


async def identifies(w: Wired) -> object:
    return await w.sync.lock("one").acquire(identity="me")


async def takes_several(w: Wired) -> object:
    return await AsyncMultiLock(w.sync, ["one", "{one}b"]).acquire()


async def takes_a_permit(w: Wired) -> object:
    return await AsyncSemaphore(w.sync, "one", limit=2, share=False).acquire()


async def adopts(w: Wired) -> object:
    return await AsyncRobustLock(w.sync, "one").acquire()


CASES: dict[str, tuple[str, Operation]] = {
    "acquire": ("lock/acquire", acquires),
    "try_acquire": ("lock/acquire", tries),
    "acquire for an identity": ("lock/acquire", identifies),
    "acquire several": ("lock/acquire_all", takes_several),
    "acquire a permit": ("permits/acquire", takes_a_permit),
    "adopt": ("robust/adopt", adopts),
}


@pytest.mark.parametrize("mode", ["link", "plain"])
@pytest.mark.parametrize(("command", "operation"), CASES.values(), ids=CASES)
async def test_an_answer_that_says_nothing_ends_the_request(
    server: EmbeddedServer, mode: str, command: str, operation: Operation, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller gets an error that says so, what the server did is undone, and the connection stays."""
    async with wired(server, mode, name="one") as w:
        await w.direct.flushdb()
        await w.direct.script_load(load(command).source.decode())
        bystander = await w.sync.lock("two").acquire()
        opened = w.sync.connections
        rule = w.proxy.on(script(load(command).sha), NONSENSE)
        async with asyncio.timeout(10):
            with pytest.raises(SyncError, match="the reply could not be used: ") as raised:
                await operation(w)
        assert rule.acted
        assert "'one'" in str(raised.value)
        assert isinstance(raised.value.__cause__, (TypeError, ValueError))
        assert "cannot decode a reply about" in caplog.text
        if operation is identifies:  # what an identity holds may be in use elsewhere, so it is left
            assert await w.direct.delete("one") == 1

        async def free() -> bool:
            permits = (await AsyncSemaphore(w.other, "one", limit=2).statistics()).held
            return not permits and not await w.direct.exists("one", "{one}b")

        await wait_until(free, FAST, timeout=15)
        await bystander.extend(20)
        lease = await operation(w)
        assert isinstance(lease, BaseLease)
        await lease.release()
        await bystander.release()
        assert w.sync.connections == opened, "the connection that all share was kept"


@pytest.mark.parametrize("mode", ["link", "plain"])
async def test_an_answer_that_says_nothing_to_a_request_of_a_holder(server: EmbeddedServer, mode: str) -> None:
    """It raises what could not be understood, and the lease is renewed on."""
    async with wired(server, mode, name="one") as w:
        lease = await AsyncRobustLock(w.sync, "one").acquire()
        for name in ("lock/renew", "robust/record"):
            await w.direct.script_load(load(name).source.decode())
        opened = w.sync.connections
        async with asyncio.timeout(10):
            w.proxy.on(script(load("lock/renew").sha), NONSENSE)
            with pytest.raises(SyncError, match="the reply could not be used"):
                await lease.extend(20)
            w.proxy.on(script(load("robust/record").sha), NONSENSE)
            with pytest.raises(SyncError, match="the reply could not be used"):
                await lease.record({"step": 1})
            await lease.extend(20)
            await lease.record({"step": 2})
        await lease.release()
        assert w.sync.connections == opened


async def test_a_renewal_whose_answer_says_nothing_is_repeated(server: EmbeddedServer) -> None:
    async with wired(server, name="one") as w:
        lease = await w.sync.lock("one", ttl=1).acquire()
        first = lease._grant.deadline
        rule = w.proxy.on(script(load("lock/renew").sha), NONSENSE)
        await wait_until(lambda: _is(rule.acted > 0 and lease._grant.deadline > first + 0.5), FAST, timeout=10)
        lease.check()
        await lease.release()


async def _is(value: bool) -> bool:
    return value


def defect(*_: object, **__: object) -> Any:
    raise RuntimeError("a defect")


async def test_a_defect_in_what_takes_an_error_answer_ends_the_call(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with wired(server, name="one") as w:
        bystander = await w.sync.lock("two").acquire()
        opened = w.sync.connections
        with monkeypatch.context() as patch:
            patch.setattr(link, "refusal", defect)
            w.proxy.on(script(load("lock/acquire").sha), Action.answer_error("MISCONF no disk"))
            async with asyncio.timeout(10):
                with pytest.raises(SyncError, match="RuntimeError: a defect"):
                    await w.sync.lock("one").acquire()
        async with w.sync.lock("one"):
            await bystander.extend(20)
        await bystander.release()
        assert w.sync.connections == opened


@pytest.mark.parametrize("engine", ["lua", "watch"])
async def test_a_defect_in_what_takes_a_message_costs_nothing_but_the_message(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    """With WATCH it may be delivered within a talk, which goes on: what it has written is written."""
    async with tuned(redis, poll_cap=0.3) as sync:
        lock = AsyncLock(sync, "one", engine=engine)
        holder = await lock.acquire()
        waiting = asyncio.create_task(lock.acquire())
        await wait_until(waits(lock), FAST, timeout=15)
        opened = sync.connections
        with monkeypatch.context() as patch:
            patch.setattr(LinkEvents, "_dispatch", defect)
            await holder.release()
            await lock.statistics()  # the message was before this
        async with asyncio.timeout(10):  # the grant is found when it looks again
            await (await waiting).release()
        assert sync.connections == opened


WAYS = {"link": "auto", "polling": "never"}


@pytest.mark.parametrize("push", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("where", ["one server", "a cluster"])
async def test_keys_of_another_program_end_a_talk_under_watch_and_no_other(
    redis: Redis, nodes: Nodes, push: str, where: str
) -> None:
    """What is read under WATCH is parsed here, and may be anything; whatever else is asked goes on."""
    client = redis if where == "one server" else nodes.client()
    try:
        async with Coordinator(client, push=push) as sync:  # type: ignore[arg-type]
            lock, other = (AsyncLock(sync, name, engine="watch") for name in ("{slot}one", "{slot}two"))
            held = await other.acquire()
            opened = sync.connections
            await client.set(lock_keys(b"{slot}one").fence, "no fence at all")
            async with asyncio.timeout(10):
                for _ in range(2):
                    for asks in (lock.acquire, lock.try_acquire, lock.statistics, lock.locked):
                        with pytest.raises(SyncError, match="slot}one"):
                            await asks()
                await held.extend(20)
                await client.delete(lock_keys(b"{slot}one").fence)
                async with lock:
                    held.check()
            await held.release()
            assert sync.connections == opened
    finally:
        if client is not redis:
            await client.aclose()


# -- messages ----------------------------------------------------------------------------------------------

MESSAGES = {
    "a time beyond all floats": "1 0 " + "9" * 400 + " 1",
    "a duration beyond all floats": "1 1 1 " + "9" * 400,
    "a fence beyond all fences": "{number} " + "9" * 30 + " 1 1",
    "a time beyond all dates": "{number} 1 " + "9" * 17 + " 1",
    "a duration beyond all ttls": "{number} 0 1 " + "9" * 17,
    "the next one's duration": "1 0 1 1 {number} " + "9" * 400,
    "more digits than Python reads": "1" * 5000 + " 1 1 1",
    "a fence that means nothing": "{number} -3 1 1",
    "a time before all times": "{number} 0 -1 1",
    "words": "one two three four",
    "too few": "1 1 1",
    "bytes": "\udcff 1 1 1",
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
async def test_a_malformed_message_in_the_inbox_is_ignored_and_logged(
    redis: Redis, sync: Coordinator, other: Coordinator, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Who may publish can write anything there. The connection stays, and so do the waiters."""
    caplog.set_level(logging.WARNING, "redis_sync_aio")
    holder = await other.lock("inbox").acquire()
    waiting = asyncio.create_task(sync.lock("inbox").acquire())
    await wait_until(waits(other.lock("inbox")), FAST, timeout=15)
    opened = sync.connections
    number = next(iter(hub_of(sync).acquisitions))
    found = message.replace("{number}", str(number)).encode("utf-8", "surrogateescape")
    for channel in await redis.pubsub_channels("rsa:*"):
        await redis.publish(channel, found)
    await sync.lock("elsewhere").locked()  # behind the message on the connection
    assert [record for record in caplog.records if "ignored a message in its inbox" in record.getMessage()]
    assert not waiting.done()
    await holder.release()
    async with asyncio.timeout(5):
        lease = await waiting
    await lease.release()
    assert sync.connections == opened
