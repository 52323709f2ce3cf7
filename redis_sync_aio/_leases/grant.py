"""Possession: what this process holds, until when, and under which fence.

A grant has four states. It is HELD until it is released or lost. It is RELEASING from ``release()`` until the server
answers. Then it is RELEASED, or LOST if it was gone by then. After an error it is HELD again: it lasts until the
deadline, is not renewed, and may be released again. It is LOST when it is found to be gone. Ownership is only forgotten
after the server has confirmed the release, or after the deadline, when there is nothing left to own.

The deadline is local and conservative (P6): the time before the request was sent, plus the ttl. It is compared with
`_core.clock.now`, never with the server's clock.
"""

from __future__ import annotations

import asyncio
import math
import warnings
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias
from weakref import ReferenceType, ref

import anyio

from .._core import logs
from .._core.cancellation import leaving, undo_in
from .._core.clock import now
from .._core.display import text
from .._core.futures import FutureLike, finish
from .._core.keys import Keys, label_of
from ..errors import LeaseLost, LossReason, NotHeld, WrongContext
from ..errors._base import copy_error
from .settings import ENDLESS, HELD, RELEASED, LeaseState

if TYPE_CHECKING:
    from .._client.replies import Argument, Reply
    from .._core.observers import Observation
    from .acquisition import Request
    from .hold import Acquiring
    from .hub import Hub
    from .identities import IdentityRequests
    from .renewals import Unanswered

# -- The tasks that acquire leases, by weak references: a forgotten lease keeps no task alive ------------------


TaskRef: TypeAlias = ReferenceType[asyncio.Task[object]]


_REQUESTS = frozenset({"_acquired", "_tried", "attach", "__aenter__"})
_PACKAGE = str(Path(__file__).parent.parent)


def is_request(root: CodeType | None) -> bool:
    """Return True if ``root``, the code of a task, is a request of this package: its lease is the task's result."""
    return root is not None and root.co_name in _REQUESTS and root.co_filename.startswith(_PACKAGE)


def ended(task: TaskRef) -> bool:
    """Return whether the task has ended."""
    alive = task()
    return alive is None or alive.done()


