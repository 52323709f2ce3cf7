"""Each documented exit code of each command, in a situation that has it."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Mapping
from typing import Literal, TypeAlias

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import Coordinator
from redis_sync_aio.cli._app import EXITS
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action, FaultProxy
from redis_sync_aio.testing.faults import command as is_command

from ..support.programs import command, command_process

pytestmark = pytest.mark.real

Situation: TypeAlias = Literal[
    "nothing is known of x", "x is held", "x:1 has failed", "no server", "wrong password", "no answer"
]
FREE: Situation = "nothing is known of x"
ELSEWHERE = {70, 75, 130, 143}
"""A bug; a lock that is lost while its program runs; after Ctrl-C and SIGTERM: in the tests of what may have them."""
ARGUMENTS: Mapping[str, str] = {
    "doctor": "",
    "forget": "x --yes",
    "ls": "",
    "release": "x --yes",
    "run": "x -- true",
    "show": "x",
    "top": "--json",
    "watch": "x",
}
Case: TypeAlias = tuple[str, Situation, int]
CASES: list[Case] = [
    *((f"{name} --nope", FREE, 2) for name in ARGUMENTS),
    *((f"{name} {words}", "no server", 69) for name, words in ARGUMENTS.items()),
    *((f"{name} {words}", "wrong password", 77) for name, words in ARGUMENTS.items()),
    ("forget x:1", "x:1 has failed", 2),
    ("forget x --yes", FREE, 1),
    ("forget x:1 --yes", "x:1 has failed", 0),
    ("ls", FREE, 0),
    ("ls", "x is held", 0),
    ("release x", "x is held", 2),
    ("release x --yes", FREE, 1),
    ("release x --yes", "x is held", 0),
    ("run x -- true", FREE, 0),
    ("run x -- sh -c 'exit 3'", FREE, 3),
    ("run x -- sh -c 'kill -TERM $$'", FREE, 143),
    ("run -n x -- true", "x is held", 1),
    ("run --timeout 0.1 x -- true", "x is held", 1),
    ("run --timeout 1 x -- true", "no answer", 69),
    ("run -n -E 9 x -- true", "x is held", 9),
    ("run x -- /", FREE, 126),
    ("run x -- /nowhere", FREE, 127),
    ("show x", FREE, 1),
    ("show x", "x is held", 0),
    ("show x:1", "x:1 has failed", 0),
]


@pytest_asyncio.fixture
async def silent(server: EmbeddedServer) -> AsyncIterator[str]:
    """The address of a server that does not answer scripts."""
    async with FaultProxy(server) as proxy:
        proxy.on(is_command("EVALSHA"), Action.HOLD)
        yield proxy.url


def starts_a_program(words: str, code: int) -> bool:
    return words.startswith("run") and code in (0, 3, 143)


@pytest.mark.parametrize(
    ("words", "situation", "code"),
    [pytest.param(*it, marks=pytest.mark.ci if starts_a_program(it[0], it[2]) and it[2] != 3 else ()) for it in CASES],
)
async def test_a_command_ends_with_its_code(
    server: EmbeddedServer,
    silent: str,
    sync: Coordinator,
    redis: Redis,
    words: str,
    situation: Situation,
    code: int,
) -> None:
    url = server.url
    if situation == "x is held":
        await sync.lock("x").acquire()
    elif situation == "x:1 has failed":
        with pytest.raises(KeyError):
            async with sync.once("x", slot="1", on_crash="skip"):
                raise KeyError
    elif situation == "no server":
        url = "redis://127.0.0.1:1"
    elif situation == "no answer":
        url = silent
    elif situation == "wrong password":
        url = url.replace("redis://", "redis://nobody:wrong@")
    argv = shlex.split(words)
    run = command_process if starts_a_program(words, code) else command
    done = await asyncio.to_thread(run, *argv, REDIS_URL=url)
    assert done.returncode == code, done.stdout + done.stderr


def test_no_code_is_left_out() -> None:
    seen = {(words.split()[0], code) for words, _, code in CASES}
    left = {(name, code) for name in ARGUMENTS for code in EXITS[name] if code not in ELSEWHERE} - seen
    # The verdict of the doctor is that of its findings: see test_doctor.py. And what has no end but its reader's.
    assert left == {("doctor", 0), ("doctor", 1), ("top", 0), ("watch", 0)}
