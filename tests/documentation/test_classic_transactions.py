"""Counters and stocks as books and blogs show them: where each fails, and ours does not (docs/classic-patterns.md)."""

from __future__ import annotations

import asyncio

import pytest

from redis_sync_aio import Conflict, Coordinator, transaction
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import Transaction

from ..support import textbook
from ..support.child import Crew
from ..support.crews import crew as crew
from ..support.crews import plain as plain
from ..support.factories import Client
from ..support.shop import DEDUCT
from ..support.textbook import Insufficient

KEY, ITEM = "counter", "stock"
TASKS, TURNS, STOCK = 64, 1, 50


# -- optimistic counter ----------------------------------------------------------------------------------------


async def test_textbook_get_then_set_loses_an_update(plain: Client) -> None:
    async def meanwhile() -> None:
        await textbook.add_one(plain, KEY)

    await textbook.add_one(plain, KEY, meanwhile)
    assert await plain.get(KEY) == "1", "two have added one"


async def test_textbook_watch_tries_forever(plain: Client) -> None:
    """Nothing bounds it but the patience of the rival, who writes another 50 times."""
    patience = iter(range(50))

    async def rival() -> None:
        if next(patience, None) is not None:
            await plain.incr(KEY)

    assert await textbook.add_one_watching(plain, KEY, rival) == 51
    assert await plain.get(KEY) == "51"


async def test_textbook_redis_py_transaction_tries_forever(plain: Client) -> None:
    tries = 0

    async def body(pipe: Client) -> None:
        nonlocal tries
        old = int(await pipe.get(KEY) or 0)
        if tries < 50:
            await plain.incr(KEY)
        tries += 1
        pipe.multi()
        pipe.set(KEY, old + 1)

    await plain.transaction(body, KEY)
    assert tries == 51


async def test_p12_a_transaction_gives_up_by_name(sync: Coordinator, plain: Client) -> None:
    """P12: after as many attempts as it was allowed; it says how many and on what, and has written nothing."""

    async def body(tx: Transaction) -> None:
        old = int(await tx.get(KEY) or 0)
        await plain.incr(KEY)
        tx.multi()
        tx.set(KEY, old + 1)

    with pytest.raises(Conflict, match=KEY) as caught:
        await transaction(sync, body, KEY, attempts=5)
    assert (caught.value.attempts, caught.value.keys) == (5, (KEY,))
    assert await plain.get(KEY) == "5"


async def test_p1_a_transaction_is_done_again_and_loses_nothing(sync: Coordinator, plain: Client) -> None:
    """P1: the rival comes three times; then all four have added one."""
    patience = iter(range(3))

    async def body(tx: Transaction) -> int:
        old = int(await tx.get(KEY) or 0)
        if next(patience, None) is not None:
            await plain.incr(KEY)
        tx.multi()
        tx.set(KEY, old + 1)
        return old + 1

    done = await transaction(sync, body, KEY)
    assert (done.value, done.conflicts, done.attempts) == (4, 3, 4)
    assert await plain.get(KEY) == "4"


# -- stock deduction -------------------------------------------------------------------------------------------


async def test_textbook_insufficient_stock_leaves_the_lock_behind(plain: Client) -> None:
    await plain.set(ITEM, 1)
    assert await textbook.deduct_under_lock(plain, ITEM, 1, "a") == 0
    with pytest.raises(Insufficient):
        await textbook.deduct_under_lock(plain, ITEM, 1, "b")
    assert await plain.get(f"lock:{ITEM}") == "b", "for ten seconds nobody can buy"


@pytest.mark.parametrize("way", DEDUCT)
async def test_p7_insufficient_comes_out_bare_and_the_lock_is_free(sync: Coordinator, way: str) -> None:
    """P7: no wrapper, no note, nothing changed; the next one finds everything free."""
    client: Client = sync.client
    await client.set(ITEM, 1)
    with pytest.raises(Insufficient) as caught:
        await DEDUCT[way](sync, ITEM, 2)
    assert type(caught.value) is Insufficient
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert not hasattr(caught.value, "__notes__")
    assert await client.get(ITEM) == b"1"
    assert not await sync.lock(f"lock:{ITEM}").locked()
    async with asyncio.timeout(5):
        assert await DEDUCT[way](sync, ITEM, 1) == 0


@pytest.mark.ci
@pytest.mark.parametrize("way", DEDUCT)
async def test_p1_exact_totals_in_two_processes(
    server: EmbeddedServer, sync: Coordinator, crew: Crew, way: str
) -> None:
    """P1: 64 tasks want one of 50 each: 50 are sold, 14 are refused, none are left. Then they count to 64."""
    client: Client = sync.client
    await client.set(ITEM, STOCK)
    with crew.children(2) as children:
        await asyncio.gather(*(child.open(server.url) for child in children))
        words = way, ITEM, TASKS // 2, TURNS
        answers = await asyncio.gather(*(child.run("tests.support.shop:deduct", *words) for child in children))
        assert sum(answer["sold"] for answer in answers) == STOCK
        assert sum(answer["refused"] for answer in answers) == TASKS * TURNS - STOCK
        assert await client.get(ITEM) == b"0"
        words = way, KEY, TASKS // 2, TURNS
        await asyncio.gather(*(child.run("tests.support.shop:count", *words) for child in children))
        assert await client.get(KEY) == b"%d" % (TASKS * TURNS)
