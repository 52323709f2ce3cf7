"""A scratch repository, for tests of what the gate says of commits."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git(cwd: Path, *arguments: str) -> None:
    """Run git in ``cwd``, with an author and without signatures."""
    options = [*("-c", "user.name=a"), *("-c", "user.email=a@example.org"), *("-c", "commit.gpgsign=false")]
    subprocess.run(["git", *options, *arguments], cwd=cwd, check=True, capture_output=True)
