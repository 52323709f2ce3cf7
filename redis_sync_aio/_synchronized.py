"""A decorator that locks by the arguments of the call."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from redis.asyncio import Redis

from ._templates import check_template, names_from, without_fields
from ._types import Seconds, timeout_seconds
from .coordinator import Coordinator
from .lock import AsyncLock

P = ParamSpec("P")
R = TypeVar("R")


def synchronized(
    client: Redis | Coordinator,
    name: str,
    *,
    ttl: Seconds = 30.0,
    timeout: Seconds | None = None,
) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
    """Decorate a coroutine function: calls with the same ``name`` run one at a time, everywhere.

    ``name`` may refer to the function's arguments: ``"user:{user_id}"``. ``timeout`` as in `AsyncLock.acquire`.

    Raises:
        TypeError, ValueError: at decoration, for bad arguments, or when ``name`` refers to something that is not an
            argument of the function.

    Example:
        @synchronized(redis, "user:{user_id}", timeout=5)
        async def charge(user_id: int, amount: int) -> None: ...
    """
    template = check_template(name, "name")
    AsyncLock(client, without_fields(template), ttl=ttl)  # bad arguments fail here
    timeout_seconds(timeout)

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        names = names_from(function, [template])

        @functools.wraps(function)
        async def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            (own,) = names(args, kwargs)
            async with AsyncLock(client, own, ttl=ttl).hold(timeout=timeout):
                return await function(*args, **kwargs)

        return locked

    return decorate
