"""The page of events and logs lists what the code has, and nothing else."""

from __future__ import annotations

import ast
import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from redis_sync_aio import LeaseLost, instrumentation
from redis_sync_aio.instrumentation import Event

from ..support.inside import logs

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "operations" / "events-and-logs.md"
MESSAGES = DOCS / "assets" / "messages-of-the-log.txt"
PACKAGE = Path(inspect.getfile(logs)).parents[1]
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not next to these tests")


def section(heading: str) -> str:
    return PAGE.read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def lines() -> dict[str, tuple[set[str], set[str]]]:
    """Levels and facts of every line that the package can log, by the name of its event; from its source."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for path in PACKAGE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(call, ast.Call) or ast.unparse(call.func) not in ("logs.log", "log"):
                continue
            (event,) = call.args
            assert isinstance(event, ast.Constant)
            assert isinstance(event.value, str)
            given = {keyword.arg or "**": ast.unparse(keyword.value) for keyword in call.keywords}
            levels = set(re.findall("INFO|WARNING|ERROR", given.get("level", "")))
            levels = levels or {logging.getLevelName(logs.LINES[event.value][0])}
            line = levels, given.keys() - {"level", "raised", "depth"}
            assert found.setdefault(event.value, line) == line
    assert found.keys() == logs.LINES.keys()
    return found


def quoted() -> dict[str, tuple[str, set[str]]]:
    """The message and the facts that the list of messages, which the page puts in, has for each event."""
    told = re.findall(r"^(\w+): (.*)\n    facts: (.*)$", MESSAGES.read_text("utf-8"), re.M)
    assert len({name for name, *_ in told}) == len(told)
    return {name: (message, set(facts.split(", "))) for name, message, facts in told}


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
    assert len(found) == section("The log").count("\n:   ") == len(quoted())
    assert [name for name, _, text in found if not re.search(r"\S\s+\*\*Do:\*\*\s+\S", text)] == []
    listed = {
        name: (set(re.findall("INFO|WARNING|ERROR", levels.upper())), quoted()[name][1]) for name, levels, _ in found
    }
    assert listed == lines()
    assert f'--8<-- "docs/assets/{MESSAGES.name}"' in section("The log")


LOST = LeaseLost(name="orders:42", reason="late", fence=1795711537967982, held_for=41.3, stalled=31.2)
COMPOSED: dict[str, Callable[[], object]] = {
    "lease_lost": lambda: logs.lease_lost(LOST, None),
    "lease_forgotten": lambda: logs.lease_forgotten("orders:42", 1795711537967982, 30),
    "job_skipped": lambda: logs.job_skipped("nightly:2026-11-27", "failed"),
    "renewal_late": lambda: logs.renewal_late("orders:42", 14.2, 5.8, 30.0, 0, None),
}
"""The lines whose facts the module words."""


@pytest.mark.parametrize("event", logs.LINES)
def test_the_quoted_line_is_that_of_the_log(event: str, caplog: pytest.LogCaptureFixture) -> None:
    message, _ = quoted()[event]
    wording = ".*".join(map(re.escape, re.split(r"%\(\w+\)[.\d]*[a-z]", logs.LINES[event][1])))
    assert re.fullmatch(wording, message)
    if event in COMPOSED:
        with caplog.at_level(logging.INFO, "redis_sync_aio"):
            COMPOSED[event]()
        assert [record.getMessage() for record in caplog.records] == [message]


def test_nothing_is_logged_elsewhere() -> None:
    """Every line is worded in one module. The commands may tell the log to be silent."""
    calls = re.compile(r"\blogg(er|ing)\.(log|debug|info|warning|error|exception|critical|getLogger)\(")
    modules = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "cli"]
    offenders = [path.name for path in modules if calls.search(path.read_text("utf-8"))]
    assert offenders == ["logs.py"]
