"""`run` holds a lock while a program runs, as flock(1) does, and ends the program when the lock is lost."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from redis_sync_aio import Backoff, Coordinator, wait_until
from redis_sync_aio.embedded import EmbeddedServer

from ..support.embedded import alive, eventually
from ..support.pairwise import first_of
from ..support.programs import COMMAND, PATIENCE, command, command_process, environment, piped, unread
from ..support.views import holder_of
from .terminals import program_in_terminal, terminal

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("redis")]
SOON = Backoff(initial=0.01, cap=0.05)
LOST = 75
TTL = 3600
"""Seconds: the event loop of a test stands still while a program runs, so it does not renew."""
NAME = "cli:job"
COUNTS = """
import os, signal, sys, threading
seen, numbers = [], (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def listen():
    while True:
        seen.append(signal.sigwait(numbers))
        say("got", int(seen[-1]))
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
threading.Thread(target=listen, daemon=True).start()
say("ready", os.getpid())
for line in sys.stdin:
    if line == "end\\n":
        break
    say("read", line.rstrip())
say("seen", *map(int, seen))
"""
"""Tells each signal that comes, and in the end all of them. A handler of Python would not run for a signal that comes
just before a read begins, until that read has ended. Each line is one write: print() writes its end separately, and the
other thread, or what a terminal echoes, may come in between."""
FAMILY = """
import signal, subprocess, sys, time
if {stubborn}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("ready", child.pid, flush=True)
time.sleep(600)
"""
"""A program with a child of its own, to which a SIG_IGN is handed down."""


def program(source: str) -> list[str]:
    return ["--", sys.executable, "-u", "-c", source]


@contextmanager
def running(*words: str, url: str, stderr: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """Start ``run WORDS`` with pipes; it is killed at the end of the block, and so is its program."""
    with piped("run", *words, errors=stderr, REDIS_URL=url) as process:
        try:
            yield process
        finally:
            process.kill()


def reads(process: subprocess.Popen[str], word: str) -> int:
    """Return the number in the next line, which has to begin with that word."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(f"{word} "), line + (process.stderr.read() if process.stderr and not line else "")
    return int(line.split()[1])


# -- exit codes, and what the program sees -----------------------------------------------------------------


REFUSED = {
    f"{NAME} -- redis-sync-aio-nope": (127, "nothing was locked"),
    f"{NAME} -- /": (126, "nothing was locked"),
    f"-n --timeout 1 {NAME} -- echo ran": (2, ""),
    f"-s -x {NAME} -- echo ran": (2, ""),
    f"-s --limit 2 {NAME} -- echo ran": (2, ""),
    f"--weight 2 {NAME} -- echo ran": (2, ""),
    f"--limit 2 --weight 3 {NAME} -- echo ran": (2, ""),
    f"{NAME} ls -l": (2, "Write -- before COMMAND"),
    f"{NAME} --on-lost stop -- ls": (2, "'--on-lost': 'stop' is not one of 'term', 'kill', 'ignore'. Try 'redis-sync"),
}
"""Words, the exit code, and a part of the one line that is said."""


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_run_is_refused_before_anything_is_connected(words: str) -> None:
    code, said = REFUSED[words]
    done = command("run", *shlex.split(words), REDIS_URL="unix:///nowhere")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert said in done.stderr


async def test_it_holds_the_lock_while_the_program_runs(server: EmbeddedServer, redis: Redis) -> None:
    """The fence, the name and the token are in the program's environment; standard input is the program's."""
    tell = "import json, os; print(json.dumps({k[15:]: v for k, v in os.environ.items() if 'AIO_' in k}), flush=True); "
    async with Coordinator(redis) as sync:
        with running(NAME, "--json", *program(tell + "print(input())"), url=server.url) as process:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            seen = await sync.lock(NAME).statistics()
            assert (told["NAME"], told["FENCE"], told["TOKEN"]) == (NAME, str(seen.fence), holder_of(seen))
            out, err = process.communicate("hello\n", timeout=PATIENCE)
        assert (process.returncode, out) == (0, "hello\n")
        assert not await sync.lock(NAME).locked()
    report = json.loads(err)
    assert (report["name"], report["exit"], report["fence"], report["lost"]) == (NAME, 0, seen.fence, None)
    assert report["held"] >= 0


# -- waiting -----------------------------------------------------------------------------------------------


async def test_a_lock_that_is_taken(server: EmbeddedServer, sync: Coordinator) -> None:
    """-n and --timeout give up with 1, or what -E says, and the program is not run."""
    async with sync.lock(NAME, ttl=TTL):
        for words, code in (
            (["-n"], 1),
            (["-n", "-E", "42"], 42),
            (["--timeout", "0.1"], 1),
            (["-w", "0.1", "-E", "0"], 0),
            (["-w", "0"], 1),
        ):
            done = command("run", *words, NAME, "--", "echo", "ran", REDIS_URL=server.url)
            assert (done.returncode, done.stdout) == (code, "")
            assert done.stderr.count("\n") == 1
            assert NAME in done.stderr
            assert "()" not in done.stderr  # it is for people, not for programs
            waits = f"look at the holders: redis-sync-aio show {NAME}\n"
            assert done.stderr.endswith(waits if "0.1" in words else "(--timeout S waits)\n")
        assert (await sync.lock(NAME).statistics()).waiting == 0


@pytest.mark.ci
async def test_it_waits_for_its_turn(server: EmbeddedServer, sync: Coordinator) -> None:
    lock = sync.lock(NAME, ttl=TTL)
    lease = await lock.acquire()

    async def is_waiting() -> bool:
        return (await lock.statistics()).waiting == 1

    with running(NAME, "--timeout", "600", "--", "echo", "ran", url=server.url) as process:
        await wait_until(is_waiting, SOON, timeout=PATIENCE)
        await lease.release()
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (0, "ran\n", "")


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_while_it_waits_withdraws_the_request(
    server: EmbeddedServer, sync: Coordinator, number: signal.Signals
) -> None:
    lock = sync.lock(NAME, ttl=TTL)

    async def is_waiting() -> bool:
        return (await lock.statistics()).waiting == 1

    async with lock:
        with running(NAME, "--", "echo", "ran", url=server.url) as process:
            await wait_until(is_waiting, SOON, timeout=PATIENCE)
            process.send_signal(number)
            out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out, err) == (128 + number, "", "")
        assert (await lock.statistics()).waiting == 0


