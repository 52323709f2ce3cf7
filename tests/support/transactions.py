"""Helpers for tests of transactions."""

from __future__ import annotations

from redis.asyncio import Redis

from redis_sync_aio import Transaction, transaction


async def nothing(tx: Transaction) -> None:
    """The body of a transaction that writes nothing."""
    await tx.exists("nothing")
    tx.multi()


async def prove(client: Redis) -> None:
    """Let a connection of the client's pool find out that it may use MULTI and EXEC, which it does only once."""
    await transaction(client, nothing, "nothing")
