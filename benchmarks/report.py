"""Reports: tables on the terminal, a JSON file, a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .contestants import BY_NAME
from .pictures import Bar, Panel, draw
from .plain_words import LABELS, WORDS
from .scenario import Column, Outcome, Round, Scenario
from .targets import OURS, Verdict


def show(console: Console, outcomes: Sequence[Outcome], verdicts: Sequence[Verdict], about: Mapping[str, Any]) -> None:
    """Print everything."""
    for outcome in outcomes:
        console.print(_table(outcome))
        for name, reason in outcome.skipped.items():
            console.print(f"  {name} did not take part: {reason}", style="dim")
    console.print(_target_table(verdicts))
    console.print("; ".join(f"{key}: {value}" for key, value in about.items()), style="dim")
    for outcome in outcomes:
        for failure in outcome.failures:
            console.print(f"FAILED {outcome.scenario.key}, {failure}", style="bold red", markup=False)
        for violation in outcome.violations:
            console.print(f"EXCLUSION VIOLATED {violation}", style="bold red", markup=False)


def _table(outcome: Outcome) -> Table:
    scenario = outcome.scenario
    table = Table(title=scenario.title, title_justify="left", title_style="bold")
    table.add_column("")
    for column in scenario.columns:
        table.add_column(column.title, justify="right")
    table.add_column("vs redis-py", justify="right")
    for name in outcome.figures:
        cells = [_cell(outcome, name, column) for column in scenario.columns]
        table.add_row(name, *cells, _versus(outcome, name), style="bold green" if name == OURS else "")
    return table


def _cell(outcome: Outcome, name: str, column: Column) -> str:
    value = outcome.figure(name, column.key)
    return "" if value is None else number(value, column.digits)


def number(value: float, digits: int) -> str:
    """Return a figure as it is shown."""
    return "never" if math.isinf(value) else f"{value:,.{digits}f}"


def _versus(outcome: Outcome, name: str) -> str:
    chart = outcome.scenario.chart
    mine, theirs = outcome.figure(name, chart), outcome.figure("redis-py", chart)
    if not mine or not theirs or math.isinf(mine) or math.isinf(theirs):
        return ""
    ratio = mine / theirs
    return f"{ratio:.2f}x" if ratio >= 0.1 else f"{ratio:.1g}x"


def _target_table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(title="Targets (medians of this run's rounds)", title_justify="left", title_style="bold")
    for title in ("scenario", "target", "compared with"):
        table.add_column(title)
    table.add_column("measured", justify="right")
    table.add_column("")
    for verdict in verdicts:
        sign = "≥" if verdict.at_least else "≤"
        table.add_row(
            verdict.scenario,
            f"{sign} {verdict.limit:g} {verdict.text}",
            verdict.compared_with,
            "never" if math.isinf(verdict.value) else f"{verdict.value:.4g}",
            "[green]reached[/]" if verdict.reached else "[bold red]not reached[/]",
        )
    return table


def document(outcomes: Sequence[Outcome], verdicts: Sequence[Verdict], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything as plain data; the time of an event that never happened is null."""
    return {
        "about": dict(about),
        "contestants": {name: contestant.about for name, contestant in BY_NAME.items()},
        "scenarios": {outcome.scenario.key: _outcome(outcome) for outcome in outcomes},
        "targets": [_verdict(verdict) for verdict in verdicts],
        "violations": [text for outcome in outcomes for text in outcome.violations],
        "failures": [f"{outcome.scenario.key}, {text}" for outcome in outcomes for text in outcome.failures],
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    greatest = {column.key for column in outcome.scenario.columns if column.most}
    return {
        "title": outcome.scenario.title,
        "figures": {
            name: {
                key: {
                    "greatest" if key in greatest else "median": _finite(outcome.figure(name, key) or 0),
                    "rounds": [_finite(value) for value in values],
                }
                for key, values in figures.items()
            }
            for name, figures in outcome.figures.items()
        },
        "skipped": outcome.skipped,
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "scenario": verdict.scenario,
        "target": f"{'>=' if verdict.at_least else '<='} {verdict.limit:g} {verdict.text}",
        "compared_with": verdict.compared_with or None,
        "measured": _finite(verdict.value),
        "reached": verdict.reached,
    }


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else round(value, 6)


def saved(path: Path, chosen: Sequence[Scenario], names: Sequence[str]) -> tuple[list[Outcome], dict[str, Any]]:
    """Return what a benchmarks.json says about these scenarios and contestants, in this order.

    Raises KeyError for a scenario that the file does not have.
    """
    found = json.loads(path.read_text("utf-8"))
    outcomes = []
    for scenario in chosen:
        outcome, figures = Outcome(scenario), found["scenarios"][scenario.key]["figures"]
        for name in (name for name in names if name in figures):
            rounds = {key: figure["rounds"] for key, figure in figures[name].items()}
            for played in zip(*rounds.values(), strict=True):
                values = (math.inf if value is None else value for value in played)
                outcome.add(name, Round(dict(zip(rounds, values, strict=True))))
        outcomes.append(outcome)
    return outcomes, found["about"]


def write(
    out: Path, outcomes: Sequence[Outcome], verdicts: Sequence[Verdict], about: Mapping[str, Any], *, plot: bool = True
) -> list[Path]:
    """Write benchmarks.json, and the plot as PNG and SVG if matplotlib is installed; return the paths."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "benchmarks.json"
    path.write_text(json.dumps(document(outcomes, verdicts, about), indent=1, allow_nan=False) + "\n")
    return [path, *(_plot(out, outcomes, about) if plot and outcomes and find_spec("matplotlib") else ())]


def _plot(out: Path, outcomes: Sequence[Outcome], about: Mapping[str, Any]) -> Iterator[Path]:
    panels = [panel for outcome in outcomes if (panel := _panel(outcome)).bars]
    title = f"redis_sync_aio and others ({_where(about)})"
    return draw(panels, title, out / "benchmarks") if panels else iter(())


def picture(path: Path, outcomes: Sequence[Outcome], about: Mapping[str, Any]) -> None:
    """Draw the scenarios for a page: below each other, so that they can be read in a column of text."""
    panels = [_panel(outcome) for outcome in outcomes]
    list(draw(panels, _where(about), path.with_suffix(""), [path.suffix.removeprefix(".")], across=1))


def _where(about: Mapping[str, Any]) -> str:
    return f"{about['server']}, {about['transport']}, Python {about['python']}"


def _panel(outcome: Outcome) -> Panel:
    """Return the scenario's main figure, as it is drawn; contestants that never got there are left out."""
    scenario = outcome.scenario
    column = next(column for column in scenario.columns if column.key == scenario.chart)
    words, bars = WORDS[scenario.key], []
    for name in outcome.figures:
        value = outcome.figure(name, column.key)
        if value and math.isfinite(value):
            rounds = [each for each in outcome.figures[name][column.key] if math.isfinite(each)]
            text = number(value, column.digits)
            bars.append(Bar(LABELS[name], BY_NAME[name].kind, value, text, min(rounds), max(rounds)))
    return Panel(words.title, words.unit, words.better, bars)
