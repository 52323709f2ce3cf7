"""Requests to several servers at the same time, and the lease that stands on a majority of their leases.

The grants below, the members, are ordinary ones of the coordinators of those servers, as for every `LeaseGroup`: they
are renewed, lost, released and undone there.

The first answers that suffice decide. Each request receives its own answer: there is no task, no future and no timer
for a server. An answer that comes after the decision is not lost. While the lease is held, a late grant joins it. When
the lease is released, or the attempt has failed, a request without an answer is undone by a release behind it on the
same connection.

How long it is held. Of n servers a quorum (n // 2 + 1) must hold it at the same moment, so it ends when all but
quorum - 1 members may have ended. With the members sorted by their deadlines, the latest first, that is the deadline of
the last member of the quorum. The clocks of servers may run faster than ours, by `DRIFT` of the ttl and `LEAST_DRIFT`.

Servers that do not hold it, as they forgot it or failed, are asked again while it is held.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar

from .._core.cancellation import undo_in
from .._core.clock import now
from .._core.futures import FutureLike, finish
from .._engine.commands import Answer
from .._leases.acquisition import Acquisition, Request
from .._leases.grant import Grant
from .._leases.hub import Hub
from .._leases.resource import Resource
from .._leases.settings import HELD, LeaseState
from .._transport.call import Call
from .._transport.link import Link
from ..errors import CommandRefused, LeaseLost, LossReason, SyncError, Unreachable
from .multilock import LeaseGroup, undo_extension

# -- Requests to several servers at the same time, some of which may not answer in time ------------------------


T = TypeVar("T")


class Ended:
    """The taker of a request that has ended."""

    def done(self) -> bool:
        """Return True."""
        return True

    def set_result(self, grant: Grant | None) -> None:
        """Do nothing."""

    def set_exception(self, error: Exception) -> None:
        """Do nothing."""


ENDED = Ended()


class Vote(Acquisition):
    """A request to one server, in flight or answered. It is its own taker."""

    settled: bool = False
    """True if it was granted, refused or dropped, or has failed."""
    grant: Grant | None = None
    error: Exception | None = None

    def __init__(
        self, owner: Attempt | QuorumGroup, server: int, resource: Resource, request: Request, awaited: bool = True
    ) -> None:
        self.owner: Attempt | QuorumGroup | None = owner
        self.server = server  # its number, from 0 on
        self.resource = resource
        self.awaited: bool = awaited  # not where the server was silent when it was asked
        super().__init__(resource, request, self)
        owner.votes.append(self)
        self.ask()

    # -- its own taker (`FutureLike`) ------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether it has ended."""
        return self.settled

    def set_result(self, grant: Grant | None) -> None:
        """Take the grant; None: others hold it."""
        self.grant = grant
        self._settle()

    def set_exception(self, error: Exception) -> None:
        """Take the error."""
        self.error = error
        self._settle()

    def _end(self) -> None:
        self.settled = True
        self.taker: FutureLike[Grant | None] = ENDED  # a reference to itself would be a cycle

    def _settle(self) -> None:
        self._end()
        if self.owner is not None:
            self.owner.answered(self)

    def _decided(self, answer: Answer, call: Call) -> None:
        placed = self._placed
        super()._decided(answer, call)
        if self._placed and not placed and self.owner is not None:
            self.owner.answered(self)

    @property
    def waiter(self) -> asyncio.Future[None] | None:
        """The future that its task awaits."""
        return self.owner.future if isinstance(self.owner, Attempt) else None

    # -- facts -----------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """True if it stands in the queue of its server."""
        return self._placed and not self.settled

    @property
    def known(self) -> bool:
        """True if the server has granted, refused or queued it."""
        return self.waits or (self.settled and self.error is None)

    def lease(self) -> Grant | None:
        """Return the grant, as long as it is held."""
        return self.grant if self.grant is not None and self.grant.remaining() > 0 else None

    def drop(self) -> None:
        """Undo the request in the background, whatever became of it."""
        self.owner = None
        if self.grant is not None:
            self.resource.decline(self.grant)
        elif not self.settled:
            self._end()
            self.undo()


