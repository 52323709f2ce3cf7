"""A stock that many deduct from, and a market: what `Child.run` runs in processes of their own."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext

from redis.asyncio import Redis

from benchmarks.market import ByLock, ByTransaction, ByWatch, Market
from redis_sync_aio import Coordinator, transaction
from redis_sync_aio.types import Transaction

from .textbook import Insufficient, decoded


def server(sync: Coordinator) -> Redis:
    """Return the client of a coordinator of one server."""
    assert isinstance(sync.client, Redis)
    return sync.client


Deduct = Callable[[Coordinator, str, int], Awaitable[int]]


async def deduct_under_lock(sync: Coordinator, item: str, count: int) -> int:
    """A lock, and WATCH inside it against those who do not use the lock."""
    async with sync.lock(f"lock:{item}"), decoded(server(sync)).pipeline() as pipe:
        await pipe.watch(item)
        left = int(await pipe.get(item) or 0) - count
        if left < 0:
            raise Insufficient(f"{count} of {item} were asked for, {left + count} are left")
        pipe.multi()
        pipe.set(item, left)
        await pipe.execute()
        return left


async def deduct_by_transaction(sync: Coordinator, item: str, count: int) -> int:
    """No lock, until there were three conflicts."""

    async def body(tx: Transaction) -> int:
        left = int(await tx.get(item) or 0) - count
        if left < 0:
            raise Insufficient(f"{count} of {item} were asked for, {left + count} are left")
        tx.multi()
        tx.set(item, left)
        return left

    return (await transaction(sync, body, item, attempts=1000, escalate_after=3)).value


DEDUCT: Mapping[str, Deduct] = {"lock": deduct_under_lock, "transaction": deduct_by_transaction}


async def deduct(sync: Coordinator, way: str, item: str, tasks: str, turns: str) -> dict[str, object]:
    """So many tasks deduct 1 so many times; return how many had one, and how many were refused."""
    sold = refused = 0

    async def customer() -> None:
        nonlocal sold, refused
        for _ in range(int(turns)):
            try:
                await DEDUCT[way](sync, item, 1)
                sold += 1
            except Insufficient:
                refused += 1

    await asyncio.gather(*(customer() for _ in range(int(tasks))))
    return {"sold": sold, "refused": refused}


async def count(sync: Coordinator, way: str, key: str, tasks: str, turns: str) -> dict[str, object]:
    """So many tasks add 1 so many times."""

    async def counter() -> None:
        for _ in range(int(turns)):
            await DEDUCT[way](sync, key, -1)

    await asyncio.gather(*(counter() for _ in range(int(tasks))))
    return {}


WAYS: Mapping[str, Callable[[Coordinator], Market]] = {
    "watch": lambda sync: ByWatch(server(sync), fine=False),
    "watch-fine": lambda sync: ByWatch(server(sync), fine=True),
    "lock": lambda sync: ByLock(server(sync), lambda goods: sync.lock("lock:market")),
    "lock-fine": lambda sync: ByLock(server(sync), lambda goods: sync.lock(f"lock:{goods}")),
    "transaction": lambda sync: ByTransaction(server(sync), sync, fine=False),
    "transaction-fine": lambda sync: ByTransaction(server(sync), sync, fine=True),
    "nothing": lambda sync: ByLock(server(sync), lambda goods: nullcontext()),
}


async def trade(sync: Coordinator, way: str, sellers: str, buyers: str, items: str, total: str) -> dict[str, object]:
    """Sellers list all they have, buyers buy until ``total`` are sold by all processes; return what they did."""
    market, client = WAYS[way](sync), decoded(server(sync))
    bought = 0
    end = time.monotonic() + 20

    async def sell(seller: str) -> None:
        for number in range(int(items)):
            assert await market.list_item(seller, f"{seller}:{number}", 1 + number)

    async def buy(buyer: str) -> None:
        nonlocal bought
        chance = random.Random(buyer)
        while time.monotonic() < end and int(await client.get("sold") or 0) < int(total):
            if offers := await market.offers(5):
                if await market.purchase(buyer, chance.choice(offers), end):
                    await client.incr("sold")
                    bought += 1
            else:
                await asyncio.sleep(0.001)

    await asyncio.gather(*map(sell, sellers.split(",")), *map(buy, buyers.split(",")))
    return {"bought": bought, "retries": market.retries}
