"""The leases that this process holds of one name: all of them, by task, and those that only references keep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from .choice import TaskRef
from .forgotten import weakly

if TYPE_CHECKING:
    from ..lease import Lease


class HeldLeases(dict["Lease", None]):
    """See the top of this module. As a dict it has those that are kept, mostly the oldest first.

    A lease is kept while the task that acquired it lives, or an identity or an owner stands for it. After that it is
    `loosened`: only references keep it (`forgotten`).
    """

    __slots__ = ("_by_task", "_loose")

    def __init__(self) -> None:
        super().__init__()
        # By task: the lease, or all of them, the oldest first. Each grant passes here, and most tasks have one.
        self._by_task: dict[TaskRef, Lease | dict[Lease, None]] = {}
        self._loose: dict[ReferenceType[Lease], None] = {}

    def all(self) -> list[Lease]:
        """Return them, and those that only references keep."""
        if not self._loose:
            return list(self)
        return [*self, *(lease for reference in self._loose if (lease := reference()) is not None)]

    def keeps(self, lease: Lease) -> bool:
        """Return whether ``lease`` is one of them."""
        return lease in self or ref(lease) in self._loose

    @property
    def empty(self) -> bool:
        """Whether there is none."""
        return not self and not self._loose

    def acquired(self, lease: Lease, task: asyncio.Task[object]) -> None:
        """Note that ``task`` acquired ``lease``."""
        by = lease.acquirer = ref(task)
        self.note(by, lease)

    def note(self, by: TaskRef, lease: Lease) -> None:
        """Know that ``lease`` is the latest that the task ``by`` acquired."""
        found = self._by_task.setdefault(by, lease)
        if found is not lease:
            if not isinstance(found, dict):
                found = self._by_task[by] = {found: None}
            found[lease] = None

    def of_task(self, task: TaskRef) -> Iterable[Lease]:
        """Return the leases that ``task`` acquired, the latest first."""
        found = self._by_task.get(task)
        if found is None:
            return ()
        return reversed(found) if isinstance(found, dict) else (found,)

    def latest(self, task: TaskRef | None, weight: int) -> Lease | None:
        """Return the lease that ``task`` acquired last and holds. Of ``weight``, unless that is 0. O(1), mostly."""
        for lease in self.of_task(task) if task is not None else ():
            if lease.group is None and weight in (0, lease.weight):
                return lease
        return None

    def loosen(self, lease: Lease, loop: asyncio.AbstractEventLoop, forgotten: Callable[[], None]) -> bool:
        """Leave ``lease`` to those who refer to it; return False if that is done already.

        ``forgotten`` is called in ``loop`` when nothing does.
        """
        if lease not in self:
            return False
        self.discard(lease)

        def drop(reference: ReferenceType[Lease]) -> None:
            self._loose.pop(reference, None)
            forgotten()

        self._loose[weakly(lease, loop, drop)] = None
        return True

    def discard(self, lease: Lease) -> None:
        """Forget ``lease``: it is held no longer."""
        self.pop(lease, None)
        by = lease.acquirer
        if by is not None:
            try:
                found = self._by_task.get(by)
            except TypeError:  # its task has ended, and nobody asked for its hash before: it was not noted
                found = None
            if found is lease:
                del self._by_task[by]
            elif isinstance(found, dict):
                found.pop(lease, None)
                if not found:
                    del self._by_task[by]
        if self._loose:
            self._loose.pop(ref(lease), None)
