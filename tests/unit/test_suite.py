"""Rules of this suite that no linter has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
INSIDE = {"unit", "scripts", "engine", "simulation", "mutation"}
"""Folders of tests of the very modules that they import; so is `test_demo`."""
SIMULATION = {
    *("inside", "gate", "schedule", "schedule_locks", "schedule_sharing", "schedule_transactions", "histories"),
    *("core_checks", "sharing_checks", "transaction_checks", "executions", "lua_lint", "mutants", "script_mutants"),
    "test_demo",
}
"""Helpers of those, and `inside`, which knows for all others where keys, scripts and inner objects are."""
BORROWED = {"test_exceptions", "test_loops_and_forks"}
"""Test modules whose parts others use: a table of cases, and programs that fork."""


def imports() -> Iterator[tuple[Path, str]]:
    """Every module that a module of this suite imports."""
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                yield path.relative_to(TESTS), "." * node.level + (node.module or "")
            elif isinstance(node, ast.Import):
                yield from ((path.relative_to(TESTS), alias.name) for alias in node.names)


def test_one_helper_knows_the_inside() -> None:
    """All other tests of behaviour use the public API, so that modules may move."""
    wrong = [
        f"{path}: {module}"
        for path, module in imports()
        if module.startswith("redis_sync_aio._") and path.parts[0] not in INSIDE and path.stem not in SIMULATION
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_test_modules_are_no_libraries() -> None:
    """What tests share is in `support`. Mutants run the tests that have to notice them."""
    wrong = [
        f"{path}: {module}"
        for path, module in imports()
        if module.startswith(".") and (name := module.split(".")[-1]).startswith("test_")
        if path.parts[0] != "mutation" and name not in BORROWED
    ]
    assert not wrong, "\n".join(sorted(wrong))
