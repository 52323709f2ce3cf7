"""Draws a planned failover by Sentinel as docs/assets/failover.svg: ``python -m benchmarks.sequence``."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

WIDTH, TOP, STEP = 860, 70, 44
LANES = {"A": ("process A", "holds the lock"), "B": ("process B", "waits for it"), "S": ("a sentinel", "")} | {
    "old": ("old primary", ""),
    "new": ("new primary", "a replica before"),
}
PLACE = {lane: 90 + number * 170 for number, lane in enumerate(LANES)}


class Message(NamedTuple):
    """An arrow from one lane to another, or a note on one (``end`` is empty)."""

    start: str
    end: str
    text: str


STORY = (
    Message("A", "old", "renew"),
    Message("S", "new", "become the primary"),
    Message("old", "", "accepts writes for some more seconds"),
    Message("A", "S", "where is the primary? (once a second)"),
    Message("S", "A", "the new one"),
    Message("A", "new", "connect: is the data the same? No: a new inbox"),
    Message("A", "new", "is the lease still mine? Yes: go on. No: LeaseLost"),
    Message("B", "S", "where is the primary?"),
    Message("B", "new", "connect, and queue again: old requests have no receiver"),
    Message("A", "new", "release"),
    Message("new", "B", "granted, with a higher fence"),
)
BOTH_GRANT = (2, 6)
"""Between these steps both primaries can grant the lock: 1.3 seconds at most."""


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "middle", colour: str = "#24292f") -> str:
    """Return a line of text."""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def drawn(number: int, message: Message) -> list[str]:
    """Return one step of the story."""
    y = TOP + 40 + number * STEP
    start = PLACE[message.start]
    if not message.end:
        return [
            f'<rect x="{start - 118}" y="{y - 18}" width="236" height="24" rx="4" fill="#fff4d6" stroke="#c9a227"/>',
            text(start, y - 2, message.text, 12),
        ]
    end = PLACE[message.end]
    tip = 8 if end > start else -8
    words = text((start + end) / 2, y - 6, message.text, 12)
    return [
        f'<rect x="{(start + end) / 2 - 3.2 * len(message.text)}" y="{y - 19}" width="{6.4 * len(message.text)}" '
        'height="16" fill="#ffffff" fill-opacity="0.8"/>',
        words,
        f'<line x1="{start}" y1="{y}" x2="{end - tip}" y2="{y}" stroke="#2a7f62" stroke-width="1.6"/>',
        f'<path d="M{end},{y} l{-tip},-5 l0,10 z" fill="#2a7f62"/>',
    ]


def picture() -> str:
    """Return the whole picture."""
    height = TOP + 40 + len(STORY) * STEP
    since, until = (TOP + 40 + step * STEP for step in BOTH_GRANT)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        "<title>A planned failover by Sentinel</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<rect x="0" y="{since - 30}" width="{WIDTH}" height="{until - since}" fill="#fbeeee"/>',
        text(8, since - 14, "both primaries can grant: 1.3 s at most", 11, "start", "#b0413e"),
    ]
    for lane, (name, role) in LANES.items():
        x = PLACE[lane]
        parts += [
            text(x, 24, name, 15),
            text(x, 42, role, 12, colour="#57606a"),
            f'<line x1="{x}" y1="{TOP - 16}" x2="{x}" y2="{height - 8}" stroke="#8b8f97" stroke-dasharray="4 4"/>',
        ]
    for number, message in enumerate(STORY):
        parts += drawn(number, message)
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    Path("docs/assets/failover.svg").write_text(picture(), "utf-8")
