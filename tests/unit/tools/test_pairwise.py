"""What leaves the default run: no value of a parameter; with --pairs, no pair of values either."""

from __future__ import annotations

from itertools import combinations, product
from random import Random
from typing import Any

import pytest

from ...support.options import read_part
from ...support.pairwise import Case, case_of, cover, is_in_part, sample

AXES = {"kind": range(7), "way": range(3), "body": range(4), "twice": (False, True)}
PRODUCT: list[Case] = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]


def pairs(cases: list[Case]) -> set[object]:
    return {pair for case in cases for pair in combinations(case.items(), 2)}


def test_each_pair_of_values_stays() -> None:
    kept = [PRODUCT[index] for index in cover(PRODUCT)]
    assert pairs(kept) == pairs(PRODUCT)
    assert 7 * 4 <= len(kept) < 1.5 * 7 * 4


@pytest.mark.parametrize("seed", range(5))
def test_each_pair_that_occurs_stays_where_combinations_are_missing(seed: int) -> None:
    cases = [case for case in PRODUCT if Random(f"{seed} {case}").random() < 0.3]
    kept = [cases[index] for index in cover(cases)]
    assert pairs(kept) == pairs(cases)
    assert len(kept) < len(cases)


def test_the_choice_is_the_same_each_time() -> None:
    assert cover(PRODUCT) == cover([dict(case) for case in PRODUCT])


def test_each_value_stays() -> None:
    kept = [PRODUCT[index] for index in cover(PRODUCT, 1)]
    assert {value for case in kept for value in case.items()} == {value for case in PRODUCT for value in case.items()}
    assert len(kept) == 7


@pytest.mark.parametrize("together", [1, 2])
def test_all_of_a_test_with_few_parameters_stay(request: pytest.FixtureRequest, together: int) -> None:
    items: list[Any] = request.session.items
    few = [item for item in items if not hasattr(item, "callspec") or len(item.callspec.params) <= together]
    assert sample(few, together) == set(few)


@pytest.mark.parametrize(("seconds", "name"), [(1, "a"), (2, "a"), (2, "b")])
@pytest.mark.parametrize("one", [True])
def test_values_that_are_given_together_are_one_parameter(
    request: pytest.FixtureRequest, seconds: int, name: str, one: bool
) -> None:
    """A list of examples stays whole: none of them is left out because its values occur in others."""
    assert case_of(request.node) == {
        ("seconds", "name"): ((int, seconds), (str, name)),
        ("one",): ((bool, one),),
    }


def test_each_test_is_in_one_part() -> None:
    """The parts are about as large as each other, and any number chooses one of them, such as that of a commit."""
    names = [f"tests/test_x.py::test_y[{number}]" for number in range(1000)]
    parts = [
        {name for name in names if is_in_part(name, read_part(f"{number}/5"))} for number in (10, 6, 2, 3, 16**7 - 2)
    ]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert min(map(len, parts)) > 150
