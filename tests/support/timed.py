"""How long something takes, on a machine that does other things as well."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

from redis_sync_aio._clock import now

TICK = 0.01
USUAL = 0.005
"""Seconds by which a timer may be late on an idle machine."""


class Timed:
    """``async with Timed() as took``: seconds in all, those less what the event loop could not run in, and of the CPU.

    Only for what waits: a loop that is blocked by what is measured does not run, either.
    """

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._began, self._cpu = now(), time.process_time()
        self._stalled = 0.0
        self._next()
        return self

    def _next(self) -> None:
        self._due = self._loop.time() + TICK
        self._timer = self._loop.call_later(TICK, self._pulse)

    def _pulse(self) -> None:
        late = self._loop.time() - self._due
        if late > USUAL:
            self._stalled += late
        self._next()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self.in_all, self.cpu = now() - self._began, time.process_time() - self._cpu
        late = self._loop.time() - self._due
        self.seconds = self.in_all - self._stalled - (late if late > USUAL else 0.0)
