"""Distributed locks for asyncio on Redis and Valkey: pushed hand-over, honest leases, fences."""

from ._synchronized import synchronized
from .backoff import Backoff, wait_until
from .coordinator import Coordinator
from .errors import (
    AcquireTimeout,
    CommandRefused,
    CoordinatorClosed,
    LeaseLost,
    LimitMismatch,
    LinkUnavailable,
    NotHeld,
    OutOfMemory,
    PermissionRefused,
    SyncError,
    Unreachable,
    WouldDeadlock,
    WrongContext,
    WrongKeyType,
)
from .lease import Lease
from .lock import AsyncLock, LockStatistics
from .multilock import AsyncMultiLock, MultiLease
from .reentrant import AsyncReentrantLock
from .rwlock import AsyncReadWriteLock, ReadWriteStatistics
from .semaphore import AsyncSemaphore, PermitHolder, SemaphoreStatistics

__all__ = [
    "AcquireTimeout",
    "AsyncLock",
    "AsyncMultiLock",
    "AsyncReadWriteLock",
    "AsyncReentrantLock",
    "AsyncSemaphore",
    "Backoff",
    "CommandRefused",
    "Coordinator",
    "CoordinatorClosed",
    "Lease",
    "LeaseLost",
    "LimitMismatch",
    "LinkUnavailable",
    "LockStatistics",
    "MultiLease",
    "NotHeld",
    "OutOfMemory",
    "PermissionRefused",
    "PermitHolder",
    "ReadWriteStatistics",
    "SemaphoreStatistics",
    "SyncError",
    "Unreachable",
    "WouldDeadlock",
    "WrongContext",
    "WrongKeyType",
    "synchronized",
    "wait_until",
]
__version__ = "0.1.0"
