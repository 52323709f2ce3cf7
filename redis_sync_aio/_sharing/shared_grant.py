"""Grants of local sharing: those of the server to this process, and the parts that its tasks hold.

A *process grant* is renewed, lost and released as any other grant. Tasks hold it one after the other, or (readers)
together, each by a *task grant* of its own. The cohort (`_sharing/cohort.py`) decides which task is next, and until
when a grant is handed on.
"""

from __future__ import annotations

import asyncio
import math
from threading import get_ident
from typing import TYPE_CHECKING, Protocol, TypeAlias

from .._acquire.request import Request
from .._acquire.resource import Resource
from .._client.resp import Argument, Reply
from .._core.clock import now
from .._core.keys import Keys
from .._leases.grant import Grant, LeaseManager
from .._leases.loss import Cause
from .._leases.manager import GrantManager
from .._leases.terms import HELD, RELEASED, LeaseState
from .._scripts.constants import FENCE_RANGE
from ..errors import LossReason

if TYPE_CHECKING:
    from .._core.observers import Observation

Task: TypeAlias = asyncio.Task[object]

MOST_FENCES = 8192
"""Most fences that are reserved together. Fences are microseconds, so more would run ahead of the clock."""


class Sharing(LeaseManager, Protocol):
    """The cohort of a process grant, and the manager of its parts, as both kinds of grants know it."""

    thread: int
    resource: Resource
    listed: bool

    def passed_on(self, lease: TaskGrant) -> bool: ...
    def lost(self, grant: ProcessGrant) -> None: ...
    def give_back(self, grant: ProcessGrant) -> None: ...
    def part_with(self, grant: ProcessGrant) -> None: ...


class ProcessGrant(Grant):
    """A grant to this process, for its tasks to share.

    Invariants: all ``shares`` end with it, if not before. The fences from ``next_fence`` to ``last_fence`` are reserved
    for it on the server, and no task has one of them yet. (Readers all have the same.)
    """

    # Attributes that each grant reads are set on the object: the interpreter finds those of a class far more slowly.
    # (With more than 29 of its own, an object is slow, too: tests/sharing counts those of a cohort.)
    contended: bool
    """Whether others wait for it at the server."""
    sound: bool
    """Whether it may be handed on. False once its cohort has retired it, or a task overstayed its time."""

    number = 0
    """The number of its contention notices; 0 until a cohort has the grant."""
    budget = 0
    """Number of hand-overs that are left while others wait."""
    yield_at = math.inf
    """Time until which it may be handed on while others wait (local clock)."""
    rests_since = 0.0
    rest: asyncio.TimerHandle | None = None
    """The timer that ends its rest without a task."""
    lingers = 0.0
    """Seconds that the rest lasts."""
    takes_room = True
    """Whether it takes one of its cohort's places."""
    turning = False
    """Whether it is given back at the end of this turn of the loop, unless a task holds it then."""
    cohort: Sharing
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
        self.next_fence, self.last_fence = fence, fence + number - 1
        self.half = fence + number // 2

    def look(self) -> None:
        """Renew it now, unless a renewal is in flight: the answer says whether others wait, and brings fences."""
        if self.state is HELD and not self.renewing:
            self.manager.renewals.renew(self, self.ttl_ms)

    def last(self, ttl_ms: int) -> None:
        """Renew it with another ttl from now on."""
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

    def observed(self) -> Observation | None:
        """Return what is observed of the first request that has a part of it."""
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
        """Note the outcome of the release."""
        self._unlisted()
        super().release_ended(error)

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
    renew_at = math.inf
    hold_limit = math.inf
    ends = math.inf
    """When it ends, whether its grant is renewed or not (local clock)."""
    weight = 1
    commits = 0
    """Number of guarded commits that are in flight, or may be."""
    _timer: asyncio.TimerHandle | None
    manager: Sharing
    _terms: Request

    def __init__(self, cohort: Sharing, grant: ProcessGrant, request: Request) -> None:
        self.state = HELD
        self.manager = cohort
        self._terms = request
        self._timer = None
        self.process_grant = grant
        grant.shares.append(self)
        if grant.contended:
            grant.budget -= 1
        self.fence = fence = grant.next_fence
        grant.next_fence = fence + grant.step
        if fence >= grant.half:
            grant.look()
        self.deadline = grant.deadline
        self.since = now()
        if request.ttl_ms != grant.ttl_ms:
            grant.last(request.ttl_ms)
        if not request.plain:
            self.weight = request.weight or 1
            # Of writers: the tasks that had the grant before this one are writers, too.
            self.previous_fence, grant.previous_fence = grant.previous_fence, fence
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
        return self._terms.ttl_ms

    @property
    def auto_renew(self) -> bool:  # type: ignore[override]
        """Whether it lasts as long as its process grant, which is renewed."""
        return self._terms.auto_renew

    @property
    def permit(self) -> Grant:
        """The grant that is known to the server."""
        return self.process_grant

    @property
    def handed_over(self) -> bool:  # type: ignore[override]
        """Whether another task held the process grant before. False for readers, which join it."""
        return self.fence != self.process_grant.fence

    @property
    def queued(self) -> bool:  # type: ignore[override]
        """Whether the process had to wait for another holder, and this is the first task."""
        return not self.handed_over and self.process_grant.queued

    @property
    def linger(self) -> float:
        """Seconds for which its process grant rests after it."""
        return self._terms.linger

    @property
    def period(self) -> float:  # type: ignore[override]
        """Seconds granted by the latest answer."""
        return self.process_grant.period

    def end_in(self, seconds: float) -> None:
        """Let it end after a number of seconds, before its process grant does."""
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
        """Let it last as long as its process grant; without renewals for ``ttl``, or until `max_hold` if later."""
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

        On cancellation the release goes on in the background: it is never torn in half.
        """
        manager, held = self.manager, self.state is HELD and self.process_grant.sound
        if held and manager.thread == get_ident() and manager.loop.is_running():
            if self.body is not None:
                self.end_body()
            if manager.passed_on(self):
                self.state = RELEASED
                if self.ended is not None:
                    self.ended.set()
                return
        await super().release()
