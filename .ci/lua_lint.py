"""Lint the Lua scripts as a server gets them, includes and constants in place: ``python .ci/lua_lint.py``.

Finds what Lua does not report before a line runs: globals that nothing defines, functions that the libraries do not
have, locals that nothing reads, and a local that hides another one of its block. (Luacheck finds the same; it is in no
registry of Python packages.) And in the files: lines that are too long, and numbers that have a name in `constants`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from luaparser import ast, astnodes  # type: ignore[import-untyped]

from redis_sync_aio import _scripts
from redis_sync_aio._scripts import Line, constants, lines

COLUMNS = 100
GLOBALS = frozenset(
    {"KEYS", "ARGV", "error", "ipairs", "next", "pairs", "pcall", "tonumber", "tostring", "type", "unpack"}
)
LIBRARIES = {
    "redis": {"call", "pcall", "error_reply", "status_reply"},
    "math": {"abs", "ceil", "floor", "fmod", "huge", "max", "min"},
    "string": {"byte", "char", "find", "format", "gmatch", "gsub", "len", "lower", "match", "rep", "sub", "upper"},
    "table": {"concat", "insert", "remove", "sort"},
}
CODE = re.compile(r"\breturn \{-?\d")
SPELT = {
    str(value): name
    for name, value in vars(constants).items()
    if name.isupper() and isinstance(value, int) and value > 1000
}


@dataclass(eq=False)
class Local:
    """A local variable. Those of one statement are reported only if none of them is read: they came together."""

    name: str
    line: int
    kind: str = "local"
    group: list[Local] = field(default_factory=list)
    read: bool = False


class Linter:
    """Walks the syntax tree of one script."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Local]] = []
        self.found: list[tuple[int, str]] = []
        self.line = 1

    def check(self, source: str) -> list[tuple[int, str]]:
        """Return lines and what is wrong with them."""
        self.visit_block(ast.parse(source).body)
        return sorted(self.found)

    def report(self, what: str, line: int = 0) -> None:
        self.found.append((line or self.line, what))

    # -- scopes ------------------------------------------------------------------------------------------

    def visit_block(self, block: Any, *own: tuple[str, list[Any]], until: Any = None) -> None:
        """Visit a block with locals of its own, given by kind; ``until``: a condition that sees its locals."""
        self.blocks.append({})
        for kind, names in own:
            self.define(names, kind)
        self.visit(block.body)
        self.visit(until)
        for local in self.blocks.pop().values():
            self.left(local)

    def left(self, local: Local) -> None:
        """Report a local that goes out of scope unread."""
        if not local.read and local.name != "_" and not any(other.read for other in local.group):
            self.report(f"unused {local.kind} '{local.name}'", local.line)

    def define(self, names: list[Any], kind: str) -> None:
        group: list[Local] = []
        for name in names:
            if isinstance(name, astnodes.Name):
                if name.id in self.blocks[-1] and name.id != "_":
                    self.report(f"'{name.id}' hides another local of its block")
                    self.left(self.blocks[-1][name.id])
                local = Local(name.id, self.line, kind, group if kind in ("local", "loop variable") else [])
                group.append(local)
                self.blocks[-1][name.id] = local

    def use(self, name: Any, *, reads: bool) -> None:
        for block in reversed(self.blocks):
            if name.id in block:
                block[name.id].read |= reads
                return
        if not reads or name.id not in GLOBALS | LIBRARIES.keys():
            self.report(f"undefined global '{name.id}'")

    # -- statements and expressions ----------------------------------------------------------------------

    def visit(self, node: Any) -> None:
        """Visit a node, or several; those that open no scope by all that they consist of."""
        if isinstance(node, list):
            for one in node:
                self.visit(one)
        elif isinstance(node, astnodes.Node):
            self.line = node.line or self.line
            visit = getattr(self, f"visit_{type(node).__name__}", None)
            if visit is not None:
                visit(node)
            else:
                self.visit([child for name, child in vars(node).items() if not name.startswith("_")])

    def visit_Name(self, node: Any) -> None:
        self.use(node, reads=True)

    def visit_Block(self, node: Any) -> None:
        self.visit_block(node)

    def visit_LocalAssign(self, node: Any) -> None:
        line = self.line
        self.visit(node.values)
        self.line = line
        self.define(node.targets, "local")

    def visit_Assign(self, node: Any) -> None:
        line = self.line
        self.visit(node.values)
        self.line = line
        for target in node.targets:
            if isinstance(target, astnodes.Name):
                self.use(target, reads=False)
            else:
                self.visit(target)

    def visit_Index(self, node: Any) -> None:
        self.visit(node.value)
        if node.notation is astnodes.IndexNotation.SQUARE:
            self.visit(node.idx)
        elif node.idx.id not in LIBRARIES.get(getattr(node.value, "id", ""), {node.idx.id}):
            self.report(f"undefined function '{node.value.id}.{node.idx.id}'")

    def visit_Field(self, node: Any) -> None:
        if node.between_brackets:
            self.visit(node.key)
        self.visit(node.value)

    def visit_LocalFunction(self, node: Any) -> None:
        self.define([node.name], "function")
        self.visit_block(node.body, ("parameter", node.args))

    def visit_AnonymousFunction(self, node: Any) -> None:
        self.visit_block(node.body, ("parameter", node.args))

    def visit_Function(self, node: Any) -> None:
        self.report("a function that is not local")

    def visit_Forin(self, node: Any) -> None:
        self.visit(node.iter)
        self.visit_block(node.body, ("loop variable", node.targets))

    def visit_Fornum(self, node: Any) -> None:
        self.visit([node.start, node.stop, node.step])
        self.visit_block(node.body, ("loop variable", [node.target]))

    def visit_Repeat(self, node: Any) -> None:
        self.visit_block(node.body, until=node.test)


def check(script: list[Line]) -> Iterator[str]:
    """Return what is wrong with a script, by the files from which its lines come."""
    for line, what in Linter().check("\n".join(line.text for line in script)):
        yield f"{script[line - 1].path}:{script[line - 1].number}: {what}"


def check_file(path: Path) -> Iterator[str]:
    """Return the lines of a file that are too long, end with a space, or spell a constant."""
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        place = f"{path.parent.name}/{path.name}:{number}"
        if len(line) > COLUMNS:
            yield f"{place}: longer than {COLUMNS} columns"
        if line != line.rstrip():
            yield f"{place}: a space at the end"
        if CODE.search(line):
            yield f"{place}: a code without a name: see constants.py"
        for value in SPELT.keys() & set(re.findall(r"\d+", line)):
            yield f"{place}: write {SPELT[value]} for {value}"


def main() -> int:
    """Lint all scripts; return how many findings there are."""
    paths = sorted(Path(str(files(_scripts.__name__))).glob("*/*.lua"))
    scripts = {f"{path.parent.name}/{path.stem}": path for path in paths if path.parent.name != "include"}
    found = [finding for path in paths for finding in check_file(path)]
    included = set()
    for name in scripts:
        script = list(lines(name))
        included |= {line.path for line in script}
        found += [f"{finding} (in {name})" for finding in check(script)]
    found += [
        f"{path.parent.name}/{path.name}: not included"
        for path in paths
        if f"{path.parent.name}/{path.name}" not in included
    ]
    print(*found, f"{len(scripts)} Lua scripts: {len(found)} findings", sep="\n")
    return len(found)


if __name__ == "__main__":
    sys.exit(main() > 0)
