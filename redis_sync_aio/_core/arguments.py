"""Argument types and their checks: bad input fails at the call and changes nothing on the server."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import timedelta
from inspect import iscoroutinefunction
from numbers import Number
from typing import Any, SupportsFloat, TypeAlias, cast

from .display import shown

Seconds: TypeAlias = float | timedelta
"""A duration: seconds as int or float, or a timedelta."""

Name: TypeAlias = str | bytes
"""A name or an identity: text is encoded as the client encodes keys; bytes are taken as they are."""

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""Any value that JSON can represent."""

MIN_TTL_MS = 10
MAX_TTL_MS = 10 * 365 * 86_400_000
MAX_PERMITS = 1_000_000_000


def seconds(value: object, what: str) -> float:
    """Return the duration ``value`` as a finite, non-negative number of seconds.

    Raises TypeError for anything but a number or timedelta (a bool is not a number here), ValueError
    for NaN, infinity and negative durations.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{what} must be seconds (int, float) or a timedelta, not {shown(value)}")
    try:
        result = float(value)
    except OverflowError:  # an int beyond the floats
        result = math.inf
    if not math.isfinite(result) or result < 0:
        raise ValueError(f"{what} must be finite and not negative, not {shown(value)}")
    return result


def real_seconds(value: object, what: str) -> float | None:
    """Return seconds as redis-py's lock takes them, real numbers of any type; also of a timedelta. None stays None.

    Raises TypeError for anything else, ValueError for NaN. Infinity and negative numbers are left to the caller.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if value is None:
        return None
    if not isinstance(value, Number) or isinstance(value, complex):
        raise TypeError(f"{what} must be a number of seconds, not {value!r}")
    result = float(cast("SupportsFloat", value))
    if math.isnan(result):
        raise ValueError(f"{what} must be a number of seconds, not {value!r}")
    return result


def positive_seconds(value: object, what: str) -> float:
    """Return a duration of more than 0 seconds."""
    result = seconds(value, what)
    if result == 0:
        raise ValueError(f"{what} must be more than 0 seconds")
    return result


def timeout_seconds(value: object, what: str = "timeout") -> float | None:
    """Return a time limit in seconds; None means no limit."""
    return None if value is None else seconds(value, what)


def ttl_ms(value: object, what: str = "ttl") -> int:
    """Return a time to live in whole milliseconds, rounded up.

    Raises ValueError below 10 ms (a lease that short ends before its reply arrives) and above ten years.
    """
    duration = seconds(value, what)
    ms = math.ceil(round(min(duration, MAX_TTL_MS) * 1000, 6))  # min: the product must stay finite
    if not MIN_TTL_MS <= ms <= MAX_TTL_MS:
        raise ValueError(f"{what} must be between 0.01 seconds and ten years, not {shown(value)}")
    return ms


def require_bool(value: object, what: str) -> bool:
    """Return ``value`` if it is a bool, else raise TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False, not {shown(value)}")
    return value


def is_async(function: object) -> bool:
    """Return whether it is a coroutine function, or an object that is called as one."""
    called = getattr(type(function), "__call__", None)  # noqa: B004
    return iscoroutinefunction(function) or iscoroutinefunction(called)


def require_function(value: object, what: str) -> None:
    """Raise TypeError unless ``value`` is called as a plain function: no class, and no coroutine function."""
    if not callable(value) or isinstance(value, type) or is_async(value):
        kind = "a coroutine function" if is_async(value) else shown(value)
        raise TypeError(f"{what} must be a plain function, not {kind}")


def require_text(value: object, what: str) -> str:
    """Return ``value`` if it is text that is not empty; raises TypeError or ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{what} must be str, not {shown(value)}")
    if not value:
        raise ValueError(f"{what} must not be empty")
    return value


def words(value: object, what: str) -> tuple[str, ...]:
    """Return several texts as a tuple; raise TypeError for one text, and for anything that is not text."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{what} must be several str, not {shown(value)}")
    found = tuple(value)
    if wrong := [one for one in found if not isinstance(one, str)]:
        raise TypeError(f"{what} must be several str, not {shown(wrong[0])}")
    return found


def options(value: object, what: str) -> dict[str, Any]:
    """Return options by name as a dict, an empty one for None; raise TypeError for anything but a mapping."""
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{what} must be a mapping of names to values, not {shown(value)}")
    return dict(value or {})


def count(value: object, what: str, least: int = 0) -> int:
    """Return ``value`` if it is a whole number from ``least`` on; raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be a whole number, not {shown(value)}")
    if value < least:
        raise ValueError(f"{what} must be {least} or more, not {shown(value)}")
    return value


def permits(value: object, what: str) -> int:
    """Return ``value`` if it can be a number of permits, 1 to 1,000,000,000; raises TypeError or ValueError."""
    number = count(value, what, 1)
    if number > MAX_PERMITS:
        raise ValueError(f"{what} must be {MAX_PERMITS:,} or less, not {shown(value)}")
    return int(number)  # an int of another type (IntEnum) cannot be sent


def permit_limit(value: object, what: str) -> int:
    """Return ``value`` if it can be a limit, 0 (paused) to 1,000,000,000; raises TypeError or ValueError."""
    return 0 if count(value, what, 0) == 0 else permits(value, what)


def one_of(value: object, choices: tuple[str, ...], what: str) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{what} must be {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}, not {shown(value)}")