# -- kinds -------------------------------------------------------------------------------------------------


@pytest.mark.ci
async def test_permits_of_a_semaphore_and_sides_of_a_read_write_lock(server: EmbeddedServer, sync: Coordinator) -> None:
    """What is free is held while the program runs; what is not free, or of another limit, is refused."""

    def code_of(*words: str, process: bool = False) -> int:
        run = command_process if process else command
        return run("run", "-n", *words, NAME, "--", "true", REDIS_URL=server.url).returncode

    semaphore = sync.semaphore(NAME, limit=3, ttl=TTL)
    async with semaphore.acquire(weight=2):
        assert code_of("--limit", "3", process=True) == 0
        assert code_of("--limit", "3", "--weight", "2") == 1
        other = command("run", "-n", "--limit", "4", NAME, "--", "true", REDIS_URL=server.url)
        assert other.returncode == 2
        assert "its limit is 3, not 4: give --limit 3, as others do" in other.stderr
        await semaphore.resize(0)
        paused = command("run", "-n", "--limit", "3", NAME, "--", "true", REDIS_URL=server.url)
        assert paused.returncode == 2
        assert f"{NAME!r} is paused: its limit is 0, not 3, until resize() raises it" in paused.stderr
    async with sync.read_write_lock(NAME, ttl=TTL).read().acquire():
        assert code_of("--shared", process=True) == 0
        assert code_of("--exclusive") == 1


