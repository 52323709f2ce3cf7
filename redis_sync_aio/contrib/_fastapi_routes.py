"""The routes of a FastAPI application: what their annotations name, and what their OpenAPI document says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fastapi import FastAPI, routing
from fastapi.dependencies.models import Dependant

from . import _web


def _routes(app: FastAPI) -> Iterator[Any]:
    """Yield the API routes; newer versions of FastAPI keep included routers as they are."""
    flat = getattr(routing, "iter_route_contexts", None)
    for route in app.routes if flat is None else flat(app.routes):
        if isinstance(getattr(route, "dependant", None), Dependant):
            yield route


def _all(dependant: Dependant) -> Iterator[Dependant]:
    yield dependant
    for inner in dependant.dependencies:
        yield from _all(inner)


def check_annotations(app: FastAPI) -> None:
    """Raise TypeError if FastAPI takes a parameter for one of the query since it cannot find what its annotation names.

    That happens in modules with ``from __future__ import annotations`` to names that are local to a function.
    """
    for route in _routes(app):
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


def describe_answers(app: FastAPI, statuses_of: Callable[[object], tuple[int, ...]]) -> None:
    """Add the answers to errors to the OpenAPI document.

    ``statuses_of``: A function that returns with which statuses a dependency refuses requests; none for others.
    """
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        schema = generate()
        for route in _routes(app):
            statuses = [status for it in _all(route.dependant) for status in statuses_of(it.call)]
            if statuses:
                # A websocket has no methods.
                _describe(schema["paths"].get(route.path_format, {}), route.methods or (), statuses)
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
