"""The list of faults agrees with the tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
FAULTS = DOCS / "faults.md"


@pytest.mark.skipif(not FAULTS.exists(), reason="the documentation is not next to these tests")
def test_the_list_of_faults_names_test_files_that_exist() -> None:
    named = set(re.findall(r"`(test_\w+\.py)`", FAULTS.read_text("utf-8")))
    assert named
    assert named <= {path.name for path in TESTS.rglob("test_*.py")}


@pytest.mark.skipif(not FAULTS.exists(), reason="the documentation is not next to these tests")
def test_the_list_of_faults_has_every_fault_that_a_test_refers_to() -> None:
    listed = re.findall(r"^\| ([A-F]\d+) \|", FAULTS.read_text("utf-8"), re.M)
    assert len(listed) == len(set(listed))
    sources = "\n".join(path.read_text("utf-8") for path in TESTS.rglob("*.py"))
    cited = re.findall(r"\bFAULTS ([A-F]\d+)", sources) + re.findall(r'"""([A-F]\d+): ', sources)
    cited += [code.upper() for code in re.findall(r"def test_(?:p\d+_)*([a-f]\d+)_", sources)]
    assert cited
    assert set(cited) <= set(listed)
