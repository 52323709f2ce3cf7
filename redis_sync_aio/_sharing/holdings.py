"""The process grants of a cohort: how they are handed on, rest, and are given back. See `cohort`."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from typing import TypeAlias

from .._acquire.request import Request
from .._acquire.resource import Resource
from .._core.clock import now
from .._leases.tasks import ended
from .._scripts.constants import WRITER_WEIGHT
from .shared_grant import ProcessGrant, TaskGrant
from .task_grant_manager import TaskGrantManager

UNKNOWN_LIMIT = 16
"""Permits that are requested together when only the server knows the limit; granted ones do not count."""

FEW = 64
"""Most shares that are searched for those of a task. To list them by task costs each grant in the process 10 %."""

Awaited: TypeAlias = asyncio.Future[TaskGrant | None]
Waiting: TypeAlias = tuple[Awaited, Request, int]
"""A task in the line: its future, its request, and the number of pending grants when it came."""


class Holdings(TaskGrantManager):
    """The process grants of a cohort.

    Invariant: no task is in ``line`` while a grant rests, except for the rest of a turn in which it was taken often.
    """

    def __init__(self, resource: Resource, request: Request) -> None:
        super().__init__(resource)
        self.line: deque[Waiting] = deque()
        self.grants: dict[ProcessGrant, None] = {}  # the oldest first
        self.resting: dict[ProcessGrant, None] = {}
        self._together = request.reads
        self._writes = request.limit == WRITER_WEIGHT and not request.reads
        self._weight = request.weight
        self._alone = not request.weight or request.limit == WRITER_WEIGHT
        """Whether a grant excludes others: those of readers exclude writers."""
        self.limit = request.limit
        """The limit in its tickets; 0 for the limit that the server knows."""
        self._counts = self.limit > 0 or not self._weight
        """Whether the number of possible grants is known, each of which takes one place."""
        self._room = self._places()
        """Number of further grants and tickets for which there is room."""

    def _places(self) -> int:
        """Return for how many grants and tickets there is room in all."""
        if not self._weight or self._together:
            return 1
        return max(1, (self.limit or UNKNOWN_LIMIT) // self._weight)  # the server refuses what is too heavy

    @abstractmethod
    def _hand_on(self, grant: ProcessGrant) -> bool:
        """Give ``grant`` to the first task in the line, or to all (readers); return whether there was one."""

    @abstractmethod
    def _ask(self) -> None:
        """Send a request for each task in the line, but no more than are of use."""

    def _keep(self, grant: ProcessGrant, number: int) -> None:
        """Start to share the grant to the ticket of that number."""
        grant.cohort, grant.number = self, number
        grant.sound = self.hub.pushes  # otherwise no notice would say that others wait
        self.grants[grant] = None
        self.hub.listeners[number] = grant
        if self._counts:
            self._room -= 1
        else:
            grant.takes_room = False

    # -- handing on ------------------------------------------------------------------------------------

    def _may_go_on(self, grant: ProcessGrant, time: float) -> bool:
        """Return whether another task may have ``grant``. `passed_on` looks at the same facts."""
        if not grant.sound or time >= grant.deadline or grant.next_fence > grant.last_fence:
            return False
        return not grant.contended or (grant.budget > 0 and time < grant.yield_at and not self._together)

    def passed_on(self, lease: TaskGrant) -> bool:
        """End ``lease`` without a command if another task takes the grant or it may rest; else change nothing."""
        grant, time = lease.process_grant, now()
        shares = grant.shares
        if lease.commits:
            self.part_with(grant)
        if time >= lease.deadline:
            return False
        if len(shares) == 1:
            # The usual case: no condition of `_may_go_on` applies, and the grant lasts as long as the lease.
            weigh = grant.contended or not grant.sound or grant.next_fence > grant.last_fence
            if weigh and not self._may_go_on(grant, time):
                return False
            if not (self.line and self._hand_on(grant)):
                if not self._may_rest(grant, lease.linger):
                    return False
                self._rest(grant, lease.linger, time)
        shares.remove(lease)
        if lease._timer is not None or self.listed:
            lease.leave()
        return True

    # -- resting ---------------------------------------------------------------------------------------

    def _may_rest(self, grant: ProcessGrant, linger: float) -> bool:
        if grant.contended:
            return not self._writes  # readers get in once in a turn of theirs: a writer's turn is as short
        return linger > 0

    def _rest(self, grant: ProcessGrant, linger: float, time: float) -> None:
        self.resting[grant] = None
        grant.rests_since = time
        if grant.contended:
            if not grant.turning:
                grant.turning = True
                self.loop.call_soon(self._end_of_turn, grant)
        elif grant.rest is None or linger != grant.lingers:
            if grant.rest is not None:
                grant.rest.cancel()
            grant.lingers = linger
            grant.rest = self.loop.call_later(linger, self._end_of_rest, grant, linger)

    def _end_of_turn(self, grant: ProcessGrant) -> None:
        grant.turning = False
        if grant in self.resting:
            self.give_back(grant)

    def _end_of_rest(self, grant: ProcessGrant, linger: float) -> None:
        grant.rest = None
        if grant not in self.resting:
            return
        left = grant.rests_since + linger - now()
        if left > 0.0001:
            grant.rest = self.loop.call_later(left, self._end_of_rest, grant, linger)
        else:
            self.give_back(grant)

    # -- giving back -----------------------------------------------------------------------------------

    def on_contention(self) -> None:
        """Limit the turn of all grants: others wait for the name at the server."""
        for grant in list(self.grants):
            self._limit_turn(grant)
        self._ask()

    def _limit_turn(self, grant: ProcessGrant) -> None:
        """Let ``grant`` be handed on for a limited time and number from now on."""
        if grant.contended:
            return
        grant.contended = True
        grant.budget, grant.yield_at = self.hub.burst, now() + self.hub.slice
        if self._together:  # no further task joins it: they queue at the server
            self._leave_room(grant)
        if grant in self.resting and not grant.turning:
            self.give_back(grant)

    def part_with(self, grant: ProcessGrant) -> None:
        """Hand ``grant`` to no further task: newcomers queue at the server."""
        grant.sound = False
        self._leave_room(grant)
        self._ask()

    def list_shares(self) -> None:
        """Index the shares by task from now on if there are many: a release has to find one of them."""
        if self.listed or (len(self.grants) <= FEW and sum(len(grant.shares) for grant in self.grants) <= FEW):
            return
        self.listed = True
        shares = [share for grant in self.grants for share in grant.shares]
        for share in sorted(shares, key=lambda share: share.since):
            if share.acquirer is not None and not ended(share.acquirer):
                self.resource.leases.note(share.acquirer, share)

    def _leave_room(self, grant: ProcessGrant) -> None:
        if grant.takes_room:  # only once: it may end after that, or be left behind when it has ended
            grant.takes_room = False
            self._room += 1

    def give_back(self, grant: ProcessGrant) -> None:
        """Give ``grant`` back to the server; tasks that wait here are behind the waiters there."""
        self._forget(grant)
        grant.give_back()
        self._ask()

    def _forget(self, grant: ProcessGrant) -> None:
        grant.sound = False
        if grant in self.grants:
            del self.grants[grant]
            self._leave_room(grant)
        if grant in self.resting:
            del self.resting[grant]
        if grant.rest is not None:
            grant.rest.cancel()
            grant.rest = None

    def lost(self, grant: ProcessGrant) -> None:
        """End the parts of ``grant``, which was lost, and stop handing it on."""
        self._forget(grant)
        shares, grant.shares = grant.shares, []
        for share in shares:
            share.lose(grant.reason or "expired")
        self._ask()
