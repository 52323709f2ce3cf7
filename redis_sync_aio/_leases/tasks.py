"""The tasks that acquire leases, by weak references: a forgotten lease keeps no task alive."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import CodeType
from typing import TypeAlias
from weakref import ReferenceType, ref

TaskRef: TypeAlias = ReferenceType[asyncio.Task[object]]


_REQUESTS = frozenset({"_acquired", "_tried", "attach", "__aenter__"})
_PACKAGE = str(Path(__file__).parent.parent)


def is_request(root: CodeType | None) -> bool:
    """Return True if ``root``, the code of a task, is a request of this package: its lease is the task's result."""
    return root is not None and root.co_name in _REQUESTS and root.co_filename.startswith(_PACKAGE)


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
