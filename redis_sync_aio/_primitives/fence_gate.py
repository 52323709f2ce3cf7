"""FenceGate: the highest fence that was used for a resource, so that older ones are refused."""

from __future__ import annotations

from datetime import timedelta

from .._client.replies import Reply
from .._client.settings import Client
from .._core.arguments import Name, Seconds, ttl_ms
from .._core.display import shown, text
from .._core.keys import gate_keys
from .._core.redis_py_words import explains_words_of_redis_py
from .._leases.implicit import CoordinatorLike, hub_of, keys_of
from .._leases.lease import BaseLease
from ..errors import StaleFence

__all__ = ["FenceGate"]

BELOW = 10**16
"""Fences have 16 digits at most: microseconds, until the year 2286."""


class FenceGate:
    """Remembers the highest fence that was used for a resource, and refuses older ones.

    Guarantee: when `accept` returns, no older fence is accepted any more.

    Prefer a resource that compares fences itself, in the same step as it writes
    ([Fencing](https://redis-sync-aio.github.io/redis-sync-aio/guides/fencing/) has the SQL). With a gate, a later
    holder may pass between the answer of `accept` and the use of the resource.

    Limits:

    - A gate that no lease passed for ``keep`` is forgotten, which harms only if a holder was paused for longer.
    - It is for one holder at a time: of a semaphore with several permits it refuses rightful holders.
    - It needs scripts. Where they are not allowed, `accept` raises CommandRefused.

    Fencing tokens are described by Kleppmann, ["How to do distributed
    locking"](https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html), 2016.

    Args:
        client: As for [`AsyncLock`][redis_sync_aio.AsyncLock].
        name: The name of the resource, as for `AsyncLock`. It may be that of the lock.
        keep: How long the highest fence is remembered after it was last accepted (seconds). Default: 7
            days.

    Raises:
        TypeError, ValueError: An argument is bad. Nothing was sent.

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

    @explains_words_of_redis_py
    def __init__(self, client: Client | CoordinatorLike, name: Name, *, keep: Seconds = timedelta(days=7)) -> None:
        self._source = client
        self._keys = keys_of(client, name, gate_keys).by("lua")
        self._keep_ms = ttl_ms(keep, "keep")

    async def accept(self, fence: int | BaseLease) -> None:
        """Pass the gate, or raise StaleFence if a later holder has passed it. One round trip.

        The same fence may pass any number of times.

        Args:
            fence: A lease, or its fence: an integer between 0 and 10^16, both excluded. For an `AsyncMultiLock` the
                fence of the lock that protects the resource, as in ``lease.fences["a"]``: fences of different locks are
                in no order.

        Raises:
            StaleFence: A higher fence was accepted before. Nothing was changed.
            TypeError, ValueError: The argument is a lease over several locks, or not a fence.
            Unreachable: There was no answer. The fence may or may not have been accepted.
            CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.

        On cancellation the fence may or may not have been accepted. Asking again does no harm.
        """
        number = _fence(fence)
        highest = int(await self._ask(b"%016d" % number))
        if highest > number:
            raise StaleFence(name=self.name, fence=number, highest=highest)

    async def highest(self) -> int | None:
        """Return the highest fence accepted, or None if none is remembered. One round trip; errors as for `accept`."""
        found = await self._ask(b"")
        return int(found) if found else None

    @property
    def name(self) -> str:
        """The name it was made with, as text; bytes that are not UTF-8 are shown escaped."""
        return text(self._keys.name)

    async def _ask(self, fence: bytes) -> Reply:
        hub = hub_of(self._source)
        return await hub.ask(lambda commands, call: commands.gate(self._keys, fence, self._keep_ms, call))

    def __repr__(self) -> str:
        return f"<FenceGate {self.name!r} keep={self._keep_ms / 1000}>"


def _fence(value: int | BaseLease) -> int:
    if fences := getattr(value, "fences", None):  # a lease over several locks
        known = ", ".join(map(repr, fences))
        raise TypeError(
            f"fence must be that of one lock; this lease has one for each of {known}. Pass the one of the lock that "
            'protects the resource, as in accept(lease.fences["a"])'
        )
    number = value.fence if isinstance(value, BaseLease) else value
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"fence must be a lease or the whole number in its fence, not {shown(value)}")
    if not 0 < number < BELOW:
        raise ValueError(f"fence must be between 0 and 10^16, both excluded, not {shown(number)}")
    return number
