"""Events and latches: processes wait until one of them sets an event, or until a latch is counted down.

Both are gates: they let in nobody, or everybody. On the server a gate consists of permits, and their limit says whether
it is open (`permits/count_down.lua`). So it has the queue, the pushes and the clean-up of a semaphore. A waiter is
granted a permit when the gate opens, and gives it back immediately.
"""

from __future__ import annotations

from typing import Literal

from ._acquire.binding import CoordinatorLike
from ._acquire.implicit import client_of
from ._client.settings import Client, encode
from ._core.arguments import Name, Seconds, permits, ttl_ms
from ._core.keys import Engine
from ._primitives.gate import Gate
from ._scripts.constants import HOUR_MS, TEN_YEARS_MS

__all__ = ["AsyncCountDownLatch", "AsyncEvent"]

A_DAY = 86_400.0


class AsyncEvent:
    """An `asyncio.Event` for all processes: tasks wait until one of them sets it.

    Guarantees: one `set` wakes everybody that waits then, in all processes, by one push to each, and every later
    `wait` returns until `clear`. A `set` that came before the `wait` is seen. A waiter that was in the queue when the
    event was set gets through, even if the event is cleared immediately after, or if the waiter's connection was cut at
    that moment, for a minute at most. A command that is repeated because its answer was lost has one effect: a late
    copy of a `set` does not undo a `clear` that came after it. A waiter that is cancelled, or dies, leaves nothing
    behind. (After a failover, waiters queue again.)

    The server keeps it, so it stays set when the process that set it has ended. A server that restarts without its data
    has forgotten that: waiters go on waiting, so a process that knows better has to set it again.

    Args:
        client: a `redis.asyncio.Redis` or `RedisCluster` (its implicit coordinator is used) or a `Coordinator`.
        name: as of `AsyncSemaphore`; an event and a lock of one name have nothing to do with each other.
        lasts: seconds or timedelta, 0.01 to ten years, for which the server remembers at least that it was set (and an
            hour at least; at most two and a half times as long). Then it counts as never set. None: until `clear`.
        engine: as `AsyncLock`.

    Raises:
        TypeError, ValueError: a bad argument; nothing was sent.

    Each call costs one round trip, and O(log waiters) on the server; `set` costs that for each waiter.

    Example:
        ```python
        from redis_sync_aio import AsyncEvent

        migrated = AsyncEvent(redis, "migrated:2026-11")
        await migrated.set()  # in the process that migrates
        await migrated.wait(timeout=60)  # in the services
        ```
    """

    def __init__(
        self,
        client: Client | CoordinatorLike,
        name: Name,
        *,
        lasts: Seconds | None = None,
        engine: Engine = "auto",
    ) -> None:
        self._lasts_ms = TEN_YEARS_MS if lasts is None else ttl_ms(lasts, "lasts")
        self._gate = Gate(client, name, "event", 1, engine)

    async def wait(self, *, timeout: Seconds | None = None) -> Literal[True]:
        """Wait until it is set, and return True; immediately if it is set already.

        Args:
            timeout: seconds or timedelta to wait at most; 0: do not wait; None: forever.

        Raises:
            AcquireTimeout: it was not set in time (a `TimeoutError`).
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: as `AsyncLock.acquire`.
            TypeError, ValueError: a bad timeout; nothing was sent.

        On cancellation the waiter leaves the queue, without delaying the cancellation.
        """
        await self._gate.wait(timeout)
        return True

    async def set(self) -> None:
        """Set it: all waiters go on. If it is set already, ``lasts`` begins again.

        Raises Unreachable (it may or may not be set), CommandRefused, CoordinatorClosed, WrongContext as
        `AsyncLock.acquire`. On cancellation it goes on in the background.
        """
        await self._gate.count_down(1, self._lasts_ms)

    async def clear(self) -> None:
        """Make it unset, so that `wait` waits. Tasks that waited when it was set go on all the same.

        Raises as `set`. On cancellation it goes on in the background.
        """
        await self._gate.count_down(0, HOUR_MS)

    async def is_set(self) -> bool:
        """Return whether it is set, as the server knows.

        Raises Unreachable, CommandRefused, CoordinatorClosed, WrongContext as `AsyncLock.acquire`. On cancellation the
        answer is ignored.
        """
        return await self._gate.count() == 0

    @property
    def name(self) -> str:
        """The name it was made with, as text; bytes that are not UTF-8 are shown escaped."""
        return self._gate.name

    def __repr__(self) -> str:
        return f"<AsyncEvent {self.name!r}>"


