"""Weak references to the tasks that acquire leases: a forgotten lease keeps no task alive."""

from __future__ import annotations

import asyncio
from typing import TypeAlias
from weakref import ReferenceType, ref

TaskRef: TypeAlias = ReferenceType[asyncio.Task[object]]


def ended(task: TaskRef) -> bool:
    """Return whether the task has ended."""
    alive = task()
    return alive is None or alive.done()


def current_ref() -> TaskRef | None:
    """Return a weak reference to the current task; None outside of a task, as in a forked child."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return None
    return None if task is None else ref(task)
