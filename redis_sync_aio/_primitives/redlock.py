"""AsyncRedlock: one lock on several independent servers, held by the process that holds it on a majority of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ReferenceType

from redis.asyncio import Redis

from .._core.arguments import Name, Seconds, positive_seconds, timeout_seconds
from .._core.clock import now
from .._core.keys import Engine, lock_keys
from .._core.redis_py_words import explains_words_of_redis_py
from .._leases.detached import to_release
from .._leases.hold import Acquiring, LeaseContext, OnLost
from .._leases.implicit import CoordinatorLike
from .._leases.lease import BaseLease
from ..errors import AcquireTimeout
from ..errors._base import held_elsewhere, time_allowed
from .base import LeaseOptions, Wanted, followed
from .lock import PlainLock
from .majority import Majority, RedlockGrant, check_apart, several
from .multilock import LeaseGroup

if TYPE_CHECKING:
    from .._inspection.views import NameView

__all__ = ["AsyncRedlock", "RedlockLease"]


class RedlockLease(BaseLease):
    """One lease on a majority of servers: the result of `AsyncRedlock.acquire`.

    It is held as long as a majority holds it, less the allowance for fast clocks. ``fence`` rises from one lease to the
    next, whichever servers granted it. ``token`` has the tokens of all servers that hold it, separated by spaces; it
    changes when a server joins.
    It guards no transaction: no server can compare the tokens of all and write in one step.
    """

    def __init__(self, grant: RedlockGrant, maker: ReferenceType[object]) -> None:
        """Wrap ``grant`` of the primitive ``maker``. The package makes leases; you get one from ``acquire()``."""
        super().__init__(grant, maker)
        self._group = grant.lease_group

    @property
    def held_on(self) -> int:
        """The number of servers that hold the lease, as far as this process knows.

        At first that is a majority. It rises as others answer, and falls as servers lose it.
        """
        return len(self._group.held())


class AsyncRedlock(LeaseContext[RedlockLease]):
    """One lock on n independent servers, which works while a minority of them is down, hung, or has lost its data.

    The algorithm is Redlock (S. Sanfilippo, "Distributed Locks with Redis", redis.io): ask all servers together, each
    with little time for its answer. The lock is acquired when n // 2 + 1 of them have granted it and their leases have
    not ended meanwhile; otherwise everything is given back. Three things are added:

    - A request that has to wait stands in the queue of the first server that answers, which wakes it. The order is that
      of arrival while the same server answers to all.
    - Leases are renewed, servers that do not hold the lock are asked again, and the loss of the majority cancels the
      body.
    - There is a fence, which a majority has granted, or knows before `acquire` returns. A fence more than 10 seconds
      ahead of a majority is not used.

    Guarantee: there is never more than one holder by the clocks of a majority of servers, if the clocks run at the same
    speed (1 % and 2 ms of a ttl are allowed for), and no server forgets a lease before its end: let a server that lost
    its data stay away for the longest ttl and at least 10 seconds, or keep the data (``appendfsync always``). A paused
    process is not excluded, as with any lock (Kleppmann, ["How to do distributed
    locking"](https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html), 2016): let the resource check
    [`fence`][redis_sync_aio.Lease.fence].

    On each server it is the same lock as ``AsyncLock(client, name)``, and as that of a Redlock client in any language.

    Args:
        clients: For each server a `redis.asyncio.Redis`, or a `Coordinator` of one, in the same order everywhere. Use
            three or five servers that are not replicas of each other. An even number tolerates no more failures.
        name: As for `AsyncLock`; the same on all servers.
        ttl: How long a lease lasts unless it is renewed, 0.01 s to ten years.
        auto_renew: As for `AsyncLock`.
        max_hold: As for `AsyncLock`.
        on_lost: As for `AsyncLock`.
        engine: As for `AsyncLock`, on each server.
        answer_within: How long a server may take to answer (seconds), more than 0, short compared with
            ``ttl``. While the others are a majority, a server that has owed an answer for that time is left out, and
            asked once a second.

    Raises:
        TypeError, ValueError: An argument is bad (also: fewer than two clients, or one of them twice). Nothing was
            sent. `acquire` finds out, and refuses, that two clients lead to one server.

    Example:
        ```python
        from redis_sync_aio import AsyncRedlock
        from redis_sync_aio.testing.servers import IndependentServers

        async with IndependentServers(3) as group:
            clients = group.clients()  # or three clients of your own
            async with AsyncRedlock(clients, "orders:42", ttl=10) as lease:
                await write_order(fence=lease.fence)
        ```
    """

    @explains_words_of_redis_py
    def __init__(
        self,
        clients: Iterable[Redis | CoordinatorLike],
        name: Name,
        *,
        ttl: Seconds = 30.0,
        auto_renew: bool = True,
        max_hold: Seconds | None = None,
        on_lost: OnLost = "cancel",
        engine: Engine = "auto",
        answer_within: Seconds = 0.25,
    ) -> None:
        sources = several(clients)
        if ttl is None:
            raise TypeError("ttl must be seconds or a timedelta: without an end a lost server would hold it forever")
        options = LeaseOptions(ttl, auto_renew, max_hold, on_lost, engine)
        self._locks = tuple(PlainLock(one, name, lock_keys, options) for one in sources)
        check_apart([lock._client for lock in self._locks])
        super().__init__(on_lost)
        self._majority = Majority(self._locks, positive_seconds(answer_within, "answer_within"))

    # -- acquiring -------------------------------------------------------------------------------------

    @explains_words_of_redis_py
    def acquire(
        self, *, timeout: Seconds | None = None, ttl: Seconds | None = None, label: str | None = None
    ) -> Acquiring[RedlockLease]:
        """Wait for a majority and return one lease over it. Mostly one round trip if the lock is free.

        Args:
            timeout: How long to wait (seconds). 0: do not wait. None: forever.
            ttl: The ttl of this lease. None: the ttl of this lock.
            label: A text for people, as for `AsyncLock.acquire`.

        Raises:
            AcquireTimeout: Others held the lock for all of ``timeout``.
            Unreachable: No majority answered within ``timeout``, or within ``retry_for`` of the first coordinator. Or
                the clocks of those that did are more than 10 seconds apart, so that no fence would be sure to rise.
            CommandRefused: So many servers answered with an error that the others are no majority.
            WouldDeadlock: A body of this task holds the lock.
            CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.
            TypeError, ValueError: An argument is bad, or two clients lead to one server, or to it and its replica.

        On cancellation, and after an error, everything that was acquired is given back in the background.
        """
        within = timeout_seconds(timeout)
        self._locks[0]._request(ttl, None, label)  # bad arguments fail here
        return Acquiring(self._acquired(within, Wanted(ttl, label)), self._on_lost)

    async def _acquired(self, within: float | None, wanted: Wanted) -> RedlockLease:
        if within == 0:
            lease = await self._tried(wanted)
            return self._not_in_time(within) if lease is None else lease
        grant = await self._followed(partial(self._acquire, within, wanted), wanted, waits=True)
        assert grant is not None  # it raises where there is no grant
        return RedlockLease(grant, self._itself)

    async def _acquire(self, within: float | None, wanted: Wanted) -> RedlockGrant:
        LeaseGroup.check_waits(self._majority.key(), self.name)
        grant = await self._majority.acquire(wanted, math.inf if within is None else now() + within)
        return self._not_in_time(within) if grant is None else grant

    @explains_words_of_redis_py
    def try_acquire(self, *, ttl: Seconds | None = None, label: str | None = None) -> Acquiring[RedlockLease | None]:
        """Return a lease, or None if the lock is taken or contended. Mostly one round trip.

        Arguments, errors and cancellation are those of `acquire`, without AcquireTimeout; Unreachable and
        CommandRefused are raised after one attempt. Two callers that try at the same moment may both get None.
        """
        self._locks[0]._request(ttl, None, label)  # bad arguments fail here
        return Acquiring(self._tried(Wanted(ttl, label)), self._on_lost)

    async def _tried(self, wanted: Wanted) -> RedlockLease | None:
        grant = await self._followed(partial(self._try, wanted), wanted, waits=False)
        return None if grant is None else RedlockLease(grant, self._itself)

    async def _try(self, wanted: Wanted) -> RedlockGrant | None:
        return await self._majority.try_acquire(wanted)

    # -- releasing and looking -------------------------------------------------------------------------

    async def release(self) -> None:
        """Release the lease of this lock that the current task acquired, as `AsyncLock.release`.

        Raises:
            NotHeld: There is none, or a living task acquired it.
            LeaseLost: The lease was lost before.
            Unreachable, CommandRefused: On so many servers that the others are no majority. They release as soon as
                they answer; otherwise the lease ends with its ttl.

        On cancellation the release continues in the background.
        """
        await to_release(LeaseGroup.shares_of(self._majority.key()), self.name).release()

    async def force_release(self) -> int:
        """Take the lock away from its holder on all servers that answer, and return on how many it was held.

        Each server does what `AsyncLock.force_release` says.

        Raises:
            Unreachable: No majority answered. The lock may or may not have been taken away.
            CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.
        """
        majority = self._majority
        answers = await asyncio.gather(*(majority.answer(lock.force_release()) for lock in self._locks))
        return sum(majority.most(answers))

    async def locked(self) -> bool:
        """Return whether the lock cannot be acquired now: no majority of the servers says that it is free.

        One round trip.

        Raises:
            Unreachable: No majority answered.
            CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.
        """
        found = self._majority.most(await self._majority.held())
        return found.count(False) < self._majority.quorum

    async def statistics(self) -> tuple[NameView | None, ...]:
        """Return the view of each server, in the order of the clients; None: that server did not answer in time.

        The servers are not asked at one moment. Two round trips.

        Raises:
            CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.

        On cancellation the replies are ignored.
        """
        return tuple(await self._majority.answers_of(lambda lock: lock.statistics()))

    @property
    def name(self) -> str:
        """The name it was made with, as text; bytes that are not UTF-8 are shown escaped."""
        return self._locks[0].name

    def __repr__(self) -> str:
        return f"<AsyncRedlock {self.name!r} on {len(self._locks)} servers>"

    # -- inside ----------------------------------------------------------------------------------------

    def _followed(
        self, granting: Callable[[], Awaitable[RedlockGrant | None]], wanted: Wanted, *, waits: bool
    ) -> Coroutine[Any, Any, RedlockGrant | None]:
        lock = self._locks[0]
        label = lock._shown_label(wanted.label)
        return followed(lock._at_work(), "redlock", (self.name,), granting, waits=waits, label=label)

    def _not_in_time(self, within: float | None) -> NoReturn:
        quorum, servers = self._majority.quorum, len(self._locks)
        raise AcquireTimeout(
            f"{self.name!r} was not free on {quorum} of {servers} servers{time_allowed(within)}: "
            f"{held_elsewhere('it')}",
            name=self.name,
        )
