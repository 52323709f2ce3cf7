"""AsyncMultiLock: several locks together, all of them or none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType

from .._acquire.binding import CoordinatorLike
from .._client.settings import Client, Same, running_loop
from .._core.arguments import Name, Seconds, timeout_seconds
from .._core.cancellation import undo_in
from .._core.clock import now
from .._core.display import shown
from .._core.keys import Engine, lock_keys
from .._core.redis_py_words import explains_words_of_redis_py
from .._leases.choice import to_release
from .._leases.grant import Grant
from .._leases.hold import Acquiring, LeaseContext, OnLost
from .._leases.lease import GuardingLease
from ..errors import AcquireTimeout
from .followed import followed
from .lease_group import GroupGrant, LeaseGroup
from .lock_base import PlainLock
from .options import LeaseOptions, Wanted
from .try_all import try_acquire_all

if TYPE_CHECKING:
    from .._inspection.views import NameView

__all__ = ["AsyncMultiLock", "MultiLease"]


class MultiGrant(GroupGrant):
    """A grant of several locks."""

    @property
    def name(self) -> str:
        """Names of the locks as one text."""
        return ", ".join(one.name for one in self.lease_group.members)


class MultiLease(GuardingLease):
    """One lease over several locks: the result of `AsyncMultiLock.acquire`.

    It lasts until the earliest deadline of the locks, is lost when one of them is lost, and is released as a whole.
    ``token`` has the tokens of all locks, in the order of the names, separated by spaces.

    Attributes:
        fences: The fence of each lock, by name. A resource checks the fence of the name that protects it.
        fence: The greatest of them. It rises from one lease over the same names to the next. Use it only for resources
            that are never used under one of the names alone.
    """

    def __init__(self, grant: MultiGrant, maker: ReferenceType[object]) -> None:
        """Wrap ``grant`` of the primitive ``maker``. The package makes leases; you get one from ``acquire()``."""
        super().__init__(grant, maker)
        self.fences: Mapping[str, int] = MappingProxyType({one.name: one.fence for one in grant.lease_group.members})

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the locks, each once, in the order in which they were acquired."""
        return tuple(self.fences)

    @property
    def name(self) -> str:
        """The names of the locks as one text, with ", " between them."""
        return ", ".join(self.fences)


