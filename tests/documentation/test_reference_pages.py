"""The reference has every public name once, and no other."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import redis_sync_aio
from redis_sync_aio.compat import Lock
from redis_sync_aio.types import CoordinatorOptions

PACKAGE = Path(redis_sync_aio.__file__).parent
PAGES = Path(__file__).parents[2] / "docs" / "reference"
MODULES = (
    "embedded",
    "inspection",
    "instrumentation",
    "jobs",
    "testing",
    "testing.faults",
    "testing.servers",
    "tracing",
    "types",
    "compat",
    *(f"contrib.{name}" for name in ("aiohttp", "asgi", "fastapi", "otel", "prometheus")),
)
INSIDE = ("do_acquire", "do_release", "do_extend", "do_reacquire", "register_scripts")  # of redis-py's lock
pytestmark = pytest.mark.skipif(not PAGES.exists(), reason="the documentation is not next to these tests")


def listed() -> list[str]:
    texts = [page.read_text("utf-8") for page in PAGES.glob("*.md")]
    return [name for text in texts for name in re.findall(r"^::: redis_sync_aio\.([\w.]+)$", text, re.M)]


def test_nothing_is_listed_twice() -> None:
    assert [name for name, times in Counter(listed()).items() if times > 1] == []


def test_every_public_name_is_listed() -> None:
    """A name that several modules export has one entry."""
    short = {name.rpartition(".")[2] for name in listed()}
    modules = [importlib.import_module(f"redis_sync_aio.{name}") for name in MODULES]
    public = {name for module in (redis_sync_aio, *modules) for name in module.__all__}
    assert public - short == set()


def test_every_entry_is_public() -> None:
    for name in listed():
        module, _, last = name.rpartition(".")
        assert last in importlib.import_module(f"redis_sync_aio.{module}".rstrip(".")).__all__, name


def definition(kind: type) -> ast.ClassDef:
    """Return where a class is defined. Errors name the package `errors` as their module, and are in its parts."""
    place = PACKAGE.parent.joinpath(*kind.__module__.split("."))
    files = place.glob("*.py") if place.is_dir() else [place.with_suffix(".py")]
    nodes = [node for file in files for node in ast.parse(file.read_text("utf-8")).body]
    return next(node for node in nodes if isinstance(node, ast.ClassDef) and node.name == kind.__name__)


def attributes(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the public attributes of a class, and what stands under each: its docstring, or nothing."""
    for part, after in itertools.pairwise([*node.body, None]):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and after.value.value
            yield part.target.id, str(told or "")
        elif isinstance(part, ast.FunctionDef) and any("property" in ast.unparse(one) for one in part.decorator_list):
            yield part.name, ast.get_docstring(part) or ""
        elif isinstance(part, ast.FunctionDef) and part.name == "__init__":
            for one in ast.walk(part):
                for target in getattr(one, "targets", [getattr(one, "target", None)]):
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                        yield target.attr, ""


def undocumented(kind: type) -> list[str]:
    """Return the public attributes of a class that neither the class nor the attribute explains."""
    own = dict(sorted(attributes(definition(kind)), key=lambda it: it[1]))
    explained = set(re.findall(r"^ {4}(\w+)(?: \(.*\))?:", inspect.cleandoc(kind.__doc__ or ""), re.M))
    return [name for name, told in own.items() if not (name.startswith("_") or told or name in explained)]


def test_every_public_attribute_says_what_it_is() -> None:
    """In a docstring of its own, or under Attributes or Args of its class."""
    modules = [redis_sync_aio, *(importlib.import_module(f"redis_sync_aio.{name}") for name in MODULES)]
    found = [getattr(module, name) for module in modules for name in module.__all__]
    bases = {base for one in found if inspect.isclass(one) for base in one.__mro__}
    public = {base for base in bases if base.__module__.startswith("redis_sync_aio")}
    assert len(public) > 80
    missing = {kind: names for kind in public if (names := undocumented(kind))}
    del missing[CoordinatorOptions]  # its keys are the arguments of Coordinator
    assert set(missing.pop(Lock)) == {*INSIDE, "local"}  # its class explains them in sentences
    assert missing == {}


def test_every_public_constant_and_alias_says_what_it_is() -> None:
    assigned: dict[str, list[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        for part, after in itertools.pairwise([*ast.parse(file.read_text("utf-8")).body, None]):
            if isinstance(part, ast.Assign | ast.AnnAssign):
                told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and after.value.value
                for target in part.targets if isinstance(part, ast.Assign) else [part.target]:
                    assigned.setdefault(ast.unparse(target), []).append(str(told or ""))
    modules = [redis_sync_aio, *(importlib.import_module(f"redis_sync_aio.{name}") for name in MODULES)]
    values = {name: getattr(module, name) for module in modules for name in module.__all__}
    public = {name for name, value in values.items() if name in assigned and not inspect.isclass(value)}
    assert len(public) > 10
    assert [name for name in sorted(public) if not any(assigned[name])] == []
