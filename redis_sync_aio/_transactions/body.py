"""The body of a transaction: one at a time for each task and pool, and the fate of the connection when it fails."""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakKeyDictionary

from redis.asyncio import Redis

from .._client.settings import Same
from .._core.cancellation import redeliver_cancellation
from ..errors import TransactionMisuse
from .handle import Transaction

_inside: WeakKeyDictionary[asyncio.Task[Any], list[Same]] = WeakKeyDictionary()
"""The connection pools on which each task runs the body of a transaction."""


class BodyScope:
    """One body that runs in the current task. Raises TransactionMisuse inside another body on the same pool."""

    def __init__(self, client: Redis) -> None:
        task = asyncio.current_task()
        assert task is not None
        pools = _inside.setdefault(task, [])
        pool = Same(client.connection_pool)
        if pool in pools:
            raise TransactionMisuse.nested()
        pools.append(pool)
        self._pools = pools
        self._pool = pool
        self._cancelling = task.cancelling()

    def end(self) -> None:
        """Note that the body is over, in whatever task."""
        self._pools.remove(self._pool)

    async def failed(self, tx: Transaction, error: BaseException) -> None:
        """Give the connection back after ``error``. A cancellation meanwhile must not hide that (P7)."""
        cancelled = isinstance(error, asyncio.CancelledError)
        try:
            await tx._end(drop=cancelled)
        except asyncio.CancelledError as again:
            if cancelled or error is tx._session.error or asyncio.current_task() is None:
                raise
            redeliver_cancellation(again, self._cancelling)
