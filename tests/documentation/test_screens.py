"""The pictures of the commands: drawn by ``python -m benchmarks.screens``, the same on every machine."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

pytest.importorskip("rich")

from benchmarks.screens import draw, screens

DOCS = Path(__file__).parents[2] / "docs" / "assets"
SHOWN = {
    "ls": ["HELD BY", "worker-3:28376", "import !", "release import --token batch-7"],
    "show": ["orders:42", "held by worker-3:28376", "waiting: 3"],
    "top": ["GRANT/S", "8 waiting", "1.0 granted/s", "q quit"],
    "doctor": ["bad", "maxmemory-policy is allkeys-lru", "Fix:"],
}
"""What has to be in each picture."""


def text_of(picture: str) -> str:
    """Return the text in an SVG, its pieces with a space between."""
    found = re.findall(r"<text [^>]*>([^<]*)</text>", picture)
    return " ".join(html.unescape(" ".join(found)).split())


async def test_the_same_pictures_each_time() -> None:
    """So a change of a picture is a change of what the commands print."""
    first, second = [{name: draw(name, screen) for name, screen in (await screens()).items()} for _ in range(2)]
    assert first == second
    for name, picture in first.items():
        assert [words for words in SHOWN[name] if words not in text_of(picture)] == []


@pytest.mark.skipif(not DOCS.exists(), reason="the documentation is not next to these tests")
def test_the_committed_pictures_are_small_and_tell_nothing_of_a_machine() -> None:
    for name, shown in SHOWN.items():
        picture = (DOCS / f"{name}.svg").read_text("utf-8")
        assert len(picture) < 40_000
        assert [words for words in shown if words not in text_of(picture)] == []
        assert not re.search(r"/home/|/root/|/tmp/|127\.0\.0\.1|localhost", picture)
