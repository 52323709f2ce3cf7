"""A label is a text for people: others see it at a holder and at a waiter. It shares nothing."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.inspection import NameView, inspect
from redis_sync_aio.instrumentation import Event, Granted, Released, Requested, Withdrawn, observe_all
from redis_sync_aio.testing.faults import Action
from redis_sync_aio.types import Push

from ..conftest import MakeClient
from ..support.body import FAST
from ..support.primitives import PRIMITIVES, Primitive, each, on_one_server
from ..support.wired import READ, Wired, wired
from .conftest import Make

HERE = f"{socket.gethostname()[:32]}:{os.getpid()}"
LABEL = "nightly import"
ODD = ["ann@mail.example", "a:1:b", "x y\n|z", "a~", "größer"]
everything = each(PRIMITIVES)


async def view(redis: Redis, name: str = "it") -> NameView:
    (found,) = await inspect(redis, name)
    return found


@everything
async def test_others_see_the_label_of_the_holder(
    primitive: Primitive, make: Make, sync: Coordinator, redis: Redis
) -> None:
    """Next to its process, whose number `redis-sync-aio release` takes; however the lease was asked for."""
    it = make()
    for call in (it.acquire, it.try_acquire):
        lease = await call(label=LABEL)
        assert lease.label == LABEL
        (holder,) = (await view(redis)).holders
        assert (holder.label, holder.identity, f"{holder.host}:{holder.pid}") == (LABEL, None, HERE)
        assert {one.label for name in sync.statistics() for one in name.holders} == {LABEL}
        await lease.release()
        async with it.acquire() as unnamed:
            assert unnamed.label == HERE == sync.label


@each(on_one_server(PRIMITIVES))
async def test_the_label_of_a_coordinator_is_that_of_all_that_it_acquires(primitive: Primitive, redis: Redis) -> None:
    """Unless the call has another. An identity counts more than a label."""
    async with Coordinator(redis, label="billing") as sync:
        assert sync.label == "billing"
        it = primitive.make(sync)
        for options, label in (({}, "billing"), ({"label": LABEL}, LABEL)):
            given: Any = options
            async with it.acquire(**given) as lease:
                (holder,) = (await view(redis)).holders
                assert (lease.label, holder.label) == (label, label)
        lease = await sync.lock("that").acquire(identity="worker-7", label=LABEL)
        (holder,) = (await view(redis, "that")).holders
        assert (lease.label, holder.label, holder.identity) == ("worker-7", "worker-7", "worker-7")
        await lease.release()


@pytest.mark.parametrize("label", ODD)
async def test_waiters_have_labels_of_any_text(sync: Coordinator, other: Coordinator, redis: Redis, label: str) -> None:
    """As opposed to an identity, it shares nothing."""
    async with sync.lock("it").acquire(label=label):
        assert await other.lock("it").try_acquire(label=label) is None
        task = asyncio.create_task(other.lock("it").acquire(label=label))

        async def seen() -> bool:
            return bool((await view(redis)).waiters)

        await wait_until(seen, FAST, timeout=20)
        (waiter,) = (await view(redis)).waiters
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


# -- an error of a wait whose time is up names the holder ---------------------------------------------------

FREE = "'x' was not free within 1.0 seconds: held by {}; wait longer"
PATIENT: dict[str, tuple[Callable[[Coordinator], Any], str]] = {
    "lock": (lambda sync: sync.lock("x"), f"{FREE}, or look at statistics() for the holders"),
    "lock without scripts": (lambda sync: sync.lock("x", engine="watch"), FREE),
    "lock that is shared": (lambda sync: sync.lock("x", share=True), FREE),
    "semaphore": (
        lambda sync: sync.semaphore("x", 1),
        "'x' did not have 1 of its 1 permits free within 1.0 seconds: held by {}; wait longer",
    ),
    "write side": (lambda sync: sync.read_write_lock("x").write(), FREE),
    "multi-lock of two": (
        lambda sync: sync.multi_lock(["x", "y"]),
        "could not acquire all of 'x', 'y' within 1.0 seconds: 'x' is held by {}; wait longer",
    ),
}


@pytest.mark.parametrize(("make", "words"), PATIENT.values(), ids=PATIENT)
@pytest.mark.parametrize("push", ["auto", "never"])
async def test_an_acquire_timeout_names_the_holder(
    sync: Coordinator, make_client: MakeClient, make: Callable[[Coordinator], Any], words: str, push: Push
) -> None:
    async with Coordinator(make_client(), push=push) as other:
        await other.lock("connected").locked()
        for label, holder in ((LABEL, f"{HERE} '{LABEL}'"), (None, HERE)):
            lease = await make(sync).acquire(label=label)
            with pytest.raises(AcquireTimeout) as raised:
                await make(other).acquire(timeout=1)
            assert raised.value.held_by == holder
            assert str(raised.value).startswith(words.format(holder))
            await lease.release()


async def held_by(w: Wired, waiters: int) -> tuple[set[str], int]:
    """Let so many time out together; return what their errors say, and how many questions were sent for that."""
    asked = w.proxy.on(READ, Action.PASS, times=None)
    tasks = [asyncio.create_task(w.lock().acquire(timeout=1)) for _ in range(waiters)]
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    asked.cancel()
    return {error.held_by if isinstance(error, AcquireTimeout) else repr(error) for error in errors}, asked.hits


async def test_waiters_whose_time_ends_together_ask_once(server: EmbeddedServer) -> None:
    async with wired(server, response_timeout=60) as w, w.elsewhere():
        found, asked = await held_by(w, 50)
        assert found == {HERE}
        assert 1 <= asked < 25


@pytest.mark.parametrize(
    "action", [Action.answer_error("NOPERM not you"), Action.HOLD_REPLY], ids=["refused", "not answered"]
)
async def test_an_acquire_timeout_comes_without_the_holder_if_that_is_not_known(
    server: EmbeddedServer, action: Any
) -> None:
    async with wired(server, response_timeout=60) as w, w.elsewhere():
        rule = w.proxy.on(READ, action, times=None)
        with pytest.raises(AcquireTimeout, match="others hold it or wait for it") as raised:
            await w.lock().acquire(timeout=1)
        assert raised.value.held_by == ""
        assert rule.hits > 0
        rule.release.set()


# -- inputs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "error"),
    [("", ValueError), (b"text", TypeError), (7, TypeError), ("x" * 513, ValueError)],
    ids=["empty", "bytes", "number", "long"],
)
@everything
async def test_a_value_that_is_no_label_is_refused_at_the_call(
    primitive: Primitive, make: Make, redis: Redis, label: Any, error: type[Exception]
) -> None:
    """Also of a coordinator."""
    for call in (make().acquire, make().try_acquire):
        with pytest.raises(error, match="label"):
            call(label=label)
    with pytest.raises(error, match="label"):
        Coordinator(redis, label=label)
