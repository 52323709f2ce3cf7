"""Leases that stand on other leases: several shares of one lease (reentrant), one share of several (multi-lock).

The leases underneath, the *members*, are ordinary ones: the coordinator renews them, notices their loss and
releases them. A bundle is what a coordinator's renewals are for those, the keeper, for the shares: it releases
the members when the last share is released, and ends all shares when one member is lost.

What holds a bundle alive. While its members are held, they do (`on_loss`), so a share that nobody refers to
still counts. After a loss only the shares do: who is still inside must not acquire again as if nothing had
happened, and a bundle that everybody forgot must not stay forever.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ReferenceType, WeakValueDictionary, ref

from .._acquire.request import Request
from .._client.settings import Client
from .._core.clock import now
from .._leases.choice import waits_for_itself
from .._leases.grant import Grant
from .._leases.tasks import TaskRef, current_ref, ended
from .._leases.terms import HELD, LeaseState
from ..errors import CommandRefused, LeaseLost, LossReason, WouldDeadlock

if TYPE_CHECKING:
    from .._core.keys import Keys

S = TypeVar("S", bound="GroupGrant")

_bundles: WeakValueDictionary[Hashable, LeaseGroup] = WeakValueDictionary()
"""By the key that their owner gave them."""


class GroupGrant(Grant):
    """A lease that is held as long as all members of its bundle are, and until it is released itself."""

    reports_loss = False

    def __init__(self, bundle: LeaseGroup) -> None:
        self.bundle = bundle
        first = bundle.members[0]
        period = min(member.period for member in bundle.members)
        terms = Request(first.ttl_ms, auto_renew=False)  # the members are renewed
        super().__init__(bundle, first.keys, bundle.token, bundle.fence, bundle.deadline(), period, terms)
        self.acquirer: TaskRef | None = current_ref()

    def remaining(self) -> float:
        """Return for how many seconds the lease is certainly valid; 0.0 when it is not, inf without a ttl."""
        self.deadline: float = self.bundle.deadline()
        return super().remaining()

    def is_lost(self) -> bool:
        """Return whether it is gone although nobody released it."""
        self.deadline = self.bundle.deadline()
        return super().is_lost()

    def loss(self) -> LeaseLost:
        """Return the error that says how this lease was lost."""
        if self.reason == "released":
            return super().loss()
        self.loss_reported = True
        return self.bundle.loss()

    async def release(self) -> None:
        """Give the lease back. Idempotent. What others still hold together with it stays held.

        Raises:
            LeaseLost: it was lost before; nothing that others hold by now was changed on the server.
            Unreachable: no answer, after retries; what was held then ends with its ttl.

        On cancellation the release goes on in the background: it is never torn in half.
        """
        self.deadline = self.bundle.deadline()
        try:
            await super().release()
        finally:
            if self.state is LeaseState.LOST:
                self.bundle.left(self)


class LeaseGroup:
    """The keeper of shares. See the top of this module.

    Invariants: ``shares`` are those not released yet, oldest first; empty after a loss. At most one share is
    RELEASING, and then it is the last.
    """

    lost: Grant | None = None
    """The member that was lost first."""
    _ending = False
    """The members are being released, or that failed: they are not renewed any more, so nobody may join."""

    def __init__(self, key: Hashable, members: tuple[Grant, ...]) -> None:
        """Bundle ``members``, and be found by ``key``. One that is lost already is found by `enter`."""
        self.members: tuple[Grant, ...] = members
        self.shares: list[GroupGrant] = []
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.response_timeout: float = members[0].response_timeout
        self.asked_response_timeout: float | None = members[0].manager.asked_response_timeout
        self.exit_timeout: float = members[0].manager.exit_timeout
        self.retry_for: float = members[0].manager.retry_for
        self.client: Client = members[0].manager.client
        self.token: bytes = b" ".join(member.wire_token for member in members)
        self.fence: int = max(member.fence for member in members)
        self._behind: list[ReferenceType[GroupGrant]] = []  # after a loss: shares that were not released since
        self._key = key
        _bundles[key] = self
        for member in members:
            self._watch(member)

    def _watch(self, member: Grant) -> None:
        member.group = self
        member.on_loss = partial(self._member_lost, member)

    @staticmethod
    def find(key: Hashable) -> LeaseGroup | None:
        """Return the bundle of that key in which somebody is inside; not one that is being released."""
        bundle = _bundles.get(key)
        return None if bundle is None or (bundle._ending and bundle.lost is None) else bundle

    @staticmethod
    def shares_of(key: Hashable) -> list[GroupGrant]:
        """Return what is `inside` the bundle of that key, if there is one."""
        bundle = LeaseGroup.find(key)
        return [] if bundle is None else bundle.inside()

    @staticmethod
    def check_waits(key: Hashable, name: str) -> None:
        """Raise WouldDeadlock if a body of the current task holds the bundle of that key."""
        task = current_ref()
        for share in LeaseGroup.shares_of(key):
            if task is not None and share.bars(task):
                raise WouldDeadlock(waits_for_itself(name, share, "go on with that lease"))

    def enter(self, kind: type[S]) -> S:
        """Return one more share. Raises LeaseLost when a member is lost."""
        self.check_context()
        if self.lost is None and self.deadline() <= now():
            self._end(min(self.members, key=_deadline), "expired")
        if self.lost is not None:
            raise self.loss()
        share = kind(self)
        self.shares.append(share)
        return share

    def inside(self) -> list[GroupGrant]:
        """Return the shares that were not released, oldest first; after a loss those somebody still refers to."""
        return self.shares or [share for behind in self._behind if (share := behind()) is not None]

    def ownerless(self) -> bool:
        """Return whether the tasks that acquired the shares have ended, and no owner stands for them."""
        return all(share.acquirer is not None and ended(share.acquirer) for share in self.shares)

    def deadline(self) -> float:
        """Return the local time until which all members are certainly held."""
        left = self.members
        if self._ending:  # a release that was answered in part may be tried again
            left = tuple(member for member in left if member.state is not LeaseState.RELEASED)
        return min(map(_deadline, left), default=-math.inf)

    def loss(self) -> LeaseLost:
        """Return the error that names the member that was lost, or the one that ended first."""
        member = self.lost or min(self.members, key=_deadline)
        others = tuple(other.name for other in self.members if other is not member)
        return member.lost_as(given_back=others)

    # -- Keeper, for shares ----------------------------------------------------------------------------

    def check_context(self) -> None:
        """Raise WrongContext in another event loop, or after a fork."""
        self.members[0].check_context()

    def forget(self, lease: Grant) -> None:
        """Lose all shares, because one is lost: it may have found out by the clock, before the others."""
        self._end(min(self.members, key=_deadline), lease.reason or "expired")

    def stalled_since(self, time: float) -> float:
        """Return for how many seconds, at least, the event loop stood still since ``time`` (local clock)."""
        return self.members[0].manager.stalled_since(time)

    def answering(self, keys: Keys, stalled: bool) -> bool:
        """Return whether the server that has ``keys`` answers; ``stalled``: or nobody could have noticed."""
        return self.members[0].manager.answering(keys, stalled)

    def members_of(self, lease: Grant) -> tuple[Grant, ...]:
        """Return the leases that a share stands on."""
        return self.members

    async def extend(self, lease: Grant, ttl: int) -> None:
        """Extend all members, in one write; if one is refused, let the others end as before."""
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
        held = [member for member in self.members if member.state is HELD]
        errors: list[BaseException | None] = []

        def answered(outcome: asyncio.Future[None]) -> None:
            errors.append(outcome.exception())
            if len(errors) == len(held):
                self._released(lease, next((error for error in errors if isinstance(error, Exception)), None))

        for member in held:
            outcome: asyncio.Future[None] = self.loop.create_future()
            outcome.add_done_callback(answered)
            member.releasers = [*(member.releasers or ()), outcome]
            member.give_back()

    def _released(self, share: Grant, error: Exception | None) -> None:
        if error is None:
            self.shares.clear()
            self._forget()
        share.release_ended(self.loss() if self.lost else error)

    # -- the end ---------------------------------------------------------------------------------------

    def _member_lost(self, member: Grant) -> None:
        self._end(member, member.reason or "expired")

    def _end(self, member: Grant, reason: LossReason) -> None:
        """``member`` is lost: give back the others and end all shares."""
        if self.lost is not None:
            return
        self.lost = member
        member.lose(reason)
        for other in self.members:
            other.reports_loss = False  # one loss, one line
            other.give_back()
        shares, self.shares = self.shares, []
        self._behind = [ref(share) for share in shares]
        interrupted: set[object] = set()
        for share in shares:
            if share.on_loss is not None:
                if share.body in interrupted:  # a body inside another one of the same task: that one takes it along
                    share.on_loss = None
                interrupted.add(share.body)
            share.lose(reason)
        for other in self.members:
            other.on_loss = None
        if not shares:
            self._forget()

    def left(self, share: GroupGrant) -> None:
        """Note that a lost share was released: its holder has heard of the loss."""
        self._behind = [behind for behind in self._behind if behind() not in (None, share)]
        if not self._behind:
            self._forget()

    def _forget(self) -> None:
        for member in self.members:
            member.on_loss = None
        if _bundles.get(self._key) is self:
            del _bundles[self._key]


def undo_extension(member: Grant) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return a coroutine function that lets ``member`` last as it would now, after it was extended."""
    deadline, ttl, until = member.deadline, member.ttl_ms, member.until

    async def undo() -> None:
        left = math.floor((deadline - now()) * 1000)
        if member.state is HELD and left > 0:
            await member.manager.extend(member, left)
            member.ttl_ms, member.until = ttl, until

    return undo


def _deadline(member: Grant) -> float:
    return member.deadline if member.state is HELD else -math.inf
