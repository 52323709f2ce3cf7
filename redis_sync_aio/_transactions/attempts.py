"""The attempts at one transaction: which are repeated, when it gives up, and what is known of the outcome.

An attempt that certainly did nothing is tried again: EXEC found a change, or an error came before EXEC was
sent. An EXEC whose answer was lost may have been executed; then it depends on what the caller declared.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Literal, NoReturn

from redis.asyncio import Redis

from .._client.replies import is_transient
from .._client.settings import RETRY
from .._core.clock import now
from .._core.display import listed, text
from ..errors import (
    AcquireTimeout,
    CommandRefused,
    Conflict,
    OutcomeUnknown,
    SyncError,
    TransactionMisuse,
    Unreachable,
    WrongContext,
)
from ..errors._misuse import Misuse
from .exec_replies import CommitMarker, ExecUnanswered, Replies
from .handle import BodyScope, Committed, Transaction, TransactionOptions, TurnCheck, WriteTurn
from .watch_session import WatchSession


class Attempts:
    """Iterates over attempts until one is committed; each is an ``async with`` that yields the transaction.

    Attributes:
        outcome: The facts about the commit. None until an attempt was committed.
    """

    def __init__(
        self,
        client: Redis,
        terms: TransactionOptions,
        retry_for: float,
        turn: WriteTurn | None = None,
        response_timeout: float | None = None,
    ) -> None:
        self._client = client
        self._response_timeout = response_timeout
        self._terms = terms
        self._turn = turn  # used by the coroutines of this object only
        self._escalated = False
        self._marker: CommitMarker | None = None
        self._begun = now()
        self._attempts = self._conflicts = 0
        self._conflict_delays: Iterator[float] = iter(terms.backoff)
        self._failure_delays: Iterator[float] = iter(RETRY)
        self._retry_for = retry_for
        self._failing_since: float | None = None
        self._delay: float | None = None  # before an attempt that is due
        self.outcome: Committed[None] | None = None
        self._perhaps = False  # an EXEC had no answer, and the body ran again
        self._over = False
        self._left: SyncError | None = None
        """The error to raise if the loop continues although its last attempt ended without a verdict."""
        self._entered = True  # the attempt before this one

    def __aiter__(self) -> Attempts:
        return self

    async def __anext__(self) -> Attempt:
        if self._over:
            if self._left is None:
                raise StopAsyncIteration
            self._give_up(self._left)
        if not self._entered:  # none would ever count, or wait
            self._finish()
            self._give_up(TransactionMisuse.of(Misuse.NOT_ENTERED, listed(self._terms.keys)))
        try:
            await self._before_next()
        except BaseException as error:
            self._finish()
            if isinstance(error, SyncError):
                self._give_up(error)
            raise
        self._attempts += 1
        self._entered = False
        return Attempt(self, self._transaction())

    async def _before_next(self) -> None:
        turn, after = self._turn, self._terms.escalate_after
        if turn is not None and after is not None and self._conflicts >= after and not turn.held:
            await self._take_turn(turn)
        elif self._delay:
            await asyncio.sleep(self._delay)
        self._delay = None

    async def _take_turn(self, turn: WriteTurn) -> None:
        ends = self._terms.timeout
        try:
            await turn.take(None if ends is None else max(0.0, self._begun + ends - now()))
        except AcquireTimeout as error:
            raise self._conflict(turn=True) from error
        self._escalated = True

    def _transaction(self) -> Transaction:
        terms = self._terms
        if terms.exactly_once:
            self._marker = CommitMarker(self._client, terms.keys[0], terms.prefix, self._response_timeout)
        return Transaction(
            WatchSession(
                self._client,
                terms.keys,
                marker=self._marker,
                precheck=None if self._turn is None else TurnCheck(self._turn, partial(self._take_turn, self._turn)),
                response_timeout=self._response_timeout,
                patience=self._patience,
            )
        )

    def _patience(self) -> float:
        """Return for how many seconds an attempt may wait for a connection of an exhausted pool."""
        ends = self._terms.timeout
        return self._retry_for if ends is None else self._begun + ends - now()

    def _finish(self) -> None:
        """End the loop: there is no further attempt."""
        self._over = True
        self._delay = None
        if self._turn is not None:
            self._turn.give_back()

    def __del__(self) -> None:
        interrupted = self._delay is not None
        if not self._over:
            with suppress(WrongContext):  # in another thread, or after a fork: a turn ends with its lease
                self._finish()
        if interrupted:
            warnings.warn(
                f"a transaction on {listed(self._terms.keys)} was not committed, and not tried again: `return` or "
                "`break` inside `async with attempt` leaves the loop before EXEC has its answer; "
                "do that after the loop",
                RuntimeWarning,
                stacklevel=2,
            )

    # -- one attempt -----------------------------------------------------------------------------------

    def enter(self) -> None:
        """Note that the body begins, in this task."""
        try:
            self._body = BodyScope(self._client)
        except TransactionMisuse as error:
            self._give_up(error)
        self._entered = True

    async def leave(self, tx: Transaction, error: BaseException | None) -> bool:
        """Commit after the body, or give up. Return whether ``error`` is dealt with."""
        self._body.end()
        try:
            if error is None:
                await self._commit(tx)
                return False
            await self._body.failed(tx, error)
            reason = _connection_error_in(error, tx)
            if reason is not None:
                return self._pass(tx, reason)
            self._body_failed(error)
            return False  # P7: the body's own error comes out bare
        except asyncio.CancelledError:
            self._left = self._unknown(cancelled=True) if tx._session.in_doubt else self._caught("a cancellation")
            raise
        finally:
            if self._delay is None:  # no attempt follows
                self._finish()

    async def _commit(self, tx: Transaction) -> None:
        sent = now()
        try:
            outcome = await tx._commit()
        except SyncError as error:
            await tx._end(drop=False)
            if error is not tx._session.error:
                self._give_up(error)
            self._pass(tx, error)
        except BaseException:
            await tx._end(drop=True)
            raise
        else:
            await tx._end(drop=False)
            if isinstance(outcome, ExecUnanswered):
                await self._unanswered(outcome, sent)
            elif outcome is None:
                self._conflicts += 1
                self._failing_since = None
                if not self._again(self._conflict_delays, None):
                    self._give_up(self._conflict())
            else:
                self._succeeded(outcome)

    def _succeeded(self, replies: Replies | None, *, recovered: bool = False) -> None:
        took = now() - self._begun
        self.outcome = Committed(None, replies, self._attempts, self._conflicts, took, self._escalated, recovered)

    def _body_failed(self, error: BaseException) -> None:
        """Take an error of the body's own, which ends the transaction."""
        if self._perhaps and isinstance(error, TransactionMisuse):
            self._give_up(error)
        if self._perhaps:
            error.add_note(
                f"redis_sync_aio: an earlier run of this body may have been committed: the answer to an earlier EXEC "
                f"of the transaction on {listed(self._terms.keys)} was lost. Look at the data"
            )
        self._left = self._caught(f"{type(error).__name__} in its body")

    def _caught(self, what: str) -> TransactionMisuse:
        return TransactionMisuse.of(Misuse.CAUGHT, listed(self._terms.keys), what)

    # -- again, or not ---------------------------------------------------------------------------------

    def _pass(self, tx: Transaction, error: SyncError) -> Literal[True]:
        """Plan the next attempt, or raise: nothing was done in this one, because of ``error``."""
        if is_transient(error) and self._plan_after_failure(tx._session.asked):
            return True
        self._give_up(error)

    def _give_up(self, error: SyncError) -> NoReturn:
        """Raise ``error``, by which this attempt has done nothing; or that an earlier one may have."""
        if not self._perhaps or isinstance(error, OutcomeUnknown):
            raise error
        raise self._unknown(later_error=type(error).__name__) from error

    async def _unanswered(self, outcome: ExecUnanswered, sent: float) -> None:
        """Find out, or decide, what becomes of an EXEC that may have been executed."""
        executed: bool | None = None
        if self._marker is not None:
            try:
                executed = await self._marker.find_out(sent)
            except CommandRefused as error:
                raise self._unknown(marker_error=str(error)) from error
        if executed:
            self._succeeded(None, recovered=True)
        elif executed is None and not self._terms.idempotent:
            raise self._unknown() from outcome.cause
        elif not self._plan_after_failure(sent):
            if executed is None:
                raise self._unknown() from outcome.cause
            raise Unreachable(
                f"the connection was lost before EXEC of the transaction on {listed(self._terms.keys)} was executed: "
                "nothing was written. Check the server and the network, or allow more attempts or time"
            ) from outcome.cause
        elif executed is None:
            self._perhaps = True

    def _plan_after_failure(self, asked: float) -> bool:
        """Plan the next attempt after Redis was unreachable; it was asked at the time ``asked``.

        Without a timeout only if that has not gone on for long, counted from when the first command that failed was
        asked: redis-py may have tried to connect for seconds since then, and before that the body took its time.
        """
        if self._failing_since is None:
            self._failing_since = asked
        return self._again(self._failure_delays, self._failing_since + self._retry_for)

    def _again(self, delays: Iterator[float], ends: float | None) -> bool:
        """Plan the next attempt, if there may be one: it begins before the timeout; without one, before ``ends``."""
        delay = next(delays, None)
        if self._terms.timeout is not None:
            ends = self._begun + self._terms.timeout
        late = delay is not None and ends is not None and now() + delay >= ends
        if delay is None or late or self._attempts >= self._terms.attempts:
            return False
        self._delay = delay
        return True

    def _conflict(self, turn: bool = False) -> Conflict:
        return Conflict(
            attempts=self._attempts,
            conflicts=self._conflicts,
            elapsed=now() - self._begun,
            keys=self._keys(),
            more_attempts=self._attempts >= self._terms.attempts,
            escalates=self._terms.escalate_after is not None,
            turn_taken=turn,
        )

    def _unknown(self, *, cancelled: bool = False, later_error: str = "", marker_error: str = "") -> OutcomeUnknown:
        terms = self._terms
        return OutcomeUnknown(
            attempts=self._attempts,
            keys=self._keys(),
            declared="idempotent" if terms.idempotent else "exactly_once" if terms.exactly_once else "",
            cancelled=cancelled,
            later_error=later_error,
            marker_error=marker_error,
        )

    def _keys(self) -> tuple[str, ...]:
        return tuple(map(text, self._terms.keys))


def _connection_error_in(error: BaseException, tx: Transaction) -> SyncError | None:
    """Return why ``tx`` cannot commit, if ``error`` of its body is that, or a TaskGroup's group of nothing else."""
    reason = tx._session.error
    if error is reason:
        return reason
    if isinstance(error, BaseExceptionGroup):
        _, others = error.split(lambda it: it is reason)
        return reason if others is None else None
    return None


class Attempt:
    """One attempt, in the form of a loop: ``async with attempt as tx``. EXEC follows at the end of the block."""

    def __init__(self, attempts: Attempts, tx: Transaction) -> None:
        self._attempts = attempts
        self._tx = tx

    @property
    def committed(self) -> Committed[None] | None:
        """The facts about the commit, after the block. None: this attempt was not committed."""
        return self._attempts.outcome

    @property
    def replies(self) -> Replies | None:
        """The replies to the queued commands, in order. None: it was not committed, or its replies are not known."""
        return None if self.committed is None else self.committed.replies

    async def __aenter__(self) -> Transaction:
        self._attempts.enter()
        return self._tx

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return await self._attempts.leave(self._tx, error)
