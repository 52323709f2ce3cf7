"""How long the callbacks of an event loop take: while one runs, nothing else can."""

from __future__ import annotations

import gc
import time
from asyncio import events
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Callbacks:
    """CPU time, so that a busy machine does not count; without garbage collections, which grow with the whole suite."""

    longest = 0.0
    """Seconds that the longest callback took."""
    which: object = None
    """That callback."""

    def __init__(self) -> None:
        self._begun = self._collected = 0.0

    def collects(self, phase: str, _: dict[str, int]) -> None:
        """Note the beginning or the end of a garbage collection."""
        if phase == "start":
            self._begun = time.thread_time()
        else:
            self._collected += time.thread_time() - self._begun

    def clock(self) -> float:
        """Return the CPU time of this thread, without that of collections."""
        return time.thread_time() - self._collected


@contextmanager
def callbacks() -> Iterator[Callbacks]:
    """Time every callback that runs meanwhile."""
    found, plain = Callbacks(), events.Handle._run

    def timed(handle: Any) -> None:
        begun, callback = found.clock(), handle._callback
        plain(handle)
        took = found.clock() - begun
        if took > found.longest:
            found.longest, found.which = took, callback

    events.Handle._run = timed  # type: ignore
    gc.callbacks.append(found.collects)
    try:
        yield found
    finally:
        events.Handle._run = plain  # type: ignore
        gc.callbacks.remove(found.collects)
