"""The market of the textbooks: sellers list items at a price, buyers pay and get them. Several ways keep it
consistent.

    market              sorted set   "ITEM.SELLER" -> price, to browse the offers
    offer:ITEM.SELLER   string       its price, for as long as it is for sale
    inventory:USER      set          items that are not for sale
    funds:USER          string       an amount of money

Listing moves an item from the inventory of its seller to the market. A purchase moves it on to the inventory of the
buyer, and the price from buyer to seller. `audit` counts money and items.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import WatchError

from redis_sync_aio import Conflict, Coordinator, transaction
from redis_sync_aio.types import Transaction

MARKET = "market"
AT_ONCE = 1000
ESCALATE_AFTER, MANY = 3, 1_000_000


def inventory(user: str) -> str:
    """Return the key of a user's items that are not for sale."""
    return f"inventory:{user}"


def funds(user: str) -> str:
    """Return the key of a user's money."""
    return f"funds:{user}"


def offer(goods: str) -> str:
    """Return the key of one offer."""
    return f"offer:{goods}"


class TooPoor(Exception):
    """The buyer has less than the price."""


class Market(ABC):
    """One implementation; ``client`` decodes no responses. ``retries`` counts failed attempts."""

    def __init__(self, client: Redis) -> None:
        self.client: Any = client
        self.retries = 0

    @abstractmethod
    async def list_item(self, seller: str, item: str, price: int) -> bool:
        """Put an item of the seller's inventory on the market; return whether it was in the inventory."""

    @abstractmethod
    async def purchase(self, buyer: str, goods: str, until: float) -> bool:
        """Buy the offer ``goods``; return False if it is no longer there, or ``until`` has passed.

        Raises TooPoor: nothing was changed.
        """

    async def looked(self) -> None:
        """Do nothing between reading and writing; a test overrides this to interfere here."""
        return

    async def offers(self, most: int) -> list[str]:
        """Return the offers, the cheapest first."""
        return [goods.decode() for goods in await self.client.zrange(MARKET, 0, most - 1)]


def put_up(pipe: Any, seller: str, item: str, price: int) -> None:
    """Queue the writes of a listing."""
    goods = f"{item}.{seller}"
    pipe.zadd(MARKET, {goods: price})
    pipe.set(offer(goods), price)
    pipe.srem(inventory(seller), item)


def hand_over(pipe: Any, buyer: str, goods: str, price: int) -> None:
    """Queue the writes of a purchase."""
    item, seller = goods.rsplit(".", 1)
    pipe.zrem(MARKET, goods)
    pipe.delete(offer(goods))
    pipe.incrby(funds(seller), price)
    pipe.decrby(funds(buyer), price)
    pipe.sadd(inventory(buyer), item)


def affordable(buyer: str, price: Any, has: Any) -> int | None:
    """Return the price; None if it is not for sale. Raises TooPoor."""
    if price is None:
        return None
    if int(has or 0) < int(price):
        raise TooPoor(f"{buyer} has {int(has or 0)}, the price is {int(price)}")
    return int(price)


class ByWatch(Market):
    """WATCH, read, MULTI, EXEC, retried after a conflict: redis-py's pipeline, as in its documentation.

    A purchase watches the whole market, or with ``fine`` only its offer.
    """

    def __init__(self, client: Redis, *, fine: bool) -> None:
        super().__init__(client)
        self._fine = fine

    def _watched(self, goods: str) -> str:
        return offer(goods) if self._fine else MARKET

    async def list_item(self, seller: str, item: str, price: int) -> bool:
        async with self.client.pipeline() as pipe:
            while True:
                try:
                    await pipe.watch(inventory(seller))
                    if not await pipe.sismember(inventory(seller), item):
                        return False
                    await self.looked()
                    pipe.multi()
                    put_up(pipe, seller, item, price)
                    await pipe.execute()
                    return True
                except WatchError:
                    self.retries += 1

    async def purchase(self, buyer: str, goods: str, until: float) -> bool:
        async with self.client.pipeline() as pipe:
            while time.monotonic() < until:
                try:
                    await pipe.watch(self._watched(goods), funds(buyer))
                    price = affordable(buyer, *await pipe.mget(offer(goods), funds(buyer)))
                    if price is None:
                        return False
                    await self.looked()
                    pipe.multi()
                    hand_over(pipe, buyer, goods, price)
                    await pipe.execute()
                    return True
                except WatchError:
                    self.retries += 1
        return False


