"""Long work in slices, between which the event loop goes on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

from .clock import now

SLICE = 0.005
"""Seconds that one callback works, about."""


class Slices:
    """Runs iterators in one event loop, one behind the other. Each of their steps is short."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._works: deque[Iterator[object]] = deque()
        self._next: asyncio.Handle | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def run(self, work: Iterator[object]) -> None:
        """Begin with ``work`` now, unless other work is before it, and go on in later turns of the loop."""
        self._works.append(work)
        if self._next is None:
            self._go_on()

    def _go_on(self) -> None:
        self._next = self._loop.call_soon(self._go_on)  # first: a step may raise
        works, end = self._works, now() + SLICE
        while works:
            for _ in works[0]:
                if now() >= end:
                    return
            works.popleft()
        self.stop()

    async def done(self) -> None:
        """Wait until all is done, or dropped."""
        if self._works:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def stop(self) -> None:
        """Drop what is left."""
        self._works.clear()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
        if self._next is not None:
            self._next.cancel()
            self._next = None
