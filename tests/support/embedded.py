"""For the tests of the embedded server: processes, and what is left of them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from redis_sync_aio import embedded

ROOT = str(Path(embedded.__file__).parents[1])


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short, empty directory that the servers of one test put theirs into."""
    with tempfile.TemporaryDirectory(prefix="t-") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """Hold a port that was free: nobody else chooses it in the block, and a server may listen there."""
    (held,) = embedded.hold_ports(1)
    try:
        yield held.number
    finally:
        held.close()


def eventually(condition: Callable[[], bool], *, within: float = 60.0) -> bool:
    """Poll until the condition holds; False if it does not within so many seconds."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def alive(pid: int) -> bool:
    """Tell whether the process runs: a zombie that init has yet to reap does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return True


def group_exists(leader: int) -> bool:
    """Tell whether a process of this group is left, a zombie that init has yet to reap included."""
    try:
        os.killpg(leader, 0)
    except (ProcessLookupError, PermissionError):  # macOS: EPERM if the group has only zombies
        return False
    return True


def ping(unix_socket: str, *, timeout: float = 5.0) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        connection.connect(unix_socket)
        connection.sendall(b"PING\r\n")
        return connection.recv(64)


@contextlib.contextmanager
def python(script: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script in a session of its own; its stdin stays open until the end of the block."""
    prelude = "import gc, os, signal, subprocess, sys, threading\nfrom redis_sync_aio import embedded\n"
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", prelude + script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ROOT},
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def output(script: str) -> list[str]:
    """Run a script to its end and return the words that it printed."""
    with python(script) as process:
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        return printed.split()
