"""An order over systems that share no transaction: a process is killed in the middle of it, and the next one cleans up.

Run ``python examples/order_saga.py`` (needs ``pip install 'redis_sync_aio[embedded]'``). A worker charges the customer,
takes the goods from stock, and is killed before it can ship them. The next worker finds the robust lock abandoned, runs
the undo steps that the first one had recorded, and processes the order again. Exit code 0 if no customer paid twice
and no item is lost.

Read more in docs/guides/after-a-crash.md.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from redis.asyncio import Redis

from redis_sync_aio import AsyncRobustLock, Compensation
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import UndoSteps

ORDER, STOCK = "order-7", 5

# Payment and stock stand for third-party systems. Each action has a key, and happens once for that key. Undoing an
# action that did not happen, or was already undone, changes nothing. Undo steps rely on that.
DO_ONCE = "if redis.call('SADD', KEYS[1], ARGV[1]) == 1 then redis.call('INCRBY', KEYS[2], ARGV[2]) end"
UNDO_ONCE = "if redis.call('SREM', KEYS[1], ARGV[1]) == 1 then redis.call('DECRBY', KEYS[2], ARGV[2]) end"


class Shop:
    """The steps of an order and their undo steps."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self.steps = UndoSteps()
        self.steps.step("refund")(self.refund)
        self.steps.step("restock")(self.restock)

    async def charge(self, order: str) -> None:
        await self._redis.eval(DO_ONCE, 2, "charged", "payments", order, "1")

    async def refund(self, *, order: str) -> None:
        await self._redis.eval(UNDO_ONCE, 2, "charged", "payments", order, "1")

    async def take(self, order: str) -> None:
        await self._redis.eval(DO_ONCE, 2, "taken", "stock", order, "-1")

    async def restock(self, *, order: str) -> None:
        await self._redis.eval(UNDO_ONCE, 2, "taken", "stock", order, "-1")

    async def ship(self, order: str) -> None:
        await self._redis.sadd("shipped", order)

    async def books(self) -> str:
        payments, stock = await self._redis.mget("payments", "stock")
        return f"{int(payments or 0)} paid, {int(stock or 0)} in stock, {await self._redis.scard('shipped')} shipped"


async def work(redis: Redis, order: str, *, die: bool = False) -> None:
    """Process the order, after undoing the unfinished work of another worker."""
    shop = Shop(redis)
    async with AsyncRobustLock(redis, f"lock:{order}", ttl=1) as lease:
        if lease.abandoned is not None:
            steps = ", ".join(lease.abandoned.steps)
            print(f"abandoned at {lease.progress}, with {steps} to run: {await shop.books()}")
            await lease.compensate(shop.steps)
            print(f"undone: {await shop.books()}")
        await lease.record({"order": order, "step": "begun"})
        async with Compensation(lease, shop.steps) as undo:
            await undo.push("refund", order=order)  # first the step, then the action it undoes
            await shop.charge(order)
            await undo.push("restock", order=order)
            await shop.take(order)
            await lease.record({"order": order, "step": "ready to ship"})
            if die:
                os.kill(os.getpid(), signal.SIGKILL)
            await shop.ship(order)


async def worker(url: str, order: str, *, die: bool) -> None:
    async with Redis.from_url(url) as redis:
        await work(redis, order, die=die)


async def demonstrate() -> int:
    async with EmbeddedServer(port=0) as server, server.client() as redis:
        await redis.set("stock", STOCK)
        process = await asyncio.create_subprocess_exec(sys.executable, __file__, server.url, ORDER)
        code = await process.wait()
        assert code == -signal.SIGKILL, code
        await work(redis, ORDER)
        books = await Shop(redis).books()
        print(f"done: {books}")
        return 0 if books == f"1 paid, {STOCK - 1} in stock, 1 shipped" else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(worker(sys.argv[1], sys.argv[2], die=True))
    else:
        sys.exit(asyncio.run(demonstrate()))
