"""What cannot be an argument of an integration is refused where it is given, and not at the first request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from redis.asyncio import Redis

from redis_sync_aio.contrib import aiohttp, asgi, fastapi, otel, prometheus

CLIENT = Redis()


async def coroutine_function(*_: Any) -> Any:
    return True


CASES: dict[str, tuple[Callable[[Any], object], list[Any]]] = {
    "app": (lambda bad: asgi.Limit(bad, limit=1), [None, "app", 5]),
    "applies_to": (  # the result of a coroutine function is always true
        lambda bad: asgi.Limit(coroutine_function, limit=1, applies_to=bad),
        ["/path", 5, coroutine_function, str],
    ),
    "values of aiohttp": (lambda bad: aiohttp.hold_lock("name", timeout=0, values=bad), ["", 0, [], "user"]),
    "values of fastapi": (lambda bad: fastapi.hold_lock("name", timeout=0, values=bad), ["", 0, [], "user"]),
    "application": (fastapi.answer_errors, [None, FastAPI, "app"]),
    "lifespan": (lambda bad: fastapi.lifespan_of(CLIENT, bad), [None, "lifespan", 5]),
    "hold_spans": (lambda bad: otel.OpenTelemetryObserver(hold_spans=bad), [None, 1, "no"]),
    "registry": (prometheus.PrometheusObserver, [None, "", 5]),
    "pattern_of": (lambda bad: prometheus.collect(pattern_of=bad), ["orders:*", 5, coroutine_function]),
}


@pytest.mark.parametrize(
    ("use", "bad"),
    [
        pytest.param(use, bad, id=f"{what}-{number}")
        for what, (use, values) in CASES.items()
        for number, bad in enumerate(values)
    ],
)
def test_a_bad_argument_is_refused_where_it_is_given(use: Callable[[Any], object], bad: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        use(bad)
