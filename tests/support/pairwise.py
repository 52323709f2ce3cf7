"""Pairwise selection: so few of all combinations of parameters that each pair of values still occurs in one."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

Case = Mapping[str, Hashable]
"""The value of each parameter."""


def cover(cases: Sequence[Case]) -> set[int]:
    """Return which cases to keep: each pair of values that occurs in any case occurs in one of these.

    The choice is greedy, and the same each time: next is the first case with most of the pairs not seen yet.
    """
    numbers: defaultdict[Hashable, int] = defaultdict(lambda: len(numbers))
    missing = [{numbers[pair] for pair in combinations(case.items(), 2)} for case in cases]
    queue = [(-len(pairs), index) for index, pairs in enumerate(missing)]
    heapq.heapify(queue)
    seen: set[int] = set()
    kept: set[int] = set()
    while queue:
        promised, index = heapq.heappop(queue)
        missing[index] -= seen
        if len(missing[index]) < -promised:  # others may have more by now
            heapq.heappush(queue, (-len(missing[index]), index))
        elif promised:
            kept.add(index)
            seen |= missing[index]
    return kept


def sample(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the items to keep: of a test with three parameters or more, a pairwise cover, else all."""
    kept: set[pytest.Item] = set()
    tests: defaultdict[Hashable, list[Any]] = defaultdict(list)
    for item in items:
        parameters = getattr(item, "callspec", None)
        if parameters is None or len(parameters.params) < 3:
            kept.add(item)
        else:
            tests[item.path, getattr(item, "originalname", item.name)].append(item)
    for cases in tests.values():
        kept.update(cases[index] for index in cover([_case(item.callspec.params) for item in cases]))
    return kept


def _case(parameters: Mapping[str, object]) -> Case:
    return {name: _identity(value) for name, value in parameters.items()}


def _identity(value: object) -> Hashable:
    """Return what tells a value from others of its parameter: itself, if it can be hashed."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), value
