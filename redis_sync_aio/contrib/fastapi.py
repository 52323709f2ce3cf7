"""Locks and permits as dependencies of FastAPI; needs the extra ``fastapi``.

    from redis_sync_aio.contrib.fastapi import answer_errors, hold_lock, lifespan_of

    OrderLease = Annotated[Lease, hold_lock("order:{order_id:int}", timeout=2, leave_when_gone=True)]

    app = FastAPI(lifespan=lifespan_of(redis))
    answer_errors(app)

    @app.post("/orders/{order_id}")
    async def change(order_id: int, lease: OrderLease) -> None: ...

[FastAPI](https://redis-sync-aio.github.io/redis-sync-aio/recipes/fastapi/) explains it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Annotated, Any, Literal, cast, get_args

from . import missing

try:
    from fastapi import FastAPI, Request, WebSocket, routing
    from fastapi.dependencies.models import Dependant
    from fastapi.exceptions import HTTPException, RequestValidationError
    from fastapi.params import Depends
    from fastapi.requests import HTTPConnection
    from fastapi.responses import JSONResponse, Response
    from fastapi.websockets import WebSocketState
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect
    from starlette.routing import Router
    from starlette.types import ASGIApp
except ModuleNotFoundError as _error:
    raise missing(_error, __name__, "redis_sync_aio[fastapi]") from _error

from .._coordinator import Coordinator
from .._core import logs
from .._core.arguments import Seconds, one_of, options, permit_limit, require_function
from .._leases.lease import Lease
from . import _web
from ._web import Source, SyncState

__all__ = ["Sync", "SyncState", "answer_errors", "hold_lock", "hold_permit", "lifespan_of"]

Scope = Literal["function", "request"]
"""When a lease is released: "function": before the response is sent; "request": after that."""

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[Mapping[str, object] | None]]


def lifespan_of(
    client: Source, *others: Lifespan, may_outlive: Collection[Callable[..., object]] = ()
) -> Callable[[FastAPI], AbstractAsyncContextManager[SyncState]]:
    """Return a lifespan that puts a client and its coordinator into the state: ``request.state.redis`` and ``.sync``.

    When the application starts, it logs a warning (``lease_ends_early``) for each endpoint whose lease ends before
    another dependency with ``yield``: a session that commits there is not protected by the lease any more.

    Args:
        client: A client: a coordinator is made for it at the start and closed at the end. A `Coordinator`: it is not
            closed. A function without arguments that returns one of these: it is called at each start, and what it
            returned is closed at the end, including the client of a coordinator.
        others: Other lifespans. They are entered in this order after the coordinator was made, and left before it is
            closed. What they yield is added to the state.
        may_outlive: Dependencies with ``yield`` that may end after a lease, since they write nothing at their end that
            it protects.

    Raises:
        TypeError: The client is none of these. At the start of the application: a route has a parameter whose
            annotation is text that names nothing in its module, which FastAPI would always answer with 422.

    Example:
        ```python
        from contextlib import asynccontextmanager

        from redis_sync_aio.contrib.fastapi import lifespan_of

        @asynccontextmanager
        async def lifespan(app):  # inside a lifespan of your own
            async with lifespan_of(redis)(app) as state:
                yield {**state, "version": 7}
        ```
    """
    _web.check_source(client)
    for other in others:
        require_function(other, "a lifespan")
    harmless = [_callable(one, "may_outlive") for one in may_outlive]

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[SyncState]:
        _check_annotations(app)
        _check_ends(app, harmless)
        async with AsyncExitStack() as stack:
            state = await stack.enter_async_context(_web.running(client))
            for other in others:
                state |= cast("SyncState", await stack.enter_async_context(other(app)) or {})
            yield state

    return lifespan


def _sync_of(connection: HTTPConnection) -> Coordinator:
    """Return the coordinator that the lifespan made."""
    return _web.coordinator_in(connection.scope.get("state"), "the lifespan: use FastAPI(lifespan=lifespan_of(redis))")


Sync = Annotated[Coordinator, Depends(_sync_of)]
"""The type of a parameter that gets the coordinator."""


class _LeaseDependency:
    """A dependency that holds a lease while an endpoint runs."""

    def __init__(self, holding: _web.Holding, values: Mapping[str, Callable[..., object] | Depends]) -> None:
        self.holding = holding
        annotations: dict[str, Any] = {"connection_": HTTPConnection, "sync_": Sync, **holding.name.types}
        for field, value in values.items():
            depends = value if isinstance(value, Depends) else Depends(_callable(value, f"values[{field!r}]"))
            annotations[field] = Annotated[object, depends]
        # What FastAPI reads: each field of the template is a parameter.
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, annotation=it)
                for field, it in annotations.items()
            ]
        )

    def __repr__(self) -> str:
        return f"<dependency on a lease of {self.holding.name.template!r}>"

    async def __call__(
        self, *, connection_: HTTPConnection, sync_: Coordinator, **values: object
    ) -> AsyncIterator[Lease]:
        """Hold the name: FastAPI calls this for each request."""
        watched = connection_ if self.holding.leave_when_gone and isinstance(connection_, Request) else None
        if watched is not None:
            await _read(watched)
        gone = None if watched is None else functools.partial(_gone, watched)
        held = connection_.scope.setdefault("redis_sync_aio", {})
        try:
            own = self.holding.of(held, sync_, self.holding.name.of(values), gone)
        except ValueError:  # all else was checked when it was declared
            errors = [
                {
                    "type": "value_error",
                    "loc": ("path" if field in connection_.path_params else "query", field),
                    "msg": "the value cannot be part of a name",
                    "input": str(values[field]),
                }
                for field in self.holding.name.types
            ]
            raise RequestValidationError(errors) from None
        async with own as lease:
            if lease is None:
                raise HTTPException(_web.GONE, _web.GONE_TEXT)
            yield lease


def _holding_of(call: object) -> _web.Holding | None:
    return call.holding if isinstance(call, _LeaseDependency) else None


async def _read(request: Request) -> None:
    """Read the body of ``request``, which is kept for the endpoint: after it only a disconnect is reported."""
    try:
        await request.body()
    except ClientDisconnect:  # while it sent
        raise HTTPException(_web.GONE, _web.GONE_TEXT) from None
    except RuntimeError:
        pass  # it was read as a form, or as a stream


async def _gone(request: Request) -> None:
    """Return when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _callable(value: object, what: str) -> Callable[..., object]:
    if not callable(value):
        raise TypeError(f"{what} must be a dependency: a function, or Depends(...), not {value!r}")
    return value


