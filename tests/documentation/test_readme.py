"""The README is read on the package index, too: its links work there, and lead to what exists."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest

from ..support.site import DOCS, ROOT, SITE, anchors, page_of

README = ROOT / "README.md"
FORGE = "https://github.com/redis-sync-aio/redis-sync-aio/"
RAW = "https://raw.githubusercontent.com/redis-sync-aio/redis-sync-aio/main/"

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the documentation is not next to these tests")


def links(text: str) -> list[str]:
    """Return where the links and pictures of a page lead to."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)", text) + re.findall(r"^\[[^\]]+\]: (\S+)", text, re.MULTILINE)


def target(link: str) -> Path | None:
    """Return the file or directory that an absolute link leads to; None: not one of this project."""
    address = link.partition("#")[0]
    if address.startswith(SITE):
        return page_of(address.removeprefix(SITE))
    if address.startswith(RAW):
        return ROOT / address.removeprefix(RAW)
    if found := re.match(re.escape(FORGE) + r"(?:blob|tree)/main/(.+)", address):
        return ROOT / found[1]
    return None


def dead(text: str) -> list[str]:
    """Return the links of a page that are relative, or lead to a page, file or anchor that does not exist."""
    found = []
    for link in links(text):
        anchor = link.partition("#")[2]
        if link.startswith("#"):
            where: str | None = text
        elif link.startswith("https://"):
            path = target(link)
            if path is not None and not path.exists():
                found.append(link)
                continue
            where = path.read_text("utf-8") if path is not None and path.suffix == ".md" else None
        else:
            found.append(link)
            continue
        if anchor and where is not None and anchor not in anchors(where):
            found.append(link)
    return found


def test_links_of_the_readme_work_on_the_package_index() -> None:
    """All are absolute, and those to the site or the forge lead to pages, files and headings of this tree."""
    text = README.read_text("utf-8")
    assert dead(text) == []
    ours = [link for link in links(text) if target(link) is not None]
    assert f"{SITE}tutorial/" in ours
    assert f"{RAW}docs/assets/top.svg" in ours


def test_links_that_do_not_work_are_found() -> None:
    """Relative ones, and absolute ones to what is not there."""
    page = string.Template(
        "# A title\n[a](docs/tutorial.md) ![b](docs/assets/top.svg) [c](${site}nowhere/) [d](${site}tutorial/#nowhere)"
        " [e](${forge}blob/main/NOWHERE.md) [f](${raw}docs/assets/nowhere.svg) [g](#nowhere) [h](http://example.org)\n"
        "[i](${site}) [j](${site}tutorial/#1-set-up) [k](${forge}blob/main/README.md#why)"
        " [l](${forge}tree/main/examples) [m](#a-title) [n](https://example.org/nowhere)\n"
    ).substitute(site=SITE, forge=FORGE, raw=RAW)
    assert [link.rpartition("/")[2] for link in dead(page)] == [
        "tutorial.md",
        "top.svg",
        "",
        "#nowhere",
        "NOWHERE.md",
        "nowhere.svg",
        "#nowhere",
        "example.org",
    ]
