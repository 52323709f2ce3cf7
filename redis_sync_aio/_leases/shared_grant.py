"""Grants of local sharing: those of the server to this process, and the parts that its tasks hold.

A *process grant* is renewed, lost and released as any other grant. Tasks hold it one after the other, or (readers)
together, each by a *task grant* of its own. The cohort (`_leases/cohort.py`) decides which task is next, and until
when a grant is handed on.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from threading import get_ident
from typing import TYPE_CHECKING, TypeAlias

from .._client.replies import Argument, Reply
from .._core.clock import now
from .._core.keys import Keys
from .._scripts.constants import FENCE_RANGE, WRITER_WEIGHT
from ..errors import LeaseLost, LossReason
from .acquisition import Request
from .grant import Cause, Grant, ended
from .manager import GrantManager
from .resource import Resource
from .settings import HELD, RELEASED, LeaseState

if TYPE_CHECKING:
    from .._core.observers import Observation
    from .hub import Hub

Task: TypeAlias = asyncio.Task[object]

MOST_FENCES = 8192
"""Most fences that are reserved together. Fences are microseconds, so more would run ahead of the clock."""


class ProcessGrant(Grant):
    """A grant to this process, for its tasks to share.

    Invariants: all ``shares`` end with it, if not before. The fences from ``next_fence`` to ``last_fence`` are reserved
    for it on the server, and no task has one of them yet. (Readers all have the same.)
    """

    # Attributes that each grant reads are set on the object: the interpreter finds those of a class far more slowly.
    # (With more than 29 of its own, an object is slow, too: tests/sharing counts those of a cohort.)
    contended: bool
    """True if others wait for it at the server."""
    sound: bool
    """True if it may be handed on. False once its cohort has retired it, or a task overstayed its time."""

    number = 0
    """The number of its contention notices; 0 until a cohort has the grant."""
    budget = 0
    """Number of hand-overs that are left while others wait."""
    yield_at: float = math.inf
    """Time until which it may be handed on while others wait (local clock)."""
    rests_since: float = 0.0
    rest: asyncio.TimerHandle | None = None
    """The timer that ends its rest without a task."""
    lingers: float = 0.0
    """Seconds that the rest lasts."""
    takes_room = True
    """True if it takes one of its cohort's places."""
    turning = False
    """True if it is given back at the end of this turn of the loop, unless a task holds it then."""
    released_by: TaskGrant | None = None
    """The part that was held last: the outcome of the release is its own."""
    cohort: Holdings
    manager: GrantManager

    def __init__(
        self,
        manager: GrantManager,
        keys: Keys,
        token: bytes,
        fence: int,
        deadline: float,
        period: float,
        request: Request,
    ) -> None:
        super().__init__(manager, keys, token, fence, deadline, period, request)
        self.step = 0 if request.reads else 1
        self._range = FENCE_RANGE
        self.shares: list[TaskGrant] = []
        self.contended, self.sound = False, True
        self._reserved(fence, FENCE_RANGE)

    def _reserved(self, fence: int, number: int) -> None:
        self.next_fence: int = fence
        self.last_fence: int = fence + number - 1
        self.half: int = fence + number // 2

    def look(self) -> None:
        """Renew the grant now, unless a renewal is in flight: the answer tells of other waiters, and brings fences."""
        if self.state is HELD and not self.renewing:
            self.manager.renewals.renew(self, self.ttl_ms)

    def last(self, ttl_ms: int) -> None:
        """Renew the grant with another ttl from now on."""
        if ttl_ms != self.ttl_ms:
            self.ttl_ms = ttl_ms
            self.manager.renewals.renew(self, ttl_ms)

    def asks(self) -> tuple[Argument, ...]:
        """Ask for more fences once half of them are used, and whether others wait."""
        if self.next_fence <= self.half:
            return (0,)
        self._range = min(self._range * 2, MOST_FENCES)
        return (self._range,)

    def renewed(self, asked: tuple[Argument, ...], reply: Reply) -> None:
        """Take the rest of the answer to a renewal: fences, and whether others wait."""
        if asked and len(reply) > 2:
            _, _, fence, waiting = reply
            if fence:
                self._reserved(fence, int(asked[0]))
            if waiting:
                self.on_contention()
            else:
                self.contended = False

    @property
    def parts(self) -> Sequence[Grant]:
        """The grants that tasks hold of it."""
        return self.shares

    def observed(self) -> Observation | None:
        """Return the observation of the first request that has a part of it."""
        return next((share.observation for share in self.shares if share.observation), None)

    def drop_forgotten(self) -> bool:
        """Drop the parts that are forgotten, and warn; return False, as the grant itself belongs to the process."""
        for share in list(self.shares):
            share.drop_forgotten()
        return False

    def prolonged(self) -> None:
        """Let the parts last as long as this grant."""
        for share in self.shares:
            share.deadline = min(share.ends, self.deadline)

    def look_at_shares(self, time: float) -> None:
        """End the parts whose own time is up; their timers do not count time asleep."""
        for share in list(self.shares):
            if time >= share.ends:
                share.lose("expired")

    def release_ended(self, error: Exception | None) -> None:
        """Note the outcome of the release, also for the part that was held last."""
        self._unlisted()
        super().release_ended(error)
        last, self.released_by = self.released_by, None
        if last is None:
            return
        if isinstance(error, LeaseLost):
            last.lose(error.reason)
            error = last.loss()
        elif error is not None:  # it is still held, and may be released again
            self.shares.append(last)
        last.release_ended(error)

    def _unlisted(self) -> None:
        """Stop receiving contention notices."""
        if self.number:
            self.cohort.resource.hub.listeners.pop(self.number, None)

    def lose(self, reason: LossReason, cause: Cause | None = None) -> None:
        """Note that it is gone, and its parts with it."""
        was_held = self.state in (HELD, LeaseState.RELEASING)
        self._unlisted()
        super().lose(reason, cause)
        if was_held and self.number:  # otherwise no task needed it when it arrived, and it has no cohort
            self.cohort.lost(self)

    def _report_loss(self, tasks: int = 1) -> None:
        if self.shares:  # otherwise no task held it
            super()._report_loss(len(self.shares))

    def on_contention(self) -> None:
        """Stop handing on the grants of this name after a while: other clients wait for it."""
        resource = self.cohort.resource  # this grant may be on its way back, and the name another object by now
        (resource.hub.resources.get(self.keys.id) or resource).on_contention()


