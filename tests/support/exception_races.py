"""An exception, and what happens at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

NAME = "races"


def this_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task


def later(turns: int, action: Callable[[], object]) -> None:
    """Do ``action`` after so many turns of the loop (0: in the next one)."""
    loop = asyncio.get_running_loop()
    if turns:
        loop.call_soon(later, turns - 1, action)
    else:
        loop.call_soon(action)
