"""Puts the figures of a run into a page of the documentation.

The text between two lines of the page, BEGIN and END, is replaced. A page may have several such places; each has a
name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .report import number
from .scenario import Column, Outcome
from .targets import Verdict

BEGIN, END = "<!-- measured {}: begin -->", "<!-- measured {}: end -->"
WIDEST: Final = 4  # figures next to a name: more do not fit on the screen of a phone


def put(
    page: Path, place: str, outcomes: Sequence[Outcome], verdicts: Sequence[Verdict], about: Mapping[str, Any]
) -> None:
    """Write tables into this place of ``page``.

    Raises ValueError when the page does not have the two lines of the place, in this order.
    """
    text = page.read_text("utf-8")
    before, begin, rest = text.partition(BEGIN.format(place))
    _, end, after = rest.partition(END.format(place))
    if not begin or not end:
        raise ValueError(f"{page} needs a line {BEGIN.format(place)!r}, and after it a line {END.format(place)!r}")
    lines = _lines(outcomes, verdicts, about)
    page.write_text("\n".join([f"{before}{begin}", "", *lines, f"{end}{after}"]), "utf-8")


def _lines(outcomes: Sequence[Outcome], verdicts: Sequence[Verdict], about: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"Measured with {about['server']} ({about['transport']}), Python {about['python']} ({about['loop']}), "
        f"redis-py {about['packages']['redis']}; {about['platform']}; medians of {about['rounds']} rounds."
    )
    yield ""
    for outcome in outcomes:
        yield f"**{outcome.scenario.title}**"
        yield ""
        for columns in parts(outcome.scenario.columns):
            yield from _table(outcome, columns)
    if verdicts:
        yield "| target | compared with | measured | |"
        yield "|---|---|---|---|"
        for verdict in verdicts:
            target = f"{'≥' if verdict.at_least else '≤'} {verdict.limit:g} {verdict.text}"
            reached = "reached" if verdict.reached else "not reached"
            yield f"| {target} | {verdict.compared_with} | {verdict.value:.4g} | {reached} |"
        yield ""


def _table(outcome: Outcome, columns: Sequence[Column]) -> Iterator[str]:
    yield f"| | {' | '.join(column.title for column in columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name in outcome.figures:
        values = ((outcome.figure(name, column.key), column.digits) for column in columns)
        cells = ["" if value is None else number(value, digits) for value, digits in values]
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""


def parts(columns: Sequence[Column]) -> Iterator[Sequence[Column]]:
    """Yield the columns in tables of about the same width, none of them wider than a phone."""
    tables = math.ceil(len(columns) / WIDEST)
    fewest, more = divmod(len(columns), tables)
    for table in range(tables):
        start = table * fewest + min(table, more)
        yield columns[start : start + fewest + (table < more)]
