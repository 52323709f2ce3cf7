"""Find the words of .ci/words.txt in the prose of the project, and say what to write instead.

    python .ci/words.py                 # everything that is covered
    python .ci/words.py docs/index.md   # these files

Prose is the text of a page, and the comments, docstrings and messages of code. Text between backticks is code; so is a
string that is one name. The first line of a docstring in the package names its object: no pronoun is its head, and the
docstring of a boolean begins with "True if".
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "maintainers")
COVERED = (*PAGES, "examples", "benchmarks", "tests", "redis_sync_aio")
GAP = r"(?:\s+|\s*\n\s*(?:#|--)\s*)"
"""What stands between two words of a phrase, which may go on in the next line of a comment."""

entries = (line.split(" -> ", 1) for line in (HERE / "words.txt").read_text("utf-8").splitlines() if " -> " in line)
INSTEAD: dict[str, str] = dict(entries)
NO_HEAD = re.compile(r"(what|that|those|it|whether)\b|[A-Z][a-z]+ (what|those|it)\b", re.IGNORECASE)
"""A first line without an object that has a name."""
phrases = "|".join(GAP.join(word.split()) for word in INSTEAD)
PATTERN = re.compile(rf"(?<![\w.])({phrases})(?![\w(])", re.IGNORECASE)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the pieces of prose in a file, and the line in which each starts."""
    text = path.read_text("utf-8") if path.suffix in (".md", ".lua", ".py") else ""
    if path.suffix == ".md":
        yield 1, text
    elif path.suffix == ".lua":
        yield 1, "\n".join(line[line.index("--") :] if "--" in line else "" for line in text.split("\n"))
    elif path.suffix == ".py":
        yield 1, "\n".join(line if line.lstrip().startswith("#") else "" for line in text.split("\n"))
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            kind = tokenize.tok_name[token.type]
            next_to_code = kind == "COMMENT" and not token.line.lstrip().startswith("#")
            text_of_code = kind == "STRING" and not re.fullmatch(r"\w*(['\"])\w*\1", token.string)
            if next_to_code or text_of_code or kind == "FSTRING_MIDDLE":
                yield token.start[0], token.string


def check(path: Path) -> list[str]:
    """Return what to change in a file, a line for each place."""
    wrong = []
    for start, piece in prose(path):
        text = re.sub(r"(`+)[^`]+\1|\{[^{}\n]*\}", lambda code: re.sub(r"\S", "`", code[0]), piece)
        for found in PATTERN.finditer(text):
            instead = next(INSTEAD[word] for word in INSTEAD if re.fullmatch(GAP.join(word.split()), found[1], re.I))
            place = f"{path}:{start + text.count(chr(10), 0, found.start())}"
            wrong.append(f"{place}: {' '.join(found[0].split())!r}: write {instead!r}")
    return wrong


def heads(path: Path) -> list[str]:
    """Return the docstrings of a file of the package whose first line has no named object."""
    if path.suffix != ".py" or "redis_sync_aio" not in path.parts:
        return []
    bodies = [getattr(node, "body", None) for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    parts = [part for body in bodies if isinstance(body, list) for part in body if isinstance(part, ast.Expr)]
    told = [part.value for part in parts if isinstance(part.value, ast.Constant) and isinstance(part.value.value, str)]
    found = [(one.lineno, NO_HEAD.match(one.value.strip())) for one in told]
    return [f"{path}:{line}: {match[0]!r} begins a docstring: name the object" for line, match in found if match]


def main(names: list[str]) -> int:
    """Check the files that are named, or all that are covered; return the exit status."""
    roots = [Path(name) for name in names or COVERED if Path(name).exists()]
    files = [file for root in roots for file in sorted(root.rglob("*.*") if root.is_dir() else [root])]
    wrong = [line for file in files for line in (*check(file), *heads(file))]
    print("".join(f"{line}\n" for line in wrong), end="")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