def hold_lock(
    name: str,
    *,
    timeout: Seconds | None,
    ttl: Seconds = 30.0,
    max_waiting: int | None = None,
    status: int = _web.LOCKED,
    leave_when_gone: bool = False,
    scope: Scope = "function",
    values: Mapping[str, Callable[..., object] | Depends] | None = None,
) -> Depends:
    """Return a dependency that holds a lock while an endpoint runs, and gives it the `Lease`.

    Use it in an annotation, or in ``dependencies=[...]`` of a route or a router. The loss of the lease cancels the
    endpoint. A name that a request holds twice is one lease: it has the arguments of the first, and ends with the last.

    Args:
        name: The name of the lock. Its fields are parameters of the path or the query, as text or with a type:
            ``{order_id}``, ``{order_id:int}``, ``{order_id:uuid}``. Give numbers their type, since "42" and "042" are
            two names.
        timeout: How long a request waits (seconds). 0: not at all. None: no limit.
        ttl: How long the lease lasts, 0.01 s to ten years; it is renewed meanwhile.
        max_waiting: How many requests may wait, 0 or more; a further one gets 429 immediately. None: any number.
        status: The status of the answer if the time is up, 400 to 599, such as 409.
        leave_when_gone: Remove a request from the queue when its client disconnects, without calling the endpoint. The
            body is read into memory before that.
        scope: When the lock is released. "function" (default): before the response is sent. "request": after that,
            streams included.
        values: The sources of fields that are not parameters: functions, as `fastapi.Depends` takes them, or results of
            ``Depends(...)``: ``hold_lock("t:{user.tenant}", values={"user": current_user})``.

    Raises:
        TypeError, ValueError: At the declaration: an argument is bad.

    A request raises the errors of `AsyncLock.acquire` before its endpoint is called, and those of an ``async with``
    after it. [`answer_errors`][redis_sync_aio.contrib.fastapi.answer_errors] answers both.

    Example:
        ```python
        from typing import Annotated

        from redis_sync_aio import Lease
        from redis_sync_aio.contrib.fastapi import hold_lock

        OrderLease = Annotated[Lease, hold_lock("order:{order_id:int}", timeout=2)]
        ```
    """
    given = options(values, "values")
    return _depends(_web.Holding(name, given, None, timeout, ttl, max_waiting, status, leave_when_gone), given, scope)


