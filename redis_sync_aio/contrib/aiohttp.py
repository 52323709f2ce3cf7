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
from inspect import isawaitable
from typing import Any, Protocol, TypeVar, cast, overload
from uuid import UUID

from . import missing

try:
    from aiohttp import web
    from aiohttp.typedefs import Middleware
except ModuleNotFoundError as _error:
    raise missing(_error, __name__, "redis_sync_aio[aiohttp]") from _error

from .._client.settings import Client
from .._coordinator import Coordinator
from .._core.arguments import Seconds, is_async, options, permit_limit
from .._core.display import called
from .._leases.lease import Lease
from . import _web
from ._web import RequestName, Source

__all__ = [
    "REDIS",
    "SYNC",
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
"""A handler of aiohttp."""
ValueOf = Callable[[web.Request], object]
"""A function that returns a value of a request, or a coroutine function."""

# Older versions of aiohttp have no keys of requests.
_HELD: Any = web.RequestKey("redis_sync_aio", dict) if hasattr(web, "RequestKey") else "redis_sync_aio"

GONE_INTERVAL = 0.04
"""Seconds between two looks whether the client has gone, while its request waits: aiohttp has no event for that."""


def cleanup_ctx_of(client: Source) -> Callable[[web.Application], AsyncIterator[None]]:
    """Return a context for ``app.cleanup_ctx`` that puts a client and its coordinator into the application.

    They are ``app[REDIS]`` and ``app[SYNC]``.

    Args:
        client: A client: a coordinator is made for it at the start and closed at the end. A `Coordinator`: it is not
            closed. A function without arguments that returns one of these: it is called at each start, and what it
            returned is closed at the end, including the client of a coordinator.

    Raises:
        TypeError: The client is none of these.
    """
    _web.check_source(client)

    async def context(app: web.Application) -> AsyncIterator[None]:
        async with _web.running(client) as state:
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
    max_waiting: int | None = None,
    status: int = _web.LOCKED,
    leave_when_gone: bool = False,
    values: Mapping[str, ValueOf] | None = None,
) -> HoldLease:
    """Return a decorator that holds a lock while a handler runs, and gives it the `Lease` as its last argument.

    The loss of the lease cancels the handler. If a request holds a name twice, both are one lease, with the arguments
    of the outer one.

    Args:
        name: The name of the lock. Its fields are parameters of the path or the query, as text or with a type:
            ``{order_id}``, ``{order_id:int}``, ``{order_id:uuid}``. Give numbers their type, since "42" and "042" are
            two names.
        timeout: How long a request waits (seconds). 0: not at all. None: no limit.
        ttl: How long the lease lasts, 0.01 s to ten years; it is renewed meanwhile.
        max_waiting: How many requests may wait, 0 or more; a further one gets 429 immediately. None: any number.
        status: The status of the answer if the time is up, 400 to 599, such as 409.
        leave_when_gone: Remove a request from the queue when its client disconnects, without calling the handler. Not
            needed with ``handler_cancellation=True`` of aiohttp.
        values: The sources of fields that are neither in the path nor in the query: functions of the request, or
            coroutine functions.

    Raises:
        TypeError, ValueError: At the declaration: an argument is bad.

    A request raises HTTPBadRequest for a value that is missing or cannot be used, the errors of `AsyncLock.acquire`
    before its handler is called, and those of an ``async with`` after it. The middleware
    [`answer_errors`][redis_sync_aio.contrib.aiohttp.answer_errors] answers them.

    Example:
        ```python
        from aiohttp import web

        from redis_sync_aio import Lease
        from redis_sync_aio.contrib.aiohttp import hold_lock

        @hold_lock("account:{account}", timeout=2, leave_when_gone=True)
        async def deposit(request: web.Request, lease: Lease) -> web.Response: ...
        ```
    """
    given = options(values, "values")
    return _decorator(_web.Holding(name, given, None, timeout, ttl, max_waiting, status, leave_when_gone), given)


