"""Messages and docstrings of the package lead to pages and sections of the site that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

import redis_sync_aio
from redis_sync_aio.cli._doctor.facts import Rights
from redis_sync_aio.cli._doctor.findings import of_rights

from ..support.site import DOCS, ROOT, SITE, anchors, page_of

PACKAGE = Path(redis_sync_aio.__file__).parent
PLUGIN = PACKAGE.with_name("redis_sync_aio_pytest.py")

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the documentation is not next to these tests")


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


def test_a_page_or_a_section_that_is_missing_is_noticed() -> None:
    assert exists("operations/servers", "rights")
    assert exists("operations", "")
    assert not exists("operations/servers", "lefts")
    assert not exists("operations/waiters", "")


def test_each_page_that_the_page_for_a_wrong_address_offers_exists() -> None:
    """The build of the site checks the links of pages, not those of templates."""
    offered = re.findall(r"href=\"{{ '([^']+)' \| url }}\"", (ROOT / "overrides" / "404.html").read_text("utf-8"))
    assert len(offered) == 2
    assert [name for name in offered if not exists(name.strip("."), "")] == []


def test_the_package_names_no_file_of_the_repository() -> None:
    """It is installed without docs/."""
    assert [path.name for path in files() if re.search(r"docs/\w|\w\.md\b", path.read_text("utf-8"))] == []


def test_each_page_and_picture_that_an_example_a_benchmark_or_a_test_names_exists() -> None:
    folders = [ROOT / name for name in ("examples", "benchmarks", "tests")]
    named = [
        (path.name, page)
        for folder in folders
        for path in folder.rglob("*.py")
        for page in re.findall(r"\bdocs/[\w/-]+\.(?:md|svg)\b", path.read_text("utf-8"))
    ]
    assert len(named) > 20
    assert [(name, page) for name, page in named if "nowhere" not in page and not (ROOT / page).exists()] == []


def test_a_finding_of_the_doctor_gives_the_whole_address() -> None:
    (missing,) = [one for one in of_rights(Rights(user="app", missing=["GET"])) if one.check == "commands"]
    assert missing.fix == f"ACL SETUSER app +get ({SITE}operations/servers/#rights)"
