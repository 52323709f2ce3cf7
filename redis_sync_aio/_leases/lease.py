"""Leases: what users have of a lock that they hold. Each is the face of a grant.

Three classes, so that no lease has a method that cannot work: all leases are held, checked, extended and released; one
server can guard writes; a lock and a semaphore can take up a lease that was detached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn, Self, SupportsIndex
from weakref import ReferenceType, ref

from .._client.replies import Reply, Words
from .._core.arguments import Seconds, ttl_ms
from .._core.keys import Keys, PermitKeys
from .._engine.watch_dialogue import microseconds
from .._scripts.constants import WRITER_WEIGHT
from .._transactions.handle import GuardedTransaction
from ..errors import LossReason
from .detached import detach, why_attached
from .grant import Grant
from .hold import Acquiring, leave_unentered

# -- The guard of a transaction: it asks by plain commands whether a lease is still held. Compare `_engine.watch`


@dataclass(frozen=True, slots=True)
class Ownership:
    """The hold of ``token`` on ``keys``, as a transaction checks it."""

    keys: Keys
    token: bytes

    def watched(self) -> tuple[bytes, ...]:
        """Return the keys that change when it is lost."""
        return self.keys.all[:2] if isinstance(self.keys, PermitKeys) else self.keys.all[:1]

    def questions(self) -> tuple[Words, ...]:
        """Return the commands that ask for it."""
        if isinstance(self.keys, PermitKeys):
            permits, state = self.watched()
            return (b"ZSCORE", permits, self.token), (b"HGET", state, b"=" + self.token)
        return ((b"GET", *self.watched()),)

    def loss(self, weight: int, answers: Sequence[Reply], time: int) -> LossReason | None:
        """Return why it is lost, by the answers of the server at its ``time`` (microseconds); None if it is held.

        ``weight`` is the number of permits that its holder believes to have.
        """
        if not isinstance(self.keys, PermitKeys):
            (holder,) = answers
            return None if holder == self.token else "expired" if holder is None else "taken"
        until, permit = answers
        # Weight 0 is a tombstone, and a writer may have become a reader. Otherwise the weight does not matter: the same
        # identity may have asked again, for more or less.
        found = 0 if permit is None else int(permit.split(b" ", 1)[0])
        enough = found == weight if weight == WRITER_WEIGHT else found > 0
        return None if until is not None and float(until) > time and enough else "expired"


class GrantGuard:
    """The guard of `Lease.transaction`: the server confirms that all members of a grant are held."""

    def __init__(self, grant: Grant) -> None:
        hub = grant.manager.hub
        self._grant = grant
        self._members = [(member, Ownership(member.keys, member.wire_token)) for member in grant.members]
        self.keys = tuple(key for _, ownership in self._members for key in ownership.watched())
        self.name = grant.name
        self.retry_for = hub.retry_for
        self.exit_timeout = hub.options.exit_timeout
        self.response_timeout = hub.options.asked_response_timeout
        self.check = grant.check
        self.committing = grant.committing

    def commands(self) -> Sequence[Words]:
        """Return the commands that ask for the members, and TIME."""
        return [(b"TIME",), *(words for _, ownership in self._members for words in ownership.questions())]

    def verify(self, replies: Sequence[Reply]) -> None:
        """Raise LeaseLost if one of the members is lost, after noting the loss."""
        clock, *rest = replies
        time = microseconds(clock)
        answers = iter(rest)
        for member, ownership in self._members:
            reason = ownership.loss(member.weight, [next(answers) for _ in ownership.questions()], time)
            if reason is not None:
                member.lose(reason)
                raise self._grant.loss()


class BaseLease:
    """Possession for a limited time, as the result of one ``acquire()``: what every lease shows.

    A [`GuardingLease`][redis_sync_aio.types.GuardingLease] has `transaction` in addition, and a
    [`Lease`][redis_sync_aio.Lease] also `detach`.

    Guarantee: until `remaining` is 0 the server has granted the lock to no other client, however late replies arrive
    and whatever the clocks of clients say. It breaks if another client writes the key, a failover loses the write, or
    the clock of the server jumps ahead: let the protected resource check `fence`.

    The idea is that of Gray and Cheriton, "Leases: An Efficient Fault-Tolerant Mechanism for Distributed File Cache
    Consistency" (1989): a lock with an expiry needs no message from a crashed holder.

    A lease is an ``async with`` over one body, once. The loss of the lease cancels the body, whatever ``on_lost`` its
    primitive has. The end of the body releases the lease.

    Example:
        ```python
        lease = await lock.acquire(timeout=5)
        async with lease:
            await write_order(fence=lease.fence)
        ```
    """

    _grant: Grant
    _body: Acquiring[Self] | None = None
    """The body that was entered by the lease itself."""

    def __init__(self, grant: Grant, maker: ReferenceType[object]) -> None:
        """Wrap ``grant`` of the primitive ``maker``. The package makes leases; you get one from ``acquire()``."""
        self._grant = grant
        grant.face, grant.maker = ref(self), maker

    # -- what it is ------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of the lock, as text."""
        return self._grant.name

    @property
    def token(self) -> str:
        """The value under the key of the lock: unique to this acquisition, or the identity of the caller.

        Some leases have the same token: those that tasks share, and those of one reentrant owner.
        """
        return self._grant.token

    @property
    def fence(self) -> int:
        """A fencing token: an integer greater than the fence of every earlier grant of this name.

        It does not change. Send it with each write, and let the resource refuse a fence lower than the highest it has
        seen ([`FenceGate`][redis_sync_aio.FenceGate]; Kleppmann, ["How to do distributed
        locking"](https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html), 2016). The fence is a
        hybrid logical clock: the server's time in microseconds, or the last fence plus one if that is greater. So it
        also rises after a failover or FLUSHALL that lost the last fence.

        Readers have the fence of the last writer. Fences of permits that tasks share do not rise in the order of the
        grants ([Sharing](https://redis-sync-aio.github.io/redis-sync-aio/guides/sharing/)).
        """
        return self._grant.fence

    @property
    def identity(self) -> str | None:
        """The identity that the caller gave to ``acquire()``. None: it gave none."""
        return self._grant.identity

    @property
    def label(self) -> str:
        """The text by which people know the holder, as others see it.

        It is the label that the caller gave to ``acquire()``, else that of its coordinator, which is "host:pid" unless
        it was given another. An identity stands in its place.
        """
        return self._grant.label

    @property
    def weight(self) -> int:
        """The number of permits that this lease has of a semaphore; it does not change.

        1 for a lock and for a reader, 2,147,483,647 for a writer.
        """
        return self._grant.weight

    # -- how long it lasts -----------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        """True if the lease ended before its holder released it. It stays True, and a release does not set it.

        It looks at the clock, so it is right even if the event loop or the whole process was stopped meanwhile. Sends
        no command.
        """
        return self._grant.is_lost()

    async def wait_lost(self) -> bool:
        """Wait until the lease ends, and return True if it was lost, False if its release was confirmed.

        A task that watches a lease therefore ends with it. Sends no command. Safe to cancel.

        Raises:
            WrongContext: The lease belongs to another event loop or process.

        Example:
            ```python
            import asyncio

            async with lock as lease:
                watching = asyncio.create_task(lease.wait_lost())
            assert not await watching
            ```
        """
        await self._grant.wait_ended()
        return self._grant.is_lost()

    def remaining(self) -> float:
        """Return for how many seconds the lease is certainly valid: 0.0 if it is not, inf without a ttl.

        It falls as time passes, and rises with each renewal. Sends no command.
        """
        return self._grant.remaining()

    def check(self) -> None:
        """Raise if the lease is not held any more. Sends no command.

        Call it before a step that must not happen without the lock. It looks at the clock, so the answer is right even
        if the event loop or the whole process was stopped meanwhile. It cannot see a change on the server that this
        process has not noticed yet: use `transaction` or `fence` where that matters.

        Raises:
            LeaseLost: The lease is lost.
            NotHeld: The lease was released.
        """
        self._grant.check()

    async def extend(self, ttl: Seconds) -> None:
        """Let the lease end ``ttl`` seconds from now, and renew it with this ttl from then on. One round trip.

        A lease can also be made shorter.

        If the reply is lost together with its connection, a copy of the command may still arrive at the server. For a
        minute the lease then lasts no longer than that copy would let it.

        Args:
            ttl: Seconds or timedelta, 0.01 to ten years.

        Raises:
            LeaseLost: The lease was lost already. Its body is cancelled, as with any loss.
            NotHeld: The lease was released.
            Unreachable: There was no answer within ``retry_for`` of the coordinator, or by the earlier of the old and
                the new deadline. The lease lasts until that earlier deadline.
            CommandRefused: The server answered with an error. Deadline and ttl stay as they were.
            WrongContext: The lease belongs to another event loop or process.
            ValueError: The ttl is out of range, or the lease has no end.
            TypeError: The ttl is not a time.

        On cancellation the extension may or may not happen.
        """
        await self._grant.extend(ttl_ms(ttl))

    # -- its use and its end ---------------------------------------------------------------------------

    async def release(self) -> None:
        """Give the lock back. The next waiter has it when this returns. Idempotent; one round trip.

        If a body runs under the lease in another task, that body is cancelled and ends with LeaseLost (reason
        "released").

        Raises:
            LeaseLost: The lease was lost before. Nothing was changed on the server: its present holder keeps it.
            Unreachable: There was no answer, after retries. The lock ends with its ttl.
            CommandRefused: The server answered with an error.
            CoordinatorClosed: The coordinator was closed before the answer.
            WrongContext: The lease belongs to another event loop or process.

        After Unreachable and CommandRefused the lease is held until its deadline and not renewed. To try again, call
        this method, not `release` of the lock.

        On cancellation the release continues in the background. At the end of a body that failed, it is awaited for
        ``exit_timeout`` of the coordinator first.
        """
        await self._grant.release()

    async def __aenter__(self) -> Self:
        """Enter the body.

        Raises:
            RuntimeError: A body runs under this lease already.
            LeaseLost, NotHeld: The lease is not held any more.
        """
        if self._grant.body is not None:
            raise RuntimeError(f"a body runs under the lease on {self.name!r} already: acquire another lease for this")
        self._body = Acquiring(self._itself(), "cancel")
        return await self._body.__aenter__()

    async def _itself(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        body, self._body = self._body, None
        if body is None:
            await leave_unentered(repr(self), error)
        else:
            await body.__aexit__(kind, error, trace)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled or copied: this process renews it. {self._instead()}")

    def _instead(self) -> str:
        """Return the remedy for sending the lease to another process."""
        return "Only leases of locks and semaphores can change hands, by detach()"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._grant.described()}>"


class GuardingLease(BaseLease):
    """A lease whose writes the server can guard: all of one server have it, so all but that of a Redlock."""

    def transaction(self) -> GuardedTransaction:
        """Return an async context manager for writes that happen only if the lease still holds at that moment.

        The body reads immediately, calls ``tx.multi()``, and then writes, as in
        [`transaction`][redis_sync_aio.transaction]. At the end of the block the server compares the token and executes
        the writes in one step. These writes need no fence.

        The lock and the keys that are written have to be in one Redis. A block takes two round trips, one more than a
        plain MULTI. If a renewal gets in between, the same writes are tried again. All locks of a `MultiLease` have to
        hold.

        Raises:
            LeaseLost: At the beginning or the end of the block: the lease is gone. Nothing was written, and the body is
                cancelled as with any loss.
            NotHeld: At the beginning or the end of the block: the lease was released. Nothing was written.
            Conflict: A key that the body named in ``tx.watch()`` was changed, and nothing was written. With such a key,
                a renewal of the lease can also cause this, as can others that acquire or release permits, since EXEC
                does not tell which key was touched. Do not watch keys that the lock protects.
            CommandRefused, TransactionMisuse: As for `transaction`. Nothing was written.
            OutcomeUnknown: The answer to EXEC was lost: all was written, or nothing.
            PartiallyApplied: A command failed when it ran. The others were executed.
            ValueError: At the call: the locks of a `MultiLease` are in several hash slots of a cluster.

        On cancellation inside the block nothing is written. At its end the commit is finished before the cancellation
        is raised, within ``exit_timeout`` of the coordinator. If that was too short, all was written, or nothing.

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
        return GuardedTransaction(grant.manager.hub.servers, GrantGuard(grant))


