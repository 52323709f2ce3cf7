"""The handle of a transaction's body: its commands run immediately, or are queued, by the state of the transaction.

The conversation with the server is that of `watch_session`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Generic, Literal, NoReturn, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary

import redis.exceptions
from redis.asyncio import Redis
from redis.commands import AsyncCoreCommands

from .._client.checkout import NEVER_DECODE, Encodables
from .._client.cluster import Topology
from .._client.replies import Reply, is_transient
from .._client.settings import AFTER_CONFLICT, RETRY, Same, encode
from .._core.arguments import Name
from .._core.backoff import Backoff
from .._core.cancellation import redeliver_cancellation, undo_in, wait_shielded
from .._core.clock import now
from .._core.display import text
from ..errors import Conflict, OutcomeUnknown, SyncError, TransactionMisuse
from ..errors._misuse import Misuse
from .exec_replies import (
    CONTROL,
    Command,
    ExecUnanswered,
    QueuedReply,
    Replies,
    blocks,
    changes_session,
    first_word,
    known_to_read,
    only_reads,
    without_effect,
)
from .watch_session import Precheck, Wait, WatchSession

# -- The options of a transaction, and its result --------------------------------------------------------------


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Committed(Generic[T]):
    """A transaction that was committed, and what it took.

    Attributes:
        value: The result of the body. None if the body is that of a loop, which has no result.
        replies: The replies to the queued commands, in order, as the client gives them. None if ``recovered``.
        attempts: How often the body ran, the last time included.
        conflicts: How many attempts were not committed because another client had changed a watched key.
        elapsed: Seconds from the call to the commit.
        escalated: True if conflicts made it wait for a turn of its own (``escalate_after``).
        recovered: True if the answer to EXEC was lost and the marker told that it was executed (``exactly_once``). It
            is not known then whether a command failed when it ran.
    """

    value: T
    replies: Replies | None
    attempts: int
    conflicts: int
    elapsed: float
    escalated: bool = False
    recovered: bool = False


@dataclass(frozen=True, slots=True)
class TransactionOptions:
    """The checked options of a transaction."""

    keys: tuple[bytes, ...]
    prefix: bytes
    """The beginning of keys that are written next to the caller's."""
    attempts: int
    timeout: float | None
    backoff: Backoff
    idempotent: bool
    exactly_once: bool
    escalate_after: int | None


# -- Taking turns: after some conflicts a transaction queues up with the others instead of racing them ---------
#
# The turn decides nothing: EXEC does. So transactions without turns mix with those that take turns, and a turn whose
# lease was lost does no harm. A turn only makes conflicts unlikely.


class WriteTurn(Protocol):
    """The turn on the keys of one transaction: a lease of a fair lock."""

    keys: tuple[bytes, ...]
    """The keys that exist while a transaction has the turn."""

    @property
    def held(self) -> bool:
        """True if it was taken, and lasts."""
        ...

    async def take(self, timeout: float | None) -> None:
        """Wait for the turn. Raises AcquireTimeout. On cancellation nothing is left."""

    def give_back(self) -> None:
        """Give the turn back, if it was taken."""


class TurnCheck:
    """A precheck that looks whether another client has the turn, and then takes our own."""

    keys: tuple[bytes, ...] = ()

    def __init__(self, turn: WriteTurn, take: Wait) -> None:
        self._turn = turn
        self._take = take

    def commands(self) -> Sequence[Encodables]:
        """Return the commands that tell whether another client has the turn; none when it is ours."""
        return () if self._turn.held else [("EXISTS", *self._turn.keys)]

    def verify(self, replies: Sequence[Reply]) -> Wait | None:
        """Return the taking of our turn if another client has it."""
        return self._take if any(replies) else None


class TransactionState(Enum):
    """The states of a transaction."""

    NEW = "not entered"
    READING = "reading"
    QUEUING = "queuing"
    ENDED = "ended"


