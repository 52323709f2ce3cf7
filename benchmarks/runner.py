"""Runs scenarios: rounds outside, contestants inside, so that all of them run under the same conditions."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from redis_sync_aio.embedded import EmbeddedServer

from .contestant import Contestant
from .contestants import BY_NAME
from .scenario import Bench, Outcome, Progress, Scale, Scenario
from .server_stats import ServerStats
from .workers import Pool, WorkerFailed

PACKAGES = (
    "redis", "hiredis", "redis-fifo-lock", "python-redis-lock", "self-limiters", "async-redis-rate-limiters",
    "py-redis-semaphore", "steindamm",
)  # fmt: skip


def run_scenario(bench: Bench, scenario: Scenario, names: Sequence[str], progress: Progress) -> Outcome:
    """Run all rounds of one scenario; each round starts with another contestant."""
    outcome = Outcome(scenario)
    entered = list(_entered(scenario, names, outcome, bench.scale.everybody))
    if not scenario.proof:
        _prove(bench, entered, outcome)
    for number in range(bench.scale.rounds):
        shift = number % len(entered) if entered else 0
        for contestant in entered[shift:] + entered[:shift]:
            if any(text.startswith(f"{contestant.name}:") for text in outcome.failures):
                continue
            progress(f"{scenario.title}: round {number + 1} of {bench.scale.rounds}, {contestant.name}")
            with _failing(bench, contestant, outcome):
                bench.stats.flush()
                outcome.add(contestant.name, scenario.play(bench, contestant))
    return outcome


def _entered(scenario: Scenario, names: Sequence[str], outcome: Outcome, everybody: bool) -> Iterator[type[Contestant]]:
    for name in names:
        contestant = BY_NAME[name]
        if contestant.kind not in scenario.kinds or scenario.game not in contestant.plays:
            continue
        if not (everybody or contestant.quick is None or scenario.key in contestant.quick):
            continue
        if not contestant.installed():
            outcome.skipped[name] = "not installed"
        elif name in scenario.refuses:
            outcome.skipped[name] = scenario.refuses[name]
        else:
            yield contestant


def _prove(bench: Bench, entered: Sequence[type[Contestant]], outcome: Outcome) -> None:
    """Check exclusion before a scenario without contention: a lock that does not exclude would always win."""
    from .scenarios.contention import prove

    for contestant in entered:
        with _failing(bench, contestant, outcome):
            bench.stats.flush()
            outcome.violations += [
                f"{outcome.scenario.key}, {contestant.name}: {text}" for text in prove(bench, contestant)
            ]


@contextmanager
def _failing(bench: Bench, contestant: type[Contestant], outcome: Outcome) -> Iterator[None]:
    """Record a failed worker and go on with new ones."""
    try:
        yield
    except WorkerFailed as failure:
        outcome.failures.append(f"{contestant.name}: {failure}")
        bench.pool.close()


def benchmark(
    scenarios: Sequence[Scenario], names: Sequence[str], scale: Scale, *, uvloop: bool, tcp: bool, progress: Progress
) -> tuple[list[Outcome], dict[str, Any]]:
    """Run ``scenarios`` on one embedded server; return the outcomes and the environment."""
    load = os.getloadavg()[0]
    with EmbeddedServer(port=0 if tcp else None) as server, Pool(uvloop) as pool, ServerStats(server.url) as stats:
        bench = Bench(server.url, stats, pool, scale)
        outcomes, seconds = list[Outcome](), dict[str, int]()
        for scenario in scenarios:
            start = time.monotonic()
            outcomes.append(run_scenario(bench, scenario, names, progress))
            seconds[scenario.key] = round(time.monotonic() - start)
        about = {
            "server": stats.version(),
            "transport": "TCP loopback" if tcp else "unix socket",
            "loop": f"uvloop {version('uvloop')}" if uvloop else "asyncio",
            "python": platform.python_version(),
            "platform": f"{sys.platform} {platform.machine()}, {os.cpu_count()} CPUs",
            "load average at start, end": [round(load, 2), round(os.getloadavg()[0], 2)],
            "rounds": scale.rounds,
            "seconds": seconds,
            "packages": dict(_versions()),
        }
    return outcomes, about


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue
