"""Events, latches and barriers: processes wait for each other, or until one of them sets an event.

Both are gates: they let in all or none. On the server a gate consists of permits, and their limit says whether
it is open (`permits/count_down.lua`). So it has the queue, the pushes and the clean-up of a semaphore. A waiter is
granted a permit when the gate opens, and gives it back immediately.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from typing import Literal, NoReturn

from .._client.settings import Client
from .._core.arguments import Name, Seconds, count, permits, timeout_seconds, ttl_ms
from .._core.keys import BARRIER, EVENT, LATCH, Engine, NameKind, permit_keys
from .._core.redis_py_words import explains_words_of_redis_py
from .._engine.commands import Answer
from .._leases.grant import Grant
from .._leases.implicit import CoordinatorLike
from .._leases.lease import BaseLease
from .._scripts.constants import HOUR_MS, TEN_YEARS_MS, TOMBSTONE_MS, Outcome
from ..errors import BrokenBarrierError, LimitMismatch, SyncError, WaitTimeout
from .base import Face, LeaseOptions, PermitPrimitive, by_scripts

__all__ = ["AsyncBarrier", "AsyncCountDownLatch", "AsyncEvent"]

A_DAY = 86_400.0
REMEMBERED = 60.0
"""Seconds for which the server remembers whom it let in: a waiter whose connection was cut asks within that time."""


class Pass(Grant):
    """The permit of a waiter that was let in. Its end is no loss, and however late it arrives, the waiter is let in."""

    protects = reports_loss = False


class Gate(PermitPrimitive[BaseLease]):
    """A gate lets in all or none. A waiter that was let in gives its permit back immediately."""

    _weight = 1
    _grant_type = Pass

    def __init__(
        self,
        client: Client | CoordinatorLike,
        name: Name,
        kind: NameKind,
        whole: int,
        engine: Engine,
    ) -> None:
        """Make a gate; ``whole``: how many counts, or parties, it takes to open it."""
        by_scripts(engine, kind.title)
        self._kind = kind.name
        self._closed = kind.closed
        self.whole = whole
        self._limit = -whole
        options = LeaseOptions(REMEMBERED, auto_renew=False, max_hold=None, on_lost="event", engine=engine)
        super().__init__(client, name, lambda wire, prefix: permit_keys(wire, kind.ending, prefix), options)

    async def wait(self, timeout: Seconds | None) -> int:
        """Wait until this waiter is let in; return the fence of its permit."""
        within = timeout_seconds(timeout)
        grant = await self._grant(self._request(None, None, None, wait=within != 0), within or None)
        if grant.observation is not None:
            grant.observation.end(None)  # it was let in; what becomes of its permit is no loss
        grant.give_back()
        return grant.fence

    def _taken(self, request: object, data: str | None) -> NoReturn:
        raise WaitTimeout(name=self.name, within=0, closed=self._closed)

    def token(self) -> tuple[bytes, int]:
        """Return a token for one command, and for how many ms the server has to remember it: copies come until then."""
        return b"once:" + secrets.token_hex(16).encode(), max(TOMBSTONE_MS, int(self._at_work().retry_for * 2000))

    async def count(self) -> int:
        """Return the count that is missing until it opens; 0: it is open."""
        limit, _ = await self._limit_and_queue()
        return max(0, -(limit or -self.whole))

    async def count_down(self, by: int, lasts_ms: int, identity: bytes | None = None) -> int:
        """Count the gate down ``by`` so much, or close it again (0); return the count that is left."""
        if identity is None:
            token, token_ms = self.token()
            lasts_ms = max(lasts_ms, token_ms)
        else:  # it counts once, as long as the count is remembered
            token, token_ms = b"by:" + identity, TEN_YEARS_MS
        words = (token, by, self.whole, lasts_ms, token_ms)
        reply = await self._at_work().ask(
            lambda commands, call: commands.count_down(self._keys, words, call), goes_on=True
        )
        count = int(reply)
        if count < 0:
            why = f"this latch began at {-count}, not {self.whole}: give the same count everywhere"
            raise LimitMismatch(name=self.name, expected=self.whole, found=-count, why=why)
        return count


class AsyncEvent(Face[Gate]):
    """An `asyncio.Event` for all processes: tasks wait until one of them sets it.

    Guarantees:

    - One `set` wakes all waiters, in all processes, by one push to each. Every later `wait` returns
      immediately until `clear`.
    - A waiter that was in the queue at the `set` gets through, even if the event is cleared immediately after. If its
      connection was cut at that moment, this holds for a minute.
    - A repeated command, whose answer was lost, has one effect: a late copy of a `set` does not undo a later `clear`.
    - A waiter that is cancelled, or dies, leaves nothing behind.

    The event outlives the process that set it. A server that restarts without its data forgets it, and waiters keep
    waiting: set it again. After a failover, waiters queue again.

    Each call costs one round trip, and O(log waiters) on the server. `set` costs that for each waiter.

    Args:
        client: As for [`AsyncLock`][redis_sync_aio.AsyncLock].
        name: As for `AsyncLock`. An event and a lock of the same name are independent.
        keep: How long the server remembers that it was set, 0.01 s to ten years: at least that, at least an hour, and
            at most two and a half times as long. None: until `clear`.
        engine: "auto" (default) or "lua". It needs scripts: CommandRefused without them, ValueError for "watch".

    Raises:
        TypeError, ValueError: An argument is bad. Nothing was sent.

    Example:
        ```python
        from redis_sync_aio import AsyncEvent

        migrated = AsyncEvent(redis, "migrated:2026-11")
        await migrated.set()  # in the process that migrates
        await migrated.wait(timeout=60)  # in the services
        ```
    """

    @explains_words_of_redis_py
    def __init__(
        self,
        client: Client | CoordinatorLike,
        name: Name,
        *,
        keep: Seconds | None = None,
        engine: Engine = "auto",
    ) -> None:
        self._keep_ms = TEN_YEARS_MS if keep is None else ttl_ms(keep, "keep")
        self._on = Gate(client, name, EVENT, 1, engine)

    async def wait(self, *, timeout: Seconds | None = None) -> Literal[True]:
        """Wait until the event is set, and return True. Return immediately if it is set already.

        Args:
            timeout: How long to wait (seconds). 0: do not wait. None: forever.

        Raises:
            WaitTimeout: The event was not set in time. It is also a `TimeoutError`.
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.
            TypeError, ValueError: The timeout is bad. Nothing was sent.

        On cancellation the waiter leaves the queue, without delaying the cancellation.
        """
        await self._on.wait(timeout)
        return True

    async def set(self) -> None:
        """Set the event: all waiters go on. If it is set already, ``keep`` begins again.

        Raises:
            Unreachable: There was no answer. The event may or may not be set; set it again.
            CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.

        On cancellation the command continues in the background.
        """
        await self._on.count_down(1, self._keep_ms)

    async def clear(self) -> None:
        """Reset the event, so that `wait` waits. Tasks that waited when it was set go on all the same.

        Raises:
            Unreachable: There was no answer. The event may or may not be cleared.
            CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.

        On cancellation the command continues in the background.
        """
        await self._on.count_down(0, HOUR_MS)

    async def is_set(self) -> bool:
        """Return whether the server has the event as set.

        Raises:
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.

        On cancellation the reply is ignored.
        """
        return await self._on.count() == 0

    def __repr__(self) -> str:
        return f"<AsyncEvent {self.name!r}>"


class AsyncCountDownLatch(Face[Gate]):
    """A latch for all processes: tasks wait until any of them have counted it down to 0. Then it stays open.

    It is the `CountDownLatch` of java.util.concurrent, across processes.

    Guarantees:

    - Each `count_down` counts exactly once, even if its answer was lost and the command is repeated.
    - An ``identity`` counts once, however often and from whichever process it is counted.
    - The last count wakes all waiters, in all processes, by one push to each. Every later `wait` returns immediately.
    - A waiter that is cancelled, or dies, leaves nothing behind.

    A latch does not notice a worker that dies, as an [`AsyncBarrier`][redis_sync_aio.AsyncBarrier] does. Give `wait` a
    timeout, and let the successor of the worker count with the same identity.

    Each call costs one round trip, and O(log waiters + log counts) on the server. The last `count_down` costs that for
    each waiter.

    Args:
        client: As for [`AsyncLock`][redis_sync_aio.AsyncLock].
        name: As for `AsyncLock`. A latch opens once, so give each piece of work a name of its own ("import:17").
        count: Where it starts, 1 to 1,000,000,000; the same in all processes, else `count_down` raises LimitMismatch.
            The server takes it from the first `count_down`.
        keep: How long the server remembers it after the latest `count_down`, 0.01 s to ten years: at least that, at
            least an hour, and at most two and a half times as long. Then it is a new latch. Default: a day. A server
            that restarts without its data forgets it immediately.
        engine: "auto" (default) or "lua". It needs scripts: CommandRefused without them, ValueError for "watch".

    Raises:
        TypeError, ValueError: An argument is bad. Nothing was sent.

    Example:
        ```python
        from redis_sync_aio import AsyncCountDownLatch

        done = AsyncCountDownLatch(redis, "import:17", count=4)
        for part in range(4):  # in each of four workers
            await done.count_down(identity=f"part {part}")
        await done.wait(timeout=3600)  # in the process that continues
        ```
    """

    @explains_words_of_redis_py
    def __init__(
        self,
        client: Client | CoordinatorLike,
        name: Name,
        count: int,
        *,
        keep: Seconds = A_DAY,
        engine: Engine = "auto",
    ) -> None:
        self._keep_ms = ttl_ms(keep, "keep")
        self._on = Gate(client, name, LATCH, permits(count, "count"), engine)

    async def wait(self, *, timeout: Seconds | None = None) -> None:
        """Wait until the count is 0.

        Args:
            timeout: How long to wait (seconds). 0: do not wait. None: forever.

        Raises:
            WaitTimeout: The count did not reach 0 in time. It is also a `TimeoutError`.
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.
            TypeError, ValueError: The timeout is bad. Nothing was sent.

        On cancellation the waiter leaves the queue, without delaying the cancellation.
        """
        await self._on.wait(timeout)

    async def count_down(self, n: int = 1, *, identity: Name | None = None) -> int:
        """Count down by ``n``, but not below 0, and return the count that is left. At 0 all waiters go on.

        Args:
            n: By how much, 1 to 1,000,000,000.
            identity: A name for this count, such as the part of the work that is done. It counts once as long as the
                latch is remembered, even if several processes count it. None: each call counts.

        Raises:
            LimitMismatch: The latch began at another count, in another process. Nothing was changed.
            Unreachable: There was no answer. It may or may not have counted. Call it again only with an identity.
            CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.
            TypeError, ValueError: An argument is bad. Nothing was sent.

        On cancellation the command continues in the background.
        """
        name = None if identity is None else self._on._encode(identity, "identity")
        return await self._on.count_down(permits(n, "n"), self._keep_ms, name)

    async def count(self) -> int:
        """Return the count that is left on the server.

        Raises:
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.

        On cancellation the reply is ignored.
        """
        return await self._on.count()

    def __repr__(self) -> str:
        return f"<AsyncCountDownLatch {self.name!r} count={self._on.whole}>"


# -- AsyncBarrier: a number of parties wait for each other, and pass together ----------------------------------
#
# A party that waits is a ticket in the queue of a gate (`Gate`). The script that takes it in
# (`barrier/join.lua`) lets all pass when the last one has come. It also says when each process has to ask again: that
# keeps its parties alive, and finds those that are not.


MAX_PARTIES = 1000


def _refused(answer: Answer, weight: int, *, name: str, parties: int) -> SyncError:
    """Return the error for a party that was not let in."""
    if answer.outcome is Outcome.MISMATCH:
        why = f"others wait for {answer.number} parties, and this one for {parties}: give the same number everywhere"
        return LimitMismatch(name=name, expected=parties, found=answer.number, why=why)
    return BrokenBarrierError(name=name, broken=answer.more > 0)


class _Parties(Gate):
    """The parties of a barrier."""

    _unqueued = (1,)  # it may take a place

    def __init__(
        self, client: Client | CoordinatorLike, name: Name, parties: int, ttl: Seconds, engine: Engine
    ) -> None:
        self.ttl = ttl_ms(ttl)
        self._option = self.ttl
        super().__init__(client, name, BARRIER, parties, engine)

    def _refusal(self) -> Callable[[Answer, int], SyncError]:
        return functools.partial(_refused, name=self.name, parties=self.whole)

    async def end(self, *, broken: bool) -> None:
        """Send all parties away that wait, and leave the barrier broken, or as new."""
        token, token_ms = self.token()
        words = (token, self.whole, int(broken), token_ms)
        await self._at_work().ask(lambda commands, call: commands.break_barrier(self._keys, words, call), goes_on=True)

    async def state(self) -> tuple[int, bool]:
        """Return how many parties wait, and whether it is broken."""
        limit, waiting = await self._limit_and_queue()
        return waiting, limit > 0


class AsyncBarrier(Face[_Parties]):
    """An `asyncio.Barrier` for all processes: ``parties`` tasks wait for each other, and pass together.

    It is the `CyclicBarrier` of java.util.concurrent, across processes. Unlike there, a party that is cancelled or
    times out does not break the barrier. It is no context manager: a party that has passed holds nothing.

    Guarantees:

    - No party passes before all have come. The last one lets all pass, by one push to each. Then the barrier can be
      used again.
    - A party that is cancelled, or whose timeout has passed, leaves, and the others need one more.
    - A party that dies while it waits, or is cut off for ``ttl``, breaks the barrier: all that wait, and all that come
      later, get BrokenBarrierError until `reset`.

    A party that died less than ``ttl`` ago still counts if the others come within that time. A party that never
    came is not noticed, so give `wait` a timeout. When the server is replaced or restarts (a failover, a slot that
    moves), waiting parties get BrokenBarrierError, but the barrier is not broken for those that come then.

    Each call costs one round trip, and O(parties * log parties) on the server.

    Args:
        client: As for [`AsyncLock`][redis_sync_aio.AsyncLock].
        name: As for `AsyncLock`. A barrier and a lock of the same name are independent.
        parties: How many wait for each other, 1 to 1000; the same in all processes.
        ttl: How soon the death of a party is noticed, 0.01 s to ten years; for a party that polls at least 2 seconds,
            or four of its longest pauses. An event loop that stalls for longer breaks the barrier, too.
        engine: "auto" (default) or "lua". It needs scripts: CommandRefused without them, ValueError for "watch".

    Raises:
        TypeError, ValueError: An argument is bad. Nothing was sent.

    Example:
        ```python
        import asyncio

        from redis_sync_aio import AsyncBarrier

        async def party() -> None:
            rank = await AsyncBarrier(redis, "round:17", parties=3).wait(timeout=60)
            if rank == 0:
                print("all have come")

        await asyncio.gather(party(), party(), party())  # in three processes
        ```
    """

    @explains_words_of_redis_py
    def __init__(
        self,
        client: Client | CoordinatorLike,
        name: Name,
        parties: int,
        *,
        ttl: Seconds = 10.0,
        engine: Engine = "auto",
    ) -> None:
        if count(parties, "parties", 1) > MAX_PARTIES:
            raise ValueError(f"parties must be {MAX_PARTIES} or less, not {parties}")
        self._on = _Parties(client, name, parties, ttl, engine)

    async def wait(self, *, timeout: Seconds | None = None) -> int:
        """Wait until all parties have come, and return the rank of this one: 0 for the first, up to ``parties - 1``.

        Args:
            timeout: How long to wait (seconds). 0: pass as the last party, or not at all. None: forever.

        Raises:
            BrokenBarrierError: A party died, or `abort` or `reset` was called, before or while this one waited.
            WaitTimeout: The others did not come in time, and this party has left. It is also a `TimeoutError`.
            LimitMismatch: Others wait with another number of parties.
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.
            TypeError, ValueError: The timeout is bad. Nothing was sent.

        On cancellation, or when the timeout ends, the party leaves. If all parties had come by then, the others pass.
        """
        return await self._on.wait(timeout) % self.parties

    async def abort(self) -> None:
        """Break the barrier: all that wait, and all that come, get BrokenBarrierError until `reset`.

        The server remembers it for a day at least.

        Raises:
            Unreachable: There was no answer. The barrier may or may not be broken.
            CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.

        On cancellation the command continues in the background.
        """
        await self._on.end(broken=True)

    async def reset(self) -> None:
        """Make the barrier as new. All that wait get BrokenBarrierError; all that come later wait for each other.

        Raises:
            Unreachable: There was no answer. The barrier may or may not be reset.
            CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.

        On cancellation the command continues in the background.
        """
        await self._on.end(broken=False)

    async def n_waiting(self) -> int:
        """Return how many parties wait on the server.

        Raises:
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.

        On cancellation the reply is ignored.
        """
        return (await self._on.state())[0]

    async def broken(self) -> bool:
        """Return whether the barrier is broken. Errors and cancellation are those of `n_waiting`.

        A party that has died breaks the barrier when the others notice it, or when the next one comes.
        """
        return (await self._on.state())[1]

    @property
    def parties(self) -> int:
        """The number of parties that have to wait before all of them go on. It does not change."""
        return self._on.whole

    def __repr__(self) -> str:
        return f"<AsyncBarrier {self.name!r} parties={self.parties} ttl={self._on.ttl / 1000}>"
