"""A timeline as a page of HTML: bars over time, and a table of the names. It needs no script and no network."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from string import Template

from ._timeline import Mark, Span, Timeline, Turn, duration, holds, lanes, waits

PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>$title</title>
<style>
:root { color-scheme: light dark; font: 14px system-ui, sans-serif }
body { margin: 24px }
h2 { font-size: 1em; margin: 20px 0 4px }
section { display: grid; grid-template-columns: minmax(90px, 18%) 1fr; gap: 8px 10px }
section > span { overflow-wrap: anywhere; text-align: right }
.lanes { border-left: 1px solid #8888; background: #8881 }
.lane { position: relative; height: 14px; margin-bottom: 1px }
.waits { height: 6px }
b { position: absolute; top: 0; bottom: 0; min-width: 1px; background: #4a7fd4 }
.waits b { opacity: .5 }
.handed-over { border-bottom: 3px solid #0006; box-sizing: border-box }
.lost { border-right: 4px solid #d1242f }
.gave-up { border-right: 4px solid #bf8700; opacity: 1 }
.mark { background: #d1242f; opacity: .6 }
table { border-collapse: collapse; margin: 24px 0 0 }
th, td { padding: 4px 14px 4px 0; text-align: right; border-bottom: 1px solid #8886 }
th:first-child, td:first-child { text-align: left }
</style>
</head>
<body>
<h1>$title</h1>
<p>$duration from the left to the right. A bar: the lock is held. A thin, pale bar: a request waits for another holder.
A red end: the lease was lost. An amber end: the wait ended without a grant. A dark lower edge: handed on inside the
process. Point at a bar to read more.</p>
$notes
$parts
<table>
<thead><tr>$head</tr></thead>
<tbody>
$rows
</tbody>
</table>
</body>
</html>
""")
HEAD = ("lock", "requests", "granted", "longest wait", "longest hold", "gave up waiting", "lost")
GAVE_UP = {"timeout": "the wait timed out", "cancelled": "the wait was cancelled", "error": "the wait failed"}
"""The words for a wait that ended without a grant."""
MOST_LANES = 12
"""Greatest number of bars above each other that are shown of one name."""


def html_page(timeline: Timeline, title: str) -> str:
    """Return the page of a timeline."""
    drawing = _Drawing(timeline)
    dropped = f"{timeline.dropped:,} earlier requests and marks are not shown: the trace keeps the latest."
    return PAGE.substitute(
        title=_text(title),
        duration=_text(duration(drawing.seconds)),
        notes=f"<p>{dropped}</p>" if timeline.dropped else "",
        parts="\n".join(line for process in timeline.processes for line in drawing.part(process)),
        head="".join(f"<th>{cell}</th>" for cell in HEAD),
        rows="\n".join(_rows(timeline)),
    )


class _Drawing:
    """The bars of one page."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.seconds = max(timeline.ended - timeline.started, 1e-6)

    def part(self, process: str) -> Iterator[str]:
        """Yield the lines about one process: its marks, and the holds and waits of each name."""
        yield f"<h2>{_text(process)}</h2>\n<section>"
        marks = [mark for mark in self._timeline.marks if mark.process == process]
        if marks:
            shown = f'<div class="lane">{"".join(map(self._mark, marks))}</div>'
            yield f'<span>incidents</span><div class="lanes">{shown}</div>'
        for name, turns in _by_name(turn for turn in self._timeline.turns if turn.process == process):
            held, waited = holds(self._timeline, turns), waits(self._timeline, turns)
            shown = "".join((*self._lanes("holds", held), *self._lanes("waits", waited)))
            yield f'<span>{_text(name)}</span><div class="lanes">{shown}</div>'
        yield "</section>"

    def _lanes(self, what: str, spans: Sequence[Span]) -> Iterator[str]:
        arranged = lanes(spans)
        for lane in arranged[:MOST_LANES]:
            yield f'<div class="lane {what}">{"".join(self._bar(what, *span) for span in lane)}</div>'
        if len(arranged) > MOST_LANES:
            yield f"<small>up to {len(arranged):,} at a time, {MOST_LANES} are shown</small>"

    def _bar(self, what: str, since: float, until: float, turn: Turn) -> str:
        kinds = []
        if what == "waits":
            kinds += ["gave-up"] if turn.outcome in GAVE_UP else []
        else:
            kinds += ["handed-over"] if turn.handed_over else []
            kinds += ["lost"] if turn.outcome == "lost" else []
        return self._box(" ".join(kinds), since, until, self._told(turn))

    def _mark(self, mark: Mark) -> str:
        until = mark.time if mark.until is None else mark.until
        told = (mark.name, f"{mark.text}, at {duration(mark.time - self._timeline.started)}")
        return self._box("mark", mark.time, until, "\n".join(part for part in told if part))

    def _box(self, kinds: str, since: float, until: float, told: str) -> str:
        left, right = (
            min(max((time - self._timeline.started) / self.seconds, 0.0), 1.0) * 100 for time in (since, until)
        )
        style = f"left:{left:.3f}%;width:{right - left:.3f}%"
        return f'<b class="{kinds}" style="{style}" title="{_text(told)}"></b>'

    def _told(self, turn: Turn) -> str:
        """Return all that is known of a turn."""
        waited = self._timeline.waited_until(turn) - turn.asked
        told = [turn.name if turn.kind == "lock" else f"{turn.name} ({turn.kind})"]
        told.append(turn.process + (f", {turn.task}" if turn.task else ""))
        told.append(f"asked at {duration(turn.asked - self._timeline.started)}, waited {duration(waited)}")
        if turn.granted is not None:
            held = self._timeline.held_until(turn) - turn.granted
            told.append(f"held for {duration(held)}" + ("" if turn.fence is None else f", fence {turn.fence}"))
        ended = GAVE_UP.get(turn.outcome, turn.outcome) or "still going on when the trace ended"
        told.append(": ".join(part for part in (ended, turn.note) if part))
        return "\n".join(told)


def _rows(timeline: Timeline) -> Iterator[str]:
    """Yield a row of the table for each name."""
    for name, turns in _by_name(timeline.turns):
        held = [end - start for start, end, _ in holds(timeline, turns)]
        cells = (
            name,
            f"{len(turns):,}",
            f"{len(held):,}",
            duration(max(timeline.waited_until(turn) - turn.asked for turn in turns)),
            duration(max(held)) if held else "",
            f"{sum(turn.outcome in GAVE_UP for turn in turns):,}",
            f"{sum(turn.outcome == 'lost' for turn in turns):,}",
        )
        yield "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>"


def _by_name(turns: Iterator[Turn] | Sequence[Turn]) -> list[tuple[str, list[Turn]]]:
    """Return the turns of each name; "product 2" comes before "product 10"."""
    found: dict[str, list[Turn]] = {}
    for turn in turns:
        found.setdefault(turn.name, []).append(turn)
    return sorted(found.items(), key=lambda item: [(len(part), part) for part in re.split(r"(?<=\D)(?=\d)", item[0])])


_NO_HTML = re.compile(r"[^\t\n\r -~\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that HTML does not allow, not even as a reference; any name may have them."""


def _text(text: str) -> str:
    """Return text as HTML; what HTML cannot say is shown as Python shows it."""
    return escape(_NO_HTML.sub(lambda found: found[0].encode("unicode_escape").decode(), text))
