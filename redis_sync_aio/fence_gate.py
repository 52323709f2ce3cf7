"""FenceGate: keeps late writers away from a resource that cannot compare fences itself."""

from __future__ import annotations

from datetime import timedelta

from ._acquire.binding import CoordinatorLike
from ._acquire.implicit import hub_of, keys_of
from ._client.resp import Reply
from ._client.settings import Client
from ._core.arguments import Name, Seconds, ttl_ms
from ._core.display import shown, text
from ._core.keys import gate_keys
from ._leases.lease import Lease
from .errors import StaleFence

__all__ = ["FenceGate"]

BELOW = 10**16
"""Fences have 16 digits at most: microseconds, until the year 2286."""


class FenceGate:
    """Remembers the highest fence that was used for a resource, and refuses older ones.

    Guarantee: when `accept` returns, no older fence is accepted any more. So a holder that was overtaken (its process
    was paused beyond its lease, say) is refused as soon as the next holder has passed the gate.

    Between the answer of `accept` and the use of the resource there is a moment in which a later holder may pass, too.
    A resource that compares fences itself, in the same step as it writes (for SQL see
    [Fencing](https://redis-sync-aio.github.io/redis-sync-aio/guides/fencing/)), has no such moment and needs no
    gate. The gate is for those that cannot, and for many small resources under one name.

    A gate is forgotten when it was not passed for ``ttl``. That is harmless as long as no holder is paused for longer:
    fences are times in microseconds, so a later writer brings a greater one, unless it slept all the time.

    It is for what one holds at a time. Of a semaphore with several permits it refuses rightful holders: all but the one
    with the highest fence, which with ``share=True`` need not be the latest
    ([Sharing](https://redis-sync-aio.github.io/redis-sync-aio/guides/sharing/)).

    It needs scripts: where there are none, or not for this user, `accept` raises CommandRefused.

    Args:
        client: a `redis.asyncio.Redis` or `RedisCluster` (its implicit coordinator is used) or a `Coordinator`.
        name: name of the resource; it may be that of the lock. As for `AsyncLock`.
        ttl: seconds or timedelta for which the highest fence is remembered after it was last accepted. Default 7 days.

    Raises:
        TypeError, ValueError: a bad argument; nothing was sent.

    Example:
        ```python
        from redis_sync_aio import AsyncLock, FenceGate

        gate = FenceGate(redis, "report.pdf")
        async with AsyncLock(redis, "report.pdf") as lease:
            report = await render()
            await gate.accept(lease)
            await bucket.put("report.pdf", report)
        ```
    """

    def __init__(self, client: Client | CoordinatorLike, name: Name, *, ttl: Seconds = timedelta(days=7)) -> None:
        self._source = client
        self._keys = keys_of(client, name, gate_keys).by("lua")
        self._ttl_ms = ttl_ms(ttl)

    async def accept(self, fence: int | Lease) -> None:
        """Pass the gate, or be refused because a later holder has passed it. One round trip.

        The same fence may pass any number of times.

        Args:
            fence: a lease, or its fence. Of an `AsyncMultiLock` the fence of the lock that protects the resource, as in
                ``lease.fences["a"]``: the fences of several locks are in no order.

        Raises:
            StaleFence: a higher fence was accepted before. Nothing was changed.
            TypeError, ValueError: a lease over several locks, or not a fence (a whole number between 0 and 10^16, both
                excluded).
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: as `AsyncLock.acquire`. After Unreachable the
                fence may or may not have been accepted.

        On cancellation the fence may or may not have been accepted, too; asking again does no harm.
        """
        number = _fence(fence)
        highest = int(await self._ask(b"%016d" % number))
        if highest > number:
            raise StaleFence(name=self.name, fence=number, highest=highest)

    async def highest(self) -> int | None:
        """Return the highest fence accepted, None if none is remembered. One round trip; errors as in `accept`."""
        found = await self._ask(b"")
        return int(found) if found else None

    @property
    def name(self) -> str:
        """The name it was made with, as text; bytes that are not UTF-8 are shown escaped."""
        return text(self._keys.name)

    async def _ask(self, fence: bytes) -> Reply:
        hub = hub_of(self._source)
        return await hub.ask(lambda commands, delivery: commands.gate(self._keys, fence, self._ttl_ms, delivery))

    def __repr__(self) -> str:
        return f"<FenceGate {self.name!r} ttl={self._ttl_ms / 1000}>"


def _fence(value: int | Lease) -> int:
    if fences := getattr(value, "fences", None):  # a lease over several locks
        known = ", ".join(map(repr, fences))
        raise TypeError(
            f"fence must be that of one lock; this lease has one for each of {known}. Pass the one of the lock that "
            'protects the resource, as in accept(lease.fences["a"])'
        )
    number = value.fence if isinstance(value, Lease) else value
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"fence must be a Lease or the whole number in its fence, not {shown(value)}")
    if not 0 < number < BELOW:
        raise ValueError(f"fence must be between 0 and 10^16, both excluded, not {shown(number)}")
    return number
