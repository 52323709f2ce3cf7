"""AsyncLock: mutual exclusion between tasks of any processes on any machines that share a Redis."""

from __future__ import annotations

import functools
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, cast, get_args, overload

from ._acquire.binding import CoordinatorLike
from ._acquire.request import Request
from ._client.settings import Client
from ._core.arguments import (
    Name,
    Seconds,
    explains_words_of_redis_py,
    is_async,
    one_of,
    positive_seconds,
    seconds,
    timeout_seconds,
    ttl_ms,
)
from ._core.keys import Engine, lock_keys
from ._core.name_templates import check_template, names_from, without_fields
from ._leases.hold import OnLost
from ._leases.kept_grant import KeptGrant
from ._leases.lease import Lease
from ._primitives.lock_base import LockStatistics, PlainLock
from ._primitives.options import LeaseOptions
from .errors import AcquireTimeout

__all__ = [
    "AsyncLock",
    "ClientSource",
    "LockStatistics",
    "OnBusy",
    "Synchronize",
    "SynchronizeOrSkip",
    "synchronized",
]

P = ParamSpec("P")
R = TypeVar("R")


def gap_ms(polled_every: Seconds) -> int:
    """Return the milliseconds for which a key is left free, so that a client with that polling interval finds it."""
    every = positive_seconds(polled_every, "polled_every")
    if not 0.001 <= every <= 1:
        raise ValueError(f"polled_every must be 0.001 to 1 second, not {every:g}")
    return math.ceil(every * 1500)


