"""A worker process of the demo: tasks that sell items, each under the lock of its product.

Started as ``python -m redis_sync_aio.cli._demo.worker``. It reads its job, one line of JSON, from stdin, answers
"ready", and starts at the next line. It ends when stdin does, since then the parent is gone. What happens it
writes to stdout, one JSON array per line and immediately, so that a worker that is killed has told everything up
to then. Times are `time.monotonic_ns`, which is one clock for all processes of a machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, AsyncLock, Coordinator

KEEP = 3600
"""Seconds after which the demo's data is gone from the server even if nobody could delete it."""


@dataclass(frozen=True, slots=True)
class Job:
    """The task of a worker."""

    url: str
    prefix: str
    process: int
    tasks: int
    products: int
    work: float  # seconds that a sale takes between reading the stock and writing it
    timeout: float  # seconds to wait for a lock before trying another product
    ttl: float
    seed: int
    locked: bool  # False: sell without the lock, to show what happens then
    freeze_at: int  # the sale in which to stop, holding the lock, and wait to be killed; 0: none

    def line(self) -> bytes:
        """Return the job as the line that a worker reads."""
        return json.dumps(asdict(self)).encode() + b"\n"


def stock_key(prefix: str, product: int) -> str:
    """Return the key of the number of items left."""
    return f"{prefix}:stock:{product}"


def sales_key(prefix: str, product: int) -> str:
    """Return the key of the list of sales: "item fence process task", in order."""
    return f"{prefix}:sales:{product}"


def lock_name(prefix: str, product: int) -> str:
    """Return the name of the product's lock."""
    return f"{prefix}:lock:{product}"


def tell(kind: str, *values: int) -> None:
    """Tell the parent. One write: the line arrives whole or not at all."""
    os.write(1, json.dumps([kind, *values]).encode() + b"\n")


class Shop:
    """The tasks of one worker and what they share."""

    def __init__(self, job: Job, redis: Redis, sync: Coordinator) -> None:
        self._job = job
        self._redis = redis
        self._locks = {
            product: AsyncLock(sync, lock_name(job.prefix, product), ttl=job.ttl)
            for product in range(1, job.products + 1)
        }
        self._grants = 0
        self._sales = 0

    async def connect(self) -> None:
        """Open the connections, so that no grant pays for it."""
        await asyncio.gather(*(self._redis.ping() for _ in range(self._job.tasks)))
        await self._locks[1].locked()

    async def run(self) -> None:
        """Sell until nothing is left."""
        async with asyncio.TaskGroup() as group:
            for task in range(1, self._job.tasks + 1):
                group.create_task(self._sell_everything(task))

    async def _sell_everything(self, task: int) -> None:
        """Go round the products, in an order of this task's own, until all are sold out."""
        products = list(self._locks)
        random.Random(f"{self._job.seed} {self._job.process} {task}").shuffle(products)
        while products:
            for product in products.copy():
                asked = time.monotonic_ns()
                try:
                    if not await self._sell_one(task, product, asked):
                        products.remove(product)
                except AcquireTimeout:
                    tell("gave up", task, product, asked, time.monotonic_ns())

    async def _sell_one(self, task: int, product: int, asked: int) -> bool:
        """Sell one item; return False if none was left."""
        async with self._turn(product) as fence:
            got = time.monotonic_ns()
            self._grants = grant = self._grants + 1
            tell("got", grant, task, product, fence, asked, got)
            item = int(await self._redis.get(stock_key(self._job.prefix, product)) or 0)
            if item > 0:
                await asyncio.sleep(self._job.work)  # everything that others could do meanwhile
                await self._freeze_if_due(grant)
                await self._write_sale(task, product, item, fence)
            released = time.monotonic_ns()
        tell("end", grant, released, max(item, 0))
        return item > 0

    @asynccontextmanager
    async def _turn(self, product: int) -> AsyncIterator[int]:
        if not self._job.locked:
            yield 0
            return
        async with self._locks[product].acquire(timeout=self._job.timeout) as lease:
            yield lease.fence

    async def _freeze_if_due(self, grant: int) -> None:
        """Stop in the middle of the section, with the lock held and nothing written, and wait to be killed."""
        self._sales += 1
        if self._sales == self._job.freeze_at:
            tell("frozen", grant)
            await asyncio.Event().wait()

    async def _write_sale(self, task: int, product: int, item: int, fence: int) -> None:
        # In one MULTI, since other tasks of a worker that is killed are just here: its last sales are then
        # written whole or not at all. The read before it is not part of it: only the lock protects that.
        prefix, process = self._job.prefix, self._job.process
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(stock_key(prefix, product), item - 1, ex=KEEP)
            pipe.rpush(sales_key(prefix, product), f"{item} {fence} {process} {task}")
            pipe.expire(sales_key(prefix, product), KEEP)
            await pipe.execute()


async def work(job: Job) -> None:
    """Do ``job`` once the parent says so."""
    async with Redis.from_url(job.url) as redis, Coordinator(redis) as sync:
        shop = Shop(job, redis, sync)
        await shop.connect()
        tell("ready")
        if not await asyncio.to_thread(sys.stdin.readline):
            raise EOFError("the demo that started this worker is gone")
        threading.Thread(target=die_with_parent, daemon=True).start()
        await shop.run()


def die_with_parent() -> None:
    """Wait for the end of stdin, and end the process then, whatever it is doing."""
    # Not sys.stdin: a thread that waits inside it when the interpreter ends would crash it.
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    asyncio.run(work(Job(**json.loads(sys.stdin.readline()))))
