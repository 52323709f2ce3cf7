"""Public objects show what users may use, and nothing else."""

from __future__ import annotations

import inspect

import pytest

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncReentrantLock,
    AsyncSemaphore,
    Coordinator,
)
from redis_sync_aio._acquire.options import hub_options


def public(shown: type) -> set[str]:
    """Return the names of a class that an editor offers."""
    return {name for name in dir(shown) if not name.startswith("_")}


def test_a_coordinator_shows_what_users_need() -> None:
    assert public(Coordinator) == {
        *("client", "close", "why_closed"),
        *("connection_error", "connections"),
        *("lock", "semaphore", "read_write_lock", "reentrant_lock", "multi_lock"),
    }


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("lock", AsyncLock),
        ("semaphore", AsyncSemaphore),
        ("read_write_lock", AsyncReadWriteLock),
        ("reentrant_lock", AsyncReentrantLock),
        ("multi_lock", AsyncMultiLock),
    ],
)
def test_a_coordinator_makes_each_primitive_with_all_its_options(method: str, kind: type) -> None:
    """An option that is added to a class is one of the coordinator's method, too, with the same default and type."""
    own = inspect.signature(getattr(Coordinator, method)).parameters
    of_class = inspect.signature(kind).parameters
    assert dict(own) == {"self": own["self"], **{name: of_class[name] for name in of_class if name != "client"}}


def test_implicit_hubs_have_the_defaults_of_a_coordinator() -> None:
    assert inspect.signature(hub_options).parameters == inspect.signature(Coordinator).parameters
