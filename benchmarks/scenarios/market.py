"""S8: sellers list, buyers buy, as fast as they can, in two processes: WATCH, a lock for all, a lock for each item, and
the transaction that takes its turn when there are too many conflicts.

A buyer looks at the cheapest offers and chooses one at random. A purchase lasts from that choice until the buyer has
the item, with all retries and waits for locks. If the item was sold to another buyer, the purchase does not count; if
it is unfinished at the end, it counts with the time until then. Money and items are counted at the end.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..contestant import Contestant
from ..contestants import BY_NAME
from ..market import Market, audit, open_market
from ..measure import middle, percentile
from ..scenario import Bench, Column, Round, Scenario
from ..workers import Desk

ITEMS_PER_SECOND = 12_000
"""More than one seller can list; the fastest machine so far reached 4,600."""
MONEY = 1_000_000_000
OFFERS = 20
PAUSE = 0.001
"""Seconds between two looks at an empty market."""


@dataclass(frozen=True, slots=True)
class Trades:
    """The trades of the sellers and buyers of one process."""

    listed: int
    bought: list[float]  # seconds of each purchase
    cut_off: list[float]  # seconds of those that were unfinished at the end
    retries: int
    seconds: float


async def trade(
    desk: Desk, contestant: str, sellers: Sequence[str], buyers: Sequence[str], items: int, seconds: float, side: int
) -> Trades:
    """Let every other seller and buyer trade; one seller and one buyer are in different processes."""
    sellers, buyers = sellers[side::2], buyers[1 - side :: 2]
    player = BY_NAME[contestant](desk.url)
    await player.open()
    try:
        market = player.market()
        await asyncio.gather(*(market.list_item(seller, f"{seller}:0", 1) for seller in sellers))
        await asyncio.gather(*(market.purchase(buyer, "nothing.nobody", time.monotonic() + 1) for buyer in buyers))
        market.retries = 0
        desk.meet()
        start = time.monotonic()
        until = start + seconds
        bought, cut_off = list[float](), list[float]()
        listed, _ = await asyncio.gather(
            asyncio.gather(*(_sell(market, seller, items, until) for seller in sellers)),
            asyncio.gather(*(_buy(market, buyer, until, bought, cut_off) for buyer in buyers)),
        )
        took = time.monotonic() - start
        desk.meet()
        return Trades(sum(listed), bought, cut_off, market.retries, took)
    finally:
        await player.close()


async def _sell(market: Market, seller: str, items: int, until: float) -> int:
    for number in range(1, items):
        if time.monotonic() >= until:
            return number - 1
        if not await market.list_item(seller, f"{seller}:{number}", 1 + number % 97):
            raise ValueError(f"item {number} of {seller} was not in its inventory")
    raise ValueError(f"{seller} listed all of its {items} items before the end: give it more")


async def _buy(market: Market, buyer: str, until: float, bought: list[float], cut_off: list[float]) -> None:
    chance = random.Random(buyer)
    while time.monotonic() < until:
        offers = await market.offers(OFFERS)
        if not offers:
            await asyncio.sleep(PAUSE)
            continue
        start = time.monotonic()
        done = await market.purchase(buyer, chance.choice(offers), until)
        end = time.monotonic()
        if done or end >= until:
            (bought if done else cut_off).append(end - start)


def _play(sellers: int, buyers: int, bench: Bench, contestant: type[Contestant]) -> Round:
    who = [f"seller{number}" for number in range(sellers)], [f"buyer{number}" for number in range(buyers)]
    items = int(ITEMS_PER_SECOND * bench.scale.market) + 2
    open_market(bench.stats.client, *who, items, MONEY)
    arguments = {"sellers": who[0], "buyers": who[1], "items": items, "seconds": bench.scale.market}
    results, _ = bench.run(contestant, [trade, trade], **arguments)
    seconds = max(result.seconds for result in results)
    waits = [wait * 1000 for result in results for wait in (*result.bought, *result.cut_off)]
    return Round(
        {
            "bought_per_second": sum(len(result.bought) for result in results) / seconds,
            "listed_per_second": sum(result.listed for result in results) / seconds,
            "retries_per_second": sum(result.retries for result in results) / seconds,
            "p50_ms": middle(waits),
            "p99_ms": percentile(waits, 0.99),
        },
        audit(bench.stats.client, *who, items, MONEY),
    )


_COLUMNS = (
    Column("bought_per_second", "bought/s"),
    Column("listed_per_second", "listed/s"),
    Column("retries_per_second", "retries/s"),
    Column("p50_ms", "purchase p50 ms", 1),
    Column("p99_ms", "purchase p99 ms", 1),
)


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


def _market(key: str, sellers: int, buyers: int) -> Scenario:
    title = f"S8: market, {_number(sellers, 'seller')}, {_number(buyers, 'buyer')}, 2 processes"
    return Scenario(
        key, title, partial(_play, sellers, buyers), _COLUMNS, "bought_per_second", game="market", quick=key == "s8"
    )


MARKETS = (_market("s8", 5, 5), _market("s8s1b5", 1, 5), _market("s8s5b1", 5, 1), _market("s8s1b1", 1, 1))
