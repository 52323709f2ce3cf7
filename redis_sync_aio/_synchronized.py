"""A decorator that locks by the arguments of the call."""

from __future__ import annotations

import functools
import inspect
import string
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from redis.asyncio import Redis

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
    if not isinstance(name, str):
        raise TypeError(f"name must be str, not {name!r}")
    AsyncLock(client, name.replace("{", "").replace("}", ""), ttl=ttl)  # bad arguments fail here
    timeout_seconds(timeout)
    fields = {field for _, field, _, _ in string.Formatter().parse(name) if field is not None}

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"{function!r} is not a coroutine function")
        signature = inspect.signature(function)
        unknown = {field for field in fields if field.split(".")[0].split("[")[0] not in signature.parameters}
        if unknown:
            raise ValueError(f"{name!r} refers to {sorted(unknown)}, not arguments of {function.__qualname__}")

        @functools.wraps(function)
        async def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            async with AsyncLock(client, name.format(**bound.arguments), ttl=ttl).hold(timeout=timeout):
                return await function(*args, **kwargs)

        return locked

    return decorate
