"""The code of a page of the documentation, run as its reader would run it: every block, in the order of the page.

- Python: in one namespace and one event loop for the page; ``await`` may stand outside of functions. A block with
  ``title="app.py"`` is a file of its own: it is written into the directory of the page, and imported.
- sh: by bash, in the directory of the page; the programs of this environment come first. What a block leaves running is
  killed at its end.
- toml, json: must parse.
- lua: must be put in from a file of this repository, as by ``--8<-- "redis_sync_aio/_scripts/lock/release.lua"``.

Addresses that begin with ``redis://localhost`` lead to the server of the tests, and ``localhost:8000``, which is where
uvicorn listens, to a free port. What cannot run has a comment before it that says why:
``<!-- skip: next, "Needs a cluster." -->``. A comment ``<!-- invisible-code-block: python`` holds code that the reader
does not see.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import importlib
import inspect
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from unittest import SkipTest

from redis.asyncio import Redis, RedisCluster
from sybil import Document, Example, Region
from sybil.parsers.markdown import SkipParser
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer, RawFencedCodeBlockLexer

from redis_sync_aio import Coordinator

from ..support.embedded import free_port

ROOT: Final = Path(__file__).parents[2]
ADDRESS: Final = "redis://localhost"
SERVICE: Final = "localhost:8000"
PLAIN: Final = frozenset({"text"})
"""What is not code: output, diagrams."""
LONGEST: Final = 240.0
"""Seconds after which a command hangs."""

_FENCES: Final = RawFencedCodeBlockLexer(re.compile(r"(?P<language>[\w-]*)(?P<options>[^\n]*)$\n", re.MULTILINE))
_HIDDEN: Final = DirectiveInHTMLCommentLexer("invisible-code-block", r"\w+")


class Block:
    """One block of code of a page."""

    def __init__(self, lexemes: Mapping[str, Any]) -> None:
        self.hidden: bool = "directive" in lexemes
        self.language: str = lexemes["arguments" if self.hidden else "language"].strip()
        self.source: str = str(lexemes["source"])
        title = re.search(r'title="([^"]+)"', lexemes.get("options") or "")
        self.title: str | None = title[1] if title else None


class Page:
    """A page whose blocks are run. ``ran`` counts those that did; ``left_out`` has the reasons of the others."""

    def __init__(
        self, source: Path | Document, url: str, directory: Path, given: Mapping[str, object] | None = None
    ) -> None:
        """Take a file, or a document that was read; ``given`` are names that its code may use."""
        self.ran = 0
        self.left_out: list[str] = []
        self._url = url
        self._port: int
        self._clients: list[Redis | RedisCluster | Coordinator] = []
        self._directory = directory
        self._runner: asyncio.Runner
        document = Document.parse(str(source)) if isinstance(source, Path) else source
        for parse in (SkipParser(), self._parse):
            for region in parse(document):
                document.add(region)
        document.namespace.update(given or {}, __name__="__main__")
        self._document = document

    def run(self) -> None:
        """Run every block. Raises what a block raises."""
        known, environment = set(sys.modules), dict(os.environ)
        sys.path.insert(0, str(self._directory))
        try:
            with free_port() as self._port, asyncio.Runner() as self._runner:
                try:
                    self._evaluate_all()
                finally:
                    self._runner.run(self._close())
        finally:
            sys.path.remove(str(self._directory))
            for name in set(sys.modules) - known:
                self._forget(name)
            os.environ.clear()
            os.environ.update(environment)
            time.tzset()  # Django sets the zone of its process

    def _evaluate_all(self) -> None:
        for example in self._document.examples():
            try:
                example.evaluate()
            except SkipTest as reason:
                self.left_out.append(str(reason))
            self._note_clients()

    def _note_clients(self) -> None:
        """Remember clients and coordinators: a later block may give their names to others."""
        values = list(self._document.namespace.values())
        values += [one for value in values if isinstance(value, list) for one in value]
        for value in values:
            if isinstance(value, Redis | RedisCluster | Coordinator) and value not in self._clients:
                self._clients.append(value)

    async def _close(self) -> None:
        """Close the clients and coordinators that the page has left open, as few readers want to read that."""
        for client in sorted(self._clients, key=lambda one: not isinstance(one, Coordinator)):
            if not isinstance(client, Coordinator) or client.why_closed is None:
                await client.aclose()

    def _forget(self, name: str) -> None:
        """Let a module of the page be imported again."""
        if str(getattr(sys.modules.get(name), "__file__", None)).startswith(str(self._directory)):
            del sys.modules[name]
        importlib.invalidate_caches()

    def _parse(self, document: Document) -> Iterable[Region]:
        for region in regions(document):
            yield Region(region.start, region.end, Block(region.lexemes), self._evaluate)

    def _evaluate(self, example: Example) -> None:
        block: Block = example.parsed
        source = block.source.replace(ADDRESS, self._url).replace(SERVICE, f"localhost:{self._port}")
        if block.title is not None:
            target = self._directory / block.title
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source, "utf-8")
            self._forget(target.stem)  # an earlier block may have written an earlier version
        if block.language in PLAIN:
            return
        run = self._languages().get(block.language)
        assert run is not None, f"line {example.line}: no way to run {block.language or 'a block without a language'!r}"
        run(source, example)
        self.ran += 1

    def _languages(self) -> Mapping[str, Callable[[str, Example], object]]:
        return {
            "python": self._python,
            "sh": self._shell,
            "toml": lambda source, example: tomllib.loads(source),
            "json": lambda source, example: json.loads(source),
            "lua": _included,
        }

    def _python(self, source: str, example: Example) -> None:
        namespace = example.document.namespace
        if example.parsed.title is not None:
            name = Path(example.parsed.title)
            namespace.update(runpy.run_path(str(self._directory / name), run_name=name.stem))
            namespace["__name__"] = "__main__"
            return
        above = "\n" * example.line  # so that a traceback shows lines of the page
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile(above + source, example.path, "exec", flags, dont_inherit=True)
        if code.co_flags & inspect.CO_COROUTINE:
            self._runner.run(eval(code, namespace))
        else:
            exec(code, namespace)

    def _shell(self, source: str, example: Example) -> None:
        programs = Path(sys.executable).parent
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | {
            "PATH": path,
            "PYTEST_PLUGINS": "redis_sync_aio_pytest",  # also from a checkout that is not installed
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "REDIS_URL": self._url,
            "UVICORN_PORT": str(self._port),
        }
        # Not a pipe: it would have its end only when what runs in the background has ended.
        with tempfile.TemporaryFile("w+") as output:
            shell = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", source],
                cwd=self._directory,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = shell.wait(LONGEST)
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()
            output.seek(0)
            assert status == 0, f"line {example.line}: exit status {status}\n{output.read()}"


def _included(source: str, example: Example) -> None:
    """Fail unless each line puts in a file of this repository: what is not copied cannot differ."""
    for line in source.splitlines():
        found = re.fullmatch(r'--8<-- "([^"]+)"', line)
        assert found is not None, f"line {example.line}: Lua that is not put in from a file: {line}"
        assert (ROOT / found[1]).is_file(), f"line {example.line}: there is no {found[1]}"


def regions(document: Document) -> list[Region]:
    """Return the blocks of a page, seen and hidden, in their order."""
    return sorted([*_FENCES(document), *_HIDDEN(document)], key=lambda region: region.start)


def without_their_imports(path: Path) -> list[str]:
    """Return, for each block that the reader sees, the names that it uses and only another block imports."""
    found = []
    elsewhere: set[str] = set()
    for region in regions(Document.parse(str(path))):
        block = Block(region.lexemes)
        if block.language != "python":
            continue
        here, used, bound = _names(block.source)
        if not block.hidden:
            missing = sorted((used & elsewhere) - here - bound - set(dir(builtins)))
            found += [f"{path.name}: {name} is not imported in\n{block.source}" for name in missing]
        elsewhere |= here
    return found


def _names(source: str) -> tuple[set[str], set[str], set[str]]:
    """Return the names that a block imports, those that it uses, and those that it binds in other ways."""
    imported: set[str] = set()
    used: set[str] = set()
    bound: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return imported, used, bound
