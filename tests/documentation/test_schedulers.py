"""The schedulers of docs/guides/jobs.md: what that page shows runs, twice each, and the job runs once.

They are installed with the group `lint`; a test whose scheduler is not there is skipped.
"""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import wait_until
from redis_sync_aio.embedded import EmbeddedServer

from ..support.body import FAST
from .pages import ADDRESS

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "jobs.md"
pytestmark = [
    pytest.mark.real,  # schedulers have clocks of their own
    pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not next to these tests"),
]


def snippet(heading: str) -> str:
    """Return the code under a heading of the page."""
    section = re.split(r"^#+ ", PAGE.read_text().split(f"\n### {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    found = re.search(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


class Shop:
    """What the page leaves out: the report, which counts how often it is made, and the broker or queue."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        self._url = url
        self._patch = monkeypatch

    async def report(self) -> None:
        self.made += 1

    def run(self, heading: str, **tasks: Any) -> dict[str, Any]:
        """Run the code under a heading, as a process of its own would."""
        for name, content in (("nightly", {"report": self.report}), ("tasks", tasks)):
            module = ModuleType(name)
            module.__dict__.update(content)
            self._patch.setitem(sys.modules, name, module)
        names: dict[str, Any] = {"__name__": __name__}
        exec(compile(snippet(heading).replace(ADDRESS, self._url), f"{PAGE}, {heading}", "exec"), names)
        return names


@pytest.fixture
def shop(server: EmbeddedServer, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> Shop:
    return Shop(server.url, monkeypatch)


async def test_apscheduler(shop: Shop) -> None:
    pytest.importorskip("apscheduler.schedulers.asyncio")
    events = pytest.importorskip("apscheduler.events")
    ended: list[Any] = []
    running = []
    coordinators = []
    for _ in range(2):
        names = shop.run("APScheduler 3")
        coordinators.append(names["sync"])
        scheduler = names["scheduler"]
        scheduler.add_listener(ended.append, events.EVENT_JOB_EXECUTED | events.EVENT_JOB_ERROR)
        (job,) = scheduler.get_jobs()
        job.modify(next_run_time=datetime.now(UTC), misfire_grace_time=None)
        scheduler.start()
        running.append(scheduler)
    await wait_until(lambda: len(ended) == 2, FAST, timeout=60)
    for scheduler in running:
        scheduler.shutdown()
    for sync in coordinators:
        await sync.aclose()
    assert [event.exception for event in ended] == [None, None]
    assert shop.made == 1


async def test_taskiq(shop: Shop) -> None:
    taskiq = pytest.importorskip("taskiq")
    sources = pytest.importorskip("taskiq.schedule_sources")
    for _ in range(2):
        broker = taskiq.InMemoryBroker(await_inplace=True)
        shop.run("taskiq", broker=broker)
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
        settings = shop.run("SAQ", queue=queue)["settings"]
        worker = saq.Worker(**settings)
        assert list(worker.functions) == ["nightly"]
        await settings["startup"](worker.context)
        await worker.functions["nightly"](worker.context)
        await settings["shutdown"](worker.context)
        await queue.disconnect()
    assert shop.made == 1
