"""A small service that sells each seat once; test_seats.py shows how to test what it does when things go wrong."""

from __future__ import annotations

from redis.asyncio import Redis

from redis_sync_aio import Coordinator, LeaseLost


class Sold(Exception):
    """The seat has an owner already."""


class Seats:
    """Seats of one event. What it writes is guarded by the lease, so a holder that lost its lock writes nothing."""

    def __init__(self, redis: Redis, sync: Coordinator) -> None:
        self.redis, self.sync = redis, sync

    async def buy(self, seat: str, buyer: str) -> None:
        """Sell ``seat`` to ``buyer``; raise Sold if it has an owner. A lost lock is acquired again, once."""
        try:
            await self._buy(seat, buyer)
        except LeaseLost:
            await self._buy(seat, buyer)

    async def _buy(self, seat: str, buyer: str) -> None:
        async with self.sync.lock(f"seat:{seat}") as lease, lease.transaction() as tx:
            if await tx.get(f"owner:{seat}") is not None:
                raise Sold(seat)
            await self.pay(buyer)
            tx.multi()
            tx.set(f"owner:{seat}", buyer)

    async def pay(self, buyer: str) -> None:
        """Take the money; stands for something slow."""
