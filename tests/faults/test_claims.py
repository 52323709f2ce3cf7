"""P6, FAULTS A6: what is handed over lasts for a claim until its first renewal, and a stall right then may cost it.

By default a stall of 4 seconds costs no lease. An error that comes of a claim says so: a longer ttl would not help.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from redis_sync_aio import (
    AsyncLock,
    Coordinator,
    LeaseLost,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import BaseLease

from ..conftest import MakeClient
from ..support.body import FAST, for_ever
from ..support.factories import KINDS, SHARED, WATCHED, Kind
from ..support.inside import hub_of
from ..support.one_server import one_server_for_all as one_server_for_all
from ..support.primitives import MAKERS, Maker

pytestmark = pytest.mark.timing
NAME = "claims"
HINT = "Coordinator(claim=)"

Acquire = Callable[[Coordinator, str], Coroutine[Any, Any, BaseLease]]


async def acquired(make: Maker, sync: Coordinator, name: str) -> BaseLease:
    lease: BaseLease = await make(sync, name).acquire()
    return lease


PRIMITIVES: dict[str, Acquire] = {label: partial(acquired, make) for label, make in MAKERS.items()}
BEFORE: dict[str, Acquire] = {"reader": PRIMITIVES["writer"]}
"""Who has it before, if not one of the same."""


@pytest_asyncio.fixture
async def other(make_client: MakeClient, sync: Coordinator) -> AsyncIterator[Coordinator]:
    """Another process, as far as the server can see, with a short claim."""
    async with Coordinator(make_client(), claim=0.3) as coordinator:
        yield coordinator


async def in_queue(sync: Coordinator, waiting: int) -> None:
    """Wait until so many requests of ``sync`` are in a queue at the server."""
    await wait_until(
        lambda: sum(ticket._queued for ticket in hub_of(sync).acquisitions.values()) >= waiting, FAST, timeout=20
    )


async def handed_over(holders: list[BaseLease], waiter: Coordinator, tasks: list[asyncio.Task[BaseLease]]) -> None:
    """Release what is held, once all of them wait; return when every task has its lease."""
    await in_queue(waiter, len(tasks))
    await asyncio.gather(*(holder.release() for holder in holders))
    await asyncio.wait_for(asyncio.gather(*tasks), 20)


@pytest.mark.parametrize("wait", [0.0, 0.6], ids=["immediately", "before the first renewal"])
async def test_a_stall_of_seconds_after_a_hand_over_costs_no_lease(
    sync: Coordinator, make_client: MakeClient, wait: float
) -> None:
    """By default, for every primitive: 4 seconds right then, 3 at any time before the first renewal."""
    async with Coordinator(make_client()) as other:
        holders = [await BEFORE.get(kind, acquire)(sync, kind) for kind, acquire in PRIMITIVES.items()]
        tasks = [asyncio.create_task(acquire(other, kind)) for kind, acquire in PRIMITIVES.items()]
        await handed_over(holders, other, tasks)
        leases = [task.result() for task in tasks]
        if wait:
            await asyncio.sleep(wait)
        time.sleep(3 if wait else 4)  # noqa: ASYNC251
        await wait_until(lambda: all(lease.remaining() > 20 for lease in leases), FAST, timeout=15)
        for lease in leases:
            lease.check()
            await lease.release()


@pytest.mark.parametrize("kind", KINDS + WATCHED + SHARED, ids=str)
async def test_an_error_names_the_claim_if_that_was_too_short(
    sync: Coordinator, other: Coordinator, kind: Kind
) -> None:
    """P6: with a ttl of 30 seconds the body stands still for longer than its claim."""
    holder = await kind.make(sync, NAME).acquire()
    found: list[LeaseLost] = []

    async def body() -> None:
        async with kind.make(other, NAME, ttl=30) as lease:
            time.sleep(0.5)  # noqa: ASYNC251
            with pytest.raises(LeaseLost) as caught:
                lease.check()
            found.append(caught.value)
            await for_ever()

    waiting = asyncio.create_task(body())
    await in_queue(other, 1)
    await holder.release()
    with pytest.raises(LeaseLost) as caught:
        await asyncio.wait_for(waiting, 10)
    for error in (*found, caught.value):
        assert 0.25 < error.claim <= 0.3
        assert HINT in str(error)
        assert "0.3 seconds" in str(error)
        assert "give it a longer ttl" not in str(error)
    assert found[0].stalled >= 0.2 or caught.value.stalled >= 0.2


async def test_an_error_names_the_claim_if_redis_was_silent(make_client: MakeClient) -> None:
    """P6: the server stands still right after a hand-over, for longer than the claim."""
    async with (
        EmbeddedServer(port=0) as server,
        server.client() as one,
        server.client() as two,
        Coordinator(one) as sync,
        Coordinator(two, claim=0.5) as other,
    ):
        holder = await AsyncLock(sync, NAME).acquire()
        waiting = asyncio.create_task(AsyncLock(other, NAME).acquire())
        await handed_over([holder], other, [waiting])
        server.pause()
        try:
            await asyncio.wait_for(waiting.result().wait_lost(), 10)
        finally:
            server.resume()
        with pytest.raises(LeaseLost) as caught:
            waiting.result().check()
        assert caught.value.reason == "unreachable"
        assert HINT in str(caught.value)
        assert "check the server and the network" in str(caught.value)
        assert "blocking" not in str(caught.value), "this process did not stand still"


@pytest.mark.parametrize("handed", [True, False], ids=["renewed since", "not handed over"])
async def test_an_error_does_not_name_the_claim_if_that_was_long_enough(
    sync: Coordinator, other: Coordinator, handed: bool
) -> None:
    """After the first renewal it is the ttl that was too short."""
    lock = AsyncLock(other, NAME, ttl=1.5)
    if handed:
        holder = await AsyncLock(sync, NAME).acquire()
        waiting = asyncio.create_task(lock.acquire())
        await handed_over([holder], other, [waiting])
        lease = waiting.result()
        await wait_until(lambda: lease.remaining() > 1, FAST, timeout=15)
    else:
        lease = await lock.acquire()
    time.sleep(1.6)  # noqa: ASYNC251
    with pytest.raises(LeaseLost) as caught:
        lease.check()
    assert caught.value.claim == 0
    assert HINT not in str(caught.value)


async def test_a_late_renewal_of_a_claim_says_so(
    sync: Coordinator, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning about a stall that cost no lease names what to raise."""
    async with Coordinator(make_client(), claim=2) as other:
        holder = await AsyncLock(sync, NAME).acquire()
        waiting = asyncio.create_task(AsyncLock(other, NAME).acquire())
        with caplog.at_level(logging.WARNING, "redis_sync_aio"):
            await handed_over([holder], other, [waiting])
            time.sleep(1.3)  # noqa: ASYNC251
            await wait_until(lambda: waiting.result().remaining() > 20, FAST, timeout=15)
        messages = [record.getMessage() for record in caplog.records if repr(NAME) in record.getMessage()]
        assert len(messages) == 1
        assert HINT in messages[0]
        await waiting.result().release()


async def test_a_hand_over_of_a_short_section_costs_no_renewal(sync: Coordinator, make_client: MakeClient) -> None:
    """P9: the first renewal comes after a part of the claim, and not with the grant."""
    client = make_client()
    async with Coordinator(client) as other:
        locks = [AsyncLock(sync, NAME), AsyncLock(other, NAME)]
        for lock in locks:
            await (await lock.acquire()).release()

        async def take_turns(lock: AsyncLock) -> None:
            for _ in range(100):
                async with lock:
                    pass

        await client.config_resetstat()
        await asyncio.gather(*map(take_turns, locks))
        commands = (await client.info("commandstats"))["cmdstat_evalsha"]["calls"]
        assert commands <= 2 * 200 + 10
