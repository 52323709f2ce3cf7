"""The audit of the data in Redis, and the figures of the workers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .._output import counted
from .run import ReportedGrant, Run


@dataclass(frozen=True, slots=True)
class Sale:
    """One entry of a list of sales."""

    item: int
    fence: int

    @classmethod
    def parse(cls, entry: str) -> Sale:
        """Read an entry as a worker wrote it: "item fence process task"."""
        item, fence, _process, _task = entry.split()
        return cls(int(item), int(fence))


@dataclass
class Audit:
    """The books, from the data in Redis alone: whatever the workers believe does not count."""

    stocked: int = 0
    sold: int = 0
    left: int = 0  # still in stock when everybody had gone
    lost: int = 0  # neither sold nor in stock
    twice: int = 0  # sales of an item that was sold before
    oversold: int = 0  # sales beyond what there was
    disorder: int = 0  # sales under a fence that is not greater than the one before
    fenced: bool = True

    def add(self, stocked: int, left: int, sales: Sequence[Sale]) -> None:
        """Check one product: items are numbered ``stocked`` to 1, in the order in which they are sold."""
        items = {sale.item for sale in sales}
        self.stocked += stocked
        self.sold += len(sales)
        self.left += max(left, 0)
        self.lost += len(set(range(max(left, 0) + 1, stocked + 1)) - items)
        self.twice += len(sales) - len(items)
        self.oversold += max(0, len(sales) - stocked)
        if self.fenced:
            self.disorder += sum(b.fence <= a.fence for a, b in pairwise(sales))


def faults(audit: Audit, figures: Figures) -> list[str]:
    """Return what went wrong, in words; nothing if all is well."""
    found = [
        (audit.left, "left unsold"),
        (audit.lost, "lost (neither sold nor in stock)"),
        (audit.twice, "sold twice"),
        (audit.oversold, "oversold (more sales than stock)"),
    ]
    counts = [
        (audit.disorder, "fence", "out of order"),
        (figures.overlaps, "time", "two workers were in the same section"),
        (figures.early, "lock", "granted before the killed holder's lease had ended"),
    ]
    sales = [f"{count:,} {what}" for count, what in found if count]
    return sales + [f"{counted(count, one)} {what}" for count, one, what in counts if count]


def percentile(values: Sequence[int], percent: float) -> int:
    """Return the smallest of ``values`` that ``percent`` of them do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def jain(counts: Sequence[int]) -> float:
    """Return Jain's fairness index: 1.0 when all are equal, 1/n when one has everything."""
    total = sum(counts)
    return total * total / (len(counts) * sum(count * count for count in counts)) if total else math.nan


@dataclass
class Figures:
    """The figures of a run; durations in nanoseconds."""

    grants: int
    idle: int  # grants under which there was nothing to sell
    seconds: float
    overlaps: int  # times that two were in one section
    early: int  # locks of the killed worker that somebody had before its lease ended
    waits: list[int]
    handovers: list[int] = field(default_factory=list)
    fairness: float = math.nan


def measure(run: Run) -> Figures:
    """Compute the figures of ``run``."""
    figures = Figures(
        grants=len(run.grants),
        idle=sum(grant.item == 0 and grant.released is not None for grant in run.grants),
        seconds=(run.ended - run.started) / 1e9,
        overlaps=sum(_overlaps(run, grants) for grants in run.by_product.values()),
        early=sum(orphan.early for orphan in run.orphans.values()),
        waits=[grant.got - grant.asked for grant in run.grants],
    )
    if run.locked:
        figures.handovers = [gap for grants in run.by_product.values() for gap in _handovers(grants)]
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for grant in run.grants:
        if run.kill is None or grant.process != run.kill.process:
            counts[grant.process, grant.task] += 1
    figures.fairness = jain(list(counts.values()))
    return figures


def _overlaps(run: Run, grants: Sequence[ReportedGrant]) -> int:
    """Count the sections that began before an earlier one had ended."""
    found, busy = 0, 0
    for grant in grants:
        found += grant.got < busy
        busy = max(busy, run.held_until(grant) or 0)
    return found


def _handovers(grants: Sequence[ReportedGrant]) -> Iterator[int]:
    """From a release to the start of the next holder, in another process, that was waiting for it."""
    for one, other in pairwise(grants):
        if one.released is not None and other.process != one.process and other.asked < one.released:
            yield other.got - one.released
