"""The common part of locks whose holder is one value under one key: looking at it, and taking it away."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from .._acquire.waits import data_in
from .._core.display import text
from .._engine.replies import read_inspect
from .._leases.lease import BaseLease, Lease
from .._transport.call import understood
from ..errors import CommandRefused, Unreachable
from .base import SHOWN, Primitive

L = TypeVar("L", bound=BaseLease)


@dataclass(frozen=True, slots=True)
class LockStatistics:
    """The state of a lock on the server at one moment.

    Attributes:
        holder: The token or identity of the holder. None: the lock is free.
        remaining: Seconds until the lease of the holder ends if it is not renewed. None: the lock is free, or held
            without a ttl.
        fence: The fence of the latest grant, also after its release. None: the server remembers none. If a process
            shares the lease among its tasks, the last fence that is reserved for them.
        foreign: Whether the holder is a client of another library, which knows no queue and no fence.
        waiters: How many requests are queued, including those whose process died unnoticed. A process that shares has
            one request for all its tasks. The tasks of this process are counted one by one.
        waiting: The tokens or identities of the first requests in the queue, in order; at most 100.
        task: The name of the task of this process that has the lease. None: no task of it has, or tasks do not share.
    """

    holder: str | None
    remaining: float | None
    fence: int | None
    foreign: bool
    waiters: int
    waiting: tuple[str, ...]
    task: str | None = None

    @property
    def locked(self) -> bool:
        """Whether somebody held the lock at that moment."""
        return self.holder is not None


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
        return (await self.statistics()).locked

    async def statistics(self) -> LockStatistics:
        """Return holder, waiters, fence and remaining time as the server sees them. One round trip.

        Raises:
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: As for `acquire`.

        On cancellation the reply is ignored.
        """
        reply = await self._ask(lambda commands, delivery: commands.inspect(self._keys, SHOWN, delivery))
        view, resource = understood(read_inspect, self._keys.name, reply), self._known()
        return LockStatistics(
            holder=None if view.holder is None else text(view.holder),
            remaining=view.left,
            fence=view.fence,
            foreign=view.holder is not None and view.holder != view.fence_token,
            waiters=view.waiting + self._behind_tickets(),
            waiting=tuple(text(ticket.token) for ticket in view.tickets),
            task=None if resource is None else resource.task_of(view.holder),
        )

    async def _data(self) -> str | None:
        resource = self._latest_resource
        if resource is None or resource.held_until is not None or resource.leases:
            return None  # it has a ttl, or is held here
        with suppress(Unreachable, CommandRefused):  # it is taken: that is known
            reply = await self._ask(lambda commands, delivery: commands.inspect(self._keys, 0, delivery))
            return data_in(self._keys, read_inspect(reply))
        return None

    async def _holders(self) -> str:
        holder = (await self.statistics()).holder
        return "" if holder is None else repr(holder)

    def __repr__(self) -> str:
        ttl = self._ttl_ms / 1000 if self._ttl_ms else None
        return f"<{self._shown_as or type(self).__name__} {self.name!r} ttl={ttl}>"


class PlainLock(LockBase[Lease]):
    """A lock with plain leases: what `AsyncLock` is, and what locks that are made of several stand on."""

    _lease_type = Lease
    _shown_as = "AsyncLock"