# -- signals -----------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_signals_are_forwarded_once(server: EmbeddedServer) -> None:
    numbers = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1]
    with running(NAME, *program(COUNTS), url=server.url) as process:
        reads(process, "ready")
        for number in numbers:
            process.send_signal(number)
            assert reads(process, "got") == number
        out, err = process.communicate("end\n", timeout=PATIENCE)
    assert (process.returncode, out, err) == (0, f"seen {' '.join(str(int(it)) for it in numbers)}\n", "")


def test_a_signal_that_was_ignored_stays_ignored(server: EmbeddedServer) -> None:
    """As nohup starts it: the program ignores the signal, too."""
    ignores = program("import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)")
    started = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", *COMMAND, "run", NAME, *ignores]
    assert subprocess.check_output(started, env=environment(REDIS_URL=server.url), timeout=PATIENCE) == b"True\n"


def test_ctrl_c_in_a_terminal_reaches_the_program_once(server: EmbeddedServer) -> None:
    """The program reads from the terminal, and Ctrl-C comes from it: the program decides what that means."""
    with terminal("run", NAME, *program(COUNTS), REDIS_URL=server.url) as it:
        it.shows(r"ready \d+")
        it.types("hello\n")
        it.shows("read hello")
        it.types("\x03")
        it.shows(f"got {int(signal.SIGINT)}")
        it.types("end\n")
        it.shows(rf"seen {int(signal.SIGINT)}\r?\n")
        assert it.end() == 0
        assert it.is_sane()


SHELL = """
{background} &
echo ready $!
wait
"""
"""A shell ends by SIGINT and SIGQUIT. It lets its background program ignore both."""
ARMED_SHELL = """
{background} &
wait
"""
"""The same, for a background program that says itself that it is ready: once its trap is set."""
STUBBORN = "trap '' TERM; while :; do sleep 1; done"


@pytest.mark.parametrize("number", first_of(signal.SIGINT, signal.SIGQUIT, signal.SIGTERM))
@pytest.mark.parametrize("stubborn", first_of(False, True))
def test_the_lock_is_released_when_no_background_program_is_left(
    server: EmbeddedServer, number: signal.Signals, stubborn: bool
) -> None:
    """One that ignores SIGTERM is killed after the grace."""
    background = f"sh -c {shlex.quote(STUBBORN)}" if stubborn else "sleep 600"
    words = ["--grace", "0.2" if stubborn else "600"]
    script = SHELL.format(background=background)
    with running(NAME, *words, "--", "/bin/sh", "-c", script, url=server.url) as process:
        left = reads(process, "ready")
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE)  # the pipe is open as long as that program runs
        assert not alive(left)
    assert (process.returncode, err) == (128 + number, "")


@pytest.mark.ci
def test_the_lock_is_held_until_the_background_program_has_ended(server: EmbeddedServer, redis: Redis) -> None:
    """It has time to clean up, and nobody gets the lock meanwhile."""
    cleans_up = "trap 'echo cleaning 1; read line < fifo; exit' TERM; echo ready $$; while :; do sleep 0.1; done"
    with tempfile.TemporaryDirectory() as directory:
        os.mkfifo(f"{directory}/fifo")
        script = f"cd {directory}\n" + ARMED_SHELL.format(background=f"sh -c {shlex.quote(cleans_up)}")
        with running(NAME, "--grace", "600", "--", "/bin/sh", "-c", script, url=server.url) as process:
            reads(process, "ready")
            process.send_signal(signal.SIGINT)
            reads(process, "cleaning")
            assert command("run", NAME, "-n", "--", "true", REDIS_URL=server.url).returncode == 1
            Path(directory, "fifo").write_text("end\n")
            process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
    assert command_process("run", NAME, "-n", "--", "true", REDIS_URL=server.url).returncode == 0


