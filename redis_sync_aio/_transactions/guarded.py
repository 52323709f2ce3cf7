"""Guarded commits: writes that are made only if a lease still holds at that moment, by the server's word.

A holder that is stopped for longer than its lease does not know, and no check on its own clock can help: it may be
stopped right after the check. So the lock's key is watched, its token compared, and the writes follow in MULTI … EXEC:
when somebody else was granted the lock in between, EXEC does nothing.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import NoReturn, Protocol, Self

from .._client.error_replies import is_transient
from .._client.retry import AFTER_CONFLICT, RETRY
from .._client.topology import Topology
from .._core.cancellation import undo_in, wait_shielded
from .._core.clock import now
from .._core.display import text
from ..errors import Conflict, OutcomeUnknown, SyncError, TransactionMisuse
from .body import BodyScope
from .exec_replies import ExecUnanswered, Replies
from .handle import Transaction, TransactionState
from .watch_session import Precheck, WatchSession


class CommitGuard(Precheck, Protocol):
    """The condition of a commit: the lease on the lock ``name`` holds at that moment."""

    @property
    def name(self) -> str:
        """Name of the lock."""
        ...

    @property
    def retry_for(self) -> float:
        """Seconds for which a commit is tried."""
        ...

    @property
    def response_timeout(self) -> float | None:
        """Seconds for which an answer may be waited for; None: as the client says."""
        ...

    @property
    def exit_timeout(self) -> float:
        """Seconds for which a commit goes on after a cancellation."""
        ...

    def check(self) -> None:
        """Raise LeaseLost or NotHeld when it does not hold by our own clock."""
        ...

    def committing(self, number: int, /) -> None:
        """Note that so many more commits are in flight (negative: fewer)."""
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
            raise TransactionMisuse.entered_twice()
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
                raise self._unknown() from outcome.cause
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

    def _unknown(self) -> OutcomeUnknown:
        return OutcomeUnknown(lease=self._guard.name, attempts=1, keys=tuple(map(text, self._session.keys)))
