"""What `import redis_sync_aio` imports: the package itself and little else. docs/operations/servers.md has the time.

The time depends on the machine, so nothing here measures it; what it is made of is the same everywhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

MOST_MODULES = 190
"""Modules that importing the package may add to those of redis.asyncio: each costs a quarter of a millisecond.

Those of anyio are not counted: its oldest version imports all of its own, 34 with sniffio, and 4.16 imports 6.
"""

ON_DEMAND = ["_inspection", "cli", "compat", "contrib", "embedded", "inspection", "testing", "tracing"]
"""Public modules that a program imports itself when it uses them."""

SLOW = ["http.server", "importlib.metadata", "multiprocessing", "pydoc", "subprocess", "unittest", "xml"]
"""Modules of the standard library that only tools need."""


@cache
def imported() -> list[str]:
    """Return the modules that importing the package adds to those of redis.asyncio."""
    script = (
        "import sys, json, redis.asyncio; before = set(sys.modules); import redis_sync_aio; "
        "print(json.dumps([name for name in sys.modules if name not in before]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100)
    names: list[str] = json.loads(done.stdout)
    return names


def test_of_other_packages_only_anyio_is_imported() -> None:
    """No optional dependency is: neither rich nor typer, opentelemetry, fastapi, pytest …"""
    roots = {name.partition(".")[0] for name in imported()}
    roots.discard("sniffio")  # which older versions of anyio import
    assert roots - sys.stdlib_module_names == {"redis_sync_aio", "anyio"}
    assert "anyio._backends" not in imported()


@pytest.mark.parametrize("name", ON_DEMAND)
def test_what_is_for_some_programs_is_imported_by_them(name: str) -> None:
    module = f"redis_sync_aio.{name}"
    assert not [one for one in imported() if one == module or one.startswith(f"{module}.")]


def test_nothing_slow_of_the_standard_library_is_imported() -> None:
    found = [name for name in imported() if any(name == slow or name.startswith(f"{slow}.") for slow in SLOW)]
    assert not found


def test_the_number_of_modules_is_bounded() -> None:
    counted = [name for name in imported() if name.partition(".")[0] not in ("anyio", "sniffio")]
    assert len(counted) <= MOST_MODULES
