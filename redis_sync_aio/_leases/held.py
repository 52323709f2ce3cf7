"""The leases that this process holds of one name: all of them, by task, and those that only references keep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from .choice import TaskRef
from .forgotten import weakly

if TYPE_CHECKING:
    from ..lease import Lease


class HeldLeases:
    """See the top of this module. Iterates over them, mostly the oldest first.

    A lease is kept while the task that acquired it lives, or an identity or an owner stands for it. After that it is
    `loosened`: only references keep it (`forgotten`).
    """

    __slots__ = ("_by_task", "_kept", "_loose")

    def __init__(self) -> None:
        self._kept: dict[Lease, None] = {}
        self._by_task: dict[TaskRef, dict[Lease, None]] = {}
        self._loose: dict[ReferenceType[Lease], None] = {}

    def __iter__(self) -> Iterator[Lease]:
        yield from self._kept
        for reference in self._loose:
            lease = reference()
            if lease is not None:
                yield lease

    def __bool__(self) -> bool:
        return bool(self._kept or self._loose)

    def add(self, lease: Lease) -> None:
        """Keep ``lease``."""
        self._kept[lease] = None

    def acquired(self, lease: Lease, task: asyncio.Task[object]) -> None:
        """Note that ``task`` acquired ``lease``."""
        by = lease.acquirer = ref(task)
        found = self._by_task.get(by)
        if found is None:
            self._by_task[by] = {lease: None}
        else:
            found[lease] = None

    def latest(self, task: TaskRef | None, weight: int) -> Lease | None:
        """Return the lease that ``task`` acquired last and holds. Of ``weight``, unless that is 0. O(1), mostly."""
        for lease in self.of_task(task) if task is not None else ():
            if lease.group is None and weight in (0, lease.weight):
                return lease
        return None

    def of_task(self, task: TaskRef) -> Iterator[Lease]:
        """Iterate over the leases that ``task`` acquired, the latest first."""
        return reversed(self._by_task.get(task, {}))

    def loosen(self, lease: Lease, loop: asyncio.AbstractEventLoop, forgotten: Callable[[], None]) -> bool:
        """Leave ``lease`` to those who refer to it; return False if that is done already.

        ``forgotten`` is called in ``loop`` when nothing does.
        """
        if lease not in self._kept:
            return False
        self.discard(lease)

        def drop(reference: ReferenceType[Lease]) -> None:
            self._loose.pop(reference, None)
            forgotten()

        self._loose[weakly(lease, loop, drop)] = None
        return True

    def discard(self, lease: Lease) -> None:
        """Forget ``lease``: it is held no longer."""
        self._kept.pop(lease, None)
        by = lease.acquirer
        if by is not None and (found := self._by_task.get(by)) is not None:
            found.pop(lease, None)
            if not found:
                del self._by_task[by]
        if self._loose:
            self._loose = {other: None for other in self._loose if other() is not lease}