def link_of(hub: Hub) -> Link:
    """Return the link to a server of a Redlock."""
    assert isinstance(hub.link, Link), "a cluster is no server of a Redlock"
    return hub.link


def is_silent(hub: Hub, within: float) -> bool:
    """Return whether the server is unreachable, or has owed an answer for more than ``within`` seconds."""
    link = link_of(hub)
    return link.connection_error is not None or link.overdue() > within


async def in_time(answer: Awaitable[T], within: float) -> T | SyncError:
    """Return the answer of one server, or the error if there is none in ``within`` seconds."""
    try:
        async with asyncio.timeout(within):
            return await answer
    except TimeoutError:
        return Unreachable(f"a server did not answer within {within:g} seconds; check it and the network")
    except SyncError as error:
        return error


async def raise_fence(vote: Vote, lease: Grant, fence: int, within: float) -> bool:
    """Raise the fences of the server of ``vote``, so that its next is higher than ``fence``; return whether it did.

    It has to answer in ``within`` seconds. One round trip, unless its own is as high.
    """
    if lease.fence < fence:
        reserving = vote.resource.hub.manager.renewals.reserve(lease, fence - lease.fence)
        if await in_time(reserving, within) is not None:
            return False
    return vote.lease() is lease


class Attempt:
    """The votes of one attempt. At the end of its ``with`` those that no group has are dropped."""

    future: asyncio.Future[None] | None = None
    """The future that the task awaits."""
    _decided: Callable[[], bool]
    """True if the task need not wait any longer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.votes: list[Vote] = []
        self.unknown: int = 0  # awaited votes of which nothing is known
        self._loop = loop

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        undo_in(self._loop, self.drop)

    def ask(self, server: int, resource: Resource, request: Request, awaited: bool = True) -> Vote:
        """Ask one more server."""
        self.unknown += awaited
        return Vote(self, server, resource, request, awaited)

    def drop(self, keep: Vote | None = None) -> None:
        """Drop all votes but ``keep``."""
        votes, self.votes = self.votes, [] if keep is None else [keep]
        for vote in votes:
            if vote is not keep:
                self._count(vote)
                vote.drop()

    def leases(self) -> list[tuple[Vote, Grant]]:
        """Return the votes that were granted, each with its grant, while that is held."""
        return [(vote, lease) for vote in self.votes if (lease := vote.lease()) is not None]

    def answered(self, vote: Vote) -> None:
        """Take the answer to a vote, and wake the task if that decides."""
        self._count(vote)
        future = self.future
        if future is not None and not future.done() and self._decided():
            future.set_result(None)

    def _count(self, vote: Vote) -> None:
        self.unknown -= vote.awaited
        vote.awaited = False

    async def until(self, decided: Callable[[], bool], ends: float) -> None:
        """Wait until ``decided``, which is asked after each answer, or until ``ends`` (local clock)."""
        if decided() or (left := ends - now()) <= 0:
            return
        future = self.future = self._loop.create_future()
        self._decided = decided
        timer = self._loop.call_later(left, finish, future, None, None)
        try:
            await future
        finally:
            timer.cancel()
            self.future = None
            del self._decided  # it may refer to this attempt


# -- The lease ---------------------------------------------------------------------------------------------------


DRIFT = 0.01
LEAST_DRIFT = 0.002
"""The share of a ttl, and the seconds, by which a clock may run ahead meanwhile, as in the algorithm of Redlock."""


def majority(servers: int) -> int:
    """Return how many servers are a majority: any two majorities have a server in common."""
    return servers // 2 + 1


class QuorumGroup(LeaseGroup):
    """The manager of one share, which is held as long as ``needed`` of its members are."""

    members: tuple[Grant, ...]
    _timer: asyncio.TimerHandle | None = None
    """The timer that notices its end, and asks servers again that do not hold it."""
    _rejoin_at: float = math.inf
    """The local time when servers that do not hold it are asked again."""
    _releasing = False
    _had = 0
    """Number of servers that held it when it was lost."""

    def __init__(
        self,
        key: Hashable,
        members: dict[int, Grant],
        servers: int,
        fence: int,
        answer_within: float,
        ask: Callable[[QuorumGroup, int], None],
    ) -> None:
        """Group ``members``, which are by server, of ``servers`` in all. A majority of them agrees on ``fence``.

        A server has ``answer_within`` seconds for an answer. ``ask`` asks one again, without waiting in its queue.
        """
        self.servers = servers
        self.needed: int = majority(servers)
        self.votes: list[Vote] = []  # requests without an answer; their grants join
        self.answer_within = answer_within
        self._ask = ask
        self._where = {lease: server for server, lease in sorted(members.items())}
        super().__init__(key, tuple(self._where))
        self.fence = fence
        self._since = min(member.since for member in self.members)
        first = self.members[0]
        if first.auto_renew and first.hold_limit == math.inf:  # else it would outlast its limit
            self._rejoin_at = now() + first.ttl_ms / 3000
        self._look()

    def _watch(self, member: Grant) -> None:
        super()._watch(member)
        member.reports_loss = False  # its loss may be that of a minority

    @property
    def renewed(self) -> bool:
        """True if it is held beyond the ttl: not while it is released, nor after a release that failed."""
        return not self._ending

    def held(self) -> list[Grant]:
        """Return the members that are held."""
        return [member for member in self.members if _certain(member) > now()]

    def deadline(self) -> float:
        """Return the local time until which a majority certainly holds it."""
        ends = sorted([_certain(member) for member in self.members], reverse=True)
        return ends[self._fewest - 1] if len(ends) >= self._fewest else -math.inf

    @property
    def _fewest(self) -> int:
        """The number of members that must be held: one after a failed release, which may be tried again."""
        return 1 if self._ending else self.needed

    def loss(self) -> LeaseLost:
        """Return the error that says how many servers are left, and why the decisive one was lost."""
        member = self.lost or min(self.members, key=_certain)
        had = self._had if self.lost is not None else len(self.held())
        _ends_now(member)
        return member.lost_as(servers=(had, self.servers, self.needed), fence=self.fence, since=self._since)

    # -- the manager of the share -----------------------------------------------------------------------

    async def extend(self, lease: Grant, ttl: int) -> None:
        """Extend all members together. A majority must answer."""
        held = self.held()
        undos = [undo_extension(member) for member in held]
        outcomes = await asyncio.gather(*(in_time(it.extend(ttl), self.answer_within) for it in held))
        errors = [error for error in outcomes if error is not None]
        if len(outcomes) - len(errors) < self.needed:
            extended = (undo() for undo, error in zip(undos, outcomes, strict=True) if error is None)
            await asyncio.gather(*(in_time(undoing, self.answer_within) for undoing in extended))
            lease.check()
            refused = next((error for error in errors if isinstance(error, CommandRefused)), None)
            raise refused or Unreachable(
                f"{len(outcomes) - len(errors)} of {self.servers} servers extended the lease on {lease.name!r} within "
                f"{self.answer_within:g} seconds, {self.needed} have to: its deadline stays; check the others"
            ) from errors[0]

    def release(self, lease: Grant) -> None:
        """Release all members; done once others could get a majority. The others go on in the background."""
        self._ending = self._releasing = True
        self._stop_looking()
        _Release(self, lease)

    def confirm(self, share: Grant, had: int, error: Exception | None) -> None:
        """End the release of ``share``, which ``had`` servers held, with ``error`` if there is one."""
        self._releasing = False
        if isinstance(error, LeaseLost):  # before it was released
            self._end(next(member for member in self.members if member.state is LeaseState.LOST), error.reason)
            self._had = had
        self._released(share, error)

    # -- servers that answer late, or come back --------------------------------------------------------

    def adopt(self, vote: Vote) -> None:
        """Take over a request that the attempt needs no longer: it may be answered later."""
        vote.owner = self
        self.votes.append(vote)
        if vote.settled:
            self.answered(vote)

    def answered(self, vote: Vote) -> None:
        """Let a late grant join, so that the lease outlives servers that fail later. Give it back if it cannot.

        P8. A member knows the fence, so it grants a greater one later.
        """
        if not vote.settled:  # it stands in the queue there
            return
        self.votes.remove(vote)
        lease = vote.lease()
        if lease is None or lease.fence < self.fence or self.lost is not None or self._ending:
            vote.drop()
            return
        vote.owner = None
        where = {member: at for member, at in self._where.items() if at != vote.server} | {lease: vote.server}
        self._where = dict(sorted(where.items(), key=lambda item: item[1]))
        self.members = tuple(self._where)
        self.token: bytes = b" ".join([member.wire_token for member in self.members])
        for share in self.shares:
            share.wire_token = self.token
            lease.acquirer, lease.root = share.acquirer, share.root
        self._watch(lease)

    def _rejoin(self) -> None:
        """Ask the servers that do not hold it, and owe no answer about it."""
        there = {self._where[member] for member in self.held()} | {vote.server for vote in self.votes}
        for server in range(self.servers):
            if server not in there:
                with suppress(SyncError):  # its coordinator was closed
                    self._ask(self, server)

    # -- the end ---------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Notice the end in time. The drift lets it come before that of a member."""
        self._timer = None
        if self.lost is not None or self._ending:
            return  # after a failed release the members end by themselves
        time, deadline = now(), self.deadline()
        if deadline <= time:
            self._end(min(self.members, key=_certain), "expired")
            return
        if time >= self._rejoin_at:
            self._rejoin_at = time + self.members[0].ttl_ms / 3000
            self._rejoin()
        self._timer = self.loop.call_later(min(deadline, self._rejoin_at) - time, self._look)

    def member_lost(self, member: Grant) -> None:
        """End the share if too few members are left."""
        if not self._releasing and len(self.held()) < self._fewest:
            super().member_lost(member)

    def _end(self, member: Grant, reason: LossReason) -> None:
        if self.lost is None:
            self._had = len(self.held())
        self._stop_looking()
        if _ends_now(member) and member.renewing:
            reason = "unreachable"
        super()._end(member, reason)

    def _forget(self) -> None:
        self._stop_looking()
        super()._forget()

    def _stop_looking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        votes, self.votes = self.votes, []
        for vote in votes:
            vote.drop()


