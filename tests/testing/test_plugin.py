"""The pytest plugin, in runs of their own: every way to run asynchronous tests, with warnings as errors."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from redis_sync_aio import embedded
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing._fixtures import claim, database_of

ROOT = Path(embedded.__file__).parents[1]

TESTS = """
import pytest
from redis_sync_aio import AsyncLock

{marks}

@{fixture}
async def lease(sync_coordinator):
    async with sync_coordinator.lock("held by a fixture") as lease:
        yield lease

async def test_a_client_and_a_coordinator(sync_client, sync_coordinator, lease):
    assert await sync_client.dbsize() > 0
    async with sync_coordinator.lock("x") as other, AsyncLock(sync_client, "implicit"):
        assert await sync_client.get("x") == other.token.encode()
    lease.check()
    await sync_client.set("left", 1)

@pytest.mark.parametrize("again", [1, 2])
async def test_each_test_begins_with_an_empty_database(sync_client, again):
    assert await sync_client.dbsize() == 0
    await sync_client.set("left", 1)

async def test_a_coordinator_alone(sync_coordinator):
    async with sync_coordinator.lock("x"):
        pass

def test_one_without_a_loop(sync_client, sync_coordinator):
    assert sync_coordinator.client is sync_client
"""
PLAIN = """
import asyncio

def test_loops_of_the_test_itself(sync_client, sync_coordinator):
    async def first():
        async with sync_coordinator.lock("x"):
            assert await sync_client.get("x")

    async def second():
        assert await sync_client.get("x") is None

    asyncio.run(first())
    asyncio.run(second())

def test_a_loop_in_a_thread_that_outlives_the_test(sync_client, sync_coordinator):
    import threading

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def use():
        async with sync_coordinator.lock("x"):
            assert await sync_client.get("x")

    asyncio.run_coroutine_threadsafe(use(), loop).result(60)
    global ending
    ending = loop

def test_it_ends(sync_client):
    ending.call_soon_threadsafe(ending.stop)
"""
PLUGIN = "redis_sync_aio_pytest"
ASYNCIO = ("-p", "pytest_asyncio.plugin")
ANYIO_OPTIONS = ("-p", "anyio.pytest_plugin")
ANYIO = 'pytestmark = pytest.mark.anyio\n\n@pytest.fixture\ndef anyio_backend():\n    return "asyncio"\n'


def run(directory: Path, *options: str, **files: str) -> tuple[int, str]:
    """Run pytest on files, with our plugin and those in ``options``; return its exit code and what it printed."""
    for name, content in files.items():
        (directory / f"{name}.py").write_text(content)
    (directory / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-p", PLUGIN]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    for inherited in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST"):
        environment.pop(inherited, None)
    done = subprocess.run(
        [*command, *options], cwd=directory, env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    return done.returncode, done.stdout + done.stderr


def check(result: tuple[int, str], *said: str, code: int = 0) -> None:
    returned, printed = result
    assert returned == code, printed
    for words in said:
        assert words in printed, printed


def asyncio_options(mode: str, scope: str) -> tuple[str, ...]:
    scopes = (f"asyncio_default_{of}_loop_scope={scope}" for of in ("test", "fixture"))
    return *ASYNCIO, *(word for option in (f"asyncio_mode={mode}", *scopes) for word in ("-o", option))


def file_of(marks: str = "import pytest_asyncio", fixture: str = "pytest_asyncio.fixture") -> str:
    return TESTS.format(marks=marks, fixture=fixture)


# The mark is an error on a test that is no coroutine.
STRICT = file_of("import pytest_asyncio\npytestmark = pytest.mark.asyncio").replace(
    "def test_one_without", "async def test_one_without"
)
XDIST = ("-p", "xdist.plugin", "-n", "2")
SCOPED = """
from redis_sync_aio.testing import make_fixtures

module_client, module_coordinator = make_fixtures("module", prefix="module", client={"decode_responses": True})
sync_client, sync_coordinator = make_fixtures(coordinator={"prefix": "own:"}, clean=False)
"""
SCOPED_TESTS = """
import pytest_asyncio

async def test_first(module_coordinator, module_client):
    global first
    first = module_coordinator
    async with module_coordinator.lock("x") as lease:
        assert await module_client.get("x") == lease.token
    await module_client.set("kept", "yes")

