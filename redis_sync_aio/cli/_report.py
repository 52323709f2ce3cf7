"""What a run of the demo showed: the audit of the data in Redis, the figures of the workers, the table."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

MS = 1_000_000  # nanoseconds


@dataclass(slots=True)
class Grant:
    """One lease as its worker told of it; times are `time.monotonic_ns`."""

    process: int
    task: int
    product: int
    fence: int
    asked: int
    got: int
    released: int | None = None  # when it began to release; None: not told
    item: int = 0  # what was sold; 0: nothing, the product was sold out


@dataclass(frozen=True, slots=True)
class Seen:
    """A lock that was held right after the kill."""

    product: int
    fence: int
    ends: int  # when its lease ends


@dataclass(frozen=True, slots=True)
class Kill:
    """The end of a worker that held a lock."""

    process: int
    product: int
    at: int
    seen: tuple[Seen, ...]


@dataclass
class Run:
    """What the workers told."""

    started: int
    ended: int
    locked: bool
    patience: float  # seconds until a wait is given up
    grants: list[Grant]
    gave_up: int
    kill: Kill | None

    @cached_property
    def by_product(self) -> Mapping[int, Sequence[Grant]]:
        """The grants of each product, in order of time."""
        found: dict[int, list[Grant]] = defaultdict(list)
        for grant in sorted(self.grants, key=lambda grant: grant.got):
            found[grant.product].append(grant)
        return found

    @cached_property
    def orphans(self) -> Mapping[int, Orphan]:
        """The locks that the killed worker took with it, by product."""
        kill = self.kill
        if kill is None:
            return {}
        survived = {(g.product, g.fence) for g in self.grants if g.process != kill.process}
        found = {}
        for seen in kill.seen:
            after = [g.got for g in self.by_product[seen.product] if g.got > kill.at]
            orphan = Orphan(seen.fence, seen.ends, after[0] if after else None)
            # Held by nobody who lived, yet given up early: by a waiter whose time was up just then.
            given_back = orphan.early and seen.product != kill.product
            if (seen.product, seen.fence) not in survived and not given_back:
                found[seen.product] = orphan
        return found

    def held_until(self, grant: Grant) -> int | None:
        """Return when the section of ``grant`` ended, by its release or by death; None if that is not known."""
        if grant.released is None and self.kill is not None:
            orphan = self.orphans.get(grant.product)
            if orphan is not None and orphan.fence == grant.fence:
                return self.kill.at
        return grant.released


@dataclass(frozen=True, slots=True)
class Orphan:
    """A lock whose holder was killed."""

    fence: int
    ends: int  # when the dead holder's lease ends
    next: int | None  # when somebody had it again

    @property
    def early(self) -> bool:
        """Whether somebody had it before the dead holder's lease ended (told in milliseconds, so not exactly)."""
        return self.next is not None and self.next < self.ends - 20 * MS


# -- what the data in Redis says ---------------------------------------------------------------------------


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
        (audit.disorder, "fences out of order"),
        (figures.overlaps, "times two workers were in the same section"),
        (figures.early, "locks granted before the killed holder's lease had ended"),
    ]
    return [f"{count:,} {what}" for count, what in found if count]


# -- what the workers measured -----------------------------------------------------------------------------


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


def _overlaps(run: Run, grants: Sequence[Grant]) -> int:
    """Count the sections that began before an earlier one had ended."""
    found, busy = 0, 0
    for grant in grants:
        found += grant.got < busy
        busy = max(busy, run.held_until(grant) or 0)
    return found


def _handovers(grants: Sequence[Grant]) -> Iterator[int]:
    """From a release to the start of the next holder, in another process, that was waiting for it."""
    for one, other in pairwise(grants):
        if one.released is not None and other.process != one.process and other.asked < one.released:
            yield other.got - one.released


# -- the table ---------------------------------------------------------------------------------------------


def ms(nanoseconds: float) -> str:
    """Return a duration in milliseconds, for people."""
    value = nanoseconds / MS
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def _spread(values: Sequence[int]) -> str:
    if not values:
        return "-"
    return f"p50 {ms(percentile(values, 50))}   p99 {ms(percentile(values, 99))}"


def table(run: Run, audit: Audit, figures: Figures) -> Table:
    """Return the figures as a table."""
    result = Table(show_header=False, min_width=72)
    result.add_column()
    result.add_column(justify="right")
    _add_audit(result, run, audit)
    _add_figures(result, run, figures)
    if run.kill is not None:
        _add_kill(result, run, run.kill)
    return result


def _add_title(result: Table, title: str) -> None:
    result.add_section()
    result.add_row(f"[bold]{title}")


def _add_check(result: Table, what: str, count: int, good: int = 0) -> None:
    result.add_row(what, f"[{'green' if count == good else 'bold red'}]{count:,}")


