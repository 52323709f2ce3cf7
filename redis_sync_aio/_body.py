"""The body of a transaction: one at a time for each task and pool, and what happens to the connection when it fails."""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakKeyDictionary

from redis.asyncio import Redis

from ._cancellation import stay_due
from ._transaction import Transaction
from .errors import TransactionMisuse

_inside: WeakKeyDictionary[asyncio.Task[Any], list[object]] = WeakKeyDictionary()
"""Tasks that run the body of a transaction, and the connection pools of those."""


def enter(client: Redis) -> asyncio.Task[Any]:
    """Begin a body in the running task. Raises TransactionMisuse inside another one on the same pool."""
    task = asyncio.current_task()
    assert task is not None
    pools = _inside.setdefault(task, [])
    if client.connection_pool in pools:
        raise TransactionMisuse(
            "a transaction inside the body of another one, on the same client: it would wait for a connection that "
            "the outer one has, and make it conflict. Do all in one, or begin it after the other is over"
        )
    pools.append(client.connection_pool)
    return task


def leave(task: asyncio.Task[Any], client: Redis) -> None:
    """End the body that began in ``task``."""
    _inside[task].remove(client.connection_pool)


async def abandon(tx: Transaction, error: BaseException) -> None:
    """Give the connection back after a body that failed. A cancellation meanwhile must not hide its error (P7)."""
    cancelled = isinstance(error, asyncio.CancelledError)
    try:
        await tx._end(drop=cancelled)
    except asyncio.CancelledError as again:
        if cancelled or error is tx._trouble or asyncio.current_task() is None:
            raise
        stay_due(again)
