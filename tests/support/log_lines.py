"""The lines that the package can log, read from its source."""

from __future__ import annotations

import ast
import inspect
import re

from .inside import logs


def lines() -> dict[str, tuple[set[str], set[str]]]:
    """Levels and facts of every line that the package can log, by the name of its event."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for call in ast.walk(ast.parse(inspect.getsource(logs))):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        if call.func.id == "_log":
            levels, event = set(re.findall(r"logging\.(\w+)", ast.unparse(call.args[0]))), call.args[1]
        elif call.func.id == "_warn":
            levels, event = {"WARNING"}, call.args[0]
        else:
            continue
        assert isinstance(event, ast.Constant)
        assert isinstance(event.value, str)
        assert event.value not in found
        found[event.value] = levels, {keyword.arg or "**" for keyword in call.keywords}
    return found
