"""The market of the textbooks: where WATCH fails, and ways that keep money and items (docs/classic-patterns.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
import redis as blocking

from benchmarks.market import ESCALATE_AFTER, MARKET, Market, TooPoor, audit, funds, open_market
from redis_sync_aio import Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer

from ..support.body import FAST, waits
from ..support.child import Crew
from ..support.factories import Client
from ..support.inside import turn_key
from ..support.pairwise import first_of
from ..support.shop import WAYS

SELLERS, BUYERS, ITEMS, MONEY = ["s0", "s1", "s2"], ["b0", "b1", "b2"], 10, 10_000
GUARDED = [way for way in WAYS if way != "nothing"]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew() as crew:
        yield crew


@pytest.fixture
def ledger(server: EmbeddedServer, redis: Client) -> Iterator[blocking.Redis]:
    """A client to open the market with and to look into the books."""
    with blocking.Redis.from_url(server.url) as client:
        open_market(client, SELLERS, BUYERS, ITEMS, MONEY)
        yield client


def wrong(ledger: blocking.Redis) -> list[str]:
    return audit(ledger, SELLERS, BUYERS, ITEMS, MONEY)


def soon() -> float:
    return time.monotonic() + 5


def between(market: Market, gap: Callable[[], Awaitable[object]]) -> None:
    """Let ``gap`` happen between looking and writing, from now on."""

    async def looked() -> None:
        await gap()

    market.looked = looked  # type: ignore[method-assign]


async def test_textbook_unguarded_it_sells_twice(sync: Coordinator, ledger: blocking.Redis) -> None:
    first, second = WAYS["nothing"](sync), WAYS["nothing"](sync)
    await first.list_item("s0", "s0:0", 10)

    async def meanwhile() -> None:
        assert await second.purchase("b1", "s0:0.s0", soon())

    between(first, meanwhile)
    assert await first.purchase("b0", "s0:0.s0", soon())
    assert wrong(ledger) == ["1 items are in two places"]


async def test_textbook_watch_is_disturbed_by_what_others_sell(sync: Coordinator, ledger: blocking.Redis) -> None:
    """Nobody else wants the item, and still all is done ten times without success: the whole market is one key."""
    buyer, seller = WAYS["watch"](sync), WAYS["watch"](sync)
    await seller.list_item("s0", "s0:0", 10)
    others = iter(range(ITEMS))

    async def meanwhile() -> None:
        if (number := next(others, None)) is not None:
            assert await seller.list_item("s1", f"s1:{number}", 10)

    between(buyer, meanwhile)
    assert await buyer.purchase("b0", "s0:0.s0", soon())
    assert buyer.retries == ITEMS
    assert wrong(ledger) == []


@pytest.mark.timing
async def test_textbook_watch_gives_up_when_its_time_is_over(sync: Coordinator, ledger: blocking.Redis) -> None:
    buyer, seller = WAYS["watch"](sync), WAYS["watch"](sync)
    await seller.list_item("s0", "s0:0", 10)
    until = time.monotonic() + 0.05

    async def meanwhile() -> None:
        await ledger_touch(sync)

    between(buyer, meanwhile)
    assert not await buyer.purchase("b0", "s0:0.s0", until)
    assert buyer.retries > 0
    assert await buyer.offers(5) == ["s0:0.s0"], "it is there, and nobody else asked for it"
    assert wrong(ledger) == []


async def ledger_touch(sync: Coordinator) -> None:
    """Somebody changes the buyer's money, and changes it back."""
    client: Client = sync.client
    async with client.pipeline() as pipe:
        pipe.incr(funds("b0"))
        pipe.decr(funds("b0"))
        await pipe.execute()


@pytest.mark.parametrize("way", ["watch-fine", "transaction-fine"])
async def test_p1_keys_of_ones_own_are_not_disturbed(sync: Coordinator, ledger: blocking.Redis, way: str) -> None:
    """P1: one key for each offer: what others list does not matter; a buyer of the same has it, or not."""
    market, other = WAYS[way](sync), WAYS[way](sync)
    await market.list_item("s0", "s0:0", 10)
    snatched = False

    async def meanwhile() -> None:
        nonlocal snatched
        assert await other.list_item("s1", f"s1:{int(snatched)}", 10)
        if not snatched:
            snatched = await other.purchase("b1", "s0:0.s0", soon())

    between(market, lambda: asyncio.create_task(meanwhile()))  # somebody else's task
    assert not await market.purchase("b0", "s0:0.s0", soon())
    assert market.retries == 1
    assert snatched
    assert await market.purchase("b0", "s1:0.s1", soon())
    assert market.retries == 1
    assert wrong(ledger) == []


