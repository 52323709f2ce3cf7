"""Requests to several servers at the same time, and the lease that stands on a majority of their leases.

The grants below, the members, are ordinary ones of the coordinators of those servers, as for every `LeaseGroup`: they
are renewed, lost, released and undone there.

How long it is held. Of n servers a quorum (n // 2 + 1) must hold it at the same moment, so it ends when all but
quorum - 1 members may have ended. With the members sorted by their deadlines, the latest first, that is the deadline of
the last member of the quorum. The clocks of servers may run faster than ours, by `DRIFT` of the ttl and `LEAST_DRIFT`.

Servers that do not hold it, as they forgot it or failed, are asked again while it is held. Every member knows the
fence, so of the next majority at least one does.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from .._core.cancellation import undo_in
from .._core.clock import now
from .._core.futures import finish
from .._leases.acquisition import Acquisition, Request
from .._leases.grant import Grant
from .._leases.hub import Hub
from .._leases.resource import Resource
from .._leases.settings import HELD, LeaseState
from .._transport.link import Link
from ..errors import CommandRefused, LeaseLost, LossReason, SyncError, Unreachable
from .multilock import LeaseGroup, undo_extension

# -- Requests to several servers at the same time, some of which may not answer in time ------------------------


T = TypeVar("T")

CHECK_INTERVAL = 0.01
"""Seconds between checks for unreachable servers."""


class Vote:
    """A request to one server, in flight or answered."""

    used = False
    """True if its grant is in use, so that it is not withdrawn."""

    def __init__(self, server: int, resource: Resource, request: Request) -> None:
        self.server = server  # its number, from 0 on
        self.resource = resource
        self.future: asyncio.Future[Grant | None] = resource.hub.loop.create_future()
        self._acquisition = Acquisition(resource, request, self.future)
        self._acquisition.ask()

    @property
    def error(self) -> SyncError | None:
        """The error of the request, if it has failed."""
        failed = self.future.done() and not self.future.cancelled()
        error = self.future.exception() if failed else None
        assert error is None or isinstance(error, SyncError)
        return error

    @property
    def answered(self) -> bool:
        """True if the server has granted or refused it."""
        return self.future.done() and not self.future.cancelled() and self.future.exception() is None

    @property
    def lease(self) -> Grant | None:
        """The grant, as long as it is held."""
        lease = self.future.result() if self.answered else None
        return lease if lease is not None and lease.remaining() > 0 else None

    def withdraw(self) -> None:
        """Undo the request in the background."""
        undo_in(self.resource.hub.loop, partial(self._acquisition.task_cancelled, self.future))


def is_silent(hub: Hub, within: float) -> bool:
    """Return whether the server is unreachable, or has owed an answer for more than ``within`` seconds."""
    link = hub.link
    assert isinstance(link, Link), "a cluster is no server of a Redlock"
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
    return vote.lease is lease


class Votes:
    """The votes of one attempt. At the end of its ``with`` those that are not used are withdrawn."""

    _waiter: asyncio.Future[None] | None = None

    def __init__(self, quorum: int, answer_within: float) -> None:
        self.all: list[Vote] = []
        self._quorum = quorum
        self._answer_within = answer_within

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for vote in self.all:
            if not vote.used:
                vote.withdraw()

    def ask(self, server: int, resource: Resource, request: Request) -> Vote:
        """Ask one more server."""
        vote = Vote(server, resource, request)
        vote.future.add_done_callback(self._answered)
        self.all.append(vote)
        return vote

    @property
    def granted(self) -> list[tuple[Vote, Grant]]:
        """The votes that were granted, each with its grant."""
        return [(vote, lease) for vote in self.all if (lease := vote.lease) is not None]

    @property
    def suffice(self) -> bool:
        """True if the granted votes are a majority."""
        return len(self.granted) >= self._quorum

    def _over(self) -> bool:
        """Return whether no answer is worth waiting for: a majority has answered, and the other servers are silent."""
        missing = [vote for vote in self.all if not vote.future.done()]
        if missing and sum(vote.answered for vote in self.all) < self._quorum:
            return False
        return all(is_silent(vote.resource.hub, self._answer_within) for vote in missing)

    async def answers(self, ends: float) -> None:
        """Wait for all answers, as long as a server may take; not for silent servers if the others are a majority."""
        ends, loop = min(ends, now() + self._answer_within), asyncio.get_running_loop()
        while (left := ends - now()) > 0 and not self._over():
            self._waiter = loop.create_future()
            timer = loop.call_later(min(left, CHECK_INTERVAL), finish, self._waiter, None, None)
            try:
                await self._waiter
            finally:
                timer.cancel()

    def _answered(self, _: object) -> None:
        if self._waiter is not None and self._over():
            finish(self._waiter, None, None)


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
    """The timer that notices its end."""
    _rejoining: asyncio.TimerHandle | asyncio.Task[None] | None = None
    """The timer or task that asks servers again that do not hold it."""
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
        ask: Callable[[Votes, int], Vote],
    ) -> None:
        """Group ``members``, which are by server, of ``servers`` in all. A majority of them agrees on ``fence``.

        A server has ``answer_within`` seconds for an answer. ``ask`` asks one again, without waiting in its queue.
        """
        self.servers = servers
        self.needed: int = majority(servers)
        self._answer_within = answer_within
        self._ask = ask
        self._where = {lease: server for server, lease in members.items()}
        super().__init__(key, tuple(members.values()))
        self.fence = fence
        self._since = min(member.since for member in self.members)
        self._look()
        first = self.members[0]
        if self.lost is None and first.auto_renew and first.hold_limit == math.inf:  # else it would outlast its limit
            self._rejoin_in(first.ttl_ms / 3000)

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
        ends = sorted(map(_certain, self.members), reverse=True)
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
        outcomes = await asyncio.gather(*(in_time(it.extend(ttl), self._answer_within) for it in held))
        errors = [error for error in outcomes if error is not None]
        if len(outcomes) - len(errors) < self.needed:
            extended = (undo() for undo, error in zip(undos, outcomes, strict=True) if error is None)
            await asyncio.gather(*(in_time(undoing, self._answer_within) for undoing in extended))
            lease.check()
            refused = next((error for error in errors if isinstance(error, CommandRefused)), None)
            raise refused or Unreachable(
                f"{len(outcomes) - len(errors)} of {self.servers} servers extended the lease on {lease.name!r} within "
                f"{self._answer_within:g} seconds, {self.needed} have to: its deadline stays; check the others"
            ) from errors[0]

    def release(self, lease: Grant) -> None:
        """Release all members; done once others could get a majority, and each server has had its time."""
        self._ending = self._releasing = True
        self._stop_looking()
        late = now() + self._answer_within
        outcomes = self._give_back(lambda: self._look_at_release(lease, outcomes, late))
        self._look_at_release(lease, outcomes, late)

    def _look_at_release(self, lease: Grant, outcomes: Mapping[Grant, asyncio.Future[None]], late: float) -> None:
        """End the release of ``lease`` if all servers have answered, or enough of them and the others are silent.

        From ``late`` on (local clock) they count as silent. They go on in the background.
        """
        found = [outcome.exception() for outcome in outcomes.values() if outcome.done()]
        errors = [error for error in found if isinstance(error, Exception)]
        if not self._releasing:
            return
        self._stop_looking()
        lost = [error for error in errors if isinstance(error, LeaseLost)]
        missing = [member for member, outcome in outcomes.items() if not outcome.done()]
        enough = len(missing) + len(errors) - len(lost) <= self.servers - self.needed
        if missing and not (enough and (now() >= late or self._all_silent(missing))):
            if enough:
                self._timer = self.loop.call_later(CHECK_INTERVAL, self._look_at_release, lease, outcomes, late)
            return
        self._releasing = False
        had = len(outcomes) - len(lost)
        failed = None if enough else next(error for error in errors if error not in lost)
        if lost and had < self.needed:  # before it was released
            failed = lost[0]
            self._end(next(member for member in self.members if member.state is LeaseState.LOST), failed.reason)
            self._had = had
        self._released(lease, failed)

    def _all_silent(self, members: Iterable[Grant]) -> bool:
        return all(is_silent(member.manager.hub, self._answer_within) for member in members)

    # -- servers that come back ------------------------------------------------------------------------

    def _rejoin_in(self, seconds: float) -> None:
        self._rejoining = self.loop.call_later(seconds, self._rejoin, seconds)

    def _rejoin(self, seconds: float) -> None:
        held = {self._where[member] for member in self.held()}
        missing = [server for server in range(self.servers) if server not in held]
        if missing:
            # Not by the task factory of the loop: an eager task may end, and the next be due, before this returns.
            asking = self._ask_again(missing, seconds)
            self._rejoining = asyncio.Task(asking, loop=self.loop, name="redis_sync_aio rejoin")
        else:
            self._rejoin_in(seconds)

    async def _ask_again(self, missing: list[int], seconds: float) -> None:
        """Add the servers that grant it immediately, so that it outlives others that fail later."""
        with Votes(1, self._answer_within) as votes:
            for server in missing:
                with suppress(SyncError):  # its coordinator was closed
                    self._ask(votes, server)
            await votes.answers(math.inf)
            for vote, lease in votes.granted:
                if await raise_fence(vote, lease, self.fence, self._answer_within):
                    vote.used = True
                    self._where = {member: at for member, at in self._where.items() if at != vote.server}
                    self._where[lease] = vote.server
                    self.members = tuple(self._where)
                    self._watch(lease)
        self._rejoin_in(seconds)

    # -- the end ---------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Notice the end in time. The drift lets it come before that of a member."""
        self._timer = None
        if self.lost is not None or self._ending:
            return  # after a failed release the members end by themselves
        left = self.deadline() - now()
        if left <= 0:
            self._end(min(self.members, key=_certain), "expired")
        else:
            self._timer = self.loop.call_later(left, self._look)

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
        for what in (self._timer, self._rejoining):
            if what is not None:
                what.cancel()
        self._timer = self._rejoining = None


def _ends_now(member: Grant) -> bool:
    """Let a member end that is not certainly held any more; return whether that is so. The clock explains its loss."""
    ended = member.state is HELD and _certain(member) <= now()
    if ended:
        member.deadline = min(member.deadline, now())
    return ended


def _certain(member: Grant) -> float:
    """Return until when a member is certainly held, whatever the clock of its server does (local clock)."""
    if member.state is LeaseState.HELD:
        return member.deadline - member.period * DRIFT - LEAST_DRIFT
    return -math.inf
