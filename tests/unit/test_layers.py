"""Rules of the package that no linter has, one test for each: it fails with all places that break the rule.

What tools check stands in pyproject.toml: layers, circles of rooms and optional packages (import-linter), clocks, late
imports, private modules of redis-py and docstrings (ruff).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from types import FunctionType

import redis_sync_aio
from redis_sync_aio import errors, inspection, instrumentation, jobs, types

ROOT = Path(redis_sync_aio.__file__).parent
PACKAGE = "redis_sync_aio"
EDGES = ("cli", "embedded", "testing", "__main__")


def module_name(path: Path) -> str:
    """`_transport.connection` for `_transport/connection.py`, `__init__` for that of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


PUBLIC_MODULES = {
    "compat",
    "contrib",
    "embedded",
    "errors",
    "inspection",
    "instrumentation",
    "jobs",
    "testing",
    "tracing",
    "types",
}
MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text("utf-8"))


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """Every node of every module."""
    for module in MODULES:
        yield from ((module, node) for node in ast.walk(tree(module)))


def room(module: str) -> str:
    return module.split(".")[0]


def where(module: str, node: ast.stmt | ast.expr | ast.excepthandler) -> str:
    return f"{MODULES[module].relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:80]}"


def assert_none(offenders: list[str]) -> None:
    assert not offenders, "\n" + "\n".join(offenders)


# -- one place for each thing ------------------------------------------------------------------------------


def test_only_keys_spells_keys() -> None:
    docstrings = {node.value for _, node in nodes() if isinstance(node, ast.Expr)}
    assert_none(
        [
            where(module, node)
            for module, node in nodes()
            if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)) and node not in docstrings
            if module != "_core.keys" and re.search(r":queue|:fence|:polls|rsa:", repr(node.value))
        ]
    )


def imported(module: str) -> Iterator[str]:
    """The modules of this package that a module imports when it runs: not for types only."""
    is_package = MODULES[module].name == "__init__.py"
    place = [] if module == "__init__" else module.split(".") if is_package else module.split(".")[:-1]
    for_types = {
        child
        for node in ast.walk(tree(module))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and node.level and node not in for_types:
            above = place[: len(place) - node.level + 1]
            base = [*above, *node.module.split(".")] if node.module else above
            names = (".".join([*base, alias.name]) for alias in node.names)
            yield from (name if name in MODULES else ".".join(base) for name in names)


def test_no_modules_import_each_other_at_run_time() -> None:
    TopologicalSorter({module: imported(module) for module in MODULES}).prepare()  # raises an error with the circle


SHIELDS = {
    "_core.observing": 2,
    "_core.logs": 1,
    "_transport.call": 2,
    "_transport.dialogues": 1,
    "_transport.connection": 2,
    "_leases.hub": 1,
    "_transport.witness": 1,
    "jobs": 3,
    "cli": 1,
    "testing.faults": 1,
}
"""How often ``except Exception`` stands where one call, or one message, must not cost the others their connection.

What is caught there ends that call, and is logged. And where the caller's client connects: it may raise anything, a
CancelledError that nobody asked for too. That is kept, logged, and tried again.
A codec that fails after the run of a job does not make that run fail; an annotation may raise anything.
The program says so in one line, and exits with a code of its own. The proxy for tests keeps it for the end of the test.
"""


RAISE_LATER = ("_core.observing", "_core.logs", "_transport.call")
"""Modules of `SHIELDS` that call code of the application. What is no Exception is raised later (`raise_later`)."""


def test_errors_are_named_and_nothing_is_swallowed() -> None:
    """No bare ``except``, no ``except Exception`` but in `SHIELDS`; a handler of BaseException raises it again."""
    wrong: list[str] = []
    shields = dict.fromkeys(SHIELDS, 0)
    for module, node in nodes():
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = set() if node.type is None else set(re.findall(r"\w+", ast.unparse(node.type)))
        raises = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        shielded = {"BaseException" if module in RAISE_LATER else "Exception"}
        if caught - {"asyncio", "CancelledError"} == shielded and module in SHIELDS:
            shields[module] += 1
        elif node.type is None or "Exception" in caught or ("BaseException" in caught and not raises):
            wrong.append(where(module, node))
    assert_none(wrong)
    assert shields == SHIELDS


def test_every_task_has_an_owner_and_a_name() -> None:
    """Tasks of a TaskGroup are owned by it; all others carry our name, by which tests find them."""
    wrong: list[str] = []
    for module, node in nodes():
        if isinstance(node, ast.Call) and (called := ast.unparse(node.func)).endswith("create_task"):
            named = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "name"]
            owned = room(module) in EDGES and called == "group.create_task"
            if not owned and not (named and PACKAGE in named[0]):
                wrong.append(where(module, node))
    assert_none(wrong)


