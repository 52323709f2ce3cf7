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

from collections.abc import Callable
from contextlib import ExitStack

from . import _extras

try:
    from opentelemetry import metrics, trace
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider
except ModuleNotFoundError as _error:
    raise _extras.missing(_error, __name__, "redis_sync_aio[otel]") from _error

from .. import __version__
from .._core.events import Event
from ..instrumentation import PatternOf, observe_all
from . import _series
from ._series import Attributes, Series
from ._spans import AcquireSpans, Spans

__all__ = ["OpenTelemetryObserver", "instrument", "uninstrument"]

NAME = "redis_sync_aio"
"""The name of the instrumentation scope."""


def _instruments(provider: MeterProvider | None) -> _series.Measure:
    """Return what records a value in the instrument of its series."""
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


class OpenTelemetryObserver:
    """An observer that records metrics and spans with the API of OpenTelemetry.

    Args:
        meter_provider: Where metrics go. None: the global provider.
        tracer_provider: Where spans go. None: the global provider.
        acquire_spans: Which requests get a span ``acquire PATTERN``. "waited" (default): those that had to wait.
            "always": all. "never": none.
        hold_spans: Whether each lease gets a span ``hold PATTERN``.

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
        self._spans = Spans(trace.get_tracer(NAME, __version__, tracer_provider), acquire_spans, hold_spans)

    def __call__(self, event: Event) -> None:
        """Record one event."""
        self._meter(event)
        if event.request:  # it is about a lock
            self._spans.see(event, self._meter.attributes(event))

    def close(self) -> None:
        """Take what still waits or is held out of the counts, and end its spans. Idempotent."""
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
