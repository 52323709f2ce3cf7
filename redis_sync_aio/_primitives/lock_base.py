"""The common part of locks whose holder is one value under one key: looking at it, and taking it away."""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

from .._acquire.waits import data_in
from .._leases.lease import BaseLease, Lease
from ..errors import CommandRefused, Unreachable
from .base import Primitive

L = TypeVar("L", bound=BaseLease)


class LockBase(Primitive[L]):
    """Base of the locks; they differ in what their leases promise."""

    _shown_as = ""
    """The name of the class in messages; empty: its own."""

    async def force_release(self) -> bool:
        """Take the lock away from its holder, give it to the next waiter, and return whether it was held.

        A holder that is alive notices at its next renewal and loses its lease (reason "taken" or "expired"). A process
        that shares the lease among its tasks gets a notice, and stops handing it on within 5 milliseconds. Let the
        protected resource check the fence: until the holder notices, it goes on. The command is sent once and not
        retried.

        Raises:
            Unreachable: The reply was lost. The lock may or may not have been taken away.
            CommandRefused, CoordinatorClosed, WrongContext: As for `acquire`.

        On cancellation the lock may or may not have been taken away.
        """
        return bool(await self._ask(lambda commands, delivery: commands.force(self._keys, delivery)))

    async def locked(self) -> bool:
        """Return whether anybody holds the lock. One round trip; errors and cancellation are those of `statistics`."""
        return (await self._look(1)).held > 0

    async def _data(self) -> str | None:
        resource = self._latest_resource
        if resource is None or resource.held_until is not None or resource.leases:
            return None  # it has a ttl, or is held here
        with suppress(Unreachable, CommandRefused):  # it is taken: that is known
            return data_in(await self._look(1))
        return None

    def __repr__(self) -> str:
        ttl = self._ttl_ms / 1000 if self._ttl_ms else None
        return f"<{self._shown_as or type(self).__name__} {self.name!r} ttl={ttl}>"


class PlainLock(LockBase[Lease]):
    """A lock with plain leases: what `AsyncLock` is, and what locks that are made of several stand on."""

    _lease_type = Lease
    _shown_as = "AsyncLock"
