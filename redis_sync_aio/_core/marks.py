"""The text of a mark: what became of the work of a job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

DONE, RESULT, NOT_KEPT = "done", "result", "not kept"
"""The parts of the mark of a run that has returned: of `once`, and of `idempotent` with and without its result."""
FINGERPRINT = "fingerprint"
"""The part that each mark of `idempotent` has: what else must be equal in two calls with one name."""
FENCE = "begun"
"""The part that has the fence of the run, so that no two runs write the same text."""
FORGOTTEN = "raised"
"""The part of a mark that counts as none: its run raised. Late copies of earlier changes find it, and do nothing."""
BEGINNING = 256
"""Bytes of a mark that tell its state. One that is longer has a result."""
FORGOTTEN_MS = 60_000
"""Lifetime of a mark that counts as none."""


def said_by(text: str | bytes) -> dict[str, Any] | None:
    """Return the parts of a mark; None for a text of another program."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_forgotten(text: str | bytes) -> bool:
    """Return True if a mark counts as none; its beginning is enough."""
    said = said_by(text)
    return said is not None and FORGOTTEN in said


def is_done(said: Mapping[str, Any]) -> bool:
    """Return True if a mark says that its run has returned."""
    return not said.keys().isdisjoint((DONE, RESULT, NOT_KEPT))
