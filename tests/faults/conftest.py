"""The modules named here run in virtual time, but for tests marked real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from ..support import virtual

VIRTUAL = frozenset(
    "test_" + name
    for name in (
        "answers_not_understood",
        "foreign_data",
        "stray_copies",
        "wire_barrier",
        "wire_fall_back",
        "wire_jobs",
        "wire_link",
        "wire_multilock",
        "wire_parties",
        "wire_permits",
        "wire_places",
        "wire_prolonged",
        "wire_queue_full",
        "wire_replaced",
        "wire_rwlock",
        "wire_shorter",
        "wire_time",
        "wire_watch",
    )
)


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run the coroutines of the modules above in virtual time."""
    if item.path.stem in VIRTUAL:
        return virtual.pytest_asyncio_loop_factories(item)
    return {"real": asyncio.new_event_loop}
