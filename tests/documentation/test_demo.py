"""The demo keeps its promises: it sells every item once, notices when it does not, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from rich.console import Console

from redis_sync_aio import __version__, cli
from redis_sync_aio.cli import _demo
from redis_sync_aio.cli._demo import MS, Audit, DemoFailed, Floor, Held, Kill, Plan, Run
from redis_sync_aio.embedded import EmbeddedServer

from ..support.pairwise import first_of
from ..support.programs import command

ROOT = Path(cli.__file__).parents[2]
SMALL = ["--processes", "3", "--tasks", "4", "--items", "200", "--products", "5", "--work", "2", "--ttl", "0.5"]


def environment(*first: Path) -> dict[str, str]:
    """Warnings are errors in the demo and in its workers, too."""
    path = os.pathsep.join(str(part) for part in (*first, ROOT))
    return os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "error", "COLUMNS": "100"}


def demo(*options: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    argv = [sys.executable, "-m", "redis_sync_aio", "demo", *options]
    return subprocess.run(argv, env=env or environment(), capture_output=True, text=True, timeout=200)


def figure(output: str, name: str) -> str:
    """Return the value of one row of the table."""
    found = re.search(rf"{re.escape(name)}\s*│\s*(.*?)\s*│", output)
    assert found is not None, f"no {name!r} in:\n{output}"
    return found[1]


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds, for 100 seconds at most."""
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def server() -> Iterator[tuple[EmbeddedServer, redis.Redis]]:
    """A server of the user's, and a client to look at it."""
    with EmbeddedServer() as server, redis.Redis(unix_socket_path=server.unix_socket) as client:
        yield server, client


# -- whole runs --------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_every_item_is_sold_once_although_a_holder_is_killed() -> None:
    done = demo()
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert figure(done.stdout, "items in stock at start") == figure(done.stdout, "items sold") == "2,000"
    for wrong in ("items lost", "items sold twice", "items oversold", "fences out of order"):
        assert re.search(rf"{wrong}[^│]*│\s*0 │", done.stdout), done.stdout
    for times in ("hand-over: release to next process", "waiting for a lock"):
        assert re.fullmatch(r"median \S+ ms, longest \S+ ms", figure(done.stdout, times))
    assert re.search(r"worker \d killed \(SIGKILL\) while it held product \d+, fence \d+", done.stdout)
    assert re.search(r"product \d+ is worker \d's, fence \d+: the lease ran out", done.stdout)
    # A dead holder costs what is left of its lease (it is renewed at a third of its time), and hardly more: half a
    # second where a hand-over takes milliseconds.
    longest = float(figure(done.stdout, "hand-over: release to next process").split()[-2].replace(",", ""))
    recovery = float(figure(done.stdout, "granted again after").removesuffix(" ms").replace(",", ""))
    assert 1300 < recovery < 2500 + 10 * longest


def test_it_leaves_nothing_behind_on_a_given_server_and_prints_its_figures_as_json(
    server: tuple[EmbeddedServer, redis.Redis],
) -> None:
    done = demo("--url", server[0].url, "--json", *SMALL)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    figures = json.loads(done.stdout)
    assert (figures["books"]["sold"], figures["wrong"]) == (200, [])
    assert figures["granted_again_after"] > 0
    assert server[1].keys() == []


@pytest.mark.ci
def test_without_the_lock_it_fails_and_says_why() -> None:
    done = demo("--break-lock", *SMALL)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"FAILED: .*\d sold twice; [\d,]+ oversold", done.stdout)
    assert figure(done.stdout, "items sold twice") != "0"


# -- when it cannot be carried out ------------------------------------------------------------------------


@pytest.mark.ci
def test_a_worker_that_dies_by_itself_is_reported(server: tuple[EmbeddedServer, redis.Redis], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'redis_sync_aio.cli._demo' in sys.orig_argv:\n"
        "    os.write(2, b'the disk is on fire')\n"
        "    os._exit(3)\n"
    )
    done = demo("--url", server[0].url, *SMALL, env=environment(tmp_path))
    assert done.returncode == 2
    assert "died unexpectedly, with exit status 3" in done.stderr
    assert "the disk is on fire" in done.stderr
    assert server[1].keys() == []


SCRIPTED = """
import json, sys, time
number = json.loads(sys.stdin.readline())[2]
print('["ready"]', flush=True)
sys.stdin.readline()
for item in range({talks} if number == 1 else 0):
    time.sleep(0.5)
    print(json.dumps(["held", 1, item + 1, 0, 1, 2, 1]), flush=True)
time.sleep({silent} if number == 2 else 0)
"""
"""Workers that sell nothing: the first reports a lease twice a second, the second is silent."""


def run_scripted(monkeypatch: pytest.MonkeyPatch, path: Path, patience: float, *, talks: int, silent: float) -> Run:
    """Return the reports of scripted workers, of a demo that waits ``patience`` seconds for a line."""
    script = SCRIPTED.format(talks=talks, silent=silent)
    start = f"import os, sys\nif 'redis_sync_aio.cli._demo' in sys.orig_argv:\n    exec({script!r})\n    os._exit(0)\n"
    (path / "sitecustomize.py").write_text(start)
    monkeypatch.setenv("PYTHONPATH", str(path))
    monkeypatch.setattr(_demo, "STARTING", patience)
    plan = Plan(processes=2, work=0, ttl=0.2, kill=False)
    return asyncio.run(Floor(plan, Console(quiet=True)).run("redis://unused", "unused"))


