"""Compare the public API with the one that users have, and name what no longer works for them.

    python .ci/api.py          # against the last release, or else against main as it was before this change
    python .ci/api.py v0.1.0   # against a tag, a branch or a commit

The last release is the latest tag `v*` below this commit. Before the first there is none: then it is the commit where
this branch left origin/main, or on main itself the commit before. That finds a break while the change is reviewed.

.ci/breakages.txt explains each break. Compared with the last release, each line there must still be one: a stale line
would hide the same break when a later change makes it again. Compared with anything else, a line that is not found is
only named, since it may be of a change that main has already.

Exit status: 0, the API and the file agree; 1, a break is not explained, or a line is stale; 3, nothing to compare with.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
PACKAGE = "redis_sync_aio"
COLOURS = re.compile(r"\x1b\[\d*m")
ACCEPTED = ROOT / ".ci" / "breakages.txt"


def git(*arguments: str) -> str:
    """Return what git prints, or nothing if it fails, as for a branch that is not known here."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def last_release() -> str:
    """Return the latest tag `v*` below this commit, or nothing before the first release."""
    return git("describe", "--tags", "--match", "v*", "--abbrev=0", "HEAD^")


def before() -> str:
    """Return the commit or tag to compare with, or nothing in a clone that has none."""
    if tag := last_release():
        return tag
    head, left = git("rev-parse", "HEAD"), git("merge-base", "HEAD", "origin/main")
    return left if left not in ("", head) else git("rev-parse", "--verify", "--quiet", "HEAD^")


def breakages(old: str) -> Iterator[str]:
    """Yield what breaks, as a line of the file names it."""
    options = {"resolve_aliases": True, "resolve_external": False}
    then = griffe.load_git(PACKAGE, ref=old, repo=ROOT, **options)
    now = griffe.load(PACKAGE, search_paths=[ROOT], try_relative_path=False, **options)
    for found in griffe.find_breaking_changes(then, now):
        place, _, what = COLOURS.sub("", found.explain()).partition(": ")
        yield f"{place.rpartition(':')[0]}: {what}"


def accepted() -> dict[str, str]:
    """Return the breakages that are accepted, and why. Raises SystemExit for one without a reason."""
    lines = (line for line in ACCEPTED.read_text("utf-8").splitlines() if line and not line.startswith("#"))
    found = {what: why for what, _, why in (line.partition(" because ") for line in lines)}
    if bare := [what for what, why in found.items() if not why]:
        raise SystemExit(f"{ACCEPTED.name}: say ' because …' of {', '.join(bare)}")
    return found


def main(*against: str) -> int:
    """Print what breaks; return the exit status."""
    os.chdir(ROOT)  # griffe names files as they are seen from here
    old = against[0] if against else before()
    if not old:
        print("no release, no origin/main and no earlier commit: nothing to compare the API with")
        return 3
    reasons, found = accepted(), sorted(set(breakages(old)))
    new, gone = [what for what in found if what not in reasons], sorted(set(reasons).difference(found))
    stale = gone if old == last_release() else []
    for what in found:
        if what in reasons:
            print(f"accepted: {what} because {reasons[what]}")
    for what in set(gone).difference(stale):
        print(f"accepted, but not broken since {old}: {what}")
    if new:
        print(f"This breaks code that works with {old}. Avoid it, or add to CHANGELOG.md and .ci/{ACCEPTED.name}:\n")
        print("".join(f"{what} because REASON\n" for what in new))
    if stale:
        print(f"This no longer breaks code that works with {old}. Delete the lines from .ci/{ACCEPTED.name},")
        print("and what CHANGELOG.md says of them under Unreleased:\n")
        print("".join(f"{what} because {reasons[what]}\n" for what in stale))
    if not new and not stale:
        print(f"the API: nothing breaks since {old} that is not accepted")
    return 1 if new or stale else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
