"""docs/classic-patterns.md names the tests of each pattern: all of them, and no others."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "classic-patterns.md"


def written() -> set[str]:
    """The tests that there are."""
    files = (path for path in HERE.glob("test_classic_*.py") if path != Path(__file__))
    nodes = (node for path in files for node in ast.parse(path.read_text("utf-8")).body)
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not next to these tests")
def test_the_page_names_all_tests_and_no_others() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text("utf-8")))
    assert named == written()


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not next to these tests")
def test_every_pattern_has_its_tests_behind_a_fold() -> None:
    """Each section ends with the names of tests of the textbook's code and of ours, and no other text has any."""
    _, *sections = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.M)
    for section in sections:
        text, fold, tests = section.partition('??? note "Tests"\n')
        names = re.findall(r"`(test_\w+)`", tests)
        assert fold, text
        assert "test_" not in re.sub(r"`tests/[^`]*`|\(http[^)]*\)", "", text)
        assert [name for name in names if name.startswith("test_textbook_")], text
        assert [name for name in names if not name.startswith("test_textbook_")], text


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not next to these tests")
def test_every_row_of_the_table_leads_to_its_section() -> None:
    text = PAGE.read_text("utf-8")
    rows = re.findall(r"^\| \[[^\]]+\]\(#([\w-]+)\)", text, re.M)
    titles = re.findall(r"^## (.+)$", text, re.M)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert len(rows) == 15
    assert set(rows) == anchors