async def test_second(module_coordinator, module_client, sync_coordinator):
    assert module_coordinator is first and sync_coordinator.client is not module_client
    assert await module_client.get("kept") == "yes"
    async with sync_coordinator.lock("x") as lease:
        assert ":own:" in lease.token
"""
UNUSED = """
import sys

def test_nothing_of_ours_is_imported():
    assert not [name for name in sys.modules if name.partition(".")[0] in ("redis", "redis_sync_aio", "hiredis")]
"""
NO_LEAK = ("-o", "sync_fail_on_leak=true")
RUNS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "strict, function": ("5 passed", (*asyncio_options("strict", "function"), *NO_LEAK), {"test_it": STRICT}),
    "no fixture is used, nothing of ours is imported": ("1 passed", (), {"test_it": UNUSED}),
    **{
        f"{mode}, {scope}": ("5 passed", (*asyncio_options(mode, scope), *NO_LEAK), {"test_it": tests})
        for mode, tests in (("strict", STRICT), ("auto", file_of()))
        for scope in ("module", "session", "function")
        if (mode, scope) != ("strict", "function")
    },
    "anyio": ("5 passed", (*ANYIO_OPTIONS, *NO_LEAK), {"test_it": file_of(ANYIO, "pytest.fixture")}),
    "no plugin for asynchronous tests": ("3 passed", NO_LEAK, {"test_it": PLAIN}),
    "xdist, with a server for each worker": (
        "10 passed",
        (*XDIST, *asyncio_options("auto", "function")),
        {"test_it": file_of(), "test_other": file_of()},
    ),
    "fixtures of another scope": (
        "2 passed",
        asyncio_options("auto", "module"),
        {"conftest": SCOPED, "test_it": SCOPED_TESTS},
    ),
}


@pytest.mark.parametrize(
    "which", [pytest.param(name, marks=() if number < 2 else pytest.mark.ci) for number, name in enumerate(RUNS)]
)
def test_every_way_to_run_tests(tmp_path: Path, which: str) -> None:
    said, options, files = RUNS[which]
    check(run(tmp_path, *options, **files), said)


EXAMPLES = ROOT / "examples"


@pytest.mark.ci
@pytest.mark.skipif(not EXAMPLES.exists(), reason="the examples are not next to these tests")
def test_the_example_passes(tmp_path: Path) -> None:
    files = {name: (EXAMPLES / f"{name}.py").read_text() for name in ("seats", "test_seats")}
    check(run(tmp_path, *asyncio_options("strict", "function"), *NO_LEAK, **files), "3 passed")


# -- one server that others use, too -------------------------------------------------------------------------------


def test_urls_of_databases() -> None:
    assert database_of("redis://host:7000", 0) == "redis://host:7000/0"
    assert database_of("redis://:secret@host/4", 3) == "redis://:secret@host/7"
    assert database_of("unix:///tmp/a.sock?db=2&username=me", 1) == "unix:///tmp/a.sock?db=3&username=me"


MEANWHILE = """
import pathlib, subprocess, sys
import pytest, redis

async def test_all_connections_are_closed(sync_client, sync_coordinator):
    async with sync_coordinator.lock("x"):
        pass
    await sync_client.client_kill_filter(_type="normal", skipme=True)

async def test_another_run(sync_client, sync_server, request):
    await sync_client.set("ours", 1)
    command = [sys.executable, *sys.argv, "--sync-url", request.config.getoption("sync_url"), "--sync-flush"]
    if not request.config.getoption("keyword"):
        done = subprocess.run([*command, "-k", "another"], capture_output=True, text=True, timeout=120)
        print(done.stdout, done.stderr)
        assert "1 passed, 1 deselected" in done.stdout
        assert sync_server.url.endswith("/1")
    else:
        assert sync_server.url.endswith("/2")
    assert await sync_client.keys() == [b"ours"]
