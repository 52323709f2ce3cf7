"""FastAPI: one lock per order, held by a dependency while the endpoint runs.

Shows `lifespan_of` (client and coordinator in the state of the lifespan), `hold_lock` as a dependency, the fence passed
on to the storage, and `answer_errors`: 423 with Retry-After when the order is busy, 503 when Redis is unreachable or
hangs, or the lease was lost; the exact error goes to the log. A client that disconnects while it waits leaves the
queue. Needs ``pip install 'redis_sync_aio[embedded,fastapi]' uvicorn``. Run it, and try::

    python examples/fastapi_service.py              # or: uvicorn examples.fastapi_service:app
    curl -X POST 'localhost:8000/orders/42/items?price=5'

It uses the Redis or Valkey at the environment variable REDIS_URL, or starts a private embedded server: one
per process, so set REDIS_URL before you run several processes.

Read more in docs/recipes/fastapi.md.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from pydantic import BaseModel, PositiveInt
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from redis_sync_aio import Coordinator, Lease
from redis_sync_aio.contrib.fastapi import SyncState, answer_errors, hold_lock, lifespan_of
from redis_sync_aio.embedded import EmbeddedServer

RESPONSE_TIMEOUT = 1.0
"""Seconds after which an answer of Redis is overdue."""
PATIENCE = 3.0
"""Seconds that a request waits for its turn. A server that hangs is noticed within twice RESPONSE_TIMEOUT plus a
quarter of a second. With a shorter PATIENCE it would look like a busy order."""

# Of the level of the module: with text annotations, FastAPI finds no other. It is released before the response is sent.
order_lock = hold_lock("lock:order:{order_id:int}", timeout=PATIENCE, ttl=10, leave_when_gone=True)
OrderLease = Annotated[Lease, order_lock]

# The lock lets one request work at a time. The fence keeps out a holder that has lost the lock without noticing it yet
# (a paused process, a failover). In SQL: UPDATE orders SET … WHERE id = :id AND fence <= :fence
SAVE = """
if tonumber(redis.call('HGET', KEYS[1], 'fence') or 0) > tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'items', ARGV[2], 'total', ARGV[3])
return 1
"""


class StaleWrite(Exception):
    """A later holder of the lock has already written; this one lost its lease."""


class Order(BaseModel):
    items: int = 0
    total: int = 0
    fence: int = 0


@dataclass(frozen=True)
class Orders:
    """The storage, which the locks guard."""

    redis: Redis

    async def load(self, order_id: int) -> Order:
        return Order.model_validate(await self.redis.hgetall(f"order:{order_id}"))

    async def save(self, order_id: int, order: Order) -> None:
        fields = [str(value) for value in (order.fence, order.items, order.total)]
        if not await self.redis.eval(SAVE, 1, f"order:{order_id}", *fields):
            raise StaleWrite("a later holder of the lock has already written")


def orders_of(request: Request) -> Orders:
    return Orders(request.state.redis)


StoredOrders = Annotated[Orders, Depends(orders_of)]


def create_app(redis_url: str | None = None) -> FastAPI:
    """Return the service; the URL comes from REDIS_URL, or from an embedded server, unless given."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[SyncState]:
        async with _url(redis_url or os.environ.get("REDIS_URL")) as url:

            def connect() -> Coordinator:
                # One retry is enough here: a request must not wait for long, and the caller tries again.
                retry = Retry(NoBackoff(), 1)
                redis = Redis.from_url(url, decode_responses=True, socket_timeout=RESPONSE_TIMEOUT, retry=retry)
                return Coordinator(redis, response_timeout=RESPONSE_TIMEOUT)

            async with lifespan_of(connect)(app) as state:
                yield state

    app = FastAPI(title="Orders", lifespan=lifespan)
    # 503 for the data, too, when Redis is unreachable, and for what the fence keeps out.
    answer_errors(app, also=(RedisConnectionError, RedisTimeoutError, StaleWrite))

    @app.post("/orders/{order_id}/items")
    async def add_item(order_id: int, price: PositiveInt, orders: StoredOrders, lease: OrderLease) -> Order:
        order = await orders.load(order_id)  # read …
        changed = Order(items=order.items + 1, total=order.total + price, fence=lease.fence)  # … modify …
        await orders.save(order_id, changed)  # … write: another request in between would be overwritten
        return changed

    @app.get("/orders/{order_id}")
    async def read(order_id: int, orders: StoredOrders) -> Order:
        return await orders.load(order_id)

    return app


@asynccontextmanager
async def _url(given: str | None) -> AsyncIterator[str]:
    if given:
        yield given
    else:
        async with EmbeddedServer() as server:
            yield server.url


app = create_app()

if __name__ == "__main__":
    try:
        import uvicorn
    except ImportError:
        raise SystemExit("pip install uvicorn") from None
    uvicorn.run(app, port=int(os.environ.get("PORT", "8000")))