class Transaction(AsyncCoreCommands):
    """The handle of a transaction's body: all commands of the client, on one connection that watches the keys.

    Before `multi` commands are awaited, and only those that read are allowed. After it they are queued, reads as well:
    nothing is sent and no reply is known before the end of the body. Replies look as they do from the client.

    One task at a time uses it, and only while the body runs.

    Example:
        ```python
        from redis_sync_aio.types import Transaction

        async def deduct(tx: Transaction, amount: int) -> int:
            stock = int(await tx.get("stock:1") or 0)
            if stock < amount:
                raise Insufficient
            tx.multi()
            tx.set("stock:1", stock - amount)
            return stock - amount
        ```
    """

    _is_async_client: Literal[True] = True  # redis-py's types ask for both
    _event_dispatcher: Any = None

    _needs_watch = True
    """True if the writes may depend on nothing but what was read through the transaction."""

    def __init__(self, session: WatchSession) -> None:
        self._session = session
        self._state = TransactionState.READING
        self._busy = False
        self._queue: list[Command] = []

    # -- for the body ----------------------------------------------------------------------------------

    async def watch(self, *names: Name) -> None:  # type: ignore[override]  # redis-py's types contradict each other
        """Watch more keys, together with all that were named before. One round trip.

        Needed before the body reads in another way than through this transaction.

        Raises:
            TransactionMisuse: It is called after `multi`, or for a key in another hash slot of a cluster.
            TypeError, ValueError: A name is bad.

        On cancellation the transaction has ended.
        """
        self._check_reading("watch()")
        keys = [encode(self._session.client, name, "a key") for name in names]
        if self._session.add(keys):
            await self._in_turn(self._session.send([]))

    async def unwatch(self) -> None:  # type: ignore[override]
        """Raise TransactionMisuse: the keys stay watched until the body ends."""
        raise TransactionMisuse.of(Misuse.UNWATCH)

    def multi(self) -> None:
        """End the reading. From now on commands are queued, and executed together at the end of the body.

        Raises:
            TransactionMisuse: It was called before. Or nothing was read or watched yet, so that the data behind the
                writes would be older than the WATCH.
        """
        self._check_reading("multi()")
        if self._busy:
            raise TransactionMisuse.of(Misuse.MULTI_IN_FLIGHT)
        if self._needs_watch and not self._session.watched:
            raise TransactionMisuse.of(Misuse.NOTHING_READ)
        self._state = TransactionState.QUEUING

    def execute_command(self, *args: Any, **options: Any) -> Awaitable[Any]:
        """Run a command now, or queue it after `multi`. Every command method of the client ends here.

        Raises:
            TransactionMisuse: The command cannot be part of a transaction.
        """
        name = first_word(args[0]) if args else ""
        self._check_open(name)
        if not name:
            raise TransactionMisuse.of(Misuse.WITHOUT_NAME)
        if name in CONTROL:
            raise TransactionMisuse.of(Misuse.CONTROL, name)
        if changes_session(args):
            raise TransactionMisuse.of(Misuse.CHANGES_SESSION, name)
        if blocks(args):
            raise TransactionMisuse.of(Misuse.BLOCKS, name)
        if self._state is TransactionState.READING:
            return self._in_turn(self._read(args, options))
        self._queue.append((self._session.pack(args), args, options))
        return QueuedReply(name, reads=known_to_read(args))

    def get_encoder(self) -> Any:
        """Return the encoder of names and values: the client's own."""
        client: Any = self._session.client
        return client.get_encoder()

    def get_connection_kwargs(self) -> dict[str, Any]:
        """Return the options of the client's connections."""
        client: Any = self._session.client
        options: dict[str, Any] = client.get_connection_kwargs()
        return options

    def __repr__(self) -> str:
        return f"<Transaction on {self._session.shown()}: {self._state.value}, {len(self._queue)} queued>"

    # -- inside ----------------------------------------------------------------------------------------

    def _check_open(self, what: str) -> None:
        if self._session.error is not None:
            raise self._session.error
        if self._state is TransactionState.NEW:
            raise TransactionMisuse.of(Misuse.NOT_BEGUN, what)
        if self._state is TransactionState.ENDED:
            raise TransactionMisuse.of(Misuse.ENDED, what)

    def _check_reading(self, what: str) -> None:
        self._check_open(what)
        if self._state is TransactionState.QUEUING:
            raise TransactionMisuse.of(Misuse.AFTER_MULTI, what)

    async def _in_turn(self, work: Coroutine[Any, Any, T]) -> T:
        """Run one command at a time: replies belong to commands by their order."""
        if self._busy or self._state is not TransactionState.READING:
            work.close()
            self._check_reading("a command that was made before")
            raise TransactionMisuse.of(Misuse.TWO_COMMANDS)
        self._busy = True
        try:
            return await work
        finally:
            self._busy = False
            if self._has_ended():  # the body left while this ran in another task
                await self._session.give_back(drop=True)

    def _has_ended(self) -> bool:
        return self._state is TransactionState.ENDED

    async def _read(self, words: Encodables, options: dict[str, Any]) -> Any:
        """Run one command of the body; its error comes out as from the client."""
        if not known_to_read(words) and not await self._only_reads(words):
            raise TransactionMisuse.of(Misuse.WRITE_BEFORE_MULTI, first_word(words[0]))
        session = self._session
        (reply,) = await session.send([without_effect(words)], raw=NEVER_DECODE in options)
        if isinstance(reply, redis.exceptions.ResponseError):
            raise session.transient(reply) or reply
        return await session.opened().as_from_client(words, options, reply)

    async def _only_reads(self, words: Encodables) -> bool:
        session = self._session
        with session.reporting():
            found = await only_reads(session.client, await session.open(), words)
        if isinstance(found, bool):
            return found
        if (error := session.transient(found)) is not None:
            raise error
        raise TransactionMisuse.of(Misuse.UNKNOWN_BEFORE_MULTI, first_word(words[0]), str(found)) from found

    # -- its end ---------------------------------------------------------------------------------------

    async def _commit(self) -> Replies | ExecUnanswered | None:
        """Execute the queued commands. Return the replies; None when a watched key was changed; ExecUnanswered.

        Raises TransactionMisuse, CommandRefused, Unreachable: nothing was done; PartiallyApplied: some commands failed.
        """
        self._check_commit()
        return await self._session.execute(self._queue)

    def _check_commit(self) -> None:
        self._check_open("the commit")
        if self._busy:
            raise TransactionMisuse.of(Misuse.ENDED_IN_FLIGHT)
        if self._state is TransactionState.READING:
            raise TransactionMisuse.of(Misuse.WITHOUT_MULTI)
        self._state = TransactionState.ENDED

    async def _end(self, *, drop: bool) -> None:
        """Give the connection back; nothing works any more. On cancellation that is finished first."""
        self._state = TransactionState.ENDED
        if not self._busy:  # else a task that the body left behind uses it, and gives it back
            await self._session.give_back(drop)


