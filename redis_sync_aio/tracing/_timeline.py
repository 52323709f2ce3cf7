"""The waits and holds of locks over time, as plain data, for pages and files."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Turn:
    """One request for a lock: how long it waited, and how long what it was granted was held. Times are in seconds."""

    name: str
    process: str
    asked: float
    granted: float | None = None
    ended: float | None = None
    """The end of the hold, or of the wait when nothing was granted; None: not yet."""
    outcome: str = ""
    """One of "released", "lost", "timeout", "cancelled", "error", "taken" (by another client); "" until it ends."""
    kind: str = "lock"
    task: str = ""
    fence: int | None = None
    note: str = ""
    """The reason of its loss, or the error that ended the wait."""
    contended: bool = True
    """True if it had to wait for another holder; a round trip to a free lock is no wait."""
    handed_over: bool = False
    """True if it came from another task of the same process, without a command."""


@dataclass(slots=True)
class Mark:
    """Something else that happened, at a moment or until another one, to one name or ("") to the whole process."""

    time: float
    process: str
    text: str
    name: str = ""
    until: float | None = None


@dataclass
class Timeline:
    """The turns and marks of a run, in one clock for all its processes."""

    started: float
    ended: float
    turns: list[Turn] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    dropped: int = 0
    """Number of requests and marks that were forgotten, so that memory is bounded."""
    clock: tuple[str, float] | None = None
    """The machine whose clock this is, and the time of day when that clock began; None: this machine, now."""

    @property
    def processes(self) -> list[str]:
        """The processes, by their first request or mark."""
        first = {turn.process: None for turn in sorted(self.turns, key=lambda turn: turn.asked)}
        return list(first | {mark.process: None for mark in self.marks})

    def held_until(self, turn: Turn) -> float:
        """Return the end of the hold of ``turn``, or that of the run if it has not ended."""
        return self.ended if turn.ended is None else turn.ended

    def waited_until(self, turn: Turn) -> float:
        """Return the end of the wait of ``turn``, or that of the run if it has not ended."""
        return self.held_until(turn) if turn.granted is None else turn.granted


Span = tuple[float, float, Turn]
"""From when, until when, and the turn that this is a part of."""


def holds(timeline: Timeline, turns: Iterable[Turn]) -> list[Span]:
    """Return when what was granted was held."""
    return [(turn.granted, timeline.held_until(turn), turn) for turn in turns if turn.granted is not None]


def waits(timeline: Timeline, turns: Iterable[Turn]) -> list[Span]:
    """Return when requests waited for other holders."""
    waited = (turn for turn in turns if turn.contended and turn.outcome != "taken")
    return [(turn.asked, timeline.waited_until(turn), turn) for turn in waited]


def lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Distribute the spans over as few lanes as possible, so that those in one lane do not overlap."""
    result: list[list[Span]] = []
    free: list[tuple[float, int]] = []  # when each lane is free, and its number
    for span in sorted(spans, key=lambda span: span[:2]):
        if free and free[0][0] <= span[0]:
            _, lane = heapq.heappop(free)
        else:
            lane = len(result)
            result.append([])
        result[lane].append(span)
        heapq.heappush(free, (span[1], lane))
    return result


def duration(seconds: float) -> str:
    """Return a duration for people: 12.1 ms, 1,530 ms, 15.3 s."""
    milliseconds = seconds * 1000
    if abs(milliseconds) >= 10_000:
        return f"{seconds:,.1f} s"
    return f"{milliseconds:,.0f} ms" if abs(milliseconds) >= 100 else f"{milliseconds:.1f} ms"
