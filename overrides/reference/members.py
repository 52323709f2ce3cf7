"""Inherited members of classes in the reference: each is explained once, with the types that a reader meets.

A member of a private base stands in the first public class that has it, its type variables resolved. Every other
class names it, says which type it returns there, and links to it.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator

import griffe

FIRST = (
    *("AsyncLock", "AsyncSemaphore", "BaseLease", "GuardingLease", "Lease"),
    *("ReadSide", "AsyncReadWriteLock", "Transaction", "Topology"),
)
"""Classes that explain the members they share with others."""
SAME = {"Face": "AsyncLock"}
"""Bases whose members are those of a public class that does not inherit from them."""
COROUTINE = ("send", "throw", "close", "__getattr__")
"""Methods by which a task drives a coroutine."""
ERRORS = "redis_sync_aio.errors."
NOT_MADE_BY_USERS = ("redis_sync_aio.types.", "redis_sync_aio.inspection.", "redis_sync_aio.instrumentation.")
TYPE_VARIABLE = re.compile(r"[A-Z](_co)?")


def resolved(value: object, types: dict[str, object]) -> object:
    """Return an expression with type variables replaced."""
    if isinstance(value, griffe.ExprName) and value.name in types:
        return types[value.name]
    if isinstance(value, griffe.ExprName) or not isinstance(value, griffe.Expr | list | tuple):
        return value
    if isinstance(value, list | tuple):
        return type(value)(resolved(part, types) for part in value)
    parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **{name: resolved(part, types) for name, part in parts.items()})


def arguments(base: object) -> list[object]:
    """Return the type arguments of a base class."""
    inside = base.slice if isinstance(base, griffe.ExprSubscript) else None
    return list(inside.elements) if isinstance(inside, griffe.ExprTuple) else [inside] if inside else []


def variables(kind: griffe.Class) -> list[str]:
    """Return the type variables of a class."""
    names = [str(found) for base in kind.bases for found in arguments(base)]
    return list(dict.fromkeys(name for name in names if TYPE_VARIABLE.fullmatch(name)))


def bases(kind: griffe.Class, types: dict[str, object]) -> Iterator[tuple[griffe.Class, dict[str, object]]]:
    """Yield the bases of a class in the package, the nearest first, each with its type variables resolved."""
    for base, found in zip(kind.bases, kind.resolved_bases, strict=False) if kind.bases else ():
        if found.path.startswith("redis_sync_aio."):
            given = [resolved(one, types) for one in arguments(base)]
            own = dict(zip(variables(found), given, strict=False))
            yield found, own
            yield from bases(found, own)


def member_of(member: griffe.Object, types: dict[str, object]) -> griffe.Object:
    """Return a copy of a member with its types resolved."""
    made = copy.copy(member)
    if member.docstring:
        made.docstring = copy.copy(member.docstring)
        made.docstring.parent = made
    if isinstance(made, griffe.Attribute):
        made.annotation = resolved(made.annotation, types)
    if isinstance(made, griffe.Function):
        made.returns = resolved(made.returns, types)
        made.parameters = griffe.Parameters(*map(copy.copy, made.parameters))
        for parameter in made.parameters:
            parameter.annotation = resolved(parameter.annotation, types)
        made.overloads = made.overloads and [member_of(one, types) for one in made.overloads]
    return made


class InheritedMembers(griffe.Extension):
    """States each inherited member once."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        """Give the public classes of the package the members of their private bases, or links to them."""
        public: dict[str, str] = {}
        for path, module in self.modules(pkg):
            for name in module.exports or ():
                found = module.members.get(str(name))
                target = found.final_target if isinstance(found, griffe.Alias) else found
                if isinstance(target, griffe.Class) and target.path.startswith(ERRORS):
                    target.members.clear()  # its docstring has its attributes
                elif isinstance(target, griffe.Class):
                    public.setdefault(target.path, f"{path}.{name}")
        kinds = {pkg.modules_collection[path]: shown for path, shown in public.items()}
        order = {name: at for at, name in enumerate(FIRST)}
        homes: dict[str, str] = {}
        for kind, shown in kinds.items():
            if shown.startswith(NOT_MADE_BY_USERS) or kind.name == "Lease":
                kind.members.pop("__init__", None)
                for name in COROUTINE:
                    kind.members.pop(name, None)
                kind.decorators = [one for one in kind.decorators if "dataclass" not in str(one.value)]  # no signature
        for kind, shown in sorted(kinds.items(), key=lambda it: order.get(it[0].name, len(order))):
            for name in kind.members:
                homes.setdefault(f"{kind.path}.{name}", f"{shown}.{name}")
            self.give(kind, shown, public, homes)

    def modules(self, module: griffe.Module) -> Iterator[tuple[str, griffe.Module]]:
        """Yield the public modules, and their paths."""
        yield module.path, module
        for name, part in module.modules.items():
            if not name.startswith("_") and not part.is_alias:
                yield from self.modules(part)

    def give(self, kind: griffe.Class, shown: str, public: dict[str, str], homes: dict[str, str]) -> None:
        """Add the inherited members to one class."""
        links: dict[str, list[str]] = {}
        whole: dict[str, None] = {}
        seen = set(kind.members)
        for base, types in list(bases(kind, {})):
            for name, member in base.members.items():
                if name in seen or name.startswith("_") or member.is_alias or not member.docstring:
                    continue
                seen.add(name)
                home = homes.get(member.path)
                if base.name in SAME:
                    home = f"redis_sync_aio.{SAME[base.name]}.{name}"
                made = member_of(member, types)
                if home is None:
                    homes[member.path] = f"{shown}.{name}"
                    kind.set_member(name, made)
                else:
                    if home.rpartition(".")[0] == public.get(base.path):
                        whole[home.rpartition(".")[0]] = None
                        continue
                    returns = made.returns if isinstance(made, griffe.Function) else None
                    given = f" → `{returns}`" if returns and str(returns) != str(member.returns) else ""
                    links.setdefault(home.rpartition(".")[0], []).append(f"[`{name}`][{home}]{given}")
        if links or whole:
            kind.docstring = kind.docstring or griffe.Docstring("", parent=kind)
            text = kind.docstring.value.rstrip()
            for home in list(whole)[: "has all that" not in text]:  # the nearest base
                text += f"\n\nIt has all that a [`{home.rpartition('.')[2]}`][{home}] has."
            for home, names in links.items():
                text += f"\n\nAs in [`{home.rpartition('.')[2]}`][{home}]: {', '.join(names)}."
            kind.docstring.value = text.strip()
