"""P6: a server that answers each renewal with "not now". The loss says that it refused, and the log says how."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Literal, TypeAlias

import pytest
from redis.exceptions import RedisError

from redis_sync_aio import AsyncLock, CommandRefused, Coordinator, LeaseLost, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.instrumentation import Event, Lost, observe_all

from ..support.body import FAST, waits
from ..support.factories import Client
from ..support.one_server import one_server_for_all as one_server_for_all
from ..support.primitives import MAKERS
from ..support.proxy import ERROR
from ..support.wired import RENEW, wired
from ..support.wired import quiet_loop as quiet_loop

pytestmark = pytest.mark.timing
NAME = "put-off"
Push: TypeAlias = Literal["auto", "never"]
Told: TypeAlias = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def own() -> Iterator[EmbeddedServer]:
    """A server of this module, whose settings its tests change."""
    with EmbeddedServer(port=0, args=["--lua-time-limit", "20"]) as server:
        yield server


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Told]:
    with caplog.at_level(logging.INFO, "redis_sync_aio"):
        yield lambda event: [record for record in caplog.records if getattr(record, "event", None) == event]


@asynccontextmanager
async def without_replicas(admin: Client) -> AsyncIterator[None]:
    await admin.config_set("min-replicas-to-write", 1)
    try:
        yield
    finally:
        await admin.config_set("min-replicas-to-write", 0)


@asynccontextmanager
async def read_only(admin: Client) -> AsyncIterator[None]:
    await admin.execute_command("REPLICAOF", "127.0.0.1", 1)
    try:
        yield
    finally:
        await admin.execute_command("REPLICAOF", "NO", "ONE")


@asynccontextmanager
async def busy(admin: Client) -> AsyncIterator[None]:
    async def run() -> None:
        with suppress(RedisError):
            await admin.eval("while true do end", 0)

    running = asyncio.create_task(run())
    try:
        yield
    finally:
        async with admin.client() as killer:  # a connection of its own
            await killer.execute_command("SCRIPT", "KILL")
        await running


Refusing: TypeAlias = Callable[[Client], AbstractAsyncContextManager[None]]
REFUSALS: dict[str, Refusing] = {"NOREPLICAS": without_replicas, "READONLY": read_only, "BUSY": busy}


@pytest.mark.parametrize("label", MAKERS)
@pytest.mark.parametrize("code", REFUSALS)
@pytest.mark.parametrize("push", ["auto", "never"])
async def test_renewals_that_are_refused_until_the_end(
    own: EmbeddedServer, told: Told, push: Push, code: str, label: str
) -> None:
    """The server answered, so it was not out of reach; and this process was not late: it asked, time and again."""
    async with own.client() as admin, own.client() as client, Coordinator(client, push=push) as sync:
        await admin.flushall()
        events: list[Event] = []
        async with AsyncExitStack() as stack:  # outside of the body, which may be cancelled once for each of two leases
            with pytest.raises(LeaseLost) as caught:  # noqa: PT012
                stack.enter_context(observe_all(events.append))
                async with MAKERS[label](sync, NAME, ttl=2):
                    await stack.enter_async_context(REFUSALS[code](admin))
                    await asyncio.sleep(60)
    error = caught.value
    assert (error.reason, error.time_is_up, error.stalled) == ("expired", True, 0.0)
    assert "Redis refused to renew it (then the log says why: renewal_refused)" in str(error)
    lines = told("renewal_refused")
    assert lines
    assert {line.error.code for line in lines} == {code}
    assert all(line.left > 0 for line in lines), "said while there was time to do something about it"
    assert {record.reason for record in told("lease_lost")} == {"expired"}
    assert {(event.reason, event.time_is_up) for event in events if isinstance(event, Lost)} == {("expired", True)}


@pytest.mark.parametrize("push", ["auto", "never"])
async def test_one_line_for_each_renewal_that_is_refused_for_long(own: EmbeddedServer, told: Told, push: Push) -> None:
    """Not one for each attempt, of which there are several in a second; and none once the server takes writes again."""
    async with own.client() as admin, own.client() as client, Coordinator(client, push=push) as sync:

        async def attempts() -> int:
            return int((await admin.info("commandstats"))["cmdstat_evalsha"]["calls"])

        async def refused_for_long() -> None:
            before = len(told("renewal_refused"))
            async with without_replicas(admin):
                await wait_until(lambda: len(told("renewal_refused")) > before, FAST, timeout=20)
                made, left = await attempts(), lease.remaining()
                await wait_until(lambda: lease.remaining() < left - 1, FAST, timeout=20)
                assert await attempts() >= made + 2

        async with AsyncLock(sync, NAME, ttl=6) as lease:
            for _ in range(2):
                await refused_for_long()
                await wait_until(lambda: lease.remaining() > 5, FAST, timeout=20)
    assert [line.error.code for line in told("renewal_refused")] == ["NOREPLICAS"] * 2
    assert all(2 < line.left < 4 for line in told("renewal_refused"))
    assert not told("lease_lost")


@pytest.mark.parametrize("mode", ["link", "plain"])
async def test_a_refusal_that_is_soon_over_leaves_no_line(server: EmbeddedServer, told: Told, mode: str) -> None:
    """A slot that moves, or a failover: the next attempt succeeds, and there is nothing to do about it."""
    async with wired(server, mode=mode) as w, w.lock(ttl=3) as lease:
        refused = w.proxy.on(RENEW, ERROR("TRYAGAIN the slot moves"), times=2)
        await wait_until(lambda: refused.acted == 2, FAST, timeout=20)
        await wait_until(lambda: lease.remaining() > 2.5, FAST, timeout=20)
    assert not told("renewal_refused")


@pytest.mark.parametrize("push", ["auto", "never"])
async def test_a_server_that_refuses_and_is_then_out_of_reach(own: EmbeddedServer, told: Told, push: Push) -> None:
    """The last that is known counts: whether it would still refuse is not."""
    async with own.client() as admin, own.client() as client, Coordinator(client, push=push) as sync:
        with pytest.raises(LeaseLost) as caught:  # noqa: PT012
            async with AsyncLock(sync, NAME, ttl=6), without_replicas(admin):
                await wait_until(lambda: told("renewal_refused"), FAST, timeout=20)
                own.pause()
                try:
                    await asyncio.sleep(60)
                finally:
                    own.resume()
    assert (caught.value.reason, caught.value.time_is_up) == ("unreachable", True)


@pytest.mark.parametrize("push", ["auto", "never"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_loop_that_stands_still_around_refusals(
    own: EmbeddedServer, told: Told, push: Push, when: Literal["before", "after"]
) -> None:
    """Before them: it asked in time, and was refused. After them, until the end: nobody knows what would have been."""
    async with own.client() as admin, own.client() as client, Coordinator(client, push=push) as sync:
        with pytest.raises(LeaseLost) as caught:  # noqa: PT012
            async with AsyncLock(sync, NAME, ttl=3) as lease, without_replicas(admin):
                if when == "after":
                    await wait_until(lambda: told("renewal_refused"), FAST, timeout=20)
                time.sleep(1 if when == "before" else lease.remaining() + 0.1)  # noqa: ASYNC251
                await asyncio.sleep(60)
    error = caught.value
    assert (error.reason, error.stalled > 0) == (("expired", False) if when == "before" else ("late", True))


async def test_a_claim_whose_renewal_is_refused(own: EmbeddedServer, told: Told) -> None:
    """The message names the claim, and does not say that this process was late."""
    async with (
        own.client() as admin,
        own.client() as client,
        Coordinator(admin) as sync,
        Coordinator(client, claim=2) as other,
    ):
        holder = await AsyncLock(sync, NAME).acquire()
        waiting = asyncio.create_task(AsyncLock(other, NAME).acquire())
        await wait_until(waits(AsyncLock(sync, NAME)), FAST, timeout=20)
        await holder.release()
        lease = await waiting
        async with without_replicas(admin):
            await lease.wait_lost()
        with pytest.raises(LeaseLost, match=r"Redis refused to renew it .*renewal_refused.* claim of 2 seconds") as it:
            lease.check()
    assert (it.value.reason, it.value.time_is_up, it.value.claim) == ("expired", True, 2.0)
    assert [line.error.code for line in told("renewal_refused")] == ["NOREPLICAS"]


async def test_a_renewal_behind_a_request_that_is_refused(own: EmbeddedServer, told: Told) -> None:
    """Commands about one name keep their order, so it is not even sent: what is known is why."""
    async with own.client() as admin, own.client() as client, Coordinator(client, push="never") as sync:
        with pytest.raises(LeaseLost) as caught:  # noqa: PT012
            async with AsyncLock(sync, NAME, ttl=3), without_replicas(admin):
                waiting = asyncio.create_task(AsyncLock(sync, NAME).acquire())
                try:
                    await asyncio.sleep(60)
                finally:
                    waiting.cancel()
    assert (caught.value.reason, caught.value.time_is_up) == ("expired", True)
    assert [line.error.code for line in told("renewal_refused")] == ["NOREPLICAS"]


async def test_an_extension_that_is_refused_until_the_end(own: EmbeddedServer, told: Told) -> None:
    """The caller gets the error of the server; the lease ends when its time is up."""
    async with own.client() as admin, own.client() as client, Coordinator(client) as sync:
        lease = await AsyncLock(sync, NAME, ttl=2).acquire()
        async with without_replicas(admin):
            with pytest.raises((CommandRefused, LeaseLost)):
                await lease.extend(20)
            await lease.wait_lost()
        with pytest.raises(LeaseLost) as caught:
            lease.check()
    assert caught.value.reason == "expired"
    assert [line.error.code for line in told("renewal_refused")] == ["NOREPLICAS"]
