"""AsyncBarrier: a number of parties wait for each other, and pass together.

A party that waits is a ticket in the queue of a gate (`_primitives/gate.py`). The script that takes it in
(`barrier/join.lua`) lets all pass when the last one has come. It also says when each process has to ask again: that
keeps its parties alive, and finds those that are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType

from ._acquire.binding import CoordinatorLike
from ._client.settings import Client
from ._core.arguments import Name, Seconds, count, ttl_ms
from ._core.keys import Engine
from ._engine.replies import Answer
from ._primitives.gate import Gate
from ._scripts.constants import Outcome
from .errors import BrokenBarrierError, LimitMismatch, SyncError

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
        view = await self._view(0)
        return view.waiting, view.limit > 0


class AsyncBarrier:
    """An `asyncio.Barrier` for all processes: ``parties`` tasks wait for each other, and pass together.

    Guarantees: nobody passes before all parties have come; they pass by one command, that of the last one, and one push
    to each. Then the barrier can be used again. A party that is cancelled, or whose timeout is over, leaves, and the
    others need one more. A party that dies while it waits, or is cut off for ``ttl`` seconds, breaks the barrier: all
    that wait, and all that come later, get BrokenBarrierError, until `reset`. So no party waits forever for one that
    has died; for one that never came it does, so give `wait` a timeout.

    A party that died less than ``ttl`` ago still counts, if the others come within that time. When the server is
    replaced or restarts (a failover, a slot that moves), a party cannot know whether it was counted, so it gets the
    same error; the barrier is not broken for those that come then.

    Args:
        client: a `redis.asyncio.Redis` or `RedisCluster` (its implicit coordinator is used) or a `Coordinator`.
        name: as of `AsyncSemaphore`; a barrier and a lock of one name have nothing to do with each other.
        parties: how many wait for each other, 1 to 1000; the same in all processes.
        ttl: seconds or timedelta, 0.01 to ten years, within which the death of a party is noticed. For a party that
            polls it is 2 seconds at least, or four of its longest pauses. Each process asks again in a third of it, so
            an event loop that stalls for longer than ``ttl`` breaks the barrier, too.
        engine: as `AsyncLock`.

    Raises:
        TypeError, ValueError: a bad argument; nothing was sent.

    Each call costs one round trip, and O(parties * log parties) on the server.

    Example:
        ```python
        import asyncio

        from redis_sync_aio import AsyncBarrier

        async def party() -> None:
            async with AsyncBarrier(redis, "round:17", parties=3) as rank:
                if rank == 0:
                    print("all have come")

        await asyncio.gather(party(), party(), party())  # in three processes
        ```
    """

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
        """Wait until all parties have come, and return this one's rank: 0 for the first, up to ``parties - 1``.

        Args:
            timeout: seconds or timedelta to wait at most; 0: pass as the last party, or not at all; None: forever.

        Raises:
            BrokenBarrierError: a party died, or `abort` or `reset` was called, while this one waited or before.
            AcquireTimeout: the others did not come in time (a `TimeoutError`). This party has left.
            LimitMismatch: others wait with another number of parties.
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: as `AsyncLock.acquire`.
            TypeError, ValueError: a bad timeout; nothing was sent.

        On cancellation the party leaves, without delaying the cancellation. If all had come by then, the others pass;
        so they do if the last one came just when the timeout of this one was over.
        """
        return await self._parties.wait(timeout) % self.parties

    async def abort(self) -> None:
        """Break it: all that wait, and all that come, get BrokenBarrierError until `reset`.

        Raises Unreachable (it may or may not be broken), CommandRefused, CoordinatorClosed, WrongContext as
        `AsyncLock.acquire`. On cancellation it goes on in the background. The server remembers it for a day at least.
        """
        await self._parties.end(broken=True)

    async def reset(self) -> None:
        """Make it as new: all that wait get BrokenBarrierError, and all that come later wait for each other.

        Raises as `abort`. On cancellation it goes on in the background.
        """
        await self._parties.end(broken=False)

    async def n_waiting(self) -> int:
        """Return how many parties wait, as the server knows.

        Raises Unreachable, CommandRefused, CoordinatorClosed, WrongContext as `AsyncLock.acquire`. On cancellation the
        answer is ignored.
        """
        return (await self._parties.state())[0]

    async def broken(self) -> bool:
        """Return whether it is broken, as the server knows; errors and cancellation as in `n_waiting`.

        A party that has died breaks it when the others notice, or the next one comes.
        """
        return (await self._parties.state())[1]

    @property
    def parties(self) -> int:
        """How many parties it needs."""
        return self._parties.whole

    @property
    def name(self) -> str:
        """The name it was made with, as text; bytes that are not UTF-8 are shown escaped."""
        return self._parties.name

    async def __aenter__(self) -> int:
        return await self.wait()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: a party that has passed has left already."""

    def __repr__(self) -> str:
        return f"<AsyncBarrier {self.name!r} parties={self.parties} ttl={self._parties.ttl / 1000}>"