class _Release:
    """The release of the members of a group: the one receiver of the outcome of each (`FutureLike`).

    It is done when a majority of the servers has released. It is done, too, if others may get a majority although some
    members are not known to be released, once the servers have had `answer_within`. If fewer than a majority held it,
    the lease had been lost before.
    """

    _released = 0
    _loss: LeaseLost | None = None
    _error: Exception | None = None
    _late = False

    def __init__(self, group: QuorumGroup, share: Grant) -> None:
        self._group: QuorumGroup | None = group  # until it is done
        self._share = share
        self._needed, self._spared = group.needed, group.servers - group.needed
        held = [member for member in group.members if member.state is HELD]
        self._unanswered = self._had = len(held)
        self._timer = group.loop.call_later(group.answer_within, self._time_is_up)
        for member in held:
            member.releasers = [*(member.releasers or ()), self]
            member.give_back()
        self._look()

    def done(self) -> bool:
        """Return False: there is one outcome for each member."""
        return False

    def set_result(self, result: None) -> None:
        """Count a member that was released."""
        self._unanswered -= 1
        self._released += 1
        self._look()

    def set_exception(self, error: Exception) -> None:
        """Count a member that was lost before, or whose release failed: it ends with its ttl."""
        self._unanswered -= 1
        if isinstance(error, LeaseLost):
            self._had -= 1
            self._loss = self._loss or error
        else:
            self._error = self._error or error
        self._look()

    def _time_is_up(self) -> None:
        self._late = True
        self._look()

    def _look(self) -> None:
        enough = self._had - self._released <= self._spared
        if self._released < self._needed and self._unanswered and not (enough and self._late):
            return
        self._timer.cancel()
        group, self._group = self._group, None
        if group is not None:
            lost = self._loss if self._had < self._needed else None
            group.confirm(self._share, self._had, lost or (None if enough else self._error))


def _ends_now(member: Grant) -> bool:
    """Let a member end that is not certainly held any more; return whether that is so. The clock explains its loss."""
    ended = member.state is HELD and _certain(member) <= now()
    if ended:
        member.deadline = min(member.deadline, now())
    return ended


def _certain(member: Grant) -> float:
    """Return until when a member is certainly held, whatever the clock of its server does (local clock)."""
    if member.state is HELD:
        return member.deadline - member.period * DRIFT - LEAST_DRIFT
    return -math.inf
