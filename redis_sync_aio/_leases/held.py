"""The leases that this process holds of one name, also by task."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import ref

from .grant import TaskRef

if TYPE_CHECKING:
    from .grant import Grant


MAX_SEARCHED = 64
"""Up to this many leases are searched; more are indexed by task."""


class HeldLeases(dict["Grant", None]):
    """The leases of one name, mostly the oldest first."""

    __slots__ = ("_by_task",)

    def __init__(self) -> None:
        super().__init__()
        self._by_task: dict[TaskRef, dict[Grant, None]] | None = None
        """The leases of each task, the oldest first; made on the first question, if there are many."""

    def acquired(self, lease: Grant, task: asyncio.Task[object]) -> None:
        """Note that ``task`` acquired ``lease``."""
        by = lease.acquirer = ref(task)
        lease.root = getattr(task.get_coro(), "cr_code", None)
        if self._by_task is not None:
            self._by_task.setdefault(by, {})[lease] = None

    def note(self, by: TaskRef, lease: Grant) -> None:
        """Index ``lease``, a share that is not one of these, as the latest that the task ``by`` acquired."""
        self._index().setdefault(by, {})[lease] = None

    def any_of(self, task: asyncio.Task[object]) -> bool:
        """Return whether ``task`` may have acquired one of them. False is certain."""
        if len(self) > MAX_SEARCHED:
            return True
        for lease in self:  # noqa: SIM110 (a generator is slower, and each wait passes here)
            if lease.acquirer is not None and lease.acquirer() is task:
                return True
        return False

    def of_task(self, task: TaskRef) -> Iterable[Grant]:
        """Return the leases that ``task`` acquired, the latest first."""
        if self._by_task is None and len(self) <= MAX_SEARCHED:
            return [lease for lease in reversed(self) if lease.acquirer == task]
        return reversed(self._index().get(task, {}))

    def _index(self) -> dict[TaskRef, dict[Grant, None]]:
        if self._by_task is None:
            self._by_task = {}
            for lease in self:
                if lease.acquirer is not None and lease.acquirer() is not None:
                    self._by_task.setdefault(lease.acquirer, {})[lease] = None
        return self._by_task

    def latest(self, task: TaskRef | None, weight: int) -> Grant | None:
        """Return the latest lease of ``task`` that has this ``weight`` (0: any). Mostly O(1)."""
        for lease in self.of_task(task) if task is not None else ():
            if lease.group is None and weight in (0, lease.weight):
                return lease
        return None

    def discard(self, lease: Grant) -> None:
        """Forget ``lease``, which is not held any more."""
        self.pop(lease, None)
        if self._by_task is not None and lease.acquirer is not None:
            self._unlist(self._by_task, lease.acquirer, lease)

    def _unlist(self, by_task: dict[TaskRef, dict[Grant, None]], by: TaskRef, lease: Grant) -> None:
        try:
            found = by_task.get(by)
        except TypeError:  # its task has ended and its hash was never asked for, so it was not indexed
            return
        if found is not None:
            found.pop(lease, None)
            if not found:
                del by_task[by]
        if not self:
            self._by_task = None