def hold_permit(
    name: str,
    *,
    limit: int,
    timeout: Seconds | None,
    ttl: Seconds = 30.0,
    max_waiting: int | None = None,
    status: int = _web.LOCKED,
    leave_when_gone: bool = False,
    scope: Scope = "function",
    values: Mapping[str, Callable[..., object] | Depends] | None = None,
) -> Depends:
    """Return a dependency that holds a permit of a semaphore while an endpoint runs, and gives it the `Lease`.

    The other arguments, and the errors, are those of [`hold_lock`][redis_sync_aio.contrib.fastapi.hold_lock].

    Args:
        name: The name of the semaphore, a template as for `hold_lock`.
        limit: How many permits there are. While others use another limit, as in a rolling deployment, theirs counts.

    Example:
        ```python
        from typing import Annotated

        from redis_sync_aio import Lease
        from redis_sync_aio.contrib.fastapi import hold_permit

        Export = Annotated[Lease, hold_permit("export:{tenant}", limit=3, timeout=0)]
        ```
    """
    given, most = options(values, "values"), permit_limit(limit, "limit")
    return _depends(_web.Holding(name, given, most, timeout, ttl, max_waiting, status, leave_when_gone), given, scope)


def _depends(holding: _web.Holding, values: Mapping[str, Callable[..., object] | Depends], scope: Scope) -> Depends:
    one_of(scope, get_args(Scope), "scope")
    return Depends(_LeaseDependency(holding, values), scope=scope)


def answer_errors(app: FastAPI, *, also: Collection[type[Exception]] = ()) -> None:
    """Let ``app`` answer errors of locks: 423 if the lock or permit of an endpoint is busy, 503 for the others.

    [The table](https://redis-sync-aio.github.io/redis-sync-aio/recipes/fastapi/#what-the-client-sees) has each answer;
    the log has the reason (``request_not_served``). After a 503 the endpoint may or may not have done its work. Routes
    that hold something have 423 and 503 in the OpenAPI document.

    Handlers of exceptions that the application has are left alone. Applications of FastAPI and Starlette that are
    mounted below it when it starts answer in the same way. Those of other frameworks do if they let errors propagate.

    Args:
        app: The application.
        also: More errors to answer with 503, such as ``redis.exceptions.ConnectionError`` from commands of your own.

    Raises:
        TypeError: ``app`` is no application, or ``also`` has something that is not a class of exceptions.
    """
    if not isinstance(app, FastAPI):
        raise TypeError(f"app must be a FastAPI application, not {app!r}")
    kinds = _web.answered_kinds(also)

    async def answer_group(connection: Request | WebSocket, group: Exception) -> Response | None:
        if not (found := _web.reasons(group, kinds)):
            raise group
        return await _answer(connection, *found)

    handlers: dict[Any, Any] = {**dict.fromkeys(kinds, _answer), ExceptionGroup: answer_group}

    def answer_in(one: Starlette) -> None:
        one.exception_handlers = handlers | one.exception_handlers
        if isinstance(one, FastAPI):
            _describe_answers(one)

    answer_in(app)
    build = app.build_middleware_stack

    def build_all() -> ASGIApp:
        """Build the application when it starts, which is when all others are mounted."""
        for one in _applications(app):
            if one is not app:
                answer_in(one)
                one.middleware_stack = None  # it may have served alone: let it read its handlers again
        return build()

    app.build_middleware_stack = build_all  # type: ignore[method-assign]


async def _answer(connection: Request | WebSocket, error: Exception, *more: Exception) -> Response | None:
    """Answer an error of a request, or several of its tasks."""
    method = connection.scope.get("method", "WEBSOCKET")
    status, text, after = _web.answer_to(method, connection.url.path, error, *more)
    if isinstance(connection, WebSocket):
        if connection.application_state is WebSocketState.CONNECTED:
            await connection.close(_web.TRY_AGAIN_LATER, text)
            return None
        if "websocket.http.response" not in connection.scope.get("extensions", {}):
            await connection.close()
            return None
    return JSONResponse({"detail": text}, status, headers={"Retry-After": after})


# -- The routes: what their annotations name, how dependencies end, the OpenAPI document ------------------------


def _flat(routes: Sequence[Any]) -> Iterator[Any]:
    """Yield the routes; newer versions of FastAPI keep included routers as they are."""
    flat = getattr(routing, "iter_route_contexts", None)
    yield from routes if flat is None else flat(routes)


def _routes(app: Starlette) -> Iterator[Any]:
    """Yield the API routes."""
    for route in _flat(app.routes):
        if isinstance(getattr(route, "dependant", None), Dependant):
            yield route


def _methods(route: Any) -> Iterable[str]:
    """Return the methods of a route; a websocket has none."""
    return getattr(route, "methods", None) or ()


def _applications(app: Starlette) -> list[Starlette]:
    """Return ``app`` and the applications of Starlette that are mounted below it, also inside of middleware."""
    found: list[Any] = [app]
    for one in found:  # it grows
        for route in _flat(one.routes):
            inner = getattr(route, "app", None)
            while inner is not None and not isinstance(inner, Router | Starlette):
                inner = getattr(inner, "app", None)
            if inner is not None and inner not in found:
                found.append(inner)
    return [one for one in found if isinstance(one, Starlette)]


