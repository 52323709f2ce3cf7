"""Guarded commits: writes that are made only if a lease still holds at that moment, by the server's word.

A holder that is stopped for longer than its lease does not know, and no check on its own clock can help: it may be
stopped right after the check. So the lock's key is watched, its token compared, and the writes follow in MULTI … EXEC:
when somebody else was granted the lock in between, EXEC does nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

from .._client.checkout import Encodables
from .._client.error_replies import is_transient
from .._client.resp import Reply
from .._client.retry import AFTER_CONFLICT, RETRY
from .._client.topology import Topology
from .._core.clock import now
from .._core.display import listed, text
from .._engine.watch_dialogue import microseconds
from .._leases.ownership import Ownership
from ..errors import Conflict, OutcomeUnknown, SyncError, TransactionMisuse
from .body import BodyScope
from .exec_replies import ExecUnanswered, Replies
from .handle import Transaction, TransactionState

if TYPE_CHECKING:
    from .._leases.grant import Grant


class GuardedTransaction(Transaction):
    """A transaction that is committed only if a lease still holds; made by `Lease.transaction`.

    Attributes:
        replies: after the ``async with``, the replies to the queued commands, in order.
    """

    _needs_watch = False
    replies: Replies | None = None

    def __init__(self, servers: Topology, lease: Grant, members: Sequence[Grant]) -> None:
        self._lease = lease
        self._members = members
        self._possessions = [Ownership(member.keys, member.wire_token) for member in members]
        self._guards = tuple(key for it in self._possessions for key in it.watched())
        response_timeout = lease._keeper.response_timeout
        super().__init__(servers.client_of(*self._guards), self._guards, response_timeout=response_timeout)
        self._state = TransactionState.NEW

    async def __aenter__(self) -> Self:
        if self._state is not TransactionState.NEW:
            raise TransactionMisuse(
                "a second `async with`: a transaction lives as long as the body it was given to; "
                "call lease.transaction() again"
            )
        self._lease.check()
        self._begun = now()
        self._body = BodyScope(self._client)
        self._state = TransactionState.READING
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._body.end()
        if error is not None:
            await self._body.failed(self, error)
            return
        self._lease.committing(1)
        try:
            self.replies = await self._commit_while_held()
        except BaseException as failure:
            if not self._in_doubt:
                self._lease.committing(-1)  # else EXEC may be on its way still: that stays noted
            await self._end(drop=isinstance(failure, asyncio.CancelledError))
            raise
        self._lease.committing(-1)
        await self._end(drop=False)

    async def _commit_while_held(self) -> Replies:
        """Commit, and again the same commands as long as nothing was done and the lease holds.

        A renewal, or another holder's permit, changes the watched key, too. So an EXEC that did nothing says only that
        the token has to be compared again. Bounded by ``retry_for`` of the coordinator, and by the
        deadline of the lease: `check` looks at the clock.
        """
        self._check_commit()
        retry_for = self._lease._keeper.retry_for
        ends = now() + retry_for
        in_trouble, touched = iter(RETRY), iter(AFTER_CONFLICT)
        conflicts = 0
        while True:
            try:
                self._lease.check()
                if not self._watched:
                    await self._send([])
                outcome = await self._execute()
            except SyncError as error:
                delay = next(in_trouble)
                late = now() + delay >= ends
                if error is not self._connection_error or not is_transient(error) or self._named() or late:
                    raise
                self._connection_error = None
                await self._begin_again()
                await asyncio.sleep(delay)
                continue
            if isinstance(outcome, ExecUnanswered):
                raise self._unknown() from outcome.cause
            if outcome is not None:
                return outcome
            conflicts += 1
            await self._begin_again()
            delay = next(touched)
            if self._named() or now() + delay >= ends:
                await self._blame(conflicts)
            await asyncio.sleep(delay)

    async def _blame(self, conflicts: int) -> NoReturn:
        """Raise LeaseLost if the lease is gone, else Conflict: EXEC does not tell which of the keys was changed."""
        named = self._named()
        self._keys, self._to_watch = dict.fromkeys(self._guards), list(self._guards)
        await self._send([])
        name = self._lease.name
        others = f"others changed {listed(named)}, or " if named else ""
        advice = ", without tx.watch() for what the lock protects" if named else " when less goes on"
        raise Conflict(
            f"{others}{name!r} itself was touched meanwhile (renewed; a semaphore or read/write lock also acquired or "
            f"released by others), at each of {conflicts} commits: nothing was written. The lease on {name!r} "
            f"still holds: read and write again{advice}",
            attempts=1,
            conflicts=conflicts,
            elapsed=now() - self._begun,
            keys=tuple(map(text, named)),
        )

    def _named(self) -> list[bytes]:
        """Return the keys that the body named to be watched."""
        return list(self._keys)[len(self._guards) :]

    def _unknown(self) -> OutcomeUnknown:
        return OutcomeUnknown(
            f"the answer to EXEC was lost: what was guarded by the lease on {self._lease.name!r} was written as a "
            "whole, or not at all; look at the data",
            attempts=1,
            keys=tuple(map(text, self._keys)),
        )

    # -- the guard -------------------------------------------------------------------------------------

    def _questions(self) -> Sequence[Encodables]:
        return [("TIME",), *(words for it in self._possessions for words in it.questions())]

    async def _answered(self, replies: Sequence[Reply]) -> bool:
        clock, *rest = replies
        time = microseconds(clock)
        answers = iter(rest)
        for member, possession in zip(self._members, self._possessions, strict=True):
            reason = possession.loss(member.weight, [next(answers) for _ in possession.questions()], time)
            if reason is not None:
                member.lose(reason)  # the lease hears of it as of any loss
                self._connection_error = self._lease.loss()
                raise self._connection_error
        return True
