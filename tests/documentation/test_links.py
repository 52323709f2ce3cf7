"""Addresses of pages and sections, in the package, in the README and on the forge, lead to what exists."""

from __future__ import annotations

import ast
import functools
import re
import string
from collections.abc import Iterable
from pathlib import Path

import pytest

import redis_sync_aio

from .site import DOCS, ROOT, SITE, anchors, page_of

PACKAGE = Path(redis_sync_aio.__file__).parent
PLUGIN = PACKAGE.with_name("redis_sync_aio_pytest.py")

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the documentation is not next to these tests")


@functools.cache
def exists(name: str, section: str) -> bool:
    """Whether the site has that page, and the section on it."""
    found = page_of(name)
    return found.exists() and (not section or section in anchors(found.read_text("utf-8")))


def files() -> list[Path]:
    """The files that are installed, those that have text."""
    return [PLUGIN, *(path for kind in ("py", "json", "lua") for path in PACKAGE.rglob(f"*.{kind}"))]


def at_the_root() -> list[Path]:
    """What is read where the site is not: on the forge, and on an index of packages."""
    return [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *(ROOT / ".github").rglob("*.*")]


def written(paths: Iterable[Path]) -> list[tuple[str, str, str]]:
    """Every address that stands in these files: the file, the page, the section."""
    address = re.compile(re.escape(SITE) + r"([\w/-]*)(?:#([\w-]+))?")
    return [(path.name, page, section) for path in paths for page, section in address.findall(path.read_text("utf-8"))]


def composed() -> list[tuple[str, str, str]]:
    """Every page that a message asks for: the file, the page, the section."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "page":
                words = [word.value if isinstance(word, ast.Constant) else "not a constant" for word in call.args]
                name, section = [*words, ""][:2]
                found.append((path.name, str(name), str(section)))
    return found


def test_each_page_and_section_that_the_package_names_exists() -> None:
    named = [*written(files()), *composed()]
    assert len(written(files())) > 10
    assert len(composed()) > 3
    assert [one for one in named if not exists(*one[1:])] == []


def test_each_page_and_section_that_is_named_on_the_forge_and_on_an_index_exists() -> None:
    named = written(at_the_root())
    assert len(named) > 30
    assert [one for one in named if not exists(*one[1:])] == []


def test_the_package_names_no_file_of_the_repository() -> None:
    """It is installed without docs/."""
    assert [path.name for path in files() if re.search(r"docs/\w|\w\.md\b", path.read_text("utf-8"))] == []


# -- the README, which is read on the package index, too ---------------------------------------------------------

FORGE = "https://github.com/redis-sync-aio/redis-sync-aio/"
RAW = "https://raw.githubusercontent.com/redis-sync-aio/redis-sync-aio/main/"


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
    text = (ROOT / "README.md").read_text("utf-8")
    assert dead(text) == []
    ours = [link for link in links(text) if target(link) is not None]
    assert f"{SITE}tutorial/" in ours
    assert f"{RAW}docs/assets/top.svg" in ours


def test_links_of_the_pages_for_maintainers_lead_to_what_exists() -> None:
    """They are relative, and read on the forge or in a checkout."""
    for page in sorted((ROOT / "maintainers").glob("*.md")):
        for link in links(page.read_text("utf-8")):
            path, _, anchor = link.partition("#")
            found = (page.parent / path).resolve() if path else page
            assert found.is_file(), (page.name, link)
            assert not anchor or anchor in anchors(found.read_text("utf-8")), (page.name, link)


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