class AsyncCountDownLatch:
    """A latch for all processes: tasks wait until it was counted down to 0, by any of them. Then it stays open.

    Guarantees: each `count_down` counts exactly once, also if its answer was lost and the command is repeated; a call
    with an ``identity`` counts once however often it is made, by any process. The last count wakes all waiters, in all
    processes, by one push to each, and every later `wait` returns. A waiter that is cancelled, or dies, leaves nothing
    behind.

    It counts work that is done, so it does not notice a worker that dies: give `wait` a timeout, and let the worker's
    successor count with the same identity. `AsyncBarrier` notices.

    Args:
        client: a `redis.asyncio.Redis` or `RedisCluster` (its implicit coordinator is used) or a `Coordinator`.
        name: as of `AsyncSemaphore`. A latch opens once, so each piece of work has a name of its own ("import:17").
        count: where it starts, 1 to 1,000,000,000; the same in all processes. The server takes it from the first
            `count_down`.
        lasts: seconds or timedelta, 0.01 to ten years, for which the server remembers it at least after the latest
            `count_down` (and an hour at least; at most two and a half times as long). Then it is a new latch. Default:
            a day. A server that restarts without its data forgets it immediately.
        engine: as `AsyncLock`.

    Raises:
        TypeError, ValueError: a bad argument; nothing was sent.

    Each call costs one round trip, and O(log waiters + log counts) on the server; the last `count_down` costs that for
    each waiter.

    Example:
        ```python
        from redis_sync_aio import AsyncCountDownLatch

        done = AsyncCountDownLatch(redis, "import:17", count=4)
        for part in range(4):  # in each of four workers
            await done.count_down(identity=f"part {part}")
        await done.wait(timeout=3600)  # in the process that goes on
        ```
    """

    def __init__(
        self,
        client: Client | CoordinatorLike,
        name: Name,
        count: int,
        *,
        lasts: Seconds = A_DAY,
        engine: Engine = "auto",
    ) -> None:
        self._lasts_ms = ttl_ms(lasts, "lasts")
        self._gate = Gate(client, name, "latch", permits(count, "count"), engine)
        self._client = client_of(client)

    async def wait(self, *, timeout: Seconds | None = None) -> None:
        """Wait until the count is 0.

        Args:
            timeout: seconds or timedelta to wait at most; 0: do not wait; None: forever.

        Raises:
            AcquireTimeout: it did not get there in time (a `TimeoutError`).
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: as `AsyncLock.acquire`.
            TypeError, ValueError: a bad timeout; nothing was sent.

        On cancellation the waiter leaves the queue, without delaying the cancellation.
        """
        await self._gate.wait(timeout)

    async def count_down(self, n: int = 1, *, identity: Name | None = None) -> int:
        """Count down by ``n``, to 0 at the least, and return the count that is left. At 0 all waiters go on.

        Args:
            n: by how much, 1 to 1,000,000,000.
            identity: a name for this count, such as the part of the work that is done: it counts once, as long as the
                latch is remembered, also if several processes say so. None: each call counts.

        Raises Unreachable (it may or may not have counted: only with an identity it may be called again),
        CommandRefused, CoordinatorClosed, WrongContext as `AsyncLock.acquire`; TypeError, ValueError for a bad
        argument. On cancellation it goes on in the background.
        """
        name = None if identity is None else encode(self._client, identity, "identity")
        return await self._gate.count_down(permits(n, "n"), self._lasts_ms, name)

    async def count(self) -> int:
        """Return the count that is left, as the server knows.

        Raises Unreachable, CommandRefused, CoordinatorClosed, WrongContext as `AsyncLock.acquire`. On cancellation the
        answer is ignored.
        """
        return await self._gate.count()

    @property
    def name(self) -> str:
        """The name it was made with, as text; bytes that are not UTF-8 are shown escaped."""
        return self._gate.name

    def __repr__(self) -> str:
        return f"<AsyncCountDownLatch {self.name!r} count={self._gate.whole}>"
