"""The waits and holds of locks over time, and where they go in the picture of a timeline."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

# -- The waits and holds of locks over time, as plain data, for pictures and files -----------------------------


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
    """Whether it had to wait for another holder; a round trip to a free lock is no wait."""
    handed_over: bool = False
    """Whether it came from another task of the same process, without a command."""
    until: float | None = None
    """When the lease of a process that died while it held the lock ran out; None for all others."""


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
    order: list[str] = field(default_factory=list)
    """Processes in the order in which they are shown; those that are not in it follow."""
    clock: tuple[str, float] | None = None
    """The machine whose clock this is, and the time of day when that clock began; None: this machine, now."""

    @property
    def processes(self) -> list[str]:
        """The processes: first those of `order`, then by their first request or mark."""
        first = {turn.process: None for turn in sorted(self.turns, key=lambda turn: turn.asked)}
        return list(dict.fromkeys(self.order) | first | {mark.process: None for mark in self.marks if mark.process})

    def held_until(self, turn: Turn) -> float:
        """Return the end of the hold of ``turn``, or that of the run if it still goes on."""
        return self.ended if turn.ended is None else turn.ended

    def waited_until(self, turn: Turn) -> float:
        """Return the end of the wait of ``turn``, or that of the run if it still goes on."""
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


def steps(spans: Iterable[Span]) -> list[tuple[float, int]]:
    """Return how many spans there are at a time: a list of moments, and the number from each moment on."""
    changes: dict[float, int] = {}
    for start, end, _ in spans:
        changes[start] = changes.get(start, 0) + 1
        changes[end] = changes.get(end, 0) - 1
    number, result = 0, []
    for moment in sorted(changes):
        number += changes[moment]
        result.append((moment, number))
    return result


By = Literal["process", "name"]
"""The grouping of the rows of a picture: a part for each process, or one row for each name."""

WIDTH, RIGHT = 1280, 28
BAR, SLIM, THIN, AREA = 16, 11, 6, 22
"""The heights of a lone hold, of one hold of several, of a wait, and of an area that shows only numbers."""
MOST_HOLDS, MOST_WAITS, MOST_ROWS = 8, 6, 60
"""Numbers above which an area stands for bars, and names are left out."""
GAP, HEADING = 8, 30
"""The space between two rows, and the height of the heading of a part."""


@dataclass
class Row:
    """The waits and holds of one name, in one process or in all."""

    name: str
    turns: list[Turn]
    held: list[Span] = field(default_factory=list)
    hold_lanes: list[list[Span]] = field(default_factory=list)
    waited: list[Span] = field(default_factory=list)
    wait_lanes: list[list[Span]] = field(default_factory=list)
    top: float = 0

    def arrange(self, timeline: Timeline) -> None:
        """Distribute holds and waits over lanes."""
        self.held = holds(timeline, self.turns)
        self.hold_lanes = lanes(self.held)
        self.waited = waits(timeline, self.turns)
        self.wait_lanes = lanes(self.waited)

    @property
    def bar(self) -> int:
        """The height of a hold."""
        return BAR if len(self.hold_lanes) <= 1 else SLIM

    @property
    def crowded(self) -> bool:
        """Whether there are too many holds at a time for a bar each."""
        return len(self.hold_lanes) > MOST_HOLDS

    @property
    def queue_is_long(self) -> bool:
        """Whether there are too many waits at a time for a bar each."""
        return len(self.wait_lanes) > MOST_WAITS

    @property
    def holds_height(self) -> float:
        """The height of the upper part of the row."""
        return AREA if self.crowded else max(1, len(self.hold_lanes)) * (self.bar + 1) - 1

    @property
    def waits_height(self) -> float:
        """The height of the lower part of the row."""
        if not self.wait_lanes:
            return 0
        return 2 + (AREA if self.queue_is_long else len(self.wait_lanes) * (THIN + 1) - 1)

    @property
    def height(self) -> float:
        """The height of the row."""
        return self.holds_height + self.waits_height


@dataclass
class Part:
    """The rows of one process; with no title, the rows of all."""

    title: str
    rows: list[Row]
    top: float = 0
    bottom: float = 0


class Scale:
    """From seconds on the clock to pixels from the left."""

    def __init__(self, timeline: Timeline, left: float) -> None:
        self.left = left
        self.start = timeline.started
        self.span = max(timeline.ended - timeline.started, 1e-6)
        # Milliseconds read better below ten seconds.
        self.unit, self.unit_name = (1e-3, "milliseconds") if self.span < 10 else (1.0, "seconds")

    def x(self, time: float) -> float:
        """Return where the moment ``time`` is drawn; what lies outside of the run is drawn at its edge."""
        share = min(max((time - self.start) / self.span, 0.0), 1.0)
        return self.left + share * (WIDTH - self.left - RIGHT)

    def since(self, time: float) -> str:
        """Return how long after the start ``time`` is, for people."""
        return duration(time - self.start)

    def ticks(self) -> Iterator[float]:
        """Yield round numbers of units, a dozen at most."""
        span = self.span / self.unit
        step = next(s * 10.0**e for e in range(-3, 9) for s in (1, 2, 5) if span / (s * 10.0**e) <= 12)
        return iter([number * step for number in range(int(span / step) + 1)])


def duration(seconds: float) -> str:
    """Return a duration for people: 12.1 ms, 1,530 ms, 15.3 s."""
    milliseconds = seconds * 1000
    if abs(milliseconds) >= 10_000:
        return f"{seconds:,.1f} s"
    return f"{milliseconds:,.0f} ms" if abs(milliseconds) >= 100 else f"{milliseconds:.1f} ms"


def parts_of(timeline: Timeline, by: By) -> tuple[list[Part], int]:
    """Return the parts of the picture, and how many names are left out of it: those with the shortest waits."""
    found: dict[tuple[str, str], list[Turn]] = {}
    order = {process: place for place, process in enumerate(timeline.processes)}
    for turn in timeline.turns:
        found.setdefault((turn.process if by == "process" else "", turn.name), []).append(turn)
    rows = sorted(found, key=lambda key: sum(timeline.waited_until(turn) - turn.asked for turn in found[key]))
    chosen = sorted(rows[-MOST_ROWS:], key=lambda key: (order.get(key[0], 0), _natural(key[1])))
    parts: dict[str, Part] = {}
    for process, name in chosen:
        parts.setdefault(process, Part(process, [])).rows.append(Row(name, found[process, name]))
    for mark in timeline.marks if by == "process" else ():
        if mark.process:  # of which there is nothing else to show
            parts.setdefault(mark.process, Part(mark.process, []))
    return list(parts.values()), len(rows) - len(chosen)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key by which "product 2" comes before "product 10"."""
    pieces: list[tuple[int, str]] = []
    digits = ""
    for char in name + "\0":
        if char.isdecimal() and char.isascii():
            digits += char
            continue
        if digits:
            pieces.append((int(digits), ""))
            digits = ""
        pieces.append((-1, char))
    return pieces
