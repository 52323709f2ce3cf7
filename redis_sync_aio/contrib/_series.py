"""The series that both metrics libraries export, and how events become values of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from .._core.events import ConnectionRestored, Event, Granted, Lost, Released, RenewedLate, Requested, Withdrawn
from .._core.keys import NEVER_HELD

WAITS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets for waits and lateness, in seconds."""
HOLDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
"""Upper bounds of the buckets for holds, in seconds."""

OTHER = "(other)"
"""The pattern of every name whose own pattern came after `MAX_PATTERNS` others."""
MAX_PATTERNS = 200
"""The greatest number of patterns that get series of their own."""

Attributes = Mapping[str, str | int]
Measure = Callable[["Series", float, Attributes], None]
"""Record one value: a duration of a histogram, an amount to add to the others."""

LOCK = ("lock.kind", "lock.pattern")
SERVER = ("db.system.name", "server.address", "server.port")


@dataclass(frozen=True, slots=True)
class Series:
    """One metric: its name and unit as OpenTelemetry writes them, and every attribute that it may have."""

    name: str
    kind: Literal["histogram", "counter", "up_down_counter"]
    unit: str
    description: str
    attributes: tuple[str, ...]
    buckets: tuple[float, ...] = ()

    @property
    def prometheus_name(self) -> str:
        """The name without the suffix (_seconds, _total) that Prometheus's conventions add."""
        return self.name.replace(".", "_")


ACQUIRE = Series(
    "redis_sync_aio.acquire.duration",
    "histogram",
    "s",
    "Time from the request of a lock to its grant, or to the end of the wait.",
    (*LOCK, *SERVER, "outcome", "error.type"),
    WAITS,
)
HOLD = Series(
    "redis_sync_aio.hold.duration",
    "histogram",
    "s",
    "Time from the grant of a lock to its release or its loss.",
    (*LOCK, *SERVER, "outcome"),
    HOLDS,
)
WAITING = Series(
    "redis_sync_aio.waiting",
    "up_down_counter",
    "{request}",
    "Requests of this process that are not granted yet.",
    (*LOCK, *SERVER),
)
HELD = Series(
    "redis_sync_aio.held",
    "up_down_counter",
    "{lease}",
    "Leases that this process holds.",
    (*LOCK, *SERVER),
)
LOST = Series(
    "redis_sync_aio.lease.lost",
    "counter",
    "{lease}",
    "Leases that ended before they were released.",
    (*LOCK, *SERVER, "lost.reason"),
)
LATENESS = Series(
    "redis_sync_aio.renewal.lateness",
    "histogram",
    "s",
    "Time by which renewals of leases were late.",
    (*LOCK, *SERVER),
    WAITS,
)
RECONNECTS = Series(
    "redis_sync_aio.connection.reconnects",
    "counter",
    "{connection}",
    "Connections that were restored after a loss.",
    SERVER,
)
ALL = (ACQUIRE, HOLD, WAITING, HELD, LOST, LATENESS, RECONNECTS)


def server_attributes(server: str) -> dict[str, str | int]:
    """Return the attributes of a server's address: ``host:port``; a socket, a service or a cluster has no port."""
    host, colon, port = server.rpartition(":")
    if colon and port.isdecimal() and " " not in host:
        return {"db.system.name": "redis", "server.address": host.strip("[]"), "server.port": int(port)}
    return {"db.system.name": "redis", "server.address": server}


def error_type(error: BaseException) -> str:
    """Return the full name of the error's class, without the package of builtins."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class Meter:
    """Turns events into values of the series: a value of ``held`` goes up once and down once, whatever comes.

    Attributes never carry the name of a lock, only its pattern. From `MAX_PATTERNS` patterns on, others share `OTHER`:
    a pattern that is as good as a name costs no memory.
    """

    def __init__(self, measure: Measure, inherited: bool = True) -> None:
        """Make the recorder; ``inherited``: whether a forked child begins with the values of its parent."""
        self._measure = measure
        self._inherited = inherited
        self._patterns: set[str] = set()
        self._attributes: dict[tuple[str, str, str], Attributes] = {}
        self._open: dict[int, tuple[Series, Attributes]] = {}  # by request: what it counts in
        self._pid = os.getpid()

    def __call__(self, event: Event) -> None:
        """Measure one event."""
        if self._pid != os.getpid():  # a forked child: what its parent waits for and holds is the parent's
            self.close()
            self._pid = os.getpid()
        match event:
            case Requested():
                self._enter(event.request, WAITING, self.attributes(event))
            case Granted():
                base = self.attributes(event)
                self._leave(event.request)
                self._measure(ACQUIRE, event.waited, {**base, "outcome": "granted"})
                if event.kind not in NEVER_HELD:
                    self._enter(event.request, HELD, base)
            case Withdrawn():
                self._leave(event.request)
                ended = {**self.attributes(event), "outcome": event.outcome}
                if event.error is not None:
                    ended["error.type"] = error_type(event.error)
                self._measure(ACQUIRE, event.waited, ended)
            case Released():
                self._leave(event.request)
                if event.kind not in NEVER_HELD:
                    self._measure(HOLD, event.held, {**self.attributes(event), "outcome": "released"})
            case Lost():
                base = self.attributes(event)
                self._leave(event.request)
                self._measure(HOLD, event.held, {**base, "outcome": "lost"})
                self._measure(LOST, 1, {**base, "lost.reason": event.reason})
            case RenewedLate():
                self._measure(LATENESS, event.lateness, self.attributes(event))
            case ConnectionRestored():
                self._measure(RECONNECTS, 1, server_attributes(event.server))

    def close(self) -> None:
        """Take the requests and leases that have not ended out of the counts, since their ends will not be seen."""
        if self._inherited or self._pid == os.getpid():
            for request in list(self._open):
                self._leave(request)
        self._open.clear()

    def attributes(self, event: Event) -> Attributes:
        """Return the attributes of every series of a lock: its kind, its pattern and its server."""
        pattern = event.pattern
        if pattern not in self._patterns:
            if len(self._patterns) < MAX_PATTERNS:
                self._patterns.add(pattern)
            else:
                pattern = OTHER
        key = event.kind, pattern, event.server
        known = self._attributes.get(key)
        if known is None:
            known = {"lock.kind": event.kind, "lock.pattern": pattern, **server_attributes(event.server)}
            self._attributes[key] = known
        return known

    def _enter(self, request: int, series: Series, attributes: Attributes) -> None:
        self._open[request] = series, attributes
        self._measure(series, 1, attributes)

    def _leave(self, request: int) -> None:
        counted = self._open.pop(request, None)
        if counted is not None:
            self._measure(counted[0], -1, counted[1])
