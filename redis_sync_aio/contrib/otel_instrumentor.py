"""The entry point by which OpenTelemetry's auto-instrumentation finds this package.

``opentelemetry-instrument python service.py`` loads it; nothing needs to be imported. By hand, the same is
``RedisSyncAioInstrumentor().instrument()``, or `redis_sync_aio.contrib.otel.instrument`, which needs only
OpenTelemetry's API.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from . import missing

try:
    from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]
except ModuleNotFoundError as _error:
    raise missing(_error, __name__, "opentelemetry-instrumentation") from _error

from . import otel

__all__ = ["RedisSyncAioInstrumentor"]


class RedisSyncAioInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """Instruments every coordinator of the process. Takes the arguments of `otel.instrument`."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return nothing: it is installed with the package that it instruments."""
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        otel.instrument(**kwargs)

    def _uninstrument(self, **kwargs: Any) -> None:
        otel.uninstrument()
