"""A picture of a run: who held which lock when, as one SVG file without scripts or fonts of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from xml.sax.saxutils import escape

from .run import MS, Kill, ReportedGrant, Run

COLOURS = ("#3b76af", "#ef8536", "#519e3e", "#8d69b8", "#84584e", "#d57dbe", "#bcbd45", "#5bbcd6")
RED = "#c8102e"
WIDTH, LEFT, RIGHT, TOP = 1280, 96, 28, 118
ROW, BAR = 24, 16
STYLE = """
  text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Arial, sans-serif; fill: #24292f }
  .title { font-size: 19px; font-weight: 600 }
  .small { font-size: 12px; fill: #57606a }
  .label, .legend { font-size: 13px }
  .kill { font-size: 12px; font-weight: 600; fill: #c8102e }
""".strip("\n")


class Scale:
    """From nanoseconds on the clock to pixels from the left."""

    def __init__(self, run: Run) -> None:
        self.start = run.started
        self.span = max(run.ended - run.started, 1)

    def x(self, at: int) -> float:
        """Return where the moment ``at`` is drawn."""
        return LEFT + (at - self.start) / self.span * (WIDTH - LEFT - RIGHT)

    def ticks(self) -> Iterator[int]:
        """Yield round numbers of milliseconds, a dozen at most."""
        span = self.span / MS
        step = next(s for e in range(7) for s in (10**e, 2 * 10**e, 5 * 10**e) if span / s <= 12 or e == 6)
        return iter(range(0, int(span) + 1, step))


def timeline(run: Run, processes: int, products: int, subtitle: str) -> str:
    """Return the picture of ``run`` as the text of an SVG file."""
    height = TOP + products * ROW + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f"<style>\n{STYLE}\n</style>",
        '<defs><pattern id="dead" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="6" height="6" fill="#fbe4e7"/>'
        f'<rect width="2" height="6" fill="{RED}" fill-opacity="0.45"/></pattern></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(LEFT, 32, "Who held which lock, and when" if run.locked else "Who sold what, and when", "title"),
        _text(LEFT, 53, subtitle, "small"),
        *_legend(run, processes),
        *_grid(Scale(run), products),
        *_bars(run, Scale(run)),
    ]
    if run.kill is not None:
        parts += _kill(run, run.kill, Scale(run), products)
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, content: str, kind: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(content)}</text>'


def _middle(product: int) -> float:
    return TOP + (product - 0.5) * ROW


def _legend(run: Run, processes: int) -> Iterator[str]:
    verb = "held by" if run.locked else "sold by"
    killed = 0 if run.kill is None else run.kill.process
    entries = [
        (COLOURS[(n - 1) % len(COLOURS)], f"{verb} worker {n}{' (killed)' if n == killed else ''}")
        for n in range(1, processes + 1)
    ]
    entries.append(("#eef0f2", "free"))
    if run.kill is not None:
        entries.append(("url(#dead)", "lease of the killed worker runs out"))
    x = float(LEFT)
    for fill, label in entries:
        yield f'<rect x="{x:.1f}" y="68" width="14" height="14" rx="2" fill="{fill}"/>'
        yield _text(x + 20, 80, label, "legend")
        x += 20 + 7.2 * len(label) + 18


def _grid(scale: Scale, products: int) -> Iterator[str]:
    bottom = TOP + products * ROW
    for product in range(1, products + 1):
        y = _middle(product)
        yield _text(LEFT - 10, y + 4.5, f"product {product}", "label", "end")
        width = WIDTH - LEFT - RIGHT
        yield f'<rect x="{LEFT}" y="{y - BAR / 2:.1f}" width="{width}" height="{BAR}" fill="#eef0f2"/>'
    for tick in scale.ticks():
        x = scale.x(scale.start + tick * MS)
        yield f'<path d="M{x:.1f} {TOP}V{bottom + 5}" stroke="#c3c9d0" stroke-width="1"/>'
        yield _text(x, bottom + 21, f"{tick:,}", "label", "middle")
    yield _text((LEFT + WIDTH - RIGHT) / 2, bottom + 44, "milliseconds since the start", "label", "middle")


def _bars(run: Run, scale: Scale) -> Iterator[str]:
    """One bar per sale; looks at a sold-out product are too short to be seen."""
    by_process: dict[int, list[tuple[ReportedGrant, int]]] = {}
    for grant in run.grants:
        until = run.held_until(grant)
        if until is not None and (grant.item or grant.released is None):
            by_process.setdefault(grant.process, []).append((grant, until))
    for process, held in sorted(by_process.items()):
        opacity = 1 if run.locked else 0.4  # without locks bars overlap: let that be seen
        yield f'<g fill="{COLOURS[(process - 1) % len(COLOURS)]}" fill-opacity="{opacity}">'
        yield from _rectangles(held, scale)
        yield "</g>"


def _rectangles(held: Iterable[tuple[ReportedGrant, int]], scale: Scale) -> Iterator[str]:
    for grant, until in held:
        x = scale.x(grant.got)
        width = max(scale.x(until) - x - 0.5, 0.6)  # a hair of space tells neighbours apart
        since, end = (grant.got - scale.start) / MS, (until - scale.start) / MS
        yield (
            f'<rect x="{x:.2f}" y="{_middle(grant.product) - BAR / 2:.1f}" width="{width:.2f}" height="{BAR}">'
            f"<title>worker {grant.process}, task {grant.task}: {since:,.1f} to {end:,.1f} ms</title></rect>"
        )


def _kill(run: Run, kill: Kill, scale: Scale, products: int) -> Iterator[str]:
    x, bottom = scale.x(kill.at), TOP + products * ROW
    for product, orphan in run.orphans.items():
        until = min(orphan.next or orphan.ends, run.ended)
        y, width = _middle(product), scale.x(until) - x
        yield f'<rect x="{x:.2f}" y="{y - BAR / 2:.1f}" width="{width:.2f}" height="{BAR}" fill="url(#dead)"/>'
        note = f"granted again after {(until - kill.at) / MS:,.0f} ms"
        wide = 7.0 * len(note) + 12
        if product == kill.product and orphan.next is not None and wide < width:
            left = x + (width - wide) / 2
            yield f'<rect x="{left:.1f}" y="{y - BAR / 2:.1f}" width="{wide:.1f}" height="{BAR}" fill="#ffffff"/>'
            yield _text(x + width / 2, y + 4.2, note, "kill", "middle")
    yield f'<path d="M{x:.1f} {TOP - 10}V{bottom}" stroke="{RED}" stroke-width="2" stroke-dasharray="5 3"/>'
    late = x > WIDTH / 2
    at = (kill.at - scale.start) / MS
    label = f"worker {kill.process} killed (SIGKILL) at {at:,.0f} ms while it holds product {kill.product}"
    yield _text(x + (4 if late else -4), TOP - 15, label, "kill", "end" if late else "start")
