"""The pages of the site by their addresses, and the anchors on them."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
SITE: Final = "https://redis-sync-aio.github.io/redis-sync-aio/"


def page_of(name: str) -> Path:
    """Return the file of a page, as in "operations/servers" or "operations/", whether or not it exists."""
    place = DOCS / name.strip("/")
    return place / "index.md" if place.is_dir() else place.with_name(f"{place.name}.md")


def slug(heading: str) -> str:
    """Return the anchor that the site gives a heading: as ``markdown.extensions.toc.slugify``."""
    plain = re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", heading).replace("`", "")
    ascii_only = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())


def anchors(text: str) -> set[str]:
    """Return the anchors of a page: of its headings, of those with one of their own, and in HTML."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    headings = re.findall(r"^#+ +(.+?)(?: *\{.*\})?$", text, re.M)
    return {*map(slug, headings), *re.findall(r"\{[^}]*#([\w-]+)", text), *re.findall(r'\bid="([\w-]+)"', text)}
