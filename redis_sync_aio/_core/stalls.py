"""Stalls of the event loop, measured by a timer that fires late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

SHORTEST = 0.02
"""Seconds; shorter stalls are not noted."""
REPORTED = 0.1
"""Seconds; shorter stalls are not reported."""


class Stalls:
    """The latest stalls of one event loop."""

    def __init__(self, report: Callable[[float], None]) -> None:
        """``report`` is called with the seconds of a stall of `REPORTED` seconds or more."""
        self._report = report
        self._latest: deque[tuple[float, float]] = deque(maxlen=64)  # when each ended (local clock), seconds

    def note(self, ended: float, seconds: float) -> None:
        """Note that nothing ran for ``seconds`` until ``ended`` (local clock)."""
        if seconds >= SHORTEST:
            self._latest.append((ended, seconds))
        if seconds >= REPORTED:
            self._report(seconds)

    def since(self, time: float) -> float:
        """Return for how many seconds nothing ran since ``time`` (local clock)."""
        return sum(min(seconds, ended - time) for ended, seconds in self._latest if ended > time)
