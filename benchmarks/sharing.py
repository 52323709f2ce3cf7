"""``python -m benchmarks.sharing``: how `Coordinator(burst=, slice=)` trade throughput against waiting.

Two processes with 16 tasks each contend for one lock with share=True, with an empty section and with 1 ms of work. Only
waits for the other process count: those in which the other process was granted the lock at least once. Exclusion is
verified in every race. Prints tables in Markdown, and writes a plot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console

from redis_sync_aio import Coordinator
from redis_sync_aio.embedded import EmbeddedServer

from .contestants import OursShared
from .measure import contest, middle, percentile, waits_for_others
from .report import number
from .scenario import FULL, Bench
from .scenarios.contention import Result, compete, holds_of, verify
from .server_stats import ServerStats
from .workers import Desk, Pool

TASKS = 16
WORKS = {"empty section": 0.0, "1 ms of work": 0.001}
BURSTS = (1, 4, 16, 64, 256)
SLICES = (0.001, 0.002, 0.005, 0.01, 0.05)
FIGURES = {"fair": "fair/s", "p50": "p50 ms", "p99": "p99 ms", "max": "max ms"}
Terms: TypeAlias = tuple[int, float]
"""Burst and slice."""
STRICT: Terms = (0, SLICES[-1])
Rounds: TypeAlias = list[dict[str, float]]
Curves: TypeAlias = Mapping[str, Mapping[Terms, Rounds]]
"""The rounds by burst and slice, for each kind of section."""


class Tuned(OursShared):
    """`OursShared` with the given burst and slice."""

    def __init__(self, url: str, terms: Terms) -> None:
        super().__init__(url)
        self.terms = terms

    def coordinate(self) -> Coordinator:
        burst, slice = self.terms
        return Coordinator(self.client, burst=burst, slice=slice)


async def tuned(desk: Desk, contestant: str, terms: Terms, seconds: float, work: float, side: int) -> Result:
    """Let tasks compete with that burst and slice."""
    return await compete(desk, Tuned(desk.url, terms), TASKS, seconds, work, side=side)


def _race(bench: Bench, terms: Terms, seconds: float, work: float) -> tuple[dict[str, float], list[str]]:
    bench.stats.flush()
    results, _ = bench.run(Tuned, [tuned, tuned], terms=terms, seconds=seconds, work=work)
    start, end = max(result[0] for result in results), min(result[1] for result in results)
    sides = [holds_of(result[3]) for result in results]
    tasks = [task for side in sides for task in side]
    waits = [wait / 1e6 for wait in waits_for_others(sides, start, end)]
    figures = {"fair": contest(tasks, start, end).fair_per_second, "p50": middle(waits)}
    return figures | {"p99": percentile(waits, 0.99), "max": max(waits, default=0.0)}, verify(bench, tasks)


def figure(rounds: Rounds, key: str) -> float:
    """Return the median of the rounds; for the longest waits, the maximum."""
    values = [each[key] for each in rounds]
    return max(values) if key == "max" else middle(values)


def tables(curves: Curves) -> Iterator[str]:
    """Return the lines of a table in Markdown for each length of the section."""
    for work, rounds in curves.items():
        yield f"**{work}**"
        yield ""
        yield f"| burst | slice ms | {' | '.join(FIGURES.values())} |"
        yield "|---" * (len(FIGURES) + 2) + "|"
        for (burst, slice), played in rounds.items():
            cells = [number(figure(played, key), 0 if key == "fair" else 2) for key in FIGURES]
            yield f"| {burst if burst else '0'} | {f'{slice * 1000:g}' if burst else 'strict'} | {' | '.join(cells)} |"
        yield ""


def plot(curves: Curves, path: Path, title: str) -> None:
    """Draw throughput against waiting: a line for each burst, a point for each slice."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "font.family": ["sans-serif"]}):
        drawing = Figure(figsize=(11, 5.2), layout="constrained")
        _draw_curves(drawing, curves)
        drawing.suptitle(title)
        drawing.savefig(path, metadata={"Date": None})


