"""``python -m benchmarks``: run the scenarios, or read the figures of a run; print tables, write JSON and pictures."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from . import contestants, page, scenarios
from .report import picture as draw
from .report import saved, show, write
from .runner import benchmark
from .scenario import FULL, QUICK, Outcome
from .targets import verdicts

SCENARIOS = ",".join(scenarios.BY_KEY)
PEERS = ",".join(one.name for one in contestants.ALL if one.kind != "broken")


def _chosen(text: str, known: list[str], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"unknown {what} {', '.join(unknown)}; known are {', '.join(known)}")
    return names


def _pages(into: str | None, picture: Path | None, outcomes: Sequence[Outcome], about: Mapping[str, Any]) -> list[Path]:
    """Write what goes into the documentation; return the paths."""
    written = []
    if into is not None:
        path, _, place = into.partition("#")
        page.put(Path(path), place, outcomes, verdicts(outcomes), about)
        written.append(Path(path))
    if picture is not None:
        draw(picture, outcomes, about)
        written.append(picture)
    return written


def main(
    scenario: Annotated[str, typer.Option(help="Scenarios to run, separated by commas.")] = SCENARIOS,
    peers: Annotated[str, typer.Option(help="Contestants, separated by commas.")] = PEERS,
    quick: Annotated[bool, typer.Option(help="Three short rounds, less than 3 minutes.")] = False,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds; 0 = 5, or 3 with --quick.")] = 0,
    out: Annotated[Path, typer.Option(help="Where to write JSON and plot.")] = Path("out"),
    into: Annotated[
        str | None, typer.Option(help="A page and one of its places, PAGE.md#PLACE, to write tables into.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the scenarios, below each other, as this file.")] = None,
    redraw: Annotated[
        Path | None, typer.Option(help="Measure nothing: take the figures from this benchmarks.json.")
    ] = None,
    uvloop: Annotated[bool, typer.Option(help="Use uvloop instead of asyncio's own loop.")] = False,
    tcp: Annotated[bool, typer.Option(help="Connect over TCP loopback instead of a unix socket.")] = False,
) -> None:
    """Compare redis_sync_aio with its peers and the limit. Needs only this machine.

    Exit status 1: a lock had two holders at the same time, or a contestant failed.
    """
    chosen = [scenarios.BY_KEY[key] for key in _chosen(scenario, list(scenarios.BY_KEY), "scenario")]
    if quick and scenario == SCENARIOS:
        chosen = [one for one in chosen if one.quick]
    names = _chosen(peers, list(contestants.BY_NAME), "peer")
    scale = QUICK if quick else FULL
    as_is = scenario == SCENARIOS and peers == PEERS
    scale = dataclasses.replace(scale, rounds=rounds or scale.rounds, everybody=not (quick and as_is))
    console, start = Console(), time.monotonic()
    if redraw is not None:
        outcomes, about = saved(redraw, chosen, names)
        written = _pages(into, picture, outcomes, about)
        console.print(*(f"wrote {path}" for path in written), sep="\n")
        return
    with console.status("starting") as status:
        outcomes, about = benchmark(chosen, names, scale, uvloop=uvloop, tcp=tcp, progress=status.update)
    about["seconds in all"] = round(time.monotonic() - start)
    judged = verdicts(outcomes)
    show(console, outcomes, judged, about)
    written = write(out, outcomes, judged, about)
    written += _pages(into, picture, outcomes, about)
    for path in written:
        console.print(f"wrote {path}")
    if any(outcome.violations or outcome.failures for outcome in outcomes):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
