"""Fixtures of the whole suite: one real server for the session, a fresh database for every test."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib.metadata
import os
import signal
from collections.abc import AsyncIterator, Callable, Generator, Iterator

import hypothesis
import pytest
import pytest_asyncio
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from redis_sync_aio import Coordinator
from redis_sync_aio.embedded import EmbeddedServer

from .support.balance import Books
from .support.inside import tuned
from .support.options import OPTIONS, add_options, read_options
from .support.pairwise import is_in_part, sample
from .support.processes import Crew
from .support.topologies import Nodes
from .support.virtual import pytest_asyncio_loop_factories as pytest_asyncio_loop_factories

MakeClient = Callable[..., Redis]

SELDOM = 60.0
"""Seconds between two looks of a waiter that no message reaches: what wakes it sooner is a message."""

# Who starts this suite in the background may have SIGINT ignored; the programs that tests start inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What is tried at random is the same in each run, and no machine is too slow for it.
hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")

# A run starts hundreds of processes: what they import is compiled once, also where Python was told to keep nothing.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# redis-py looks its own version up in the metadata of the installation for each client: a tenth of a short test.
importlib.metadata.version = functools.cache(importlib.metadata.version)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Let everything that is collected see the options."""
    read_options(config)
    config.pluginmanager.register(Books())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only the gate runs, unless pytest was asked for it: tests marked ci, and most combinations."""
    kept = set(items)
    if not OPTIONS.run_ci:
        kept = sample([item for item in items if not item.get_closest_marker("ci")], 2 if OPTIONS.pairs else 1)
    kept = {item for item in kept if is_in_part(item.nodeid, OPTIONS.part)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count what was skipped in one line."""
    if skipped := terminalreporter.stats.get("skipped"):
        terminalreporter.write_line(f"{len(skipped)} skipped: -rs lists them with their reasons")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile: there is none, and looking for it takes a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keep all that was imported and collected out of the collector's sight: tests collect often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedServer]:
    """The server most tests share. Tests that stop, starve or reconfigure a server start their own."""
    with EmbeddedServer(port=0) as running:
        yield running


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """A cluster of three shards. A test that moves slots, or stops a node, takes that back."""
    with Nodes() as running:
        yield running


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Other processes that use locks, for the tests of a module."""
    with Crew() as crew:
        yield crew


@pytest_asyncio.fixture
async def make_client(server: EmbeddedServer) -> AsyncIterator[MakeClient]:
    """Build clients of the shared server; they are closed after the test."""
    clients: list[Redis] = []

    def make(**options: object) -> Redis:
        client = server.client(**options)
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.aclose()


@pytest_asyncio.fixture
async def redis(make_client: MakeClient) -> Redis:
    """A client of the shared server, whose database is empty."""
    client = make_client()
    await client.flushall()
    return client


@pytest_asyncio.fixture
async def sync(redis: Redis) -> AsyncIterator[Coordinator]:
    """A coordinator that the test may use and close."""
    async with tuned(redis, poll_cap=SELDOM) as coordinator:
        yield coordinator


@pytest_asyncio.fixture
async def other(make_client: MakeClient, redis: Redis) -> AsyncIterator[Coordinator]:
    """Another process, as far as the server can see: a coordinator with a client of its own."""
    async with tuned(make_client(), poll_cap=SELDOM) as coordinator:
        yield coordinator


@pytest.fixture(autouse=True)
def empty(request: pytest.FixtureRequest) -> None:
    """Empty the shared server for a test without the fixture ``redis``, which does so."""
    if "server" not in request.fixturenames or "redis" in request.fixturenames:
        return
    server = request.getfixturevalue("server")
    if isinstance(server, EmbeddedServer):  # in some modules it is one of their own
        with BlockingRedis.from_url(server.url) as client:
            client.flushall()


@pytest_asyncio.fixture(autouse=True)
async def no_task_left() -> AsyncIterator[None]:
    """P12: when a test is over, no task of ours runs, but for what closes a coordinator."""
    before = asyncio.all_tasks()
    yield
    left = [task for task in asyncio.all_tasks() - before if "redis_sync_aio" in task.get_name()]
    names = {task.get_name() for task in left}
    if "redis_sync_aio close" in names:  # it ends in time, and may connect until then: to give back what is in flight
        names -= {"redis_sync_aio close", "redis_sync_aio link"}
    assert not names, left