def test_no_file_is_longer_than_700_lines() -> None:
    lengths = {
        path.relative_to(ROOT): path.read_text("utf-8").count("\n")
        for path in ROOT.rglob("*.*")
        if path.suffix in (".py", ".lua")
    }
    assert_none([f"{path}: {length} lines" for path, length in lengths.items() if length > 700])


def test_no_function_is_longer_than_60_lines() -> None:
    """Without its docstring."""
    wrong: list[str] = []
    for module, node in nodes():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1 - len((ast.get_docstring(node) or "").splitlines())
            if length > 60:
                wrong.append(f"{where(module, node)}: {length} lines")
    assert_none(wrong)


# -- the public face ---------------------------------------------------------------------------------------


def exported() -> dict[str, object]:
    return {name: getattr(module, name) for module in (redis_sync_aio, errors, types) for name in module.__all__}


def public_definitions() -> dict[str, ast.AST]:
    """Public classes and functions, and the public methods of the classes, also those they inherit."""
    found: dict[str, ast.AST] = {}
    for name, value in exported().items():
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
    """Where a class or function of this package is defined; of overloads, the last one.

    Errors name the package `errors` as their module, and are defined in its parts.
    """
    named = value.__module__.removeprefix(f"{PACKAGE}.")
    for module in [named, *(part for part in MODULES if part.startswith(f"{named}."))]:
        for node in reversed(tree(module).body):
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


NOT_MADE_BY_USERS = (
    *("Attempt", "BaseLease", "GuardedTransaction", "GuardingLease", "Lease", "MultiLease", "RedlockLease"),
    *("RobustLease", "Transaction", "WatchRetry"),
)
"""Classes whose objects users get and do not make."""


def own_names(module: str) -> set[str]:
    """What a module defines or imports from this package."""
    found: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and node.level:
            found.update(alias.asname or alias.name for alias in node.names)
    found.update(node.name for node in tree(module).body if isinstance(node, ast.ClassDef))
    return found


NOT_ANNOTATED = {"ClientSource", "OnBusy", "OnMismatch", "Replies", "Synchronize", "SynchronizeOrSkip", "UndoStep"}
"""Words and functions that callers write as they are, and decorators: a name of their own would help nobody."""


def test_types_has_what_public_signatures_name() -> None:
    known = {*exported(), *inspection.__all__, *instrumentation.__all__, *jobs.__all__, *NOT_ANNOTATED}
    wrong: list[str] = []
    for name, value in exported().items():
        for base in value.__mro__ if inspect.isclass(value) else (value,):
            module = getattr(base, "__module__", "").removeprefix(f"{PACKAGE}.")
            if module not in MODULES or not isinstance(base, (type, FunctionType)):
                continue
            node = definition(base)
            for part in node.body if isinstance(node, ast.ClassDef) else [node]:
                if not isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    continue
                made = part.name == "__init__" and base is value and name not in NOT_MADE_BY_USERS
                if part.name.startswith("_") and not made:
                    continue
                arguments = (*part.args.posonlyargs, *part.args.args, *part.args.kwonlyargs, part.args.vararg)
                annotations = [part.returns, *(one.annotation for one in arguments if one is not None)]
                named = {n.id for one in annotations if one for n in ast.walk(one) if isinstance(n, ast.Name)}
                wrong += [f"{name}.{part.name}: {one}" for one in sorted(named & own_names(module) - known)]
    assert_none(wrong)


