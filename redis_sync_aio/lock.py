"""AsyncLock: mutual exclusion between tasks of any processes on any machines that share a Redis."""

from __future__ import annotations

import functools
import math
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, cast, get_args, overload

from ._acquire.acquisition import acquire
from ._acquire.request import Request
from ._acquire.resource import Resource
from ._acquire.waits import data_in
from ._client.settings import Client
from ._core.arguments import (
    Name,
    Seconds,
    explains_words_of_redis_py,
    is_async,
    one_of,
    positive_seconds,
    require_bool,
    timeout_seconds,
    ttl_ms,
)
from ._core.display import text
from ._core.keys import Engine, lock_keys, robust_keys
from ._core.name_templates import check_template, names_from, without_fields
from ._engine.commands import read_inspect
from ._leases.hold import OnLost
from ._leases.lease import Lease
from ._primitives.base import SHOWN, Primitive
from ._recovery.record import adopting
from ._transport.call import understood
from .coordinator import Coordinator
from .errors import AcquireTimeout, CommandRefused, Unreachable

__all__ = ["AsyncLock", "ClientSource", "LockStatistics", "OnBusy", "Synchronize", "SynchronizeOrSkip", "synchronized"]

P = ParamSpec("P")
R = TypeVar("R")


def gap_ms(polled_every: Seconds) -> int:
    """Return for how long a key is left free so that a client that tries so often finds it."""
    every = positive_seconds(polled_every, "polled_every")
    if not 0.001 <= every <= 1:
        raise ValueError(f"polled_every must be 0.001 to 1 second, not {every:g}")
    return math.ceil(every * 1500)


