"""Distributed locks for asyncio on Redis and Valkey: pushed hand-over, honest leases, fences.

The documentation: https://redis-sync-aio.github.io/redis-sync-aio/. P1 to P12, in comments and names of tests, are its
[guarantees](https://redis-sync-aio.github.io/redis-sync-aio/guarantees/).
"""

from typing import TYPE_CHECKING, NoReturn

from ._coordinator import Coordinator
from ._core.backoff import Backoff, wait_until
from ._core.redis_py_words import missing_name
from ._core.version import __version__ as __version__
from ._leases.lease import Lease
from ._primitives.compensation import Compensation
from ._primitives.election import LeaderElection
from ._primitives.fence_gate import FenceGate
from ._primitives.lock import AsyncLock, AsyncRobustLock, synchronized
from ._primitives.multilock import AsyncMultiLock
from ._primitives.parties import AsyncBarrier, AsyncCountDownLatch, AsyncEvent
from ._primitives.redlock import AsyncRedlock
from ._primitives.reentrant import AsyncReentrantLock
from ._primitives.rwlock import AsyncReadWriteLock
from ._primitives.semaphore import AsyncSemaphore
from ._transaction import transaction, watch_retry
from .errors import (
    AcquireTimeout,
    CommandRefused,
    Conflict,
    LeaseLost,
    NotHeld,
    OutcomeUnknown,
    QueueFull,
    SyncError,
    Unreachable,
    WouldDeadlock,
)
from .jobs import idempotent, once, once_per

__all__ = [
    "AcquireTimeout",
    "AsyncBarrier",
    "AsyncCountDownLatch",
    "AsyncEvent",
    "AsyncLock",
    "AsyncMultiLock",
    "AsyncReadWriteLock",
    "AsyncRedlock",
    "AsyncReentrantLock",
    "AsyncRobustLock",
    "AsyncSemaphore",
    "Backoff",
    "CommandRefused",
    "Compensation",
    "Conflict",
    "Coordinator",
    "FenceGate",
    "LeaderElection",
    "Lease",
    "LeaseLost",
    "NotHeld",
    "OutcomeUnknown",
    "QueueFull",
    "SyncError",
    "Unreachable",
    "WouldDeadlock",
    "idempotent",
    "once",
    "once_per",
    "synchronized",
    "transaction",
    "wait_until",
    "watch_retry",
]


if not TYPE_CHECKING:  # a type checker knows the names that there are

    def __getattr__(name: str) -> NoReturn:
        missing_name(__name__, name)
