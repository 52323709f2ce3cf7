"""Spans of OpenTelemetry for acquisitions and holds."""

from __future__ import annotations

import os
from typing import Literal

from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from .._core.arguments import require_bool
from .._core.clock import wall_ns
from .._core.events import Event, Granted, Lost, Released, Withdrawn
from .._core.keys import NEVER_HELD
from ._series import Attributes, error_type

AcquireSpans = Literal["waited", "always", "never"]
"""The requests that get a span of their own: those that waited, all, or none."""


class Spans:
    """Makes a span ``acquire PATTERN`` of each request that waited, and ``hold PATTERN`` of each lease.

    Both are children of the caller's span, since the events of a request come in the context of its task. A span of a
    hold does not become the current one: the end of a lease is reported wherever it happens, often in a callback of the
    connection, where the context of the body's task cannot be restored.
    """

    def __init__(self, tracer: Tracer, acquire: AcquireSpans, hold: bool) -> None:
        self._tracer = tracer
        self._acquire = acquire
        self._hold = require_bool(hold, "hold_spans")
        self._holds: dict[int, Span] = {}  # by request
        self._pid = os.getpid()

    def see(self, event: Event, attributes: Attributes) -> None:
        """Begin or end the spans that ``event`` is about; ``attributes`` are those of its lock."""
        if self._pid != os.getpid():  # a forked child: the spans of its parent's leases are the parent's to end
            self._pid = os.getpid()
            self._holds.clear()
        match event:
            case Granted():
                named = _named(event, attributes)
                named["lock.fence"] = event.fence
                if self._wants(event.contended):
                    self._acquired(event, {**named, "outcome": "granted"})
                if self._hold and event.kind not in NEVER_HELD:
                    name = f"hold {attributes['lock.pattern']}"
                    self._holds[event.request] = self._tracer.start_span(name, attributes=named)
            case Withdrawn():
                if self._wants(event.outcome != "taken"):
                    named = {**_named(event, attributes), "outcome": event.outcome}
                    self._acquired(event, named, event.error)
            case Released() | Lost():
                self._end_hold(event)

    def close(self) -> None:
        """End the spans of what is still held, unless they are the parent's of a forked child."""
        while self._holds:
            _, span = self._holds.popitem()
            if self._pid == os.getpid():
                span.end()

    def _wants(self, waited: bool) -> bool:
        return self._acquire == "always" or (waited and self._acquire == "waited")

    def _acquired(
        self,
        event: Granted | Withdrawn,
        attributes: dict[str, AttributeValue],
        error: BaseException | None = None,
    ) -> None:
        """Make the span of a request that just ended."""
        span = self._tracer.start_span(
            f"acquire {attributes['lock.pattern']!s}",
            kind=SpanKind.CLIENT,
            attributes=attributes,
            start_time=wall_ns() - int(event.waited * 1e9),
        )
        if error is not None:
            span.set_attribute("error.type", error_type(error))
            span.record_exception(error)
            span.set_status(StatusCode.ERROR, str(error))
        span.end()

    def _end_hold(self, event: Released | Lost) -> None:
        span = self._holds.pop(event.request, None)
        if span is None:
            return
        if isinstance(event, Lost):
            span.set_attribute("lost.reason", event.reason)
            span.set_status(StatusCode.ERROR, f"the lease was lost: {event.reason}")
        span.set_attribute("outcome", "lost" if isinstance(event, Lost) else "released")
        span.end()


def _named(event: Event, attributes: Attributes) -> dict[str, AttributeValue]:
    """Return the attributes of a span: unlike a series, it has the lock's full name."""
    return {**attributes, "lock.name": event.name}