def hold_permit(
    name: str,
    *,
    limit: int,
    timeout: Seconds | None,
    ttl: Seconds = 30.0,
    max_waiting: int | None = None,
    status: int = _web.LOCKED,
    leave_when_gone: bool = False,
    values: Mapping[str, ValueOf] | None = None,
) -> HoldLease:
    """Return a decorator that holds a permit of a semaphore while a handler runs, and gives it the `Lease`.

    The other arguments, and the errors, are those of [`hold_lock`][redis_sync_aio.contrib.aiohttp.hold_lock].

    Args:
        name: The name of the semaphore, a template as for `hold_lock`.
        limit: How many permits there are. While others use another limit, as in a rolling deployment, theirs counts.

    Example:
        ```python
        from aiohttp import web

        from redis_sync_aio import Lease
        from redis_sync_aio.contrib.aiohttp import hold_permit

        @hold_permit("export:{tenant}", limit=3, timeout=0)
        async def export(request: web.Request, lease: Lease) -> web.Response: ...
        ```
    """
    given, most = options(values, "values"), permit_limit(limit, "limit")
    return _decorator(_web.Holding(name, given, most, timeout, ttl, max_waiting, status, leave_when_gone), given)


def _decorator(holding: _web.Holding, values: Mapping[str, ValueOf]) -> HoldLease:
    for field, value in values.items():
        if not callable(value):
            raise TypeError(f"values[{field!r}] must be a function of the request, not {value!r}")

    def decorate(handler: Callable[..., Awaitable[web.StreamResponse]]) -> Callable[..., Any]:
        if not is_async(handler):
            raise TypeError(f"{called(handler)} is not a coroutine function")

        @functools.wraps(handler)
        async def held(*args: object) -> web.StreamResponse:
            last = args[-1]
            request = last.request if isinstance(last, web.View) else cast("web.Request", last)
            sync = _web.coordinator_in({"sync": request.config_dict.get(SYNC)}, _WHERE)
            made = await _name_of(request, holding.name, values)
            gone = functools.partial(_gone, request) if holding.leave_when_gone else None
            try:
                own = holding.of(request.setdefault(_HELD, {}), sync, made, gone)
            except ValueError:  # all else was checked when it was declared
                raise web.HTTPBadRequest(text="a value cannot be part of a name") from None
            async with own as lease:
                if lease is None:
                    return web.Response(status=_web.GONE, reason=_web.GONE_TEXT)
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


async def _gone(request: web.Request) -> None:
    """Return when the client has disconnected."""
    while (transport := request.transport) is not None and not transport.is_closing():
        await asyncio.sleep(GONE_INTERVAL)


def answer_errors(*, also: Collection[type[Exception]] = ()) -> Middleware:
    """Return a middleware that answers errors of locks: 423 if what a handler asked for is busy, 503 for the others.

    [The table](https://redis-sync-aio.github.io/redis-sync-aio/recipes/fastapi/#what-the-client-sees) has each answer;
    the log has the reason (``request_not_served``). After a 503 the handler may or may not have done its work. A group
    of exceptions with any other error is raised. If a part of another answer was sent, the error is raised, and aiohttp
    closes the connection. Handlers of applications below it (``app.add_subapp``) are answered, too.

    Args:
        also: More errors to answer with 503, such as ``redis.exceptions.ConnectionError`` from commands of your own.

    Raises:
        TypeError: ``also`` has something that is not a class of exceptions.
    """
    kinds = _web.answered_kinds(also)
    caught: tuple[type[Exception], ...] = (*kinds, ExceptionGroup)

    @web.middleware
    async def answering(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except caught as error:
            if not (found := _web.reasons(error, kinds)):
                raise
            status, text, after = _web.answer_to(request.method, request.path, *found)
            if request.writer.output_size > 0:
                raise
        return web.json_response({"detail": text}, status=status, headers={"Retry-After": after})

    return answering