def test_what_is_public_is_documented() -> None:
    """One line that ends with a full stop, and the errors it raises."""
    wrong: list[str] = []
    for name, node in PUBLIC.items():
        doc = documentation(node)
        if not doc.split("\n\n")[0].rstrip().endswith((".", "::", ":")):
            wrong.append(f"{name}: {doc.splitlines()[:1]} is no sentence")
        if not isinstance(node, ast.ClassDef) and raises(node) and not re.search(r"\bRaises?\b|\braised\b", doc):
            wrong.append(f"{name} raises, and does not say what")
    assert_none(wrong)


def test_what_takes_arguments_documents_errors_and_shows_an_example() -> None:
    wrong: list[str] = []
    for name in (
        *("AsyncLock", "AsyncSemaphore", "AsyncReadWriteLock", "AsyncReentrantLock", "AsyncMultiLock"),
        *("Coordinator", "Backoff", "wait_until", "synchronized", "transaction", "watch_retry"),
        *("FenceGate", "Compensation"),
    ):
        doc = documentation(PUBLIC[name]) + (inspect.getmodule(getattr(redis_sync_aio, name)).__doc__ or "")
        if "Raises:" not in doc:
            wrong.append(f"{name} does not say what it raises")
        if "Example:" not in doc and "::\n" not in doc:
            wrong.append(f"{name} shows no example")
    assert_none(wrong)


def test_what_waits_says_what_a_cancellation_does() -> None:
    waiting = (
        *(f"{lock}.acquire" for lock in ("AsyncLock", "AsyncSemaphore", "AsyncReentrantLock", "AsyncMultiLock")),
        *("Lease.extend", "Lease.release", "Coordinator.aclose"),
        *("RobustLease.record", "RobustLease.compensate", "FenceGate.accept", "Compensation.push"),
        *("transaction", "Transaction.watch", "Lease.transaction"),
    )
    assert_none([name for name in waiting if "On cancellation" not in documentation(PUBLIC[name])])


def test_all_is_sorted_complete_and_real() -> None:
    assert redis_sync_aio.__all__ == sorted(set(redis_sync_aio.__all__))
    for name in redis_sync_aio.__all__:
        assert getattr(redis_sync_aio, name).__module__.startswith(PACKAGE)
    for name, value in vars(errors).items():
        if inspect.isclass(value) and value.__module__ == errors.__name__:
            assert name in errors.__all__, f"{name} cannot be caught by its public name"


def test_the_public_modules_are_these_and_say_what_they_export() -> None:
    own = {module.partition(".")[0] for module in MODULES if not module.startswith("_")}
    assert own - {"cli"} == PUBLIC_MODULES
    for module in PUBLIC_MODULES - {"contrib"}:
        assert importlib.import_module(f"{PACKAGE}.{module}").__all__, module


def test_the_errors_are_one_tree() -> None:
    for value in vars(errors).values():
        if inspect.isclass(value) and value.__module__ == errors.__name__:
            assert issubclass(value, errors.SyncError), value
            assert value.__doc__


def test_errors_for_callers_are_defined_in_errors() -> None:
    """But for those that never leave their room, and those of the edges."""
    inside = {"BadAddress", "ReplyError", "SlotMoved", "WatchRefused"}
    assert_none(
        [
            f"{MODULES[module].relative_to(ROOT)}:{node.lineno}: {node.name}"
            for module, node in nodes()
            if isinstance(node, ast.ClassDef) and room(module) not in ("errors", "compat", *EDGES)
            if re.search(r"Error|Exception", " ".join(map(ast.unparse, node.bases))) and node.name not in inside
        ]
    )


def test_an_error_with_one_caller_is_worded_where_it_is_raised() -> None:
    """A static method of an error of ours has several callers, or several statements or facts."""
    calls = Counter(ast.unparse(node.func) for _, node in nodes() if isinstance(node, ast.Call))
    assert_none(
        [
            where(module, method)
            for module, node in nodes()
            if isinstance(node, ast.ClassDef) and room(module) == "errors"
            for method in node.body
            if isinstance(method, ast.FunctionDef) and "staticmethod" in map(ast.unparse, method.decorator_list)
            if calls[f"{node.name}.{method.name}"] < 2 and not method.name.startswith("_")
            if len(method.body) < 3 and len(method.args.args + method.args.kwonlyargs) < 2
        ]
    )
