"""What Prometheus scrapes: the series of OpenTelemetry under Prometheus's names, by pattern."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, AsyncLock, Coordinator, LeaseLost
from redis_sync_aio.contrib import prometheus
from tests.support.programs import PATIENCE, environment
from tests.support.topologies import Nodes

NAMES = {
    "redis_sync_aio_acquire_duration_seconds": "histogram",
    "redis_sync_aio_hold_duration_seconds": "histogram",
    "redis_sync_aio_waiting": "gauge",
    "redis_sync_aio_held": "gauge",
    "redis_sync_aio_lease_lost": "counter",
    "redis_sync_aio_renewal_lateness_seconds": "histogram",
    "redis_sync_aio_connection_reconnects": "counter",
}
"""The names and kinds of all metrics. Samples of a counter have the suffix _total."""


def values(registry: CollectorRegistry, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """The samples of one name: their values by the values of these labels."""
    return {
        tuple(sample.labels[label] for label in labels): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == name
    }


def test_the_metrics_are_named_as_prometheus_names_things() -> None:
    registry = CollectorRegistry()
    with prometheus.collect(registry):
        assert {metric.name: metric.type for metric in registry.collect()} == NAMES
        assert b"# TYPE redis_sync_aio_lease_lost_total counter" in generate_latest(registry)
    assert list(registry.collect()) == []


async def test_waits_holds_and_losses_are_scraped_by_pattern(redis: Redis, other: Coordinator) -> None:
    registry = CollectorRegistry()
    with prometheus.collect(registry):
        lock = AsyncLock(redis, "orders:42")
        async with lock:
            assert values(registry, "redis_sync_aio_held", "lock_pattern") == {("orders:*",): 1}
        async with other.lock("orders:42"):
            with pytest.raises(AcquireTimeout):
                await asyncio.create_task(lock.acquire(timeout=0.01))
        lease = await lock.acquire()
        await redis.delete("orders:42")
        with pytest.raises(LeaseLost) as caught:
            await lease.extend(5)
        counts = values(
            registry, "redis_sync_aio_acquire_duration_seconds_count", "lock_pattern", "outcome", "error_type"
        )
        assert counts == {
            ("orders:*", "granted", ""): 3,
            ("orders:*", "timeout", "redis_sync_aio.errors.AcquireTimeout"): 1,
        }
        assert values(registry, "redis_sync_aio_held", "lock_kind") == {("lock",): 0}
        assert values(registry, "redis_sync_aio_waiting", "lock_kind") == {("lock",): 0}
        assert values(registry, "redis_sync_aio_hold_duration_seconds_count", "outcome") == {
            ("released",): 2,
            ("lost",): 1,
        }
        assert values(registry, "redis_sync_aio_lease_lost_total", "lost_reason") == {(caught.value.reason,): 1}
        scraped = generate_latest(registry).decode()
    assert "orders:42" not in scraped


async def test_one_coordinator_can_be_observed_alone(redis: Redis, other: Coordinator) -> None:
    registry = CollectorRegistry()
    observer = prometheus.PrometheusObserver(registry)
    async with Coordinator(redis, observe=observer) as sync, sync.lock("a:1"), other.lock("b:1"):
        assert values(registry, "redis_sync_aio_held", "lock_pattern") == {("a:*",): 1}


async def test_an_event_is_waited_for_and_never_held(redis: Redis) -> None:
    registry = CollectorRegistry()
    with prometheus.collect(registry):
        async with Coordinator(redis) as sync, sync.lock("a"):
            await sync.event("a").set()
            await sync.event("a").wait()
            await sync.barrier("a", parties=1).wait()
            waits = values(registry, "redis_sync_aio_acquire_duration_seconds_count", "lock_kind")
            assert waits == {("lock",): 1, ("event",): 1, ("barrier",): 1}
            assert values(registry, "redis_sync_aio_held", "lock_kind") == {("lock",): 1}
        assert values(registry, "redis_sync_aio_hold_duration_seconds_count", "lock_kind") == {("lock",): 1}


async def test_patterns_can_be_chosen(redis: Redis) -> None:
    registry = CollectorRegistry()
    with prometheus.collect(registry, pattern_of=lambda name: name.rpartition("-")[0] or None):
        for name in ("order-1", "order-2", "report"):
            async with AsyncLock(redis, name):
                pass
        assert set(values(registry, "redis_sync_aio_held", "lock_pattern")) == {("order",), ("report",)}
    # Closed, it has no series: a new one counts from zero.
    with prometheus.collect(registry):
        assert values(registry, "redis_sync_aio_held", "lock_pattern") == {}


FORKING = """
import os
import signal
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from redis_sync_aio.contrib.prometheus import PrometheusObserver
from redis_sync_aio.instrumentation import Granted, Requested

facts = dict(kind="lock", pattern="a:*", server="h:6379", time=1.0)
observer = PrometheusObserver(CollectorRegistry())
observer(Requested(**facts, name="a:1", request=1))
observer(Granted(**facts, name="a:1", request=1, waited=0.1, contended=False, fence=1, token="t"))

def gauges():
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    values = {one.name: one.value for metric in registry.collect() for one in metric.samples}
    return values["redis_sync_aio_held"], values["redis_sync_aio_waiting"]

if child := os.fork():
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert gauges() == (2, 1), gauges()
    observer.close()
    assert gauges() == (1, 1), gauges()
    mark_process_dead(child)
    assert gauges() == (0, 0), gauges()
else:
    observer(Requested(**facts, name="a:2", request=2))
    observer(Granted(**facts, name="a:2", request=2, waited=0.1, contended=False, fence=2, token="u"))
    observer(Requested(**facts, name="a:3", request=3))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_in_multi_process_mode_a_forked_child_leaves_the_counts_of_its_parent(tmp_path: Path) -> None:
    """Its own values begin at zero there, and the gauges are sums over all processes, also once one has closed.

    What a process had that was killed counts until it is marked as dead.
    """
    done = subprocess.run(
        [sys.executable, "-c", FORKING],
        env=environment(PROMETHEUS_MULTIPROC_DIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr


def test_a_registry_that_has_the_series_of_another_observer_is_refused() -> None:
    registry = CollectorRegistry()
    with prometheus.PrometheusObserver(registry), pytest.raises(ValueError, match="uplicated"):
        prometheus.collect(registry)
    prometheus.collect(registry).close()


async def test_collecting_twice_replaces_and_counts_once(sync: Coordinator) -> None:
    """A module that is imported again does that, as does a second application in one process."""
    registry = CollectorRegistry()
    first = prometheus.collect(registry)
    async with sync.lock("orders:1"):
        pass
    with prometheus.collect(registry):
        first.close()  # late, and of no effect on the second
        async with sync.lock("orders:42"):
            granted = values(registry, "redis_sync_aio_acquire_duration_seconds_count", "lock_pattern", "outcome")
            assert granted == {("orders:*", "granted"): 1}
            assert values(registry, "redis_sync_aio_held", "lock_pattern") == {("orders:*",): 1}
    assert not [*registry.collect()]
    prometheus.collect(registry).close()


async def test_a_cluster_has_no_port(nodes: Nodes) -> None:
    """The address names several nodes: the port of the last one is not that of all."""
    registry = CollectorRegistry()
    with prometheus.collect(registry):
        async with nodes.client() as client, Coordinator(client) as sync, sync.lock("orders:42"):
            ((address, port),) = values(registry, "redis_sync_aio_held", "server_address", "server_port")
    assert port == ""
    assert address.startswith("a cluster at ")
    assert f"{nodes.primaries[-1].port}" in address