def current_ref() -> TaskRef | None:
    """Return a weak reference to the current task; None outside of a task, as in a forked child."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return None
    return None if task is None else ref(task)


# -- The cause of a loss: the answer of the server, and the facts that this process knows about itself ---------
#
# Whatever noticed the loss gives a reason. If the time of the lease was up by then, the clock explains the loss: the
# server was not asked, or answered too late to matter. If the lease was to be renewed, either Redis refused that
# until the end, or it was unreachable, or this process was late. Only the stalls that were measured since the latest
# renewal, or since its latest refusal, tell which.


REFUSING = 1.0
"""Seconds since a refusal within which the server counts as one that refuses. The next attempt is made in less."""


class Cause(NamedTuple):
    """Facts about a loss; see `LeaseLost`."""

    reason: LossReason
    held_for: float
    stalled: float = 0.0
    time_is_up: bool = False
    claim: float = 0.0


def cause_of(lease: Grant, reason: LossReason) -> Cause:
    """Return the facts about a loss that was noticed now."""
    time = now()
    held_for = time - lease.since
    if time < lease.deadline or reason in ("closed", "released"):
        return Cause(reason, held_for)
    member = lease.members[0]
    hub, period, refused = lease.manager.hub, lease.period, max(lease.refused, member.refused)
    stalled = hub.manager.stalled_since(max(lease.deadline - period, refused))
    if reason == "unreachable" and time - stalled - refused < REFUSING:
        reason = "expired"
    if stalled < period / 4:  # too short to prevent a renewal, which is due after a third of the period
        stalled = 0.0
    if time < lease.ends_by() and (
        (reason == "expired" and stalled) or (reason == "unreachable" and hub.link.answering(lease.keys, stalled > 0))
    ):
        reason = "late"
    return Cause(reason, held_for, stalled, time_is_up=True, claim=lease.claim or member.claim)


class LeaseManager(Protocol):
    """The manager of a grant, as the grant knows it.

    A `GrantManager` has the grants of the server, a `LeaseGroup` those that stand on others, a `Cohort` those of tasks.
    """

    loop: asyncio.AbstractEventLoop
    hub: Hub

    def release(self, lease: Grant, /) -> None: ...
    def forget(self, lease: Grant, /) -> None: ...
    def let_go(self, lease: Grant, /) -> None: ...
    def extend(self, lease: Grant, ttl: int, /) -> Awaitable[None]: ...


class Group(Protocol):
    """The leases that stand on a grant, which is then released by them only."""

    @property
    def shares(self) -> Sequence[Grant]: ...
    def member_lost(self, member: Grant, /) -> None: ...


class Grant:
    """The possession that the server gave for one request: its time, its renewals, its release, its loss.

    Users have a `Lease`, which is the face of a grant. Inside this package there are only grants.
    """

    state: LeaseState

    # Rarely changed; as class attributes they cost nothing to set up.
    release_uncertain = False
    """True if a release that got no answer may have been executed."""
    renewing = 0
    """Number of renewals in flight."""
    unanswered: Unanswered | None = None
    """Renewals in flight, and the bound of the deadline that follows from them; None if there are none."""
    due_at: float = math.inf
    """Time at which its manager looks at it (local clock); -inf: it is due; inf: it is not in the schedule."""
    entry = 0
    """The number of its entry in the schedule, if it has one."""
    acquirer: TaskRef | None = None
    """The task that acquired it, weakly: a forgotten lease keeps no task alive. None if its owner is not a task."""
    root: CodeType | None = None
    """The code of the coroutine that this task runs."""
    face: ReferenceType[object] | None = None
    """The `Lease` of the user; None if there never was a lease."""
    maker: ReferenceType[object] | None = None
    """The primitive whose ``release()`` finds it."""
    hold: ReferenceType[Acquiring[Any]] | None = None
    """The ``async with`` whose body runs under it. The frame of the body keeps it."""
    body: TaskRef | None = None
    """The task whose ``async with`` body runs under it."""
    ends_with_drain = False
    """True if a drain of the coordinator takes it away immediately: its body has no end of its own."""
    group: Group | None = None
    """The leases that stand on this grant: of a multi-lock, a Redlock or a reentrant owner."""
    previous_fence: int = 0
    """The fence of the writer before this one; 0: the server remembers none, or this is no writer."""
    replayed = False
    """True if a copy of its request may still be on the way to the server."""
    releasers: list[FutureLike[None]] | None = None
    same_identity: IdentityRequests | None = None
    """Requests of the same identity in this process, if it has one."""
    joined = False
    """True if the identity held it before, so that the grant did not begin with this request."""
    outlasts = False
    """True if a renewal was answered after the release was sent: the server may keep it longer than is known here."""
    body_failed = False
    """True if its body ended by an exception."""
    claim: float = 0.0
    """Seconds for which it was handed over, until its first renewal; 0 if that was its ttl, or it was renewed since."""
    refused: float = -math.inf  # local clock; when the server refused a renewal most recently
    reason: LossReason | None = None
    cause: Cause | None = None
    """Facts about the loss, once it is lost."""
    protects = True
    """False for events, latches and barriers: a late grant is still valid."""
    reports_loss = True
    """True if its loss is logged. False for a part of something that logs its own loss."""
    loss_reported: bool = False
    """True if LeaseLost has already been made for a caller."""
    outlives = False  # its coordinator, when that is closed: it may be held on other servers
    queued = False
    """True if its request had to wait for another holder."""
    handed_over = False
    """True if another task of this process had what it stands for, and no command was sent for it."""
    observation: Observation | None = None
    """The observation of its request, if there is one."""
    ended: anyio.Event | None = None
    """Set when it has ended; exists once a task waits for that."""

    def __init__(
        self,
        manager: LeaseManager,
        keys: Keys,
        token: bytes,
        fence: int,
        deadline: float,
        period: float,
        terms: Request,
    ) -> None:
        self.state = HELD
        self.manager = manager
        self.terms: Request = terms
        self.keys = keys
        self.wire_token = token
        self.fence = fence
        self.deadline: float = deadline  # local clock
        self.period: float = period  # seconds granted by the latest answer
        self.since: float = deadline - period if period < ENDLESS else now()  # local clock
        self.ttl_ms: int = terms.ttl_ms
        self.weight: int = terms.weight or 1
        self.auto_renew: bool = terms.auto_renew
        # Nothing is renewed without an end, also if an identity joins a lease that has none.
        self.renew_at: float = deadline - period * 2 / 3 if terms.auto_renew and period < ENDLESS else deadline
        self.hold_limit: float = ENDLESS
        if terms.max_hold is not None:
            self.hold_limit = self.since + terms.max_hold
            self.deadline = min(deadline, self.hold_limit)
            self.renew_at = min(self.renew_at, self.deadline)

    @property
    def name(self) -> str:
        """Name of the lock."""
        return text(self.keys.name)

    @property
    def token(self) -> str:
        """The value under the lock's key."""
        return text(self.wire_token)

    @property
    def identity(self) -> str | None:
        """The caller's identity, or None."""
        return None if self.terms.identity is None else text(self.terms.identity)

    @property
    def label(self) -> str:
        """The text by which people know the holder."""
        return label_of(self.wire_token)

    def check_context(self) -> None:
        """Raise WrongContext in another event loop, or after a fork."""
        try:
            self.manager.hub.check_context()
        except WrongContext as error:
            raise error.about(f"the lease on {self.name!r}") from None

    def remaining(self) -> float:
        """Return for how many seconds the lease is certainly valid; 0.0 when it is not, inf without a ttl."""
        return max(0.0, self.deadline - now()) if self.state is HELD else 0.0

    def is_lost(self) -> bool:
        """Return whether it ended before the holder released it."""
        return self.reason is not None or (self.state is HELD and now() >= self.deadline)

    async def wait_ended(self) -> None:
        """Wait until it is lost, or its release was confirmed."""
        self.check_context()
        if not self.is_lost() and self.state is not RELEASED:
            event = self.ended = self.ended or anyio.Event()
            await event.wait()

    def check(self) -> None:
        """Raise LeaseLost if it is lost, NotHeld if it was released; no command is sent."""
        if self.is_lost():
            raise self.loss()
        if self.state is not HELD:
            raise NotHeld.released(self.name)

    async def extend(self, ms: int) -> None:
        """End the lease ``ms`` milliseconds from now, and renew it with this ttl from then on; see `Lease.extend`."""
        self.check_context()
        self.check()
        if self.deadline == math.inf or self.period == math.inf:
            raise ValueError(f"the lease on {self.name!r} has no end (ttl=None): there is nothing to extend")
        await self.manager.extend(self, ms)

    async def release(self) -> None:
        """Give the lease back; see `Lease.release`. Idempotent."""
        if self.state is LeaseState.RELEASED:
            return
        self.check_context()
        if self.state is HELD and now() >= self.deadline:
            self.lose("expired")
        if self.state is LeaseState.LOST:
            raise self.loss()
        if self.body is not None:
            self.end_body()
        # Each release() waits on its own future, so cancelling one leaves the others alone.
        outcome: asyncio.Future[None] = self.manager.loop.create_future()
        self.releasers = [*self.releasers, outcome] if self.releasers else [outcome]
        self.give_back()
        try:
            if (error := leaving()) is None:
                await outcome
            else:
                await self.manager.hub.exits.in_time(outcome, self.name, self.is_releasing, error)
        except GeneratorExit:  # as `outcome_of`, without a coroutine for each release
            undo_in(self.manager.loop, outcome.cancel)
            raise

    def is_releasing(self) -> bool:
        """Return True if its release was sent and has no answer."""
        return self.state is LeaseState.RELEASING

    def end_body(self) -> None:
        """End its body as a loss would, if it runs in another task than the current one."""
        if self.body is not None and self.reason is None and self.body() is not asyncio.current_task():
            self.reason = "released"
            self.cause = cause_of(self, "released")
            logs.lease_lost(self.lost_as(), self.observed())
            self._notify_lost()

    def is_forgotten(self) -> bool:
        """Return True if its task has ended, and nothing is left that could release it.

        The lease, its ``async with``, an identity, and the primitive could. So could any object of the same name if the
        acquisition was a task of its own, as `asyncio.gather` makes: the lease is the result of that task.
        """
        if self.group is not None:
            return bool(self.group.shares) and all(share.is_forgotten() for share in self.group.shares)
        return (
            self.acquirer is not None
            and ended(self.acquirer)
            and self.face is not None
            and self.face() is None
            and self.identity is None
            and (self.maker is None or self.maker() is None)
            and (self.hold is None or self.hold() is None)
            and not is_request(self.root)
        )

    def drop_forgotten(self) -> bool:
        """Stop renewing it if it is forgotten, and warn; return whether that is so."""
        if not self.is_forgotten():
            return False
        for grant in [self] if self.group is None else list(self.group.shares):
            grant.drop()
        return True

    def drop(self) -> None:
        """Warn that it is forgotten, and let it end with its ttl."""
        # In a callback of its own: a filter may turn the warning into an error.
        self.manager.loop.call_soon(_warn_forgotten, self.name, self.fence, self.ttl_ms / 1000)
        if self.observation is not None:
            self.observation.end("forgotten")
        self.manager.let_go(self)

    def blocks_own_task(self, task: TaskRef) -> bool:
        """Return whether ``task`` would deadlock by waiting for this lease."""
        if self.group is not None:
            return self.state is HELD and any(lease.blocks_own_task(task) for lease in self.group.shares)
        return self.state is HELD and self.body == task and self.guards()

    def bodies(self) -> Iterator[asyncio.Task[object]]:
        """Iterate over the tasks whose bodies run under it."""
        for grant in (self,) if self.group is None else self.group.shares:
            if grant.body is not None and (task := grant.body()) is not None:
                yield task

    def guards(self) -> bool:
        """Return True if its loss cancels a body."""
        hold = None if self.hold is None else self.hold()
        return hold is not None and hold._cancels

    def observed(self) -> Observation | None:
        """Return the observation of its request, or of the first request that stands on it."""
        shares = () if self.group is None else self.group.shares
        return self.observation or next((share.observation for share in shares if share.observation), None)

    def committing(self, number: int) -> None:
        """Count guarded commits in flight: ``number`` more, or fewer if it is negative."""

    def become_reader(self) -> None:
        """Turn the grant of a writer into one of a reader."""
        self.weight = 1

    @property
    def members(self) -> tuple[Grant, ...]:
        """The grants of the server that it stands on, or this one."""
        return (self,)

    @property
    def parts(self) -> Sequence[Grant]:
        """The grants that tasks hold of it: its shares, if it is a grant to the process."""
        return (self,)

    @property
    def over(self) -> bool:
        """True if it is known to have ended."""
        return self.state in (RELEASED, LeaseState.LOST)

    @property
    def time_is_up(self) -> bool:
        """True if it was lost after its time was up."""
        return self.cause is not None and self.cause.time_is_up

    def ends_by(self) -> float:
        """Return when it ends at the latest, unless it is extended (local clock)."""
        return max(self.hold_limit, self.deadline) if self.auto_renew else self.deadline

    def asks(self) -> tuple[Argument, ...]:
        """Return the options of its renewals, besides the time."""
        return ()

    def renewed(self, asked: tuple[Argument, ...], reply: Reply) -> None:
        """Take from ``reply`` the answer to what was ``asked``."""

    def prolonged(self) -> None:
        """Note that the deadline was moved."""

    def look_at_shares(self, time: float) -> None:
        """End the shares of tasks whose own time is up."""

    def release_args(self) -> tuple[Argument, ...]:
        """Return the trailing arguments of its release."""
        return ()

    def give_back(self) -> None:
        """Start the release unless it has begun; do not wait for it."""
        if self.state is HELD:
            self.state = LeaseState.RELEASING
            self.manager.release(self)

    def release_ended(self, error: Exception | None) -> None:
        """Note the outcome of the release, and pass it to all callers of `release`."""
        if self.state is LeaseState.RELEASING:
            # After a failed release it stays held until its deadline, is not renewed, and may be released again.
            self.state = LeaseState.RELEASED if error is None else LeaseState.HELD
            if error is None:
                self.notify_ended()
        releasers, self.releasers = self.releasers, None
        for outcome in releasers or ():
            finish(outcome, None, None if error is None else copy_error(error))

    def lose(self, reason: LossReason, cause: Cause | None = None) -> None:
        """Note that it is gone (``cause``: if known): wake the tasks that wait for its end, and cancel the body."""
        if self.state in (LeaseState.HELD, LeaseState.RELEASING):
            cause = self.cause = cause or cause_of(self, reason)
            self.state = LeaseState.LOST
            self.reason = reason = cause.reason
            if self.reports_loss:
                self._report_loss()
            self.manager.forget(self)
            if self.group is not None:
                self.group.member_lost(self)
            self._notify_lost()

    def notify_ended(self) -> None:
        """Wake all tasks that wait for its end, and report it to observers."""
        if self.ended is not None:
            self.ended.set()
        if self.observation is not None:
            self.observation.ended(self)

    def _notify_lost(self) -> None:
        self.notify_ended()
        if (hold := None if self.hold is None else self.hold()) is not None:
            hold._lost()

    def loss(self) -> LeaseLost:
        """Return the error that explains how it was lost."""
        self.loss_reported = True
        return self.lost_as()

    def lost_as(
        self,
        given_back: tuple[str, ...] = (),
        servers: tuple[int, int, int] | None = None,
        fence: int | None = None,
        since: float | None = None,
    ) -> LeaseLost:
        """Return the same error, for this grant or for something that it is a part of.

        ``fence`` and ``since`` (local clock) are those of the whole; the other arguments are as for `LeaseLost`.
        """
        cause = self.cause or cause_of(self, self.reason or "expired")
        return LeaseLost(
            name=self.name,
            reason=cause.reason,
            fence=self.fence if fence is None else fence,
            held_for=cause.held_for + (0.0 if since is None else self.since - since),
            stalled=cause.stalled,
            time_is_up=cause.time_is_up,
            claim=cause.claim,
            given_back=given_back,
            servers=servers,
        )

    def _report_loss(self, tasks: int = 1) -> None:
        logs.lease_lost(self.lost_as(), self.observed(), tasks)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.described()}>"

    def described(self) -> str:
        """Return its name, state, fence, token and time, for a representation."""
        return (
            f"{self.name!r} {self.state.value} fence={self.fence} token={self.token!r} remaining={self.remaining():.3f}"
        )


