"""The check of the public API finds what no longer works for users, unless a reason for it is written down."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .repository import git

GATE = Path(__file__).parents[2] / ".ci"
pytestmark = pytest.mark.skipif(not GATE.exists(), reason="only a checkout has the gate")
BEFORE = "class Lock:\n    def __init__(self, name: str, ttl: float = 30) -> None: ...\n"
AFTER = "class Lock:\n    def __init__(self, name: str) -> None: ...\n"
BROKEN = "redis_sync_aio/_lock.py: Lock.__init__(ttl): Parameter was removed"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a repository whose public class is defined in a private module, as many of ours are."""
    pytest.importorskip("griffe", reason="it comes with the group docs")
    shutil.copytree(GATE, tmp_path / ".ci")
    (tmp_path / ".ci" / "breakages.txt").write_text("# none\n", "utf-8")
    (tmp_path / "redis_sync_aio").mkdir()
    (tmp_path / "redis_sync_aio" / "__init__.py").write_text('from ._lock import Lock\n__all__ = ["Lock"]\n', "utf-8")
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    save(tmp_path, BEFORE)
    return tmp_path


def save(checkout: Path, code: str) -> None:
    (checkout / "redis_sync_aio" / "_lock.py").write_text(code, "utf-8")
    git(checkout, "add", ".")
    git(checkout, "commit", "--quiet", "--allow-empty", "--no-verify", "-m", "Change the lock")


def check(checkout: Path, *arguments: str) -> tuple[int, str]:
    script = checkout / ".ci" / "api.py"
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.ci
def test_a_removed_parameter_is_a_break_unless_it_says_why(checkout: Path) -> None:
    save(checkout, AFTER)
    status, shown = check(checkout)
    assert (status, f"{BROKEN} because REASON" in shown) == (1, True), shown

    accepted = checkout / ".ci" / "breakages.txt"
    accepted.write_text(f"{BROKEN} because a lock has no lease here\n", "utf-8")
    status, shown = check(checkout)
    assert (status, "accepted: " in shown) == (0, True), shown

    accepted.write_text(f"{BROKEN}\n", "utf-8")
    status, shown = check(checkout)
    assert (status, "because" in shown) == (1, True), shown


@pytest.mark.ci
def test_the_api_is_compared_with_the_last_release_or_with_main(checkout: Path) -> None:
    """A commit is not compared with its own tag. Without a release, what main has already is not found again."""
    assert check(checkout)[0] == 3, "there is no earlier commit"
    git(checkout, "tag", "v0.1.0")
    save(checkout, AFTER)
    save(checkout, AFTER)
    git(checkout, "tag", "v0.2.0")
    status, shown = check(checkout)
    assert (status, "v0.1.0" in shown) == (1, True), shown

    git(checkout, "tag", "--delete", "v0.1.0", "v0.2.0")
    status, shown = check(checkout)
    assert status == 0, shown
    git(checkout, "update-ref", "refs/remotes/origin/main", "HEAD~2")
    assert check(checkout)[0] == 1, "that of main is another"
    assert check(checkout, "HEAD")[0] == 0