class AsyncMultiLock(LeaseContext[MultiLease]):
    """Several locks as one: all of them, or none.

    Guarantees:

    - Each name is the same lock as ``AsyncLock(client, name)``, with the same queue and fences. Nobody barges past the
      waiters for any of the names.
    - Callers that name the same locks in different orders cannot deadlock. A request that waits for a lock holds only
      locks before it, in the order of the names as bytes.
    - Every timeout, cancellation and error gives all locks back.
    - One lease covers all. If one lock is lost, the others are given back and the body is cancelled.

    Free locks are taken in one round trip. If their names have the same hash tag (as in "{user}:1" and "{user}:2"), one
    script takes all or none. Otherwise there is one command for each, in one write, so a caller that gets only some may
    hold those for a moment.

    A multi-lock is not reentrant: a task whose body holds one of the locks gets WouldDeadlock.

    Args:
        client: As for [`AsyncLock`][redis_sync_aio.AsyncLock].
        names: Names of locks, at least one, in any order. A name that occurs twice is one lock.
        ttl: How long a lease lasts unless it is renewed: seconds or timedelta, 0.01 to ten years. None: forever.
        auto_renew: As for `AsyncLock`.
        max_hold: As for `AsyncLock`.
        on_lost: As for `AsyncLock`.
        engine: As for `AsyncLock`.

    Raises:
        TypeError, ValueError: An argument is bad (also: no name, or a single str instead of a list). Nothing was sent.

    Example:
        ```python
        from redis_sync_aio import AsyncMultiLock

        async with AsyncMultiLock(redis, ["account:1", "account:2"]) as lease:
            await transfer(fences=lease.fences)
        ```
    """

    @explains_words_of_redis_py
    def __init__(
        self,
        client: Client | CoordinatorLike,
        names: Iterable[Name],
        *,
        ttl: Seconds | None = 30.0,
        auto_renew: bool = True,
        max_hold: Seconds | None = None,
        on_lost: OnLost = "cancel",
        engine: Engine = "auto",
    ) -> None:
        if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
            raise TypeError(f"names must be several names, as in ['a', 'b'], not {shown(names)}; AsyncLock takes one")
        options = LeaseOptions(ttl, auto_renew, max_hold, on_lost, engine)
        locks: dict[bytes, PlainLock] = {}
        for name in names:
            lock = PlainLock(client, name, lock_keys, options)
            locks[lock._keys.name] = lock
        if not locks:
            raise ValueError("names is empty: a multi-lock needs one name at least")
        self._locks = tuple(locks[key] for key in sorted(locks))
        if len(set(self.names)) < len(locks):
            raise ValueError(f"some names differ only in bytes that are not text: {', '.join(self.names)}")
        super().__init__(on_lost)
        self._client = client

    # -- acquiring -------------------------------------------------------------------------------------

    @explains_words_of_redis_py
    def acquire(
        self, *, timeout: Seconds | None = None, ttl: Seconds | None = None, label: str | None = None
    ) -> Acquiring[MultiLease]:
        """Wait for all locks and return one lease over them. One round trip if all are free.

        Args:
            timeout: How long to wait for all of them together: seconds or timedelta. 0: do not wait. None: forever.
            ttl: The ttl of this lease. None: the ttl of this lock.
            label: A text for people, as for `AsyncLock.acquire`.

        Raises:
            AcquireTimeout: Others held one of them for too long. The ``name`` of the error says which.
            WouldDeadlock: A body of this task holds one of them.
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.
            TypeError, ValueError: An argument is bad. Nothing was sent.

        On cancellation, and after an error, everything that was acquired is given back, without delaying the
        cancellation or the error.
        """
        within = timeout_seconds(timeout)
        self._locks[0]._request(ttl, None, 0, label=label)  # bad arguments fail here
        return Acquiring(self._acquired(within, Wanted(ttl, label)), self._on_lost)

    async def _acquired(self, within: float | None, wanted: Wanted) -> MultiLease:
        grant = await self._followed(partial(self._acquire, within, wanted), wanted, waits=within != 0)
        assert grant is not None  # it raises where there is no grant
        return MultiLease(grant, self._itself)

    async def _acquire(self, within: float | None, wanted: Wanted) -> MultiGrant:
        try:
            return self._grant(await (self._all_or_none(wanted) if within == 0 else self._acquire_all(within, wanted)))
        except AcquireTimeout as error:
            here = any(lock._leases() for lock in self._locks if lock.name == error.name)
            raise AcquireTimeout.of_several(self.names, error, within=within, held_here=here) from error

    @explains_words_of_redis_py
    def try_acquire(self, *, ttl: Seconds | None = None, label: str | None = None) -> Acquiring[MultiLease | None]:
        """Return a lease, or None if one of the locks is held or somebody waits for it. One round trip.

        Arguments, errors and cancellation are those of `acquire`, without AcquireTimeout. Unless the names have one
        hash tag, two callers that try at the same moment may each meet what the other has just taken, and both get
        None.
        """
        self._locks[0]._request(ttl, None, 0, label=label)  # bad arguments fail here
        return Acquiring(self._tried(Wanted(ttl, label)), self._on_lost)

    async def _tried(self, wanted: Wanted) -> MultiLease | None:
        grant = await self._followed(partial(self._try, wanted), wanted, waits=False)
        return None if grant is None else MultiLease(grant, self._itself)

    async def _try(self, wanted: Wanted) -> MultiGrant | None:
        try:
            return self._grant(await self._all_or_none(wanted))
        except AcquireTimeout:
            return None

    # -- releasing and looking -------------------------------------------------------------------------

    async def release(self) -> None:
        """Release the lease over these names that the current task acquired, as `AsyncLock.release`.

        Raises:
            NotHeld: There is none, or a living task acquired it. A lease over other names, or of one lock, does not
                count.
            LeaseLost, Unreachable: As for `Lease.release`.

        On cancellation the release goes on in the background.
        """
        await to_release(LeaseGroup.shares_of(self._key()), *self.names).release()

    async def force_release(self) -> int:
        """Take each of the locks away from its holder, and return how many of them were held.

        Each lock does what `AsyncLock.force_release` says. All commands are sent in one write.

        Raises:
            Unreachable: A reply was lost. Each lock may or may not have been taken away.
            CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.

        On cancellation each lock may or may not have been taken away.
        """
        return sum(await asyncio.gather(*(lock.force_release() for lock in self._locks)))

    async def locked(self) -> bool:
        """Return whether anybody holds any of the locks. One round trip; otherwise as `statistics`."""
        return any(await asyncio.gather(*(lock.locked() for lock in self._locks)))

    async def statistics(self) -> tuple[NameView, ...]:
        """Return the view of each lock, in the order of `names`. The locks are not read at one moment.

        Two round trips. Errors and cancellation are those of `AsyncLock.statistics`.
        """
        return tuple(await asyncio.gather(*(lock.statistics() for lock in self._locks)))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the locks, each once, in the order in which they are acquired."""
        return tuple(lock.name for lock in self._locks)

    def __repr__(self) -> str:
        return f"<AsyncMultiLock {self._shown()}>"

    # -- inside ----------------------------------------------------------------------------------------

    def _shown(self) -> str:
        return ", ".join(map(repr, self.names))

    def _key(self) -> Hashable:
        return running_loop(), Same(self._client), tuple(lock._keys.all[0] for lock in self._locks)

    def _followed(
        self, granting: Callable[[], Awaitable[MultiGrant | None]], wanted: Wanted, *, waits: bool
    ) -> Coroutine[Any, Any, MultiGrant | None]:
        lock = self._locks[0]
        label = lock._shown_label(wanted.label)
        return followed(lock._at_work(), "multi", self.names, granting, waits=waits, label=label)

    def _grant(self, grants: list[Grant]) -> MultiGrant:
        return LeaseGroup(self._key(), tuple(grants)).enter(MultiGrant)

    async def _all_or_none(self, wanted: Wanted) -> list[Grant]:
        leases, free = await self._take_free(self._locks, None, wanted)
        if len(leases) == len(self._locks):
            return leases
        _give_back(leases)
        name = self._locks[len(leases) + free]._resource()
        error = AcquireTimeout.taken(name.name, remaining=name.holder_remaining())
        name.forget_if_idle()
        raise error

    async def _acquire_all(self, within: float | None, wanted: Wanted) -> list[Grant]:
        """Take what is free, wait for the next in order, and so on until all are held.

        Invariant that rules out deadlocks: a request that waits for a lock holds only locks that come before it.
        """
        ends = None if within is None else now() + within
        loop = running_loop()
        held: list[Grant] = []
        try:
            while True:
                taken, free = await self._take_free(self._locks[len(held) :], ends, wanted)
                held += taken
                if free:  # before the first that is not
                    held += (await self._take_free(self._locks[len(held) : len(held) + free], ends, wanted))[0]
                if len(held) < len(self._locks):
                    left = None if ends is None else max(0.0, ends - now())
                    lock = self._locks[len(held)]
                    held.append(await lock._grant(lock._request(wanted.ttl, None, left, label=wanted.label)))
                if len(held) == len(self._locks):
                    if all(map(_valid, held)):
                        return held
                    _give_back(held)  # one was lost while we waited for the others; nobody relied on it yet
                    held = []
        except BaseException:
            undo_in(loop, partial(_give_back, held))
            raise

    async def _take_free(
        self, locks: Sequence[PlainLock], ends: float | None, wanted: Wanted
    ) -> tuple[list[Grant], int]:
        """Take those of ``locks`` that are free, up to the first that is not.

        Return the leases, and how many more are free, but were not taken since others behind them are not.
        """
        left = None if ends is None else max(0.001, ends - now())
        request = replace(locks[0]._request(wanted.ttl, None, 0, label=wanted.label), timeout=left)
        names = [lock._resource() for lock in locks]
        found, free = await try_acquire_all(names, request)
        first = next((number for number, lease in enumerate(found) if not _valid(lease)), len(found))
        _give_back(found[first:])
        more = next((number for number, it in enumerate(free[first:]) if not it), 0)
        return [lease for lease in found[:first] if lease is not None], more


def _valid(lease: Grant | None) -> bool:
    """Return whether it was granted, and was not lost while the others were still in flight."""
    return lease is not None and lease.remaining() > 0


def _give_back(leases: Iterable[Grant | None]) -> None:
    for lease in leases:
        if lease is not None:
            lease.give_back()
