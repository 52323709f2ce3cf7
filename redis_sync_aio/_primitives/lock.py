"""AsyncLock: mutual exclusion between tasks of any processes on any machines that share a Redis; AsyncRobustLock."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, cast, get_args, overload

from .._client.settings import Client
from .._core.arguments import Name, Seconds, is_async, one_of, timeout_seconds, ttl_ms
from .._core.keys import ROBUST, Engine, lock_keys, robust_keys
from .._core.name_templates import check_template, names_from, without_fields
from .._core.redis_py_words import explains_words_of_redis_py
from .._leases.acquisition import Request
from .._leases.hold import OnLost
from .._leases.implicit import CoordinatorLike
from .._leases.lease import BaseLease, Lease
from .._leases.resource import Resource
from .._leases.waits import data_in
from .._recovery.record import RobustGrant, RobustLease, adopting
from ..errors import AcquireTimeout, CommandRefused, Unreachable
from .base import LeaseOptions, Primitive, by_scripts

__all__ = [
    "AsyncLock",
    "AsyncRobustLock",
    "ClientSource",
    "OnBusy",
    "RobustLease",
    "Synchronize",
    "SynchronizeOrSkip",
    "synchronized",
]

# -- The common part of locks whose holder is one value under one key: looking at it, and taking it away -------


L = TypeVar("L", bound=BaseLease)


class LockBase(Primitive[L]):
    """Base of the locks; they differ in what their leases promise."""

    _shown_as = ""
    """The name of the class in messages; empty: its own."""

    async def force_release(self) -> bool:
        """Take the lock away from its holder, give it to the next waiter, and return whether it was held.

        A living holder keeps running until its next renewal, and loses its lease then (reason "taken" or "expired"):
        let the protected resource check the fence. A process that shares the lease stops handing it on within 5
        milliseconds. The command is sent once and not retried.

        Raises:
            Unreachable: The reply was lost. The lock may or may not have been taken away.
            CommandRefused, CoordinatorClosed, WrongContext: As for `acquire`.

        On cancellation the lock may or may not have been taken away.
        """
        return bool(await self._at_work().ask(lambda commands, call: commands.force(self._keys, call)))

    async def locked(self) -> bool:
        """Return whether the lock has a holder. One round trip; errors and cancellation are those of `statistics`."""
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


P = ParamSpec("P")
R = TypeVar("R")


class AsyncLock(PlainLock):
    """A fair lock with a lease, a fence, and pushed hand-over.

    Guarantees:

    - By the server's clock there is at most one live lease at a time.
    - Requests are granted in the order in which the server received them. No request barges, not even after a release.
    - A release wakes the next waiter by a push. Waiters poll only where the server does not allow pushes.
    - A cancelled task or a lost reply leaves nothing behind on the server.

    A process that was paused past the end of its lease, or a failover that loses a write, may break this: let the
    protected resource check [`Lease.fence`][redis_sync_aio.Lease.fence].

    A lock is not reentrant. A task that acquires it again inside its own ``async with`` body gets WouldDeadlock; with a
    bare lease from ``acquire()`` it waits for itself. Use [`AsyncReentrantLock`][redis_sync_aio.AsyncReentrantLock].

    Args:
        client: A `redis.asyncio.Redis` or `RedisCluster`, which uses the implicit coordinator of that client, or a
            [`Coordinator`][redis_sync_aio.Coordinator].
        name: The Redis key of the token, 1 to 8192 bytes. It excludes locks of other libraries on that key. In a
            cluster, a name with a ``}`` needs a whole hash tag, as in "orders:{42}".
        ttl: How long a lease lasts unless it is renewed, 0.01 s to ten years. None: forever, so a holder that crashes
            blocks all others until `force_release`.
        auto_renew: Renew leases in the background for as long as they are held.
        max_hold: How long a lease is renewed, 0.01 s to ten years. After that the lease is lost.
            None: no limit. With ``ttl=None`` it is the ttl.
        on_lost: "cancel" (default): the loss of the lease cancels the body of ``async with``. "event": the loss only
            makes ``lease.lost`` True. In both cases the end of the body raises LeaseLost.
        engine: How decisions are made. "auto" (default): by Lua scripts, or WATCH where scripts are not allowed (a
            warning is logged). "watch": always WATCH, one more round trip for each decision. "lua": always scripts;
            CommandRefused where they are not allowed. All work on the same lock at the same time.
        share: Tasks of this process hand the lease to each other without a command while no other process waits.
            As soon as one does, it is handed on at most 64 times, and for 5 milliseconds. The order is then strict
            among processes, and among the tasks of a process, but not over all tasks. Each task still gets a lease and
            a fence of its own. Has no effect with an identity, ``ttl=None``, ``engine="watch"``, or without pushes.
        linger: How long the process keeps a shared lease that none of its tasks uses, so that the next ``acquire``
            costs no command (seconds). 0 (default): not at all. The lease goes back immediately when
            another process asks for it. `release` does not wait for that.
        max_waiting: How many requests may wait, 0 or more. A further one raises QueueFull and leaves nothing behind.
            None (default): any number. The server counts in the step that queues, with requests whose process died
            unnoticed. Not with ``share``.
        replicas: How many replicas must have a grant before the caller has the lease, 0 (default) to 1000; see
            [Confirmed by replicas](https://redis-sync-aio.github.io/redis-sync-aio/guarantees/#confirmed-by-replicas).
            Needs a ttl and scripts: "auto" means "lua" then.
        replicated_within: How long a grant waits for them, after ``timeout``: seconds or timedelta, 0.01 or more. The
            first grant also waits for a connection.

    Raises:
        TypeError, ValueError: An argument is bad. Nothing was sent.

    Example:
        ```python
        from redis_sync_aio import AsyncLock

        lock = AsyncLock(redis, "orders:42", ttl=30)
        async with lock as lease:
            await write_order(fence=lease.fence)
        ```
    """

    _kind = "lock"

    @explains_words_of_redis_py
    def __init__(
        self,
        client: Client | CoordinatorLike,
        name: Name,
        *,
        ttl: Seconds | None = 30.0,
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
        super().__init__(
            client,
            name,
            lock_keys,
            LeaseOptions(
                ttl, auto_renew, max_hold, on_lost, engine, share, linger, max_waiting, replicas, replicated_within
            ),
        )

    async def attach(self, token: str, *, ttl: Seconds | None = None) -> Lease:
        """Take up a lease that [`Lease.detach`][redis_sync_aio.Lease.detach] let go of, in this or any other process.

        The lease has the fence of the detached one. A token is good for one attach: only one of two processes that have
        it gets the lease. One round trip.

        Args:
            token: The text that `Lease.detach` returned.
            ttl: How long the lease lasts unless it is renewed (seconds). None: the ttl of this lock.

        Raises:
            NotHeld: The lease was attached before, or released, or has ended. Do not go on with its work.
            ValueError: The text is not a token, or is the token of another name.
            TypeError: The token is not a str.
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: As for `acquire`.

        On cancellation the token is good again, for ``ttl``.

        Example:
            ```python
            lease = await lock.acquire()
            token = await lease.detach(ttl=60)  # this process lets go of it
            async with await lock.attach(token):  # another one continues
                ...
            ```
        """
        return await self._attach(token, ttl)


OnBusy: TypeAlias = Literal["raise", "skip"]
"""The reaction of a call that did not get the lock in time."""
ClientSource: TypeAlias = Client | CoordinatorLike | Callable[[], Client | CoordinatorLike]
"""A client, or a function that returns the client of a call."""


class Synchronize(Protocol):
    """A decorator that keeps the type of a coroutine function."""

    def __call__(self, function: Callable[P, Awaitable[R]], /) -> Callable[P, Coroutine[Any, Any, R]]: ...


class SynchronizeOrSkip(Protocol):
    """A decorator of a coroutine function that may return None instead."""

    def __call__(self, function: Callable[P, Awaitable[R]], /) -> Callable[P, Coroutine[Any, Any, R | None]]: ...


@overload
def synchronized(
    client: ClientSource,
    name: str,
    *,
    ttl: Seconds | None = 30.0,
    timeout: Seconds | None = None,
    on_busy: Literal["raise"] = "raise",
) -> Synchronize: ...
@overload
def synchronized(
    client: ClientSource,
    name: str,
    *,
    ttl: Seconds | None = 30.0,
    timeout: Seconds | None = None,
    on_busy: Literal["skip"],
) -> SynchronizeOrSkip: ...
@explains_words_of_redis_py
def synchronized(
    client: ClientSource,
    name: str,
    *,
    ttl: Seconds | None = 30.0,
    timeout: Seconds | None = None,
    on_busy: OnBusy = "raise",
) -> Synchronize | SynchronizeOrSkip:
    """Decorate a coroutine function so that calls with the same ``name`` run one at a time, on all machines.

    Each call is the body of an ``async with`` over an [`AsyncLock`][redis_sync_aio.AsyncLock] of its own, and has the
    guarantees of that class.

    Args:
        client: A `redis.asyncio.Redis` or `RedisCluster`, a `Coordinator`, or a function without arguments that returns
            one of these. The function is called at each call, so a module may be imported before its client exists.
        name: The name of the lock. It may refer to arguments of the function: ``"user:{user_id}"``.
        ttl: How long the lease lasts unless it is renewed, 0.01 s to ten years. The lease is
            renewed while the function runs. None: forever.
        timeout: How long a call waits for the lock (seconds). 0: not at all. None: no limit.
        on_busy: The reaction of a call that did not get the lock in time. "raise" (default): AcquireTimeout. "skip":
            the call returns None without calling the function, and ``timeout=None`` means 0; if Redis does not answer,
            or the function itself times out at a lock, it raises.

    Raises:
        TypeError: At decoration, for an argument of the wrong type; or at a call, if ``client`` returned no client.
        ValueError: At decoration: an argument is out of range, or ``name`` refers to something that is not an argument
            of the function.

    A call raises whatever the function raises, and the errors of an ``async with`` over
    [`AsyncLock.acquire`][redis_sync_aio.AsyncLock.acquire]. On cancellation the lock is released, or was not acquired.

    Example:
        ```python
        from redis_sync_aio import synchronized

        @synchronized(redis, "user:{user_id}", timeout=5)
        async def charge(user_id: int, amount: int) -> None: ...

        @synchronized(lambda: app.state.redis, "nightly-report", on_busy="skip")
        async def report() -> None: ...
        ```
    """
    template = check_template(name, "name")
    one_of(on_busy, get_args(OnBusy), "on_busy")
    limit = timeout_seconds(timeout)
    if limit is None and on_busy == "skip":
        limit = 0.0
    client_of_call = checked_source(client, without_fields(template), ttl)

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R | None]]:
        names = names_from(function, [template])

        @functools.wraps(function)
        async def locked(*args: P.args, **kwargs: P.kwargs) -> R | None:
            (own,) = names(args, kwargs)
            entered = False
            try:
                lock = AsyncLock(client_of_call(), own, ttl=ttl)
                lock._pattern = template
                async with lock.acquire(timeout=limit):
                    entered = True
                    return await function(*args, **kwargs)
            except AcquireTimeout as busy:
                if on_busy == "raise" or entered or not busy.answered:
                    raise
                return None

        return locked

    return decorate


def checked_source(client: ClientSource, name: str, ttl: Seconds | None) -> Callable[[], Client | CoordinatorLike]:
    """Check the arguments before the first call, and return the function that gives the client of a call."""
    if not callable(client) or isinstance(client, type):  # a class: the call was forgotten
        given = cast("Client | CoordinatorLike", client)
        AsyncLock(given, name, ttl=ttl)
        return lambda: given
    if is_async(client):
        raise TypeError(f"client must be a function that returns a client, not a coroutine function: {client!r}")
    lock_keys(name.encode())
    if ttl is not None:
        ttl_ms(ttl)
    return client


# -- AsyncRobustLock: a lock whose next holder learns how far a crashed holder got -----------------------------


class AsyncRobustLock(LockBase[RobustLease]):
    """A lock that keeps a record of the work, so that the next holder learns how far a crashed one got.

    Guarantees: those of [`AsyncLock`][redis_sync_aio.AsyncLock], and one more. After a holder that ended without a
    clean release, the next one finds its progress and undo steps
    ([`RobustLease.abandoned`][redis_sync_aio.types.RobustLease.abandoned]).

    An acquisition takes one round trip more, and raises LeaseLost if the lock is lost within it. An `AsyncLock` of the
    same name excludes these locks, but neither reads nor changes the record. If one identity has several leases, the
    latest records and the others get StaleWriter. `force_release` leaves the record to the next holder.

    Args:
        client: As for `AsyncLock`.
        name: As for `AsyncLock`.
        ttl: As for `AsyncLock`.
        auto_renew: As for `AsyncLock`.
        max_hold: As for `AsyncLock`.
        on_lost: As for `AsyncLock`.
        engine: "auto" (default) or "lua". It needs scripts: CommandRefused without them, ValueError for "watch".
        replicas: As for `AsyncLock`. The record is not confirmed.
        replicated_within: As for `AsyncLock`.

    Raises:
        TypeError, ValueError: An argument is bad. Nothing was sent.

    Example:
        ```python
        from redis_sync_aio import AsyncRobustLock

        lock = AsyncRobustLock(redis, "order:7", ttl=30)
        async with lock as lease:
            if lease.abandoned:
                await finish_or_undo(lease.progress)
            await lease.record({"charged": 120})
        ```
    """

    _kind = "robust"
    _grant_type = RobustGrant
    _lease_type = RobustLease
    _release_args = (b"*", b"0")  # released by its identity: whichever of its leases wrote the record

    @explains_words_of_redis_py
    def __init__(
        self,
        client: Client | CoordinatorLike,
        name: Name,
        *,
        ttl: Seconds | None = 30.0,
        auto_renew: bool = True,
        max_hold: Seconds | None = None,
        on_lost: OnLost = "cancel",
        engine: Engine = "auto",
        replicas: int = 0,
        replicated_within: Seconds = 1.0,
    ) -> None:
        by_scripts(engine, ROBUST.title)
        super().__init__(
            client,
            name,
            robust_keys,
            LeaseOptions(
                *(ttl, auto_renew, max_hold, on_lost, "lua" if engine == "auto" else engine),
                replicas=replicas,
                replicated_within=replicated_within,
            ),
        )

    def _acquire_alone(
        self, resource: Resource, request: Request, within: float | None
    ) -> Coroutine[Any, Any, RobustGrant | None]:
        return adopting(super()._acquire_alone(resource, request, within), resource, within)
