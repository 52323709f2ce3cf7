"""A label is a text for people: others see it at a holder and at a waiter. It shares nothing."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, AsyncRedlock, Coordinator, LeaderElection, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.inspection import NameView, inspect
from redis_sync_aio.instrumentation import Event, Granted, Released, Requested, Withdrawn, observe_all
from redis_sync_aio.types import Push

from ..conftest import MakeClient
from ..support.body import FAST
from ..support.proxy import ERROR, HOLD_REPLY, PASS
from ..support.wired import READ, Wired, wired

HERE = f"{socket.gethostname()[:32]}:{os.getpid()}"
LABEL = "nightly import"
ODD = ["ann@mail.example", "a:1:b", "x y\n|z", "a~", "größer"]
MAKE: dict[str, Callable[[Coordinator], Any]] = {
    "lock": lambda sync: sync.lock("x"),
    "lock without scripts": lambda sync: sync.lock("x", engine="watch"),
    "lock that is shared": lambda sync: sync.lock("x", share=True),
    "semaphore": lambda sync: sync.semaphore("x", 1),
    "semaphore that is shared": lambda sync: sync.semaphore("x", 1, share=True),
    "read side": lambda sync: sync.read_write_lock("x").read(),
    "write side": lambda sync: sync.read_write_lock("x").write(),
    "reentrant lock": lambda sync: sync.reentrant_lock("x"),
    "multi-lock": lambda sync: sync.multi_lock(["x"]),
    "multi-lock of two": lambda sync: sync.multi_lock(["x", "y"]),
    "robust lock": lambda sync: sync.robust_lock("x"),
}
everything = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


async def view(redis: Redis) -> NameView:
    (found,) = await inspect(redis, "x")
    return found


async def waiting(redis: Redis) -> NameView:
    """Return the view of the name once somebody waits for it."""

    async def seen() -> NameView | None:
        found = await view(redis)
        return found if found.waiters else None

    found = await wait_until(seen, FAST, timeout=20)
    assert found is not None
    return found


@everything
async def test_others_see_the_label_of_the_holder(
    sync: Coordinator, redis: Redis, make: Callable[[Coordinator], Any]
) -> None:
    """Next to its process, whose number `redis-sync-aio release` takes; however the lease was asked for."""
    primitive = make(sync)
    for call in (primitive.acquire, primitive.try_acquire):
        lease = await call(label=LABEL)
        assert lease.label == LABEL
        (holder,) = (await view(redis)).holders
        assert (holder.label, holder.identity, f"{holder.host}:{holder.pid}") == (LABEL, None, HERE)
        assert {one.label for name in sync.statistics() for one in name.holders} == {LABEL}
        await lease.release()
        async with primitive.acquire() as unnamed:
            assert unnamed.label == HERE


@everything
async def test_the_label_of_a_coordinator_is_that_of_all_that_it_acquires(
    redis: Redis, make: Callable[[Coordinator], Any]
) -> None:
    """Unless the call has another."""
    async with Coordinator(redis, label="billing") as sync:
        assert sync.label == "billing"
        primitive = make(sync)
        async with primitive.acquire() as lease:
            (holder,) = (await view(redis)).holders
            assert (lease.label, holder.label) == ("billing", "billing")
        async with primitive.acquire(label=LABEL) as lease:
            (holder,) = (await view(redis)).holders
            assert (lease.label, holder.label) == (LABEL, LABEL)


@pytest.mark.parametrize("label", ODD)
async def test_waiters_have_labels_of_any_text(sync: Coordinator, other: Coordinator, redis: Redis, label: str) -> None:
    async with sync.lock("x"):
        task = asyncio.create_task(other.lock("x").acquire(label=label))
        (waiter,) = (await waiting(redis)).waiters
        assert (waiter.label, f"{waiter.host}:{waiter.pid}") == (label, HERE)
    lease = await task
    assert lease.label == label
    await lease.release()


@pytest.mark.parametrize("prefix", ["", "app1:"])
@pytest.mark.parametrize("label", ODD)
async def test_a_process_with_a_label_that_shares_is_told_that_others_wait(
    redis: Redis, make_client: MakeClient, prefix: str, label: str
) -> None:
    """It keeps the lock for an hour otherwise. The server finds its inbox in the token, behind the label."""
    async with Coordinator(redis, prefix=prefix, label=label) as sync, Coordinator(make_client(), prefix=prefix) as far:
        for mine, theirs in (
            (sync.lock("x", ttl=600, share=True, linger=3600), far.lock("x")),
            (sync.semaphore("x", 1, ttl=600, share=True, linger=3600), far.semaphore("x", 1)),
        ):
            async with mine.acquire() as lease:
                assert lease.label == label
            async with asyncio.timeout(30), theirs:
                pass


async def test_events_have_the_label(redis: Redis) -> None:
    """That of the call, of the coordinator, or none."""
    events: list[Event] = []
    with observe_all(events.append):
        async with Coordinator(redis, label="billing") as sync:
            for label in (None, LABEL):
                async with sync.lock("x").acquire(label=label):
                    assert await sync.lock("x").try_acquire(label="late") is None
            async with sync.multi_lock(["x", "y"]).acquire(label="both"):
                pass
        async with Coordinator(redis) as sync, sync.lock("x"):
            pass
    told = [(type(one), one.label) for one in events if one.kind in ("lock", "multi")]
    late = [(Requested, "late"), (Withdrawn, "late")]

    def around(label: str, *inside: object) -> list[object]:
        return [(Requested, label), (Granted, label), *inside, (Released, label)]

    assert told == [*around("billing", *late), *around(LABEL, *late), *around("both"), *around("")]


PATIENT = {
    "lock": "'x' was not free within 1.0 seconds: held by {}; wait longer, or look at statistics() for the holders",
    "lock without scripts": "'x' was not free within 1.0 seconds: held by {}; wait longer",
    "lock that is shared": "'x' was not free within 1.0 seconds: held by {}; wait longer",
    "semaphore": "'x' did not have 1 of its 1 permits free within 1.0 seconds: held by {}; wait longer",
    "write side": "'x' was not free within 1.0 seconds: held by {}; wait longer",
    "multi-lock of two": "could not acquire all of 'x', 'y' within 1.0 seconds: 'x' is held by {}; wait longer",
}


@pytest.mark.parametrize("kind", PATIENT)
@pytest.mark.parametrize("push", ["auto", "never"])
async def test_an_acquire_timeout_names_the_holder(
    sync: Coordinator, make_client: MakeClient, kind: str, push: Push
) -> None:
    async with Coordinator(make_client(), push=push) as other:
        await other.lock("connected").locked()
        for label, holder in ((LABEL, f"{HERE} '{LABEL}'"), (None, HERE)):
            lease = await MAKE[kind](sync).acquire(label=label)
            with pytest.raises(AcquireTimeout) as raised:
                await MAKE[kind](other).acquire(timeout=1)
            assert raised.value.held_by == holder
            assert str(raised.value).startswith(PATIENT[kind].format(holder))
            await lease.release()


async def test_an_acquire_timeout_names_identities_and_several_holders(sync: Coordinator, other: Coordinator) -> None:
    for name in ("a", "b", "c"):
        await sync.semaphore("x", 3).acquire(identity=name)
    with pytest.raises(AcquireTimeout) as raised:
        await other.semaphore("x", 3).acquire(timeout=1)
    assert raised.value.held_by == "'a', 'b', 'c'"


async def held_by(w: Wired, waiters: int) -> tuple[set[str], int]:
    """Let so many time out together; return what their errors say, and how many questions were sent for that."""
    asked = w.proxy.on(READ, PASS, times=None)
    tasks = [asyncio.create_task(w.lock().acquire(timeout=1)) for _ in range(waiters)]
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    asked.cancel()
    return {error.held_by if isinstance(error, AcquireTimeout) else repr(error) for error in errors}, asked.hits


async def test_waiters_whose_time_ends_together_ask_once(server: EmbeddedServer) -> None:
    async with wired(server, response_timeout=60) as w, w.elsewhere():
        found, asked = await held_by(w, 50)
        assert found == {HERE}
        assert 1 <= asked < 25


@pytest.mark.parametrize("action", [ERROR("NOPERM not you"), HOLD_REPLY], ids=["refused", "not answered"])
async def test_an_acquire_timeout_comes_without_the_holder_if_that_is_not_known(
    server: EmbeddedServer, action: Any
) -> None:
    async with wired(server, response_timeout=60) as w, w.elsewhere():
        rule = w.proxy.on(READ, action, times=None)
        with pytest.raises(AcquireTimeout, match="others hold it or wait for it") as raised:
            await w.lock().acquire(timeout=1)
        assert raised.value.held_by == ""
        assert rule.hits > 0
        if rule.action is HOLD_REPLY:
            rule.release.set()


async def test_a_redlock_has_its_label_on_every_server() -> None:
    async with EmbeddedServer() as one, EmbeddedServer() as two, EmbeddedServer() as three:
        clients = [server.client() for server in (one, two, three)]
        async with AsyncRedlock(clients, "x").acquire(label=LABEL) as lease:
            assert lease.label == LABEL
            for client in clients:
                (holder,) = (await view(client)).holders
                assert holder.label == LABEL
        for client in clients:
            await client.aclose()


async def test_a_candidate_without_a_label_has_that_of_its_coordinator(redis: Redis) -> None:
    async with Coordinator(redis, label="billing") as sync:
        election = LeaderElection(sync, "scheduler")
        async with election.lead() as term:
            leader = await election.leader()
            assert leader is not None
            assert (leader.label, term.label) == ("billing", "billing")


BAD = [("", ValueError), (b"text", TypeError), (7, TypeError), ("x" * 513, ValueError)]


@pytest.mark.parametrize(("label", "error"), BAD, ids=["empty", "bytes", "number", "long"])
@everything
async def test_what_is_no_label_is_refused_at_the_call(
    sync: Coordinator, make: Callable[[Coordinator], Any], label: Any, error: type[Exception]
) -> None:
    for call in (make(sync).acquire, make(sync).try_acquire):
        with pytest.raises(error, match="label"):
            call(label=label)
