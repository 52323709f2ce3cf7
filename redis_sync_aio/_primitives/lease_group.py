"""Leases that stand on other leases: several on one (reentrant lock), or one on several (multi-lock).

The grants below, the *members*, are ordinary ones. The manager of their coordinator renews them, notices their loss and
releases them. A group is the manager of the grants above, its *shares*: it releases the members when the last share is
released, and ends all shares when a member is lost.

The life of a group. While the members are held, they keep it, so a share still counts when nothing refers to it.
After a loss only the shares do: a caller that is still inside must not acquire again as if nothing had happened, and a
group that all callers have forgotten must not stay forever.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Hashable
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ReferenceType, WeakValueDictionary, ref

from .._acquire.request import Request
from .._core.clock import now
from .._leases.grant import Grant
from .._leases.settings import LeaseSettings
from .._leases.tasks import TaskRef, current_ref
from .._leases.terms import HELD, LeaseState
from ..errors import CommandRefused, LeaseLost, LossReason, WouldDeadlock

if TYPE_CHECKING:
    from .._core.keys import Keys

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
    def queued(self) -> bool:  # type: ignore[override]
        """Whether one of the requests below had to wait for another holder."""
        return any(member.queued for member in self.lease_group.members)

    @property
    def label(self) -> str:
        """The text by which people know the holder: that of each member."""
        return self.lease_group.members[0].label

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
        """Give it back. Idempotent. Members on which other shares stand stay held.

        Raises:
            LeaseLost: it was lost before. Nothing that others hold by now was changed on the server.
            Unreachable: no answer, after retries; what was held then ends with its ttl.

        On cancellation the release goes on in the background and is never left half done.
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
    """Whether the members are being released, or that failed. They are not renewed any more, so no share is added."""

    def __init__(self, key: Hashable, members: tuple[Grant, ...]) -> None:
        """Group ``members``, and be found by ``key``. `enter` notices a member that is already lost."""
        self.members: tuple[Grant, ...] = members
        self.shares: list[GroupGrant] = []
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.settings: LeaseSettings = members[0].manager.settings
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
            if task is not None and share.bars(task):
                raise WouldDeadlock.own_body(name, fence=share.fence, use="go on with that lease")

    def enter(self, kind: type[S]) -> S:
        """Add and return a share. Raises LeaseLost if a member is lost."""
        self.check_context()
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

    def check_context(self) -> None:
        """Raise WrongContext in another event loop, or after a fork."""
        self.members[0].check_context()

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

    def stalled_since(self, time: float) -> float:
        """Return how many seconds, at least, the event loop stood still since ``time`` (local clock)."""
        return self.members[0].manager.stalled_since(time)

    def answering(self, keys: Keys, stalled: bool) -> bool:
        """Return whether the server of ``keys`` answers, or (``stalled``) its silence could not have been noticed."""
        return self.members[0].manager.answering(keys, stalled)

    def members_of(self, lease: Grant) -> tuple[Grant, ...]:
        """Return the members, on which every share stands."""
        return self.members

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
