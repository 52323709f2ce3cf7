"""Lease: what users have of a lock that they hold. It is the face of a grant."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from .._client.topology import servers_of
from .._core.arguments import Seconds, ttl_ms
from .._transactions.guarded import GuardedTransaction
from .detached import detach
from .grant import Grant
from .hold import Hold, leave_unentered
from .ownership import GrantGuard


class LossEvent:
    """An event that is set when the lease is lost. It is never unset, and a release does not set it."""

    __slots__ = ("_grant",)

    def __init__(self, grant: Grant) -> None:
        self._grant = grant

    def is_set(self) -> bool:
        """Return whether the lease is lost. It looks at the clock, so it is right even if the loop was blocked."""
        return self._grant.is_lost()

    async def wait(self) -> None:
        """Wait until the lease has ended: it is lost (`is_set`), or its release was confirmed. Safe to cancel.

        So a task that watches a lease ends with it.
        """
        await self._grant.wait_ended()


class Lease:
    """One acquisition of one lock: what ``acquire()`` returns. Not shared, not reused.

    Guarantee: until `remaining` is 0 the server has granted the lock to nobody else, however late replies arrive and
    whatever clocks say. Three things can break it: another client writes the key, a failover loses the write, or the
    clock of the server jumps ahead. That is what `fence` is for: an integer greater than that of every earlier grant of
    this name, to be checked by the resource that the lock protects. (Permits of a semaphore that tasks share are the
    exception, see
    [Sharing](https://redis-sync-aio.github.io/redis-sync-aio/guides/sharing/). Readers have the fence of the last
    writer.)

    A lease is itself an ``async with`` over one body, once. The loss of the lease cancels the body, whatever
    ``on_lost`` its primitive has, and the end of the body releases the lease.
    """

    _grant: Grant
    _hold: Hold[Self] | None = None
    """The body that was entered by the lease itself."""
    _lost: LossEvent | None = None

    def __init__(self, grant: Grant) -> None:
        """Show ``grant``. The package makes leases; users get them from ``acquire()``."""
        self._grant = grant

    # -- what it is ------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the lock, as text."""
        return self._grant.name

    @property
    def token(self) -> str:
        """The value under the key of the lock: unique to this acquisition, or the identity of the caller.

        Tasks that share a lease, leases of one reentrant owner, and a reader and its upgrade have the same token.
        """
        return self._grant.token

    @property
    def fence(self) -> int:
        """A number greater than that of every earlier grant of this name. Readers have that of the last writer."""
        return self._grant.fence

    @property
    def identity(self) -> str | None:
        """The identity that the caller gave, or None."""
        return self._grant.identity

    @property
    def weight(self) -> int:
        """The number of permits of a semaphore; 1 for a lock and for a reader, 2,147,483,647 for a writer."""
        return self._grant.weight

    # -- how long it lasts -----------------------------------------------------------------------------

    @property
    def lost(self) -> LossEvent:
        """An event for the loss: ``lost.is_set()``, and ``await lost.wait()``, which a release ends, too."""
        if self._lost is None:
            self._lost = LossEvent(self._grant)
        return self._lost

    def remaining(self) -> float:
        """Return the seconds for which the lease is certainly valid: 0.0 when it is not, inf without a ttl."""
        return self._grant.remaining()

    def is_lost(self) -> bool:
        """Return whether the lease ended before its holder released it."""
        return self._grant.is_lost()

    def check(self) -> None:
        """Raise LeaseLost if the lease is lost, NotHeld if it was released; no command is sent.

        Call it before a step that must not happen without the lock. It looks at the clock, so it is right even if the
        event loop or the whole process was stopped and could notice nothing meanwhile.
        """
        self._grant.check()

    async def extend(self, ttl: Seconds) -> None:
        """End the lease ``ttl`` seconds (or timedelta) from now, and renew it with this ttl from then on.

        It may make a lease shorter. It takes one round trip. If the answer is lost with its connection, a copy of the
        command may still arrive at the server. Then the lease lasts, for a minute, no longer than that copy lets it.

        Raises:
            LeaseLost: it was gone already (the body is cancelled as with any loss).
            NotHeld: it was released. ValueError: it has no end.
            Unreachable: no answer within ``retry_for`` of the coordinator, or by the deadline if that is sooner: the
                earlier one of the old and the new. The lease lasts until that one.
            CommandRefused: the server answered with an error; deadline and ttl stay as they were.
            WrongContext: in another event loop or process. TypeError, ValueError: ``ttl`` is no time, or out of range.

        On cancellation the extension may or may not happen.
        """
        await self._grant.extend(ttl_ms(ttl))

    # -- its use and its end ---------------------------------------------------------------------------

    def transaction(self) -> GuardedTransaction:
        """Return an async context manager for writes that are made only if the lease still holds when they are.

        What it yields is used as in `transaction`: reads immediately, ``tx.multi()``, then writes, which are executed
        at the end of the block. By then a holder that was stopped for longer than its lease has lost it, and must not
        overwrite the work of the next one: the server compares the token and executes the writes in one step. Two round
        trips, one more than an unguarded MULTI. The lock and what is written are in one Redis.

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

        On cancellation nothing was written, unless EXEC was in flight: then all was, or nothing.

        Example:
            ```python
            async with lock as lease, lease.transaction() as tx:
                balance = int(await tx.get("balance") or 0)
                tx.multi()
                tx.set("balance", balance - 10)
            ```
        """
        grant = self._grant
        grant.check_context()
        settings = grant.manager.settings
        guard = GrantGuard(
            grant,
            grant.manager.members_of(grant),
            retry_for=settings.retry_for,
            response_timeout=settings.asked_response_timeout,
        )
        return GuardedTransaction(servers_of(settings.client), guard)

    async def release(self) -> None:
        """Give the lock back; the next waiter has it when this returns. Idempotent.

        A body that runs under it in another task is cancelled, and ends with LeaseLost (reason "released").

        Raises:
            LeaseLost: it was lost before. Nothing was changed on the server: its present holder keeps it.
            Unreachable: no answer, after retries. The lock then ends with its ttl.
            CommandRefused: the server answered with an error. After these two the lease is still held until its
                deadline, and not renewed. It may be released again, by this method only: its lock has forgotten it. But
                the writer's lease of an upgrade is lost, and the reader's goes on.
            CoordinatorClosed: closed before the answer. WrongContext: in another event loop or process.

        On cancellation the release goes on in the background and is never left half done. In a clean-up it is awaited
        for ``exit_timeout``, and then goes on in the background.
        """
        await self._grant.release()

    async def detach(self, ttl: Seconds | None = None) -> str:
        """Let go of the lease without releasing it, and return a token by which ``attach`` takes it up elsewhere.

        The token is a short text for a message, a job or a database. Until it is attached nobody renews the lease: it
        ends ``ttl`` seconds (or timedelta) from now, also if this process ends before; None: its own ttl. The lease in
        this process is over then, as after a release: `check` raises NotHeld, and the end of its body releases nothing.

        For leases of an `AsyncLock` or an `AsyncSemaphore`; not with an identity, which needs no token, or with
        ``share=True`` or ``min_hold``. See `AsyncLock.attach`.

        Raises:
            LeaseLost, NotHeld, Unreachable, CommandRefused, WrongContext: as `extend`. The lease was not detached.
            ValueError: it is a lease that cannot be detached, or ``ttl`` is out of range. TypeError: it is no time.

        On cancellation the lease is still held here, and its end may have been moved.
        """
        return await detach(self._grant, None if ttl is None else ttl_ms(ttl))

    async def __aenter__(self) -> Self:
        """Enter the body.

        Raises RuntimeError if a body already runs under this lease, LeaseLost or NotHeld if it is not held any more.
        """
        if self._grant.body is not None:
            raise RuntimeError(f"a body runs under the lease on {self.name!r} already: acquire another lease for this")
        self._hold = Hold(self._itself, "cancel")
        return await self._hold.__aenter__()

    async def _itself(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hold, self._hold = self._hold, None
        if hold is None:
            await leave_unentered(repr(self), error)
        else:
            await hold.__aexit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._grant.described()}>"


def grant_of(lease: Lease) -> Grant:
    """Return the grant that ``lease`` is the face of."""
    return lease._grant
