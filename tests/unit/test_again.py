"""Tests about seconds run again on a machine that stood still, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.support import again

def pytest_configure(config):
    config.addinivalue_line("markers", "timing: about seconds")

def pytest_runtest_protocol(item, nextitem):
    return again.run_again(item, nextitem)

def pytest_report_teststatus(report):
    return again.status(report)

def pytest_terminal_summary(terminalreporter):
    again.summary(terminalreporter)
"""
TESTS = """
import collections, os, signal, subprocess
import pytest

runs = collections.Counter()

@pytest.fixture(scope="module")
def shared():
    yield runs

@pytest.fixture
def stand_still():
    again = f"while sleep 0.5; do kill -CONT {os.getpid()} || exit; done"
    with subprocess.Popen(["sh", "-c", again]) as waker:
        yield lambda: os.kill(os.getpid(), signal.SIGSTOP)
        waker.kill()

@pytest.mark.timing
def test_about_seconds(shared, stand_still):
    runs["seconds"] += 1
    stand_still()
    assert runs["seconds"] == 3, "too slow"

@pytest.mark.timing
def test_too_slow_each_time():
    assert False

def test_about_something_else(shared, stand_still):
    runs["else"] += 1
    stand_still()
    assert runs["else"] > 1
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_a_test_about_seconds_runs_again_if_the_machine_stood_still(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done
    lines = done.stdout.splitlines()
    again = [line for line in lines if line.startswith("AGAIN") and "::test_about_seconds:" in line]
    assert len(again) == 2, done.stdout
    failed = {line.split()[1].partition("::")[2] for line in lines if line.startswith("FAILED")}
    assert failed == {"test_too_slow_each_time", "test_about_something_else"}
    assert "2 failed, 1 passed" in lines[-1]
