"""LeaderElection: one of many processes leads, the others stand by, and every process can see which one it is."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from inspect import isawaitable
from typing import TYPE_CHECKING, TypeVar

import anyio

from .._client.settings import Client
from .._core import logs
from .._core.arguments import Name, Seconds, positive_seconds
from .._core.backoff import Backoff
from .._core.display import shown
from .._core.keys import Engine, labelled, lock_keys
from .._core.redis_py_words import explains_words_of_redis_py
from .._leases.hold import Acquiring
from .._leases.implicit import CoordinatorLike
from .._leases.lease import GuardingLease
from ..errors import LeaseLost, Unreachable
from .base import Face, LeaseOptions
from .lock import LockBase

if TYPE_CHECKING:
    from .._inspection.views import NameView

__all__ = ["Leader", "LeaderElection", "Term"]

R = TypeVar("R")

STAND_AGAIN = Backoff()
"""Pauses of `LeaderElection.run` before it stands again."""
SOONEST = 0.02
"""Least seconds between two looks of a watcher."""


@dataclass(frozen=True, slots=True)
class Leader:
    """The leader of an election, as the server knows it.

    Attributes:
        label: The label of the leader. "host:pid" if it chose none. If a client of another library wrote the key, the
            value of the key.
        term: The number of its term. None: the server does not know it, because another client wrote the key or
            ``{NAME}:fence`` was deleted.
    """

    label: str
    term: int | None


class Term(GuardingLease):
    """The time for which a process leads.

    It is a [`GuardingLease`][redis_sync_aio.types.GuardingLease], and has all that such a lease has.
    """

    @property
    def number(self) -> int:
        """The number of this term: its fence, greater than that of every earlier term. Others see `Leader.term`."""
        return self.fence


class _Seat(LockBase[Term]):
    """The lock that the leader holds."""

    _kind = "election"
    _lease_type = Term
    _shown_as = "LeaderElection"

    def __init__(self, client: Client | CoordinatorLike, name: Name, label: str | None, options: LeaseOptions) -> None:
        self._label = labelled(label)
        super().__init__(client, name, lock_keys, options)


class LeaderElection(Face[_Seat]):
    """An election among processes: at most one of the candidates leads at a time, and the next one takes over.

    Guarantees:

    - By the server's clock there is at most one term at a time.
    - Candidates lead in the order in which they came.
    - The next candidate takes over immediately when the leader resigns, and within ``ttl`` when the leader crashes.

    The leader holds a lock, and the other candidates stand in its queue. A leader that was paused may keep running
    after its term. The number of the term rises, so let the resource refuse a lower one
    ([`FenceGate`][redis_sync_aio.FenceGate]).

    Args:
        client: As for [`AsyncLock`][redis_sync_aio.AsyncLock].
        name: The name of the election, and the key that says who leads. It is the lock of that name: an `AsyncLock` of
            the same name and this election exclude each other.
        label: The text by which others know this process, at most 512 bytes. None: the label of the coordinator, or
            "host:pid". It need not be unique: two processes with the same label never lead together, and a restarted
            process does not take the term of its predecessor for its own.
        ttl: How long a leader that has crashed counts as the leader, 0.01 s to ten years. The
            leader renews its lease every third of it.
        engine: As for `AsyncLock`.

    Raises:
        TypeError, ValueError: An argument is bad. Nothing was sent.

    Example:
        ```python
        from redis_sync_aio import LeaderElection
        from redis_sync_aio.types import Term

        election = LeaderElection(redis, "scheduler", label="worker-3", ttl=10)


        async def work(term: Term) -> None:
            await schedule(term.number)


        await election.run(work)  # waits until this process is elected, and stands again after a loss
        ```
    """

    @explains_words_of_redis_py
    def __init__(
        self,
        client: Client | CoordinatorLike,
        name: Name,
        *,
        label: str | None = None,
        ttl: Seconds = 30.0,
        engine: Engine = "auto",
    ) -> None:
        if ttl is None:
            raise TypeError("an election needs a ttl, seconds or a timedelta: a crashed leader would lead forever")
        options = LeaseOptions(ttl, auto_renew=True, max_hold=None, on_lost="cancel", engine=engine)
        self._on = _Seat(client, name, label, options)

    def lead(self, *, timeout: Seconds | None = None) -> Acquiring[Term]:
        """Return an async context manager that waits until this process leads, yields its `Term`, and resigns.

        A loss of the leadership cancels the body, and its end raises LeaseLost. The manager can be entered once; call
        ``lead()`` to stand again.

        Args:
            timeout: How long to wait (seconds). 0: do not wait. None: forever.

        Raises:
            TypeError, ValueError: At the call: the timeout is bad. The other errors are raised on entering.
            AcquireTimeout: This process was not elected in time.
            WouldDeadlock: A body of this task leads already.
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.

        On cancellation the candidate leaves the queue.
        """
        return self._on.acquire(timeout=timeout)

    async def run(self, work: Callable[[Term], Awaitable[R]]) -> R:
        """Lead and call ``work(term)``, again in each term, until ``work`` returns; return its result.

        - **``work`` returns:** this process resigns, and ``run`` returns the result.
        - **``work`` raises:** this process resigns, and ``run`` raises the error.
        - **The term is lost:** ``work`` is cancelled. ``run`` pauses for up to a second, and stands again.
        - **Redis is unreachable** for longer than ``retry_for``, or ``work`` raises LeaseLost, Unreachable or a group
          of these: the same. Each time a warning is logged (``stands_again``).
        - **Another task calls** `resign`: ``work`` is cancelled, and ``run`` stands again, behind the candidates that
          wait. To end, cancel the task that runs it.
        - **The coordinator drains**, or is closed: ``work`` is cancelled immediately, and ``run`` raises
          CoordinatorClosed.

        Args:
            work: A coroutine function, or another function that returns an awaitable. It is called with the term.

        Raises:
            TypeError: ``work`` cannot be called, or did not return an awaitable.
            WouldDeadlock, CommandRefused, CoordinatorClosed, WrongContext: As for `lead`.

        On cancellation ``work`` is cancelled, and this process resigns; the answer is awaited for ``exit_timeout`` of
        the coordinator. A result is returned even if its release was not answered.

        Example:
            ```python
            async def work(term):
                await schedule(term.number)


            await election.run(work)
            ```
        """
        if not callable(work):
            raise TypeError(f"work must be a coroutine function that takes a Term, not {shown(work)}")
        delays = iter(STAND_AGAIN)
        while True:
            results: list[R] = []
            try:
                async with self.lead() as term:
                    term._grant.ends_with_drain = True
                    self._on._resource()  # raises CoordinatorClosed if a drain has begun
                    working = work(term)
                    if not isawaitable(working):
                        raise TypeError(f"work must be a coroutine function: {shown(work)} returned {shown(working)}")
                    results.append(await working)
                return results[0]
            except (LeaseLost, Unreachable, ExceptionGroup) as error:
                if not _is_outage(error):
                    raise
                if results and isinstance(error, Unreachable):  # of the release
                    return results[0]
                outage = error
            if not (isinstance(outage, LeaseLost) and outage.reason == "closed"):  # else `lead` raises why
                delay = next(delays)
                kind = type(outage).__name__
                logs.log("stands_again", lock=self.name, delay=delay, kind=kind, why=outage)
                await anyio.sleep(delay)

    async def resign(self) -> bool:
        """End the term of this process, if it leads, and return whether it led.

        The next candidate leads when this returns.

        A body that runs in another task is cancelled, and ends with LeaseLost (reason "released"). A body may also
        resign itself and should then end. A body that was about to begin raises NotHeld instead. A candidate that waits
        stays in the queue: cancel its task.

        Raises:
            LeaseLost, Unreachable, CommandRefused, CoordinatorClosed, WrongContext: As for `Lease.release`.

        On cancellation the release continues in the background.
        """
        held = self._on._held()
        for grant in held:
            await grant.release()
        return bool(held)

    async def leader(self) -> Leader | None:
        """Return the present leader, or None. One round trip.

        Raises:
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.statistics`.

        On cancellation the reply is ignored.
        """
        return _leader(await self._on._look(1))

    def watch(self, *, every: Seconds = 1.0) -> AsyncGenerator[Leader | None, None]:
        """Return an async iterator of leaders: the present one first (None: no leader), then each change.

        The iterator asks the server once every ``every`` seconds, and when the lease of the leader should end, with one
        command that only reads. A change is therefore seen within ``every``; of several changes in that time, only the
        last.

        Args:
            every: Seconds or timedelta, more than 0.

        Raises:
            TypeError, ValueError: At the call: ``every`` is bad.
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: In the iteration. Call ``watch()`` again.

        The iteration may be cancelled or closed at any time, and holds nothing.

        Example:
            ```python
            from redis_sync_aio import LeaderElection

            election = LeaderElection(redis, "scheduler", label="worker-3")
            async for leader in election.watch():
                print("no leader" if leader is None else f"{leader.label} leads, term {leader.term}")
                break
            ```
        """
        return self._changes(positive_seconds(every, "every"))

    async def _changes(self, every: float) -> AsyncGenerator[Leader | None, None]:
        view = await self._on._look(1)
        seen = _leader(view)
        yield seen
        while True:
            ends = [it.remaining for it in view.holders if it.remaining is not None]
            await anyio.sleep(max(SOONEST, min(every, *ends)) if ends else every)
            view = await self._on._look(1)
            if (found := _leader(view)) != seen:
                seen = found
                yield seen

    def __repr__(self) -> str:
        return repr(self._on)


def _is_outage(error: BaseException) -> bool:
    """Return True if ``error`` is a lost lease or an outage, or a group of nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_outage, error.exceptions))
    return isinstance(error, (LeaseLost, Unreachable))


def _leader(view: NameView) -> Leader | None:
    if not view.holders:
        return None
    (holder,) = view.holders
    return Leader(holder.label, holder.fence)
