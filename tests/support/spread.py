"""Tests that take long begin first, and each worker of pytest-xdist has its share of them.

Otherwise they are what the last workers are busy with, one each, while the others have nothing left to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import pytest


def long_ones_first(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return them in an order in which the tests marked ``long`` come first in the share of every worker.

    ``--dist worksteal`` gives each worker an equal share of the list at first, in order.
    """
    long = [item for item in items if item.get_closest_marker("long")]
    others = iter([item for item in items if not item.get_closest_marker("long")])
    ordered: list[pytest.Item] = []
    for number in range(workers):
        size = (len(items) - len(ordered)) // (workers - number)
        mine = long[number::workers]
        ordered += [*mine, *islice(others, max(0, size - len(mine)))]
    return [*ordered, *others]
