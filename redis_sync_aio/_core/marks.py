"""The text of a mark: what became of the work of a job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

DONE, RESULT = "done", "result"
"""The parts of the mark of a run that has ended: of `once`, and of `idempotent`."""


def said_by(text: str | bytes) -> dict[str, Any] | None:
    """Return the parts of a mark; None for a text of another program."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def is_done(said: Mapping[str, Any]) -> bool:
    """Return True if a mark says that its run has come to its end."""
    return DONE in said or RESULT in said
