"""The findings of the doctor: one for each thing that it looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

Level: TypeAlias = Literal["ok", "unknown", "warn", "bad"]
LEVELS: tuple[Level, ...] = ("ok", "unknown", "warn", "bad")
"""From harmless to harmful; "unknown": it could not be read."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what was found, what that means for locks, and how to change it."""

    check: str
    level: Level
    found: str
    meaning: str = ""
    fix: str = ""
    where: str = ""
    """Which of several servers; empty if there is one."""

    def as_dict(self) -> dict[str, str]:
        """Return it as --json prints it."""
        return asdict(self)

    def line(self) -> str:
        """Return it as one line of text."""
        parts = [f"{self.found}.", self.meaning, f"Fix: {self.fix}" if self.fix else ""]
        where = f" {self.where}" if self.where else ""
        return f"{self.level:7} {self.check}{where}: {' '.join(part for part in parts if part)}"


def worst(findings: Iterable[Finding]) -> Level:
    """Return the most harmful level among the findings."""
    return LEVELS[max((LEVELS.index(one.level) for one in findings), default=0)]


def unreadable(check: str, what: str) -> Finding:
    """Return the finding for what this user, or this service, does not show."""
    return Finding(check, "unknown", f"{what} is not readable for this user, or not offered by this service")
