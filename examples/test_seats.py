"""Tests of seats.py with the fixtures of the plugin: real Redis, real losses, no sleeping.

Needs ``pip install 'redis_sync_aio[testing]' pytest-asyncio``. Run::

    pytest examples/test_seats.py

Read more in docs/guides/testing.md.
"""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis
from seats import Seats, Sold

from redis_sync_aio import Coordinator
from redis_sync_aio.testing import Server, assert_idle, steal
from redis_sync_aio.testing.faults import Action, FaultProxy

pytestmark = pytest.mark.asyncio  # not needed with asyncio_mode = "auto"


@pytest.fixture
def seats(sync_client: Redis, sync_coordinator: Coordinator) -> Seats:
    return Seats(sync_client, sync_coordinator)


async def test_of_many_buyers_one_gets_the_seat(seats: Seats, sync_client: Redis) -> None:
    buying = [seats.buy("12A", buyer) for buyer in ("ann", "bob", "cid")]
    outcomes = await asyncio.gather(*buying, return_exceptions=True)
    assert [outcome for outcome in outcomes if outcome is None] == [None]
    assert sum(isinstance(outcome, Sold) for outcome in outcomes) == 2
    await assert_idle(seats.sync)


async def test_a_buyer_whose_lock_is_lost_while_paying_buys_once(
    seats: Seats, sync_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    payments: asyncio.Queue[str] = asyncio.Queue()

    async def pay(buyer: str) -> None:
        payments.put_nowait(buyer)
        if payments.qsize() == 1:
            await asyncio.Event().wait()  # something slow, which the loss of the lock cancels

    monkeypatch.setattr(seats, "pay", pay)
    buying = asyncio.create_task(seats.buy("12A", "ann"))
    while payments.empty():
        await asyncio.sleep(0)
    token = await steal(sync_client, "seat:12A")  # somebody takes the lock by force, for a moment
    await seats.sync.lock("seat:12A").release(identity=token)
    await buying
    assert payments.qsize() == 2  # so payments have to be idempotent: the test has told us
    assert await sync_client.get("owner:12A") == b"ann"


async def test_an_answer_that_is_lost_on_the_way_sells_the_seat_once(sync_server: Server, sync_client: Redis) -> None:
    async with FaultProxy(sync_server.url) as proxy, proxy.client() as client, Coordinator(client) as sync:
        await Seats(client, sync).buy("11A", "bob")  # from now on the server knows the scripts
        cut = proxy.on("EVALSHA", Action.CUT_AFTER)  # the lock is granted, and the connection is lost with the answer
        await Seats(client, sync).buy("12A", "ann")
        assert cut.acted == 1
    assert await sync_client.get("owner:12A") == b"ann"
