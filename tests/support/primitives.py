"""Everything that can be acquired, as one makes it: for tests that run over all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncRedlock,
    AsyncReentrantLock,
    AsyncRobustLock,
    AsyncSemaphore,
    Coordinator,
)

Maker = Callable[..., Any]
"""Makes a primitive of a coordinator and a name, with options that all of them have."""


def _reader(sync: Coordinator, name: str, **options: Any) -> Any:
    return AsyncReadWriteLock(sync, name, **options).read()


def _writer(sync: Coordinator, name: str, **options: Any) -> Any:
    return AsyncReadWriteLock(sync, name, **options).write()


def _several(sync: Coordinator, name: str, **options: Any) -> AsyncMultiLock:
    return AsyncMultiLock(sync, [f"{{{name}}}1", f"{{{name}}}2"], **options)


def _redlock(sync: Coordinator, name: str, **options: Any) -> AsyncRedlock:
    return AsyncRedlock([sync], name, **options)


MAKERS: Mapping[str, Maker] = {
    "lock": AsyncLock,
    "lock with WATCH": partial(AsyncLock, engine="watch"),
    "shared lock": partial(AsyncLock, share=True),
    "robust lock": AsyncRobustLock,
    "reentrant lock": AsyncReentrantLock,
    "semaphore": partial(AsyncSemaphore, limit=1),
    "semaphore with WATCH": partial(AsyncSemaphore, limit=1, engine="watch"),
    "shared semaphore": partial(AsyncSemaphore, limit=1, share=True),
    "reader": _reader,
    "writer": _writer,
    "shared writer": partial(_writer, share=True),
    "multi-lock": _several,
    "redlock": _redlock,
}
