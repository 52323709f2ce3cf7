"""Mutants of Python code: each takes one decision out of it, and the tests that its row names find out.

Names of tests stand for all tests with that name, with all their parameters; a path is one in `tests`.
"""

from __future__ import annotations

import pytest

from ..support.mutants import Mutant, is_found, nodes
from . import core, integrations, sharing, transactions

MUTANTS: dict[str, Mutant] = {
    f"{subject.__name__.rpartition('.')[2]}: {name}": mutant
    for subject in (core, integrations, sharing, transactions)
    for name, mutant in subject.MUTANTS.items()
}
SAMPLE = ("core: nothing is undone", "integrations: a job that failed is running", "transactions: nothing is watched")
"""What the default run has of them."""


def test_each_mutant_changes_the_source_and_names_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for mutant in MUTANTS.values():
        with monkeypatch.context() as patch:
            mutant.apply(patch)
        assert nodes(mutant.by)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.ci, id=name) for name in MUTANTS]
)
def test_its_tests_find_each_mutant(name: str) -> None:
    is_found(MUTANTS[name])
