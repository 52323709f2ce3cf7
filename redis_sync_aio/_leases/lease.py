"""Possession: a lease says that this process holds a lock, until when, and under which fence.

Four states. HELD, until it is released or lost. RELEASING, from ``release()`` until the server's answer: then
RELEASED; or LOST, if it was gone by then; or, after an error, HELD again, until the deadline and not renewed, as it may
be released again. LOST, when it is found to be gone. Ownership is only forgotten when the server confirmed it, or when
the deadline passed, after which there is nothing left to own.

The deadline is local and conservative (P6): time before the request was sent plus the ttl. It is compared
with `_core.clock.now`, never with the server's clock.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from .._client.settings import Client
from .._client.topology import servers_of
from .._core import logs
from .._core.arguments import Seconds, ttl_ms
from .._core.cancellation import in_time, leaving, undo_in
from .._core.clock import now
from .._core.display import text
from .._transactions.guarded import GuardedTransaction
from ..errors import LossReason, NotHeld, WrongContext, copy_error
from .choice import TaskRef, ended
from .hold import SingleUseContext
from .keeper import HELD, Group, IdentityReleases, LeaseManager, LeaseState, Releaser, Terms
from .loss import ExplainedLoss, cause_of
from .loss_event import LossEvent

if TYPE_CHECKING:
    from .._client.resp import Argument, Reply
    from .._core.keys import Keys


_ENDLESS = math.inf  # for what each grant does: a name of this module is found sooner


class Lease(ExplainedLoss, SingleUseContext):
    """One acquisition of one lock: what ``acquire()`` returns. Not shared, not reused.

    Guarantee: until `remaining` is 0 nobody else was granted the lock by the server, however late replies
    arrived and whatever clocks say. What can break it: a foreign hand on the key, a failover that lost the
    write, a server clock that jumps ahead. For those there is `fence`: an integer greater than that of every
    earlier grant of this name, to be checked by the resource that the lock protects. (The permits of a semaphore that
    tasks share are the exception: docs/local-sharing.md. Readers have the fence of the last writer.)

    Attributes:
        name: name of the lock.
        token: the value under the lock's key, unique to this acquisition, or the caller's identity. The same for tasks
            that share a lease, for leases of one reentrant owner, and for a reader and its upgrade.
        fence: see above.
        identity: the caller's identity, or None.
        weight: how many permits of a semaphore it is; 1 for a lock and for a reader, 2,147,483,647 for a writer.
        lost: an event: ``lost.is_set()``; ``await lost.wait()``, which a release ends, too.

    For users there are these, `remaining`, `is_lost`, `check`, `extend`, `transaction` and `release`. All else is for
    the modules of this package, and may change with any release.
    """

    state: LeaseState

    # Rarely changed; as class attributes they cost nothing to set up.
    on_loss: Callable[[], None] | None = None
    release_uncertain = False
    """A release without an answer may have been executed."""
    renewing = 0
    """So many renewals of it are in flight."""
    reader: Lease | None = None
    """Of a writer's lease that was got by an upgrade: the reader's, on the same permit, which still is underneath."""
    writer: Lease | None = None
    """Of a reader's lease that was upgraded: the writer's."""
    upgrader: Lease | None = None
    """Whose permit this is: which of those who read by it is, or is to become, the writer."""
    acquirer: TaskRef | None = None
    """The task that acquired it; None: an owner that is not a task. Weak: a forgotten lease keeps no task alive."""
    body: TaskRef | None = None
    """The task whose body runs under it, in an ``async with``."""
    group: Group | None = None
    """The lease over several, or of several, that stands on this one."""
    attempt = b""
    """What made its reader the writer; empty: it was acquired as it is."""
    replayed = False
    """A copy of the request that this lease answers may still be on its way to the server."""
    releasers: list[Releaser] | None = None
    namesakes: IdentityReleases | None = None
    """Who else goes by its identity here, if it has one."""
    joined = False
    """The identity held it before: the lease did not begin with this request."""
    outlasts = False
    """A renewal was answered while it was released: the server has it for longer than is known here."""
    interrupted = False
    """What was done under it was broken off: its record stays."""
    claim = 0.0
    """For so many seconds it was handed over, until its first renewal; 0: for its ttl, or it was renewed since."""
    _lost: LossEvent | None = None

    def __init__(
        self,
        keeper: LeaseManager,
        keys: Keys,
        token: bytes,
        fence: int,
        deadline: float,
        period: float,
        terms: Terms,
    ) -> None:
        self.state = HELD
        self._keeper = keeper
        self._terms = terms
        self.keys = keys
        self.wire_token = token
        self.fence = fence
        self.deadline = deadline  # local clock
        self.period = period  # seconds granted by the latest answer
        self.since = deadline - period if period < _ENDLESS else now()  # local clock
        self.ttl_ms = terms.ttl_ms
        self.weight = terms.weight or 1
        self.auto_renew = terms.auto_renew
        # Without an end, also where an identity joins a lease that has none, there is nothing to renew.
        self.renew_at = deadline - period * 2 / 3 if terms.auto_renew and period < _ENDLESS else deadline
        self.until = _ENDLESS
        if terms.max_hold is not None:
            self.until = self.since + terms.max_hold
            self.deadline = min(deadline, self.until)
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
        return None if self._terms.identity is None else text(self._terms.identity)

    def check_context(self) -> None:
        """Raise WrongContext in another event loop, or after a fork."""
        try:
            self._keeper.check_context()
        except WrongContext as error:
            raise error.about(f"the lease on {self.name!r}") from None

    @property
    def client(self) -> Client:
        """The client that its coordinator was made from."""
        return self._keeper.client

    @property
    def response_timeout(self) -> float:
        """For how many seconds an answer may be waited for."""
        return self._keeper.response_timeout

    @property
    def lost(self) -> LossEvent:
        """An event that is set when the lease is lost."""
        if self._lost is None:
            self._lost = LossEvent(self)
        return self._lost

    def remaining(self) -> float:
        """Return for how many seconds the lease is certainly valid; 0.0 when it is not, inf without a ttl."""
        return max(0.0, self.deadline - now()) if self.state is HELD else 0.0

    def is_lost(self) -> bool:
        """Return whether it ended before its holder released it."""
        return self.reason is not None or (self.state is HELD and now() >= self.deadline)

    def check(self) -> None:
        """Raise LeaseLost if the lease is lost, NotHeld if it was released; no command is sent.

        Call it before a step that must not happen without the lock. It looks at the clock, so it is right also
        when the event loop or the whole process was stopped and nothing could be noticed meanwhile.
        """
        if self.is_lost():
            raise self.loss()
        if self.state is not HELD:
            raise NotHeld(f"the lease on {self.name!r} was released; acquire the lock again")

    async def extend(self, ttl: Seconds) -> None:
        """Let the lease end ``ttl`` seconds (or timedelta) from now; renewals go on with this ttl.

        It may make a lease shorter. One round trip. When the answer to that was lost with its connection, a copy may
        still arrive at the server: for a minute the lease lasts no longer, then, than that copy lets it.

        Raises:
            LeaseLost: it was gone already (this is noticed and the body is cancelled as with any loss).
            NotHeld: it was released. ValueError: it has no end.
            Unreachable: no answer within ``retry_for`` of the coordinator, or by the deadline (the earlier one of both)
                if that is sooner. The lease lasts until the earlier one.
            CommandRefused: the server answered with an error; deadline and ttl stay as they were.
            WrongContext: in another event loop or process. TypeError, ValueError: ``ttl`` is no time, or out of range.

        On cancellation the extension may or may not happen.
        """
        ms = ttl_ms(ttl)
        self.check_context()
        self.check()
        if self.deadline == math.inf or self.period == math.inf:
            raise ValueError(f"the lease on {self.name!r} has no end (ttl=None): there is nothing to extend")
        await self._keeper.extend(self, ms)

    def transaction(self) -> GuardedTransaction:
        """Return an async context manager for writes that are made only if the lease still holds when they are.

        What it yields is used as in `transaction`: reads at once, ``tx.multi()``, then writes, which are executed at
        the end of the block. By then a holder that was stopped for longer than its lease has lost it, and whoever has
        the lock now must not be overwritten: the server compares the token and executes the writes in one step. Two
        round trips, one more than an unguarded MULTI. The lock and what is written are in one Redis.

        A renewal at that very moment is no loss: the same writes are tried again. All locks of a `MultiLease` have to
        hold. The fence is not needed for what is written so.

        Raises at the end of the block (the first two also at its beginning), and nothing was written:
            LeaseLost: the lease is gone (this is noticed and the body is cancelled as with any loss).
            NotHeld: it was released.
            Conflict: a key that the body named in ``tx.watch()`` was changed. Or, with such a key, the lease was
                renewed meanwhile (permits: or others acquired or released): EXEC does not tell which. Name none that
                the lock protects.
            CommandRefused, TransactionMisuse: as `transaction`.

        Raises OutcomeUnknown when the answer was lost, PartiallyApplied when a command failed; and ValueError at the
        call when the locks of a `MultiLease` are in several hash slots of a cluster.

        On cancellation nothing was written, unless EXEC was under way: then all was, or nothing.

        Example:
            async with lock as lease, lease.transaction() as tx:
                balance = int(await tx.get("balance"))
                tx.multi()
                tx.set("balance", balance - 10)
        """
        self.check_context()
        return GuardedTransaction(servers_of(self.client), self, self._keeper.members_of(self))

    async def release(self) -> None:
        """Give the lock back; the next waiter has it when this returns. Idempotent.

        A body that runs under it in another task is cancelled, and ends with LeaseLost (reason "released").

        Raises:
            LeaseLost: it was lost before; nothing was changed on the server, whoever holds it keeps it.
            Unreachable: no answer, after retries; the lock then ends with its ttl.
            CommandRefused: the server answered with an error. After these two the lease is held still, until its
                deadline and not renewed, and may be released again (by this, not by its lock, which has forgotten it).
                But the writer's of an upgrade is lost, and the reader's goes on.
            CoordinatorClosed: closed before the answer. WrongContext: in another event loop or process.

        On cancellation it goes on in the background, never torn in half; in a clean-up too, after ``exit_timeout``.
        """
        if self.state is LeaseState.RELEASED:
            return
        self.check_context()
        if self.state is HELD and now() >= self.deadline:
            self.lose("expired")
        if self.state is LeaseState.LOST:
            raise self.loss()
        if self.body is not None:
            self.end_body()
        # Everybody who releases waits on a future of his own, so cancelling one leaves the others alone.
        outcome: asyncio.Future[None] = self._keeper.loop.create_future()
        self.releasers = [*self.releasers, outcome] if self.releasers else [outcome]
        self.give_back()
        try:
            await (outcome if (error := leaving()) is None else in_time(outcome, self._keeper, self.name, error))
        except GeneratorExit:  # as `outcome_of`, without a coroutine for each release
            undo_in(self._keeper.loop, outcome.cancel)
            raise

    def end_body(self) -> None:
        """End the body that another task than the current one runs under it, as a loss would."""
        if self.body is not None and self.reason is None and self.body() is not asyncio.current_task():
            self.reason = "released"
            self.cause = cause_of(self, "released")
            logs.lease_lost(self.lost_as())
            self._notify_lost()

    def ownerless(self) -> bool:
        """Return whether the task that acquired it has ended, and no identity or owner stands for it."""
        if self.group is not None:
            return self.group.ownerless()
        return self.acquirer is not None and self.identity is None and ended(self.acquirer)

    def bars(self, task: TaskRef) -> bool:
        """Return whether it is held until a body of ``task`` ends, so that this task must not wait for its end."""
        if self.group is not None:
            return self.state is HELD and any(lease.bars(task) for lease in self.group.shares)
        return self.state is HELD and self.body == task and self.on_loss is not None

    def committing(self, number: int) -> None:
        """``number`` more guarded commits are under way (negative: fewer)."""

    def become_reader(self) -> None:
        """It was a writer's."""
        self.weight = 1

    @property
    def permit(self) -> Lease:
        """The lease that the server knows: itself, or that of the reader who became the writer."""
        return self if self.reader is None else self.reader.permit

    @property
    def reusable(self) -> bool:
        """Whether its token may be in use elsewhere, before or after it."""
        return self._terms.reusable

    @property
    def upgraded(self) -> bool:
        """Whether the writer's lease is held: it is the one that is renewed."""
        return self.writer is not None and self.writer.state is HELD

    def follow(self, other: Lease) -> None:
        """Last as long as ``other``, a lease on the same permit."""
        self.period, self.renew_at = other.period, other.renew_at
        self.deadline = min(other.deadline, self.until)

    def ends_by(self) -> float:
        """Return when it ends at the latest, unless it is extended (local clock)."""
        return max(self.until, self.deadline) if self.auto_renew else self.deadline

    def asks(self) -> tuple[Argument, ...]:
        """Return what its renewals ask for beside time."""
        return ()

    def renewed(self, asked: tuple[Argument, ...], reply: Reply) -> None:
        """``reply`` may answer what was ``asked``."""

    def prolonged(self) -> None:
        """It has another deadline."""

    def look_at_shares(self, time: float) -> None:
        """End those of the tasks that share it whose own time is up."""

    def closing(self) -> tuple[Argument, ...]:
        """Return what its release says in the end: of an attempt to upgrade, or what was asked for."""
        if self.attempt:
            return (self.attempt,)
        return self._terms.closing

    def give_back(self) -> None:
        """Start the release, if that is not done yet, without waiting for it."""
        if self.state is HELD:
            self.state = LeaseState.RELEASING
            if self.writer is not None and self.writer.state is HELD:  # no permit, no writer
                self.writer.lose("expired")
            self._keeper.release(self)

    def release_ended(self, error: Exception | None) -> None:
        """Note the outcome of the release, and tell everybody who waits for it."""
        if self.state is LeaseState.RELEASING:
            # A release that failed leaves the lease held, until its deadline and not renewed: it may be tried again.
            self.state = LeaseState.RELEASED if error is None else LeaseState.HELD
            if error is None and self._lost is not None:
                self._lost._notify()
        releasers, self.releasers = self.releasers, None
        for outcome in releasers or ():
            if outcome.done():
                continue
            if error is None:
                outcome.set_result(None)
            else:
                outcome.set_exception(copy_error(error))

    def lose(self, reason: LossReason) -> None:
        """Note that the lease is gone: wake `lost` and cancel the body."""
        if self.state in (LeaseState.HELD, LeaseState.RELEASING):
            cause = self.cause = cause_of(self, reason)
            self.state = LeaseState.LOST
            self.reason = reason = cause.reason
            if self.reports_loss:
                self._report_loss()
            if self.writer is not None:  # first: what forgets us may give the permit back
                self.writer.lose(reason)
            self._keeper.forget(self)
            self._notify_lost()

    def _notify_lost(self) -> None:
        if self._lost is not None:
            self._lost._notify()
        if self.on_loss is not None:
            self.on_loss()

    def __repr__(self) -> str:
        return (
            f"<Lease {self.name!r} {self.state.value} fence={self.fence} token={self.token!r}"
            f" remaining={self.remaining():.3f}>"
        )
