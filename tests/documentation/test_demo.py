"""The demo keeps its promises: it sells every item once, notices when it does not, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import redis
from redis.asyncio import Redis
from rich.console import Console

from redis_sync_aio import AsyncLock, Coordinator, __version__, cli
from redis_sync_aio.cli._demo.command import Display, Floor, Plan, timeline
from redis_sync_aio.cli._demo.run import (
    MS,
    Audit,
    Kill,
    ReportedGrant,
    Run,
    Sale,
    Seen,
    faults,
    jain,
    lock_name,
    measure,
    percentile,
)
from redis_sync_aio.embedded import EmbeddedServer

from ..support.pairwise import first_of
from ..support.proxy import DELAY_REPLY, FaultProxy
from ..support.wired import READ

pytestmark = pytest.mark.timing
ROOT = Path(cli.__file__).parents[2]
SMALL = ["--processes", "3", "--tasks", "4", "--items", "200", "--products", "5", "--work", "2", "--ttl", "0.5"]
SVG = "{http://www.w3.org/2000/svg}"


def environment(*first: Path) -> dict[str, str]:
    """Warnings are errors in the demo and in its workers, too."""
    path = os.pathsep.join(str(part) for part in (*first, ROOT))
    return os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "error", "COLUMNS": "100"}


def demo(*options: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [sys.executable, "-m", "redis_sync_aio", "demo", *options]
    return subprocess.run(command, env=env or environment(), capture_output=True, text=True, timeout=200)


def figure(output: str, name: str) -> str:
    """Return the value of one row of the table."""
    found = re.search(rf"{re.escape(name)}\s*│\s*(.*?)\s*│", output)
    assert found is not None, f"no {name!r} in:\n{output}"
    return found[1]


def bars(path: Path) -> int:
    """Return how many sales the picture shows; it must be well-formed."""
    return len(ElementTree.parse(path).findall(f".//{SVG}rect[@class='hold']"))


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
def test_every_item_is_sold_once_although_a_holder_is_killed(tmp_path: Path) -> None:
    started = time.monotonic()
    done = demo("--out", str(tmp_path / "t.svg"))
    seconds = time.monotonic() - started

    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert figure(done.stdout, "items in stock at start") == figure(done.stdout, "items sold") == "2,000"
    for wrong in ("items lost", "items sold twice", "items oversold", "fences out of order", "two workers"):
        assert re.search(rf"{wrong}[^│]*│\s*0 │", done.stdout), done.stdout
    assert re.fullmatch(r"p50 \S+ ms   p99 \S+ ms", figure(done.stdout, "hand-over: release to next process"))
    assert re.fullmatch(r"p50 \S+ ms   p99 \S+ ms", figure(done.stdout, "waiting for a lock"))
    assert float(figure(done.stdout, "fairness between tasks (Jain; best: 1)")) > 0.9
    # A dead holder costs what is left of its lease (it is renewed at a third of its time), and hardly more.
    recovery = float(figure(done.stdout, "granted again after").removesuffix(" ms").replace(",", ""))
    assert 1300 < recovery < 2500
    assert bars(tmp_path / "t.svg") >= 1990  # the last words of the worker that is killed may be missing
    assert seconds < 20


@pytest.mark.ci
def test_it_leaves_nothing_behind_on_a_given_server(server: tuple[EmbeddedServer, redis.Redis], tmp_path: Path) -> None:
    done = demo("--url", server[0].url, "--out", str(tmp_path / "t.svg"), *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED: each of 200 items" in done.stdout
    assert server[1].keys() == []


@pytest.mark.ci
def test_without_a_kill(tmp_path: Path) -> None:
    done = demo("--no-kill", "--processes", "1", "--tasks", "3", "--items", "31", "--products", "7", "--work", "0",
                "--out", str(tmp_path / "t.svg"))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert figure(done.stdout, "items sold") == "31"
    assert "crash" not in done.stdout
    assert bars(tmp_path / "t.svg") == 31


@pytest.mark.ci
def test_it_draws_to_the_temporary_directory(tmp_path: Path) -> None:
    done = demo("--no-kill", *SMALL, env=environment() | {"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = tmp_path.glob("*.svg")
    assert f"Timeline: {path}\n" in done.stdout


def test_figures_as_json(tmp_path: Path) -> None:
    done = demo("--json", "--out", str(tmp_path / "t.svg"), *SMALL)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    figures = json.loads(done.stdout)
    assert (figures["books"]["sold"], figures["wrong"]) == (200, [])
    assert figures["granted_again_after"] > 0


@pytest.mark.ci
def test_without_the_lock_it_fails_and_says_why(tmp_path: Path) -> None:
    done = demo("--break-lock", *SMALL, "--out", str(tmp_path / "t.svg"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"FAILED: .*\d sold twice; [\d,]+ oversold", done.stdout)
    assert "two workers were in the same section" in done.stdout
    assert figure(done.stdout, "items sold twice") != "0"
    assert bars(tmp_path / "t.svg") > 200


# -- when it cannot be carried out ------------------------------------------------------------------------


@pytest.mark.ci
def test_a_worker_that_dies_by_itself_is_reported(server: tuple[EmbeddedServer, redis.Redis], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'redis_sync_aio.cli._demo.run' in sys.orig_argv:\n"
        "    os.write(2, b'the disk is on fire')\n"
        "    os._exit(3)\n"
    )
    done = demo("--url", server[0].url, *SMALL, env=environment(tmp_path))
    assert done.returncode == 2
    assert "died unexpectedly, with exit status 3" in done.stderr
    assert "the disk is on fire" in done.stderr
    assert server[1].keys() == []


@pytest.mark.ci
def test_ctrl_c_ends_the_workers_and_cleans_up(server: tuple[EmbeddedServer, redis.Redis]) -> None:
    command = [sys.executable, "-m", "redis_sync_aio", "demo", "--url", server[0].url]
    env = environment() | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
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
    command = [sys.executable, "-m", "redis_sync_aio", "demo", "--no-kill", "--work", "60000", "--url", server[0].url]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL) as running:
        try:
            wait_for(lambda: len(server[1].keys("*:fence")) > 5)
        finally:
            running.kill()
    wait_for(lambda: len(server[1].client_list()) == 1)


async def test_a_late_answer_does_not_make_the_lease_of_the_dead_longer(
    server: tuple[EmbeddedServer, redis.Redis],
) -> None:
    """Else the demo would say on a busy machine that its lock was granted to the next one too early."""
    plan = Plan(2, 1, 1, 1, work=0, ttl=1, seed=1, kill=True, locked=True)
    async with (
        FaultProxy(server[0].unix_socket) as proxy,
        Redis(host=proxy.host, port=proxy.port) as client,
        Coordinator(client) as sync,
    ):
        floor = Floor(plan, "demo", client, sync, Display(Console(), plan.stock))
        await AsyncLock(sync, lock_name("demo", 1), ttl=30, auto_renew=False).acquire()
        ends_by = time.monotonic_ns() + 30_000 * MS
        proxy.on(READ, DELAY_REPLY(0.3))
        seen = await floor._look(1)
        assert seen is not None
        assert seen.ends <= ends_by + MS  # what is left is told in milliseconds


@pytest.mark.parametrize(
    ("option", "expected"),
    [("--version", __version__), pytest.param("-h", "demo", marks=pytest.mark.ci), ("--help", "demo")],
)
def test_it_tells_what_it_is(option: str, expected: str) -> None:
    command = [sys.executable, "-m", "redis_sync_aio", option]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert expected in done.stdout


def test_no_server_there(tmp_path: Path) -> None:
    done = demo("--url", f"unix://{tmp_path}/none.sock", *SMALL)
    assert done.returncode == 2
    assert done.stderr.startswith("The demo could not be carried out: cannot reach unix:")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "1"], "nobody to sell"),
        pytest.param(["--url", "http://localhost"], "--url", marks=pytest.mark.ci),
        pytest.param(["--url", "redis+cluster://localhost"], "one server", marks=pytest.mark.ci),
        pytest.param(["--out", "/nowhere/at/all.svg"], "no directory", marks=pytest.mark.ci),
        pytest.param(["--items", "0"], "--items", marks=pytest.mark.ci),
    ],
)
def test_bad_options(options: list[str], message: str) -> None:
    done = demo(*options)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


@pytest.mark.parametrize("missing", first_of("typer", "rich"))
def test_it_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from redis_sync_aio.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr == f"redis-sync-aio needs {missing}: run  pip install 'redis_sync_aio[cli]'\n"


# -- the books ---------------------------------------------------------------------------------------------


def audit(stocked: int, left: int, *sales: tuple[int, int]) -> Audit:
    result = Audit()
    result.add(stocked, left, [Sale(item, fence) for item, fence in sales])
    return result


def complaints(books: Audit) -> list[str]:
    return faults(books, measure(run_of()))


def test_good_books() -> None:
    assert complaints(audit(3, 0, (3, 10), (2, 11), (1, 12))) == []


@pytest.mark.parametrize(
    ("books", "complaint"),
    [
        (audit(3, 0, (3, 10), (1, 12)), "1 lost (neither sold nor in stock)"),
        (audit(3, 1, (3, 10), (2, 11)), "1 left unsold"),
        (audit(3, 0, (3, 10), (2, 12), (1, 11)), "1 fence out of order"),
        (audit(3, 0, (3, 10), (2, 11), (1, 11)), "1 fence out of order"),
    ],
)
def test_bad_books(books: Audit, complaint: str) -> None:
    assert complaints(books) == [complaint]


def test_an_item_sold_twice_and_one_lost() -> None:
    assert complaints(audit(3, 0, (3, 10), (3, 11), (1, 12))) == ["1 lost (neither sold nor in stock)", "1 sold twice"]


def test_more_sold_than_there_was() -> None:
    books = audit(2, -1, (2, 10), (1, 11), (0, 12))
    assert complaints(books) == ["1 oversold (more sales than stock)"]


# -- the figures -------------------------------------------------------------------------------------------


def run_of(*grants: ReportedGrant, kill: Kill | None = None) -> Run:
    return Run(0, 10_000 * MS, True, 0.25, list(grants), 0, kill)


def grant(process: int, asked: int, got: int, released: int | None, fence: int = 1) -> ReportedGrant:
    end = None if released is None else released * MS
    return ReportedGrant(process, 1, 1, fence, asked * MS, got * MS, end, item=1)


def test_handovers_are_between_processes_and_to_a_waiter() -> None:
    run = run_of(
        grant(1, 0, 0, 10),
        grant(2, 5, 12, 20),  # 2 ms after the release it waited for
        grant(2, 6, 21, 30),  # in the same process
        grant(1, 35, 36, 40),  # it was free
    )
    assert measure(run).handovers == [2 * MS]
    assert measure(run).waits == [0, 7 * MS, 15 * MS, 1 * MS]


def test_two_in_one_section_are_noticed() -> None:
    assert measure(run_of(grant(1, 0, 0, 10), grant(2, 0, 10, 20))).overlaps == 0
    assert measure(run_of(grant(1, 0, 0, 10), grant(2, 0, 9, 20))).overlaps == 1
    assert measure(run_of(grant(1, 0, 0, 30), grant(2, 0, 5, 6), grant(3, 0, 7, 8))).overlaps == 2


def test_the_locks_a_killed_worker_held() -> None:
    kill = Kill(process=2, product=1, at=100 * MS, seen=(Seen(1, 7, 2000 * MS), Seen(2, 9, 2000 * MS)))
    other = ReportedGrant(1, 1, 2, 9, 0, 95 * MS, 110 * MS, 5)  # product 2 was held by a worker that lived
    run = run_of(grant(2, 0, 90, None, fence=7), grant(1, 95, 2001, 2010, fence=8), other, kill=kill)
    assert list(run.orphans) == [1]
    assert run.orphans[1].next == 2001 * MS
    assert run.held_until(run.grants[0]) == kill.at
    assert measure(run).overlaps == 0


def test_a_grant_before_the_lease_ended() -> None:
    kill = Kill(process=2, product=1, at=100 * MS, seen=(Seen(1, 7, 2000 * MS),))
    by_a_survivor = Kill(process=2, product=2, at=100 * MS, seen=kill.seen)
    assert not run_of(grant(1, 95, 150, 160, fence=8), kill=by_a_survivor).orphans
    # But this one was held by the dead worker for certain: so the lock was given away too early.
    run = run_of(grant(2, 0, 90, None, fence=7), grant(1, 95, 150, 160, fence=8), kill=kill)
    assert faults(Audit(), measure(run)) == ["1 lock granted before the killed holder's lease had ended"]


def test_percentiles_and_fairness() -> None:
    assert percentile([3, 1, 2, 4], 50) == 2
    assert percentile([3, 1, 2, 4], 99) == 4
    assert percentile([5], 50) == 5
    assert jain([2, 2, 2]) == 1.0
    assert jain([6, 0, 0]) == pytest.approx(1 / 3)


def test_the_picture_marks_the_kill() -> None:
    kill = Kill(process=2, product=1, at=100 * MS, seen=(Seen(1, 7, 9000 * MS),))
    run = run_of(grant(2, 0, 90, None, fence=7), grant(1, 95, 9001, 9010, fence=8), kill=kill)
    texts = [text.text or "" for text in ElementTree.fromstring(timeline(run, "a < b")).iter(f"{SVG}text")]
    assert "a < b" in texts
    assert "worker 2 killed (SIGKILL) at 100 ms while it holds product 1" in texts
    assert "granted again after 8,901 ms" in texts
    assert "held by worker 2 (killed)" in texts
