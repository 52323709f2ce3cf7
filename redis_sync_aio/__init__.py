"""Distributed locks for asyncio on Redis and Valkey: pushed hand-over, honest leases, fences."""

from ._synchronized import synchronized
from .backoff import Backoff, wait_until
from .coordinator import Coordinator
from .errors import (
    AcquireTimeout,
    CommandRefused,
    CoordinatorClosed,
    LeaseLost,
    LinkUnavailable,
    NotHeld,
    OutOfMemory,
    PermissionRefused,
    SyncError,
    Unreachable,
    WrongContext,
    WrongKeyType,
)
from .lease import Lease
from .lock import AsyncLock, LockStatistics
from .multilock import AsyncMultiLock, MultiLease
from .reentrant import AsyncReentrantLock

__all__ = [
    "AcquireTimeout",
    "AsyncLock",
    "AsyncMultiLock",
    "AsyncReentrantLock",
    "Backoff",
    "CommandRefused",
    "Coordinator",
    "CoordinatorClosed",
    "Lease",
    "LeaseLost",
    "LinkUnavailable",
    "LockStatistics",
    "MultiLease",
    "NotHeld",
    "OutOfMemory",
    "PermissionRefused",
    "SyncError",
    "Unreachable",
    "WrongContext",
    "WrongKeyType",
    "synchronized",
    "wait_until",
]
__version__ = "0.1.0"
