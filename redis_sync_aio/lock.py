"""AsyncLock: mutual exclusion between tasks of any processes on any machines that share a Redis."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import ParamSpec, TypeVar

from redis.asyncio import Redis

from ._engine.lua import FOR_EVER, Released, read_inspect, ticket_token
from ._hold import Hold, OnLost, check_on_lost, ending
from ._implicit import coordinator_for
from ._keys import lock_keys
from ._link.call import Reply
from ._link.client import check_client, encode
from ._types import Name, Seconds, require_bool, text, timeout_seconds, ttl_ms
from ._waiting.local import LocalName
from ._waiting.ticket import Request, acquire
from .coordinator import Coordinator, Send
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
        max_hold: seconds after which a lease is not renewed any more and so is lost; None: no such limit. With
            ttl=None it is the ttl.
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
        self._auto_renew = require_bool(auto_renew, "auto_renew")
        self._max_hold = None if max_hold is None else ttl_ms(max_hold, "max_hold") / 1000
        self._on_lost: OnLost = check_on_lost(on_lost)
        self._holds: list[Hold] = []  # bodies entered by `async with` on the lock itself
        self._default = self._request(None, None, wait=True)
        # What the latest acquisition used; only so that the next one need not look it up.
        self._coordinator: Coordinator | None = None
        self._local_name: LocalName | None = None

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
        if timeout is None and ttl is None and identity is None:
            request = self._default
        else:
            limit = timeout_seconds(timeout)
            request = self._request(ttl, identity, wait=limit != 0, timeout=limit or None)
        local = self._local()
        lease = await acquire(local, request)
        if lease is None:
            raise AcquireTimeout(
                f"{self.name!r} is taken, and timeout=0 does not wait",
                name=self.name,
                remaining=local.holder_remaining(),
            )
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
        self._request(ttl, identity, wait=limit != 0, timeout=limit or None)
        chosen: OnLost = self._on_lost if on_lost is None else check_on_lost(on_lost)
        return Hold(lambda: self.acquire(timeout=timeout, ttl=ttl, identity=identity), chosen)

    async def __aenter__(self) -> Lease:
        hold = Hold(self.acquire, self._on_lost)
        lease = await hold.__aenter__()
        self._holds.append(hold)
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._holds.pop(ending(self._holds)).__aexit__(kind, error, trace)

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
        held = coordinator_for(self._source).held(self._keys)
        if identity is None:
            if not held:
                raise NotHeld(f"{self.name!r} is not held by this process: release the lease where it was acquired")
            await held[0].release()
            return
        token = self._encode(identity, "identity")
        for lease in held:
            if lease.wire_token == token:
                await lease.release()
                return
        found = await self._ask(lambda engine, *rest: engine.release(self._keys, token, b"", *rest))
        if found != Released.RELEASED:
            holder = (await self.statistics()).holder
            raise NotHeld(
                f"{self.name!r} is not held by {text(token)!r} but by {holder!r}: nothing was changed"
                if holder is not None
                else f"{self.name!r} is not held by {text(token)!r}, nor by anybody else"
            )

    async def force_release(self) -> bool:
        """Take the lock away from whoever holds it; the next waiter gets it. Return whether it was held.

        The holder, if it lives, finds out at its next renewal and loses its lease (reason "taken" or "expired").
        Sent once: Unreachable means that it may or may not have happened.
        """
        return bool(await self._ask(lambda engine, *rest: engine.force(self._keys, *rest)))

    async def locked(self) -> bool:
        """Return whether anybody holds the lock."""
        return (await self.statistics()).locked

    async def statistics(self) -> LockStatistics:
        """Return holder, waiters, fence and remaining time as the server sees them. One round trip."""
        reply = await self._ask(lambda engine, *rest: engine.inspect(self._keys, SHOWN_WAITERS, *rest))
        view = read_inspect(reply)
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
        coordinator = self._coordinator
        if coordinator is None or not coordinator.usable():
            coordinator = self._coordinator = coordinator_for(self._source)
        local = self._local_name = coordinator.local(self._keys, self._local_name)
        return local

    async def _ask(self, send: Send) -> Reply:
        return await coordinator_for(self._source).ask(send)

    def _encode(self, value: Name, what: str) -> bytes:
        return encode(self._client, value, what)

    def _request(
        self, ttl: Seconds | None, identity: Name | None, *, wait: bool, timeout: float | None = None
    ) -> Request:
        ms = self._ttl_ms if ttl is None else ttl_ms(ttl)
        if self._max_hold is not None:
            most = int(self._max_hold * 1000)
            ms = min(ms, most) if ms else most
        return Request(
            ms,
            self._auto_renew and ms != FOR_EVER,
            self._max_hold,
            None if identity is None else self._encode(identity, "identity"),
            wait=wait,
            timeout=timeout,
        )
