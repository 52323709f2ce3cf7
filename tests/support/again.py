"""Tests marked ``timing``: their verdict hangs on seconds, on a machine that does other things as well.

Such a test runs again if it failed while the machine was busy: processes waited for a processor, as the kernel says, or
a thread that wants to run every hundredth of a second could not. Its bounds stay as they are. What fails each time, or
on a machine that is not busy, has failed; and each failure that was followed by another run is counted and listed at
the end, so that none is hidden.
"""

from __future__ import annotations

import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from _pytest.runner import runtestprotocol

from .options import OPTIONS

TICK = 0.01
LATE = 0.02
"""By so many seconds a thread wakes up late only if the machine did something else meanwhile."""
WAITED = 0.05
"""Seconds for which some process or other waits for a processor, in all, only on a busy machine."""
PRESSURE = Path("/proc/pressure/cpu")


class Machine:
    """``with machine``: notice whether it is busy with other things, which code that keeps Python busy is not."""

    def __init__(self) -> None:
        self._late = 0.0
        self._waited = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tests of seconds", daemon=True)

    @property
    def busy(self) -> bool:
        return self._late > LATE or self._waited > WAITED

    def _watch(self) -> None:
        due = time.monotonic() + TICK
        while not self._over.wait(TICK):
            self._late = max(self._late, time.monotonic() - due)
            due = time.monotonic() + TICK

    def __enter__(self) -> Self:
        self._before = waited_for_a_processor()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._waited = waited_for_a_processor() - self._before


def waited_for_a_processor() -> float:
    """Return for how many seconds since its start some process waited, as Linux says; 0 if the system does not."""
    with suppress(OSError):
        if found := re.search(r"some .* total=(\d+)", PRESSURE.read_text()):
            return int(found[1]) / 1_000_000
    return 0.0


def run_again(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test marked ``timing`` until it passes, or fails without an excuse; leave others to pytest."""
    if item.get_closest_marker("timing") is None:
        return None
    hook: Any = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for left in reversed(range(OPTIONS.again + 1)):
        with Machine() as machine:
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
        failed: list[Any] = [report for report in reports if report.failed]
        excused = left > 0 and machine.busy and bool(failed)
        for report in failed if excused else []:
            report.outcome = "again"
        for report in failed if excused else reports:
            hook.pytest_runtest_logreport(report=report)
        if not excused:
            break
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def status(report: Any) -> tuple[str, str, str] | None:
    """Count what runs again by itself."""
    return ("again", "A", "AGAIN") if report.outcome == "again" else None


def summary(reporter: Any) -> None:
    """List what ran again, and how it failed before."""
    for report in reporter.stats.get("again", ()):
        reporter.write_line(f"AGAIN {report.nodeid}: {str(report.longrepr).strip().splitlines()[-1]}")
