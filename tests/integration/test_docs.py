"""The programs in the documentation run, and do what they assert."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def programs(page: str) -> list[str]:
    """The Python blocks of a page that are whole programs."""
    path = DOCS / page
    blocks = re.findall(r"^```python\n(.*?)^```", path.read_text("utf-8"), re.M | re.S) if path.exists() else []
    return [block for block in blocks if "asyncio.run(" in block]


PAGES = {"reentrant-and-multi.md": 2, "after-a-crash.md": 2, "fencing.md": 2, "transactions.md": 2, "redlock.md": 1}
"""How many programs each page has."""
PROGRAMS = [program for page in PAGES for program in programs(page)]


LOGGED = re.compile(
    r"the lease on '.*' \(fence \d+\) was lost after|redis_sync_aio (has had no connection|is connected) to"
)
"""What the log may say: some programs lose a lease on purpose, or stop their server."""


@pytest.mark.skipif(not DOCS.exists(), reason="the documentation is not beside these tests")
def test_there_are_programs() -> None:
    assert {page: len(programs(page)) for page in PAGES} == PAGES


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
async def test_programs_run(number: int) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", PROGRAMS[number], stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert not [line for line in errors.decode().splitlines() if not LOGGED.match(line)]
