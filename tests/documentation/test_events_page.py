"""The page of events and logs lists what the code has, and nothing else."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from redis_sync_aio import instrumentation
from redis_sync_aio.instrumentation import Event

from ..support.inside import logs
from ..support.log_lines import lines

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "operations" / "events-and-logs.md"
MESSAGES = DOCS / "assets" / "messages-of-the-log.txt"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not next to these tests")


def section(heading: str) -> str:
    return PAGE.read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_every_event_is_named() -> None:
    """The reference has its facts: see test_reference_pages.py."""
    exported = (getattr(instrumentation, name) for name in instrumentation.__all__)
    events = {kind.__name__ for kind in exported if inspect.isclass(kind) and issubclass(kind, Event)}
    listed = section("Events").partition("**")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == events - {"Event"}


DESCRIBED = re.compile(r"^`(\w+)` \(([^)]*)\)\n:   (\S.*\n(?:    \S.*\n)*)", re.M)
"""A line of the log, its levels, and what the page says of it."""


def test_every_line_of_the_log_is_listed_with_level_facts_and_what_to_do() -> None:
    found = DESCRIBED.findall(section("The log"))
    assert len(found) == section("The log").count("\n:   ")
    assert [name for name, _, text in found if not re.search(r"\S\s+\*\*Do:\*\*\s+\S", text)] == []
    told = re.findall(r"^(\w+): .*\n    facts: (.*)$", MESSAGES.read_text("utf-8"), re.M)
    facts = {name: set(listed.split(", ")) for name, listed in told}
    assert len(facts) == len(told) == len(found)
    listed = {name: (set(re.findall("INFO|WARNING|ERROR", levels.upper())), facts[name]) for name, levels, _ in found}
    assert listed == lines()
    assert f'--8<-- "docs/assets/{MESSAGES.name}"' in section("The log")


def test_nothing_is_logged_elsewhere() -> None:
    """Every line is worded in one module. The commands may tell the log to be silent."""
    package = Path(inspect.getfile(logs)).parents[1]
    calls = re.compile(r"\blogg(er|ing)\.(log|debug|info|warning|error|exception|critical|getLogger)\(")
    modules = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] != "cli"]
    offenders = [path.name for path in modules if calls.search(path.read_text("utf-8"))]
    assert offenders == ["logs.py"]
