"""aiohttp: one lock per account, held by a decorator while the handler runs.

Shows the `Coordinator` in ``cleanup_ctx``, the decorator `with_account_lease`, the fence passed on to the storage,
and a middleware that answers the caller: 423 with Retry-After when the account is busy, 503 when Redis is unreachable
or hangs, or the lease was lost; the exact error goes to the log. A client that disconnects
while it waits leaves the queue immediately (``handler_cancellation``). Needs
``pip install 'redis_sync_aio[embedded]' aiohttp``. Run it, and try::

    python examples/aiohttp_service.py
    curl -X POST 'localhost:8080/accounts/alice/deposits?cents=500'

It uses the Redis or Valkey at the environment variable REDIS_URL, or starts a private embedded server: one
per process, so set REDIS_URL before you run several processes.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

from aiohttp import web
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from redis_sync_aio import AcquireTimeout, Coordinator, CoordinatorClosed, Lease, LeaseLost
from redis_sync_aio.embedded import EmbeddedServer

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
LeaseHandler = Callable[[web.Request, Lease], Awaitable[web.StreamResponse]]

REDIS = web.AppKey("REDIS", Redis)
SYNC = web.AppKey("SYNC", Coordinator)
PATIENCE = web.AppKey("PATIENCE", float)
"""Seconds that a request waits for its turn. A server that hangs is noticed within twice RESPONSE_TIMEOUT plus a
quarter of a second. With a shorter PATIENCE it would look like a busy account."""
RESPONSE_TIMEOUT = 1.0
"""Seconds after which an answer of Redis is overdue."""

# The lock lets one request work at a time. The fence keeps out a holder that has lost the lock without noticing it yet
# (a paused process, a failover). In SQL: UPDATE accounts SET … WHERE id = :id AND fence <= :fence
SAVE = """
if tonumber(redis.call('HGET', KEYS[1], 'fence') or 0) > tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'cents', ARGV[2])
return 1
"""


class StaleWrite(Exception):
    """A later holder of the lock has already written; this one lost its lease."""


class Busy(Exception):
    """Other requests held the lock all the time; ``retry_after`` is in seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__("this account is being changed")
        self.retry_after = retry_after


def with_account_lease(handler: LeaseHandler) -> Handler:
    """Hold the lock of ``{account}`` while the handler runs; it is cancelled if the lease is lost."""

    @functools.wraps(handler)
    async def locked(request: web.Request) -> web.StreamResponse:
        lock = request.app[SYNC].lock(f"lock:account:{request.match_info['account']}", ttl=10)
        try:
            async with lock.hold(timeout=request.app[PATIENCE]) as lease:
                return await handler(request, lease)
        except AcquireTimeout as busy:
            if busy.name != lock.name or not busy.answered:
                raise  # from another lock, inside the handler; or Redis did not answer, so the account may be free
            remaining = busy.remaining or 0  # a crashed holder blocks us until then
            raise Busy(max(1, math.ceil(remaining))) from busy

    return locked


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Map errors of locks and of Redis to a status."""
    try:
        return await handler(request)
    except Busy as busy:
        # 423 Locked: send the same request again later. (409 would mean: it conflicts with the account's state.)
        later = {"Retry-After": str(busy.retry_after)}
        return web.json_response({"detail": str(busy)}, status=423, headers=later)
    except (RedisConnectionError, RedisTimeoutError, AcquireTimeout, CoordinatorClosed, LeaseLost, StaleWrite) as error:
        # Unreachable is a redis ConnectionError. The outcome is unknown: nothing, or all of it, was saved.
        # The error is for the log only: its text may name hosts, ports and users.
        logger.warning("%s %s: %s: %s", request.method, request.path, type(error).__name__, error)
        later = {"Retry-After": "1"}
        return web.json_response({"detail": "the service is not available: try again"}, status=503, headers=later)


@with_account_lease
async def deposit(request: web.Request, lease: Lease) -> web.Response:
    try:
        cents = int(request.query["cents"])
    except (KeyError, ValueError):
        raise web.HTTPBadRequest(text="cents must be a whole number") from None
    key, redis = f"account:{request.match_info['account']}", request.app[REDIS]
    total = int(await redis.hget(key, "cents") or 0) + cents  # read, modify …
    if not await redis.eval(SAVE, 1, key, str(lease.fence), str(total)):  # … and write
        raise StaleWrite("a later holder of the lock has already written")
    return web.json_response({"cents": total, "fence": lease.fence})


async def balance(request: web.Request) -> web.Response:
    stored = await request.app[REDIS].hgetall(f"account:{request.match_info['account']}")
    return web.json_response({"cents": int(stored.get("cents", 0)), "fence": int(stored.get("fence", 0))})


def create_app(redis_url: str | None = None, patience: float = 3.0) -> web.Application:
    """Return the service; the URL comes from REDIS_URL, or from an embedded server, unless given."""

    async def coordinator(app: web.Application) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:  # closed in the reverse order: coordinator, client, server
            url = redis_url or os.environ.get("REDIS_URL")
            if not url:
                url = (await stack.enter_async_context(EmbeddedServer())).url
            # One retry is enough here: a request must not wait for long, and the caller tries again.
            redis = Redis.from_url(
                url, decode_responses=True, socket_timeout=RESPONSE_TIMEOUT, retry=Retry(NoBackoff(), 1)
            )
            app[REDIS] = await stack.enter_async_context(redis)
            app[SYNC] = await stack.enter_async_context(Coordinator(redis, response_timeout=RESPONSE_TIMEOUT))
            yield

    app = web.Application(middlewares=[answer_errors])
    app[PATIENCE] = patience
    app.cleanup_ctx.append(coordinator)
    app.router.add_post("/accounts/{account}/deposits", deposit)
    app.router.add_get("/accounts/{account}", balance)
    return app


if __name__ == "__main__":
    web.run_app(create_app(), port=int(os.environ.get("PORT", "8080")), handler_cancellation=True)
