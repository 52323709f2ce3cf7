"""`support.virtual` gives the clocks back that it takes."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from ...support.inside import clock
from ...support.virtual import virtual_time


def test_a_module_that_was_imported_meanwhile_has_the_real_clock_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `_core.observers`, which is imported with the first observer."""
    real = clock.now
    with virtual_time(lambda: 7.0):
        late = ModuleType("redis_sync_aio.late")
        vars(late)["now"] = clock.now
        assert late.now() == 7.0
        monkeypatch.setitem(sys.modules, late.__name__, late)
    assert late.now is real
    assert clock.now is real