async def test_p2_a_transaction_that_is_disturbed_takes_its_turn(sync: Coordinator, ledger: blocking.Redis) -> None:
    """P2: as with WATCH above, but after three failures those who come then wait until it is done."""
    buyer, seller = WAYS["transaction"](sync), WAYS["transaction"](sync)
    turn = sync.lock(turn_key(MARKET.encode()))
    await seller.list_item("s0", "s0:0", 10)
    listing: list[asyncio.Task[bool]] = []

    async def meanwhile() -> None:
        number = len(listing)
        listing.append(asyncio.create_task(seller.list_item("s1", f"s1:{number}", 10)))

        async def done_or_in_line() -> bool:
            return listing[number].done() or (await turn.statistics()).waiting > 0

        await wait_until(done_or_in_line, FAST, timeout=15)

    between(buyer, meanwhile)
    assert await buyer.purchase("b0", "s0:0.s0", soon())
    assert buyer.retries == ESCALATE_AFTER
    assert len(listing) == ESCALATE_AFTER + 1
    assert all(await asyncio.gather(*listing))
    assert not await turn.locked()
    assert wrong(ledger) == []


@pytest.mark.parametrize("way", ["lock", "lock-fine"])
async def test_p1_under_a_lock_what_others_sell_does_not_disturb(
    sync: Coordinator, ledger: blocking.Redis, way: str
) -> None:
    """P1: a buyer of the same item waits, then finds it gone."""
    market, other = WAYS[way](sync), WAYS[way](sync)
    await market.list_item("s0", "s0:0", 10)
    rivals: list[asyncio.Task[bool]] = []

    async def meanwhile() -> None:
        rivals.append(asyncio.create_task(other.purchase("b1", "s0:0.s0", soon())))
        rivals.append(asyncio.create_task(other.list_item("s1", "s1:0", 10)))
        if way == "lock-fine":
            assert await rivals[1]
            await wait_until(waits(sync.lock("lock:s0:0.s0")), FAST, timeout=15)
        else:
            await wait_until(waits(sync.lock("lock:market"), 2), FAST, timeout=15)

    between(market, meanwhile)
    assert await market.purchase("b0", "s0:0.s0", soon())
    assert [await rival for rival in rivals] == [False, True]
    assert market.retries == 0
    assert wrong(ledger) == []


@pytest.mark.parametrize("way", GUARDED)
async def test_p7_too_poor_comes_out_bare_and_nothing_is_changed(
    sync: Coordinator, ledger: blocking.Redis, way: str
) -> None:
    """P7: and nothing is left locked or watched: the next purchase is done immediately."""
    market = WAYS[way](sync)
    await market.list_item("s0", "s0:0", MONEY + 1)
    await market.list_item("s0", "s0:1", MONEY)
    with pytest.raises(TooPoor, match=f"b0 has {MONEY}, the price is {MONEY + 1}") as caught:
        await market.purchase("b0", "s0:0.s0", soon())
    assert type(caught.value) is TooPoor
    async with asyncio.timeout(5):
        assert await market.purchase("b0", "s0:1.s0", soon())
        assert not await market.list_item("s0", "s0:1", 5)
        assert not await market.purchase("b0", "s0:1.s0", soon())
    assert wrong(ledger) == []


@pytest.mark.parametrize("way", first_of(*GUARDED))
async def test_p1_money_and_items_are_conserved_in_two_processes(
    server: EmbeddedServer, ledger: blocking.Redis, crew: Crew, way: str
) -> None:
    """P1: all that is listed is bought, once, and paid for, once."""
    with crew.children(2) as children:
        await asyncio.gather(*(child.open(server.url) for child in children))
        words = "tests.support.shop:trade", way
        total = len(SELLERS) * ITEMS
        one = children[0].run(*words, ",".join(SELLERS[:2]), BUYERS[0], ITEMS, total)
        two = children[1].run(*words, SELLERS[2], ",".join(BUYERS[1:]), ITEMS, total)
        assert (await one)["bought"] + (await two)["bought"] == total
    assert ledger.zcard(MARKET) == 0
    assert wrong(ledger) == []


def test_the_audit_finds_what_is_missing(ledger: blocking.Redis) -> None:
    assert wrong(ledger) == []
    ledger.srem("inventory:s0", "s0:3")
    ledger.incr(funds("b0"))
    assert wrong(ledger) == ["there were 30000 in money, and now 30001", "1 items are gone, 0 came from nowhere"]
    ledger.sadd("inventory:b0", "s9:3")
    assert wrong(ledger)[1:] == ["1 items are gone, 1 came from nowhere"]


def test_the_ways_are_those_of_the_benchmark() -> None:
    from benchmarks.contestants import ALL

    playing = [one for one in ALL if "market" in one.plays]
    assert len(playing) == len(WAYS)
