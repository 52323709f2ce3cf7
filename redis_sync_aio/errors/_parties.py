"""Errors of processes that wait for each other."""

from __future__ import annotations

from asyncio import BrokenBarrierError as AsyncioError

from ._base import SyncError
from ._wording import no_answer
from ._wording import within as within_


class WaitTimeout(SyncError, TimeoutError):
    """An event, a latch or a barrier did not open within ``timeout``, or Redis had not answered yet.

    Nothing stays behind: the waiter has left the queue, or leaves it in the background. Wait longer, or find out which
    process is missing. It is also a `TimeoutError`.

    Attributes:
        name: The name of the event, latch or barrier.
        answered: Whether Redis had answered. False: it is not known whether it was open.
    """

    def __init__(self, *, name: str, within: float | None, closed: str, answered: bool = True) -> None:
        """Word the message.

        Args:
            name: The attribute.
            within: The seconds that it was waited for.
            closed: The reason why it is not open.
            answered: The attribute.
        """
        why = f"{closed}; wait longer, or find out which process is missing" if answered else no_answer(name)
        super().__init__(f"{name!r} did not open{'' if within is None else f' {within_(within)}'}: {why}")
        self.name = name
        self.answered = answered


class BrokenBarrierError(SyncError, AsyncioError):
    """A barrier is broken, or was reset while this party waited.

    A barrier breaks when a party dies or is cut off for longer than its ttl, or when `abort` is called. Call
    [`AsyncBarrier.reset`][redis_sync_aio.AsyncBarrier.reset] when all parties can begin again. After a reset, or a
    restart of the server, wait again if all parties do. It is also an `asyncio.BrokenBarrierError`.

    Attributes:
        name: The name of the barrier.
    """

    def __init__(self, *, name: str, broken: bool) -> None:
        """Word the message; ``broken``: until a reset."""
        if broken:
            why = (
                "is broken: it was aborted, or a party died or was cut off for longer than its ttl. "
                "When all parties can begin again, call reset()"
            )
        else:
            why = (
                "was reset while this party waited, or the server was replaced or lost its data. "
                "It is not known whether this party was counted. Call wait() again if all parties do"
            )
        super().__init__(f"the barrier {name!r} {why}")
        self.name = name
