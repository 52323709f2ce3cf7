"""Mutants of scripts: some text of theirs replaced, and the checks that are to notice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import sha1
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import pytest
from redis.exceptions import RedisError

from redis_sync_aio._scripts import Script, load

Client: TypeAlias = Any
Check: TypeAlias = Callable[[Client], Awaitable[None]]


class Mutant(NamedTuple):
    """Replace ``old`` by ``new`` wherever it stands in the scripts."""

    old: str
    new: str = ""

    def load(self, name: str) -> Script:
        """Load a script that is changed."""
        source = load(name).source.replace(self.old.encode(), self.new.encode())
        return Script(name, source, sha1(source, usedforsecurity=False).hexdigest().encode())


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
) -> None:
    """Fail unless a check fails. ``loader`` is the module whose ``load`` the checks use."""
    assert any(mutant.old.encode() in load(name).source for name in scripts), "the scripts changed: adapt the mutant"
    for name in scripts:
        await redis.script_load(mutant.load(name).source.decode())  # raises if it is no Lua any more
    patch.setattr(loader, "load", mutant.load)
    assert await failing(redis, checks) is not None, "no check notices"
