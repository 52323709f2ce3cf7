"""What the server granted to a cohort of tasks: handing it on, letting it rest, giving it back. See `cohort`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from threading import get_ident
from typing import TypeAlias

from .._acquire.request import Request
from .._acquire.resource import Resource
from .._client.settings import Client
from .._core.clock import now
from .._core.keys import Keys
from .._leases.grant import Grant
from .._leases.tasks import ended
from .._scripts.constants import WRITER_WEIGHT
from .shared_grant import LastShare, ProcessGrant, TaskLease

UNKNOWN_LIMIT = 16
"""So many permits are asked for at once when only the server knows the limit; what was granted does not count."""

FEW = 64
"""So many shares are looked through for those of a task. To list them by task costs each grant in the process 10 %."""

Awaited: TypeAlias = asyncio.Future[TaskLease | None]
Waiting: TypeAlias = tuple[Awaited, Request, int]
"""A task in the line: what it awaits, what it wants, and after which opening it came."""


class Holdings(ABC):
    """The bases of a cohort, and the keeper of their shares.

    Invariant: nobody is in ``line`` while a base rests, but for the rest of a turn in which it was taken often.
    """

    def __init__(self, resource: Resource, request: Request) -> None:
        hub = resource.hub
        self.resource = resource
        self.hub = hub
        self.loop = hub.loop
        self.thread = get_ident()
        """In which bases are handed on while the loop runs there; 0 when that has ended for good."""
        self.client: Client = hub.manager.client
        self.response_timeout = hub.manager.response_timeout
        self.asked_response_timeout = hub.manager.asked_response_timeout
        self.exit_timeout = hub.manager.exit_timeout
        self.retry_for = hub.manager.retry_for
        self.line: deque[Waiting] = deque()
        self.bases: dict[ProcessGrant, None] = {}  # the oldest first
        self.resting: dict[ProcessGrant, None] = {}
        self._together = request.reads
        self._writes = request.limit == WRITER_WEIGHT and not request.reads
        self._weight = request.weight
        self._alone = not request.weight or request.limit == WRITER_WEIGHT
        """Who has it keeps others out, readers those who write."""
        self.listed = False
        """Which shares a task acquired is known without a look at all of them (`list_shares`)."""
        self.limit = request.limit
        """What its tickets say; 0: as the server knows it."""
        self._counts = self.limit > 0 or not self._weight
        """How many bases there can be is known, and each takes the room of one."""
        self._room = self._places()
        """For so many bases and tickets more."""

    def _places(self) -> int:
        """Return for how many bases and tickets there is room in all."""
        if not self._weight or self._together:
            return 1
        return max(1, (self.limit or UNKNOWN_LIMIT) // self._weight)  # the server says what is too heavy

    @abstractmethod
    def _hand_on(self, base: ProcessGrant) -> bool:
        """Give it to the first in the line, or to all of them (readers); return whether there was anybody."""

    @abstractmethod
    def _ask(self) -> None:
        """Ask the server for what is still wanted."""

    def _keep(self, base: ProcessGrant, number: int) -> None:
        """Begin with what was granted to the ticket of that number."""
        base.cohort, base.number = self, number
        base.sound = self.hub.pushes  # else nobody would tell us that others wait
        self.bases[base] = None
        self.hub.listeners[number] = base
        if self._counts:
            self._room -= 1
        else:
            base.takes_room = False

    # -- handing on ------------------------------------------------------------------------------------

    def _may_go_on(self, base: ProcessGrant, time: float) -> bool:
        """Return whether another task may have it. What it looks at is looked at in `passed_on`, too."""
        if not base.sound or time >= base.deadline or base.next_fence > base.last_fence:
            return False
        return not base.contended or (base.budget > 0 and time < base.yield_at and not self._together)

    def passed_on(self, lease: TaskLease) -> bool:
        """End ``lease`` without a command, if another task has the base then, or it may rest; else change nothing."""
        base, time = lease.base, now()
        shares = base.shares
        if lease.commits:
            self.part_with(base)
        if time >= lease.deadline:
            return False
        if len(shares) == 1:
            # Most often it may: there is none of what `_may_go_on` weighs, and the base lasts as long as the lease.
            weigh = base.contended or not base.sound or base.next_fence > base.last_fence
            if weigh and not self._may_go_on(base, time):
                return False
            if not (self.line and self._hand_on(base)):
                if not self._may_rest(base, lease.linger):
                    return False
                self._rest(base, lease.linger, time)
        shares.remove(lease)
        if lease._timer is not None or self.listed:
            lease.leave()
        if base.share_ended is not None:
            base.one_left()
        return True

    # -- resting ---------------------------------------------------------------------------------------

    def _may_rest(self, base: ProcessGrant, linger: float) -> bool:
        if base.contended:
            return not self._writes  # those who read get in once in a turn of theirs: a writer's is as short
        return linger > 0

    def _rest(self, base: ProcessGrant, linger: float, time: float) -> None:
        self.resting[base] = None
        base.rests_since = time
        if base.contended:
            if not base.turning:
                base.turning = True
                self.loop.call_soon(self._end_of_turn, base)
        elif base.rest is None or linger != base.lingers:
            if base.rest is not None:
                base.rest.cancel()
            base.lingers = linger
            base.rest = self.loop.call_later(linger, self._end_of_rest, base, linger)

    def _end_of_turn(self, base: ProcessGrant) -> None:
        base.turning = False
        if base in self.resting:
            self.give_back(base)

    def _end_of_rest(self, base: ProcessGrant, linger: float) -> None:
        base.rest = None
        if base not in self.resting:
            return
        left = base.rests_since + linger - now()
        if left > 0.0001:
            base.rest = self.loop.call_later(left, self._end_of_rest, base, linger)
        else:
            self.give_back(base)

    # -- giving back -----------------------------------------------------------------------------------

    def on_contention(self) -> None:
        """Somebody waits for the name at the server."""
        for base in list(self.bases):
            self._wanted(base)
        self._ask()

    def _wanted(self, base: ProcessGrant) -> None:
        if base.contended:
            return
        base.contended = True
        base.budget, base.yield_at = self.hub.burst, now() + self.hub.slice
        if self._together:  # nobody joins it: who comes now has to stand in the queue at the server
            self._leave_room(base)
        if base in self.resting and not base.turning:
            self.give_back(base)

    def part_with(self, base: ProcessGrant) -> None:
        """Nobody more gets this base: who comes now has to ask the server."""
        base.sound = False
        self._leave_room(base)
        self._ask()

    def list_shares(self) -> None:
        """Know from now on which shares each task acquired, if there are many: a release has to find one of them."""
        if self.listed or (len(self.bases) <= FEW and sum(len(base.shares) for base in self.bases) <= FEW):
            return
        self.listed = True
        shares = [share for base in self.bases for share in base.shares]
        for share in sorted(shares, key=lambda share: share.since):
            if share.acquirer is not None and not ended(share.acquirer):
                self.resource.leases.note(share.acquirer, share)

    def _leave_room(self, base: ProcessGrant) -> None:
        if base.takes_room:  # once: it may end after that, or be left behind when it has ended
            base.takes_room = False
            self._room += 1

    def give_back(self, base: ProcessGrant) -> None:
        """Give it to the server; who waits here is behind those who wait there."""
        self._forget(base)
        base.give_back()
        self._ask()

    def _forget(self, base: ProcessGrant) -> None:
        base.sound = False
        if base in self.bases:
            del self.bases[base]
            self._leave_room(base)
        if base in self.resting:
            del self.resting[base]
        if base.rest is not None:
            base.rest.cancel()
            base.rest = None

    def lost(self, base: ProcessGrant) -> None:
        """The server lease is gone: who has it loses it, and nobody gets it."""
        self._forget(base)
        shares, base.shares = base.everybody(), []
        for share in shares:
            share.lose(base.reason or "expired")
        base.one_left()
        self._ask()

    # -- Keeper, for shares ----------------------------------------------------------------------------

    def check_context(self) -> None:
        """Raise WrongContext in another event loop, or after a fork."""
        self.hub.manager.check_context()

    def stalled_since(self, time: float) -> float:
        """Return for how many seconds, at least, the event loop stood still since ``time`` (local clock)."""
        return self.hub.manager.stalled_since(time)

    def answering(self, keys: Keys, stalled: bool) -> bool:
        """Return whether the server that has ``keys`` answers; ``stalled``: or nobody could have noticed."""
        return self.hub.manager.answering(keys, stalled)

    def members_of(self, lease: Grant) -> tuple[Grant, ...]:
        """Return what has to hold on the server for ``lease`` to hold."""
        assert isinstance(lease, TaskLease)
        return (lease.base,)

    async def extend(self, lease: Grant, ttl: int) -> None:
        """Renew the base now with another ttl, and let ``lease`` end then if it is not renewed."""
        assert isinstance(lease, TaskLease)
        await self.hub.manager.renewals.extend(lease.base, ttl)
        lease.extended(ttl)
        self.hub.manager.renewals.writer_follows(lease.base)

    def release(self, lease: Grant) -> None:
        """End ``lease``; the server hears of it unless another task has the base then."""
        assert isinstance(lease, TaskLease)
        base = lease.base
        base.tighten(lease)
        if self.thread and self.passed_on(lease):
            lease.release_ended(None)
            return
        base.shares.remove(lease)
        base.one_left()
        lease.leave()
        if base.everybody():
            lease.release_ended(None)
            return
        base.releasers = [*(base.releasers or ()), LastShare(lease)]
        self.give_back(base)

    def forget(self, lease: Grant) -> None:
        """``lease`` is lost. By its own end: then it is not handed on, since its task may go on writing."""
        assert isinstance(lease, TaskLease)
        base = lease.base
        base.tighten(lease)
        lease.leave()
        if lease not in base.shares:
            return  # the base is lost
        base.shares.remove(lease)
        base.one_left()
        if now() >= base.deadline:
            base.lose("expired")
        elif base.everybody():
            self.part_with(base)
        else:
            self.give_back(base)
