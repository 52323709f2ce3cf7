"""The lists of promises and faults agree with each other, and with the tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
GUARANTEES = DOCS / "guarantees.md"
PROOFS = TESTS.parent / "maintainers" / "proofs.md"

pytestmark = pytest.mark.skipif(not GUARANTEES.exists(), reason="the documentation is not next to these tests")


def proved(letter: str) -> dict[str, set[str]]:
    """The test files that prove each promise or fault whose code begins so."""
    rows = re.findall(rf"^\| ([{letter}]\d+) \| (.*) \|$", PROOFS.read_text("utf-8"), re.M)
    assert len({code for code, _ in rows}) == len(rows)
    return {code: set(re.findall(r"`([\w/*.]+)`", files)) for code, files in rows}


def test_the_list_of_proofs_names_files_that_exist() -> None:
    for named in (*proved("A-F").values(), *proved("P").values()):
        assert named
        missing = {it for it in named if not any([*TESTS.rglob(it), *TESTS.parent.glob(it)])}
        assert not missing


def test_every_fault_has_its_proof_and_nothing_else_has() -> None:
    listed = re.findall(r"^\| ([A-F]\d+) \|", GUARANTEES.read_text("utf-8"), re.M)
    assert len(listed) == len(set(listed))
    assert set(listed) == set(proved("A-F"))
    assert all(any(name.endswith(".py") for name in named) for named in proved("A-F").values())


def test_every_promise_has_its_proof_and_nothing_else_has() -> None:
    promised = re.findall(r"^### (P\d+): ", GUARANTEES.read_text("utf-8"), re.M)
    assert promised == [f"P{number}" for number in range(1, 13)]
    assert set(promised) == set(proved("P"))
    assert all(any(name.endswith(".py") for name in named) for named in proved("P").values())


def test_the_list_of_faults_has_every_fault_that_a_test_refers_to() -> None:
    listed = re.findall(r"^\| ([A-F]\d+) \|", GUARANTEES.read_text("utf-8"), re.M)
    sources = "\n".join(path.read_text("utf-8") for path in TESTS.rglob("*.py"))
    cited = re.findall(r"\bFAULTS ([A-F]\d+)", sources) + re.findall(r'"""([A-F]\d+): ', sources)
    cited += [code.upper() for code in re.findall(r"def test_(?:p\d+_)*([a-f]\d+)_", sources)]
    assert cited
    assert set(cited) <= set(listed)
