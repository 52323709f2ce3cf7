"""A wall clock that can be set, for processes that are started with it; their other clocks stay as they are.

    clock = FakeClock(directory)              # LookupError: there is none
    Popen(..., env=os.environ | clock.environment)
    clock.jump(-3600)                         # from now on, for all of them

It needs ``pip install --group clocks``, which needs make and a C compiler.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def library() -> Path:
    """Return the path of the library to preload; LookupError says why there is none."""
    found = importlib.util.find_spec("libfaketime")  # finding does not run it: what it imports is not needed
    name = "libfaketime.1.dylib" if sys.platform == "darwin" else "libfaketime.so.1"
    for place in found.submodule_search_locations or () if found else ():
        for path in Path(place).rglob(name):
            return path
    raise LookupError("no libfaketime: pip install --group clocks (needs make and a C compiler)")


class FakeClock:
    """See the top of this module."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "clock"
        preload = "DYLD_INSERT_LIBRARIES" if sys.platform == "darwin" else "LD_PRELOAD"
        self.environment = {
            preload: str(library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        self.jump(0)

    def jump(self, seconds: float) -> None:
        """Let the clock be so many seconds ahead of the true time."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+}")
        os.replace(new, self._file)

    def wrapped(self, program: str) -> Path:
        """Return an executable that runs ``program`` under this clock."""
        script = self._file.with_suffix(".sh")
        settings = " ".join(f"{name}='{value}'" for name, value in self.environment.items())
        script.write_text(f"#!/bin/sh\n{settings} exec '{program}' \"$@\"\n")
        script.chmod(0o755)
        return script
