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


def function(*_: Any) -> Any:
    raise AssertionError


Use = Callable[[Any], object]
CASES: dict[str, tuple[Use, list[Any], str]] = {
    "app": (lambda bad: asgi.Limit(bad, limit=1), [None, "app", 5], "."),
    "applies_to": (  # the result of a coroutine function is always true
        lambda bad: asgi.Limit(coroutine_function, limit=1, applies_to=bad),
        ["/path", 5, coroutine_function, str],
        ".",
    ),
    "application": (fastapi.answer_errors, [None, FastAPI, "app"], "."),
    "errors of fastapi": (lambda bad: fastapi.answer_errors(FastAPI(), also=bad), [["KeyError"]], "classes of excep"),
    "errors of aiohttp": (lambda bad: aiohttp.answer_errors(also=bad), [["KeyError"]], "classes of exceptions"),
    "handler": (lambda bad: aiohttp.hold_permit("x", limit=1, timeout=0)(bad), [function], "is not a coroutine func"),
    "lifespan": (lambda bad: fastapi.lifespan_of(CLIENT, bad), [None, "lifespan", 5], "."),
    "source of fastapi": (fastapi.lifespan_of, ["redis://x", Redis, coroutine_function], "."),
    "source of aiohttp": (aiohttp.cleanup_ctx_of, ["redis://x", Redis, coroutine_function], "."),
    "may_outlive": (lambda bad: fastapi.lifespan_of(CLIENT, may_outlive=bad), [["session_of"]], "must be a dependency"),
    "hold_spans": (lambda bad: otel.OpenTelemetryObserver(hold_spans=bad), [None, 1, "no"], "."),
    "acquire_spans": (
        lambda bad: otel.OpenTelemetryObserver(acquire_spans=bad),
        ["sometimes"],
        '"waited", "always" or "never", not \'sometimes\'',
    ),
    "registry": (prometheus.PrometheusObserver, [None, "", 5], "."),
    "pattern_of": (lambda bad: prometheus.collect(pattern_of=bad), ["orders:*", 5, coroutine_function], "."),
}
HOLDS: dict[str, tuple[list[Any], str]] = {
    "name": (["order:{order_id:05d}", "order:{order_id!r}", "order:{a:int}:{a}", "order:{a.b}", "order:{", ""], "."),
    "timeout": ([-1, "soon"], "timeout"),
    "ttl": ([0], "ttl"),
    "leave_when_gone": ([1, None], "leave_when_gone"),
    "max_waiting": ([-1, "few"], "max_waiting"),
    "status": ([200, 399, 600], "status"),
    "limit": ([-1], "limit"),
    "values": (["", 0, [], "user", {"user": "ann"}, {"other": coroutine_function}], "values|'other'"),
}
LIMITS: dict[str, list[Any]] = {
    "limit": [-1],
    "client": ["redis://x"],
    "name": ["", b"x"],
    "timeout": [-1],
    "ttl": [0],
    "retry_after": [-1],
    "status": [399, 600],
}


def with_option(use: Any, option: str, **usual: Any) -> Use:
    """Return a use of one option, next to the usual ones."""
    return lambda bad: use(**usual | {option: bad})


for hold in (fastapi.hold_permit, aiohttp.hold_permit):
    for option, (values, match) in HOLDS.items():
        use = with_option(hold, option, name="order:{user}", limit=1, timeout=1)
        CASES[f"{hold.__module__} {option}"] = (use, values, match)
for option, values in LIMITS.items():
    CASES[f"Limit {option}"] = (with_option(asgi.Limit, option, app=coroutine_function, limit=1), values, ".")
CASES["scope"] = (lambda bad: fastapi.hold_lock("order", timeout=1, scope=bad), ["forever"], "scope")


@pytest.mark.parametrize(
    ("use", "bad", "match"),
    [
        pytest.param(use, bad, match, id=f"{what}-{number}")
        for what, (use, values, match) in CASES.items()
        for number, bad in enumerate(values)
    ],
)
def test_a_bad_argument_is_refused_where_it_is_given(use: Use, bad: Any, match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        use(bad)
