"""AsyncReentrantLock: a lock that its owner may acquire again."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from weakref import ref

from .._client.settings import Client, Same, running_loop
from .._core.arguments import Name, Seconds, timeout_seconds
from .._core.keys import Engine, lock_keys
from .._core.redis_py_words import explains_words_of_redis_py
from .._leases.acquisition import Request
from .._leases.grant import ended
from .._leases.hold import Acquiring, LeaseContext, OnLost
from .._leases.implicit import CoordinatorLike
from .._leases.lease import GuardingLease
from ..errors import AcquireTimeout, NotHeld, WrongContext
from .base import Face, LeaseOptions
from .lock import PlainLock
from .multilock import GroupGrant, LeaseGroup

__all__ = ["AsyncReentrantLock"]


class AsyncReentrantLock(Face[PlainLock], LeaseContext[GuardingLease]):
    """A fair lock that its holder may acquire again: for helpers that lock and call each other.

    Guarantees: those of [`AsyncLock`][redis_sync_aio.AsyncLock]. It is the same lock as an `AsyncLock` of that name,
    and they exclude each other. In addition:

    - An owner that holds the lock gets one more lease immediately, without a command.
    - The lock is free when every lease was released, in any order.
    - A loss is a loss of all leases. An acquisition inside a lost one raises LeaseLost until all that are inside have
      left.

    **The owner** is the task that acquires, in all its awaits and calls. Tasks that it starts (``create_task``,
    ``gather``, task groups, ``asyncio.wait_for`` on Python 3.11) do not inherit the lock, and wait their turn.

    To share it among tasks, name an identity: any hashable value, such as a request id or the parent task. The same
    ``identity`` and lock name, with one client or one `Coordinator` in one event loop, are one owner, whatever the lock
    object. It stays in this process. Acquire before you share: tasks of one owner that ask together while it holds
    nothing wait for each other.

    The options below count for the outermost acquisition. An inner one joins its lease as it is.

    Args:
        client: As for `AsyncLock`.
        name: As for `AsyncLock`.
        ttl: As for `AsyncLock`.
        auto_renew: As for `AsyncLock`.
        max_hold: As for `AsyncLock`.
        on_lost: As for `AsyncLock`.
        engine: As for `AsyncLock`.

    Raises:
        TypeError, ValueError: An argument is bad. Nothing was sent.

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
        replicas: int = 0,
        replicated_within: Seconds = 1.0,
    ) -> None:
        options = LeaseOptions(
            ttl, auto_renew, max_hold, on_lost, engine, replicas=replicas, replicated_within=replicated_within
        )
        self._on = PlainLock(client, name, lock_keys, options)
        self._on._kind = "reentrant"
        super().__init__(on_lost)
        self._client = client

    # -- acquiring -------------------------------------------------------------------------------------

    @explains_words_of_redis_py
    def acquire(
        self,
        *,
        timeout: Seconds | None = None,
        ttl: Seconds | None = None,
        identity: Hashable | None = None,
        label: str | None = None,
    ) -> Acquiring[GuardingLease]:
        """Return a lease: immediately and without a command if the owner holds the lock, otherwise in its turn.

        Each call returns another lease, and each is released separately. All have the same fence and token.

        Args:
            timeout: How long to wait (seconds). 0: do not wait. None: forever.
            ttl: The ttl of the outermost lease. None: the ttl of this lock.
            identity: The owner that acquires: any hashable value. None: the current task.
            label: A text for people, as for `AsyncLock.acquire`. Inside another lease it is not used, nor is ``ttl``.

        Raises:
            LeaseLost: The owner holds a lease of this lock that is lost. Leave its body, or release it, first.
            AcquireTimeout, Unreachable, CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.
            TypeError, ValueError: An argument is bad. Nothing was sent.

        On cancellation, whatever the server did for the request is undone, without delaying the cancellation. An
        acquisition inside another lease does not wait, so it cannot be cancelled.
        """
        within = timeout_seconds(timeout)
        request = self._on._request(ttl, None, label, wait=within != 0)
        self._check_identity(identity)
        return Acquiring(self._acquired(request, within or None, identity), self._on_lost)

    async def _acquired(self, request: Request, within: float | None, identity: Hashable | None) -> GuardingLease:
        key = self._key(identity)
        if (group := LeaseGroup.find(key)) is not None:
            return self._owned(group, identity)
        try:
            grant = await self._on._grant(request, within)
        except AcquireTimeout as error:
            if not self._on._leases():
                raise
            raise AcquireTimeout(
                f"{self.name!r} was not granted in time: another task, or owner, of this process holds it. If "
                "that waits for this one, let both have the same identity: acquire(identity=...); else wait longer",
                name=self.name,
                remaining=error.remaining,
            ) from error
        return self._owned(LeaseGroup(key, (grant,)), identity)

    @explains_words_of_redis_py
    def try_acquire(
        self, *, ttl: Seconds | None = None, identity: Hashable | None = None, label: str | None = None
    ) -> Acquiring[GuardingLease | None]:
        """Return a lease, or None if others hold the lock or wait for it. One round trip, or none as for `acquire`.

        Arguments, errors and cancellation are those of `acquire`, without AcquireTimeout.
        """
        request = self._on._request(ttl, None, label, wait=False)
        self._check_identity(identity)
        return Acquiring(self._tried(request, identity), self._on_lost)

    async def _tried(self, request: Request, identity: Hashable | None) -> GuardingLease | None:
        key = self._key(identity)
        if (group := LeaseGroup.find(key)) is not None:
            return self._owned(group, identity)
        grant = await self._on._try(request, None)
        return None if grant is None else self._owned(LeaseGroup(key, (grant,)), identity)

    # -- releasing and looking -------------------------------------------------------------------------

    async def release(self, *, identity: Hashable | None = None) -> None:
        """Release the latest lease of this lock that the owner has not released yet.

        Args:
            identity: The owner. None: the current task. If it has none, the lease of a task that has ended is released,
                if there is exactly one.

        Raises:
            NotHeld: The owner holds no lease of this lock.
            LeaseLost, Unreachable: As for `Lease.release`.

        On cancellation the release continues in the background.
        """
        inside = LeaseGroup.shares_of(self._key(identity))
        if not inside and identity is None and len(left := self._left_behind()) == 1:
            inside = left
        if not inside:
            who = "this task" if identity is None else f"the identity {identity!r}"
            raise NotHeld(f"{self.name!r} is not held by {who}: release the lease itself, or name the owner of it")
        await inside[-1].release()

    def depth(self, *, identity: Hashable | None = None) -> int:
        """Return how many leases of this lock the owner (None: the current task) has not released. No command."""
        return len(LeaseGroup.shares_of(self._key(identity)))

    async def force_release(self) -> bool:
        """Take the lock away from its holder, as `AsyncLock.force_release`."""
        return await self._on.force_release()

    async def locked(self) -> bool:
        """Return whether the lock has a holder, including the current task. As for `AsyncLock.locked`."""
        return await self._on.locked()

    def __repr__(self) -> str:
        return repr(self._on).replace("AsyncLock", "AsyncReentrantLock", 1)

    # -- inside ----------------------------------------------------------------------------------------

    def _owned(self, group: LeaseGroup, identity: Hashable | None) -> GuardingLease:
        """Return one lease more. A lease of a named owner does not belong to the task that acquires it."""
        share = group.enter(GroupGrant)
        if identity is not None:
            share.acquirer = None
        return GuardingLease(share, self._itself)

    def _left_behind(self) -> list[GroupGrant]:
        """Return the leases of tasks that have ended, as `asyncio.wait_for` of Python 3.11 makes for each acquire."""
        groups = [grant.group for grant in self._on._leases()]
        shares = [share for group in groups if isinstance(group, LeaseGroup) for share in group.shares]
        return [it for it in shares if type(it) is GroupGrant and it.acquirer is not None and ended(it.acquirer)]

    def _check_identity(self, identity: Hashable | None) -> None:
        try:
            hash(identity)
        except TypeError:
            raise TypeError(f"an identity for {self.name!r} must be hashable, not {identity!r}") from None

    def _key(self, identity: Hashable | None) -> Hashable:
        loop = running_loop()
        self._check_identity(identity)
        if identity is None:
            identity = asyncio.current_task()
            if identity is None:
                raise WrongContext(f"{self.name!r} is used outside a task: name an identity, acquire(identity=...)")
        # A task that forgets to release must not stay alive by that.
        return (
            loop,
            Same(self._client),
            self._on._keys.all[0],
            ref(identity) if isinstance(identity, asyncio.Task) else identity,
        )
