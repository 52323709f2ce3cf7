"""Semaphores of other libraries, each used as its documentation says, and the one from the textbooks.

Licences: async-redis-rate-limiters, py-redis-semaphore and steindamm MIT, self-limiters BSD with four clauses. They are
installed by the extra ``benchmarks`` and not distributed with this package.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

from .contestant import CONNECTIONS, Contestant, Game, Grip, OnClient
from .server_stats import Sends

PLAYS: frozenset[Game] = frozenset({"semaphores"})


def _inside(make: Callable[[], AbstractAsyncContextManager[Any]]) -> Grip:
    """Return the grip of a library that only has ``async with``."""

    async def acquire() -> AbstractAsyncContextManager[Any]:
        entered = make()
        await entered.__aenter__()
        return entered

    async def release(entered: AbstractAsyncContextManager[Any]) -> None:
        await entered.__aexit__(None, None, None)

    return Grip(acquire, release)


class SelfLimiters(Contestant):
    name = "self-limiters"
    about = "self_limiters.Semaphore (Rust), one per task, so that it keeps its connections; its permits do not expire"
    module = "self_limiters"
    plays = PLAYS
    sends = Sends(("evalsha", "eval", "blpop", "lpush", "expire"), {})

    def permit(self, key: str, limit: int) -> Grip:
        make = importlib.import_module("self_limiters").Semaphore
        semaphore = make(name=key, capacity=limit, max_sleep=0.0, expiry=int(self.ttl), redis_url=self.url)
        return _inside(lambda: semaphore)


class AsyncRedisRateLimiters(Contestant):
    name = "async-redis-rate-limiters"
    about = "async_redis_rate_limiters.DistributedSemaphoreManager, one per process, a semaphore per grant"
    module = "async_redis_rate_limiters"
    plays = PLAYS
    sends = Sends(("evalsha", "eval", "blpop"), {})

    async def open(self) -> None:
        make = importlib.import_module("async_redis_rate_limiters").DistributedSemaphoreManager
        self._manager = make(redis_url=self.url, redis_max_connections=CONNECTIONS, redis_ttl=int(self.ttl))

    async def close(self) -> None:
        for pool in ("acquire", "release"):  # the library has no way to close it
            await getattr(self._manager, f"_DistributedSemaphoreManager__{pool}_pool").disconnect()

    def permit(self, key: str, limit: int) -> Grip:
        return _inside(lambda: self._manager.get_semaphore(key, limit))


class PyRedisSemaphore(OnClient):
    name = "py-redis-semaphore"
    about = "redis_semaphore.Semaphore, woken by BLPOP, strict mode"
    module = "redis_semaphore"
    plays = PLAYS
    sends = Sends(("evalsha", "eval", "blpop", "lpush", "ltrim", "pexpire"), {"pexpire": 1})

    def permit(self, key: str, limit: int) -> Grip:
        library: Any = importlib.import_module("redis_semaphore")
        wait = 4.0  # below the client's socket_timeout, as its documentation requires
        config = library.SemaphoreConfig(
            name=key, limit=limit, lock_timeout=self.ttl, strict_mode=True, blpop_timeout=wait
        )
        semaphore = library.Semaphore(self.client, config)
        return Grip(semaphore.aacquire, lambda _: semaphore.arelease())


class Steindamm(OnClient):
    name = "steindamm"
    about = "steindamm.AsyncRedisSemaphore; its permits do not expire one by one"
    module = "steindamm"
    plays = PLAYS
    sends = Sends(("evalsha", "eval", "blpop", "lpush", "expire"), {})

    def permit(self, key: str, limit: int) -> Grip:
        make = importlib.import_module("steindamm").AsyncRedisSemaphore
        semaphore = make(connection=self.client, name=key, capacity=limit, expiry=int(self.ttl), max_sleep=0.0)
        return _inside(lambda: cast("AbstractAsyncContextManager[None]", semaphore))


class SortedSet(OnClient):
    """The pattern of many blogs and books. Its rank depends on the callers' clocks, so an earlier time that arrives
    later gets in although all permits are taken: more holders than permits."""

    name = "sorted-set"
    about = "the classic: expire, ZADD by the caller's clock, ZRANK; success below the limit, else ZREM, retry in 1 ms"
    plays = PLAYS
    sends = Sends(("zremrangebyscore", "zadd", "zrank", "zrem", "multi", "exec"), {})

    def permit(self, key: str, limit: int) -> Grip:
        prefix, numbers = os.urandom(8).hex(), itertools.count()
        client: Any = self.client

        async def acquire() -> str:
            while True:
                token, now = f"{prefix}:{next(numbers)}", time.time()
                async with client.pipeline(transaction=True) as pipe:
                    pipe.zremrangebyscore(key, "-inf", now - self.ttl)
                    pipe.zadd(key, {token: now})
                    pipe.zrank(key, token)
                    rank = (await pipe.execute())[2]
                if rank < limit:
                    return token
                await client.zrem(key, token)
                await asyncio.sleep(0.001)

        return Grip(acquire, lambda token: client.zrem(key, token))
