"""Arguments in the reference: each text is printed once, and refers to from then on.

An argument with the name, the type and the text of an earlier one is "as for" that one. So is one whose docstring says
it. Its type stands there, too, and not in the signature, which has no type either that the default shows, and no "->
None". A function that only makes an object refers to its class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import griffe

HOMES = ("AsyncLock", "AsyncSemaphore", "AsyncReadWriteLock", "LeaderElection")
"""Classes that explain the arguments that others share with them, the first one first."""
FIRST = ("", "compat", "embedded", "inspection", "instrumentation", "jobs", "contrib.fastapi")
"""Modules that do so."""
ENOUGH = 6
"""Words of a text that are as many as a reference to it."""
AS_FOR = re.compile("As for `AsyncLock`")

FACTORY = re.compile(r"Arguments: `(?:redis_sync_aio\.)?([\w.]+)`\.$")
"""The end of the docstring of a function that makes an object of a class, and takes its arguments."""

COMMON = re.compile(
    r"\n+ *On cancellation,? (?:the (?:reply is|replies are|answer is) ignored"
    r"|the (?:command|release) continues in the background"
    r"|the waiter leaves the queue, without delaying the cancellation"
    r"|whatever the server did for the request is undone, without delaying the cancellation)\.(?=\n|$)"
)
"""Sentences that reference/index.md has for all functions."""

THE_OTHERS = re.compile(r"\b[Aa]rguments\b[^.]*\bare those of\b")

TOLD_BY_DEFAULT = {"bool": re.compile("True|False"), "int": re.compile(r"\d+"), "str": re.compile("'.*'|\".*\"")}
"""Types that the default of an argument shows, and such defaults."""
NEVER = re.compile(r"(?!)")


def public(package: griffe.Module) -> Iterator[tuple[str, griffe.Object]]:
    """Yield the public classes and functions, each with the path that it has in the reference."""
    modules = {"": package}
    for path in FIRST[1:]:
        modules[path] = package[path]
    for name, part in package["contrib"].modules.items():
        modules.setdefault(f"contrib.{name}", part)
    for name, part in package.modules.items():
        if not name.startswith("_") and not part.is_alias:
            modules.setdefault(name, part)
    seen = set()
    for path, module in modules.items():
        exports = list(map(str, module.exports or ()))
        for exported in sorted(exports, key=lambda name: HOMES.index(name) if name in HOMES else len(HOMES)):
            found = module.members.get(exported)
            target = found.final_target if isinstance(found, griffe.Alias) else found
            if target is not None and target.path not in seen:
                seen.add(target.path)
                yield ".".join(filter(None, ("redis_sync_aio", path, exported))), target


def callables(package: griffe.Module) -> Iterator[tuple[str, griffe.Function, list[griffe.Docstring]]]:
    """Yield the functions, methods and constructors, each with the docstrings that explain its arguments."""
    for path, found in public(package):
        if isinstance(found, griffe.Function) and found.docstring:
            yield path, found, [found.docstring]
        for name, member in found.members.items() if isinstance(found, griffe.Class) else ():
            if isinstance(member, griffe.Function) and not (name.startswith("_") and name != "__init__"):
                made = name == "__init__"
                docstrings = [one.docstring for one in ((found, member) if made else (member,)) if one.docstring]
                yield path if made else f"{path}.{name}", member, docstrings


class Arguments(griffe.Extension):
    """Explains each argument once."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        """Replace texts that stand in the reference already by a link to their place."""
        homes: dict[tuple[str, str, str], str] = {}
        for path, function, docstrings in callables(pkg):
            if factory := FACTORY.search(docstrings[0].value if docstrings else ""):
                docstrings[0].value = f"See [`{factory[1].rpartition('.')[2]}`][redis_sync_aio.{factory[1]}]."
                for parameter in function.parameters:
                    parameter.annotation = None
                function.returns = None
            if str(function.returns) == "None":
                function.returns = None
            for docstring in docstrings:
                docstring.value = COMMON.sub("", docstring.value)
            sections = [section for docstring in docstrings for section in docstring.parsed]  # reads the types: first
            text = "\n".join(docstring.value for docstring in docstrings)
            told = [
                one for part in sections if part.kind is griffe.DocstringSectionKind.parameters for one in part.value
            ]
            for argument in told:
                self.refer(path, function, argument, homes)
            for parameter in function.parameters:
                if TOLD_BY_DEFAULT.get(str(parameter.annotation), NEVER).fullmatch(str(parameter.default)):
                    parameter.annotation = None
            if THE_OTHERS.search(text):
                explained = {argument.name for argument in told}
                for parameter in function.parameters:
                    parameter.annotation = parameter.annotation if parameter.name in explained else None

    def refer(
        self,
        path: str,
        function: griffe.Function,
        argument: griffe.DocstringParameter,
        homes: dict[tuple[str, str, str], str],
    ) -> None:
        """Say where the text of an argument stands, if it does."""
        text = " ".join(argument.description.split())
        if argument.name not in function.parameters:
            return
        parameter = function.parameters[argument.name]
        home = homes.setdefault((argument.name, str(parameter.annotation), text), path)
        if text.startswith(("As for ", "As of ")):
            argument.description = AS_FOR.sub(r"As for [`AsyncLock`][redis_sync_aio.AsyncLock]", argument.description)
            if ", or " in text:
                return
        elif home != path and len(text.split()) > ENOUGH:
            argument.description = f"As for [`{home.removeprefix('redis_sync_aio.')}`][{home}]."
        else:
            return
        parameter.annotation = None
