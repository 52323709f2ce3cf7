"""Pictures of figures, for people who do not know this code: bars from zero, in plain words."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

Better: TypeAlias = Literal["more", "less"]
"""Whether a greater figure is the better one."""
_COLOURS = {
    "ours": "#2a7f62",
    "peer": "#8b8f97",
    "raw": "#e3cf8b",
    "in-process": "#e3cf8b",
    "hop": "#e3cf8b",
    "broken": "#b0413e",
}
CUT = 6
"""The longest bar is cut when it is this many times as long as the next one, so that the others can be compared."""

WRAP = 42
"""The greatest number of letters in a line of a title."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure: whose it is, and between which values its rounds were."""

    label: str
    kind: str
    value: float
    text: str
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Panel:
    """The bars of one scenario."""

    title: str
    unit: str
    better: Better
    bars: Sequence[Bar]


def draw(
    panels: Sequence[Panel], title: str, out: Path, suffixes: Sequence[str] = ("png", "svg"), across: int = 2
) -> Iterator[Path]:
    """Draw the panels, so many across, as ``out`` with each suffix; return the paths."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = min(across, len(panels))
    rows = math.ceil(len(panels) / columns)
    # Text stays text: the file is small, and can be searched.
    with rc_context({"svg.fonttype": "none", "font.family": ["sans-serif"]}):
        most = [max(len(panel.bars) for panel in panels[row * columns : (row + 1) * columns]) for row in range(rows)]
        heights = [0.36 * bars + 1.45 for bars in most]
        figure = Figure(figsize=(6.6 * columns, sum(heights) + 0.7), layout="constrained")
        grid = figure.add_gridspec(rows, columns, height_ratios=heights)
        for number, panel in enumerate(panels):
            _bars(figure.add_subplot(grid[number // columns, number % columns]), panel)
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)  # type: ignore[union-attr, call-arg]
        figure.suptitle(
            f"{title}\nA bar is the median of several rounds; its line spans them.", fontsize=12 if columns > 1 else 10
        )
        for suffix in suffixes:
            path = out.with_suffix(f".{suffix}")
            figure.savefig(path, dpi=110, metadata={"Date": None} if suffix == "svg" else None)
            yield path


def _bars(axes: Any, panel: Panel) -> None:
    """Draw one panel; the whiskers span the rounds."""
    *others, longest = sorted(bar.value for bar in panel.bars)
    if others and longest > CUT * others[-1]:
        longest = others[-1]
    end = max(1.45 * longest, 1.2 * max((bar.most for bar in panel.bars if bar.value <= longest), default=0))
    for place, bar in enumerate(reversed(panel.bars)):
        bold = "bold" if bar.kind == "ours" else "normal"
        cut = bar.value > longest
        axes.barh(place, min(bar.value, 0.8 * end), color=_COLOURS[bar.kind], height=0.7)
        text = bar.text
        if cut:
            text += " (bar cut)"
            axes.text(0.62 * end, place, "//", color="#ffffff", ha="center", va="center", fontsize=15, weight="bold")
        elif bar.most > bar.least:
            axes.plot([bar.least, bar.most], [place, place], color="#24292f", linewidth=1.2)
        after = 0.8 * end if cut else max(bar.value, bar.most)
        where, side = (0.6 * end, "right") if cut else (after + 0.012 * end, "left")
        colour = "#ffffff" if cut and bar.kind in ("ours", "peer") else "#000000"
        axes.text(where, place, text, ha=side, va="center", fontsize=9, weight=bold, color=colour)
    axes.set_yticks(range(len(panel.bars)), [bar.label for bar in reversed(panel.bars)])
    for label, bar in zip(axes.get_yticklabels(), reversed(panel.bars), strict=True):
        label.set_weight("bold" if bar.kind == "ours" else "normal")
    axes.set_xlim(0, end)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.locator_params(axis="x", nbins=5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("\n".join(textwrap.wrap(panel.title, WRAP)), fontsize=10.5, loc="left", weight="bold")
    sense = "longer bars are better" if panel.better == "more" else "shorter bars are better"
    axes.set_xlabel(f"{panel.unit}\n({sense})", fontsize=9, loc="left")
    axes.tick_params(labelsize=9)
