"""Leases of local sharing: what the server granted to this process, and what its tasks have of it.

A *base* is an ordinary lease on the server, renewed, lost and released as any other. Tasks have it one after the
other, or (readers) at once, each by a `TaskLease` of its own. Who is next, and until when, decides the cohort
(`_sharing/cohort.py`).
"""

from __future__ import annotations

import asyncio
import math
from threading import get_ident
from typing import Protocol, TypeAlias
from weakref import ReferenceType, ref

from .._acquire.request import Request
from .._acquire.resource import Resource
from .._client.resp import Argument, Reply
from .._core import logs
from .._core.clock import now
from .._core.keys import Keys
from .._leases.forgotten import weakly
from .._leases.grant import Grant, LeaseManager
from .._leases.manager import GrantManager
from .._leases.terms import HELD, RELEASED, LeaseState
from .._scripts.constants import FENCE_RANGE
from ..errors import LeaseLost, LossReason

Task: TypeAlias = asyncio.Task[object]

MOST_FENCES = 8192
"""So many are reserved at once at most: as fences are microseconds, they would run ahead of the clock."""


class Sharing(LeaseManager, Protocol):
    """The keeper of shares: what both kinds of leases need of their cohort."""

    thread: int
    resource: Resource
    listed: bool

    def passed_on(self, lease: TaskLease) -> bool: ...
    def lost(self, base: ProcessGrant) -> None: ...
    def give_back(self, base: ProcessGrant) -> None: ...
    def part_with(self, base: ProcessGrant) -> None: ...


