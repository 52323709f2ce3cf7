"""Mutants of Python code: one decision of one function changed, by its source."""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import Any, NamedTuple

import pytest


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
