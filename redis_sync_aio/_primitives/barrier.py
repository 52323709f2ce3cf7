"""AsyncBarrier: a number of parties wait for each other, and pass together.

A party that waits is a ticket in the queue of a gate (`_primitives/gate.py`). The script that takes it in
(`barrier/join.lua`) lets all pass when the last one has come. It also says when each process has to ask again: that
keeps its parties alive, and finds those that are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from .._acquire.binding import CoordinatorLike
from .._client.settings import Client
from .._core.arguments import Name, Seconds, count, ttl_ms
from .._core.keys import Engine
from .._core.redis_py_words import explains_words_of_redis_py
from .._engine.replies import Answer
from .._scripts.constants import Outcome
from ..errors import BrokenBarrierError, LimitMismatch, SyncError
from .gate import Gate

if TYPE_CHECKING:
    from .._inspection.views import NameView

__all__ = ["AsyncBarrier"]

MAX_PARTIES = 1000


def _refused(answer: Answer, weight: int, *, name: str, parties: int) -> SyncError:
    """Return the error for a party that was not let in."""
    if answer.outcome is Outcome.MISMATCH:
        return LimitMismatch.of_parties(name=name, expected=parties, found=answer.number)
    return BrokenBarrierError(name=name, broken=answer.more > 0)


class _Parties(Gate):
    """The parties of a barrier."""

    def __init__(
        self, client: Client | CoordinatorLike, name: Name, parties: int, ttl: Seconds, engine: Engine
    ) -> None:
        self.ttl = ttl_ms(ttl)
        self._whose_limit = b"%d" % self.ttl  # see barrier/join.lua
        # With a limit of the queue, a request says whether it has a place yet. The limit itself is not looked at.
        super().__init__(client, name, "barrier", parties, engine, max_waiting=parties)

    def _refusal(self) -> Callable[[Answer, int], SyncError]:
        return functools.partial(_refused, name=self.name, parties=self.whole)

    async def end(self, *, broken: bool) -> None:
        """Send all parties away that wait, and leave the barrier broken, or as new."""
        token, token_ms = self.token()
        words = (token, self.whole, int(broken), token_ms)
        await self._at_work().ask(
            lambda commands, delivery: commands.break_barrier(self._keys, words, delivery), goes_on=True
        )

    async def state(self) -> tuple[int, bool]:
        """Return how many parties wait, and whether it is broken."""
        limit, waiting = await self._limit_and_queue()
        return waiting, limit > 0


class AsyncBarrier:
    """An `asyncio.Barrier` for all processes: ``parties`` tasks wait for each other, and pass together.

    It is the `CyclicBarrier` of java.util.concurrent, across processes. Unlike there, a party that is cancelled or
    times out does not break the barrier. It is no context manager: a party that has passed holds nothing.

    Guarantees:

    - Nobody passes before all parties have come. The command of the last one lets all pass, by one push to each. Then
      the barrier can be used again.
    - A party that is cancelled, or whose timeout is over, leaves, and the others need one more.
    - A party that dies while it waits, or is cut off for ``ttl``, breaks the barrier: all that wait, and all that come
      later, get BrokenBarrierError until `reset`.

    A party that died less than ``ttl`` ago still counts if the others come within that time. Nobody notices a party
    that never came, so give `wait` a timeout. When the server is replaced or restarts (a failover, a slot that moves),
    a party cannot know whether it was counted and gets BrokenBarrierError, but the barrier is not broken for those that
    come then.

    Each call costs one round trip, and O(parties * log parties) on the server.

    Args:
        client: As for [`AsyncLock`][redis_sync_aio.AsyncLock].
        name: As for `AsyncLock`. A barrier and a lock of the same name are independent.
        parties: How many wait for each other, 1 to 1000; the same in all processes.
        ttl: How soon the death of a party is noticed: seconds or timedelta, 0.01 to ten years. At least 2 seconds, or
            four of its longest pauses, for a party that polls. Each process reports in a third of it, so an event loop
            that stalls for longer than ``ttl`` breaks the barrier, too.
        engine: "auto" (default) or "lua": a barrier needs scripts on the server. It raises CommandRefused where they
            are not allowed, and ValueError for "watch".

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
        self._parties = _Parties(client, name, parties, ttl, engine)

    async def wait(self, *, timeout: Seconds | None = None) -> int:
        """Wait until all parties have come, and return the rank of this one: 0 for the first, up to ``parties - 1``.

        Args:
            timeout: How long to wait: seconds or timedelta. 0: pass as the last party, or not at all. None: forever.

        Raises:
            BrokenBarrierError: A party died, or `abort` or `reset` was called, before or while this one waited.
            WaitTimeout: The others did not come in time, and this party has left. It is also a `TimeoutError`.
            LimitMismatch: Others wait with another number of parties.
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.
            TypeError, ValueError: The timeout is bad. Nothing was sent.

        On cancellation the party leaves, without delaying the cancellation. If all parties had come by then, the others
        pass. The same is true if the last one came just when the timeout of this one ended.
        """
        return await self._parties.wait(timeout) % self.parties

    async def abort(self) -> None:
        """Break the barrier: all that wait, and all that come, get BrokenBarrierError until `reset`.

        The server remembers it for a day at least.

        Raises:
            Unreachable: There was no answer. The barrier may or may not be broken.
            CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.

        On cancellation the command goes on in the background.
        """
        await self._parties.end(broken=True)

    async def reset(self) -> None:
        """Make the barrier as new. All that wait get BrokenBarrierError; all that come later wait for each other.

        Raises:
            Unreachable: There was no answer. The barrier may or may not be reset.
            CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.

        On cancellation the command goes on in the background.
        """
        await self._parties.end(broken=False)

    async def n_waiting(self) -> int:
        """Return how many parties wait on the server.

        Raises:
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: As for `AsyncLock.acquire`.

        On cancellation the reply is ignored.
        """
        return (await self._parties.state())[0]

    async def broken(self) -> bool:
        """Return whether the barrier is broken. Errors and cancellation are those of `n_waiting`.

        A party that has died breaks the barrier when the others notice it, or when the next one comes.
        """
        return (await self._parties.state())[1]

    async def statistics(self) -> NameView:
        """Return the parties that wait, as the server sees them: the ``waiters`` of `AsyncLock.statistics`."""
        return await self._parties.statistics()

    @property
    def parties(self) -> int:
        """The number of parties that have to wait before all of them go on. It does not change."""
        return self._parties.whole

    @property
    def name(self) -> str:
        """The name it was made with, as text; bytes that are not UTF-8 are shown escaped."""
        return self._parties.name

    def __repr__(self) -> str:
        return f"<AsyncBarrier {self.name!r} parties={self.parties} ttl={self._parties.ttl / 1000}>"
