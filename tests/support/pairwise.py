"""Selection: so few of all combinations of parameters that each value, or each pair of values, still occurs in one."""

from __future__ import annotations

import heapq
import zlib
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

from .options import OPTIONS

Case = Mapping[Hashable, Hashable]
"""The value of each parameter."""


def cover(cases: Sequence[Case], together: int = 2) -> set[int]:
    """Return which cases to keep: each pair of values that occurs in any case occurs in one of these.

    ``together``: 1 for each value, 2 for each pair. A case with fewer parameters than that stays.

    The choice is greedy, and the same each time: next is the first case with most of the pairs not seen yet.
    """
    numbers: defaultdict[Hashable, int] = defaultdict(lambda: len(numbers))
    missing = [{numbers[values] for values in combinations(case.items(), min(together, len(case)))} for case in cases]
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


def each_value(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return the cases of one ``parametrize``, those marked ``ci`` that no value needs to occur by default."""
    kept = cover([{axis: _identity(value) for axis, value in enumerate(case)} for case in cases], 1)
    return [case if index in kept else pytest.param(*case, marks=pytest.mark.ci) for index, case in enumerate(cases)]


def first_of(*values: Any, few: int = 1) -> list[Any]:
    """Return the values of a parameter whose tests cost much: without --pairs only the first few are not ``ci``."""
    marks = () if OPTIONS.pairs else pytest.mark.ci
    return [*values[:few], *(pytest.param(value, marks=marks) for value in values[few:])]


def sample(items: Sequence[pytest.Item], together: int) -> set[pytest.Item]:
    """Return the items to keep: of a test with several parameters a cover, all of any other."""
    kept: set[pytest.Item] = set()
    tests: defaultdict[Hashable, list[Any]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            tests[item.path, getattr(item, "originalname", item.name)].append(item)
        else:
            kept.add(item)
    for same in tests.values():
        cases = [case_of(item) for item in same]
        chosen = cover(cases, together)
        kept.update(item for index, item in enumerate(same) if index in chosen or len(cases[index]) <= together)
    return kept


def is_in_part(name: str, part: tuple[int, int]) -> bool:
    """Return whether the test of that name is in part K of N; each is in one of them."""
    number, parts = part
    return zlib.crc32(name.encode()) % parts == number


def case_of(item: Any) -> Case:
    """Return the value of each parameter of a test; names that get their values together are one parameter."""
    values = {name: _identity(value) for name, value in item.callspec.params.items()}
    case: dict[Hashable, Hashable] = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else mark.args[0]
        case[tuple(names)] = tuple(values.pop(name) for name in names)
    return case | values


def _identity(value: object) -> Hashable:
    """Return what tells a value from others of its parameter: itself, if it can be hashed."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), repr(value) if isinstance(value, float) else value  # 0.0 equals -0.0
