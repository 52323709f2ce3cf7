"""OpenTelemetry metrics and spans of locks; needs the extra ``otel``, which is OpenTelemetry's API alone.

Instrument the process once, when it starts::

    from redis_sync_aio.contrib import otel

    otel.instrument()

Every coordinator of the process is then observed, also those that locks make by themselves. For one coordinator, give
it an observer: ``Coordinator(client, observe=OpenTelemetryObserver())``.

The names of all series, attributes and spans:
[Metrics and traces](https://redis-sync-aio.github.io/redis-sync-aio/operations/metrics/).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Literal

from . import missing

try:
    from opentelemetry import metrics, trace
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, TracerProvider
    from opentelemetry.util.types import AttributeValue
except ModuleNotFoundError as _error:
    raise missing(_error, __name__, "redis_sync_aio[otel]") from _error

from .. import __version__
from .._core.arguments import require_bool
from .._core.clock import wall_ns
from .._core.events import Event, Granted, Lost, Released, Withdrawn
from .._core.keys import NEVER_HELD
from ..instrumentation import PatternOf, observe_all
from . import _series
from ._series import Attributes, Series, error_type

__all__ = ["OpenTelemetryObserver", "instrument", "uninstrument"]

NAME = "redis_sync_aio"
"""The name of the instrumentation scope."""


def _instruments(provider: MeterProvider | None) -> _series.Measure:
    """Return the function that records a value in the instrument of its series."""
    meter = metrics.get_meter(NAME, __version__, provider)
    record: dict[Series, Callable[[float, Attributes], None]] = {}
    for series in _series.ALL:
        name, unit, description = series.name, series.unit, series.description
        if series.kind == "histogram":
            buckets = list(series.buckets)
            histogram = meter.create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=buckets)
            record[series] = histogram.record
        elif series.kind == "counter":
            record[series] = meter.create_counter(name, unit, description).add
        else:
            record[series] = meter.create_up_down_counter(name, unit, description).add
    return lambda series, value, attributes: record[series](value, attributes)


AcquireSpans = Literal["waited", "always", "never"]
"""The requests that get a span of their own: those that waited, all, or none."""


class _Spans:
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


class OpenTelemetryObserver:
    """An observer that records metrics and spans with the API of OpenTelemetry.

    Args:
        meter_provider: Where metrics go. None: the global provider.
        tracer_provider: Where spans go. None: the global provider.
        acquire_spans: Which requests get a span ``acquire PATTERN``. "waited" (default): those that had to wait.
            "always": all. "never": none.
        hold_spans: True if each lease gets a span ``hold PATTERN``.

    Raises:
        ValueError: ``acquire_spans`` is none of these.
    """

    def __init__(
        self,
        *,
        meter_provider: MeterProvider | None = None,
        tracer_provider: TracerProvider | None = None,
        acquire_spans: AcquireSpans = "waited",
        hold_spans: bool = True,
    ) -> None:
        if acquire_spans not in ("waited", "always", "never"):
            raise ValueError(f'acquire_spans must be "waited", "always" or "never", not {acquire_spans!r}')
        self._meter = _series.Meter(_instruments(meter_provider))
        self._spans = _Spans(trace.get_tracer(NAME, __version__, tracer_provider), acquire_spans, hold_spans)

    def __call__(self, event: Event) -> None:
        """Record one event."""
        self._meter(event)
        if event.request:  # it is about a lock
            self._spans.see(event, self._meter.attributes(event))

    def close(self) -> None:
        """Take the requests and leases that have not ended out of the counts, and end their spans. Idempotent."""
        self._meter.close()
        self._spans.close()


def instrument(
    *,
    meter_provider: MeterProvider | None = None,
    tracer_provider: TracerProvider | None = None,
    acquire_spans: AcquireSpans = "waited",
    hold_spans: bool = True,
    pattern_of: PatternOf | None = None,
) -> None:
    """Observe every coordinator of this process, until `uninstrument`. A second call replaces the first.

    Args:
        meter_provider: As for `OpenTelemetryObserver`.
        tracer_provider: As for `OpenTelemetryObserver`.
        acquire_spans: As for `OpenTelemetryObserver`.
        hold_spans: As for `OpenTelemetryObserver`.
        pattern_of: A function that returns the pattern of a name. None, or a result of None: the part before the first
            ":", and ":*".

    Raises:
        ValueError: ``acquire_spans`` is bad.

    Example:
        ```python
        from redis_sync_aio.contrib import otel

        otel.instrument()
        otel.uninstrument()  # at the end of the process, or of a test
        ```
    """
    observer = OpenTelemetryObserver(
        meter_provider=meter_provider,
        tracer_provider=tracer_provider,
        acquire_spans=acquire_spans,
        hold_spans=hold_spans,
    )
    uninstrument()
    _installed.callback(observer.close)
    _installed.enter_context(observe_all(observer, pattern_of=pattern_of))


def uninstrument() -> None:
    """Undo `instrument`. What is still held is taken out of the counts. Idempotent."""
    _installed.close()


_installed = ExitStack()
