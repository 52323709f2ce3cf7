"""Check the subjects of commits: what a program can check of CONTRIBUTING.md, "Commits".

python .ci/subjects.py                         # the commits that are not on origin/main, or else the last 50
python .ci/subjects.py .git/COMMIT_EDITMSG     # the message in this file: the hook commit-msg
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

LONGEST = 72
LATEST = 50
"""How many commits to check when nothing tells which are new."""
PLACEHOLDER = re.compile(r"(?:wip|tmp|todo|xxx)\b|(?:fixup|squash|amend)!|\S*$", re.IGNORECASE)
"""The beginning of a subject that says nothing about the change, or one word alone."""
MERGE = re.compile(r"Merge [0-9a-f]{40} into [0-9a-f]{40}$")
"""The subject of the commit that a forge makes to test a pull request; no history keeps it."""


def problems(subject: str) -> list[str]:
    """Return what is wrong with a subject."""
    if MERGE.match(subject):
        return []
    found = []
    if len(subject) > LONGEST:
        found.append(f"it has {len(subject)} characters, {LONGEST} at most are read everywhere")
    if PLACEHOLDER.match(subject):
        found.append("it does not say what the commit does")
    elif not subject[0].isupper():
        found.append("begin it with a capital letter")
    if re.search(r"(?<!\.\w)\.$", subject):  # "a.m." is an abbreviation
        found.append("end it without a full stop")
    return found


def git(*arguments: str) -> list[str]:
    """Return the lines that a git command prints; none if it fails, as for a branch that is not known here."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, encoding="utf-8", check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def new_commits() -> list[str]:
    """Return hash and subject of the commits that are not published, or else of the latest."""
    log = ("log", "--no-merges", "--format=%h %s")
    return git(*log, "origin/main..HEAD") or git(*log, f"--max-count={LATEST}")


def main(files: list[str]) -> int:
    """Check the messages in these files, or the commits; return the exit status."""
    if files:
        subjects = [(file, Path(file).read_text("utf-8").partition("\n")[0].strip()) for file in files]
    else:
        subjects = [(commit, subject) for commit, _, subject in (line.partition(" ") for line in new_commits())]
        if not subjects:
            print("no commits found: the subjects are checked in a git repository")
            return 1
    wrong = [f"{place}: {subject!r}: {problem}" for place, subject in subjects for problem in problems(subject)]
    print("".join(f"{line}\n" for line in wrong), end="")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
