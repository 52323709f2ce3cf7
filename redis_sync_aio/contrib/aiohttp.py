"""Locks and permits around handlers of aiohttp's server; needs the extra ``aiohttp``.

    from redis_sync_aio.contrib.aiohttp import answer_errors, cleanup_ctx_of, hold_lock

    @hold_lock("account:{account}", timeout=2, leave_when_gone=True)
    async def deposit(request: web.Request, lease: Lease) -> web.Response: ...

    app = web.Application(middlewares=[answer_errors()])
    app.cleanup_ctx.append(cleanup_ctx_of(redis))

[aiohttp](https://redis-sync-aio.github.io/redis-sync-aio/recipes/aiohttp/) explains it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import AsyncExitStack
from inspect import isawaitable
from typing import Any, Protocol, TypeVar, cast, overload
from uuid import UUID

from aiohttp import web

from .._client.settings import Client
from .._core import logs
from .._core.arguments import Seconds, is_async, require_bool
from .._leases.hold import Hold
from .._leases.lease import Lease
from ..coordinator import Coordinator
from ..errors import AcquireTimeout
from . import _web
from ._web import RequestName, Source

__all__ = [
    "REDIS",
    "SYNC",
    "Handler",
    "HoldLease",
    "Middleware",
    "Source",
    "ValueOf",
    "answer_errors",
    "cleanup_ctx_of",
    "hold_lock",
    "hold_permit",
]

A = TypeVar("A", bound=web.Request | web.View)
S = TypeVar("S")
R = TypeVar("R", bound=web.StreamResponse)

REDIS: web.AppKey[Client] = web.AppKey("REDIS")
"""The key of the client in the application."""
SYNC: web.AppKey[Coordinator] = web.AppKey("SYNC", Coordinator)
"""The key of the coordinator in the application: ``request.config_dict[SYNC]``, also in applications below it."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ValueOf = Callable[[web.Request], object]
"""A function that returns a value of a request, or a coroutine function."""

GONE_INTERVAL = 0.04
"""Seconds between two looks whether the client has gone, while its request waits: aiohttp has no event for that."""


def cleanup_ctx_of(source: Source) -> Callable[[web.Application], AsyncIterator[None]]:
    """Return a context for ``app.cleanup_ctx`` that puts a client and its coordinator into the application.

    They are ``app[REDIS]`` and ``app[SYNC]``.

    Args:
        source: a client: a coordinator of its own is made at the start and closed at the end. Or a function without
            arguments that returns a client, or a `Coordinator`: it is called at each start, and at the end what it
            returned is closed, with the client of a coordinator. Or a `Coordinator`, which is not closed.

    Raises TypeError for any other source.
    """
    _web.check_source(source)

    async def context(app: web.Application) -> AsyncIterator[None]:
        async with _web.running(source) as state:
            app[REDIS], app[SYNC] = state["redis"], state["sync"]
            yield

    return context


class HoldLease(Protocol):
    """A decorator of handlers that take a lease as their last argument: functions, methods, and those of a view."""

    @overload
    def __call__(self, handler: Callable[[A, Lease], Awaitable[R]], /) -> Callable[[A], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, handler: Callable[[S, web.Request, Lease], Awaitable[R]], /
    ) -> Callable[[S, web.Request], Coroutine[Any, Any, R]]: ...


def hold_lock(
    name: str,
    *,
    timeout: Seconds | None,
    ttl: Seconds = 30.0,
    leave_when_gone: bool = False,
    values: Mapping[str, ValueOf] | None = None,
) -> HoldLease:
    """Return a decorator that holds a lock while a handler runs, and gives it the `Lease` as its last argument.

    The handler is cancelled if the lease is lost.

    Args:
        name: the lock's; its fields come from the path (``match_info``) or else from the query, as text, or with a
            type: ``{account}``, ``{order_id:int}``, ``{order_id:uuid}``. Give numbers their type: "42" and "042" are
            two names.
        timeout: seconds or timedelta a request waits at most; 0: it does not wait; None: no limit.
        ttl: of the lease, which is renewed while it is held: seconds or timedelta, 0.01 to ten years.
        leave_when_gone: a client that disconnects while its request waits leaves the queue, and the handler is not
            called. With ``handler_cancellation=True`` aiohttp itself sees to that, without this.
        values: for fields that are neither in the path nor in the query, functions of the request that return the
            value, or coroutine functions.

    Raises TypeError or ValueError when it is declared wrongly. A request raises HTTPBadRequest for a value that is
    missing or cannot be used; before its handler is called, what `AsyncLock.acquire` does; and after it what
    `AsyncLock.hold` does. The middleware `answer_errors` answers them.
    """
    hold = _web.lock_holds(name, timeout, ttl)
    return _decorator(RequestName(name, "name", values or {}), values or {}, hold, leave_when_gone)


