"""Draws docs/assets/dashboard.svg: ``python -m benchmarks.dashboard``. Takes two minutes; needs a Prometheus server.

Locks are used for a while, well and badly; `redis_sync_aio.contrib.prometheus` counts; Prometheus scrapes. Then every
query of the Grafana dashboard is asked of Prometheus, and drawn. So each of them is known to work, without Grafana.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from prometheus_client import CollectorRegistry, start_http_server

from redis_sync_aio import AcquireTimeout, Coordinator, LeaseLost
from redis_sync_aio.contrib import prometheus
from redis_sync_aio.embedded import EmbeddedServer

WINDOW = 15
"""Seconds that a rate is computed over: Grafana's $__rate_interval."""
CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs: [{{job_name: locks, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}]
"""


async def again(work: Callable[[], Awaitable[object]], pause: float) -> None:
    """Do something again and again; a lock that was not granted or was lost is part of the picture."""
    while True:
        await asyncio.sleep(random.expovariate(1 / pause))
        try:
            await work()
        except (AcquireTimeout, LeaseLost):
            pass


async def use_locks(url: EmbeddedServer, seconds: float) -> None:
    """Use locks: many short ones, a long one with a queue, a semaphore; lose leases, connections and time."""
    client, admin = url.client(), url.client()

    async def order() -> None:
        async with sync.lock(f"orders:{random.randrange(20)}").acquire(timeout=0.2):
            await asyncio.sleep(random.uniform(0.005, 0.05))

    async def report() -> None:
        async with sync.lock("reports:nightly"):
            await asyncio.sleep(random.uniform(0.2, 0.8))

    async def mail() -> None:
        async with sync.semaphore("smtp", limit=3):
            await asyncio.sleep(random.uniform(0.05, 0.2))

    async def meddle() -> None:
        await admin.delete("reports:nightly")

    async def stall() -> None:
        async with sync.lock("cache:prices", ttl=2):
            await asyncio.sleep(0.5)
            time.sleep(1)  # noqa: ASYNC251  a mistake that the dashboard shows
            await asyncio.sleep(0.3)

    async def disconnect() -> None:
        for kind in ("normal", "pubsub"):
            await admin.client_kill_filter(_type=kind, skipme=True)

    async with Coordinator(client) as sync:
        works = [
            (order, 0.05, 25),
            (report, 0.3, 4),
            (mail, 0.1, 8),
            (meddle, 12, 1),
            (stall, 6, 1),
            (disconnect, 25, 1),
        ]
        tasks = [asyncio.create_task(again(work, pause)) for work, pause, count in works for _ in range(count)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for one in (client, admin):
        await one.aclose()


def ask(
    api: str, expression: str, start: float, end: float
) -> Iterator[tuple[dict[str, str], list[tuple[float, float]]]]:
    """Yield the series that Prometheus returns: labels, and points of time and value."""
    for variable, value in (("$__rate_interval", f"{WINDOW}s"), ("$pattern", ".*"), ("$server", ".*")):
        expression = expression.replace(variable, value)
    query = urllib.parse.urlencode({"query": expression, "start": start, "end": end, "step": 1})
    with urllib.request.urlopen(f"{api}/api/v1/query_range?{query}") as reply:
        for series in json.load(reply)["data"]["result"]:
            points = [(float(at), float(value)) for at, value in series["values"]]
            yield series["metric"], [(at, value) for at, value in points if value == value]


def draw(api: str, start: float, end: float, path: Path) -> None:
    """Draw every panel. Raises ValueError when a query returns nothing."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    dashboard = json.loads(files("redis_sync_aio.contrib").joinpath("dashboard.json").read_text("utf-8"))
    panels = dashboard["panels"]
    with rc_context({"svg.fonttype": "none", "font.family": ["sans-serif"], "font.size": 8}):
        figure = Figure(figsize=(14, 3.1 * (len(panels) // 3)), layout="constrained")
        for number, panel in enumerate(panels):
            axes: Any = figure.add_subplot(len(panels) // 3, 3, number + 1)
            for target in panel["targets"]:
                found = list(ask(api, target["expr"], start, end))
                if not any(points for _, points in found):
                    raise ValueError(f"{panel['title']}: no data for {target['expr']}")
                for labels, points in found:
                    name = target["legendFormat"]
                    for label, value in labels.items():
                        name = name.replace(f"{{{{{label}}}}}", value)
                    axes.plot([at - start for at, _ in points], [value for _, value in points], label=name)
            unit = {"s": "seconds", "ops": "a second", "short": ""}[panel["fieldConfig"]["defaults"]["unit"]]
            axes.set_title(panel["title"], loc="left", weight="bold", fontsize=9)
            axes.set_ylabel(unit)
            axes.set_ylim(bottom=0)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncol=4, frameon=False)
        figure.suptitle(dashboard["title"])
        figure.savefig(path, metadata={"Date": None})


def main(
    seconds: Annotated[float, typer.Option(min=30, help="For how long locks are used.")] = 100,
    out: Annotated[Path, typer.Option(help="Where to draw.")] = Path("docs/assets/dashboard.svg"),
    binary: Annotated[str, typer.Option(help="The Prometheus server.")] = "prometheus",
) -> None:
    """Use locks, let Prometheus scrape them, and draw the dashboard."""
    registry = CollectorRegistry()
    with tempfile.TemporaryDirectory() as directory, EmbeddedServer(port=0) as server, prometheus.collect(registry):
        metrics, thread = start_http_server(0, "127.0.0.1", registry)
        config = Path(directory) / "prometheus.yml"
        config.write_text(CONFIG.format(port=metrics.server_port))
        api = "127.0.0.1:19090"
        scraper = subprocess.Popen(
            [binary, f"--config.file={config}", f"--storage.tsdb.path={directory}/data", f"--web.listen-address={api}",
             "--log.level=error"]
        )  # fmt: skip
        try:
            start = time.time()
            asyncio.run(use_locks(server, seconds))
            time.sleep(2)
            draw(f"http://{api}", start + WINDOW, time.time(), out)
        finally:
            scraper.terminate()
            scraper.wait()
            metrics.shutdown()
            thread.join()
    print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
