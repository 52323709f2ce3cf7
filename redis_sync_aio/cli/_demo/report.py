"""The table of what a run of the demo showed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from .audit import Audit, Figures, percentile
from .run import MS, Kill, Run

# -- what the workers measured -----------------------------------------------------------------------------


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
        result.add_row(f"waits given up after {run.timeout * 1000:g} ms", f"{run.gave_up:,}")
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
    # The server tells what is left of a lease in whole milliseconds, so this cannot be told any closer.
    result.add_row("  of which the recovery itself", f"under {max(0, orphan.next - orphan.ends) // MS + 2} ms")
    if others:
        slowest = max(one.next - kill.at for one in run.orphans.values() if one.next is not None)
        result.add_row("slowest of all the locks it held", ms(slowest))
