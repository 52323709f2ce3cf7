"""The schedulers of docs/guides/jobs.md: what that page shows runs, in two processes' worth of each: the job runs once.

They are installed with the extra `lint`; a test whose scheduler is not there is skipped.
"""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, date, datetime
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

from redis_sync_aio import Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.jobs import once, once_per

from ..support.body import FAST

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "jobs.md").read_text()


def snippet(heading: str) -> str:
    """Return the code under a heading of the page."""
    section = re.split(r"^#+ ", PAGE.split(f"\n### {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("    ") or not line]
    return dedent("\n".join(lines)).strip()


class Shop:
    """What the page leaves out: a coordinator, and the report, which counts how often it is made."""

    def __init__(self, sync: Coordinator, url: str) -> None:
        self.sync = sync
        self.made = 0
        self.names: dict[str, Any] = {
            "asyncio": asyncio,
            "Coordinator": Coordinator,
            "URL": url,
            "date": date,
            "once": once,
            "once_per": once_per,
            "report": self.report,
            "state": SimpleNamespace(sync=sync),
        }

    async def report(self) -> None:
        self.made += 1

    def run(self, heading: str, **more: Any) -> dict[str, Any]:
        """Run the code under a heading, as a process of its own would."""
        names = self.names | more
        exec(compile(snippet(heading), f"docs/guides/jobs.md, {heading}", "exec"), names)
        return names


@pytest.fixture
def shop(sync: Coordinator, server: EmbeddedServer) -> Shop:
    return Shop(sync, server.url)


async def test_cron(shop: Shop) -> None:
    for _ in range(2):
        await asyncio.to_thread(shop.run, "cron, on several machines")
    assert shop.made == 1


async def test_apscheduler(shop: Shop) -> None:
    schedulers = pytest.importorskip("apscheduler.schedulers.asyncio")
    events = pytest.importorskip("apscheduler.events")
    ended: list[Any] = []

    @once_per(shop.sync, "nightly:{0:%Y-%m-%d}")
    async def nightly() -> None:
        await shop.report()

    running = []
    for _ in range(2):
        scheduler = shop.run("APScheduler 3", nightly=nightly, **vars(schedulers))["scheduler"]
        scheduler.add_listener(ended.append, events.EVENT_JOB_EXECUTED | events.EVENT_JOB_ERROR)
        (job,) = scheduler.get_jobs()
        job.modify(next_run_time=datetime.now(UTC), misfire_grace_time=None)
        scheduler.start()
        running.append(scheduler)
    await wait_until(lambda: len(ended) == 2, FAST, timeout=60)
    for scheduler in running:
        scheduler.shutdown()
    assert [event.exception for event in ended] == [None, None]
    assert shop.made == 1


async def test_taskiq(shop: Shop) -> None:
    taskiq = pytest.importorskip("taskiq")
    sources = pytest.importorskip("taskiq.schedule_sources")
    for _ in range(2):
        broker = taskiq.InMemoryBroker(await_inplace=True)
        shop.run("taskiq", broker=broker, __name__=__name__)
        source = sources.LabelScheduleSource(broker)
        await source.startup()
        (scheduled,) = await source.get_schedules()
        assert scheduled.cron == "5 0 * * *"
        await broker.startup()
        await taskiq.TaskiqScheduler(broker, [source]).on_ready(source, scheduled)
        await broker.shutdown()
    assert shop.made == 1


async def test_saq(shop: Shop, server: EmbeddedServer) -> None:
    """The worker accepts these settings; its hooks and its job are called here as it calls them."""
    saq = pytest.importorskip("saq")
    for _ in range(2):
        queue = saq.Queue.from_url(server.url)
        settings = shop.run("SAQ", queue=queue, CronJob=saq.CronJob)["settings"]
        worker = saq.Worker(**settings)
        assert list(worker.functions) == ["nightly"]
        await settings["startup"](worker.context)
        await worker.functions["nightly"](worker.context)
        await settings["shutdown"](worker.context)
        await queue.disconnect()
    assert shop.made == 1