class ProcessGrant(Grant):
    """A lease of this process, for its tasks to share.

    Invariants: all ``shares`` end with it, if not before. The fences from ``next_fence`` to ``last_fence`` are reserved
    for it on the server, and were given to nobody yet. (Readers all have the same.)
    """

    # What each grant looks at is an attribute of the object: one of the class takes the interpreter far longer to find.
    # (And so do all, if an object has more than 30 of its own.)
    contended: bool
    """Somebody else waits for it on the server."""
    sound: bool
    """It may be handed on; not when its cohort has parted with it, or a task overstayed its time."""
    share_ended: asyncio.Event | None
    """Set when a share ends; there while somebody waits to be alone."""

    number = 0
    """By which the server calls us; 0 until a cohort has it."""
    budget = 0
    """While it is wanted: so often it may be handed on…"""
    yield_at = math.inf
    """… until then (local clock)."""
    rests_since = 0.0
    rest: asyncio.TimerHandle | None = None
    """Ends its rest without a task…"""
    lingers = 0.0
    """… of so many seconds."""
    takes_room = True
    """No other base or ticket of its cohort has its place."""
    turning = False
    """It is looked at when this turn of the loop ends."""
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
        self.shares: list[TaskLease] = []
        self.contended, self.sound, self.share_ended = False, True, None
        self._loose: dict[ReferenceType[TaskLease], None] = {}  # whose task has ended
        self._reserved(fence, FENCE_RANGE)

    def _reserved(self, fence: int, number: int) -> None:
        self.next_fence, self.last_fence = fence, fence + number - 1
        self.half = fence + number // 2

    def look(self) -> None:
        """Renew it now, unless that is under way: to hear whether somebody waits, or to have more fences in time."""
        if self.state is HELD and not self.renewing:
            self.manager.renewals.renew(self, self.ttl_ms)

    def last(self, ttl_ms: int) -> None:
        """Go on with this ttl."""
        if ttl_ms != self.ttl_ms:
            self.ttl_ms = ttl_ms
            self.manager.renewals.renew(self, ttl_ms)

    def asks(self) -> tuple[Argument, ...]:
        """Ask for more fences once half of them are used, and whether somebody waits."""
        if self.next_fence <= self.half:
            return (0,)
        self._range = min(self._range * 2, MOST_FENCES)
        return (self._range,)

    def renewed(self, asked: tuple[Argument, ...], reply: Reply) -> None:
        """Note what was asked for beside time."""
        if asked and len(reply) > 2:
            _, _, fence, waiting = reply
            if fence:
                self._reserved(fence, int(asked[0]))
            if waiting:
                self.on_contention()
            else:
                self.contended = False

    def everybody(self) -> list[TaskLease]:
        """Return all shares, also those that only references keep."""
        if not self._loose:
            return self.shares
        return [*self.shares, *(share for reference in self._loose if (share := reference()) is not None)]

    def loosen(self) -> None:
        """Leave the shares whose task has ended to those who refer to them. Nobody joins what is theirs."""
        for share in [share for share in self.shares if share.ownerless()]:
            self.cohort.part_with(self)
            self.shares.remove(share)
            self.cohort.resource.leases.discard(share)
            self._loose[weakly(share, self.cohort.loop, self._forgotten)] = None

    def tighten(self, share: TaskLease) -> None:
        """Know ``share``, which ends now, as any other."""
        if self._loose and (reference := ref(share)) in self._loose:
            del self._loose[reference]
            self.shares.append(share)

    def _forgotten(self, reference: ReferenceType[TaskLease]) -> None:
        """Stop renewing for a share that nothing refers to."""
        self._loose.pop(reference, None)
        self.one_left()
        if not self.shares and not self._loose:
            self.auto_renew, self.renew_at = False, self.deadline

    def prolonged(self) -> None:
        """Let the shares last as long."""
        for share in self.everybody():
            share.deadline = min(share.ends, self.deadline)

    def look_at_shares(self, time: float) -> None:
        """End those whose own time is up; their timers do not count time asleep."""
        for share in list(self.everybody()):
            if time >= share.ends:
                share.lose("expired")

    def release_ended(self, error: Exception | None) -> None:
        """Note the outcome of the release."""
        self._unlisted()
        super().release_ended(error)

    def _unlisted(self) -> None:
        """Nobody calls us any more by our number."""
        if self.number:
            self.cohort.resource.hub.listeners.pop(self.number, None)

    def lose(self, reason: LossReason) -> None:
        """Note that it is gone, and with it its shares."""
        was_held = self.state in (HELD, LeaseState.RELEASING)
        self._unlisted()
        super().lose(reason)
        if was_held and self.number:  # else nobody wanted it any more when it was granted, and it has no cohort
            self.cohort.lost(self)

    def _report_loss(self) -> None:
        if self.shares:  # else no task had it
            logs.lease_lost(self.lost_as(), tasks=len(self.shares))

    def on_contention(self) -> None:
        """Stop handing on, after a while, what this process holds of the name: others wait for it."""
        resource = self.cohort.resource  # this grant may be on its way back, and the name known anew
        (resource.hub.resources.get(self.keys.id) or resource).on_contention()

    def one_left(self) -> None:
        """A share has ended."""
        if self.share_ended is not None:
            self.share_ended.set()


class LastShare:
    """Takes what becomes of the release of a base, for the task that had it last."""

    def __init__(self, lease: TaskLease) -> None:
        self._lease = lease

    def done(self) -> bool:
        return False

    def set_result(self, result: None, /) -> None:
        self._lease.release_ended(None)

    def set_exception(self, error: Exception, /) -> None:
        lease = self._lease
        if isinstance(error, LeaseLost):
            lease.lose(error.reason)
            lease.release_ended(lease.loss())
        else:  # it is held still, and may be released again
            lease.base.shares.append(lease)
            lease.release_ended(error)


