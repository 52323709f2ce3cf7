"""The tasks that wait for a connection of an exhausted pool, where redis-py raises an error immediately.

The tasks of one event loop wait in order. The first of them tries again when this package gives a connection back, and
every `LOOK` seconds, since the caller's own commands use the pool, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import redis.exceptions

T = TypeVar("T")

LOOK = 0.05
"""Seconds between two looks at an exhausted pool."""


class _Queue:
    """The tasks of one event loop that wait for one pool."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.freed = asyncio.Event()
        self.tasks = 0


_queues: dict[tuple[int, int], _Queue] = {}
"""By the ids of pool and event loop, which the waiting tasks keep alive."""


def _key(pool: object) -> tuple[int, int]:
    return id(pool), id(asyncio.get_running_loop())


def connection_freed(pool: object) -> None:
    """Wake the first task that waits for ``pool``."""
    if (queue := _queues.get(_key(pool))) is not None:
        queue.freed.set()


async def in_turn(pool: object, connect: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Return the result of ``connect()``, which is called again for ``seconds`` while ``pool`` is exhausted.

    Raise what it raises. On cancellation the next task has its turn.
    """
    key = _key(pool)
    if key not in _queues:  # else other tasks came first
        try:
            return await connect()
        except redis.exceptions.ConnectionError as error:
            if not _is_exhausted(error) or seconds <= 0:
                raise
    queue = _queues.setdefault(key, _Queue())
    queue.tasks += 1
    timer = asyncio.timeout(seconds)
    try:
        async with timer, queue.turn:
            while True:
                queue.freed.clear()
                try:
                    return await connect()
                except redis.exceptions.ConnectionError as error:
                    if not _is_exhausted(error):
                        raise
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK):
                        await queue.freed.wait()
    except TimeoutError:
        if not timer.expired():
            raise  # by `connect`
    finally:
        queue.tasks -= 1
        if not queue.tasks:
            del _queues[key]
    raise redis.exceptions.ConnectionError(
        f"no connection of the pool was free for {seconds:.1f} seconds: raise max_connections of the client"
    )


def _is_exhausted(error: redis.exceptions.ConnectionError) -> bool:
    """Return True if all connections of the pool are in use.

    It is a MaxConnectionsError since redis-py 7.2 only.
    """
    return str(error) == "Too many connections"