def _add_audit(result: Table, run: Run, audit: Audit) -> None:
    _add_title(result, "What the data in Redis says")
    result.add_row("items in stock at start", f"{audit.stocked:,}")
    _add_check(result, "items sold", audit.sold, audit.stocked)
    _add_check(result, "items lost", audit.lost)
    _add_check(result, "items sold twice", audit.twice)
    _add_check(result, "items oversold", audit.oversold)
    if run.locked:
        _add_check(result, "fences out of order", audit.disorder)
    else:
        result.add_row("fences out of order", "no lock, no fences")


def _add_figures(result: Table, run: Run, figures: Figures) -> None:
    _add_title(result, "What the workers measured")
    rate = figures.grants / figures.seconds
    what = "locks granted" if run.locked else "sections entered"
    result.add_row(what, f"{figures.grants:,} in {figures.seconds:.2f} s: {rate:,.0f} per second")
    result.add_row("  to find the product sold out", f"{figures.idle:,}")
    _add_check(result, "two workers in one section", figures.overlaps)
    if run.locked:
        result.add_row("hand-over: release to next process", _spread(figures.handovers))
        result.add_row("waiting for a lock", _spread(figures.waits))
        result.add_row(f"waits given up after {run.patience * 1000:g} ms", f"{run.gave_up:,}")
    result.add_row("fairness between tasks (Jain; best: 1)", f"{figures.fairness:.3f}")


def _add_kill(result: Table, run: Run, kill: Kill) -> None:
    _add_title(result, "What a crash costs")
    orphan = run.orphans[kill.product]
    others = len(run.orphans) - 1
    result.add_row("one worker killed (SIGKILL)", f"worker {kill.process}, {ms(kill.at - run.started)} after the start")
    also = f", and {others} other{'s' * (others > 1)}" if others else ""
    result.add_row("while it held the lock of", f"product {kill.product}{also}")
    if orphan.next is None:
        result.add_row("granted again", "[bold red]never")
        return
    result.add_row("granted again after", ms(orphan.next - kill.at))
    result.add_row("  of which the rest of the dead lease", ms(orphan.ends - kill.at))
    # The server tells what is left of a lease in whole milliseconds, so this can not be told any closer.
    result.add_row("  of which the recovery itself", f"under {max(0, orphan.next - orphan.ends) // MS + 2} ms")
    if others:
        slowest = max(one.next - kill.at for one in run.orphans.values() if one.next is not None)
        result.add_row("slowest of all the locks it held", ms(slowest))


# -- while it runs -----------------------------------------------------------------------------------------


class Display:
    """Progress: a bar per product in a terminal, else a line now and then."""

    COLUMNS = 2

    def __init__(self, console: Console, stock: Mapping[int, int]) -> None:
        self._console = console
        self._stock = stock
        self._total = sum(stock.values())
        self._sold = dict.fromkeys(stock, 0)
        self._count = 0
        self._since = 0.0
        self._stuck: dict[int, int] = {}  # product -> when its holder was killed
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=12, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def started(self) -> None:
        """Note that the workers begin to sell."""
        self._since = time.monotonic()

    def granted(self, grant: Grant) -> None:
        """Note that a worker got a lock."""
        if grant.got > self._stuck.get(grant.product, grant.got):
            del self._stuck[grant.product]
            self._console.print(f"{self._at()} product {grant.product} is worker {grant.process}'s: the lease ran out")

    def ended(self, grant: Grant) -> None:
        """Note that a worker released its lock."""
        if grant.item:
            self._sold[grant.product] += 1
            self._count += 1
            if not self._console.is_terminal and self._count % max(1, self._total // 4) == 0:
                self._console.print(f"{self._at()} {self._progress()}")

    def killed(self, kill: Kill) -> None:
        """Note that a worker was killed while it held a lock."""
        self._stuck[kill.product] = kill.at
        self._console.print(
            f"{self._at()} worker {kill.process} killed (SIGKILL) while it held the lock of product {kill.product}"
        )

    def _at(self) -> str:
        return f"{time.monotonic() - self._since:6.2f} s "

    def _progress(self) -> str:
        rate = self._count / max(time.monotonic() - self._since, 0.001) if self._since else 0.0
        return f"{self._count:,} of {self._total:,} sold, {rate:,.0f} per second"

    def _draw(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        names = list(self._stock)
        rows = math.ceil(len(names) / self.COLUMNS)
        for row in range(rows):
            cells = [cell for product in names[row::rows] for cell in self._bar(product)]
            grid.add_row(*cells)
        grid.caption = self._progress()
        return grid

    def _bar(self, product: int) -> tuple[str, ProgressBar]:
        colour = "red" if product in self._stuck else "default"
        bar = ProgressBar(total=self._stock[product], completed=self._sold[product], width=20, complete_style="cyan")
        return f"[{colour}]product {product}[/]", bar
