"""Mutants of Python code: one decision of one function changed, by its source; and the trials that are to find them."""

from __future__ import annotations

import asyncio
import inspect
import sys
import textwrap
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple, TypeAlias

import pytest
import redis

from redis_sync_aio.embedded import EmbeddedServer

from .gate import Gate
from .inside import load
from .schedule import SCRIPTS

Trial: TypeAlias = Callable[[Gate, Any], Callable[[], Coroutine[Any, Any, None]]]
"""Makes the main function of a run behind a gate, with a client of the server."""
Found: TypeAlias = tuple[str, BaseException] | None
"""The trial that failed, and what it raised."""


class Mutant(NamedTuple):
    """In ``owner.name`` (of a class or module) replace ``old`` by ``new``."""

    owner: Any
    name: str
    old: str
    new: str = "pass"

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Put the changed function in its place, as long as ``patch`` lasts."""
        function = inspect.getattr_static(self.owner, self.name)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.owner.__name__}.{self.name} changed: adapt the mutant"
        module = sys.modules[function.__module__]
        found: dict[str, Any] = {}
        code = compile("from __future__ import annotations\n" + source.replace(self.old, self.new), "<mutant>", "exec")
        exec(code, vars(module), found)
        patch.setattr(self.owner, self.name, found[self.name])


def failing(
    private: EmbeddedServer,
    trials: Iterable[tuple[str, Trial]],
    schedules: Callable[[EmbeddedServer], object] = lambda _: None,
) -> Found:
    """Run the trials, each on an empty server, then the schedules; return what failed first, and what it raised."""
    # Whatever broken code does to a check; Failed is what pytest.raises raises.
    anything = (Exception, asyncio.CancelledError, pytest.fail.Exception)
    with redis.Redis(unix_socket_path=private.unix_socket) as server:
        for name in SCRIPTS:
            server.script_load(load(name).source)
        for name, trial in trials:
            server.flushall()
            with Gate(private.unix_socket) as gate:
                try:
                    gate.run(trial(gate, server))
                except anything as error:
                    return name, error
    try:
        schedules(private)
    except anything as error:
        return "schedules", error
    return None


def all_pass(found: Found) -> None:
    """Raise what a trial raised without any mutant."""
    if found is not None:
        raise found[1]


def is_caught(found: Found) -> None:
    """Fail unless a trial failed."""
    assert found is not None, "no check notices"
    print("caught by", found[0], repr(found[1])[:200])
