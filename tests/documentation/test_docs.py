"""The programs in the documentation run, and do what they assert."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from ..support.pairwise import first_of

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
FAULTS = DOCS / "faults.md"


def programs(page: str) -> list[str]:
    """The Python blocks of a page that are whole programs."""
    path = DOCS / page
    blocks = re.findall(r"^```python\n(.*?)^```", path.read_text("utf-8"), re.M | re.S) if path.exists() else []
    return [block for block in blocks if "asyncio.run(" in block]


PAGES = {
    "reentrant-and-multi.md": 2,
    "after-a-crash.md": 2,
    "fencing.md": 2,
    "transactions.md": 2,
    "leases.md": 1,
    "redlock.md": 1,
    "leader-election.md": 1,
    "events-latches-and-barriers.md": 1,
    "metrics.md": 3,
    "inspection.md": 2,
    "tracing.md": 2,
    "testing.md": 2,
}
"""How many programs each page has."""
PROGRAMS = [program for page in PAGES for program in programs(page)]


LOGGED = re.compile(
    r"the lease on '.*' \(fence \d+\) was lost after|redis_sync_aio (has had no connection|is connected) to"
)
"""What the log may say: some programs lose a lease on purpose, or stop their server."""


@pytest.mark.skipif(not DOCS.exists(), reason="the documentation is not next to these tests")
def test_there_are_programs() -> None:
    assert {page: len(programs(page)) for page in PAGES} == PAGES


@pytest.mark.parametrize("number", first_of(*range(len(PROGRAMS)), few=5))
@pytest.mark.timing
async def test_programs_run(number: int) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", PROGRAMS[number], stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert not [line for line in errors.decode().splitlines() if not LOGGED.match(line)]


@pytest.mark.skipif(not FAULTS.exists(), reason="the documentation is not next to these tests")
def test_the_list_of_faults_names_test_files_that_exist() -> None:
    named = set(re.findall(r"`(test_\w+\.py)`", FAULTS.read_text("utf-8")))
    assert named
    assert named <= {path.name for path in TESTS.rglob("test_*.py")}


@pytest.mark.skipif(not FAULTS.exists(), reason="the documentation is not next to these tests")
def test_the_list_of_faults_has_every_fault_that_a_test_refers_to() -> None:
    listed = re.findall(r"^\| ([A-F]\d+) \|", FAULTS.read_text("utf-8"), re.M)
    assert len(listed) == len(set(listed))
    sources = "\n".join(path.read_text("utf-8") for path in TESTS.rglob("*.py"))
    cited = re.findall(r"\bFAULTS ([A-F]\d+)", sources) + re.findall(r'"""([A-F]\d+): ', sources)
    cited += [code.upper() for code in re.findall(r"def test_(?:p\d+_)*([a-f]\d+)_", sources)]
    assert cited
    assert set(cited) <= set(listed)
