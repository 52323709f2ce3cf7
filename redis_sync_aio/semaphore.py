"""AsyncSemaphore: a number of permits shared by tasks of any processes on any machines that share a Redis."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ._acquire.binding import CoordinatorLike
from ._acquire.resource import Resource
from ._client.settings import Client
from ._core.arguments import Name, Seconds, explains_words_of_redis_py, one_of, permits
from ._core.display import text
from ._core.keys import Engine, permit_keys
from ._engine.commands import Commands, Delivery
from ._engine.replies import Answer
from ._leases.hold import Hold, OnLost
from ._leases.lease import Lease
from ._primitives.base import PermitPrimitive
from ._primitives.options import LeaseOptions
from ._scripts.constants import Outcome
from ._transport.call import Call
from .errors import LimitMismatch, SyncError

__all__ = ["AsyncSemaphore", "OnMismatch", "PermitHolder", "SemaphoreStatistics"]


@dataclass(frozen=True, slots=True)
class PermitHolder:
    """A holder of permits.

    Attributes:
        identity: the caller's identity, or the token of the lease.
        weight: how many permits.
        remaining: seconds until they come back if they are not renewed.
        fence: the fence of that lease.
    """

    identity: str
    weight: int
    remaining: float
    fence: int


@dataclass(frozen=True, slots=True)
class SemaphoreStatistics:
    """The state of a semaphore on the server at one moment.

    Attributes:
        limit: how many permits there are; None when nobody has used it yet, or for so long that it is
            forgotten.
        held: how many of them are held; more than ``limit`` for a while after it was lowered.
        available: how many are free. Waiters come first.
        holders: the holders, by the end of their leases, 100 at most.
        fence, waiters, waiting: as `LockStatistics`.
    """

    limit: int | None
    held: int
    available: int
    holders: tuple[PermitHolder, ...]
    fence: int | None
    waiters: int
    waiting: tuple[str, ...]


OnMismatch: TypeAlias = Literal["raise", "keep", "set"]
"""The treatment of a limit when the server has another one in use."""


class _Refusal:
    """Makes the error for a request that the server did not admit. Knows the limit of now, and not its semaphore.

    ``asked``: the limit when the request was made.
    """

    name = ""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, answer: Answer, weight: int, *, asked: int) -> SyncError:
        limit = answer.number
        too_heavy = answer.outcome is Outcome.TOO_HEAVY or (limit == self.limit and weight > limit)
        return LimitMismatch(
            name=self.name,
            expected=(asked if too_heavy and limit else self.limit) or None,
            found=limit or None,
            weight=weight if too_heavy else 0,
            resized=answer.more > 0,
        )


class AsyncSemaphore(PermitPrimitive):
    """A fair, weighted semaphore whose permits are leases, with one limit that all agree on.

    Guarantees: by the server's clock the weights of the live leases never exceed the limit (but for those held
    when it was lowered); grants in the order of arrival, also for heavy requests: nobody passes a request that does
    not fit yet; a release wakes by itself everybody who fits then; a crashed holder's permits come back when its
    lease ends; nothing is left behind by a cancelled task or a lost reply. Each permit is a `Lease` like a lock's, with
    a fence, renewal, and loss.

    The limit is kept by the server. The first request sets it. A request with another one gets LimitMismatch while
    permits are held or waited for (see ``on_mismatch``); when nobody holds or waits, its limit is the new one.
    ``limit=None`` takes what is there. `resize` changes the limit for all, and that stays until the next `resize`.
    Otherwise it is forgotten one to two hours after the last grant or renewal (later if the ttl is over 48 minutes).

    Args:
        client: a `redis.asyncio.Redis` or `RedisCluster` (its implicit coordinator is used) or a `Coordinator`.
        name: 1 to 8192 bytes; in a cluster, one with a ``}`` needs a whole hash tag, as in "orders:{42}". A
            semaphore and a lock of one name have nothing to do with each other.
        limit: how many permits there are, 1 to 1,000,000,000; None: as many as the server says.
        on_mismatch: whose limit counts while permits are held or waited for by another one, as in a rolling deployment
            that changes it. "raise" (default): neither, LimitMismatch; "keep": the server's, until nobody holds or
            waits; "set": this one, from now on. A limit that `resize` has set is kept, and "set" raises then.
        ttl: seconds or timedelta that a lease lasts unless renewed, 0.01 to ten years.
        auto_renew: renew leases in the background, for as long as they are held.
        max_hold: seconds (or timedelta) after which a lease is not renewed any more, and so is lost; None: no limit.
        on_lost: "cancel" (default): the body is cancelled when its lease is lost; "event": only ``lease.lost`` is set.
        engine: "auto" (default), "lua" or "watch": how the server decides, as for `AsyncLock`.
        linger: for how many seconds (or timedelta) what tasks share is kept when none has it, as for `AsyncLock`.
        max_waiting: raise QueueFull instead of waiting behind so many others; None (default): any number.
        share: tasks of this process hand permits on among themselves, without a command, as long as nobody else waits:
            see `AsyncLock` and
            [Sharing](https://redis-sync-aio.github.io/redis-sync-aio/guides/sharing/). A lower limit reaches other
            processes with their next renewal. Fences do not rise in the order of the grants then, if there are several
            permits.

    Raises:
        TypeError, ValueError: a bad argument; nothing was sent.

    Acquiring and releasing cost one round trip each, and O(log permits + log waiters) on the server.

    Example:
        ```python
        from redis_sync_aio import AsyncSemaphore

        gpus = AsyncSemaphore(redis, "gpu", limit=4)
        async with gpus:
            await infer()
        async with gpus.hold(weight=2, timeout=5) as lease:
            await train(fence=lease.fence)
        ```
    """

    _weight = 1

    _kind = "semaphore"

    @explains_words_of_redis_py
    def __init__(
        self,
        client: Client | CoordinatorLike,
        name: Name,
        *,
        limit: int | None,
        on_mismatch: OnMismatch = "raise",
        ttl: Seconds = 30.0,
        auto_renew: bool = True,
        max_hold: Seconds | None = None,
        on_lost: OnLost = "cancel",
        engine: Engine = "auto",
        share: bool = False,
        linger: Seconds = 0.0,
        max_waiting: int | None = None,
    ) -> None:
        if ttl is None:  # for callers without a type checker
            raise TypeError("a semaphore needs a ttl: a crashed holder's permit would never come back")
        self._limit = 0 if limit is None else permits(limit, "limit")
        one_of(on_mismatch, get_args(OnMismatch), "on_mismatch")
        if not self._limit and on_mismatch != "raise":
            raise ValueError(f"on_mismatch={on_mismatch!r} needs a limit; limit=None takes the server's")
        self._whose_limit = b"" if on_mismatch == "raise" else on_mismatch.encode()
        self._refused = _Refusal(self._limit)
        super().__init__(
            client,
            name,
            lambda wire, prefix: permit_keys(wire, "sem", prefix),
            LeaseOptions(ttl, auto_renew, max_hold, on_lost, engine, share, linger, max_waiting),
        )

    @property
    def limit(self) -> int | None:
        """The limit this object was made with, or last set by its `resize`; None: the server's."""
        return self._limit or None

    async def acquire(
        self,
        weight: int = 1,
        *,
        timeout: Seconds | None = None,
        ttl: Seconds | None = None,
        identity: Name | None = None,
    ) -> Lease:
        """Wait for the turn and return a lease of ``weight`` permits.

        Args:
            weight: how many permits, 1 to the limit. All or nothing.
            timeout: seconds or timedelta to wait at most; 0: do not wait; None: forever.
            ttl: for this lease, instead of the semaphore's own.
            identity: the caller's own name, kept as the holder's token. The same identity asking again gets the
                same permits again (their number does not change), from any process, and may release them from any.

        Raises:
            AcquireTimeout: they were not granted in time.
            LimitMismatch: the server's limit is another one (see ``on_mismatch`` of this class), or too small for the
                weight; nothing was changed.
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: as `AsyncLock.acquire`.
            TypeError, ValueError: a bad argument; nothing was sent.

        On cancellation whatever the server did for this request is undone, without delaying the cancellation.
        """
        weight = self._check_weight(weight)
        if weight == self._weight:  # which has a shorter way
            return await super().acquire(timeout=timeout, ttl=ttl, identity=identity)
        return await self._acquire(self._request(ttl, identity, timeout, weight))

    async def try_acquire(
        self, weight: int = 1, *, ttl: Seconds | None = None, identity: Name | None = None
    ) -> Lease | None:
        """Return a lease, or None when the permits are not free or somebody waits for some. One round trip.

        Arguments, errors and cancellation as in `acquire`; AcquireTimeout is not raised.
        """
        return await self._try_lease(self._request(ttl, identity, 0, self._check_weight(weight)))

    def hold(
        self,
        weight: int = 1,
        *,
        timeout: Seconds | None = None,
        ttl: Seconds | None = None,
        identity: Name | None = None,
        on_lost: OnLost | None = None,
    ) -> Hold[Lease]:
        """Return an async context manager that acquires, yields the lease, and releases.

        Arguments as in `acquire`, and ``on_lost`` instead of the semaphore's own. They are checked here and now.
        The body's exceptions are treated as by `AsyncLock.hold`.
        """
        self._request(ttl, identity, timeout, self._check_weight(weight))  # bad arguments fail here
        # Not by that request: `resize` may be called before this is entered.
        acquire = functools.partial(self.acquire, weight, timeout=timeout, ttl=ttl, identity=identity)
        return self._hold_by(acquire, on_lost)

    async def attach(self, token: str, *, ttl: Seconds | None = None) -> Lease:
        """Take up permits that `Lease.detach` let go of, in this or any other process, and return their lease.

        They are as many as were detached, and were never free meanwhile, so a `resize` in between does not matter.
        Otherwise, also in its arguments, errors and cancellation, it is as `AsyncLock.attach`.
        """
        return await self._attach(token, ttl)

    async def resize(self, limit: int) -> None:
        """Set the limit for everybody. Growing grants waiting requests immediately; shrinking takes nothing away.

        While more is held than the new limit, nothing is granted. A waiter that is heavier than the new limit gets
        LimitMismatch. This object uses the new limit from now on; others that were made with another one get
        LimitMismatch, so make those with ``limit=None``. It stays until the next `resize`, also when the semaphore is
        not used for long.

        Raises:
            TypeError, ValueError: a bad limit.
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: as `acquire`.

        On cancellation it goes on: the limit may or may not be set, and this object uses it as soon as it is.
        """
        new = permits(limit, "limit")
        hub = self._at_work()

        def send(commands: Commands, delivery: Delivery) -> Call:
            def answered(call: Call) -> None:
                # Here and now: the next answer may be to a request that was sent with the old limit.
                if call.error is None:
                    self._resized(hub.resources.get(self._keys.id), call.reply, new)
                delivery.done(call)

            return commands.resize(self._keys, new, Delivery(delivery.sent, delivery.expires, answered))

        await hub.ask(send, goes_on=True)

    async def get_limit(self) -> int:
        """Return the server's limit. One round trip.

        Raises LimitMismatch when the server knows none yet; otherwise errors and cancellation as in `statistics`.
        """
        found = (await self._view(0)).limit
        if not found:
            raise LimitMismatch(name=self.name, expected=self.limit, found=None)
        return found

    async def statistics(self) -> SemaphoreStatistics:
        """Return limit, holders, waiters and fence as the server sees them. One round trip.

        Raises Unreachable, CommandRefused, CoordinatorClosed, WrongContext as `acquire`. On cancellation the answer is
        ignored.
        """
        view = await self._view()
        return SemaphoreStatistics(
            limit=view.limit or None,
            held=view.used,
            available=max(0, view.limit - view.used),
            holders=tuple(PermitHolder(text(p.token), p.weight, p.left, p.fence) for p in view.permits),
            fence=view.fence or None,
            waiters=view.waiting + self._behind_tickets(),
            waiting=tuple(text(ticket.token) for ticket in view.tickets),
        )

    async def locked(self) -> bool:
        """Return whether no permit is free. One round trip; errors and cancellation as in `statistics`."""
        view = await self._view(0)
        return view.limit > 0 and view.used >= view.limit

    def __repr__(self) -> str:
        return f"<AsyncSemaphore {self.name!r} limit={self.limit} ttl={self._ttl_ms / 1000}>"

    # -- inside ----------------------------------------------------------------------------------------

    def _resized(self, resource: Resource | None, old: int, new: int) -> None:
        if resource is not None:
            resource.resized(old, new)
        if self._limit:
            self._limit = self._refused.limit = new
            self._default = self._new_request(None, None, None, self._weight)
            self._cohort = None

    def _refusal(self) -> Callable[[Answer, int], SyncError]:
        self._refused.name = self.name
        return functools.partial(self._refused, asked=self._limit)

    def _check_weight(self, weight: int) -> int:
        weight = permits(weight, "weight")
        if self._limit and weight > self._limit:
            raise ValueError(f"a weight of {weight} never fits into the limit {self._limit} of {self.name!r}")
        return weight
