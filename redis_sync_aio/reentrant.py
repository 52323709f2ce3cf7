"""AsyncReentrantLock: a lock that its owner may acquire again."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from weakref import ref

from ._acquire.binding import CoordinatorLike
from ._client.settings import Client, Same, running_loop
from ._core.arguments import Name, Seconds, explains_words_of_redis_py, timeout_seconds, ttl_ms
from ._core.keys import Engine, lock_keys
from ._leases.hold import Hold, LeaseContext, OnLost
from ._leases.lease import Lease
from ._primitives.lease_group import GroupGrant, LeaseGroup
from ._primitives.lock_base import LockStatistics, PlainLock
from ._primitives.options import LeaseOptions
from .errors import AcquireTimeout, NotHeld, WrongContext

__all__ = ["AsyncReentrantLock"]


class AsyncReentrantLock(LeaseContext[Lease]):
    """A fair lock that its holder may acquire again: for helpers that lock and call each other.

    Guarantees: those of `AsyncLock`; it is the same lock as an `AsyncLock` of that name, and they exclude each
    other. An owner that holds it gets one more lease immediately, without a command. The lock is free when every
    lease was released, in any order. A lease that is lost is lost for all of them: an acquisition that would be
    inside a lost one raises LeaseLost, until all that are inside have left.

    **The owner** is the task that acquires, in all of its awaits and calls. Another task waits its turn, also a
    child, also in the same process: tasks that are started inside a section (``create_task``, ``gather``, task
    groups, ``asyncio.wait_for`` on Python 3.11) do not inherit it. To share it, name an owner: any hashable
    value, a request id for instance, or the parent task itself. All that use one client, or one `Coordinator`,
    in one event loop, with the same lock name and the same ``owner`` are one owner, whatever lock object and
    task. Acquire before you share: tasks of one owner that ask together while it holds nothing wait for each other.

    Args:
        client: a `redis.asyncio.Redis` or `RedisCluster` (its implicit coordinator is used) or a `Coordinator`.
        name: the key that holds the holder's token, as for `AsyncLock`.
        ttl: seconds or timedelta that a lease lasts unless renewed, 0.01 to ten years. None: forever.
        auto_renew: renew leases in the background, for as long as they are held.
        max_hold: seconds (or timedelta) after which a lease is not renewed any more, and so is lost; None: no limit.
        on_lost: "cancel" (default): the body is cancelled when its lease is lost; "event": only ``lease.lost`` is set.
        engine: "auto" (default), "lua" or "watch": how the server decides, as for `AsyncLock`.

    These options count for the outermost acquisition; one that is inside joins that lease as it is.
            one that is inside joins that lease as it is.

    Raises:
        TypeError, ValueError: a bad argument; nothing was sent.

    Example:
        ```python
        from redis_sync_aio import AsyncReentrantLock

        lock = AsyncReentrantLock(redis, "account:7")

        async def withdraw(amount):
            async with lock:
                await book(-amount)

        async def withdraw_all():
            async with lock:
                await withdraw(await balance())
        ```
    """

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
    ) -> None:
        self._lock = PlainLock(client, name, lock_keys, LeaseOptions(ttl, auto_renew, max_hold, on_lost, engine))
        self._lock._kind = "reentrant"
        super().__init__(on_lost)
        self._client = client

    # -- acquiring -------------------------------------------------------------------------------------

    async def acquire(
        self, *, timeout: Seconds | None = None, ttl: Seconds | None = None, owner: Hashable | None = None
    ) -> Lease:
        """Return a lease: immediately and without a command if the owner holds the lock, else when it is its turn.

        Each call returns a lease of its own, with the fence and the token they have in common. Releasing one, also
        twice, releases none of the others.

        Args:
            timeout: seconds or timedelta to wait at most; 0: do not wait; None: forever.
            ttl: for the outermost lease, instead of the lock's own; checked and not used inside another one.
            owner: the owner that acquires; None: the current task.

        Raises:
            LeaseLost: the owner holds a lease of it that is lost. Leave it first (``release()``, which raises
                LeaseLost as well, or the end of the body).
            AcquireTimeout, Unreachable, CommandRefused, CoordinatorClosed, WrongContext: as `AsyncLock.acquire`.
            TypeError, ValueError: a bad argument; nothing was sent.

        On cancellation whatever the server did for this request is undone, without delaying the cancellation. Inside
        another lease there is nothing to wait for and so nothing to cancel.
        """
        timeout_seconds(timeout)
        key = self._key(owner)
        if (inside := self._enter(key, owner, ttl)) is not None:
            return inside
        try:
            grant = await self._lock._grant(self._lock._request(ttl, None, timeout))
        except AcquireTimeout as error:
            if not self._lock._leases():
                raise
            raise AcquireTimeout.by_another_owner(self.name, remaining=error.remaining) from error
        return self._owned(LeaseGroup(key, (grant,)), owner)

    async def try_acquire(self, *, ttl: Seconds | None = None, owner: Hashable | None = None) -> Lease | None:
        """Return a lease, or None when others hold the lock or wait for it. One round trip, or none as in `acquire`.

        Arguments, errors and cancellation as in `acquire`; AcquireTimeout is not raised.
        """
        key = self._key(owner)
        if (inside := self._enter(key, owner, ttl)) is not None:
            return inside
        grant = await self._lock._try(self._lock._request(ttl, None, 0))
        return None if grant is None else self._owned(LeaseGroup(key, (grant,)), owner)

    def hold(
        self,
        *,
        timeout: Seconds | None = None,
        ttl: Seconds | None = None,
        owner: Hashable | None = None,
        on_lost: OnLost | None = None,
    ) -> Hold[Lease]:
        """Return an async context manager that acquires, yields the lease, and releases.

        Arguments as in `acquire`, and ``on_lost`` instead of the lock's own. They are checked here and now. The
        owner, if not given, is the task that enters.

        When the lease is lost each task that is inside is cancelled once, in its outermost body, and that raises
        LeaseLost; the bodies in it see the cancellation. Leaving a body raises, in this order of precedence: the
        body's own exception, a cancellation from outside, LeaseLost, the error of the release.
        """
        self._lock.hold(timeout=timeout, ttl=ttl)  # bad arguments fail here
        self._check_owner(owner)
        return self._hold_by(lambda: self.acquire(timeout=timeout, ttl=ttl, owner=owner), on_lost)

    # -- releasing and looking -------------------------------------------------------------------------

    async def release(self, *, owner: Hashable | None = None) -> None:
        """Release the owner's latest lease of this lock that was not released yet.

        Raises:
            NotHeld: the owner (the current task, if not given) holds no lease of it.
            LeaseLost, Unreachable: as `Lease.release`.

        On cancellation the release goes on in the background.
        """
        inside = LeaseGroup.shares_of(self._key(owner))
        if not inside:
            who = "this task" if owner is None else f"the owner {owner!r}"
            raise NotHeld.by_owner(self.name, who)
        await inside[-1].release()

    def depth(self, *, owner: Hashable | None = None) -> int:
        """Return how many leases of this lock the owner (None: the current task) has not released. No command."""
        return len(LeaseGroup.shares_of(self._key(owner)))

    async def force_release(self) -> bool:
        """Take the lock away from its holder, as `AsyncLock.force_release`."""
        return await self._lock.force_release()

    async def locked(self) -> bool:
        """Return whether anybody holds the lock, the current task included. As `AsyncLock.locked`."""
        return await self._lock.locked()

    async def statistics(self) -> LockStatistics:
        """Return holder, waiters, fence and remaining time as the server sees them. As `AsyncLock.statistics`."""
        return await self._lock.statistics()

    @property
    def name(self) -> str:
        """The name of the lock, as text; bytes that are not UTF-8 are shown escaped."""
        return self._lock.name

    def __repr__(self) -> str:
        return repr(self._lock).replace("AsyncLock", "AsyncReentrantLock", 1)

    # -- inside ----------------------------------------------------------------------------------------

    def _enter(self, key: Hashable, owner: Hashable | None, ttl: Seconds | None) -> Lease | None:
        """Return one lease more if the owner holds the lock."""
        group = LeaseGroup.find(key)
        if group is None:
            return None
        if ttl is not None:
            ttl_ms(ttl)  # not used, but checked
        return self._owned(group, owner)

    def _owned(self, group: LeaseGroup, owner: Hashable | None) -> Lease:
        """Return one lease more. A lease of a named owner does not belong to the task that acquires it."""
        share = group.enter(GroupGrant)
        if owner is not None:
            share.acquirer = None
        return Lease(share)

    def _check_owner(self, owner: Hashable | None) -> None:
        try:
            hash(owner)
        except TypeError:
            raise TypeError(f"the owner of {self.name!r} must be hashable, not {owner!r}") from None

    def _key(self, owner: Hashable | None) -> Hashable:
        loop = running_loop()
        self._check_owner(owner)
        if owner is None:
            owner = asyncio.current_task()
            if owner is None:
                raise WrongContext.no_task(self.name)
        # A task that forgets to release must not stay alive by that.
        return (
            loop,
            Same(self._client),
            self._lock._keys.all[0],
            ref(owner) if isinstance(owner, asyncio.Task) else owner,
        )
