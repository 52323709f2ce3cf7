"""AsyncMultiLock: several locks together, all of them or none."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from functools import partial
from types import CodeType, MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ReferenceType, WeakValueDictionary, ref

from .._client.settings import Client, Same, running_loop
from .._core.arguments import Name, Seconds, timeout_seconds
from .._core.cancellation import undo_in
from .._core.clock import now
from .._core.display import shown
from .._core.keys import Engine, joined_keys, lock_keys
from .._core.redis_py_words import explains_words_of_redis_py
from .._engine.commands import left_free
from .._leases.acquisition import Acquisition, Request
from .._leases.detached import to_release
from .._leases.grant import Grant, TaskRef, current_ref
from .._leases.hold import Acquiring, LeaseContext, OnLost
from .._leases.implicit import CoordinatorLike
from .._leases.lease import GuardingLease
from .._leases.resource import Resource
from .._leases.settings import HELD, LeaseState
from .._transport.call import Call
from ..errors import AcquireTimeout, CommandRefused, LeaseLost, LossReason, WouldDeadlock
from ..errors._base import held_elsewhere, held_here, listed, no_answer, time_allowed
from .base import LeaseOptions, Wanted, followed
from .lock import PlainLock

if TYPE_CHECKING:
    from .._inspection.views import NameView
    from .._leases.hub import Hub

__all__ = ["AsyncMultiLock", "MultiLease"]

# -- Requests for several locks that leave in one write, none of which waits -----------------------------------
#
# Each lock has an acquisition of its own, so a request that is late, cancelled, repeated or undone is handled as that
# of a single lock. Locks of one hash slot are requested by one script, all or none, and its answer is dealt out to
# the acquisitions. The undo of a cancelled request is sent for each lock: over a link it is executed later.


async def try_acquire_all(
    names: Sequence[Resource], request: Request, within: float | None
) -> tuple[list[Grant | None], list[bool]]:
    """Ask for all ``names`` in one round trip. Return a grant or None for each, and whether each is free all the same.

    ``request`` must not wait, and must have no token and no identity. It has ``within`` seconds to be answered. If one
    request fails, and on cancellation, all are undone.
    """
    hub = names[0].hub
    futures: list[asyncio.Future[Grant | None]] = [hub.loop.create_future() for _ in names]
    acquisitions = [Acquisition(name, request, future, within) for name, future in zip(names, futures, strict=True)]
    free = [False] * len(names)
    keys = joined_keys([name.keys for name in names]) if len(names) > 1 else None
    if keys is None:
        for acquisition in acquisitions:
            acquisition.ask()
    else:
        sent = now()
        numbers = [acquisition.number for acquisition in acquisitions]
        done = _deal_out(acquisitions, free)
        prefix = request.label + names[0].endpoint.token_prefix
        call = Call(sent, sent + hub.retry_for, done)
        hub.commands.acquire_all(keys, prefix, numbers, call, ttl_ms=request.ttl_ms)
        for acquisition in acquisitions:
            acquisition.sent = acquisition.begun = sent
            acquisition.call = call
    try:
        leases = [await future for future in futures]
        for name, lease in zip(names, leases, strict=True):
            if lease is not None and (task := asyncio.current_task()) is not None:
                name.leases.acquired(lease, task)
        return leases, free
    except BaseException:
        for acquisition, future in zip(acquisitions, futures, strict=True):
            undo_in(hub.loop, partial(acquisition.task_cancelled, future))
        raise


def _deal_out(acquisitions: Sequence[Acquisition], free: list[bool]) -> Callable[[Call], None]:
    """Return a function that gives each acquisition its part of the answer, and notes which locks are ``free``."""

    def answered(call: Call) -> None:
        replies = [None] * len(acquisitions) if call.error is not None else call.reply
        free[:] = map(left_free, replies)
        for acquisition, reply in zip(acquisitions, replies, strict=True):
            call.settle_part(reply, acquisition.answered)

    return answered


# -- Leases that stand on other leases: several on one (reentrant lock), or one on several (multi-lock) --------
#
# The grants below, the *members*, are ordinary ones. The manager of their coordinator renews them, notices their loss
# and releases them. A group is the manager of the grants above, its *shares*: it releases the members when the last
# share is released, and ends all shares when a member is lost.
#
# The life of a group. While the members are held, they keep it, so a share still counts when nothing refers to it.
# After a loss only the shares do: a caller that is still inside must not acquire again as if nothing had happened,
# and a group that all callers have forgotten must not stay forever.


S = TypeVar("S", bound="GroupGrant")

_groups: WeakValueDictionary[Hashable, LeaseGroup] = WeakValueDictionary()
"""All groups in use, by the key that their owner gave them."""


class GroupGrant(Grant):
    """A grant that is held until it is released, as long as all members of its group are held."""

    reports_loss = False

    def __init__(self, group: LeaseGroup) -> None:
        self.lease_group = group
        first = group.members[0]
        period = min(member.period for member in group.members)
        terms = Request(first.ttl_ms, auto_renew=False)  # the members are renewed
        super().__init__(group, first.keys, group.token, group.fence, group.deadline(), period, terms)
        self.acquirer: TaskRef | None = current_ref()
        self.root: CodeType | None = first.root

    @property
    def members(self) -> tuple[Grant, ...]:
        """The members of its group."""
        return self.lease_group.members

    @property
    def queued(self) -> bool:  # type: ignore[override]
        """True if one of the requests below had to wait for another holder."""
        return any(member.queued for member in self.members)

    @property
    def label(self) -> str:
        """The text by which people know the holder: that of each member."""
        return self.members[0].label

    def check_context(self) -> None:
        """Raise WrongContext, which names a member, in another event loop or after a fork."""
        self.members[0].check_context()

    def remaining(self) -> float:
        """Return the seconds for which it is certainly valid: 0.0 when it is not, inf without a ttl."""
        self.deadline: float = self.lease_group.deadline()
        return super().remaining()

    def is_lost(self) -> bool:
        """Return whether it ended before its holder released it."""
        self.deadline = self.lease_group.deadline()
        return super().is_lost()

    def loss(self) -> LeaseLost:
        """Return the error that explains how it was lost."""
        if self.reason == "released":
            return super().loss()
        self.loss_reported = True
        return self.lease_group.loss()

    async def release(self) -> None:
        """Give the group back. Idempotent. Members on which other shares stand stay held.

        Raises:
            LeaseLost: it was lost before. Nothing that others hold by now was changed on the server.
            Unreachable: no answer, after retries; what was held then ends with its ttl.

        On cancellation the release continues in the background and is never left half done.
        """
        self.deadline = self.lease_group.deadline()
        try:
            await super().release()
        finally:
            if self.state is LeaseState.LOST:
                self.lease_group.left(self)


class LeaseGroup:
    """The manager of shares, and the members that they stand on.

    Invariants: ``shares`` are those not released yet, oldest first; empty after a loss. At most one share is
    RELEASING, and then it is the last.
    """

    lost: Grant | None = None
    """The member that was lost first, if any."""
    _ending = False
    """True if the members are being released, or that failed. They are not renewed any more, so no share is added."""

    def __init__(self, key: Hashable, members: tuple[Grant, ...]) -> None:
        """Group ``members``, and be found by ``key``. `enter` notices a member that is already lost."""
        self.members: tuple[Grant, ...] = members
        self.shares: list[GroupGrant] = []
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.hub: Hub = members[0].manager.hub
        self.token: bytes = b" ".join(member.wire_token for member in members)
        self.fence: int = max(member.fence for member in members)
        self._behind: list[ReferenceType[GroupGrant]] = []  # shares that were not released since a loss
        self._key = key
        _groups[key] = self
        for member in members:
            self._watch(member)

    def _watch(self, member: Grant) -> None:
        member.group = self

    @staticmethod
    def find(key: Hashable) -> LeaseGroup | None:
        """Return the group of that key, unless it is being released; None if there is none."""
        group = _groups.get(key)
        return None if group is None or (group._ending and group.lost is None) else group

    @staticmethod
    def shares_of(key: Hashable) -> list[GroupGrant]:
        """Return the shares of the group of that key that were not released."""
        group = LeaseGroup.find(key)
        return [] if group is None else group.inside()

    @staticmethod
    def check_waits(key: Hashable, name: str) -> None:
        """Raise WouldDeadlock if a body of the current task holds a share of the group of that key."""
        task = current_ref()
        for share in LeaseGroup.shares_of(key):
            if task is not None and share.blocks_own_task(task):
                raise WouldDeadlock.own_body(name, fence=share.fence, use="go on with that lease")

    def enter(self, kind: type[S]) -> S:
        """Add and return a share. Raises LeaseLost if a member is lost."""
        self.hub.check_context()
        if self.lost is None and self.deadline() <= now():
            self._end(min(self.members, key=_deadline), "expired")
        if self.lost is not None:
            raise self.loss()
        share = kind(self)
        self.shares.append(share)
        return share

    def inside(self) -> list[GroupGrant]:
        """Return the shares that were not released, oldest first; after a loss those that are still referred to."""
        return self.shares or [share for behind in self._behind if (share := behind()) is not None]

    def deadline(self) -> float:
        """Return the local time until which all members are certainly held."""
        left = self.members
        if self._ending:  # a release that succeeded in part may be tried again
            left = tuple(member for member in left if member.state is not LeaseState.RELEASED)
        return min(map(_deadline, left), default=-math.inf)

    def loss(self) -> LeaseLost:
        """Return the error for the member that was lost, or for the one that ended first."""
        member = self.lost or min(self.members, key=_deadline)
        others = tuple(other.name for other in self.members if other is not member)
        return member.lost_as(given_back=others)

    # -- the manager of shares ------------------------------------------------------------------------

    def forget(self, lease: Grant) -> None:
        """Lose all shares, because one is lost: it may have found out by the clock, before the others."""
        self._end(min(self.members, key=_deadline), lease.reason or "expired")

    def let_go(self, lease: Grant) -> None:
        """Let a share go, which is forgotten, and the members with the last one."""
        lease.state = LeaseState.RELEASED
        lease.notify_ended()
        self.shares = [other for other in self.shares if other is not lease]
        if not self.shares:
            self._forget()
            for member in self.members:
                if member.state is HELD:
                    if member.observation is not None:
                        member.observation.end("forgotten")
                    member.manager.let_go(member)

    async def extend(self, lease: Grant, ttl: int) -> None:
        """Extend all members in one write. If one is refused, the others last as before."""
        if len(self.members) == 1:
            await self.members[0].extend(ttl)
            return
        undos = [undo_extension(member) for member in self.members]
        outcomes = await asyncio.gather(*(member.extend(ttl) for member in self.members), return_exceptions=True)
        for error in outcomes:
            if isinstance(error, CommandRefused):
                extended = (undo() for undo, outcome in zip(undos, outcomes, strict=True) if outcome is None)
                await asyncio.gather(*extended, return_exceptions=True)
            if isinstance(error, BaseException):
                raise error

    def release(self, lease: Grant) -> None:
        """Release one share, and all members if it is the last."""
        if any(other.state is HELD for other in self.shares):
            self.shares = [other for other in self.shares if other is not lease]
            lease.release_ended(None)
            return
        self._ending = True

        def answered() -> None:
            errors = [outcome.exception() for outcome in outcomes.values() if outcome.done()]
            if len(errors) == len(outcomes):
                self._released(lease, next((error for error in errors if isinstance(error, Exception)), None))

        outcomes = self._give_back(answered)

    def _give_back(self, answered: Callable[[], None]) -> dict[Grant, asyncio.Future[None]]:
        """Release the members that are held. Return the outcome of each, after which ``answered`` is called."""
        outcomes = {}
        for member in [member for member in self.members if member.state is HELD]:
            outcome = outcomes[member] = self.loop.create_future()
            outcome.add_done_callback(lambda _: answered())
            member.releasers = [*(member.releasers or ()), outcome]
            member.give_back()
        return outcomes

    def _released(self, share: Grant, error: Exception | None) -> None:
        if error is None:
            self.shares.clear()
            self._forget()
        share.release_ended(self.loss() if self.lost else error)

    # -- the end ---------------------------------------------------------------------------------------

    def member_lost(self, member: Grant) -> None:
        """End the shares, since ``member`` was lost."""
        self._end(member, member.reason or "expired")

    def _end(self, member: Grant, reason: LossReason) -> None:
        """End all shares because of the loss of ``member``, and give back the other members."""
        if self.lost is not None:
            return
        self.lost = member
        member.lose(reason)
        for other in self.members:
            other.reports_loss = False  # one line in the log for one loss
            other.give_back()
        shares, self.shares = self.shares, []
        self._behind = [ref(share) for share in shares]
        interrupted: set[object] = set()
        for share in shares:
            if share.guards():
                if share.body in interrupted:  # an outer body of the same task is cancelled, and this one with it
                    share.hold = None
                interrupted.add(share.body)
            share.lose(reason, member.cause)
        if not shares:
            self._forget()

    def left(self, share: GroupGrant) -> None:
        """Note that a lost share was released: its holder has heard of the loss."""
        self._behind = [behind for behind in self._behind if behind() not in (None, share)]
        if not self._behind:
            self._forget()

    def _forget(self) -> None:
        for member in self.members:
            member.group = None  # no cycle is left
        if _groups.get(self._key) is self:
            del _groups[self._key]


def undo_extension(member: Grant) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return a coroutine function that undoes an extension of ``member`` that is about to be sent."""
    deadline, ttl, hold_limit = member.deadline, member.ttl_ms, member.hold_limit

    async def undo() -> None:
        left = math.floor((deadline - now()) * 1000)
        if member.state is HELD and left > 0:
            await member.manager.extend(member, left)
            member.ttl_ms, member.hold_limit = ttl, hold_limit

    return undo


