"""A decorator that locks by the arguments of the call."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, cast, get_args, overload

from ._keys import lock_keys
from ._link.client import Client
from ._templates import check_template, names_from, without_fields
from ._types import Seconds, is_async, one_of, timeout_seconds, ttl_ms
from .coordinator import Coordinator
from .errors import AcquireTimeout
from .lock import AsyncLock

P = ParamSpec("P")
R = TypeVar("R")

OnBusy: TypeAlias = Literal["raise", "skip"]
"""What a call does that did not get the lock in time."""
ClientSource: TypeAlias = Client | Coordinator | Callable[[], Client | Coordinator]
"""A client, or a function that returns the client of a call."""


class Synchronize(Protocol):
    """A decorator that keeps the type of a coroutine function."""

    def __call__(self, function: Callable[P, Awaitable[R]], /) -> Callable[P, Coroutine[Any, Any, R]]: ...


class SynchronizeOrSkip(Protocol):
    """A decorator of a coroutine function that may return None instead."""

    def __call__(self, function: Callable[P, Awaitable[R]], /) -> Callable[P, Coroutine[Any, Any, R | None]]: ...


@overload
def synchronized(
    client: ClientSource,
    name: str,
    *,
    ttl: Seconds | None = 30.0,
    timeout: Seconds | None = None,
    on_busy: Literal["raise"] = "raise",
) -> Synchronize: ...
@overload
def synchronized(
    client: ClientSource,
    name: str,
    *,
    ttl: Seconds | None = 30.0,
    timeout: Seconds | None = None,
    on_busy: Literal["skip"],
) -> SynchronizeOrSkip: ...
def synchronized(
    client: ClientSource,
    name: str,
    *,
    ttl: Seconds | None = 30.0,
    timeout: Seconds | None = None,
    on_busy: OnBusy = "raise",
) -> Synchronize | SynchronizeOrSkip:
    """Decorate a coroutine function: calls with the same ``name`` run one at a time, everywhere.

    Each call is the body of an ``async with`` over an `AsyncLock` of its own, with all that promises.

    Args:
        client: a `redis.asyncio.Redis` or `RedisCluster`, a `Coordinator`, or a function without arguments that returns
            one of these. The function is called at each call, so a module may be imported before its client exists.
        name: the lock's; it may refer to the function's arguments: ``"user:{user_id}"``.
        ttl: of the lease, which is renewed while the function runs: seconds or timedelta, 0.01 to ten years; None: no
            end.
        timeout: seconds or timedelta a call waits at most; 0: it does not wait; None: no limit.
        on_busy: "raise" (default): a call that did not get the lock in time raises AcquireTimeout. "skip": it returns
            None and the function is not called; ``timeout=None`` is 0 then. Only when others hold the lock: if Redis
            does not answer it raises, as do locks that the function itself acquires.

    Raises:
        TypeError, ValueError: at decoration, for bad arguments, or when ``name`` refers to something that is not an
            argument of the function. TypeError also at a call for which the function ``client`` returned no client.

    A call raises what the function raises, and what `AsyncLock.acquire` and the end of its ``async with`` do. On
    cancellation it has released the lock, or not acquired it.

    Example:
        @synchronized(redis, "user:{user_id}", timeout=5)
        async def charge(user_id: int, amount: int) -> None: ...

        @synchronized(lambda: app.state.redis, "nightly-report", on_busy="skip")
        async def report() -> None: ...
    """
    template = check_template(name, "name")
    one_of(on_busy, get_args(OnBusy), "on_busy")
    limit = timeout_seconds(timeout)
    if limit is None and on_busy == "skip":
        limit = 0.0
    client_of_call = _checked(client, without_fields(template), ttl)

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R | None]]:
        names = names_from(function, [template])

        @functools.wraps(function)
        async def locked(*args: P.args, **kwargs: P.kwargs) -> R | None:
            (own,) = names(args, kwargs)
            entered = False
            try:
                async with AsyncLock(client_of_call(), own, ttl=ttl).hold(timeout=limit):
                    entered = True
                    return await function(*args, **kwargs)
            except AcquireTimeout as busy:
                if on_busy == "raise" or entered or not busy.answered:
                    raise
                return None

        return locked

    return decorate


def _checked(client: ClientSource, name: str, ttl: Seconds | None) -> Callable[[], Client | Coordinator]:
    """Check what can be checked before the first call, and return the function that gives the client of a call."""
    if not callable(client) or isinstance(client, type):  # a class: somebody forgot to call it
        given = cast("Client | Coordinator", client)
        AsyncLock(given, name, ttl=ttl)
        return lambda: given
    if is_async(client):
        raise TypeError(f"client must be a function that returns a client, not a coroutine function: {client!r}")
    lock_keys(name.encode())
    if ttl is not None:
        ttl_ms(ttl)
    return client
