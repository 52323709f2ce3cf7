"""The leases that this process holds of one name: all of them, by task, and those that only references keep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from .forgotten import weakly
from .tasks import TaskRef

if TYPE_CHECKING:
    from .grant import Grant


FEW = 64
"""So many leases are looked through, rather than kept by task."""


class HeldLeases(dict["Grant", None]):
    """See the top of this module. As a dict it has those that are kept, mostly the oldest first.

    A lease is kept while the task that acquired it lives, or an identity or an owner stands for it. After that it is
    `loosened`: only references keep it (`forgotten`).
    """

    __slots__ = ("_by_task", "_loose")

    def __init__(self) -> None:
        super().__init__()
        self._by_task: dict[TaskRef, dict[Grant, None]] | None = None
        """What each task acquired, the oldest first; made when there are many, and somebody asks."""
        self._loose: dict[ReferenceType[Grant], None] = {}

    def all(self) -> list[Grant]:
        """Return them, and those that only references keep."""
        if not self._loose:
            return list(self)
        return [*self, *(lease for reference in self._loose if (lease := reference()) is not None)]

    def keeps(self, lease: Grant) -> bool:
        """Return whether ``lease`` is one of them."""
        return lease in self or ref(lease) in self._loose

    @property
    def empty(self) -> bool:
        """Whether there is none."""
        return not self and not self._loose

    def acquired(self, lease: Grant, task: asyncio.Task[object]) -> None:
        """Note that ``task`` acquired ``lease``."""
        by = lease.acquirer = ref(task)
        if self._by_task is not None:
            self._by_task.setdefault(by, {})[lease] = None

    def note(self, by: TaskRef, lease: Grant) -> None:
        """Know ``lease``, which is shared and not one of these, as the latest that the task ``by`` acquired."""
        self._index().setdefault(by, {})[lease] = None

    def any_of(self, task: asyncio.Task[object]) -> bool:
        """Return whether ``task`` may have acquired one of them; False is certain."""
        if len(self) > FEW:
            return True
        for lease in self:  # noqa: SIM110 (a generator would be felt: each wait passes here)
            if lease.acquirer is not None and lease.acquirer() is task:
                return True
        return False

    def of_task(self, task: TaskRef) -> Iterable[Grant]:
        """Return the leases that ``task`` acquired, the latest first."""
        if self._by_task is None and len(self) <= FEW:
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
        """Return the lease that ``task`` acquired last and holds. Of ``weight``, unless that is 0. O(1), mostly."""
        for lease in self.of_task(task) if task is not None else ():
            if lease.group is None and weight in (0, lease.weight):
                return lease
        return None

    def loosen(self, lease: Grant, loop: asyncio.AbstractEventLoop, forgotten: Callable[[], None]) -> bool:
        """Leave ``lease`` to those who refer to it; return False if that is done already.

        ``forgotten`` is called in ``loop`` when nothing does.
        """
        if lease not in self:
            return False
        self.discard(lease)

        def drop(reference: ReferenceType[Grant]) -> None:
            self._loose.pop(reference, None)
            forgotten()

        self._loose[weakly(lease, loop, drop)] = None
        return True

    def discard(self, lease: Grant) -> None:
        """Forget ``lease``: it is held no longer."""
        self.pop(lease, None)
        if self._by_task is not None and lease.acquirer is not None:
            self._unlist(self._by_task, lease.acquirer, lease)
        if self._loose:
            self._loose.pop(ref(lease), None)

    def _unlist(self, by_task: dict[TaskRef, dict[Grant, None]], by: TaskRef, lease: Grant) -> None:
        try:
            found = by_task.get(by)
        except TypeError:  # its task has ended, and nobody asked for its hash before: it was not noted
            return
        if found is not None:
            found.pop(lease, None)
            if not found:
                del by_task[by]
        if not self:
            self._by_task = None
