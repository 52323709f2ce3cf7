"""What OpenTelemetry is given: series by pattern, and spans. Exporters are in memory, the server is a real one."""

from __future__ import annotations

import asyncio
import os
import tomllib
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from opentelemetry.instrumentation.dependencies import get_dependency_conflicts
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from redis.asyncio import Redis

import redis_sync_aio
from redis_sync_aio import AcquireTimeout, AsyncLock, Coordinator, LeaseLost, wait_until
from redis_sync_aio.contrib import _series, otel
from redis_sync_aio.contrib.otel_instrumentor import RedisSyncAioInstrumentor
from redis_sync_aio.instrumentation import ConnectionLost, ConnectionRestored, Granted, RenewedLate, Requested
from tests.support.body import FAST, waits
from tests.support.inside import clock

ROOT = Path(redis_sync_aio.__file__).parents[1]

Attributes = dict[str, Any]
PREFIX = "redis_sync_aio."


class Exported:
    """What was exported."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])
        self._spans = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        """The spans by name; the last one of each."""
        return {span.name: span for span in self.all_spans}

    @property
    def all_spans(self) -> tuple[ReadableSpan, ...]:
        """The spans in the order of their ends."""
        return self._spans.get_finished_spans()

    def points(self, name: str) -> list[tuple[Attributes, Any]]:
        """The series of one metric: attributes and data point of each."""
        data = self.reader.get_metrics_data()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
        found = [metric for scope in scopes for metric in scope.metrics if metric.name == PREFIX + name]
        return [(dict(point.attributes or {}), point) for metric in found for point in metric.data.data_points]

    def point(self, name: str) -> tuple[Attributes, Any]:
        """The only series of one metric."""
        [only] = self.points(name)
        return only


@pytest.fixture
def exported() -> Iterator[Exported]:
    exported = Exported()
    yield exported
    exported.meters.shutdown()
    exported.tracers.shutdown()


@pytest_asyncio.fixture
async def observed(redis: Redis, exported: Exported) -> AsyncIterator[Coordinator]:
    """A coordinator whose every request has its spans."""
    observer = otel.OpenTelemetryObserver(
        meter_provider=exported.meters, tracer_provider=exported.tracers, acquire_spans="always"
    )
    async with Coordinator(redis, observe=observer) as sync:
        yield sync


async def test_an_acquire_and_a_hold_are_measured_in_seconds_by_pattern(
    observed: Coordinator, exported: Exported
) -> None:
    async with observed.lock("orders:42"):
        [(attributes, waiting)] = exported.points("waiting")
        assert waiting.value == 0
        assert exported.point("held")[1].value == 1
    assert attributes["lock.kind"] == "lock"
    assert attributes["lock.pattern"] == "orders:*"
    assert attributes["db.system.name"] == "redis"
    assert attributes["server.address"]
    acquire, acquired = exported.point("acquire.duration")
    assert acquire == {**attributes, "outcome": "granted"}
    assert acquired.count == 1
    assert 0.001 in acquired.explicit_bounds  # the advice of this package: the default bounds are for milliseconds
    hold, held = exported.point("hold.duration")
    assert hold == {**attributes, "outcome": "released"}
    assert held.count == 1
    assert exported.point("held")[1].value == 0
    assert exported.points("lease.lost") == []


@pytest.mark.real
async def test_a_wait_and_a_hold_are_spans_below_the_callers(
    observed: Coordinator, other: Coordinator, exported: Exported
) -> None:
    """The full name and the fence are on the spans, and on no series."""
    held = await other.lock("orders:42").acquire()
    tracer = exported.tracers.get_tracer("test")

    async def wait() -> int:
        with tracer.start_as_current_span("caller"):
            async with observed.lock("orders:42") as lease:
                return lease.fence

    waiting = asyncio.create_task(wait())
    await wait_until(waits(other.lock("orders:42")), FAST, timeout=30)
    assert exported.point("waiting")[1].value == 1
    await held.release()
    fence = await waiting
    spans = exported.spans
    caller, acquire, hold = spans["caller"], spans["acquire orders:*"], spans["hold orders:*"]
    assert caller.context is not None
    for span in (acquire, hold):
        assert span.parent is not None
        assert span.parent.span_id == caller.context.span_id
        assert span.attributes is not None
        assert span.attributes["lock.name"] == "orders:42"
        assert span.attributes["lock.fence"] == fence
        assert span.attributes["db.system.name"] == "redis"
    assert caller.start_time is not None
    assert acquire.start_time is not None
    assert acquire.end_time is not None
    assert hold.start_time is not None
    assert acquire.start_time <= acquire.end_time
    assert caller.start_time <= hold.start_time
    assert exported.point("waiting")[1].value == 0
    for name in ("acquire.duration", "hold.duration", "waiting", "held"):
        for attributes, _ in exported.points(name):
            assert "orders:42" not in attributes.values()
            assert not {"lock.name", "lock.fence"} & set(attributes)


@pytest.mark.parametrize("timeout", [None, 20], ids=["granted", "timeout"])
async def test_the_span_of_a_wait_begins_when_the_lock_was_asked_for(
    observed: Coordinator, other: Coordinator, exported: Exported, timeout: float | None
) -> None:
    """Ends of spans are of the time of day, here: only their beginnings are in virtual time."""
    held = await other.lock("orders:42").acquire()
    asked = clock.wall_ns()
    waiting = asyncio.create_task(observed.lock("orders:42").acquire(timeout=timeout))
    await asyncio.sleep(25)
    await held.release()
    if timeout is None:
        await (await waiting).release()
    else:
        with pytest.raises(AcquireTimeout):
            await waiting
    began = exported.spans["acquire orders:*"].start_time
    assert began is not None
    assert (began - asked) / 1e9 == pytest.approx(0, abs=1)


async def test_a_timeout_is_an_outcome_with_the_type_of_its_error(
    observed: Coordinator, other: Coordinator, exported: Exported
) -> None:
    async with other.lock("orders:42"):
        with pytest.raises(AcquireTimeout):
            await asyncio.create_task(observed.lock("orders:42").acquire(timeout=0.01))
        assert await observed.lock("orders:42").try_acquire() is None
    by_outcome = {attributes["outcome"]: attributes for attributes, _ in exported.points("acquire.duration")}
    assert set(by_outcome) == {"timeout", "taken"}
    assert by_outcome["timeout"]["error.type"] == "redis_sync_aio.errors.AcquireTimeout"
    assert "error.type" not in by_outcome["taken"]
    assert exported.point("waiting")[1].value == 0
    assert exported.points("held") == []


async def test_a_lost_lease_is_counted_by_its_reason_and_fails_its_span(
    observed: Coordinator, redis: Redis, exported: Exported
) -> None:
    lease = await observed.lock("orders:42").acquire()
    await redis.delete("orders:42")
    with pytest.raises(LeaseLost) as caught:
        await lease.extend(5)
    attributes, point = exported.point("lease.lost")
    assert attributes["lost.reason"] == caught.value.reason
    assert point.value == 1
    assert exported.point("held")[1].value == 0
    assert exported.point("hold.duration")[0]["outcome"] == "lost"
    hold = exported.spans["hold orders:*"]
    assert hold.status.status_code is StatusCode.ERROR
    assert hold.attributes is not None
    assert hold.attributes["lost.reason"] == caught.value.reason


def test_late_renewals_and_reconnections_are_measured(exported: Exported) -> None:
    """These are hard to cause on purpose, so the observer is given the events themselves."""
    observer = otel.OpenTelemetryObserver(meter_provider=exported.meters, tracer_provider=exported.tracers)
    late = RenewedLate(
        kind="lock",
        name="orders:42",
        pattern="orders:*",
        server="[::1]:6379",
        time=1.0,
        request=7,
        lateness=0.2,
        left=1.0,
    )
    restored = ConnectionRestored(
        kind="", name="", pattern="", server="/run/redis.sock", time=1.0, request=0, after=0.5, rechecked=3
    )
    for event in (late, restored, restored):
        observer(event)
    attributes, lateness = exported.point("renewal.lateness")
    assert (lateness.count, lateness.sum) == (1, 0.2)
    assert (attributes["server.address"], attributes["server.port"]) == ("::1", 6379)
    attributes, reconnects = exported.point("connection.reconnects")
    assert attributes == {"db.system.name": "redis", "server.address": "/run/redis.sock"}
    assert reconnects.value == 2


async def test_only_waits_have_spans_unless_all_are_asked_for(redis: Redis, exported: Exported) -> None:
    observer = otel.OpenTelemetryObserver(meter_provider=exported.meters, tracer_provider=exported.tracers)
    async with Coordinator(redis, observe=observer) as sync, sync.lock("orders:42"):
        assert await sync.lock("orders:42").try_acquire() is None
    assert set(exported.spans) == {"hold orders:*"}


async def test_all_coordinators_are_observed_until_that_is_undone(redis: Redis, exported: Exported) -> None:
    for _ in range(2):  # the second replaces the first: nothing is counted twice
        otel.instrument(meter_provider=exported.meters, tracer_provider=exported.tracers)
    try:
        async with AsyncLock(redis, "orders:42"):
            assert exported.point("held")[1].value == 1
            otel.uninstrument()  # the end of this lease will not be seen
            assert exported.point("held")[1].value == 0
        async with AsyncLock(redis, "orders:42"):
            pass
    finally:
        otel.uninstrument()
    assert exported.point("acquire.duration")[1].count == 1
    assert [span.name for span in exported.all_spans] == ["hold orders:*"]


@pytest.mark.ci
@pytest.mark.real
async def test_twenty_thousand_names_of_one_pattern_are_one_series(observed: Coordinator, exported: Exported) -> None:
    async def take(first: int) -> None:
        for number in range(first, first + 200):
            async with observed.lock(f"orders:{number}"):
                pass

    await asyncio.gather(*(take(first) for first in range(0, 20_000, 200)))
    for name in ("acquire.duration", "hold.duration"):
        assert exported.point(name)[1].count == 20_000
    for name in ("waiting", "held"):
        assert exported.point(name)[1].value == 0


async def test_names_without_a_pattern_share_one_from_some_number_on(redis: Redis, exported: Exported) -> None:
    """Names that have no part in common cost bounded memory, too. Events about a connection take no pattern away."""
    observer = otel.OpenTelemetryObserver(meter_provider=exported.meters, tracer_provider=exported.tracers)
    observer(ConnectionLost(kind="", name="", pattern="", server="h:6379", time=1.0, request=0))
    async with Coordinator(redis, observe=observer) as sync:
        for number in range(_series.MAX_PATTERNS + 50):
            async with sync.lock(f"order {number}"):
                pass
    patterns = {attributes["lock.pattern"]: point.count for attributes, point in exported.points("acquire.duration")}
    assert len(patterns) == _series.MAX_PATTERNS + 1
    assert patterns["(other)"] == 50


# -- auto-instrumentation ------------------------------------------------------------------------------------


def test_auto_instrumentation_finds_the_package() -> None:
    """As ``opentelemetry-instrument`` does: by the entry point, and only if what it needs is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["entry-points"]["opentelemetry_instrumentor"].items()
    found = EntryPoint(name, value, "opentelemetry_instrumentor").load()
    assert found is RedisSyncAioInstrumentor
    assert get_dependency_conflicts(found().instrumentation_dependencies()) is None


async def test_the_instrumentor_can_be_undone(redis: Redis, exported: Exported) -> None:
    instrumentor = RedisSyncAioInstrumentor()
    instrumentor.instrument(meter_provider=exported.meters, tracer_provider=exported.tracers)
    try:
        async with AsyncLock(redis, "orders:42"):
            pass
    finally:
        instrumentor.uninstrument()
    async with AsyncLock(redis, "orders:42"):
        pass
    assert exported.point("acquire.duration")[1].count == 1


def test_a_forked_child_ends_its_own_spans_and_not_those_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = Exported()
    observer = otel.OpenTelemetryObserver(meter_provider=exported.meters, tracer_provider=exported.tracers)

    def hold(name: str, request: int) -> None:
        facts: dict[str, Any] = {"kind": "lock", "name": name, "pattern": name, "server": "h:6379", "time": 1.0}
        observer(Requested(**facts, request=request))
        observer(Granted(**facts, request=request, waited=0.1, contended=False, fence=1, token="t"))

    hold("parent's", 1)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    hold("child's", 2)
    observer.close()
    assert set(exported.spans) == {"hold child's"}
