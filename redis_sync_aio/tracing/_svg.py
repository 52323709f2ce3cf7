"""The picture of a timeline: one SVG file, without scripts or fonts of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from xml.sax import saxutils
from xml.sax.saxutils import quoteattr

from ._layout import (
    AREA,
    GAP,
    HEADING,
    RIGHT,
    THIN,
    WIDTH,
    By,
    Mark,
    Part,
    Row,
    Scale,
    Span,
    Timeline,
    Turn,
    duration,
    parts_of,
    steps,
    waits,
)

COLOURS = ("#3b76af", "#ef8536", "#519e3e", "#8d69b8", "#84584e", "#d57dbe", "#7d7f1c", "#2fa3bd")
RED, AMBER, GREY, FREE = "#c8102e", "#b35900", "#6e7781", "#eef0f2"
STYLE = """
  text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Arial, sans-serif; fill: #24292f }
  .title { font-size: 19px; font-weight: 600 }
  .small { font-size: 12px; fill: #57606a }
  .label, .legend { font-size: 13px }
  .part { font-size: 13px; font-weight: 600 }
  .count { font-size: 11px; fill: #57606a; paint-order: stroke; stroke: #ffffff; stroke-width: 3px }
  .note { font-size: 12px; font-weight: 600; fill: #c8102e; paint-order: stroke; stroke: #ffffff; stroke-width: 3px }
""".strip("\n")
DEFINITIONS = (
    '<defs><pattern id="dead" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" fill="#fbe4e7"/>'
    f'<rect width="2" height="6" fill="{RED}" fill-opacity="0.45"/></pattern>'
    f'<pattern id="handed-on" width="1" height="1"><rect width="14" height="14" fill="{COLOURS[0]}"/>'
    '<rect y="11" width="14" height="3" fill-opacity="0.5"/></pattern></defs>'
)
GAVE_UP = {"timeout": "the wait timed out", "cancelled": "the wait was cancelled", "error": "the wait failed"}
"""The words for a wait that ended without a grant."""
MOST_PROCESSES = 8
"""The greatest number of processes that the legend names."""
LEFT_MOST, LETTER = 260, 7.2
"""The greatest width of the labels, and that of a letter in them."""


_NO_XML = re.compile(r"[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML does not allow, not even as a reference; any name may have them."""


def escape(text: str) -> str:
    """Return text as XML; what XML cannot say is shown as Python shows it."""
    return saxutils.escape(_NO_XML.sub(lambda found: found[0].encode("unicode_escape").decode(), text))


def svg(
    timeline: Timeline, *, title: str = "Who held which lock, and when", subtitle: str = "", by: By = "process"
) -> str:
    """Return the picture as the text of an SVG file."""
    return _Picture(timeline, by).draw(title, subtitle)


class _Picture:
    """One picture in the making."""

    def __init__(self, timeline: Timeline, by: By) -> None:
        self.timeline = timeline
        self.by = by
        self.parts, self.left_out = parts_of(timeline, by)
        longest = max((len(row.name) for part in self.parts for row in part.rows), default=0)
        self.left = min(max(96.0, 24 + LETTER * longest), float(LEFT_MOST))
        self.scale = Scale(timeline, self.left)
        self.colours = {p: COLOURS[n % len(COLOURS)] for n, p in enumerate(timeline.processes)}

    def draw(self, title: str, subtitle: str) -> str:
        legend, top = self._legend()
        bottom = self._arrange(top)
        notes = self._notes()
        height = bottom + 62 + 17 * len(notes)
        below = (_text(self.left, bottom + 62 + 17 * line, note, "small") for line, note in enumerate(notes))
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
                f'height="{height:g}">',
                f"<title>{escape(title)}</title>",
                f"<style>\n{STYLE}\n</style>",
                DEFINITIONS,
                f'<rect width="{WIDTH}" height="{height:g}" fill="#ffffff"/>',
                _text(self.left, 32, title, "title"),
                _text(self.left, 53, subtitle or self._explanation(), "small"),
                *legend,
                *self._grid(bottom),
                *(line for part in self.parts for line in self._part(part)),
                *below,
                "</svg>",
                "",
            ]
        )

    def _explanation(self) -> str:
        return "A row is one lock. A full bar: it is held. A thin, pale bar below: somebody waits for it."

    def _notes(self) -> list[str]:
        notes: list[str] = []
        if self.left_out:
            notes.append(f"{self.left_out:,} more names are not shown: those that were waited for the least.")
        if self.timeline.dropped:
            notes.append(
                f"{self.timeline.dropped:,} earlier requests and marks are not shown: "
                f"the trace keeps the latest {len(self.timeline.turns):,} requests."
            )
        return notes

    def _arrange(self, top: float) -> float:
        """Give every row its place; return where the last one ends."""
        y = top
        for part in self.parts:
            y += HEADING
            part.top = y
            for row in part.rows:
                row.arrange(self.timeline)
                row.top = y
                y += row.height + GAP
            part.bottom = y - GAP if part.rows else y
        return y

    def _legend(self) -> tuple[list[str], float]:
        """Return the legend, and where it ends."""
        entries = [(f'fill="{FREE}"', "free")]
        shown = self.timeline.processes
        if len(shown) <= MOST_PROCESSES and (self.by == "name" or len(shown) == 1):
            entries[:0] = [(f'fill="{self.colours[p]}"', f"held by {p}") for p in shown]
        else:
            entries.insert(0, (f'fill="{COLOURS[0]}"', "held (a colour for each process)"))
        turns = self.timeline.turns
        if waits(self.timeline, turns):
            entries.append((f'fill="{COLOURS[0]}" fill-opacity="0.35"', "waiting (thin, below)"))
        if any(turn.handed_over for turn in turns):
            entries.append(('fill="url(#handed-on)"', "handed on inside the process"))
        if any(turn.until is not None for turn in turns):
            entries.append(('fill="url(#dead)"', "the lease of the killed process runs out"))
        if any(turn.outcome == "lost" for turn in turns):
            entries.append((f'fill="{RED}"', "lost before it was released"))
        if any(turn.outcome in GAVE_UP for turn in turns):
            entries.append((f'fill="{AMBER}"', "gave up waiting"))
        lines, x, y = [], self.left, 68.0
        for fill, label in entries:
            width = 20 + LETTER * len(label) + 18
            if x > self.left and x + width > WIDTH - RIGHT:
                x, y = self.left, y + 21
            lines.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="14" height="14" rx="2" {fill}/>')
            lines.append(_text(x + 20, y + 12, label, "legend"))
            x += width
        return lines, y + 18

    def _grid(self, bottom: float) -> Iterator[str]:
        top = min((part.top for part in self.parts), default=bottom)
        for part in self.parts:
            if part.title:
                yield _text(12, part.top - 10, part.title, "part")
            for row in part.rows:
                yield from self._free(row)
        for tick in self.scale.ticks():
            x = self.scale.x(self.scale.start + tick * self.scale.unit)
            yield f'<path d="M{x:.1f} {top:.1f}V{bottom + 5:.1f}" stroke="#c3c9d0" stroke-width="1"/>'
            yield _text(x, bottom + 21, f"{tick:,g}" if tick < 1e6 else f"{tick:,.0f}", "label", "middle")
        middle = (self.left + WIDTH - RIGHT) / 2
        yield _text(middle, bottom + 42, f"{self.scale.unit_name} since the start", "label", "middle")

    def _free(self, row: Row) -> Iterator[str]:
        room = int((self.left - 20) / LETTER)
        half = (room - 1) // 2
        label = row.name if len(row.name) <= room else f"{row.name[:half]}…{row.name[-half:]}"
        middle = row.top + row.holds_height / 2
        yield _text(self.left - 10, middle + 4.5, label, "label", "end", tooltip=row.name)
        width, height = WIDTH - self.left - RIGHT, row.holds_height
        yield f'<rect x="{self.left:g}" y="{row.top:.1f}" width="{width:g}" height="{height:g}" fill="{FREE}"/>'

    # -- what happened -------------------------------------------------------------------------------------

    def _part(self, part: Part) -> Iterator[str]:
        marks = [mark for mark in self.timeline.marks if part.title in ("", mark.process)]
        whole = sorted((mark for mark in marks if not mark.name), key=lambda mark: mark.time)
        top, bottom = part.top - 6, part.bottom + 2
        yield from (self._band(mark, top, bottom) for mark in whole if mark.until is not None)
        for row in part.rows:
            yield from self._held(row)
            yield from self._waited(row)
            for mark in marks:
                if mark.name == row.name:
                    yield self._line(mark, row.top - 2, row.top + row.holds_height + 2, AMBER)
        yield from (self._line(mark, top, bottom, RED) for mark in whole if mark.until is None)
        yield from self._texts(whole, part)

    def _held(self, row: Row) -> Iterator[str]:
        if row.crowded:
            yield from self._area(row, row.held, row.top, f"up to {len(row.hold_lanes)} holders", 0.8)
            return
        for lane, spans in enumerate(row.hold_lanes):
            y = row.top + lane * (row.bar + 1)
            for start, end, turn in spans:
                yield self._bar("hold", turn, start, end, y, row.bar, 1)
                if turn.handed_over:
                    x, at = self.scale.x(start), y + row.bar - 3
                    width = max(self.scale.x(end) - x - 0.5, 0.6)
                    yield f'<rect x="{x:.2f}" y="{at:.1f}" width="{width:.2f}" height="3" fill-opacity="0.5"/>'
                if turn.until is not None:
                    yield from self._dead(turn, end, y, row.bar)
                if turn.outcome == "lost":
                    yield self._end("lost", turn, end, y - 2, row.bar + 4, RED)

    def _dead(self, turn: Turn, since: float, y: float, height: float) -> Iterator[str]:
        """Draw the lease of a process that died while it held the lock, until somebody had it again."""
        assert turn.until is not None
        x = self.scale.x(since)
        width = self.scale.x(turn.until) - x
        yield f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height}" fill="url(#dead)"/>'
        wide = 7.0 * len(turn.note) + 12
        if turn.note and wide < width:
            left = x + (width - wide) / 2
            yield f'<rect x="{left:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{height}" fill="#ffffff"/>'
            yield _text(x + width / 2, y + 12.2, turn.note, "note", "middle")

    def _waited(self, row: Row) -> Iterator[str]:
        y = row.top + row.holds_height + 2
        if row.queue_is_long:
            yield from self._area(row, row.waited, y, f"up to {len(row.wait_lanes)} waiting", 0.35)
            return
        for lane, spans in enumerate(row.wait_lanes):
            at = y + lane * (THIN + 1)
            for start, end, turn in spans:
                yield self._bar("wait", turn, start, end, at, THIN, 0.35)
                if turn.granted is None and turn.outcome in GAVE_UP:
                    yield self._end("gave-up", turn, end, at - 1, THIN + 2, AMBER)

    def _bar(self, what: str, turn: Turn, start: float, end: float, y: float, height: float, opacity: float) -> str:
        x = self.scale.x(start)
        width = max(self.scale.x(end) - x - 0.5, 0.6)  # a hair of space tells neighbours apart
        return (
            f'<rect class="{what}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height}" '
            f'fill="{self.colours[turn.process]}"'
            + (f' fill-opacity="{opacity}"' if opacity != 1 else "")
            + f"><title>{escape(self._told(turn))}</title></rect>"
        )

    def _end(self, what: str, turn: Turn, end: float, y: float, height: float, colour: str) -> str:
        """Mark the end of a bar that did not end well."""
        x = self.scale.x(end) - 3
        rectangle = f'<rect class="{what}" x="{x:.2f}" y="{y:.1f}" width="4" height="{height}" fill="{colour}">'
        return f"{rectangle}<title>{escape(self._told(turn))}</title></rect>"

    def _area(self, row: Row, spans: Iterable[Span], y: float, label: str, opacity: float) -> Iterator[str]:
        """Draw how many there are at a time: the more, the higher."""
        processes = {turn.process for turn in row.turns}
        colour = self.colours[processes.pop()] if len(processes) == 1 else GREY
        changes = steps(spans)
        most = max(number for _, number in changes)
        path = [f"M{self.scale.x(changes[0][0]):.1f} {y + AREA:.1f}"]
        for moment, number in changes:
            path.append(f"H{self.scale.x(moment):.1f}V{y + AREA * (1 - number / most):.1f}")
        yield (
            f'<path class="area" d="{"".join(path)}Z" fill="{colour}" fill-opacity="{opacity}">'
            f"<title>{escape(label)}</title></path>"
        )
        yield _text(self.left + 6, y + 14, label, "count")

    def _told(self, turn: Turn) -> str:
        """Return the tooltip of a turn: all that is known of it."""
        told = [turn.name if turn.kind == "lock" else f"{turn.name} ({turn.kind})"]
        told.append(turn.process + (f", {turn.task}" if turn.task else ""))
        waited = self.timeline.waited_until(turn) - turn.asked
        told.append(f"asked at {self.scale.since(turn.asked)}, waited {duration(waited)}")
        if turn.granted is not None:
            held = self.timeline.held_until(turn) - turn.granted
            told.append(f"held for {duration(held)}" + ("" if turn.fence is None else f", fence {turn.fence}"))
        ended = GAVE_UP.get(turn.outcome, turn.outcome) or "still going on when the trace ended"
        told.append(": ".join(part for part in (ended, turn.note) if part))
        return "\n".join(part for part in told if part)

    # -- marks ---------------------------------------------------------------------------------------------

    def _texts(self, marks: list[Mark], part: Part) -> Iterator[str]:
        """Write the text of each mark, unless it would cover that of another one."""
        taken = 0.0
        for mark in marks:
            text = mark.text if part.title else _of_process(mark)
            x, wide = self.scale.x(mark.time), 7.0 * len(text)
            ends = x + wide > WIDTH
            left = x - wide if ends else x
            if left > taken:
                yield _text(x, part.top - 10, text, "note", "end" if ends else "start")
                taken = left + wide + 12

    def _band(self, mark: Mark, top: float, bottom: float) -> str:
        assert mark.until is not None
        x = self.scale.x(mark.time)
        width = max(self.scale.x(mark.until) - x, 1.5)
        return (
            f'<rect class="mark" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}" '
            f'fill="{RED}" fill-opacity="0.18">{self._tip(mark)}</rect>'
        )

    def _line(self, mark: Mark, top: float, bottom: float, colour: str) -> str:
        dash = f'stroke="{colour}" stroke-width="2" stroke-dasharray="5 3"'
        x = self.scale.x(mark.time)
        return f'<path class="mark" d="M{x:.1f} {top:.1f}V{bottom:.1f}" {dash}>{self._tip(mark)}</path>'

    def _tip(self, mark: Mark) -> str:
        return f"<title>{escape(f'{_of_process(mark)}, at {self.scale.since(mark.time)}')}</title>"


def _of_process(mark: Mark) -> str:
    return f"{mark.process}: {mark.text}" if mark.process else mark.text


def _text(x: float, y: float, content: str, kind: str, anchor: str = "start", tooltip: str = "") -> str:
    told = f"<title>{escape(tooltip)}</title>" if tooltip and tooltip != content else ""
    start = f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor={quoteattr(anchor)}>'
    return f"{start}{escape(content)}{told}</text>"
