"""FastAPI: one lock per order, held by a dependency with ``yield`` while the endpoint runs.

Shows the `Coordinator` in the lifespan, `order_lease` as a dependency, the fence passed on to the storage, and
the answers to the caller: 423 with Retry-After when the order is busy, 503 when Redis is unreachable or hangs, or the
lease was lost; the exact error goes to the log. Needs ``pip install 'redis_sync_aio[embedded]'
'fastapi>=0.121' uvicorn``. Run it, and try::

    python examples/fastapi_service.py              # or: uvicorn examples.fastapi_service:app
    curl -X POST 'localhost:8000/orders/42/items?price=5'

It uses the Redis or Valkey at the environment variable REDIS_URL, or starts a private embedded server: one
per process, so set REDIS_URL before you run several processes.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, PositiveInt
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from redis_sync_aio import AcquireTimeout, Coordinator, CoordinatorClosed, Lease, LeaseLost
from redis_sync_aio.embedded import EmbeddedServer

logger = logging.getLogger(__name__)

RESPONSE_TIMEOUT = 1.0
"""Seconds after which an answer of Redis is overdue."""
PATIENCE = 3.0
"""Seconds that a request waits for its turn. A server that hangs is noticed within twice RESPONSE_TIMEOUT plus a
quarter of a second. With a shorter PATIENCE it would look like a busy order."""

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
    """The storage, and the locks that guard it."""

    redis: Redis
    sync: Coordinator
    patience: float
    """Seconds that a request waits for its turn."""

    async def load(self, order_id: int) -> Order:
        return Order.model_validate(await self.redis.hgetall(f"order:{order_id}"))

    async def save(self, order_id: int, order: Order) -> None:
        fields = [str(value) for value in (order.fence, order.items, order.total)]
        if not await self.redis.eval(SAVE, 1, f"order:{order_id}", *fields):
            raise StaleWrite("a later holder of the lock has already written")


def orders_of(request: Request) -> Orders:
    orders: Orders = request.app.state.orders
    return orders


StoredOrders = Annotated[Orders, Depends(orders_of)]


async def order_lease(order_id: int, orders: StoredOrders) -> AsyncIterator[Lease]:
    """Hold the lock of the order while the endpoint runs; the endpoint is cancelled if the lease is lost."""
    lock = orders.sync.lock(f"lock:order:{order_id}", ttl=10)
    try:
        async with lock.hold(timeout=orders.patience) as lease:
            yield lease
    except AcquireTimeout as busy:
        if busy.name != lock.name or not busy.answered:
            raise  # from another lock, inside the endpoint; or Redis did not answer, so the order may be free
        # 423 Locked: send the same request again later. (409 would mean: it conflicts with the order's state.)
        remaining = busy.remaining or 0  # a crashed holder blocks us until then
        later = {"Retry-After": str(max(1, math.ceil(remaining)))}
        raise HTTPException(423, "this order is being changed", headers=later) from None


# scope="function": released before the response is sent. By default FastAPI releases it afterwards: a slow client
# would hold the lock, and a lease lost at the end could no longer be reported.
OrderLease = Annotated[Lease, Depends(order_lease, scope="function")]


def unavailable(request: Request, error: Exception) -> JSONResponse:
    """Tell the caller that the outcome is unknown: nothing, or all of it, was saved.

    The error is for the log only: its text may name hosts, ports and users.
    """
    logger.warning("%s %s: %s: %s", request.method, request.url.path, type(error).__name__, error)
    return JSONResponse({"detail": "the service is not available: try again"}, 503, headers={"Retry-After": "1"})


def create_app(redis_url: str | None = None, patience: float = PATIENCE) -> FastAPI:
    """Return the service; the URL comes from REDIS_URL, or from an embedded server, unless given."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with (
            _url(redis_url or os.environ.get("REDIS_URL")) as url,
            # One retry is enough here: a request must not wait for long, and the caller tries again.
            Redis.from_url(
                url, decode_responses=True, socket_timeout=RESPONSE_TIMEOUT, retry=Retry(NoBackoff(), 1)
            ) as redis,
            Coordinator(redis, response_timeout=RESPONSE_TIMEOUT) as sync,
        ):
            app.state.orders = Orders(redis, sync, patience)
            yield

    app = FastAPI(title="Orders", lifespan=lifespan)
    # Unreachable is a redis ConnectionError: one entry for the lock and for the data.
    for error in (RedisConnectionError, RedisTimeoutError, AcquireTimeout, CoordinatorClosed, LeaseLost, StaleWrite):
        app.add_exception_handler(error, unavailable)

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
