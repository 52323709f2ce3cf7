"""Prometheus metrics of locks; needs the extra ``prometheus``, which is prometheus-client.

Collect once, when the process starts::

    from redis_sync_aio.contrib import prometheus

    prometheus.collect()

The series are those of OpenTelemetry (`redis_sync_aio.contrib.otel`), named as Prometheus names things:
``redis_sync_aio_acquire_duration_seconds`` and so on. Their list:
[The series](https://redis-sync-aio.github.io/redis-sync-aio/operations/metrics/#the-series).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from . import missing

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
except ModuleNotFoundError as _error:
    raise missing(_error, __name__, "redis_sync_aio[prometheus]") from _error

from .._core.events import Event
from ..instrumentation import PatternOf, observe_all
from . import _series
from ._series import Attributes, Series

__all__ = ["PrometheusObserver", "collect"]

Metric = Counter | Gauge | Histogram


class PrometheusObserver:
    """An observer whose series are in a registry of prometheus-client; usable as a context manager.

    Raises ValueError when ``registry`` has the series already: a registry is given to one observer at a time.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        if not isinstance(registry, CollectorRegistry):
            raise TypeError(f"registry must be a CollectorRegistry, not {registry!r}")
        self._registry = registry
        self._metrics: list[Metric] = []
        self._closing = ExitStack()
        try:
            self._meter = _series.Meter(self._recorder(), inherited=not _multiprocess())
            self._closing.callback(self._meter.close)  # files of the multi-process mode outlive this
        except ValueError:
            self.close()
            raise

    def __call__(self, event: Event) -> None:
        """Measure one event."""
        self._meter(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop observing, if `collect` began it, and take the series out of the registry. Idempotent."""
        self._closing.close()
        while self._metrics:
            self._registry.unregister(self._metrics.pop())

    def _recorder(self) -> _series.Measure:
        """Return the function that records a value in the metric of its series."""
        record = {series: self._make(series) for series in _series.ALL}
        return lambda series, value, attributes: record[series](value, attributes)

    def _make(self, series: Series) -> Callable[[float, Attributes], None]:
        kinds: dict[str, tuple[type[Metric], str, dict[str, Any]]] = {
            "histogram": (Histogram, "observe", {"unit": "seconds", "buckets": series.buckets}),
            "counter": (Counter, "inc", {}),
            "up_down_counter": (Gauge, "inc", {"multiprocess_mode": "livesum"}),
        }
        kind, record, options = kinds[series.kind]
        labels = [attribute.replace(".", "_") for attribute in series.attributes]
        metric = kind(series.prometheus_name, series.description, labels, registry=self._registry, **options)
        self._metrics.append(metric)
        return lambda value, attributes: getattr(metric.labels(*_values(series, attributes)), record)(value)


def _multiprocess() -> bool:
    """Return whether each process has values of its own, in files: those of a forked child begin at zero."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ or "prometheus_multiproc_dir" in os.environ


def _values(series: Series, attributes: Attributes) -> list[str]:
    """Return the values of the labels; one that does not apply is empty, as Prometheus has it."""
    return [str(attributes.get(attribute, "")) for attribute in series.attributes]


def collect(registry: CollectorRegistry = REGISTRY, *, pattern_of: PatternOf | None = None) -> PrometheusObserver:
    """Observe every coordinator of this process, until the observer that is returned is closed.

    A second call with the same registry replaces the first: its observer is closed, and the series begin again at 0.

    Args:
        registry: Where the series are registered. Default: the global registry of prometheus-client.
        pattern_of: A function that returns the pattern of a name. None, or a result of None: the part before the first
            ":", and ":*".

    Raises:
        ValueError: The registry has the series already, of an observer that this function has not made.
    """
    if (earlier := _collecting.get(registry)) is not None:
        earlier.close()
    observer = _collecting[registry] = PrometheusObserver(registry)
    observer._closing.callback(_collecting.pop, registry)
    observer._closing.enter_context(observe_all(observer, pattern_of=pattern_of))
    return observer


_collecting: dict[CollectorRegistry, PrometheusObserver] = {}
"""The observers that `collect` made and that are not closed, by registry."""
