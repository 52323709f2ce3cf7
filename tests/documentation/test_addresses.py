"""Messages and docstrings of the package lead to pages and sections of the site that exist."""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import pytest

import redis_sync_aio
from redis_sync_aio.cli._doctor.facts import Rights
from redis_sync_aio.cli._doctor.groups import rights

PACKAGE = Path(redis_sync_aio.__file__).parent
PLUGIN = PACKAGE.with_name("redis_sync_aio_pytest.py")
DOCS = Path(__file__).parents[2] / "docs"
SITE = "https://redis-sync-aio.github.io/redis-sync-aio/"

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the documentation is not next to these tests")


def slug(heading: str) -> str:
    """The anchor that the site gives a heading: as ``markdown.extensions.toc.slugify``."""
    plain = re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", heading).replace("`", "")
    ascii_only = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())


def anchors(page: Path) -> set[str]:
    """The anchors of a page: of its headings, of those with one of their own, and in HTML."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ +(.+?)(?: *\{.*\})?$", text, re.M)
    return {*map(slug, headings), *re.findall(r"\{[^}]*#([\w-]+)", text), *re.findall(r'\bid="([\w-]+)"', text)}


def exists(name: str, section: str) -> bool:
    """Whether the site has that page, and the section on it."""
    name = name.strip("/")
    candidates = [DOCS / f"{name}.md", DOCS / name / "index.md"] if name else [DOCS / "index.md"]
    found = next((path for path in candidates if path.exists()), None)
    return found is not None and (not section or section in anchors(found))


def files() -> list[Path]:
    """The files that are installed, those that have text."""
    return [PLUGIN, *(path for kind in ("py", "json", "lua") for path in PACKAGE.rglob(f"*.{kind}"))]


def at_the_root() -> list[Path]:
    """What is read where the site is not: on the forge, and on an index of packages."""
    root = DOCS.parent
    return [*root.glob("*.md"), *root.glob("*.toml"), *(root / ".github").rglob("*.*")]


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


def test_a_page_or_a_section_that_is_missing_is_noticed() -> None:
    assert exists("operations/servers", "rights")
    assert exists("operations", "")
    assert not exists("operations/servers", "lefts")
    assert not exists("operations/waiters", "")


def test_the_package_names_no_file_of_the_repository() -> None:
    """It is installed without docs/."""
    assert [path.name for path in files() if re.search(r"docs/\w|\w\.md\b", path.read_text("utf-8"))] == []


def test_a_finding_of_the_doctor_gives_the_whole_address() -> None:
    (missing,) = [one for one in rights(Rights(user="app", missing=["GET"])) if one.check == "commands"]
    assert missing.fix == f"allow them ({SITE}operations/servers/#rights)"
