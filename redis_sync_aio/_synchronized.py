"""A decorator that locks by the arguments of the call."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from ._link.client import Client
from ._templates import check_template, names_from, without_fields
from ._types import Seconds, timeout_seconds
from .coordinator import Coordinator
from .lock import AsyncLock

P = ParamSpec("P")
R = TypeVar("R")


def synchronized(
    client: Client | Coordinator,
    name: str,
    *,
    ttl: Seconds | None = 30.0,
    timeout: Seconds | None = None,
) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Coroutine[Any, Any, R]]]:
    """Decorate a coroutine function: calls with the same ``name`` run one at a time, everywhere.

    Each call is the body of an ``async with`` over an `AsyncLock` of its own, with all that promises.

    Args:
        client: a `redis.asyncio.Redis` or `RedisCluster`, or a `Coordinator`.
        name: the lock's; it may refer to the function's arguments: ``"user:{user_id}"``.
        ttl: of the lease, which is renewed while the function runs: seconds or timedelta, 0.01 to ten years; None: no
            end.
        timeout: seconds or timedelta a call waits at most; 0: it does not wait; None: for ever.

    Raises:
        TypeError, ValueError: at decoration, for bad arguments, or when ``name`` refers to something that is not an
            argument of the function.

    A call raises what the function raises, and what `AsyncLock.acquire` and the end of its ``async with`` do. On
    cancellation it has released the lock, or not acquired it.

    Example:
        @synchronized(redis, "user:{user_id}", timeout=5)
        async def charge(user_id: int, amount: int) -> None: ...
    """
    template = check_template(name, "name")
    AsyncLock(client, without_fields(template), ttl=ttl)  # bad arguments fail here
    timeout_seconds(timeout)

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        names = names_from(function, [template])

        @functools.wraps(function)
        async def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            (own,) = names(args, kwargs)
            async with AsyncLock(client, own, ttl=ttl).hold(timeout=timeout):
                return await function(*args, **kwargs)

        return locked

    return decorate
