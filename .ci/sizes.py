"""How large the package is, and how much of it users meet. Fails above a limit.

A limit goes down when the figure does. Raise one only with the reason next to it.

    python .ci/sizes.py
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "redis_sync_aio"
LIMITS = {
    "names at the root": 40,
    "names in all public modules": 151,  # with NotReplicated
    # with hand-overs that stay in their shard, EVAL where only EVALSHA is refused, advice after ends at HELLO,
    # reconnects that are spread by the number of clients, queues that two layouts share, a limit to the dead that a
    # script drops, a Redlock that waits for a majority only and asks its servers for one fence, and grants that
    # replicas confirm
    "lines of code": 22_511,
    "files": 138,  # with the connection that counts replicas
    "lines of Lua": 1_384,  # the same
    "protocols": 15,
    "imports, percent of the code": 9.2,
}
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def code_lines(source: str, tree: ast.Module) -> int:
    """Count the lines that are neither empty nor comments nor docstrings."""
    docs: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docs)


def import_lines(tree: ast.Module) -> int:
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in imports)


def protocols(tree: ast.Module) -> int:
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return sum(any(ast.unparse(base).startswith("Protocol") for base in node.bases) for node in classes)


def exported(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            yield from ast.literal_eval(node.value)


def is_public(path: Path) -> bool:
    """True if users import from this module; the command line is a program."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] != "cli" and not any(part.startswith("_") for part in parts if part != "__init__")


def figures() -> dict[str, float]:
    sources = {path: path.read_text("utf-8") for path in sorted(ROOT.rglob("*.py"))}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    public = {name for path in trees if is_public(path) for name in exported(trees[path])}
    code = sum(code_lines(sources[path], trees[path]) for path in trees)
    return {
        "names at the root": len(list(exported(trees[ROOT / "__init__.py"]))),
        "names in all public modules": len(public),
        "lines of code": code,
        "files": len(trees),
        "lines of Lua": sum(path.read_text("utf-8").count("\n") for path in ROOT.rglob("*.lua")),
        "protocols": sum(map(protocols, trees.values())),
        "imports, percent of the code": round(100 * sum(map(import_lines, trees.values())) / code, 1),
    }


def main() -> None:
    """Print the figures; exit with an error if one is above its limit."""
    above = 0
    for name, value in figures().items():
        above += value > LIMITS[name]
        print(f"{name}: {value:,} (at most {LIMITS[name]:,}){' ABOVE' if value > LIMITS[name] else ''}")
    if above:
        sys.exit(f"{above} above the limit: remove something, or raise the limit in {Path(__file__).name} and say why")


if __name__ == "__main__":
    main()
