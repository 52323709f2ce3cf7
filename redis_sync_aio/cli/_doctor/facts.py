"""What one server said about itself. Nothing here asks or judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SETTINGS = (
    "min-replicas-to-write",
    "min-replicas-max-lag",
    "appendonly",
    "appendfsync",
    "save",
    "timeout",
    "tcp-keepalive",
    "client-output-buffer-limit",
    "cluster-require-full-coverage",
)
"""Names that CONFIG GET is asked for; those that INFO tells are not needed."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An answer that is an error: the server, or its ACL, does not allow the question."""

    why: str


@dataclass(frozen=True, slots=True)
class Facts:
    """The answers of one server."""

    where: str
    info: Mapping[str, Any]
    """What INFO said; empty if it may not be asked."""
    settings: Mapping[str, str]
    """What CONFIG GET said, as far as it may be asked."""

    def number(self, name: str) -> int | None:
        """Return a number of INFO; None if it is not there."""
        value = self.info.get(name)
        return int(value) if isinstance(value, (int, float)) else None

    def setting(self, name: str) -> int | None:
        """Return a setting that is a number; None if it cannot be read."""
        value = self.settings.get(name, "")
        return int(value) if value.lstrip("-").isdigit() else None

    @property
    def is_replica(self) -> bool:
        """Whether it follows another server."""
        return self.info.get("role") in ("slave", "replica")
