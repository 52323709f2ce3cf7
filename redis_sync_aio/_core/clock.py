"""The one source of local time: a monotonic clock that also counts time asleep.

A lease runs on while a laptop or a virtual machine is suspended. ``time.monotonic()`` stops then on
Linux and macOS, so deadlines measured with it would be too late by the whole suspension. CLOCK_BOOTTIME
(Linux) and CLOCK_MONOTONIC (macOS, where Python's own monotonic clock is another one) count it.

Timers of the event loop run on ``time.monotonic()``; that of `Renewals` therefore fires once a second at
least while there are leases, so that a suspension is noticed within a second of waking up.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial


def _suspension_aware() -> Callable[[], float]:
    if sys.platform == "linux":
        return partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":
        return partial(time.clock_gettime, time.CLOCK_MONOTONIC)
    return time.monotonic


now: Callable[[], float] = _suspension_aware()
"""Seconds on a clock that never goes back and never stops. Only differences mean anything."""

EARLY = 0.001
"""Timers may fire this many seconds early or late."""


def wall_ns() -> int:
    """Return the time of day, as nanoseconds since 1970: for records that leave this process, never for deadlines."""
    return time.time_ns()


# -- Stalls of the event loop, measured by a timer that fires late ---------------------------------------------


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