class ByLock(Market):
    """Read and write inside ``guard(goods)``: a lock for the market, or for each item, or (as a proof) no lock."""

    def __init__(self, client: Redis, guard: Callable[[str], AbstractAsyncContextManager[Any]]) -> None:
        super().__init__(client)
        self._guard = guard

    async def list_item(self, seller: str, item: str, price: int) -> bool:
        async with self._guard(f"{item}.{seller}"):
            if not await self.client.sismember(inventory(seller), item):
                return False
            await self.looked()
            async with self.client.pipeline() as pipe:
                put_up(pipe, seller, item, price)
                await pipe.execute()
            return True

    async def purchase(self, buyer: str, goods: str, until: float) -> bool:
        async with self._guard(goods):
            price = affordable(buyer, *await self.client.mget(offer(goods), funds(buyer)))
            if price is None:
                return False
            await self.looked()
            async with self.client.pipeline() as pipe:
                hand_over(pipe, buyer, goods, price)
                await pipe.execute()
            return True


class ByTransaction(Market):
    """The same as `ByWatch`, but after three conflicts in the order of a queue.

    Unless ``fine``, a listing names the market as one of its keys although it reads nothing from it. So sellers
    queue as well while a buyer has its turn, and listings do not disturb a purchase for long.
    """

    def __init__(self, client: Redis, coordinator: Coordinator, *, fine: bool) -> None:
        super().__init__(client)
        self._coordinator, self._fine = coordinator, fine

    def _watched(self, goods: str) -> str:
        return offer(goods) if self._fine else MARKET

    async def list_item(self, seller: str, item: str, price: int) -> bool:
        async def body(tx: Transaction) -> bool:
            there = bool(await tx.sismember(inventory(seller), item))
            if there:
                await self.looked()
            tx.multi()  # even when there is nothing to write: then EXEC confirms the reads
            if there:
                put_up(tx, seller, item, price)
            return there

        return await self._run(body, None, inventory(seller), *(() if self._fine else (MARKET,)))

    async def purchase(self, buyer: str, goods: str, until: float) -> bool:
        async def body(tx: Transaction) -> bool:
            price = affordable(buyer, *await tx.mget(offer(goods), funds(buyer)))
            if price is not None:
                await self.looked()
            tx.multi()
            if price is not None:
                hand_over(tx, buyer, goods, price)
            return price is not None

        return await self._run(body, until, self._watched(goods), funds(buyer))

    async def _run(self, body: Callable[[Transaction], Awaitable[bool]], until: float | None, *keys: str) -> bool:
        deadline = None if until is None else max(0.001, until - time.monotonic())
        try:
            done = await transaction(
                self._coordinator, body, *keys, attempts=MANY, timeout=deadline, escalate_after=ESCALATE_AFTER
            )
        except Conflict as error:
            self.retries += error.attempts
            return False
        self.retries += done.conflicts
        return done.value


def open_market(client: Any, sellers: Sequence[str], buyers: Sequence[str], items: int, money: int) -> None:
    """Give each seller ``items`` items, ``SELLER:NUMBER``, and each buyer ``money``; ``client`` is a blocking one."""
    for seller in sellers:
        for start in range(0, items, AT_ONCE):
            numbers = range(start, min(start + AT_ONCE, items))
            client.sadd(inventory(seller), *(f"{seller}:{number}" for number in numbers))
    for buyer in buyers:
        client.set(funds(buyer), money)


def audit(client: Any, sellers: Sequence[str], buyers: Sequence[str], items: int, money: int) -> list[str]:
    """Return discrepancies of money and items, which can only have changed hands."""
    users = [*sellers, *buyers]
    total = sum(int(client.get(funds(user)) or 0) for user in users)
    wrong = [] if total == money * len(buyers) else [f"there were {money * len(buyers)} in money, and now {total}"]
    places = [_words(client.smembers(inventory(user)), str) for user in users]
    places.append(_words(client.zrange(MARKET, 0, -1), lambda goods: goods.rsplit(".", 1)[0]))
    found = [item for place in places for item in place]
    expected = {f"{seller}:{number}" for seller in sellers for number in range(items)}
    if len(found) > len(set(found)):
        wrong.append(f"{len(found) - len(set(found))} items are in two places")
    if set(found) != expected:
        wrong.append(f"{len(expected - set(found))} items are gone, {len(set(found) - expected)} came from nowhere")
    return wrong


def _words(members: Iterable[Any], read: Callable[[str], str]) -> list[str]:
    return [read(member.decode() if isinstance(member, bytes) else member) for member in members]