class TaskGrant(Grant):
    """The part of a process grant that one task holds, with a fence, an end and a loss of its own."""

    # As class attributes they cost nothing to set up: it is made for every grant.
    renew_at: float = math.inf
    hold_limit: float = math.inf
    ends: float = math.inf
    """Deadline of the task grant, whether or not its process grant is renewed (local clock)."""
    weight: int = 1
    commits: int = 0
    """Number of guarded commits that are in flight, or may be."""
    _timer: asyncio.TimerHandle | None
    manager: Holdings
    terms: Request

    def __init__(self, cohort: Holdings, grant: ProcessGrant, request: Request) -> None:
        self.state: LeaseState = HELD
        self.manager = cohort
        self.terms = request
        self._timer = None
        self.process_grant = grant
        grant.shares.append(self)
        if grant.contended:
            grant.budget -= 1
        fence = grant.next_fence
        self.fence: int = fence
        grant.next_fence = fence + grant.step
        if fence >= grant.half:
            grant.look()
        self.deadline: float = grant.deadline
        self.since: float = now()
        if request.ttl_ms != grant.ttl_ms:
            grant.last(request.ttl_ms)
        if not request.plain:
            self.weight = request.weight or 1
            # Of writers: the tasks that had the grant before this one are writers, too.
            self.previous_fence: int = grant.previous_fence
            grant.previous_fence = fence
            self._limit(request)

    def _limit(self, request: Request) -> None:
        if not request.auto_renew:
            self.end_in(request.ttl_ms / 1000)
        elif request.max_hold is not None:
            self.hold_limit = now() + request.max_hold
            self.end_in(request.max_hold)

    @property
    def keys(self) -> Keys:  # type: ignore[override]
        """The keys of its name."""
        return self.process_grant.keys

    @property
    def wire_token(self) -> bytes:  # type: ignore[override]
        """The token of its process grant."""
        return self.process_grant.wire_token

    @property
    def ttl_ms(self) -> int:  # type: ignore[override]
        """The ttl that was asked for."""
        return self.terms.ttl_ms

    @property
    def auto_renew(self) -> bool:  # type: ignore[override]
        """True if it lasts as long as its process grant, which is renewed."""
        return self.terms.auto_renew

    @property
    def members(self) -> tuple[Grant, ...]:
        """The process grant, which the server knows."""
        return (self.process_grant,)

    @property
    def handed_over(self) -> bool:  # type: ignore[override]
        """True if another task held the process grant before. False for readers, which join it."""
        return self.fence != self.process_grant.fence

    @property
    def queued(self) -> bool:  # type: ignore[override]
        """True if the process had to wait for another holder, and this is the first task."""
        return not self.handed_over and self.process_grant.queued

    @property
    def linger(self) -> float:
        """Seconds for which its process grant rests after it."""
        return self.terms.linger

    @property
    def period(self) -> float:  # type: ignore[override]
        """Seconds granted by the latest answer."""
        return self.process_grant.period

    def end_in(self, seconds: float) -> None:
        """End the task grant after a number of seconds, before its process grant ends."""
        if self._timer is not None:
            self._timer.cancel()
        self.ends = now() + seconds
        self.deadline = min(self.ends, self.process_grant.deadline)
        self._timer = self.manager.loop.call_later(seconds, self._over)

    def _over(self) -> None:
        self._timer = None
        if self.state is HELD:
            self.lose("expired")

    def _report_loss(self, tasks: int = 1) -> None:
        if self.process_grant.state is not LeaseState.LOST:  # else its loss is reported
            super()._report_loss(tasks)

    def committing(self, number: int) -> None:
        """Count guarded commits in flight: a grant that ends meanwhile is not handed on.

        A late commit must not pass for the next task's.
        """
        self.commits += number

    def become_reader(self) -> None:
        """Turn this part of a writer's grant into one of a reader's."""
        super().become_reader()
        self.process_grant.become_reader()
        self.manager.part_with(self.process_grant)  # not for other writers

    def extended(self, ttl: int) -> None:
        """Bind the task grant to its process grant; without renewals for ``ttl``, or until `max_hold` if later."""
        if self.ends < math.inf and self.state is HELD:
            left = self.hold_limit - now() if self.auto_renew else 0.0
            self.end_in(max(ttl / 1000, left))

    def ends_by(self) -> float:
        """Return when it ends at the latest, unless it is extended (local clock)."""
        return self.ends

    def leave(self) -> None:
        """Stop its timer, and forget the task that holds it."""
        if self.manager.listed:
            self.manager.resource.leases.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def release(self) -> None:
        """Give the lease back. Idempotent.

        When another task of this process waits it has the lease when this returns, and nothing was sent. Otherwise
        as `Lease.release`; but a lease that lingers, or that others wait for while its process may go on, is given
        back in the background.

        Raises:
            LeaseLost: it was lost before.
            Unreachable: no answer, after retries; what the process holds then ends with its ttl.

        On cancellation the release continues in the background: it is never torn in half.
        """
        manager, held = self.manager, self.state is HELD and self.process_grant.sound
        if held and manager.hub.hands_on and manager.thread == get_ident() and manager.loop.is_running():
            if self.body is not None:
                self.end_body()
            if manager.passed_on(self):
                self.state = RELEASED
                if self.ended is not None or self.observation is not None:
                    self.notify_ended()
                return
        await super().release()


