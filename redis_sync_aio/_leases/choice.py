"""Which of several leases a ``release()`` without a name gives back.

It is the latest that the current task acquired. If there is none, it is the one left behind by a task that has ended,
if that is certain. The lease of a living task is never released on a guess of another task. `LeaseContext` has the same
rule for exits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from .._core.keys import PermitKeys
from .._scripts.constants import WRITER_WEIGHT
from ..errors import NotHeld, WouldDeadlock
from ..errors._leases import RELEASE_TO_WRITE
from .grant import Grant
from .tasks import TaskRef, current_ref, ended

L = TypeVar("L", bound=Grant)


def to_release(held: Sequence[L], *names: str) -> L:
    """Return the lease of ``held`` (oldest first) that a release gives back; raise NotHeld if none is certain.

    ``names`` are those of the locks, for the message.
    """
    leases = [lease for lease in held if lease.group is None]
    task = current_ref()
    own = [lease for lease in leases if lease.acquirer is not None and lease.acquirer == task]
    if own:
        return own[-1]
    left_behind = [lease for lease in leases if lease.acquirer is not None and ended(lease.acquirer)]
    if len(left_behind) == 1:
        return left_behind[0]
    raise NotHeld.by_this_task(names, holders=[_holder(lease) for lease in held])


def _holder(lease: Grant) -> str:
    if lease.group is not None:
        return f"a lease that stands on several, or that its owner may reenter (fence {lease.fence})"
    task = None if lease.acquirer is None else lease.acquirer()
    if task is None or task.done():
        return f"a task that has ended (fence {lease.fence})"
    return f"the task {task.get_name()!r} (fence {lease.fence})"


def deadlock(name: str, held: Iterable[Grant], task: TaskRef, reads: bool) -> WouldDeadlock | None:
    """Return the error for ``task`` if it would wait for its own body, which holds one of ``held``.

    ``reads`` tells that it asks to read, next to other readers.
    """
    for lease in held:
        writes = lease.weight == WRITER_WEIGHT
        if lease.bars(task) and (writes or not reads):
            use = "use AsyncReentrantLock for both, or pass the lease down instead of acquiring again"
            if isinstance(lease.keys, PermitKeys):
                use = "go on with that lease, or downgrade() it" if writes else RELEASE_TO_WRITE
            return WouldDeadlock.own_body(name, fence=lease.fence, use=use)
    return None
