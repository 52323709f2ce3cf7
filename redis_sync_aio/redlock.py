"""AsyncRedlock: one lock on several independent servers, held by the process that holds it on a majority of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from redis.asyncio import Redis

from ._acquire.binding import CoordinatorLike
from ._core.arguments import Name, Seconds, explains_words_of_redis_py, positive_seconds, timeout_seconds
from ._core.clock import now
from ._core.keys import Engine, lock_keys
from ._leases.choice import to_release
from ._leases.hold import Hold, LeaseContext, OnLost
from ._leases.lease import Lease
from ._primitives.followed import followed
from ._primitives.independent import check_apart, several
from ._primitives.lease_group import LeaseGroup
from ._primitives.lock_base import LockStatistics, PlainLock
from ._primitives.majority import Majority, RedlockGrant
from ._primitives.options import LeaseOptions
from ._transactions.guarded import GuardedTransaction
from .errors import AcquireTimeout, TransactionMisuse

__all__ = ["AsyncRedlock", "RedlockLease", "RedlockStatistics"]


class RedlockLease(Lease):
    """One lease on a majority of servers: what `AsyncRedlock.acquire` returns.

    It is held as long as a majority holds it, less what their clocks may be fast. ``fence`` rises from one lease to the
    next whichever servers gave it. ``token`` has the tokens of all servers that gave it, separated by spaces.
    """

    def __init__(self, grant: RedlockGrant) -> None:
        """Show ``grant``."""
        super().__init__(grant)
        self._group = grant.lease_group

    @property
    def held_on(self) -> int:
        """On how many servers it is held, as far as is known here."""
        return len(self._group.held())

    def transaction(self) -> GuardedTransaction:
        """Raise TransactionMisuse: no server could compare the token and write in one step, for all."""
        raise TransactionMisuse.several_servers(self.name)


@dataclass(frozen=True, slots=True)
class RedlockStatistics:
    """The state of the lock on each server, in their order; not one moment for all.

    Attributes:
        servers: for each what it says; None: it did not answer in time.
        quorum: how many of them have to hold it.
    """

    servers: tuple[LockStatistics | None, ...]
    quorum: int

    @property
    def locked(self) -> bool:
        """Whether nobody could have it now: fewer servers than the quorum say that it is free."""
        return Majority.free_on(self.servers) < self.quorum


class AsyncRedlock(LeaseContext[RedlockLease]):
    """One lock on n independent servers. It goes on while a minority of them is down, hung, or has lost its data.

    The algorithm is that of Redlock (redis.io, "Distributed Locks with Redis"): ask all together, each with little time
    for its answer; it is acquired if n // 2 + 1 of them grant it and their leases have not ended meanwhile; else give
    all back. Three things are added. A request that has to wait stands in the queue of the first server that answers,
    which wakes it; it does not try again at random. So the order is that of arrival while the same server answers to
    all. Leases are renewed, servers that do not hold it are asked again, and the body is cancelled when there is no
    majority any more. And there is a fence: the greatest that was granted is raised on the others before `acquire`
    returns. (One that is more than 10 seconds ahead of a majority is not used: that server's clock is wrong.)

    Guarantees: there is never more than one holder, by the clocks of a majority of servers, as long as these run at the
    same speed (1 % and 2 ms of a ttl are allowed for) and no server forgets a lease before its end. One that is
    restarted without its data may do so: let it stay away for the longest ttl, and for 10 seconds at least, or keep its
    data (appendfsync always). For what else a paused process can do there is the fence, which then always rises.

    On each server it is the same lock as ``AsyncLock(client, name)``, and as that of a Redlock client in any language.

    Args:
        clients: of each server a `redis.asyncio.Redis`, or a `Coordinator` of one, in the same order everywhere. Three
            or five servers that are no replicas of each other. (With an even number one more has to answer, and no
            more may fail.)
        name: as for `AsyncLock`; the same on all servers.
        ttl: seconds or timedelta that a lease lasts unless renewed, 0.01 to ten years.
        auto_renew: renew leases in the background, for as long as they are held.
        max_hold: seconds (or timedelta) after which a lease is not renewed any more, and so is lost; None: no limit.
        on_lost: "cancel" (default): the body is cancelled when its lease is lost; "event": only ``lease.lost`` is set.
        engine: "auto" (default), "lua" or "watch": how each server decides, as for `AsyncLock`.
        answer_within: seconds (or timedelta), more than 0, that a server has to answer; short against ``ttl``. One that
            does not answer delays `acquire` and `release` by that, until it is known to be out of reach.

    Raises:
        TypeError, ValueError: a bad argument (also: fewer than two clients, or one twice); nothing was sent. That two
            clients lead to one server is found out, and refused, by `acquire`.

    Example:
        ```python
        from redis_sync_aio import AsyncRedlock
        from redis_sync_aio.testing import IndependentServers

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

    async def acquire(self, *, timeout: Seconds | None = None, ttl: Seconds | None = None) -> RedlockLease:
        """Wait for a majority and return one lease over it. Two round trips when it is free.

        Args:
            timeout: seconds or timedelta to wait at most; 0: do not wait; None: forever.
            ttl: for this lease, instead of the lock's own.

        Raises:
            AcquireTimeout: others held it for too long.
            Unreachable: no majority answered within ``retry_for`` of the first coordinator, or ``timeout``; or the
                clocks of those that did are more than 10 seconds apart, so that no fence would be sure to rise.
            CommandRefused: so many servers answered with an error that the others are no majority.
            CoordinatorClosed, WrongContext: a coordinator cannot be used, or was closed meanwhile.
            TypeError, ValueError: a bad argument; or (ValueError) two clients lead to one server. Nothing was acquired.

        On cancellation, and when it raises, everything that was acquired is given back and whatever else a server did
        is undone, in the background.
        """
        within = timeout_seconds(timeout)
        self._locks[0]._request(ttl, None, 0)  # a bad ttl fails here
        if within == 0:
            lease = await self.try_acquire(ttl=ttl)
            return self._not_in_time(within) if lease is None else lease
        grant = await self._followed(partial(self._acquire, within, ttl), waits=True)
        assert grant is not None  # it raises where there is no grant
        return RedlockLease(grant)

    async def _acquire(self, within: float | None, ttl: Seconds | None) -> RedlockGrant:
        LeaseGroup.check_waits(self._majority.key(), self.name)
        grant = await self._majority.acquire(ttl, math.inf if within is None else now() + within)
        return self._not_in_time(within) if grant is None else grant

    async def try_acquire(self, *, ttl: Seconds | None = None) -> RedlockLease | None:
        """Return a lease, or None when it is taken or somebody waits for it. Two round trips.

        Arguments, errors and cancellation as in `acquire`; AcquireTimeout is not raised, and Unreachable and
        CommandRefused after one attempt. Two callers that try at the same moment may both get None.
        """
        grant = await self._followed(partial(self._try, ttl), waits=False)
        return None if grant is None else RedlockLease(grant)

    async def _try(self, ttl: Seconds | None) -> RedlockGrant | None:
        grant, _, error = await self._majority.ask_all(ttl, math.inf)
        if grant is None and error is not None:
            raise error
        return grant

    def hold(
        self, *, timeout: Seconds | None = None, ttl: Seconds | None = None, on_lost: OnLost | None = None
    ) -> Hold[RedlockLease]:
        """Return an async context manager that acquires, yields the lease, and releases.

        Arguments as in `acquire`, and ``on_lost`` instead of the lock's own. They are checked here and now.

        Leaving the body raises, in this order of precedence: the body's own exception, a cancellation from
        outside, LeaseLost, the error of the release.
        """
        self._locks[0].hold(timeout=timeout, ttl=ttl)  # bad arguments fail here
        return self._hold_by(lambda: self.acquire(timeout=timeout, ttl=ttl), on_lost)

    # -- releasing and looking -------------------------------------------------------------------------

    async def release(self) -> None:
        """Release the lease of it that the current task acquired, as `AsyncLock.release`.

        Raises:
            NotHeld: there is none, or it is another living task's.
            LeaseLost: it was lost before. Unreachable, CommandRefused: of so many servers that the others are no
                majority; it is released there as soon as they answer, or ends with its ttl.

        On cancellation the release goes on in the background.
        """
        await to_release(LeaseGroup.shares_of(self._majority.key()), self.name).release()

    async def force_release(self) -> int:
        """Take the lock away from its holder, on all servers that answer; return on how many it was held.

        As `AsyncLock.force_release` on each. Raises Unreachable when no majority answers: it may have happened or not.
        Also CoordinatorClosed, WrongContext.
        """
        majority = self._majority
        answers = await asyncio.gather(*(majority.answer(lock.force_release()) for lock in self._locks))
        return sum(majority.most(answers))

    async def locked(self) -> bool:
        """Return `RedlockStatistics.locked`. Raises Unreachable when no majority answers; else as `statistics`."""
        found = await self.statistics()
        self._majority.most(found.servers)
        return found.locked

    async def statistics(self) -> RedlockStatistics:
        """Return what each server knows, as far as it answers in time. One round trip.

        Raises CoordinatorClosed, WrongContext. On cancellation the answers are ignored.
        """
        return RedlockStatistics(tuple(await self._majority.statistics()), self._majority.quorum)

    @property
    def name(self) -> str:
        """The name it was made with, as text."""
        return self._locks[0].name

    def __repr__(self) -> str:
        return f"<AsyncRedlock {self.name!r} on {len(self._locks)} servers>"

    # -- inside ----------------------------------------------------------------------------------------

    def _followed(
        self, granting: Callable[[], Awaitable[RedlockGrant | None]], *, waits: bool
    ) -> Coroutine[Any, Any, RedlockGrant | None]:
        return followed(self._locks[0]._at_work(), "redlock", (self.name,), granting, waits=waits)

    def _not_in_time(self, within: float | None) -> NoReturn:
        raise AcquireTimeout.of_majority(
            self.name, quorum=self._majority.quorum, servers=len(self._locks), within=within
        )