@dataclass(frozen=True, slots=True)
class LockStatistics:
    """What the server knows of a lock at one moment.

    Attributes:
        holder: token or identity of the holder; None when it is free.
        remaining: seconds until the holder's lease ends if it is not renewed; None when the lock is free, or
            held without a ttl.
        fence: fence of the latest grant; None when none is remembered. Of a process that shares its lease it is the
            last one of those reserved for its tasks.
        foreign: held by a client that is not of this package (it knows no queue and no fence).
        waiters: how many requests are queued, including those whose process died unnoticed. Of a process that shares
            one stands for all its tasks; those of this process are counted one by one.
        waiting: tokens or identities of the first requests in the queue, in order, 100 at most.
        task: name of the task of this process that has what the process holds, if tasks share it.
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
        """Whether somebody holds the lock."""
        return self.holder is not None


class AsyncLock(Primitive):
    """A fair lock with a lease, a fence, and pushed hand-over.

    Guarantees: at most one live lease at a time by the server's clock; grants in the order of arrival, no
    barging; a release wakes the next waiter by itself; nothing is left behind by a cancelled task or a lost
    reply. What it can not promise (asynchronous replication, a process that is paused) is what `Lease.fence`
    is for.

    A lock is configuration: it may be shared by any number of tasks, and two objects with the same name are the
    same lock. Possession is the `Lease` that each acquisition returns. It is not reentrant: a task that
    acquires it again inside its own body gets WouldDeadlock; without a body it waits for itself (give a ``timeout``).

    Args:
        client: a `redis.asyncio.Redis` or `RedisCluster` (its implicit coordinator is used) or a `Coordinator`.
        name: the key that holds the holder's token; other Redis locks on that key and this one exclude each other.
            1 to 8192 bytes; one with a ``}`` has to have a whole hash tag, as in "orders:{42}" ("{}" is none).
        ttl: seconds or timedelta that a lease lasts unless renewed, 0.01 to ten years. None: for ever (a crashed
            holder then blocks everybody until `force_release`).
        auto_renew: renew leases in the background, in good time, for as long as they are held.
        max_hold: seconds (or timedelta), 0.01 to ten years, after which a lease is not renewed any more and so is lost;
            None: no such limit. With ttl=None it is the ttl.
        on_lost: "cancel" (default): the body of ``async with`` is cancelled when its lease is lost; "event": only
            ``lease.lost`` is set. Either way LeaseLost is raised at the end of the body.
        engine: "auto" (default): decisions are made by Lua scripts on the server, or by WATCH, MULTI and EXEC where
            scripts are not allowed (a warning is logged); "watch": always so, with a round trip more for each
            decision; "lua": CommandRefused instead. Both work on the same lock at the same time.
        robust: keep a record of the work, so that a holder whose predecessor ended without a release is told
            (`Lease.abandoned`, `Lease.record`). An acquisition takes one round trip more, and raises LeaseLost if the
            lock was lost within that. Make all locks of the name robust: one that is not excludes them as ever,
            but neither reads nor changes the record. Of several leases of one identity the one that acquired last
            records; the others get StaleWriter. It needs scripts: engine="auto" is "lua" then.
        share: tasks of this process hand the lease on among themselves, without a command, as long as nobody else
            waits; then others have their turn (``burst`` and ``slice`` of the `Coordinator`). So order is strict among
            processes and among the tasks of one, not over all tasks. Each task still has a lease and a fence of its
            own. Off where it makes no sense: with an identity, ttl=None, robust, engine="watch", or without pushes.
        linger: for how many seconds (or timedelta) what tasks share is kept when none has it, so that to take it again
            costs nothing; 0: not at all. It goes back at once when somebody else asks. `release` does not wait then.
        polled_every: how often clients that are not of this package try to take the key, 0.001 to 1 second (redis-py's
            Lock: its ``sleep``, 0.1). A release hands the lock to the next waiter, so where it is always contended
            such a client never finds the key free. With this, a lock that was handed over for 1.5 seconds is left
            free once, for one and a half times as long as given. None (default): never. Not with ``share`` or
            ``robust``.

    Raises:
        TypeError, ValueError: a bad argument; nothing was sent.

    Example:
        lock = AsyncLock(redis, "orders:42", ttl=30)
        async with lock as lease:
            await write_order(fence=lease.fence)
    """

    @explains_words_of_redis_py
    def __init__(
        self,
        client: Client | Coordinator,
        name: Name,
        *,
        ttl: Seconds | None = 30.0,
        auto_renew: bool = True,
        max_hold: Seconds | None = None,
        on_lost: OnLost = "cancel",
        engine: Engine = "auto",
        robust: bool = False,
        share: bool = False,
        linger: Seconds = 0.0,
        polled_every: Seconds | None = None,
    ) -> None:
        if polled_every is not None:
            if share or robust:
                raise ValueError("polled_every does not go with share=True or robust=True")
            self._leave_open = self._closing = (gap_ms(polled_every),)
        self._robust = require_bool(robust, "robust")
        if robust and engine == "watch":
            raise ValueError('a robust lock needs scripts: engine must be "lua" or "auto", not "watch"')
        super().__init__(
            client,
            name,
            robust_keys if robust else lock_keys,
            ttl=ttl,
            auto_renew=auto_renew,
            max_hold=max_hold,
            on_lost=on_lost,
            engine="lua" if robust and engine == "auto" else engine,
            share=share,
            linger=linger,
        )
        if robust:
            self._closing = (b"*", b"0")

    async def force_release(self) -> bool:
        """Take the lock away from whoever holds it; the next waiter gets it. Return whether it was held.

        The holder, if it lives, finds out at its next renewal and loses its lease (reason "taken" or "expired"). A
        process that shares it among its tasks is told, and stops handing it on within its ``slice``.
        The record of a robust lock stays: the next holder finds it abandoned.
        Sent once: Unreachable means that it may or may not have happened, and so does a cancellation.
        Also raises CommandRefused, CoordinatorClosed, WrongContext as `acquire`.
        """
        return bool(await self._ask(lambda engine, *rest: engine.force(self._keys, *rest)))

    async def locked(self) -> bool:
        """Return whether anybody holds the lock. One round trip; errors and cancellation as in `statistics`."""
        return (await self.statistics()).locked

    async def statistics(self) -> LockStatistics:
        """Return holder, waiters, fence and remaining time as the server sees them. One round trip.

        Raises Unreachable, CommandRefused, CoordinatorClosed, WrongContext as `acquire`. On cancellation the answer is
        ignored.
        """
        reply = await self._ask(lambda engine, *rest: engine.inspect(self._keys, SHOWN, *rest))
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

    def _ticket(self, resource: Resource, request: Request) -> Coroutine[Any, Any, Lease | None]:
        lease = acquire(resource, request)
        return adopting(lease, resource, request.timeout) if self._robust else lease

    async def _data(self) -> str | None:
        resource = self._latest_resource
        if resource is None or resource.held_until is not None or resource.leases:
            return None  # it has a ttl, or is held here
        with suppress(Unreachable, CommandRefused):  # it is taken: that is known
            return data_in(read_inspect(await self._ask(lambda engine, *rest: engine.inspect(self._keys, 0, *rest))))
        return None

    async def _holders(self) -> str:
        holder = (await self.statistics()).holder
        return "" if holder is None else repr(holder)

    def __repr__(self) -> str:
        return f"<AsyncLock {self.name!r} ttl={self._ttl_ms / 1000 if self._ttl_ms else None}>"


OnBusy: TypeAlias = Literal["raise", "skip"]
"""What a call does that did not get the lock in time."""
ClientSource: TypeAlias = Client | Coordinator | Callable[[], Client | Coordinator]
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
        @synchronized(redis, "user:{user_id}", timeout=5)
        async def charge(user_id: int, amount: int) -> None: ...

        @synchronized(lambda: app.state.redis, "nightly-report", on_busy="skip")
        async def report() -> None: ...
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
                async with AsyncLock(client_of_call(), own, ttl=ttl).hold(timeout=limit):
                    entered = True
                    return await function(*args, **kwargs)
            except AcquireTimeout as busy:
                if on_busy == "raise" or entered or not busy.answered:
                    raise
                return None

        return locked

    return decorate


def _checked(client: ClientSource, name: str, ttl: Seconds | None) -> Callable[[], Client | Coordinator]:
    """Check what can be checked before the first call, and return the function that gives the client of a call."""
    if not callable(client) or isinstance(client, type):  # a class: somebody forgot to call it
        given = cast("Client | Coordinator", client)
        AsyncLock(given, name, ttl=ttl)
        return lambda: given
    if is_async(client):
        raise TypeError(f"client must be a function that returns a client, not a coroutine function: {client!r}")
    lock_keys(name.encode())
    if ttl is not None:
        ttl_ms(ttl)
    return client