"""


@pytest.mark.ci
def test_two_runs_on_one_server_do_not_see_each_other(tmp_path: Path) -> None:
    """Even after the first one has lost its connections. The next run has the first database again."""
    with EmbeddedServer(port=0) as server:
        options = (*asyncio_options("auto", "function"), "--sync-url", f"{server.url}/1")
        for _ in range(2):
            check(run(tmp_path, *options, test_it=MEANWHILE), "2 passed")


def test_runs_that_begin_together_have_databases_of_their_own() -> None:
    with EmbeddedServer(port=0) as server, ThreadPoolExecutor(6) as threads, ExitStack() as stack:
        given = list(threads.map(claim, [server.url] * 6))
        last = claim(f"{server.url}/15")
        for it in (*given, last):
            stack.callback(it.admin.close)
        assert len({it.url for it in given}) == 6
        with pytest.raises(pytest.fail.Exception, match="other runs use all 1 databases from redis://127"):
            claim(last.url)


@pytest.mark.ci
@pytest.mark.real
async def test_a_given_server_is_not_emptied_unless_that_is_allowed(tmp_path: Path) -> None:
    """Keys that were there stay; keys that a test leaves are deleted; the message shows no password."""
    tests, options = file_of(), asyncio_options("auto", "function")
    async with EmbeddedServer(port=0) as server, server.client() as client:
        with_password = server.url.replace("redis://", "redis://default:secret@")
        await client.config_set("requirepass", "secret")
        url = ("--sync-url", with_password)
        check(run(tmp_path, *options, *url, test_it=tests), "5 passed")
        assert await client.dbsize() == 0
        await client.set("precious", 1)
        code, printed = run(tmp_path, *options, *url, test_it=tests)
        check((code, printed), "precious", "--sync-flush", "5 errors", code=1)
        assert "secret" not in printed, printed
        assert await client.get("precious") == b"1"
        check(run(tmp_path, *options, *url, "--sync-flush", test_it=tests), "5 passed")
        assert await client.get("precious") is None


LEAKS = """
import asyncio
from redis_sync_aio import AsyncLock, Coordinator

kept = []

async def test_a_lease(sync_coordinator):
    kept.append(await sync_coordinator.lock("lease").acquire())

async def test_a_lease_of_the_client(sync_client):
    kept.append(await AsyncLock(sync_client, "implicit").acquire())

async def test_a_forgotten_lease(sync_coordinator):
    await sync_coordinator.lock("forgotten").acquire()

async def test_a_coordinator(sync_client):
    kept.append(Coordinator(sync_client))
    async with kept[-1].lock("x"):
        pass

async def test_a_subscription(sync_client):
    kept.append(sync_client.pubsub())
    await kept[-1].subscribe("channel")

async def test_nothing(sync_client, sync_coordinator):
    async with sync_coordinator.lock("x"):
        await sync_client.ping()

async def test_a_waiting_task(sync_coordinator):
    lock = sync_coordinator.lock("waited for")
    async with lock:
        kept.append(asyncio.create_task(lock.acquire(), name="waiter"))
        while not (await lock.statistics()).waiting:
            pass
        kept.append(await sync_coordinator.semaphore("permits", limit=2).acquire(identity="me"))
    kept.append(await kept[-2])
"""


BEFORE_THE_END = """
import asyncio

import pytest
from redis_sync_aio import Coordinator
{marks}
kept = []

async def test_tasks(sync_coordinator):
    lock = sync_coordinator.lock("sync")
    asked = asyncio.Event()

    async def hold():
        async with lock:
            asked.set()
            await asyncio.Event().wait()

    kept.append(asyncio.create_task(hold(), name="holder"))
    await asked.wait()
    shared = sync_coordinator.lock("sync", share=True)
    kept.extend(asyncio.create_task(lock.acquire(), name=f"waiter {{number}}") for number in range(4))
    kept.extend(asyncio.create_task(shared.acquire(), name=f"sharing {{number}}") for number in range(4))
    while sum(it.waiting for it in sync_coordinator.statistics()) < 8:
        await asyncio.sleep(0)

async def test_a_coordinator_that_only_asks(sync_client):
    kept.append(Coordinator(sync_client))
    assert not await kept[-1].lock("sync").locked()

async def test_all_tasks_are_cancelled_by_the_test_itself(sync_coordinator):
    await sync_coordinator.lock("sync").locked()
    waiting = asyncio.create_task(asyncio.Event().wait())
    await asyncio.sleep(0)
    for task in asyncio.all_tasks() - {{asyncio.current_task()}}:
        if task is waiting or task.get_name().startswith("redis_sync_aio testing"):
            task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

async def test_a_fixture_ends_its_own_tasks(sync_coordinator, worker):
    while not (await sync_coordinator.lock("worker").statistics()).waiting:
        pass

@{fixture}
async def worker(sync_coordinator):
    async with sync_coordinator.lock("worker"):
        waiting = asyncio.create_task(sync_coordinator.lock("worker").acquire())
        yield
        waiting.cancel()
        await asyncio.wait([waiting])
