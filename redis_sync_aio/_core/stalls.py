"""Stalls of the event loop, measured by a timer that fires late."""

from __future__ import annotations

from collections import deque

SHORTEST = 0.02
"""Seconds; shorter stalls are not noted."""


class Stalls:
    """The latest stalls of one event loop."""

    def __init__(self) -> None:
        self._latest: deque[tuple[float, float]] = deque(maxlen=64)  # when each ended (local clock), seconds

    def note(self, ended: float, seconds: float) -> None:
        """Note that nothing ran for ``seconds`` until ``ended`` (local clock)."""
        if seconds >= SHORTEST:
            self._latest.append((ended, seconds))

    def since(self, time: float) -> float:
        """Return for how many seconds nothing ran since ``time`` (local clock)."""
        return sum(min(seconds, ended - time) for ended, seconds in self._latest if ended > time)