# -- The body of a transaction: one at a time for each task and pool, and the fate of the connection when it fails


_inside: WeakKeyDictionary[asyncio.Task[Any], list[Same]] = WeakKeyDictionary()
"""The connection pools on which each task runs the body of a transaction."""


class BodyScope:
    """One body that runs in the current task. Raises TransactionMisuse inside another body on the same pool."""

    def __init__(self, client: Redis) -> None:
        task = asyncio.current_task()
        assert task is not None
        pools = _inside.setdefault(task, [])
        pool = Same(client.connection_pool)
        if pool in pools:
            raise TransactionMisuse.of(Misuse.NESTED)
        pools.append(pool)
        self._pools = pools
        self._pool = pool
        self._cancelling = task.cancelling()

    def end(self) -> None:
        """Note that the body has ended, in whatever task."""
        self._pools.remove(self._pool)

    async def failed(self, tx: Transaction, error: BaseException) -> None:
        """Give the connection back after ``error``. A cancellation meanwhile must not hide that (P7)."""
        cancelled = isinstance(error, asyncio.CancelledError)
        try:
            await tx._end(drop=cancelled)
        except asyncio.CancelledError as again:
            if cancelled or error is tx._session.error or asyncio.current_task() is None:
                raise
            redeliver_cancellation(again, self._cancelling)


# -- Guarded commits: writes that are made only if a lease still holds at that moment, by the server's word ----
#
# A holder that is stopped for longer than its lease does not know, and no check on its own clock can help: it may be
# stopped right after the check. So the lock's key is watched, its token compared, and the writes follow in MULTI …
# EXEC: when another client was granted the lock in between, EXEC does nothing.


