"""The page of events and logs lists what the code has, and nothing else."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from redis_sync_aio import instrumentation
from redis_sync_aio.instrumentation import Event

from ..support.inside import logs
from ..support.log_lines import lines

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "events-and-logs.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not next to these tests")


def rows(heading: str) -> dict[str, list[str]]:
    """The cells of the first table below a heading, by what the first one names."""
    _, _, section = PAGE.read_text("utf-8").partition(f"\n## {heading}\n")
    table = re.search(r"^\|---.*\n((?:\|.*\n)+)", section, re.M)
    assert table is not None
    found = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table[1].splitlines()]
    assert len({cells[0] for cells in found}) == len(found)
    return {cells[0].strip("`"): cells for cells in found}


def test_every_event_is_listed_with_its_facts() -> None:
    base = {field.name for field in fields(Event)}
    exported = (getattr(instrumentation, name) for name in instrumentation.__all__)
    events = {kind.__name__: kind for kind in exported if inspect.isclass(kind) and issubclass(kind, Event)}
    del events["Event"]
    listed = {name: set(re.findall(r"`(\w+)`", cells[-1])) for name, cells in rows("Events").items()}
    assert listed == {name: {field.name for field in fields(kind)} - base for name, kind in events.items()}
    common = set(rows("Observers"))
    assert common == base


DESCRIBED = re.compile(r"^`(\w+)` \(([^)]*)\)\n:   (\S.*\n(?:    \S.*\n)*)", re.M)
"""A line of the log, its levels, and what the page says of it."""
PARTS = re.compile(r"\S.*\s\*\*Do:\*\*\s+\S.*\s\*\*Facts:\*\*\s+(.*)", re.S)
"""When a line comes, what to do about it, and its facts."""


def test_every_line_of_the_log_is_listed_with_level_facts_and_what_to_do() -> None:
    _, _, section = PAGE.read_text("utf-8").partition("\n## The log\n")
    section, _, _ = section.partition("\n## ")
    found = DESCRIBED.findall(section)
    assert len(found) == section.count("\n:   ")
    listed = {}
    for name, levels, text in found:
        parts = PARTS.fullmatch(text)
        assert parts is not None, name
        listed[name] = set(re.findall("INFO|WARNING|ERROR", levels.upper())), set(re.findall(r"`(\w+)`", parts[1]))
    assert len(listed) == len(found)
    assert listed == lines()


def test_nothing_is_logged_elsewhere() -> None:
    """Every line is worded in one module. The commands may tell the log to be silent."""
    package = Path(inspect.getfile(logs)).parents[1]
    calls = re.compile(r"\blogg(er|ing)\.(log|debug|info|warning|error|exception|critical|getLogger)\(")
    modules = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] != "cli"]
    offenders = [path.name for path in modules if calls.search(path.read_text("utf-8"))]
    assert offenders == ["logs.py"]