def _draw_curves(drawing: Any, curves: Curves) -> None:
    for place, (work, rounds) in enumerate(curves.items()):
        axes: Any = drawing.add_subplot(1, len(curves), place + 1)
        for burst in sorted({burst for burst, _ in rounds}):
            chosen = [terms for terms in rounds if terms[0] == burst]
            x = [figure(rounds[terms], "p99") for terms in chosen]
            y = [figure(rounds[terms], "fair") for terms in chosen]
            name = f"burst={burst}" if burst else "strict order of the server"
            [line] = axes.plot(x, y, marker="o" if burst else "*", markersize=4 if burst else 12, label=name)
            if burst == max(BURSTS) and WORKS[work]:  # elsewhere the slices make no difference, and the texts overlap
                for terms, at in zip(chosen, zip(x, y, strict=True), strict=True):
                    text = f"slice={terms[1] * 1000:g} ms"
                    axes.annotate(text, at, (4, 4), textcoords="offset points", fontsize=7, color=line.get_color())
        for key, bounds in (("p99", axes.set_xlim), ("fair", axes.set_ylim)):
            values = [figure(each, key) for each in rounds.values()]
            if max(values) > 2 * min(values):
                bounds(0, 1.12 * max(values))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.set_xlabel(
            "wait for the other process in ms, which 99 of 100 waits stay below\n(further left is better)", fontsize=9
        )
        axes.set_ylabel("grants a second x fairness among tasks (higher is better)", fontsize=9)
        inside = work if WORKS[work] else "nothing to do inside"
        title = f"{2 * TASKS} tasks in 2 processes want one lock,\n{inside}; a point for each slice"
        axes.set_title(title, fontsize=10.5, loc="left", weight="bold")
        axes.tick_params(labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each tries every burst with every slice.")] = 2,
    seconds: Annotated[float, typer.Option(help="Seconds of each race.")] = 0.8,
    bursts: Annotated[str, typer.Option(help="Bursts to try, separated by commas.")] = ",".join(map(str, BURSTS)),
    slices: Annotated[str, typer.Option(help="Slices to try, in seconds.")] = ",".join(map(str, SLICES)),
    out: Annotated[Path | None, typer.Option(help="Where to write the plot, as sharing.svg.")] = Path("docs/assets"),
    uvloop: Annotated[bool, typer.Option(help="Use uvloop instead of asyncio's own loop.")] = False,
) -> None:
    """Try bursts and slices in less than 3 minutes. Exit status 1: a lock had two holders at the same time."""
    console = Console()
    chosen = [STRICT, *((int(burst), float(slice)) for burst in bursts.split(",") for slice in slices.split(","))]
    curves: dict[str, dict[Terms, Rounds]] = {work: {terms: [] for terms in chosen} for work in WORKS}
    violations: list[str] = []
    with EmbeddedServer() as server, Pool(uvloop) as pool, ServerStats(server.url) as stats:
        bench = Bench(server.url, stats, pool, FULL)
        version = stats.version()
        with console.status("starting") as status:
            for turn in range(rounds):
                for terms in _turned(chosen, turn):
                    for work, length in WORKS.items():
                        status.update(f"round {turn + 1} of {rounds}: burst {terms[0]}, slice {terms[1]}, {work}")
                        figures, wrong = _race(bench, terms, seconds, length)
                        curves[work][terms].append(figures)
                        violations += [f"burst {terms[0]}, slice {terms[1]}, {work}: {text}" for text in wrong]
    for line in tables(curves):
        typer.echo(line)
    if out is not None and find_spec("matplotlib"):
        path = out / "sharing.svg"
        plot(curves, path, f"Locks with share=True: what Coordinator(burst=, slice=) choose ({version})")
        typer.echo(f"wrote {path}")
    for text in violations:
        console.print(f"EXCLUSION VIOLATED {text}", style="bold red", markup=False)
    if violations:
        raise typer.Exit(1)


def _turned(chosen: Sequence[Terms], turn: int) -> Sequence[Terms]:
    """Return the terms, in reverse order in every other round."""
    return chosen if turn % 2 == 0 else chosen[::-1]


if __name__ == "__main__":
    typer.run(main)
