"""What was sent and nobody awaits: it is waited for when a coordinator closes."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class UnderWay:
    """Counts the releases and withdrawals without an answer yet; a closing coordinator waits for them."""

    _count = 0
    _drained: asyncio.Event | None = None

    def started(self) -> None:
        """One more was sent."""
        self._count += 1

    def finished(self) -> None:
        """One was answered, or given up."""
        self._count -= 1
        if not self._count and self._drained is not None:
            self._drained.set()

    async def drained(self, timeout: float) -> None:
        """Wait until all are answered, ``timeout`` seconds at most."""
        if self._count:
            if self._drained is None or self._drained.is_set():  # else somebody waits by it already
                self._drained = asyncio.Event()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._drained.wait()
