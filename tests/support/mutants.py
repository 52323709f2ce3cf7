"""Mutants of Python code: one decision of one function changed, by its source; and the tests that are to find out."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--run-ci", "--timeout=20", "--timeout-method=thread")
"""Of a run in a changed process: the thread ends it also where a mutant swallows what is raised in the main one."""


class Mutant(NamedTuple):
    """In ``owner.name`` (of a class or module) replace ``old`` by ``new``; the tests ``by`` find out."""

    owner: Any
    name: str
    old: str
    new: str = "pass"
    by: str = ""

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Put the changed function in its place, as long as ``patch`` lasts."""
        before: Any = inspect.getattr_static(self.owner, self.name)
        function: Any = before.fget if isinstance(before, property) else inspect.unwrap(before)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.owner.__name__}.{self.name} changed: adapt the mutant"
        module = sys.modules[function.__module__]
        found: dict[str, Any] = {}
        body = textwrap.indent(source.replace(self.old, self.new), "    ")
        maker = f"def make(__class__):\n{body}\n    return {function.__name__}\n"  # for `super()`
        exec(compile("from __future__ import annotations\n" + maker, "<mutant>", "exec"), vars(module), found)
        made = found["make"](self.owner)
        owners = [self.owner]
        if inspect.ismodule(self.owner):  # and where it was imported by name
            ours = [it for name, it in sys.modules.items() if name.startswith(("redis_sync_aio", "tests."))]
            owners += [it for it in ours if it is not self.owner and vars(it).get(self.name) is before]
        for owner in owners:
            patch.setattr(owner, self.name, made)


@cache
def _where() -> dict[str, list[str]]:
    """Return the files of each test."""
    found: dict[str, list[str]] = {}
    for path in sorted(ROOT.glob("tests/*/test_*.py")):
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text("utf-8"), re.MULTILINE):
            found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return found


def nodes(tests: str) -> list[str]:
    """Return the arguments for pytest that select these tests: their names, or those of files or folders."""
    found = []
    for name in tests.split():
        if "/" in name or name.endswith(".py"):
            assert (ROOT / "tests" / name.partition("::")[0]).exists(), f"no {name}: adapt the mutant"
            found.append(f"tests/{name}")
        else:
            assert name in _where(), f"no test is called {name}: adapt the mutant"
            found += [f"{path}::{name}" for path in _where()[name]]
    return found


def run_changed(change: Callable[[pytest.MonkeyPatch], None], tests: str) -> tuple[int, str]:
    """Run tests in a fork of this process, in which the source is changed; return pytest's exit code, and what it said.

    The fork has all modules imported: so a run takes little more than the tests.
    """
    selected = nodes(tests)
    for node in selected:
        path = ROOT / node.partition("::")[0]
        for file in [path] if path.is_file() else path.glob("test_*.py"):
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    with tempfile.TemporaryFile() as said:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the fork does not use
            child = os.fork()
        if not child:
            code: int = 70
            try:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                sys.stdout = sys.stderr = os.fdopen(1, "w")
                os.chdir(ROOT)
                change(pytest.MonkeyPatch())
                code = pytest.ExitCode.TESTS_FAILED  # raised at pytest's end: a coroutine that was not awaited
                code = pytest.main([*OPTIONS, *selected])
            finally:
                sys.stdout.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return os.waitstatus_to_exitcode(status), said.read().decode(errors="replace")


def is_found(mutant: Mutant) -> None:
    """Fail unless one of its tests fails in its presence."""
    code, said = run_changed(mutant.apply, mutant.by)
    assert code != pytest.ExitCode.OK, "no test notices"
    assert code == pytest.ExitCode.TESTS_FAILED, (code, said[-3000:])
    print(said[-1000:])
