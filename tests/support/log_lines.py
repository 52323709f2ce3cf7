"""The lines that the package can log, read from its source."""

from __future__ import annotations

import ast
import inspect
import logging
import re
from pathlib import Path

from .inside import logs

PACKAGE = Path(inspect.getfile(logs)).parents[1]


def lines() -> dict[str, tuple[set[str], set[str]]]:
    """Levels and facts of every line that the package can log, by the name of its event."""
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
