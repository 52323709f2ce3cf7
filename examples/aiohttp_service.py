"""aiohttp: one lock per account, held by a decorator while the handler runs.

Shows `cleanup_ctx_of` (client and coordinator in the application), the decorator `hold_lock`, the fence passed on to
the storage, and the middleware `answer_errors`: 423 with Retry-After when the account is busy, 503 when Redis is
unreachable or hangs, or the lease was lost; the exact error goes to the log. A client that disconnects while it waits
leaves the queue. Needs ``pip install 'redis_sync_aio[embedded,aiohttp]'``. Run it, and try::

    python examples/aiohttp_service.py
    curl -X POST 'localhost:8080/accounts/alice/deposits?cents=500'

It uses the Redis or Valkey at the environment variable REDIS_URL, or starts a private embedded server: one
per process, so set REDIS_URL before you run several processes.

Read more in docs/recipes/aiohttp.md.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from aiohttp import web
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from redis_sync_aio import Coordinator, Lease
from redis_sync_aio.contrib.aiohttp import answer_errors, cleanup_ctx_of, hold_lock
from redis_sync_aio.embedded import EmbeddedServer

PATIENCE = 3.0
"""Seconds that a request waits for its turn. A server that hangs is noticed within twice RESPONSE_TIMEOUT plus a
quarter of a second. With a shorter PATIENCE it would look like a busy account."""
RESPONSE_TIMEOUT = 1.0
"""Seconds after which an answer of Redis is overdue."""
REDIS: web.AppKey[Redis] = web.AppKey("REDIS", Redis)

# The lock lets one request work at a time. The fence keeps out a holder that has lost the lock without noticing it yet
# (a paused process, a failover). In SQL: UPDATE accounts SET … WHERE id = :id AND fence <= :fence
SAVE = """
if tonumber(redis.call('HGET', KEYS[1], 'fence') or 0) > tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'cents', ARGV[2])
return 1
"""


class StaleWrite(Exception):
    """A later holder of the lock has already written; this one lost its lease."""


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


def create_app(redis_url: str | None = None, patience: float = PATIENCE) -> web.Application:
    """Return the service; the URL comes from REDIS_URL, or from an embedded server, unless given."""

    async def redis_of(app: web.Application) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            url = redis_url or os.environ.get("REDIS_URL")
            if not url:
                url = (await stack.enter_async_context(EmbeddedServer())).url
            # One retry is enough here: a request must not wait for long, and the caller tries again.
            retry = Retry(NoBackoff(), 1)
            redis = Redis.from_url(url, decode_responses=True, socket_timeout=RESPONSE_TIMEOUT, retry=retry)
            app[REDIS] = await stack.enter_async_context(redis)
            yield

    app = web.Application(middlewares=[answer_errors(also=(RedisConnectionError, RedisTimeoutError, StaleWrite))])
    # Ended in the reverse order: coordinator, client, server.
    app.cleanup_ctx.append(redis_of)
    app.cleanup_ctx.append(cleanup_ctx_of(lambda: Coordinator(app[REDIS], response_timeout=RESPONSE_TIMEOUT)))
    locked = hold_lock("lock:account:{account}", timeout=patience, ttl=10, leave_when_gone=True)
    app.router.add_post("/accounts/{account}/deposits", locked(deposit))
    app.router.add_get("/accounts/{account}", balance)
    return app


if __name__ == "__main__":
    web.run_app(create_app(), port=int(os.environ.get("PORT", "8080")))