def hold_permit(
    key: str,
    *,
    limit: int,
    timeout: Seconds | None,
    ttl: Seconds = 30.0,
    leave_when_gone: bool = False,
    values: Mapping[str, ValueOf] | None = None,
) -> HoldLease:
    """Return a decorator that holds a permit of a semaphore while a handler runs, and gives it the `Lease`.

    Args:
        key: the semaphore's name, a template as that of `hold_lock`.
        limit: how many permits there are. While others use another limit, as in a rolling deployment, theirs counts.

    The other arguments, and the errors, are those of `hold_lock`.

    Example:
        ```python
        from aiohttp import web

        from redis_sync_aio import Lease
        from redis_sync_aio.contrib.aiohttp import hold_permit

        @hold_permit("export:{tenant}", limit=3, timeout=0)
        async def export(request: web.Request, lease: Lease) -> web.Response: ...
        ```
    """
    hold = _web.permit_holds(key, limit, timeout, ttl)
    return _decorator(RequestName(key, "key", values or {}), values or {}, hold, leave_when_gone)


def _decorator(
    name: RequestName,
    values: Mapping[str, ValueOf],
    hold: _web.Holds,
    leave_when_gone: bool,
) -> HoldLease:
    watched = require_bool(leave_when_gone, "leave_when_gone")
    for field, value in values.items():
        if not callable(value):
            raise TypeError(f"values[{field!r}] must be a function of the request, not {value!r}")

    def decorate(handler: Callable[..., Awaitable[web.StreamResponse]]) -> Callable[..., Any]:
        if not is_async(handler):
            raise TypeError(f"{handler!r} is not a coroutine function")

        @functools.wraps(handler)
        async def held(*args: object) -> web.StreamResponse:
            last = args[-1]
            request = last.request if isinstance(last, web.View) else cast("web.Request", last)
            sync = _web.coordinator_in({"sync": request.config_dict.get(SYNC)}, _WHERE)
            made = await _name_of(request, name, values)
            try:
                own = hold(sync, made)
            except ValueError:  # all else was checked when it was declared
                raise web.HTTPBadRequest(text="a value cannot be part of a name") from None
            lease = await _entered(own, request, watched)
            if lease is None:
                return web.Response(status=_web.GONE, reason=_web.GONE_TEXT)
            async with AsyncExitStack() as stack:
                stack.push_async_exit(own)
                return await handler(*args, lease)

        return held

    return cast("HoldLease", decorate)


_WHERE = "the application: use app.cleanup_ctx.append(cleanup_ctx_of(redis))"


async def _name_of(request: web.Request, name: RequestName, values: Mapping[str, ValueOf]) -> str:
    """Return the name for a request; raise HTTPBadRequest for a value that is missing or has another type."""
    found: dict[str, object] = {}
    for field, kind in name.types.items():
        text = request.match_info.get(field, request.query.get(field))
        if text is None:
            raise web.HTTPBadRequest(text=f"{field} is missing")
        try:
            found[field] = kind(text)
        except ValueError:
            raise web.HTTPBadRequest(text=f"{field} must be {_SHOWN[kind]}") from None
    for field, value_of in values.items():
        value = value_of(request)
        found[field] = await value if isawaitable(value) else value
    return name.of(found)


_SHOWN = {int: "a whole number", UUID: "a UUID", str: "text"}


async def _entered(hold: Hold[Lease], request: web.Request, watched: bool) -> Lease | None:
    """Enter ``hold``; return None if the client has disconnected."""

    async def gone() -> None:
        while (transport := request.transport) is not None and not transport.is_closing():
            await asyncio.sleep(GONE_INTERVAL)

    try:
        return await (_web.enter_unless_gone(hold, gone) if watched else hold.__aenter__())
    except AcquireTimeout as error:
        _web.remember_busy(error)
        raise


class Middleware(Protocol):
    """A middleware of aiohttp."""

    async def __call__(self, request: web.Request, handler: Handler) -> web.StreamResponse: ...


def answer_errors(*, also: Collection[type[Exception]] = ()) -> Middleware:
    """Return a middleware that answers errors of locks: 423 when what a handler asked for is busy, 503 for the others.

    423 has a Retry-After: the seconds until the holder's lease ends unless it is renewed. 503 is for no answer of
    Redis, a lost lease, a closed coordinator, and a timeout of a lock inside the handler: the handler may have done its
    work or not. No answer says more than that; the log does (``request_not_served``). If a part of another answer was
    sent, the error is raised, and aiohttp closes the connection.

    ``also``: more errors to answer with 503, such as ``redis.exceptions.ConnectionError`` from the application's own
    commands. Raises TypeError for what is no class of exceptions.
    """
    kinds = _web.answered_kinds(also)

    @web.middleware
    async def answering(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except kinds as error:
            if isinstance(error, AcquireTimeout) and _web.is_busy(error):
                status, text, after = _web.LOCKED, _web.BUSY_TEXT, _web.seconds_until_free(error)
            else:
                logs.request_not_served(request.method, request.path, error)
                status, text, after = _web.UNAVAILABLE, _web.UNAVAILABLE_TEXT, _web.RETRY_AFTER
            if request.writer.output_size > 0:
                raise
        return web.json_response({"detail": text}, status=status, headers={"Retry-After": after})

    return answering
