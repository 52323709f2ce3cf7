"""AsyncLock: mutual exclusion between tasks of any processes on any machines that share a Redis."""

from __future__ import annotations

from dataclasses import dataclass

from redis.asyncio import Redis

from ._engine.lua import read_inspect, ticket_token
from ._hold import OnLost
from ._keys import lock_keys
from ._primitive import SHOWN, Primitive
from ._types import Name, Seconds, text
from .coordinator import Coordinator


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


class AsyncLock(Primitive):
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
        super().__init__(client, name, lock_keys, ttl=ttl, auto_renew=auto_renew, max_hold=max_hold, on_lost=on_lost)

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
        reply = await self._ask(lambda engine, *rest: engine.inspect(self._keys, SHOWN, *rest))
        view = read_inspect(reply)
        return LockStatistics(
            holder=None if view.holder is None else text(view.holder),
            remaining=view.left,
            fence=view.fence,
            foreign=view.holder is not None and view.holder != view.fence_token,
            waiters=view.waiting,
            waiting=tuple(text(ticket_token(ticket)) for ticket in view.tickets),
        )

    async def _holders(self) -> str:
        holder = (await self.statistics()).holder
        return "" if holder is None else repr(holder)

    def __repr__(self) -> str:
        return f"<AsyncLock {self.name!r} ttl={self._ttl_ms / 1000 if self._ttl_ms else None}>"
