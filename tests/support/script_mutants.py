"""Mutants of scripts: some text of theirs replaced, and the checks that are to notice.

Texts of scripts may break their lines elsewhere, and name constants (`redis_sync_aio._scripts.constants`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from hashlib import sha1
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import pytest
from redis.exceptions import RedisError

from .inside import Script, load, put_in

Client: TypeAlias = Any
"""A redis.asyncio.Redis; redis-py's types of raw commands differ from version to version."""
Check: TypeAlias = Callable[[Client], Awaitable[None]]


def pattern(text: str) -> re.Pattern[str]:
    """Return what finds that text in a script."""
    return re.compile(r"\s+".join(map(re.escape, re.split(r"\s+", put_in(text)))))


def changed(source: str, old: str, new: str) -> str:
    """Return a script with ``new`` wherever ``old`` stands. Raises AssertionError if it stands nowhere."""
    found, times = pattern(old).subn(lambda _: put_in(new), source)
    assert times, f"the script changed: adapt the mutant of {old!r}"
    return found


def mutated(name: str, old: str, new: str) -> Script:
    """Load a script with ``new`` wherever ``old`` stands."""
    source = changed(load(name).source.decode(), old, new).encode()
    return Script(name, source, sha1(source, usedforsecurity=False).hexdigest().encode())


class Mutant(NamedTuple):
    """Replace ``old`` by ``new`` wherever it stands in the scripts, or in one of them."""

    old: str
    new: str = ""
    script: str = ""

    def load(self, name: str) -> Script:
        """Load a script, changed if the text stands in it."""
        return mutated(name, self.old, self.new) if self.stands_in(name) else load(name)

    def stands_in(self, name: str) -> bool:
        """Return whether the text is to be replaced in a script, and stands there."""
        return self.script in ("", name) and pattern(self.old).search(load(name).source.decode()) is not None


def checks(*modules: ModuleType) -> dict[str, Check]:
    """Return all tests of scripts, with all their parameters."""
    found: dict[str, Check] = {}
    for module in modules:
        for name, test in vars(module).items():
            if name.startswith("test_") and inspect.iscoroutinefunction(test):
                found.update((f"{name}{options or ''}", partial(test, **options)) for options in _parameters(test))
    return found


def _parameters(test: Any) -> list[dict[str, Any]]:
    """Return each set of parameters of a test."""
    sets: list[dict[str, Any]] = [{}]
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names, values = mark.args
            chosen = [{names: one} if isinstance(names, str) else dict(zip(names, one, strict=True)) for one in values]
            sets = [before | options for before in sets for options in chosen]
    return sets


async def failing(redis: Client, checks: Mapping[str, Check]) -> str | None:
    """Run the checks until one fails, and return its name."""
    for name, check in checks.items():
        await redis.flushall()
        try:
            await check(redis)
        # Whatever a broken script does to a check. Failed is what pytest.raises raises.
        except (AssertionError, TypeError, ValueError, AttributeError, RedisError, pytest.fail.Exception):
            return name
        finally:
            await redis.config_set("maxmemory", 0)
    return None


async def is_caught(
    redis: Client,
    patch: pytest.MonkeyPatch,
    mutant: Mutant,
    scripts: Sequence[str],
    loader: ModuleType,
    checks: Mapping[str, Check],
    histories: Callable[[Mutant], bool] = lambda _: False,
) -> None:
    """Fail unless a check fails, or else histories do. ``loader`` is the module whose ``load`` the checks use."""
    assert any(map(mutant.stands_in, scripts)), "the scripts changed: adapt the mutant"
    for name in scripts:
        await redis.script_load(mutant.load(name).source.decode())  # raises if it is no Lua any more
    patch.setattr(loader, "load", mutant.load)
    assert await failing(redis, checks) is not None or histories(mutant), "no check notices"
