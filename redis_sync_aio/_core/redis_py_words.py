"""The words of redis-py's Lock, arguments and methods: an error for one of them says what there is here instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_OF_REDIS_PY = {
    "timeout": "in redis-py that is how long the lock is kept. Here it is ttl=, and it is renewed while the lock is "
    "held; how long to wait is an argument of acquire()",
    "blocking_timeout": "how long to wait is an argument of acquire(): timeout=",
    "blocking": "use try_acquire() not to wait",
    "sleep": "waiters are woken, they do not poll",
    "thread_local": "a lock may be shared by any tasks; each acquire() returns a lease of its own",
    "raise_on_release_error": "an error of the release is raised at the exit. To ignore that the lock was lost, put "
    "contextlib.suppress(LeaseLost) around the async with",
    "token": "each lease gets a token of its own, lease.token. A name of the caller is identity=, and two requests "
    "with the same identity share one lease: they do not exclude each other",
}
_METHODS_OF_REDIS_PY = {
    "owned": "ask the lease that acquire() returned: lease.remaining() > 0, or lease.check(), which raises",
    "extend": "call extend() of the lease that acquire() returned",
    "reacquire": "the lease is renewed while it is held; to renew it now, call extend() of the lease",
    "local": "the lease that acquire() returned has the token: lease.token",
}


def explains_words_of_redis_py(function: Callable[P, R]) -> Callable[P, R]:
    """Raise a TypeError that helps for the names that redis-py's Lock gives its arguments; decorate a method."""

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for word in kwargs:
            if word in _OF_REDIS_PY:
                shown = type(args[0]).__name__ + ("" if function.__name__ == "__init__" else f".{function.__name__}")
                raise TypeError(f"{shown}() has no argument {word!r}: {_OF_REDIS_PY[word]}")
        return function(*args, **kwargs)

    return checked


def missing_attribute(owner: object, name: str) -> object:
    """Raise the AttributeError for an attribute that ``owner`` lacks; it helps if redis-py's Lock has it."""
    if name in _METHODS_OF_REDIS_PY:
        message = f"{type(owner).__name__!r} object has no attribute {name!r}: {_METHODS_OF_REDIS_PY[name]}"
        raise AttributeError(message, name=name, obj=owner)
    return object.__getattribute__(owner, name)
