"""Arguments by names that other libraries give them: refused with what they are called here."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_OF_REDIS_PY = {
    "timeout": "in redis-py that is how long the lock is kept. Here it is ttl=, and it is renewed while the lock is "
    "held; how long to wait is an argument of acquire() and hold()",
    "blocking_timeout": "how long to wait is an argument of acquire() and hold(): timeout=",
    "blocking": "use try_acquire() not to wait",
    "sleep": "waiters are woken, they do not poll; Coordinator(client, poll=...) is for servers that do not push",
    "thread_local": "a lock may be shared by any tasks; each acquire() returns a lease of its own",
    "raise_on_release_error": "an error of the release is raised at the exit",
}


def explains_words_of_redis_py(init: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``__init__``: raise a TypeError that helps for the names that redis-py's Lock gives its arguments."""

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for word in kwargs:
            if word in _OF_REDIS_PY:
                raise TypeError(f"{type(args[0]).__name__}() has no argument {word!r}: {_OF_REDIS_PY[word]}")
        return init(*args, **kwargs)

    return checked
