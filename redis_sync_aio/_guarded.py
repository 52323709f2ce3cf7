"""Guarded commits: writes that are made only if a lease still holds at that moment, by the server's word.

A holder that is stopped for longer than its lease does not know, and no check on its own clock can help: it may be
stopped right after the check. So the lock's key is watched, its token compared, and the writes follow in MULTI … EXEC:
when somebody else was granted the lock in between, EXEC does nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from redis.asyncio import Redis

from ._body import Body
from ._clock import now
from ._engine.lua import WHOLE
from ._engine.talk import microseconds
from ._executed import Replies
from ._keys import PermitKeys
from ._link.borrow import Words
from ._link.call import Reply, passing
from ._transaction import State, Transaction, Unanswered
from ._types import text
from .backoff import Backoff
from .errors import Conflict, LossReason, OutcomeUnknown, SyncError, TransactionMisuse

if TYPE_CHECKING:
    from .lease import Lease

OUT_OF_REACH = Backoff(initial=0.01, cap=0.5)
TOUCHED = Backoff(initial=0.0005, cap=0.02)
"""Between commits of the same commands; each for the ``retry_for`` of the coordinator, or until the lease ends."""


class GuardedTransaction(Transaction):
    """A transaction that is committed only if a lease still holds; made by `Lease.transaction`.

    Attributes:
        replies: after the ``async with``, the replies to the queued commands, in order.
    """

    _needs_watch = False
    replies: Replies | None = None

    def __init__(self, client: Redis, lease: Lease, members: Sequence[Lease]) -> None:
        self._lease = lease
        self._members = members
        self._guards = tuple(key for member in members for key in _watched(member))
        super().__init__(client, self._guards)
        self._state = State.NEW

    async def __aenter__(self) -> Self:
        if self._state is not State.NEW:
            raise TransactionMisuse(
                "a second `async with`: a transaction lives as long as the body it was given to; "
                "call lease.transaction() again"
            )
        self._lease.check()
        self._begun = now()
        self._body = Body(self._client)
        self._state = State.READING
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._body.end()
        if error is not None:
            await self._body.abandon(self, error)
            return
        self._lease.committing(1)
        try:
            self.replies = await self._commit_while_held()
        except BaseException as failure:  # then it may be under way still, so that stays noted
            await self._end(drop=isinstance(failure, asyncio.CancelledError))
            raise
        self._lease.committing(-1)
        await self._end(drop=False)

    async def _commit_while_held(self) -> Replies:
        """Commit, and again the same commands as long as nothing was done and the lease holds.

        A renewal, or another holder's permit, changes the watched key, too. So an EXEC that did nothing says only that
        the token has to be compared again. Bounded by the deadline of the lease: `check` looks at the clock.
        """
        self._check_commit()
        retry_for = self._lease._keeper.retry_for
        ends = now() + retry_for
        in_trouble, touched = iter(OUT_OF_REACH), iter(TOUCHED)
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
                if error is not self._trouble or not passing(error) or self._keys != self._guards or late:
                    raise
                self._trouble = None
                await self._begin_again()
                await asyncio.sleep(delay)
                continue
            if isinstance(outcome, Unanswered):
                raise self._unknown() from outcome.cause
            if outcome is not None:
                return outcome
            conflicts += 1
            await self._begin_again()
            delay = next(touched)
            if self._keys != self._guards or now() + delay >= ends:
                await self._blame(conflicts)
            await asyncio.sleep(delay)

    async def _blame(self, conflicts: int) -> NoReturn:
        """Raise LeaseLost if the lease is gone, else Conflict: EXEC does not tell which of the keys was changed."""
        keys, self._keys, self._to_watch = self._keys, self._guards, list(self._guards)
        await self._send([])
        shown = tuple(map(text, keys[len(self._guards) :]))
        name = self._lease.name
        others = f"others changed {', '.join(map(repr, shown))}, or " if shown else ""
        advice = ", without tx.watch() for what the lock protects" if shown else " when less goes on"
        raise Conflict(
            f"{others}{name!r} itself was touched meanwhile (renewed; a semaphore or read/write lock also acquired or "
            f"released by others), in {conflicts} of {conflicts} commits: nothing was written. The lease on {name!r} "
            f"still holds: read and write again{advice}",
            attempts=1,
            conflicts=conflicts,
            elapsed=now() - self._begun,
            keys=shown,
        )

    def _unknown(self) -> OutcomeUnknown:
        return OutcomeUnknown(
            f"the answer to EXEC was lost: what was guarded by the lease on {self._lease.name!r} was written as a "
            "whole, or not at all; look at the data",
            attempts=1,
            keys=tuple(map(text, self._keys)),
        )

    # -- the guard -------------------------------------------------------------------------------------

    def _questions(self) -> Sequence[Words]:
        return [("TIME",), *(words for member in self._members for words in _questions(member))]

    async def _answered(self, replies: Sequence[Reply]) -> bool:
        clock, *rest = replies
        time = microseconds(clock)
        answers = iter(rest)
        for member in self._members:
            reason = _judge(member, [next(answers) for _ in _questions(member)], time)
            if reason is not None:
                member.lose(reason)  # the lease hears of it as of any loss
                self._trouble = self._lease.loss()
                raise self._trouble
        return True


def _watched(lease: Lease) -> tuple[bytes, ...]:
    """Return the keys that change when the lease is lost."""
    return lease.keys.all[:2] if isinstance(lease.keys, PermitKeys) else lease.keys.all[:1]


def _questions(lease: Lease) -> list[Words]:
    first, second = lease.keys.all[:2]
    if isinstance(lease.keys, PermitKeys):
        return [("ZSCORE", first, lease.wire_token), ("HGET", second, b"=" + lease.wire_token)]
    return [("GET", first)]


def _judge(lease: Lease, answers: list[Any], time: int) -> LossReason | None:
    """Return why the lease is lost, by the server's answers at its ``time`` (us); None when it holds."""
    if not isinstance(lease.keys, PermitKeys):
        (holder,) = answers
        return None if holder == lease.wire_token else "expired" if holder is None else "taken"
    until, permit = answers
    # Weight 0 is a tombstone; and what was a writer's may be a reader's by now. Otherwise the weight does not matter:
    # the same identity may have asked again, for more or less.
    weight = 0 if permit is None else int(permit.split(b" ", 1)[0])
    enough = weight == lease.weight if lease.weight == WHOLE else weight > 0
    return None if until is not None and float(until) > time and enough else "expired"