class TaskLease(Grant):
    """What one task has of a base: a lease with a fence, an end, a loss of its own."""

    # As class attributes they cost nothing to set up: it is made for every grant.
    renew_at = math.inf
    until = math.inf
    ends = math.inf
    """When it ends, whether its base is renewed or not (local clock)."""
    weight = 1
    commits = 0
    """So many guarded commits are under way, or may be."""
    _timer: asyncio.TimerHandle | None
    manager: Sharing
    _terms: Request

    def __init__(self, cohort: Sharing, base: ProcessGrant, request: Request) -> None:
        self.state = HELD
        self.manager = cohort
        self._terms = request
        self._timer = None
        self.base = base
        base.shares.append(self)
        if base.contended:
            base.budget -= 1
        self.fence = fence = base.next_fence
        base.next_fence = fence + base.step
        if fence >= base.half:
            base.look()
        self.deadline = base.deadline
        self.since = now()
        if request.ttl_ms != base.ttl_ms:
            base.last(request.ttl_ms)
        if not request.plain:
            self.weight = request.weight or 1
            self._limit(request)

    def _limit(self, request: Request) -> None:
        if not request.auto_renew:
            self.end_in(request.ttl_ms / 1000)
        elif request.max_hold is not None:
            self.until = now() + request.max_hold
            self.end_in(request.max_hold)

    @property
    def keys(self) -> Keys:  # type: ignore[override]
        """The keys of its name."""
        return self.base.keys

    @property
    def wire_token(self) -> bytes:  # type: ignore[override]
        """The token of its base."""
        return self.base.wire_token

    @property
    def ttl_ms(self) -> int:  # type: ignore[override]
        """As asked for."""
        return self._terms.ttl_ms

    @property
    def auto_renew(self) -> bool:  # type: ignore[override]
        """Whether it lasts as long as its base, which is renewed."""
        return self._terms.auto_renew

    @property
    def permit(self) -> Grant:
        """The lease that is known to the server."""
        return self.base

    @property
    def linger(self) -> float:
        """For how many seconds its base rests after it."""
        return self._terms.linger

    @property
    def period(self) -> float:  # type: ignore[override]
        """Seconds granted by the latest answer."""
        return self.base.period

    def end_in(self, seconds: float) -> None:
        """Let it end before its base does."""
        if self._timer is not None:
            self._timer.cancel()
        self.ends = now() + seconds
        self.deadline = min(self.ends, self.base.deadline)
        self._timer = self.manager.loop.call_later(seconds, self._over)

    def _over(self) -> None:
        self._timer = None
        if self.state is HELD:
            self.lose("expired")

    def _report_loss(self) -> None:
        if self.base.state is not LeaseState.LOST:  # else its loss is reported
            super()._report_loss()

    def committing(self, number: int) -> None:
        """Note it: what ends while one is under way is not handed on. A late one must not pass for the next task's."""
        self.commits += number

    def become_reader(self) -> None:
        """It was a writer's."""
        super().become_reader()
        self.base.become_reader()
        self.manager.part_with(self.base)  # not for other writers

    def extended(self, ttl: int) -> None:
        """Its base was; what ends without a renewal of its own ends then, or by `max_hold` if that is later."""
        if self.ends < math.inf and self.state is HELD:
            left = self.until - now() if self.auto_renew else 0.0
            self.end_in(max(ttl / 1000, left))

    def ends_by(self) -> float:
        """Return when it ends at the latest, unless it is extended (local clock)."""
        return self.ends

    async def alone(self, timeout: float | None) -> bool:
        """Wait until no other task has the base, which nobody joins from now on; return whether that is so.

        It may have ended meanwhile itself.
        """
        base = self.base
        self.manager.part_with(base)
        base.share_ended = asyncio.Event()
        try:
            async with asyncio.timeout(timeout):
                while len(base.shares) > 1 and self.state is HELD:
                    base.share_ended.clear()
                    await base.share_ended.wait()
        except TimeoutError:
            return False
        finally:
            base.share_ended = None
        return True

    def leave(self) -> None:
        """End it: the base may have another one now."""
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
        keeper = self.manager
        if keeper.thread == get_ident() and keeper.loop.is_running() and self.state is HELD and self.base.sound:
            if self.body is not None:
                self.end_body()
            if keeper.passed_on(self):
                self.state = RELEASED
                if self._ended is not None:
                    self._ended.set()
                return
        await super().release()
