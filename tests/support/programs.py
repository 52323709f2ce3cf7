"""Run the command line: in this process, or in a process of its own with pipes."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import redis_sync_aio
from redis_sync_aio.cli import _session as _output
from redis_sync_aio.cli import main

ROOT = Path(redis_sync_aio.__file__).parents[1]
COMMAND = (sys.executable, "-m", "redis_sync_aio")
PATIENCE = 240
"""Seconds that a program may take. They end a test that hangs before pytest does, so that it shows what was printed."""


def environment(**more: str) -> dict[str, str]:
    """What a program sees: nothing of ours that leads to a server or sets colours, and warnings are errors."""
    ours = ("REDIS_", "NO_COLOR", "FORCE_COLOR", "GITHUB_", "COLUMNS", "LINES", "TERMINAL_WIDTH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours) or "SYNC_AIO" in name}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {"PYTHONPATH": path, "PYTHONWARNINGS": "error", "TERM": "xterm-256color"} | more


@contextmanager
def unread() -> Iterator[int]:
    """Yield the writing end of a pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)


def command_process(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run ``redis-sync-aio WORDS`` as a process with pipes for its output; ``more``: environment variables."""
    return subprocess.run(
        [*COMMAND, *words], env=environment(**more), capture_output=True, text=True, timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def piped(
    *words: str, output: int = subprocess.PIPE, errors: int = subprocess.PIPE, **more: str
) -> subprocess.Popen[str]:
    """Start a command with pipes, or with these descriptors for its output."""
    return subprocess.Popen(
        [*COMMAND, *words], env=environment(**more), stdin=subprocess.PIPE, stdout=output, stderr=errors, text=True
    )


def command(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Do the same as `command_process`, in a thread of this process: that takes a twentieth of the time.

    It is not for what starts a program, reads from a terminal, or is ended by a signal.
    """
    codes: list[int] = []
    with _alone, _as_if_started(words, environment(COLUMNS="80", **more)) as (stdout, stderr):
        thread = threading.Thread(target=lambda: codes.append(_exit_code()), daemon=True)
        thread.start()
        thread.join(PATIENCE)
    assert codes, f"{words} ends with an error, or not within {PATIENCE} s"
    said = [stream.written.getvalue().decode(errors="surrogateescape") for stream in (stdout, stderr)]
    return subprocess.CompletedProcess(words, codes[0], *said)


class _Pipe(io.TextIOWrapper):
    """A stream of a process that has a pipe there."""

    def __init__(self, errors: str) -> None:
        self.written = io.BytesIO()
        super().__init__(self.written, "utf-8", errors, write_through=True)


_alone = threading.Lock()
"""Streams, arguments and environment are those of the whole process: one command at a time has them."""


@contextmanager
def _as_if_started(words: Sequence[str], env: Mapping[str, str]) -> Iterator[tuple[_Pipe, _Pipe]]:
    """Give the whole process what a new one has: its arguments, environment and streams, no secrets, no handlers."""
    logger, add, remove = logging.getLogger("redis_sync_aio"), *_signal_handling
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, env, clear=True))
        stack.enter_context(patch.object(sys, "argv", ["redis-sync-aio", *words]))
        stack.enter_context(patch.object(sys, "stdin", stack.enter_context(open(os.devnull))))
        stack.enter_context(patch.object(_output, "_secrets", set()))
        stack.enter_context(patch.object(logger, "handlers", list(logger.handlers)))
        stack.enter_context(patch.object(asyncio.SelectorEventLoop, "add_signal_handler", _in_main_thread(add)))
        stack.enter_context(patch.object(asyncio.SelectorEventLoop, "remove_signal_handler", _in_main_thread(remove)))
        stdout = stack.enter_context(redirect_stdout(_Pipe("strict")))
        stderr = stack.enter_context(redirect_stderr(_Pipe("backslashreplace")))
        yield stdout, stderr


_signal_handling = asyncio.SelectorEventLoop.add_signal_handler, asyncio.SelectorEventLoop.remove_signal_handler


def _in_main_thread(method: Any) -> Any:
    """Return a method that does nothing in other threads, where Python has no signals."""

    def called(*args: Any) -> Any:
        return method(*args) if threading.current_thread() is threading.main_thread() else None

    return called


def _exit_code() -> int:
    """Run the program that ``sys.argv`` names, and return its exit code as the interpreter has it."""
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    raise AssertionError("it did not exit")


def printed_json(*words: str, expect: Sequence[int] = (0,), **more: str) -> Any:
    """Run it with ``--json``, which has to end with one of these exit codes, and return what it printed."""
    done = command(*words, "--json", **more)
    assert done.returncode in expect, done.stdout + done.stderr
    return json.loads(done.stdout)


CODES = {"warn": 1, "bad": 2}
"""Exit codes of the doctor."""


def examine(url: str, *words: str, **env: str) -> list[dict[str, Any]]:
    """Return all findings of the doctor."""
    found: list[dict[str, Any]] = printed_json("doctor", "--url", url, *words, expect=(0, 1, 2), **env)["findings"]
    return found


def told(url: str, level: str, check: str, *words: str, **env: str) -> str:
    """Return what the doctor found of ``check``: one finding, of that level, with its meaning and a remedy."""
    report = printed_json("doctor", "--url", url, *words, expect=(CODES[level], 2), **env)
    found = [one for one in report["findings"] if one["check"] == check and one["level"] == level]
    assert found, report
    assert found[0]["meaning"].endswith(".")
    assert found[0]["fix"]
    return str(found[0]["found"])


def levels(found: list[dict[str, Any]]) -> dict[str, str]:
    return {one["check"]: one["level"] for one in found}
