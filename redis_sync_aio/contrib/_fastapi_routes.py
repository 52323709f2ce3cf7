"""The routes of a FastAPI application: what their annotations name, how dependencies end, the OpenAPI document."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, cast

from fastapi import FastAPI, routing
from fastapi.dependencies.models import Dependant
from starlette.applications import Starlette
from starlette.routing import Router

from .._core import logs
from . import _web

HoldingOf: TypeAlias = Callable[[object], _web.Holding | None]
"""A function that returns the lease of a dependency; None for a dependency that has none."""


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


def applications(app: Starlette) -> list[Starlette]:
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


def check_annotations(app: FastAPI) -> None:
    """Raise TypeError if FastAPI takes a parameter for one of the query since it cannot find what its annotation names.

    That happens in modules with ``from __future__ import annotations`` to names that are local to a function.
    """
    for route in (route for one in applications(app) for route in _routes(one)):
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


def check_ends(app: FastAPI, holding_of: HoldingOf, may_outlive: Collection[object]) -> None:
    """Warn of leases that end before other dependencies, which may write at their end what the lease protects.

    A session that commits after its ``yield`` does: then the next holder reads what was there before the commit.
    """
    for route in (route for one in applications(app) for route in _routes(one)):
        for template, call in _too_early(route.dependant, holding_of):
            if call not in may_outlive:
                method = "/".join(sorted(_methods(route))) or "WEBSOCKET"
                logs.lease_ends_early(method, route.path, template, getattr(call, "__qualname__", repr(call)))


def _too_early(endpoint: Dependant, holding_of: HoldingOf) -> Iterator[tuple[str, object]]:
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
        if (holding := holding_of(it.call)) is None:
            others.append((end, it.call))
        else:
            name = (holding.kind, holding.template)
            leases[name] = max(end, leases.get(name, end))
    for (_, template), end in leases.items():
        yield from ((template, call) for later, call in others if later > end)


def _has_end(call: object) -> bool:
    """Return whether a dependency has a ``yield``, so that FastAPI leaves it as a context manager."""
    plain: Any = inspect.unwrap(call.func if isinstance(call, functools.partial) else cast("Any", call))
    functions = (plain,) if isinstance(plain, type) else (plain, getattr(plain, "__call__", None))  # noqa: B004
    return any(inspect.isgeneratorfunction(it) or inspect.isasyncgenfunction(it) for it in functions)


def describe_answers(app: FastAPI, holding_of: HoldingOf) -> None:
    """Add the answers to errors to the OpenAPI document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        schema = generate()
        for route in _routes(app):
            held = [holding for it in _all(route.dependant) if (holding := holding_of(it.call)) is not None]
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
                operation.setdefault("responses", {}).setdefault(status, _answer(description))


_BUSY = "Others are working on it: send the same request again later"
_FULL = "Too many requests wait for it: send the same request again later"
_UNAVAILABLE = "The outcome is unknown: the request was served, or not"


def _answer(description: str) -> dict[str, Any]:
    detail = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}
    return {
        "description": description,
        "headers": {"Retry-After": {"description": "seconds to wait", "schema": {"type": "integer"}}},
        "content": {"application/json": {"schema": detail}},
    }
