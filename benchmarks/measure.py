"""Figures from samples, and the proof of exclusion. Pure: no I/O."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TypeAlias

Hold: TypeAlias = tuple[int, int, int]
"""One grant: asked, got, released (before the call of release); time.monotonic_ns, one clock for all processes."""

SHOWN = 3


def jain(counts: Sequence[int]) -> float:
    """Return the Jain fairness index: 1 = all got the same, 1/n = one got everything."""
    squares = sum(count * count for count in counts)
    return sum(counts) ** 2 / (len(counts) * squares) if squares else 0.0


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that is not below ``share`` of all values; inf when there is none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.inf


def middle(values: Sequence[float]) -> float:
    """Return the median; inf when there are no values."""
    return median(values) if values else math.inf


def overlaps(tasks: Iterable[Iterable[Hold]]) -> list[str]:
    """Return the overlaps among the holds of one lock, merged over all tasks of all processes.

    A hold is narrower than the possession (it begins after the acquire returned and ends before the release
    is called), so an overlap of two is a proof.
    """
    merged = sorted((got, released, number) for number, task in enumerate(tasks) for _, got, released in task)
    found: list[str] = []
    total = 0
    latest = (-1, -1, -1)
    for hold in merged:
        if hold[0] < latest[1]:
            total += 1
            if total <= SHOWN:
                micros = (min(latest[1], hold[1]) - hold[0]) / 1000
                found.append(f"tasks {latest[2]} and {hold[2]} held the lock together for {micros:.1f} µs")
        latest = max(latest, hold, key=lambda one: one[1])
    if total > SHOWN:
        found.append(f"… {total} overlaps in all")
    return found


def peak(tasks: Iterable[Iterable[Hold]]) -> int:
    """Return the greatest number of holds at one moment. It never exceeds the true number, see `overlaps`."""
    steps = sorted(step for task in tasks for _, got, released in task for step in ((got, 1), (released, -1)))
    inside = most = 0
    for _, step in steps:  # a release comes before a grant at the same nanosecond
        inside += step
        most = max(most, inside)
    return most


def torn(readers: Iterable[Iterable[Hold]], writers: Iterable[Iterable[Hold]]) -> list[str]:
    """Return the violations of a read/write lock: a writer has to be alone, readers do not."""
    written = [list(task) for task in writers]
    found = overlaps(written)
    spans = sorted((got, released) for task in written for _, got, released in task)
    starts = [got for got, _ in spans]
    met = 0
    for task in readers:
        for _, got, released in task:
            near = bisect_right(starts, got)
            before = near > 0 and spans[near - 1][1] > got
            after = near < len(spans) and spans[near][0] < released
            met += before or after
    return [*found, *([f"{met} times a reader and a writer were in together"] if met else [])]


def miscounted(counter: int, grants: int) -> list[str]:
    """Return the discrepancy of a counter that every holder read and then wrote plus one."""
    return [] if counter == grants else [f"the counter says {counter} after {grants} grants: updates were lost"]


@dataclass(frozen=True, slots=True)
class Contest:
    """Figures of many tasks that competed for one lock during a window of time."""

    grants: int
    per_second: float
    jain: float
    starved: int
    p99_wait: float  # seconds; includes tasks that were still waiting when the window closed
    max_wait: float

    @property
    def fair_per_second(self) -> float:
        """Return grants per second times the Jain index, which discounts a poller that starves others."""
        return self.per_second * self.jain


def waits_of(tasks: Iterable[Iterable[Hold]], start: int, end: int) -> list[int]:
    """Return the waiting times of tasks between ``start`` and ``end``, in ns."""
    return [min(got, end) - max(asked, start) for task in tasks for asked, got, _ in task if asked < end]


def waits_for_others(sides: Sequence[Sequence[Sequence[Hold]]], start: int, end: int) -> list[int]:
    """Return `waits_of` only those waits in which another side got a grant; ``sides`` has tasks, tasks have holds."""
    merged = sorted(
        (got, asked, side)
        for side, tasks in enumerate(sides)
        for task in tasks
        for asked, got, _ in task
        if asked < end
    )
    latest = [-1] * len(sides)
    found: list[int] = []
    for got, asked, side in merged:
        if any(granted > asked for other, granted in enumerate(latest) if other != side):
            found.append(min(got, end) - max(asked, start))
        latest[side] = got
    return found


def contest(tasks: Sequence[Sequence[Hold]], start: int, end: int) -> Contest:
    """Return the figures of the grants between ``start`` and ``end`` (ns)."""
    counts = [sum(1 for hold in task if hold[1] < end) for task in tasks]
    waits = waits_of(tasks, start, end) or [0]
    total = sum(counts)
    return Contest(
        grants=total,
        per_second=total / ((end - start) / 1e9),
        jain=jain(counts),
        starved=sum(1 for count in counts if count <= total / len(tasks) / 10),
        p99_wait=percentile(waits, 0.99) / 1e9,
        max_wait=max(waits) / 1e9,
    )


def handovers(sides: Sequence[Sequence[Hold]]) -> list[float]:
    """Return the microseconds from each release to the next grant, where that went to another process."""
    merged = sorted((got, released, side) for side, task in enumerate(sides) for _, got, released in task)
    return [(after[0] - before[1]) / 1000 for before, after in pairwise(merged) if before[2] != after[2]]
