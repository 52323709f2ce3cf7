"""Tests marked ``timing``: their verdict hangs on seconds, on a machine that does other things as well.

Such a test runs again if it failed and was kept from running: its thread waited for a processor for a tenth of a
second in all, as the kernel says, or a thread that wants to run every hundredth of a second could not for that long.
Its bounds stay as they are. A test that fails each time, or that had its processor, has failed; and each failure that
was followed by another run is counted and listed at the end, so that none is hidden.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from _pytest.runner import runtestprotocol
from redis import Redis
from redis.exceptions import RedisError

from redis_sync_aio.embedded import EmbeddedServer

from .options import OPTIONS

SHARED: list[EmbeddedServer] = []
"""The servers that tests share: what a test that failed has left there is removed before it runs again."""
TICK = 0.01
LATE = 0.1
"""Seconds without a processor that are an excuse: a third of the shortest lease that a verdict hangs on.

A machine that is merely busy takes less from a test. That excuses nothing: a race that shows then is a defect.
"""
DELAYS = Path("/proc/thread-self/schedstat")


class Machine:
    """``with machine``: notice whether it keeps the test waiting, which code that keeps Python busy does not do."""

    def __init__(self) -> None:
        self._late = 0.0
        self._waited = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tests of seconds", daemon=True)

    @property
    def busy(self) -> bool:
        return max(self._late, self._waited) > LATE

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
        self._waited = waited_for_a_processor() - self._before
        self._over.set()
        self._thread.join()


def waited_for_a_processor() -> float:
    """Return for how many seconds this thread was ready and did not run, as Linux says; 0 if the system does not."""
    with suppress(OSError, ValueError, IndexError):
        return int(DELAYS.read_text().split()[1]) / 1e9
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
        for server in SHARED:
            with suppress(RedisError, RuntimeError), Redis.from_url(server.url, socket_timeout=30) as client:
                server.resume()
                client.flushall()
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def status(report: Any) -> tuple[str, str, str] | None:
    """Count what runs again by itself."""
    return ("again", "A", "AGAIN") if report.outcome == "again" else None


def summary(reporter: Any) -> None:
    """List what ran again, and how it failed before."""
    for report in reporter.stats.get("again", ()):
        reporter.write_line(f"AGAIN {report.nodeid}: {str(report.longrepr).strip().splitlines()[-1]}")