@pytest.mark.ci
def test_ctrl_c_ends_background_programs_too(server: EmbeddedServer) -> None:
    """They ignore SIGINT. The signal of the terminal does not come to `run`, which sees how the shell has ended."""
    tells = "trap 'echo got TE''RM; exit' TERM; echo ready $$; while :; do sleep 0.1; done"
    script = ARMED_SHELL.format(background=f"sh -c {shlex.quote(tells)}")
    with terminal("run", NAME, "--", "/bin/sh", "-c", script, REDIS_URL=server.url) as it:
        it.shows(r"ready \d+")
        it.types("\x03")
        it.shows("got TERM")
        assert it.end() == 130


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell with job control")
@pytest.mark.ci
def test_ctrl_z_stops_it_and_fg_continues_it(server: EmbeddedServer, tmp_path: Path) -> None:
    """As the shell expects of a job; and a pipeline stays one."""
    (tmp_path / "reads.py").write_text(COUNTS)
    env = environment(REDIS_URL=server.url, PS1="$ ", PYTHONUNBUFFERED="1")
    start = " ".join([*COMMAND, "run", NAME, "--"])
    with program_in_terminal(["bash", "--norc", "--noprofile", "-i"], env) as it:
        it.types(f"{start} {sys.executable} {tmp_path}/reads.py\n")
        it.shows(r"ready \d+")
        it.types("\x1a")
        it.shows("Stopped")
        it.types("echo in the $((40 + 2)) shell\n")
        it.shows("in the 42 shell")
        it.types("fg\n")
        it.shows(r"(?s)42 shell.*fg.*redis_sync_aio run")
        it.types("hello\n")
        it.shows("read hello")
        it.types("end\n")
        it.shows(r"seen\s")
        it.types(f"{start} echo piped | sed s/piped/$((6 * 7))-through/\n")
        it.shows("42-through")
        it.types("exit\n")
        assert it.end() == 0


# -- losing the lock ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", first_of("--grace 600", "--grace 0.2", "--on-lost kill"))
async def test_the_program_and_its_descendants_end_when_the_lock_is_lost(
    server: EmbeddedServer, redis: Redis, words: str
) -> None:
    """By SIGTERM, or by SIGKILL if that is not enough or if it was asked for."""
    source = FAMILY.format(stubborn=words != "--grace 600")
    with running(NAME, "--ttl", "9", *words.split(), *program(source), url=server.url) as process:
        grandchild = reads(process, "ready")
        await redis.delete(NAME)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == LOST
    assert err.startswith(f"redis-sync-aio: the lock '{NAME}' was lost: ending ")
    assert eventually(lambda: not alive(grandchild))


@pytest.mark.ci
async def test_messages_that_nobody_reads_change_nothing(server: EmbeddedServer, redis: Redis) -> None:
    """The exit code is that of the program, and a program whose lock is lost ends as it should."""
    with unread() as stderr:
        with running(NAME, "--json", "--", "/bin/sh", "-c", "exit 7", url=server.url, stderr=stderr) as process:
            assert process.wait(PATIENCE) == 7
        with running(NAME, "--ttl", "9", *program(FAMILY.format(stubborn=False)), url=server.url, stderr=stderr) as it:
            grandchild = reads(it, "ready")
            await redis.delete(NAME)
            assert it.wait(PATIENCE) == LOST
    assert eventually(lambda: not alive(grandchild))


@pytest.mark.ci
async def test_the_program_may_go_on_when_the_lock_is_lost(server: EmbeddedServer, redis: Redis) -> None:
    with running(NAME, "--on-lost", "ignore", *program(COUNTS), url=server.url) as process:
        reads(process, "ready")
        await redis.delete(NAME)
        out, err = process.communicate("end\n", timeout=PATIENCE)
    assert (process.returncode, out) == (0, "seen\n")
    assert "was lost" in err


@pytest.mark.ci
async def test_a_loss_that_is_found_when_the_program_has_ended(server: EmbeddedServer, redis: Redis) -> None:
    with running(NAME, *program(COUNTS), url=server.url) as process:
        reads(process, "ready")
        await redis.set(NAME, "another")
        _, err = process.communicate("end\n", timeout=PATIENCE)
    assert process.returncode == LOST
    assert "another token holds the lock" in err


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_the_program_does_not_outlive_a_holder_that_is_killed(server: EmbeddedServer) -> None:
    with running(NAME, *program(COUNTS), url=server.url) as process:
        child = reads(process, "ready")
        process.kill()
        assert eventually(lambda: not alive(child))