def _deadline(member: Grant) -> float:
    return member.deadline if member.state is HELD else -math.inf


class MultiGrant(GroupGrant):
    """A grant of several locks."""

    @property
    def name(self) -> str:
        """Names of the locks as one text."""
        return ", ".join(one.name for one in self.members)


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
        self.fences: Mapping[str, int] = MappingProxyType({one.name: one.fence for one in grant.members})

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

    - Each name is the same lock as ``AsyncLock(client, name)``, with the same queue and fences. No request barges past
      the waiters for any of the names.
    - Callers that name the same locks in different orders cannot deadlock: a waiting request holds only locks before
      that one, in the order of the names as bytes.
    - Every timeout, cancellation and error gives all locks back.
    - One lease covers all. If one lock is lost, the others are given back and the body is cancelled.

    Free locks are taken in one round trip. If their names have the same hash tag ("{user}:1", "{user}:2"), one script
    takes all or none. Otherwise a caller that gets only some may hold those for a moment.

    A multi-lock is not reentrant: a task whose body holds one of the locks gets WouldDeadlock.

    Args:
        client: As for [`AsyncLock`][redis_sync_aio.AsyncLock].
        names: Names of locks, at least one, in any order. A name that occurs twice is one lock.
        ttl: As for `AsyncLock`.
        auto_renew: As for `AsyncLock`.
        max_hold: As for `AsyncLock`.
        on_lost: As for `AsyncLock`.
        engine: As for `AsyncLock`.
        replicas: As for `AsyncLock`, for each lock.
        replicated_within: As for `AsyncLock`.

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
        replicas: int = 0,
        replicated_within: Seconds = 1.0,
    ) -> None:
        if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
            raise TypeError(f"names must be several names, as in ['a', 'b'], not {shown(names)}; AsyncLock takes one")
        options = LeaseOptions(
            ttl, auto_renew, max_hold, on_lost, engine, replicas=replicas, replicated_within=replicated_within
        )
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
            timeout: How long to wait for all of them together (seconds). 0: do not wait. None: forever.
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
        self._locks[0]._request(ttl, None, label)  # bad arguments fail here
        return Acquiring(self._acquired(within, Wanted(ttl, label)), self._on_lost)

    async def _acquired(self, within: float | None, wanted: Wanted) -> MultiLease:
        grant = await self._followed(partial(self._acquire, within, wanted), wanted, waits=within != 0)
        assert grant is not None  # it raises where there is no grant
        return MultiLease(grant, self._itself)

    async def _acquire(self, within: float | None, wanted: Wanted) -> MultiGrant:
        try:
            return self._grant(await (self._all_or_none(wanted) if within == 0 else self._acquire_all(within, wanted)))
        except AcquireTimeout as error:
            if not error.answered:
                why = no_answer(error.name)
            elif any(lock._leases() for lock in self._locks if lock.name == error.name):
                why = held_here(repr(error.name))
            else:
                why = held_elsewhere(repr(error.name), error.held_by)
            raise AcquireTimeout(
                f"could not acquire all of {listed(self.names)}{time_allowed(within)}: {why}",
                name=error.name,
                remaining=error.remaining,
                answered=error.answered,
                held_by=error.held_by,
            ) from error

    @explains_words_of_redis_py
    def try_acquire(self, *, ttl: Seconds | None = None, label: str | None = None) -> Acquiring[MultiLease | None]:
        """Return a lease, or None if one of the locks is taken or contended. One round trip.

        Arguments, errors and cancellation are those of `acquire`, without AcquireTimeout. Unless the names have one
        hash tag, two callers that try at the same moment may both get None.
        """
        self._locks[0]._request(ttl, None, label)  # bad arguments fail here
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

        On cancellation the release continues in the background.
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
        """Return whether any of the locks has a holder. One round trip; otherwise as `statistics`."""
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
        """Take the free locks, wait for the next in order, and so on until all are held.

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
                    request = lock._request(wanted.ttl, None, wanted.label, wait=left != 0)
                    held.append(await lock._grant(request, left or None))
                if len(held) == len(self._locks):
                    if all(map(_valid, held)):
                        return held
                    _give_back(held)  # one was lost while we waited for the others; it was not relied on yet
                    held = []
        except BaseException:
            undo_in(loop, partial(_give_back, held))
            raise

    async def _take_free(
        self, locks: Sequence[PlainLock], ends: float | None, wanted: Wanted
    ) -> tuple[list[Grant], int]:
        """Take the free ones of ``locks``, up to the first that is not.

        Return the leases, and how many more are free, but were not taken since others behind them are not.
        """
        left = None if ends is None else max(0.001, ends - now())
        request = locks[0]._request(wanted.ttl, None, wanted.label, wait=False)
        found, free = await try_acquire_all([lock._resource() for lock in locks], request, left)
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
