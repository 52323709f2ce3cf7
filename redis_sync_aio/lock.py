"""AsyncLock: mutual exclusion between tasks of any processes on any machines that share a Redis."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import ParamSpec, TypeVar

from redis.asyncio import Redis

from ._clock import now
from ._engine.lua import FOR_EVER, read_inspect, ticket_token
from ._hold import Hold, OnLost
from ._keys import lock_keys
from ._link.call import Call, Reply
from ._types import Name, Seconds, require_bool, seconds, text, timeout_seconds, ttl_ms
from ._waiting.local import LocalName
from ._waiting.ticket import Request, acquire
from .coordinator import Coordinator, check_client, coordinator_for
from .errors import AcquireTimeout, NotHeld
from .lease import Lease

P = ParamSpec("P")
R = TypeVar("R")

SHOWN_WAITERS = 100


@dataclass(frozen=True, slots=True)
class LockStatistics:
    """What the server knows of a lock at one moment.

    Attributes:
        holder: token or identity of the holder; None when it is free.
        remaining: seconds until the holder's lease ends if it is not renewed; None when the lock is free, or
            held without a ttl.
        fence: fence of the latest grant; None when none is remembered.
        foreign: held by a client that is not of this package (it knows no queue and no fence).
        waiters: how many requests are queued, including those whose process died unnoticed.
        waiting: tokens or identities of the first waiters, in order, 100 at most.
    """

    holder: str | None
    remaining: float | None
    fence: int | None
    foreign: bool
    waiters: int
    waiting: tuple[str, ...]

    @property
    def locked(self) -> bool:
        """Whether somebody holds the lock."""
        return self.holder is not None


class AsyncLock:
    """A fair lock with a lease, a fence, and pushed hand-over.

    Guarantees: at most one live lease at a time by the server's clock; grants in the order of arrival, no
    barging; a release wakes the next waiter by itself; nothing is left behind by a cancelled task or a lost
    reply. What it can not promise (asynchronous replication, a process that is paused) is what `Lease.fence`
    is for.

    A lock is configuration: it may be shared by any number of tasks, and two objects with the same name are the
    same lock. Possession is the `Lease` that each acquisition returns. It is not reentrant: a task that
    acquires it twice waits for itself (give a ``timeout``).

    Args:
        client: a `redis.asyncio.Redis` (its implicit coordinator is used) or a `Coordinator`.
        name: the key that holds the holder's token; other Redis locks on that key and this one exclude each other.
            1 to 8192 bytes; braces must form a whole hash tag, or none.
        ttl: seconds or timedelta that a lease lasts unless renewed, 0.01 to ten years. None: for ever (a crashed
            holder then blocks everybody until `force_release`).
        auto_renew: renew leases in the background, in good time, for as long as they are held.
        max_hold: seconds after which a lease is not renewed any more and so is lost; None: no such limit.
        on_lost: "cancel" (default): the body of ``async with`` is cancelled when its lease is lost; "event": only
            ``lease.lost`` is set. Either way LeaseLost is raised at the end of the body.

    Raises:
        TypeError, ValueError: a bad argument; nothing was sent.

    Example:
        lock = AsyncLock(redis, "orders:42", ttl=30)
        async with lock as lease:
            await write_order(fence=lease.fence)
    """

    def __init__(
        self,
        client: Redis | Coordinator,
        name: Name,
        *,
        ttl: Seconds | None = 30.0,
        auto_renew: bool = True,
        max_hold: Seconds | None = None,
        on_lost: OnLost = "cancel",
    ) -> None:
        self._source = client
        if not isinstance(client, Coordinator):
            check_client(client)
        self._client: Redis = client.client if isinstance(client, Coordinator) else client
        self._keys = lock_keys(self._encode(name, "name"))
        self._ttl_ms = FOR_EVER if ttl is None else ttl_ms(ttl)
        self._auto_renew = require_bool(auto_renew, "auto_renew") and ttl is not None
        self._max_hold = None if max_hold is None else ttl_ms(max_hold, "max_hold") / 1000
        self._on_lost = _check_on_lost(on_lost)
        self._holds: list[Hold] = []

    # -- acquiring -------------------------------------------------------------------------------------

    async def acquire(
        self,
        *,
        timeout: Seconds | None = None,
        ttl: Seconds | None = None,
        identity: Name | None = None,
    ) -> Lease:
        """Wait for the turn and return the lease. One round trip when free; handed over by a push when not.

        Args:
            timeout: seconds or timedelta to wait at most; 0: do not wait; None: for ever.
            ttl: for this lease, instead of the lock's own.
            identity: the caller's own name, stored as it is in the lock's key. The same identity asking again
                gets the same lease again, from any process, and may release it from any process.

        Raises:
            AcquireTimeout: others held it all the time.
            Unreachable: Redis did not answer (within ``timeout``, or ``retry_for`` of the coordinator).
            CommandRefused: the server answered with an error (out of memory, no permission, wrong key type …).
            CoordinatorClosed, WrongContext: the coordinator can not be used, or was closed meanwhile.
            TypeError, ValueError: a bad argument; nothing was sent.

        On cancellation whatever the server did for this request is undone, without delaying the cancellation.
        """
        limit = timeout_seconds(timeout)
        lease = await acquire(self._local(), self._request(ttl, identity, wait=limit != 0, timeout=limit))
        if lease is None:
            raise AcquireTimeout(f"{text(self._keys.name)!r} is taken, and timeout=0 does not wait")
        return lease

    async def try_acquire(self, *, ttl: Seconds | None = None, identity: Name | None = None) -> Lease | None:
        """Return a lease, or None when the lock is held or somebody waits for it. One round trip.

        Arguments, errors and cancellation as in `acquire`; AcquireTimeout is not raised.
        """
        return await acquire(self._local(), self._request(ttl, identity, wait=False))

    def hold(
        self,
        *,
        timeout: Seconds | None = None,
        ttl: Seconds | None = None,
        identity: Name | None = None,
        on_lost: OnLost | None = None,
    ) -> Hold:
        """Return an async context manager that acquires, yields the lease, and releases.

        Arguments as in `acquire`, and ``on_lost`` instead of the lock's own. They are checked here and now.

        Leaving the body raises, in this order of precedence: the body's own exception, a cancellation from
        outside, LeaseLost, the error of the release.
        """
        limit = timeout_seconds(timeout)
        self._request(ttl, identity, wait=limit != 0, timeout=limit)
        chosen = self._on_lost if on_lost is None else _check_on_lost(on_lost)
        return Hold(lambda: self.acquire(timeout=timeout, ttl=ttl, identity=identity), chosen)

    async def __aenter__(self) -> Lease:
        hold = Hold(self.acquire, self._on_lost)
        lease = await hold.__aenter__()
        self._holds.append(hold)
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._holds.pop(self._which_hold()).__aexit__(kind, error, trace)

    def _which_hold(self) -> int:
        """The body that ends is this task's latest; else the latest of a task that ended; else the latest."""
        import asyncio

        task = asyncio.current_task()
        newest_first = range(len(self._holds) - 1, -1, -1)
        for index in newest_first:
            if self._holds[index].task is task:
                return index
        for index in newest_first:
            entered_by = self._holds[index].task
            if entered_by is None or entered_by.done():
                return index
        return len(self._holds) - 1

    def wrap(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        """Decorate a coroutine function: each call runs while holding the lock."""

        @functools.wraps(function)
        async def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            async with self.hold():
                return await function(*args, **kwargs)

        return locked

    # -- releasing and looking -------------------------------------------------------------------------

    async def release(self, *, identity: Name | None = None) -> None:
        """Release this process's lease of this lock, or with ``identity`` the lease of that identity.

        Raises:
            NotHeld: this process holds no lease of it; or the lock is not held by that identity (then nothing
                was changed).
            LeaseLost, Unreachable: as `Lease.release`.
        """
        local = self._local()
        if identity is None:
            lease = next(iter(local.leases), None)
            if lease is None:
                local.forget_if_idle()
                raise NotHeld(f"{local.name!r} is not held by this process; release the Lease you acquired")
            await lease.release()
            return
        token = self._encode(identity, "identity")
        for lease in list(local.leases):
            if lease.wire_token == token:
                await lease.release()
                return
        if not await self._run(lambda done, end: local.hub.engine.release(self._keys, token, b"", end, done)) == 1:
            holder = (await self.statistics()).holder
            raise NotHeld(
                f"{local.name!r} is not held by {text(token)!r} but by {holder!r}: nothing was changed"
                if holder is not None
                else f"{local.name!r} is not held by {text(token)!r}, nor by anybody else"
            )

    async def force_release(self) -> bool:
        """Take the lock away from whoever holds it; the next waiter gets it. Return whether it was held.

        The holder, if it lives, finds out at its next renewal and loses its lease (reason "taken" or "expired").
        Sent once: Unreachable means that it may or may not have happened.
        """
        return bool(await self._run(lambda done, end: self._local().hub.engine.force(self._keys, end, done)))

    async def locked(self) -> bool:
        """Return whether anybody holds the lock."""
        return (await self.statistics()).locked

    async def statistics(self) -> LockStatistics:
        """Return holder, waiters, fence and remaining time as the server sees them. One round trip."""
        view = read_inspect(
            await self._run(
                lambda done, end: self._local().hub.engine.inspect(self._keys, SHOWN_WAITERS, end, done)
            )
        )
        return LockStatistics(
            holder=None if view.holder is None else text(view.holder),
            remaining=view.left,
            fence=view.fence,
            foreign=view.holder is not None and view.holder != view.fence_token,
            waiters=view.waiting,
            waiting=tuple(text(ticket_token(ticket)) for ticket in view.tickets),
        )

    @property
    def name(self) -> str:
        """The name of the lock."""
        return text(self._keys.name)

    def __repr__(self) -> str:
        return f"<AsyncLock {self.name!r} ttl={self._ttl_ms / 1000 if self._ttl_ms else None}>"

    # -- inside ----------------------------------------------------------------------------------------

    def _local(self) -> LocalName:
        return coordinator_for(self._source).local(self._keys)

    def _encode(self, value: Name, what: str) -> bytes:
        if isinstance(value, str):
            value = self._client.get_encoder().encode(value)
        if not isinstance(value, bytes):
            raise TypeError(f"{what} must be str or bytes, not {value!r}")
        if not value:
            raise ValueError(f"{what} must not be empty")
        return value

    def _request(
        self, ttl: Seconds | None, identity: Name | None, *, wait: bool, timeout: float | None = None
    ) -> Request:
        ms = self._ttl_ms if ttl is None else ttl_ms(ttl)
        if self._max_hold is not None and ms:
            ms = min(ms, int(self._max_hold * 1000))
        return Request(
            ms,
            self._auto_renew,
            self._max_hold,
            None if identity is None else self._encode(identity, "identity"),
            wait=wait,
            timeout=timeout,
        )

    async def _run(self, send: Callable[[Callable[[Call], None], float], Call]) -> Reply:
        """Run one command of ours and return its reply."""
        import asyncio

        local = self._local()
        outcome: asyncio.Future[Reply] = local.hub.loop.create_future()

        def done(call: Call) -> None:
            if outcome.done():
                return
            if call.error is None:
                outcome.set_result(call.reply)
            else:
                outcome.set_exception(call.error)

        call = send(done, now() + local.hub.retry_for)
        try:
            return await outcome
        finally:
            call.drop()
            local.forget_if_idle()


def _check_on_lost(value: OnLost) -> OnLost:
    if value not in ("cancel", "event"):
        raise ValueError(f'on_lost must be "cancel" or "event", not {value!r}')
    return value


def synchronized(
    client: Redis | Coordinator,
    name: str,
    *,
    ttl: Seconds = 30.0,
    timeout: Seconds | None = None,
) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
    """Decorate a coroutine function: calls with the same ``name`` run one at a time, everywhere.

    ``name`` may refer to the function's arguments: ``"user:{user_id}"``. ``timeout`` as in `AsyncLock.acquire`.

    Raises:
        ValueError: at decoration, when ``name`` refers to something that is not an argument.
    """
    import inspect
    import string

    check_client(client) if not isinstance(client, Coordinator) else None
    fields = {field for _, field, _, _ in string.Formatter().parse(name) if field is not None}
    seconds(ttl, "ttl")

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        signature = inspect.signature(function)
        unknown = {field for field in fields if field.split(".")[0].split("[")[0] not in signature.parameters}
        if unknown:
            raise ValueError(f"{name!r} refers to {sorted(unknown)}, not arguments of {function.__qualname__}")

        @functools.wraps(function)
        async def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            async with AsyncLock(client, name.format(**bound.arguments), ttl=ttl).hold(timeout=timeout):
                return await function(*args, **kwargs)

        return locked

    return decorate
