"""Forgotten leases: the task that acquired them has ended, and nothing refers to them.

They are not renewed, so that a task that forgot its lease does not block all others until its process ends. The
coordinator keeps a lease while the task that acquired it lives, or while an identity or an owner holds it. After that
only references keep it.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar
from weakref import ReferenceType, ref

from .._core import logs

if TYPE_CHECKING:
    from .grant import Grant

L = TypeVar("L", bound="Grant")


def weakly(
    lease: L, loop: asyncio.AbstractEventLoop, forgotten: Callable[[ReferenceType[L]], None]
) -> ReferenceType[L]:
    """Return a weak reference; when the lease is collected, report it and call ``forgotten`` in ``loop``."""
    name, fence, ttl = lease.name, lease.fence, lease.ttl_ms / 1000

    def tell(reference: ReferenceType[L]) -> None:
        forgotten(reference)
        report(name, fence, ttl)

    def collected(reference: ReferenceType[L]) -> None:
        # The garbage collector may run in any thread, and after the loop was closed.
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, reference)

    return ref(lease, collected)


def report(name: str, fence: int, ttl: float) -> None:
    """Log and warn of a forgotten lease."""
    warnings.warn(logs.lease_forgotten(name, fence, ttl), ResourceWarning, stacklevel=2)