class AsyncLock(PlainLock):
    """A fair lock with a lease, a fence, and pushed hand-over.

    Guarantees: at most one live lease at a time by the server's clock; grants in the order of arrival, no
    barging; a release wakes the next waiter by itself; nothing is left behind by a cancelled task or a lost
    reply. What it cannot promise (asynchronous replication, a process that is paused) is what `Lease.fence`
    is for.

    A lock is configuration: it may be shared by any number of tasks, and two objects with the same name are the
    same lock. Possession is the `Lease` that each acquisition returns. It is not reentrant: a task that
    acquires it again inside its own body gets WouldDeadlock; without a body it waits for itself (give a ``timeout``).

    Args:
        client: a `redis.asyncio.Redis` or `RedisCluster` (its implicit coordinator is used) or a `Coordinator`.
        name: the key that holds the holder's token; other Redis locks on that key and this one exclude each other.
            1 to 8192 bytes; in a cluster, one with a ``}`` needs a whole hash tag, as in "orders:{42}".
        ttl: seconds or timedelta that a lease lasts unless renewed, 0.01 to ten years. None: forever (a crashed
            holder then blocks everybody until `force_release`).
        auto_renew: renew leases in the background, in good time, for as long as they are held.
        max_hold: seconds (or timedelta), 0.01 to ten years, after which a lease is not renewed any more and so is lost;
            None: no such limit. With ttl=None it is the ttl.
        on_lost: "cancel" (default): the body of ``async with`` is cancelled when its lease is lost; "event": only
            ``lease.lost`` is set. Either way LeaseLost is raised at the end of the body.
        engine: "auto" (default): decisions are made by Lua scripts on the server, or with WATCH, MULTI and EXEC where
            scripts are not allowed (a warning is logged); "watch": always so, with a round trip more for each
            decision; "lua": CommandRefused instead. Both work on the same lock at the same time.
        share: tasks of this process hand the lease on among themselves, without a command, as long as nobody else
            waits; then others have their turn (``burst`` and ``slice`` of the `Coordinator`). So order is strict among
            processes and among the tasks of one, not over all tasks. Each task still has a lease and a fence of its
            own. Off where it makes no sense: with an identity, ttl=None, engine="watch", or without pushes.
        linger: for how many seconds (or timedelta) what tasks share is kept when none has it, so that to take it again
            costs nothing; 0: not at all. It goes back immediately when another process asks. `release` does not
            wait then.
        min_hold: seconds (or timedelta) for which the lock stays taken after it was acquired, also if it is released
            sooner: for a job that is over before other machines, whose clocks are late, begin it. `release` does not
            wait for that, and the next waiter has it when that time is over. Not more than the ttl, which is how long a
            holder that crashes has it. 0 (default): none. Not with ``share``, or with an identity.
        max_waiting: a request that would wait behind so many others (0 or more) raises QueueFull instead, and leaves
            nothing behind; None (default): any number. The server counts its queue in the step that would add to it,
            including requests whose process died unnoticed. Not with ``share``.
        polled_every: how often clients that are not of this package try to take the key, 0.001 to 1 second (redis-py's
            Lock: its ``sleep``, 0.1). A release hands the lock to the next waiter, so where it is always contended
            such a client never finds the key free. With this, a lock that was handed over for 1.5 seconds is left
            free once, for one and a half times as long as given. None (default): never. Not with ``share``.

    Raises:
        TypeError, ValueError: a bad argument; nothing was sent.

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
        polled_every: Seconds | None = None,
        min_hold: Seconds = 0.0,
        max_waiting: int | None = None,
    ) -> None:
        self._min_hold = seconds(min_hold, "min_hold")
        if self._min_hold:
            if share:
                raise ValueError("min_hold does not go with share=True")
            self._grant_type = KeptGrant
        if polled_every is not None:
            if share:
                raise ValueError("polled_every does not go with share=True")
            self._leave_open = self._release_args = (gap_ms(polled_every),)
        super().__init__(
            client,
            name,
            lock_keys,
            LeaseOptions(ttl, auto_renew, max_hold, on_lost, engine, share, linger, max_waiting),
        )

    def _new_request(self, ttl: Seconds | None, identity: Name | None, timeout: Seconds | None, weight: int) -> Request:
        request = super()._new_request(ttl, identity, timeout, weight)
        if self._min_hold:
            if identity is not None:
                raise ValueError("min_hold does not go with an identity, which any process may release")
            if request.ttl_ms and request.ttl_ms < self._min_hold * 1000:
                raise ValueError(
                    f"min_hold ({self._min_hold:g} s) must not exceed the ttl ({request.ttl_ms / 1000:g} s): a holder "
                    "that crashes has the lock no longer than that"
                )
            request.min_hold = self._min_hold
        return request

    async def attach(self, token: str, *, ttl: Seconds | None = None) -> Lease:
        """Take up a lease that `Lease.detach` let go of, in this or any other process, and return it.

        It has the fence of the detached one, and lasts ``ttl`` seconds (or timedelta; None: this object's own), renewed
        as any. A token is good for one attach: it is replaced in one step on the server, so of two processes that
        have it one gets the lease. One round trip.

        Raises:
            NotHeld: it was attached before, released, or its time was over. Do not go on with its work.
            ValueError: the token is none, or that of another name. TypeError: it is no text.
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: as `acquire`.

        On cancellation the token is good again, for ``ttl``.

        Example:
            ```python
            lease = await lock.acquire()
            token = await lease.detach(ttl=60)  # this process lets go of it
            async with await lock.attach(token):  # another one goes on
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
def synchronized(
    client: ClientSource,
    name: str,
    *,
    ttl: Seconds | None = 30.0,
    timeout: Seconds | None = None,
    on_busy: OnBusy = "raise",
) -> Synchronize | SynchronizeOrSkip:
    """Decorate a coroutine function: calls with the same ``name`` run one at a time, everywhere.

    Each call is the body of an ``async with`` over an `AsyncLock` of its own, with all that promises.

    Args:
        client: a `redis.asyncio.Redis` or `RedisCluster`, a `Coordinator`, or a function without arguments that returns
            one of these. The function is called at each call, so a module may be imported before its client exists.
        name: the lock's; it may refer to the function's arguments: ``"user:{user_id}"``.
        ttl: of the lease, which is renewed while the function runs: seconds or timedelta, 0.01 to ten years; None: no
            end.
        timeout: seconds or timedelta a call waits at most; 0: it does not wait; None: no limit.
        on_busy: "raise" (default): a call that did not get the lock in time raises AcquireTimeout. "skip": it returns
            None and the function is not called; ``timeout=None`` is 0 then. Only when others hold the lock: if Redis
            does not answer it raises, as do locks that the function itself acquires.

    Raises:
        TypeError, ValueError: at decoration, for bad arguments, or when ``name`` refers to something that is not an
            argument of the function. TypeError also at a call for which the function ``client`` returned no client.

    A call raises what the function raises, and what `AsyncLock.acquire` and the end of its ``async with`` do. On
    cancellation it has released the lock, or not acquired it.

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
    client_of_call = _checked(client, without_fields(template), ttl)

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R | None]]:
        names = names_from(function, [template])

        @functools.wraps(function)
        async def locked(*args: P.args, **kwargs: P.kwargs) -> R | None:
            (own,) = names(args, kwargs)
            entered = False
            try:
                lock = AsyncLock(client_of_call(), own, ttl=ttl)
                lock._pattern = template
                async with lock.hold(timeout=limit):
                    entered = True
                    return await function(*args, **kwargs)
            except AcquireTimeout as busy:
                if on_busy == "raise" or entered or not busy.answered:
                    raise
                return None

        return locked

    return decorate


def _checked(client: ClientSource, name: str, ttl: Seconds | None) -> Callable[[], Client | CoordinatorLike]:
    """Check what can be checked before the first call, and return the function that gives the client of a call."""
    if not callable(client) or isinstance(client, type):  # a class: somebody forgot to call it
        given = cast("Client | CoordinatorLike", client)
        AsyncLock(given, name, ttl=ttl)
        return lambda: given
    if is_async(client):
        raise TypeError(f"client must be a function that returns a client, not a coroutine function: {client!r}")
    lock_keys(name.encode())
    if ttl is not None:
        ttl_ms(ttl)
    return client
