"""Commands whose replies no task awaits; closing a coordinator waits for them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from .._core.clock import now

if TYPE_CHECKING:
    from .._transport.call import Call


class InFlightCounter:
    """Counts releases and withdrawals in flight, so that a closing coordinator can wait for them."""

    _drained: asyncio.Event | None = None

    def __init__(self) -> None:
        self._calls: set[Call] = set()

    def started(self, call: Call) -> None:
        """Count ``call``, which was sent."""
        self._calls.add(call)

    def finished(self, call: Call) -> None:
        """Count ``call`` no longer: it was answered or given up."""
        self._calls.discard(call)
        if not self._calls and self._drained is not None:
            self._drained.set()

    async def drained(self, timeout: float) -> None:
        """Wait until all are answered, or the newest has had ``timeout`` seconds for that.

        A quarter of it passes in any case: an answer may have arrived while the event loop stood still.
        """
        if self._calls:
            if self._drained is None or self._drained.is_set():  # else another task waits for it
                self._drained = asyncio.Event()
            newest = max(call.begun for call in self._calls)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(timeout / 4, newest + timeout - now())):
                    await self._drained.wait()
