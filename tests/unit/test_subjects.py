"""The check of commit subjects in the gate and in the hook of each commit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .repository import git

SCRIPT = Path(__file__).parents[2] / ".ci" / "subjects.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="only a checkout has the gate")
GOOD = ("Wake the next reader when a writer is cancelled", "Document what to do at 3 a.m.", "Add " + 68 * "x")
BAD = {
    "x": "does not say",
    "Fix": "does not say",
    "": "does not say",
    "wip: renewals": "does not say",
    "WIP renewals": "does not say",
    "fixup! Wake the next reader": "does not say",
    "wake the next reader": "capital",
    "Wake the next reader.": "full stop",
    "Add " + 69 * "x": "73 characters",
}


def check(cwd: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def commit(cwd: Path, subject: str) -> None:
    git(cwd, "commit", "--quiet", "--allow-empty", "--no-verify", "-m", subject)


def test_the_hook_says_what_is_wrong_with_a_message(tmp_path: Path) -> None:
    """All messages in one run: each bad one is named with its reason, and no good one is."""
    for number, subject in enumerate((*GOOD, *BAD)):
        (tmp_path / f"{number:02}").write_text(f"{subject}\n\nThe reason. It may end in a full stop.\n", "utf-8")
    status, shown = check(tmp_path, *sorted(path.name for path in tmp_path.iterdir()))
    assert status == 1
    lines = shown.splitlines()
    assert len(lines) == len(BAD)
    for line, (subject, reason) in zip(lines, BAD.items(), strict=True):
        assert repr(subject) in line
        assert reason in line


def test_commits_that_are_not_published_are_checked_in_every_kind_of_clone(tmp_path: Path) -> None:
    """Behind a remote branch only those; in a shallow clone, and without a remote, the latest."""
    (first := tmp_path / "first").mkdir()
    git(first, "init", "--quiet", "--initial-branch=main")
    commit(first, "old and bad")
    commit(first, "Add what is good")
    assert check(first)[0] == 1, "nothing tells that the old one is published"
    git(tmp_path, "clone", "--quiet", "first", "second")
    second = tmp_path / "second"
    commit(second, "Add more that is good")
    assert check(second) == (0, "")
    commit(second, "new and bad")
    status, shown = check(second)
    assert status == 1
    assert "new and bad" in shown
    assert "old and bad" not in shown
    git(tmp_path, "clone", "--quiet", "--depth=1", first.as_uri(), "shallow")
    assert check(tmp_path / "shallow") == (0, "")
