"""How long something takes, on a machine that does other things as well."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

from .inside import now

T = TypeVar("T")
C = TypeVar("C")

TICK = 0.01
LATE = 0.02
"""By so many seconds a timer is late only if the event loop did not run in between."""


class Timed:
    """``async with took``, as often as needed: its seconds, and for how many of them the event loop stood still.

    With a stall it may be the machine that took the time: measure again. What stalls each time is to blame.
    Where nothing can be repeated, ``waited`` is what was asked for: the seconds without those of stalls.
    """

    seconds = 0.0
    stood = 0.0

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._began = now()
        self.stood = 0.0
        self._next()
        return self

    def _next(self) -> None:
        self._due = self._loop.time() + TICK
        self._timer = self._loop.call_later(TICK, self._pulse)

    def _pulse(self) -> None:
        self._look()
        self._next()

    def _look(self) -> None:
        late = self._loop.time() - self._due
        if late > LATE:
            self.stood += late

    @property
    def stalled(self) -> bool:
        return self.stood > 0

    @property
    def waited(self) -> float:
        return self.seconds - self.stood

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._look()
        self.seconds = now() - self._began


async def assert_within(most: float, what: Callable[[], Awaitable[float]], again: int = 4) -> None:
    """Assert that ``what()``, which returns seconds, returns ``most`` of them at most.

    If it is more and the event loop stood still meanwhile, ``what()`` is measured ``again``. The last time counts.
    """
    async with Timed() as took:
        seconds = await what()
    if seconds > most and took.stalled and again:
        await assert_within(most, what, again - 1)
    else:
        assert seconds <= most, f"{seconds:.3f} seconds; the event loop stood still for {took.stood:.3f} of them"


async def timed(what: Callable[[], Awaitable[T]], again: int = 4) -> tuple[float, T]:
    """Return how many seconds ``what()`` took, and what it returned; after a stall it is done ``again``."""
    async with Timed() as took:
        found = await what()
    if took.stalled and again:
        return await timed(what, again - 1)
    return took.seconds, found


AT_ONCE = 12
"""So many cases of a sweep share a loop: more would only be late because of each other."""


async def failures(
    cases: Sequence[C], run: Callable[[C], Awaitable[object]], again: int = 2
) -> list[tuple[C, Exception]]:
    """Run many cases, some at a time; return those that failed, and how.

    Each has timeouts of its own. So if the event loop stood still meanwhile, those that failed run again, one by one,
    until they fail in a loop that does not. The last time counts.
    """
    at_once = asyncio.Semaphore(AT_ONCE)

    async def one(case: C) -> Exception | None:
        async with at_once:
            try:
                await run(case)
            except Exception as error:
                return error
        return None

    async with Timed() as took:
        ends = await asyncio.gather(*map(one, cases))
    wrong = [(case, end) for case, end in zip(cases, ends, strict=True) if end is not None]
    if not (wrong and took.stalled and again):
        return wrong
    return [failed for case, _ in wrong for failed in await failures([case], run, again - 1)]
