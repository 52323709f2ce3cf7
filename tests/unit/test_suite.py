"""Rules of this suite that no linter has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
OF_THE_MODULE = {
    *("unit/test_types_and_keys", "unit/test_schedule", "unit/test_refusals"),
    *("engine/test_talks", "engine/test_engines", "simulation/test_histories", "simulation/test_permit_histories"),
    *("simulation/attach_rules", "simulation/barrier_rules", "simulation/gate_rules"),
    "simulation/test_schedules",
}
"""Tests of the very modules that they import."""


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
        if module.startswith("redis_sync_aio._")
        and path.parts[0] != "mutation"
        and str(path.with_suffix("")) not in {"support/inside", *OF_THE_MODULE}
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_test_modules_are_no_libraries() -> None:
    """What tests share is in `support`. Mutants run the tests that have to notice them."""
    wrong = [
        f"{path}: {module}"
        for path, module in imports()
        if module.startswith(".") and module.split(".")[-1].startswith("test_")
        if path.parts[0] != "mutation"
    ]
    assert not wrong, "\n".join(sorted(wrong))