# -- The grants of a cohort: how they are handed on, rest, and are given back. See `cohort` --------------------


UNKNOWN_LIMIT = 16
"""Permits that are requested together when only the server knows the limit; granted ones do not count."""

FEW = 64
"""Most shares that are searched for those of a task. To list them by task costs each grant in the process 10 %."""

Awaited: TypeAlias = asyncio.Future[TaskGrant | None]
Waiting: TypeAlias = tuple[Awaited, Request, float]
"""A task in the line: its future, its request, and when it came (local clock)."""


class Holdings(ABC):
    """The process grants of a cohort, and the `LeaseManager` (see `_leases.grant`) of the parts that tasks hold.

    Invariant: no task is in ``line`` while a grant rests, except for the rest of a turn in which it was taken often.
    """

    def __init__(self, resource: Resource, request: Request) -> None:
        hub = resource.hub
        self.resource = resource
        self.hub: Hub = hub
        self.loop: asyncio.AbstractEventLoop = hub.loop
        self.listed: bool = False
        """True if the parts are indexed by the task that acquired them."""
        self.line: deque[Waiting] = deque()
        self.grants: dict[ProcessGrant, None] = {}  # the oldest first
        self.resting: dict[ProcessGrant, None] = {}
        self.reads: bool = request.reads
        """True for readers, who hold a grant together."""
        self._writes = request.limit == WRITER_WEIGHT and not request.reads
        self._weight = request.weight
        self._alone = not request.weight or request.limit == WRITER_WEIGHT
        """True if a grant excludes others: those of readers exclude writers."""
        self.thread: int = get_ident()
        """The thread of the event loop."""
        self.limit: int = request.limit
        """The limit in its tickets; 0 for the limit that the server knows."""
        self._counts = self.limit != 0 or not self._weight
        """True if the number of possible grants is known, each of which takes one place."""
        self._room = self._places()
        """Number of further grants and tickets for which there is room."""

    def _places(self) -> int:
        """Return for how many grants and tickets there is room in all."""
        if not self._weight or self.reads:
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
        return not grant.contended or (grant.budget > 0 and time < grant.yield_at and not self.reads)

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
        grant.budget, grant.yield_at = self.hub.options.burst, now() + self.hub.options.slice
        if self.reads:  # no further task joins it: they queue at the server
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

    def reroute(self) -> None:
        """Stop handing over: contention notices of the server would not arrive."""
        for grant in list(self.resting):
            self.give_back(grant)
        for grant in list(self.grants):
            self.part_with(grant)

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

    # -- the parts: how they are extended, released and forgotten --------------------------------------

    async def extend(self, lease: Grant, ttl: int) -> None:
        """Renew the grant now with another ttl, and let ``lease`` end then if it is not renewed."""
        assert isinstance(lease, TaskGrant)
        await self.hub.manager.renewals.extend(lease.process_grant, ttl)
        lease.extended(ttl)

    def release(self, lease: Grant) -> None:
        """End ``lease``, with a command unless another task gets the grant."""
        assert isinstance(lease, TaskGrant)
        grant = lease.process_grant
        if self.hub.hands_on and self.passed_on(lease):
            lease.release_ended(None)
            return
        grant.shares.remove(lease)
        lease.leave()
        if grant.shares:
            lease.release_ended(None)
            return
        grant.released_by = lease
        self.give_back(grant)

    def let_go(self, lease: Grant) -> None:
        """Let ``lease`` go, which is forgotten. No other task gets its grant, which ends with its last part."""
        assert isinstance(lease, TaskGrant)
        grant = lease.process_grant
        self.part_with(grant)
        grant.shares.remove(lease)
        lease.state = LeaseState.RELEASED
        lease.leave()
        lease.notify_ended()
        if not grant.shares:
            grant.auto_renew, grant.renew_at = False, grant.deadline

    def forget(self, lease: Grant) -> None:
        """Forget ``lease``, which is lost. If it ended by itself, the grant is not handed on: its task may write."""
        assert isinstance(lease, TaskGrant)
        grant = lease.process_grant
        lease.leave()
        if lease not in grant.shares:
            return  # the grant is lost
        grant.shares.remove(lease)
        if now() >= grant.deadline:
            grant.lose("expired")
        elif grant.shares:
            self.part_with(grant)
        else:
            self.give_back(grant)