"""
RUNNERS = {
    "asyncio, a loop for each test": (
        asyncio_options("auto", "function"),
        ("import pytest_asyncio", "pytest_asyncio.fixture"),
    ),
    "asyncio, one loop": (asyncio_options("auto", "session"), ("import pytest_asyncio", "pytest_asyncio.fixture")),
    "anyio": (ANYIO_OPTIONS, (ANYIO, "pytest.fixture")),
}


@pytest.mark.ci
@pytest.mark.parametrize("runner", RUNNERS)
def test_what_the_end_of_the_loop_would_hide_is_told(tmp_path: Path, runner: str) -> None:
    """The runner cancels the tasks that a test left, and closes its coordinators, before any fixture can look."""
    options, (marks, fixture) = RUNNERS[runner]
    tests = BEFORE_THE_END.format(marks=marks, fixture=fixture)
    result = run(tmp_path, *options, *NO_LEAK, test_it=tests)
    names = [f"{kind} {number}" for kind in ("waiter", "sharing") for number in range(4)]
    said = ["test_tasks: lock 'sync' is held by task 'holder'; ", *(f"waited for by task {name!r}" for name in names)]
    check(result, "4 passed, 2 errors", *said, "test_a_coordinator_that_only_asks: <Coordinator of", code=1)
    # The closing lines of pytest may say all of it again.
    told = next(line for line in result[1].splitlines() if line.startswith("left behind by test_it.py::test_tasks"))
    assert told.count("waited for by") == len(names), result[1]


@pytest.mark.ci
@pytest.mark.parametrize("scope", ["function", "session"])
def test_a_test_that_leaks_fails_if_that_is_wanted(tmp_path: Path, scope: str) -> None:
    """The failure lists all that is left."""
    said = (
        "lock 'lease' is held by a task that has ended",
        "lock 'implicit' is held by a task that has ended",
        "lock 'forgotten' is held by a task that has ended",
        "was not closed",
        "1 connections of the client's pool were not given back",
        "lock 'waited for' is held by",
        "semaphore 'permits' is held by identity 'me'",
        "left behind by test_it.py::test_a_lease: ",
    )
    result = run(tmp_path, *asyncio_options("auto", scope), *NO_LEAK, test_it=LEAKS)
    check(result, "7 passed, 6 errors", *said, code=1)


@pytest.mark.ci
@pytest.mark.parametrize("scope", ["function", "session"])
def test_leaks_are_cleared_away_if_they_are_allowed(tmp_path: Path, scope: str) -> None:
    kept = LEAKS.replace("    await sync_coordinator.lock", "    kept[:] = await sync_coordinator.lock").replace(
        '"forgotten").acquire()', '"forgotten").acquire(),'
    )
    check(run(tmp_path, *asyncio_options("auto", scope), test_it=kept), "7 passed")


STOPPED = """
import os, signal

async def test_left_paused(sync_server, sync_client):
    await sync_client.set("left", 1)
    sync_server.pause()
    assert not "as it should be"

async def test_left_dead(sync_server, sync_client):
    await sync_client.set("left", await sync_client.dbsize())
    assert await sync_client.get("left") == b"0"
    sync_server.kill()
    assert not "as it should be"

async def test_left_dead_by_others(sync_server):
    async with sync_server.client() as client:
        assert await client.ping()
    os.kill(sync_server.pid, signal.SIGKILL)
    os.waitid(os.P_PID, sync_server.pid, os.WEXITED | os.WNOWAIT)

async def test_another(sync_server, sync_client, sync_coordinator):
    sync_server.pause()
    sync_server.resume()
    async with sync_coordinator.lock("x"):
        assert await sync_client.dbsize() > 0
"""


@pytest.mark.ci
def test_a_server_that_a_test_left_paused_or_dead_serves_the_next_one(tmp_path: Path) -> None:
    """The tests that did so are named if tests are to leave nothing; the others pass in any case."""
    options = ("--timeout=60", "-p", "pytest_timeout", *asyncio_options("auto", "function"))
    check(run(tmp_path, *options, test_it=STOPPED), "2 failed, 2 passed", code=1)
    result = run(tmp_path, *options, *NO_LEAK, test_it=STOPPED)
    left = (("paused", "paused"), ("dead", "dead"), ("dead_by_others", "dead"))
    said = (f"left behind by test_it.py::test_left_{test}: sync_server was {how}" for test, how in left)
    check(result, "2 failed, 2 passed, 3 errors", *said, code=1)