def _all(dependant: Dependant) -> Iterator[Dependant]:
    """Yield the dependencies in the order in which a request enters them; the endpoint is the last."""
    for inner in dependant.dependencies:
        yield from _all(inner)
    yield dependant


def _check_annotations(app: FastAPI) -> None:
    """Raise TypeError if FastAPI takes a parameter for one of the query since it cannot find what its annotation names.

    That happens in modules with ``from __future__ import annotations`` to names that are local to a function.
    """
    for route in (route for one in _applications(app) for route in _routes(one)):
        for dependant in _all(route.dependant):
            function = inspect.unwrap(dependant.call) if dependant.call else None
            found = getattr(function, "__annotations__", {})
            for query in dependant.query_params:
                text = found.get(query.name)
                if isinstance(text, str) and not _evaluates(text, function):
                    raise TypeError(
                        f"{getattr(function, '__qualname__', function)}() has a parameter {query.name!r} whose "
                        f"annotation, {text!r}, names nothing in its module, so FastAPI takes it for a query "
                        "parameter, and would answer 422. With `from __future__ import annotations`, define what an "
                        "annotation names on the level of the module: OrderLease = Annotated[Lease, hold_lock(...)]"
                    )


def _evaluates(text: str, function: Any) -> bool:
    try:
        eval(text, getattr(function, "__globals__", {}))
    except NameError:
        return False
    return True


def _check_ends(app: FastAPI, may_outlive: Collection[object]) -> None:
    """Warn of leases that end before other dependencies, which may write at their end what the lease protects.

    A session that commits after its ``yield`` does: then the next holder reads what was there before the commit.
    """
    for route in (route for one in _applications(app) for route in _routes(one)):
        for template, call in _too_early(route.dependant):
            if call not in may_outlive:
                method = "/".join(sorted(_methods(route))) or "WEBSOCKET"
                dependency = getattr(call, "__qualname__", repr(call))
                logs.log("lease_ends_early", method=method, path=route.path, lock=template, dependency=dependency)


def _too_early(endpoint: Dependant) -> Iterator[tuple[str, object]]:
    """Yield the templates of leases with the dependencies that end after them.

    FastAPI leaves those with the scope "function" before the response, the others after it; in each of the two groups
    it leaves first what it entered last. Holds of one name are one lease, which ends with the last of them.
    """
    entered = set[object]()
    leases = dict[tuple[str, str], tuple[bool, int]]()
    others = list[tuple[tuple[bool, int], object]]()
    for place, it in enumerate(_all(endpoint)):
        once = (it.call, it.scope)
        if it is endpoint or not _has_end(it.call) or (it.use_cache and once in entered):
            continue
        entered.add(once)
        end = (it.scope != "function", -place)
        if (holding := _holding_of(it.call)) is None:
            others.append((end, it.call))
        else:
            name = (holding.kind, holding.name.template)
            leases[name] = max(end, leases.get(name, end))
    for (_, template), end in leases.items():
        yield from ((template, call) for later, call in others if later > end)


def _has_end(call: object) -> bool:
    """Return whether a dependency has a ``yield``, so that FastAPI leaves it as a context manager."""
    plain: Any = inspect.unwrap(call.func if isinstance(call, functools.partial) else cast("Any", call))
    functions = (plain,) if isinstance(plain, type) else (plain, getattr(plain, "__call__", None))  # noqa: B004
    return any(inspect.isgeneratorfunction(it) or inspect.isasyncgenfunction(it) for it in functions)


def _describe_answers(app: FastAPI) -> None:
    """Add the answers to errors to the OpenAPI document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        schema = generate()
        for route in _routes(app):
            held = [holding for it in _all(route.dependant) if (holding := _holding_of(it.call)) is not None]
            statuses = [status for holding in held for status in holding.statuses]
            if statuses:
                _describe(schema["paths"].get(route.path_format, {}), _methods(route), statuses)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def _describe(path: dict[str, Any], methods: Iterable[str], statuses: list[int]) -> None:
    texts = {str(status): _FULL if status == _web.FULL else _BUSY for status in statuses}
    for method in methods:
        if operation := path.get(method.lower()):
            for status, description in ({str(_web.UNAVAILABLE): _UNAVAILABLE} | texts).items():
                operation.setdefault("responses", {}).setdefault(status, _documented(description))


_BUSY = "Others are working on it: send the same request again later"
_FULL = "Too many requests wait for it: send the same request again later"
_UNAVAILABLE = "The outcome is unknown: the request was served, or not"


def _documented(description: str) -> dict[str, Any]:
    detail = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}
    return {
        "description": description,
        "headers": {"Retry-After": {"description": "seconds to wait", "schema": {"type": "integer"}}},
        "content": {"application/json": {"schema": detail}},
    }