class CommitGuard(Precheck, Protocol):
    """The condition of a commit: the lease on the lock ``name`` holds at that moment."""

    name: str
    """Name of the lock."""
    retry_for: float
    """Seconds for which a commit is tried."""
    response_timeout: float | None
    """Seconds for which an answer may be waited for; None: as the client says."""
    exit_timeout: float
    """Seconds for which a commit continues after a cancellation."""

    def check(self) -> None:
        """Raise LeaseLost or NotHeld when it does not hold by our own clock."""
        ...

    def committing(self, number: int, /) -> None:
        """Add ``number`` to the commits in flight (negative: fewer)."""
        ...


class GuardedTransaction(Transaction):
    """A transaction that is committed only if a lease still holds; made by `Lease.transaction`.

    Attributes:
        replies: The replies to the queued commands, in order. None before the end of the ``async with``, and if it
            was not committed.
    """

    _needs_watch = False
    replies: Replies | None = None

    def __init__(self, servers: Topology, guard: CommitGuard) -> None:
        self._guard = guard
        super().__init__(
            WatchSession(
                servers.client_of(*guard.keys),
                (),
                precheck=guard,
                response_timeout=guard.response_timeout,
                patience=lambda: guard.retry_for,
            )
        )
        self._state = TransactionState.NEW

    async def __aenter__(self) -> Self:
        if self._state is not TransactionState.NEW:
            raise TransactionMisuse.of(Misuse.ENTERED_TWICE)
        self._guard.check()
        self._begun = now()
        self._body = BodyScope(self._session.client)
        self._state = TransactionState.READING
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._body.end()
        if error is not None:
            await self._body.failed(self, error)
            return
        try:
            self._check_commit()
        except SyncError:
            await self._end(drop=False)
            raise
        self._guard.committing(1)
        # The body has had its effects, so a cancellation does not keep its writes from being made.
        loop = asyncio.get_running_loop()
        committing = loop.create_task(self._commit_while_held(), name="redis_sync_aio commit")
        try:
            await wait_shielded(committing, self._guard.exit_timeout)
        except BaseException:
            undo_in(loop, committing.cancel)  # it runs if this coroutine is closed
            if not self._session.in_doubt:
                self._guard.committing(-1)  # else EXEC may still be in flight, which stays noted
            await self._end(drop=not committing.done())
            raise
        self._guard.committing(-1)
        await self._end(drop=False)

    async def _commit_while_held(self) -> None:
        """Commit, and again the same commands as long as nothing was done and the lease holds.

        A renewal, or another holder's permit, changes the watched key, too. So an EXEC that did nothing says only that
        the token has to be compared again. Bounded by ``retry_for`` of the coordinator, and by the
        deadline of the lease: `check` looks at the clock.
        """
        session, ends = self._session, now() + self._guard.retry_for
        failures, touched = iter(RETRY), iter(AFTER_CONFLICT)
        conflicts = 0
        while True:
            try:
                self._guard.check()
                if not session.watched:
                    await session.send([])
                outcome = await session.execute(self._queue)
            except SyncError as error:
                delay = next(failures)
                late = now() + delay >= ends
                if error is not session.error or not is_transient(error) or self._named() or late:
                    raise
                session.error = None
                await session.begin_again()
                await asyncio.sleep(delay)
                continue
            if isinstance(outcome, ExecUnanswered):
                keys = tuple(map(text, session.keys))
                raise OutcomeUnknown(lease=self._guard.name, attempts=1, keys=keys) from outcome.cause
            if outcome is not None:
                self.replies = outcome
                return
            conflicts += 1
            await session.begin_again()
            delay = next(touched)
            if self._named() or now() + delay >= ends:
                await self._blame(conflicts)
            await asyncio.sleep(delay)

    async def _blame(self, conflicts: int) -> NoReturn:
        """Raise LeaseLost if the lease is gone, else Conflict: EXEC does not tell which of the keys was changed."""
        named = self._named()
        self._session.watch_only(self._guard.keys)
        await self._session.send([])
        raise Conflict(
            lease=self._guard.name,
            attempts=1,
            conflicts=conflicts,
            elapsed=now() - self._begun,
            keys=tuple(map(text, named)),
        )

    def _named(self) -> list[bytes]:
        """Return the keys that the body named to be watched."""
        return list(self._session.keys)[len(self._guard.keys) :]