def _warn_forgotten(name: str, fence: int, ttl: float) -> None:
    warnings.warn(logs.lease_forgotten(name, fence, ttl), ResourceWarning, stacklevel=2)


# -- The leases that this process holds of one name, also by task ----------------------------------------------


MAX_SEARCHED = 64
"""Up to this many leases are searched; more are indexed by task."""


class HeldLeases(dict[Grant, None]):
    """The leases of one name, mostly the oldest first."""

    __slots__ = ("_by_task",)

    def __init__(self) -> None:
        super().__init__()
        self._by_task: dict[TaskRef, dict[Grant, None]] | None = None
        """The leases of each task, the oldest first; made on the first question, if there are many."""

    def acquired(self, lease: Grant, task: asyncio.Task[object]) -> None:
        """Note that ``task`` acquired ``lease``."""
        by = lease.acquirer = ref(task)
        lease.root = getattr(task.get_coro(), "cr_code", None)
        if self._by_task is not None:
            self._by_task.setdefault(by, {})[lease] = None

    def note(self, by: TaskRef, lease: Grant) -> None:
        """Index ``lease``, a share that is not one of these, as the latest that the task ``by`` acquired."""
        self._index().setdefault(by, {})[lease] = None

    def any_of(self, task: asyncio.Task[object]) -> bool:
        """Return whether ``task`` may have acquired one of them. False is certain."""
        if len(self) > MAX_SEARCHED:
            return True
        for lease in self:  # noqa: SIM110 (a generator is slower, and each wait passes here)
            if lease.acquirer is not None and lease.acquirer() is task:
                return True
        return False

    def of_task(self, task: TaskRef) -> Iterable[Grant]:
        """Return the leases that ``task`` acquired, the latest first."""
        if self._by_task is None and len(self) <= MAX_SEARCHED:
            return [lease for lease in reversed(self) if lease.acquirer == task]
        return reversed(self._index().get(task, {}))

    def _index(self) -> dict[TaskRef, dict[Grant, None]]:
        if self._by_task is None:
            self._by_task = {}
            for lease in self:
                if lease.acquirer is not None and lease.acquirer() is not None:
                    self._by_task.setdefault(lease.acquirer, {})[lease] = None
        return self._by_task

    def latest(self, task: TaskRef | None, weight: int) -> Grant | None:
        """Return the latest lease of ``task`` that has this ``weight`` (0: any). Mostly O(1)."""
        for lease in self.of_task(task) if task is not None else ():
            if lease.group is None and weight in (0, lease.weight):
                return lease
        return None

    def discard(self, lease: Grant) -> None:
        """Forget ``lease``, which is not held any more."""
        self.pop(lease, None)
        if self._by_task is not None and lease.acquirer is not None:
            self._unlist(self._by_task, lease.acquirer, lease)

    def _unlist(self, by_task: dict[TaskRef, dict[Grant, None]], by: TaskRef, lease: Grant) -> None:
        try:
            found = by_task.get(by)
        except TypeError:  # its task has ended and its hash was never asked for, so it was not indexed
            return
        if found is not None:
            found.pop(lease, None)
            if not found:
                del by_task[by]
        if not self:
            self._by_task = None
