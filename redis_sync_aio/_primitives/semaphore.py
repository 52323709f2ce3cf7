"""AsyncSemaphore: a number of permits shared by tasks of any processes on any machines that share a Redis."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

from .._client.settings import Client
from .._core.arguments import Name, Seconds, one_of, permit_limit, permits, timeout_seconds
from .._core.keys import SEMAPHORE, Engine, permit_keys
from .._core.redis_py_words import explains_words_of_redis_py
from .._engine.commands import Answer, Commands
from .._leases.hold import Acquiring, OnLost
from .._leases.implicit import CoordinatorLike
from .._leases.lease import Lease
from .._leases.resource import Resource
from .._scripts.constants import Outcome, stated_limit, wire_limit
from .._transport.call import Call
from ..errors import LimitMismatch, SyncError
from .base import LeaseOptions, PermitPrimitive

__all__ = ["AsyncSemaphore", "OnMismatch"]


OnMismatch: TypeAlias = Literal["raise", "keep", "set"]
"""The treatment of a limit when the server has another one in use."""


class _Refusal:
    """Makes the error for a request that the server did not admit. Knows the limit of now, and not its semaphore.

    ``asked``: the limit when the request was made. Limits are as `wire_limit` returns them.
    """

    name = ""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, answer: Answer, weight: int, *, asked: int) -> SyncError:
        limit = answer.number
        too_heavy = answer.outcome is Outcome.TOO_HEAVY or (limit == self.limit and 0 < limit < weight)
        return LimitMismatch(
            name=self.name,
            expected=stated_limit(asked if too_heavy and limit else self.limit),
            found=stated_limit(limit),
            weight=weight if too_heavy else 0,
            resized=answer.more > 0,
        )


class AsyncSemaphore(PermitPrimitive[Lease]):
    """A fair, weighted semaphore: each permit is a lease, and the limit is one that all processes agree on.

    Guarantees:

    - By the server's clock, the weights of the live leases never exceed the limit, except for those that were held when
      the limit was lowered.
    - Requests are granted in the order of arrival. A heavy request that does not fit yet is not overtaken by a light
      one.
    - One release wakes all waiters that fit then.
    - The permits of a holder that crashed come back when its lease ends.
    - A cancelled task or a lost reply leaves nothing behind.

    The server keeps the limit. The first request sets it. While permits are held or waited for, a request with another
    limit raises LimitMismatch (see ``on_mismatch``). Without holders and waiters the next request sets a new one.
    ``limit=None`` takes the limit of the server. [`resize`][redis_sync_aio.AsyncSemaphore.resize]
    changes it for all, until the next `resize`. A limit that was not set by `resize` is forgotten one to two hours
    after the last grant or renewal (later if the ttl is over 48 minutes).

    Acquiring and releasing cost one round trip each, and O(log permits + log waiters) on the server.

    Args:
        client: As for [`AsyncLock`][redis_sync_aio.AsyncLock].
        name: As for `AsyncLock`, 1 to 8192 bytes. A semaphore and a lock of the same name are independent.
        limit: How many permits there are, 0 (paused, see `resize`) to 1,000,000,000. None: as many as the server says.
        on_mismatch: Whose limit counts while permits are held or waited for under another one, as in a rolling
            deployment that changes the limit. "raise" (default): neither; LimitMismatch. "keep": that of the server,
            until it has no holder and no waiter. "set": this one, from now on. A limit that was set by `resize` is
            kept, and "set" raises then.
        ttl: How long a lease lasts unless it is renewed, 0.01 s to ten years.
        auto_renew: As for `AsyncLock`.
        max_hold: As for `AsyncLock`.
        on_lost: As for `AsyncLock`.
        engine: As for `AsyncLock`.
        share: Tasks of this process hand permits to each other without a command while no other process waits, as for
            `AsyncLock` ([Sharing](https://redis-sync-aio.github.io/redis-sync-aio/guides/sharing/)). A lower limit
            reaches other processes with their next renewal. With several permits, fences then do not rise in the order
            of the grants.
        linger: As for `AsyncLock`.
        max_waiting: As for `AsyncLock`.
        replicas: As for `AsyncLock`.
        replicated_within: As for `AsyncLock`.

    Raises:
        TypeError, ValueError: An argument is bad. Nothing was sent.

    Example:
        ```python
        from redis_sync_aio import AsyncSemaphore

        gpus = AsyncSemaphore(redis, "gpu", 4)
        async with gpus:
            await infer()
        async with gpus.acquire(weight=2, timeout=5) as lease:
            await train(fence=lease.fence)
        ```
    """

    _weight = 1

    _lease_type = Lease
    _kind = "semaphore"

    @explains_words_of_redis_py
    def __init__(
        self,
        client: Client | CoordinatorLike,
        name: Name,
        limit: int | None,
        *,
        on_mismatch: OnMismatch = "raise",
        ttl: Seconds = 30.0,
        auto_renew: bool = True,
        max_hold: Seconds | None = None,
        on_lost: OnLost = "cancel",
        engine: Engine = "auto",
        share: bool = False,
        linger: Seconds = 0.0,
        max_waiting: int | None = None,
        replicas: int = 0,
        replicated_within: Seconds = 1.0,
    ) -> None:
        if ttl is None:  # for callers without a type checker
            raise TypeError("a semaphore needs a ttl: a crashed holder's permit would never come back")
        self._limit = wire_limit(None if limit is None else permit_limit(limit, "limit"))
        one_of(on_mismatch, get_args(OnMismatch), "on_mismatch")
        if not self._limit and on_mismatch != "raise":
            raise ValueError(f"on_mismatch={on_mismatch!r} needs a limit; limit=None takes the server's")
        self._option = b"" if on_mismatch == "raise" else on_mismatch.encode()
        self._refused = _Refusal(self._limit)
        super().__init__(
            client,
            name,
            lambda wire, prefix: permit_keys(wire, SEMAPHORE.ending, prefix),
            LeaseOptions(
                ttl, auto_renew, max_hold, on_lost, engine, share, linger, max_waiting, replicas, replicated_within
            ),
        )

    @property
    def limit(self) -> int | None:
        """The limit that this object asks for: that of its making, or of its last `resize`. None: that of the server.

        0 pauses the semaphore. Another process may have set another limit since; `statistics` has the one in use.
        """
        return stated_limit(self._limit)

    @explains_words_of_redis_py
    def acquire(
        self,
        *,
        weight: int = 1,
        timeout: Seconds | None = None,
        ttl: Seconds | None = None,
        identity: Name | None = None,
        label: str | None = None,
    ) -> Acquiring[Lease]:
        """Wait for the turn and return a lease of ``weight`` permits. One round trip if they are free.

        Args:
            weight: How many permits, 1 to the limit: all of them or none.
            timeout: How long to wait (seconds). 0: do not wait. None: forever.
            ttl: The ttl of this lease. None: the ttl of this semaphore.
            identity: A name of the caller, kept as the token of the holder. A request with the same identity, from any
                process, gets the same permits (their number does not change), and may release them.
            label: A text for people, as for `AsyncLock.acquire`.

        Raises:
            AcquireTimeout: The permits were not granted in time. QueueFull is a subclass.
            LimitMismatch: The server has another limit (see ``on_mismatch`` of this class), or one that is too small
                for the weight. Nothing was changed.
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.
            TypeError, ValueError: An argument is bad. Nothing was sent.

        On cancellation, whatever the server did for the request is undone, without delaying the cancellation.
        """
        within = None if timeout is None else timeout_seconds(timeout)
        request = self._request(ttl, identity, label, wait=within != 0, weight=self._check_weight(weight))
        return Acquiring(self._acquired(request, within or None), self._on_lost)

    @explains_words_of_redis_py
    def try_acquire(
        self, *, weight: int = 1, ttl: Seconds | None = None, identity: Name | None = None, label: str | None = None
    ) -> Acquiring[Lease | None]:
        """Return a lease, or None if the permits are taken or contended. One round trip.

        Arguments, errors and cancellation are those of `acquire`, without AcquireTimeout.
        """
        request = self._request(ttl, identity, label, wait=False, weight=self._check_weight(weight))
        return Acquiring(self._tried(request), self._on_lost)

    async def attach(self, token: str, *, ttl: Seconds | None = None) -> Lease:
        """Take up permits that [`Lease.detach`][redis_sync_aio.Lease.detach] let go of, in this or any other process.

        The lease has as many permits as were detached. They were never free meanwhile, so a `resize` in between does
        not matter. Arguments, errors and cancellation are those of
        [`AsyncLock.attach`][redis_sync_aio.AsyncLock.attach].
        """
        return await self._attach(token, ttl)

    async def resize(self, limit: int) -> None:
        """Set the limit for all clients, until the next `resize`. One round trip.

        A higher limit grants waiting requests immediately. A lower limit takes nothing away: nothing is granted while
        more than that is held. A waiter that is heavier than the new limit gets LimitMismatch.

        A limit of 0 pauses the semaphore: holders keep, renew and release their permits, waiters of any weight keep
        their places, and `try_acquire` returns None until a `resize` raises the limit.

        This object uses the new limit from now on. Objects that were made with another limit get LimitMismatch, so make
        those with ``limit=None``.

        Args:
            limit: 0 (pause) to 1,000,000,000.

        Raises:
            TypeError, ValueError: The limit is bad. Nothing was sent.
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: As for `acquire`.

        On cancellation the command continues. The limit may or may not be set; this object uses it as soon as it is.
        """
        new = wire_limit(permit_limit(limit, "limit"))
        hub = self._at_work()

        def send(commands: Commands, call: Call) -> None:
            then = call.done

            def answered(call: Call) -> None:
                # Here and now: the next answer may be to a request that was sent with the old limit.
                if call.error is None:
                    self._resized(hub.resources.get(self._keys.id), call.reply, new)
                then(call)

            call.done = answered
            commands.resize(self._keys, new, call)

        await hub.ask(send, goes_on=True)

    async def get_limit(self) -> int:
        """Return the limit on the server, 0 while it is paused. One round trip.

        Raises:
            LimitMismatch: The server knows no limit yet.
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: As for `acquire`.
        """
        found = stated_limit((await self._limit_and_queue())[0])
        if found is None:
            raise LimitMismatch(name=self.name, expected=self.limit, found=None)
        return found

    async def locked(self) -> bool:
        """Return whether no permit is free. Two round trips; errors and cancellation are those of `statistics`."""
        return (await self.statistics()).available == 0

    def __repr__(self) -> str:
        return f"<AsyncSemaphore {self.name!r} limit={self.limit} ttl={self._ttl_ms / 1000}>"

    # -- inside ----------------------------------------------------------------------------------------

    def _resized(self, resource: Resource | None, old: int, new: int) -> None:
        if resource is not None:
            resource.resized(old, new)
        if self._limit:
            self._limit = self._refused.limit = new
            self._prepare_requests()
            self._cohort = None

    def _refusal(self) -> Callable[[Answer, int], SyncError]:
        self._refused.name = self.name
        return functools.partial(self._refused, asked=self._limit)

    def _check_weight(self, weight: int) -> int:
        if weight is self._weight:
            return weight
        weight = permits(weight, "weight")
        if 0 < self._limit < weight:
            raise ValueError(f"a weight of {weight} never fits into the limit {self._limit} of {self.name!r}")
        return weight