class WriteLease(GuardingLease):
    """Possession of the write side of a read/write lock for a limited time: the result of ``write().acquire()``.

    Example:
        ```python
        async with rw.read() as reader:
            value = await load()
        async with rw.write() as writer:
            if writer.previous_fence != reader.fence:  # there was another writer in between
                value = await load()
            await store(value, fence=writer.fence)
        ```
    """

    @property
    def previous_fence(self) -> int | None:
        """The fence of the writer before this one. None: the server remembers none.

        A reader has the fence of the last writer. So a reader that released its lease and became a writer knows whether
        what it read is still true: it is if ``writer.previous_fence == reader.fence``. Otherwise there may have been
        another writer in between, or the server lost its keys: read again.
        """
        return self._grant.previous_fence or None


class Lease(GuardingLease):
    """Possession of a lock, or of permits of a semaphore, for a limited time: the result of one ``acquire()``.

    Example:
        ```python
        async with lock.acquire(timeout=5) as lease:
            await write_order(fence=lease.fence)
        ```
    """

    async def detach(self, ttl: Seconds | None = None) -> str:
        """Let go of the lease without releasing it, and return a token with which ``attach`` takes it up elsewhere.

        The token is a short text for a message, a job or a database. A detached lease is not renewed: it ends after
        ``ttl`` unless it is attached. Here it has ended, as after a release: `check` raises NotHeld, and the end of its
        body releases nothing.

        Works for leases of an [`AsyncLock`][redis_sync_aio.AsyncLock.attach] or an
        [`AsyncSemaphore`][redis_sync_aio.AsyncSemaphore.attach], without an identity and without ``share=True``.

        Args:
            ttl: How long the detached lease lasts: seconds or timedelta from now. None: the ttl of the lease, or what
                is left of its ``max_hold`` if that is less.

        Raises:
            LeaseLost, NotHeld, Unreachable, CommandRefused, WrongContext: As for `extend`. The lease was not detached.
            ValueError: The lease cannot be detached, or ``ttl`` is out of range, or longer than what is left of its
                ``max_hold``.
            TypeError: The ttl is not a time.

        On cancellation the lease is still held here, and its end may have moved.
        """
        return await detach(self._grant, None if ttl is None else ttl_ms(ttl))

    def _instead(self) -> str:
        if (why := why_attached(self._grant)) is not None:
            return f"It cannot be detached either: {why}"
        return "Detach it: `await lease.detach()` returns a text, which attach() takes up in another process"


def grant_of(lease: BaseLease) -> Grant:
    """Return the grant that ``lease`` is the face of."""
    return lease._grant