@pytest.mark.ci
def test_a_worker_may_wait_for_its_turn_while_others_sell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert len(run_scripted(monkeypatch, tmp_path, 5.0, talks=24, silent=12.0).held) == 24


@pytest.mark.ci
def test_workers_that_all_fall_silent_end_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(DemoFailed, match="the workers fell silent"):
        run_scripted(monkeypatch, tmp_path, 1.0, talks=1, silent=600.0)


@pytest.mark.ci
def test_ctrl_c_ends_the_workers_and_cleans_up(server: tuple[EmbeddedServer, redis.Redis]) -> None:
    argv = [sys.executable, "-m", "redis_sync_aio", "demo", "--url", server[0].url]
    env = environment() | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        while "killed" not in running.stdout.readline():  # in the midst of it
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=100)
    assert (running.returncode, errors) == (130, "")
    assert server[1].keys() == []
    assert len(server[1].client_list()) == 1


@pytest.mark.ci
def test_the_workers_die_with_the_demo(server: tuple[EmbeddedServer, redis.Redis]) -> None:
    # Sales that take longer than this test: the workers have nothing to tell, and so no broken pipe to notice.
    argv = [sys.executable, "-m", "redis_sync_aio", "demo", "--no-kill", "--work", "60000", "--url", server[0].url]
    with subprocess.Popen(argv, env=environment(), stdout=subprocess.DEVNULL) as running:
        try:
            wait_for(lambda: len(server[1].keys("*:fence")) > 5)
        finally:
            running.kill()
    wait_for(lambda: len(server[1].client_list()) == 1)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--version", 0, __version__),
        ("-h", 0, "demo"),
        ("--help", 0, "demo"),
        ("demo --url unix:///nowhere/none.sock", 2, "The demo could not be carried out: cannot reach unix:"),
        ("demo --processes 1", 2, "none to sell"),
        ("demo --url http://localhost", 2, "--url"),
        ("demo --url redis+cluster://localhost", 2, "one server"),
        ("demo --items 0", 2, "--items"),
    ],
)
def test_it_tells_what_it_is_and_what_it_cannot_do(words: str, code: int, said: str) -> None:
    done = command(*words.split())
    assert done.returncode == code
    assert said in " ".join((done.stderr if code else done.stdout).split())
    assert code or not done.stderr


@pytest.mark.parametrize("missing", first_of("typer", "rich"))
def test_it_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from redis_sync_aio.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr == f"redis-sync-aio needs {missing}: run  pip install 'redis_sync_aio[cli]'\n"


# -- the books ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stocked", "left", "sales", "faults"),
    [
        (3, 0, [(3, 10), (2, 11), (1, 12)], []),
        (3, 0, [(3, 10), (1, 12)], ["1 lost (neither sold nor in stock)"]),
        (3, 1, [(3, 10), (2, 11)], ["1 left unsold"]),
        (3, 0, [(3, 10), (2, 12), (1, 11)], ["1 fence out of order"]),
        (3, 0, [(3, 10), (2, 11), (1, 11)], ["1 fence out of order"]),
        (3, 0, [(3, 10), (3, 11), (1, 12)], ["1 lost (neither sold nor in stock)", "1 sold twice"]),
        (2, -1, [(2, 10), (1, 11), (0, 12)], ["1 oversold (more sales than stock)"]),
    ],
)
def test_the_audit_finds_every_fault(stocked: int, left: int, sales: list[tuple[int, int]], faults: list[str]) -> None:
    books = Audit()
    books.add(stocked, left, sales)
    assert books.faults() == faults


# -- the figures -------------------------------------------------------------------------------------------


def held(process: int, asked: int, got: int, released: int) -> Held:
    return Held(process, 1, 1, asked * MS, got * MS, released * MS, item=1)


def test_handovers_are_between_processes_and_to_a_waiter() -> None:
    run = Run(0, [
        held(1, 0, 0, 10),
        held(2, 5, 12, 20),  # 2 ms after the release it waited for
        held(2, 6, 21, 30),  # in the same process
        held(1, 35, 36, 40),  # it was free
    ])  # fmt: skip
    assert run.handovers() == [2 * MS]
    assert run.waits() == [0, 7 * MS, 15 * MS, 1 * MS]


def test_the_recovery_is_the_time_to_the_next_grant_of_the_lock() -> None:
    kill = Kill(process=2, product=1, fence=1, at=100 * MS)
    other = Held(1, 2, 9, 0, 110 * MS, 120 * MS, 5)  # another lock
    run = Run(0, [held(3, 95, 2400, 2410), held(1, 95, 2001, 2010), held(2, 0, 10, 20), other], kill)
    assert run.recovery() == 1901 * MS
    assert Run(0, [held(2, 0, 10, 20), other], kill).recovery() is None
