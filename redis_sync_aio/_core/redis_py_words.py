"""Hints for callers who use words of redis-py, or of asyncio: the error says the right spelling of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from inspect import Parameter, signature
from sys import _getframe
from typing import Any, NoReturn, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

_OF_CONSTRUCTORS = {
    "timeout": "in redis-py that is how long the lock is kept. Here it is ttl=, and it is renewed while the lock is "
    "held; how long to wait is an argument of acquire()",
    "blocking_timeout": "how long to wait is an argument of acquire(): timeout=",
    "blocking": "use try_acquire() not to wait",
    "sleep": "waiters are woken, they do not poll",
    "thread_local": "a lock may be shared by any tasks; each acquire() returns a lease of its own",
    "raise_on_release_error": "an error of the release is raised at the exit. To ignore that the lock was lost, put "
    "contextlib.suppress(LeaseLost) around the async with",
}
_TOKEN = "each lease gets a token of its own, lease.token"
_IDENTITY = (
    ". A name of the caller is identity=, and two requests with the same identity share one lease: they do not exclude "
    "each other"
)
_OF_ACQUIRE = {
    "blocking_timeout": "how long to wait is timeout=: acquire(timeout=5)",
    "blocking": "use try_acquire() not to wait",
    "sleep": "waiters are woken, they do not poll",
}
_NEVER_WAITS = "it never waits; acquire(timeout=5) waits for 5 seconds"
_OF_TRY_ACQUIRE = dict.fromkeys(("timeout", "blocking_timeout", "blocking"), _NEVER_WAITS)
_OF_METHODS = {"acquire": _OF_ACQUIRE, "try_acquire": _OF_TRY_ACQUIRE}

_METHODS_OF_REDIS_PY = {
    "owned": "ask the lease that acquire() returned: lease.remaining() > 0, or lease.check(), which raises",
    "extend": "call extend() of the lease that acquire() returned",
    "reacquire": "the lease is renewed while it is held; to renew it now, call extend() of the lease",
    "local": "the lease that acquire() returned has the token: lease.token",
}

NAMES_OF_OTHERS = {
    "Lock": "redis_sync_aio.AsyncLock",
    "RLock": "redis_sync_aio.AsyncReentrantLock",
    "ReentrantLock": "redis_sync_aio.AsyncReentrantLock",
    "Semaphore": "redis_sync_aio.AsyncSemaphore",
    "BoundedSemaphore": "redis_sync_aio.AsyncSemaphore",
    "ReadWriteLock": "redis_sync_aio.AsyncReadWriteLock",
    "RWLock": "redis_sync_aio.AsyncReadWriteLock",
    "MultiLock": "redis_sync_aio.AsyncMultiLock",
    "Redlock": "redis_sync_aio.AsyncRedlock",
    "RobustLock": "redis_sync_aio.AsyncRobustLock",
    "Event": "redis_sync_aio.AsyncEvent",
    "CountDownLatch": "redis_sync_aio.AsyncCountDownLatch",
    "Barrier": "redis_sync_aio.AsyncBarrier",
    "Election": "redis_sync_aio.LeaderElection",
    "inspect": "redis_sync_aio.inspection.inspect",
    "EmbeddedServer": "redis_sync_aio.embedded.EmbeddedServer",
    "LockError": "redis_sync_aio.SyncError",
    "LockNotOwnedError": "redis_sync_aio.LeaseLost",
}
"""The right place of names that users look for in the root of this package."""


def explains_words_of_redis_py(function: F) -> F:
    """Decorate a method or function: the TypeError for a call in words of redis-py says the right spelling."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            if (hint := _hint(function, args, kwargs)) is None:
                raise
        raise TypeError(hint)

    return cast("F", checked)


def _hint(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the right spelling of a call; None if the call has none of the known mistakes."""
    parameters = signature(function).parameters
    called, of_method = function.__name__, "self" in parameters
    shown = called if not of_method else type(args[0]).__name__
    if of_method and called != "__init__":
        shown += f".{called}"
    words = _OF_METHODS.get(called, _OF_CONSTRUCTORS) | {"token": _TOKEN + ("identity" in parameters) * _IDENTITY}
    if called == "__init__":
        words["token"] = _TOKEN + _IDENTITY
    for word in kwargs:
        if word in words and word not in parameters:
            return f"{shown}() has no argument {word!r}: {words[word]}"
    given = args[1:] if of_method else args
    if called in _OF_METHODS:
        return _by_name(shown, called, parameters, given)
    return _swapped(shown, [*parameters][of_method:], given)


def _by_name(shown: str, called: str, parameters: Mapping[str, Parameter], given: Sequence[Any]) -> str | None:
    """Return the arguments to use instead of those of an acquisition that have no name."""
    if len(given) <= sum(it.kind is it.POSITIONAL_OR_KEYWORD for it in parameters.values()) - 1:
        return None
    use = "acquire(timeout=5)" if called == "acquire" else _NEVER_WAITS
    if isinstance(given[0], bool):
        use = "acquire(), which waits, or try_acquire(), which does not"
    elif "weight" in parameters:
        use = f"{called}(weight=5)" + (f", {use}" if called == "acquire" else "")
    return f"{shown}() takes its arguments by name: {use}"


def _swapped(shown: str, names: Sequence[str], given: Sequence[Any]) -> str | None:
    """Return the right order if a client stands behind the name."""
    if len(given) < 2 or not isinstance(given[0], (str, bytes, list, tuple)) or not _is_client(given[1]):
        return None
    return f"the arguments of {shown}() are swapped: write {shown}({names[0]}, {names[1]}, ...)"


def _is_client(given: object) -> bool:
    if isinstance(given, (list, tuple)):
        return any(map(_is_client, given))
    return any(hasattr(type(given), word) for word in ("execute_command", "read_write_lock"))


def missing_attribute(owner: object, name: str) -> object:
    """Raise the AttributeError for an attribute that ``owner`` lacks; it helps if redis-py's Lock has it."""
    if name in _METHODS_OF_REDIS_PY:
        message = f"{type(owner).__name__!r} object has no attribute {name!r}: {_METHODS_OF_REDIS_PY[name]}"
        raise AttributeError(message, name=name, obj=owner)
    return object.__getattribute__(owner, name)


def missing_name(module: str, name: str) -> NoReturn:
    """Raise the error for a ``name`` that ``module`` lacks; it says where the name is, or what it is called here.

    An import gets an ImportError: it would replace the text of an AttributeError by its own.
    """
    right = NAMES_OF_OTHERS.get(name)
    if right is None and not name.startswith("_"):
        parts = (import_module(f"{module}.{part}") for part in ("errors", "types"))
        right = next((f"{part.__name__}.{name}" for part in parts if name in part.__all__), None)
    if right is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
    place, _, own = right.rpartition(".")
    message = f"{module} has no {name!r}: write `from {place} import {own}`"
    if _getframe(2).f_globals.get("__name__") == "importlib._bootstrap":
        raise ImportError(message, name=module)
    raise AttributeError(message, name=name)
