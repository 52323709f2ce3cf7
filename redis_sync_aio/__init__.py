"""Distributed locks for asyncio on Redis and Valkey: pushed hand-over, honest leases, fences.

The documentation: https://redis-sync-aio.github.io/redis-sync-aio/. P1 to P12, in comments and names of tests, are its
[guarantees](https://redis-sync-aio.github.io/redis-sync-aio/guarantees/).
"""

from ._core.backoff import Backoff, wait_until
from ._core.version import __version__ as __version__
from ._leases.lease import Lease
from ._recovery.record import Abandoned
from ._recovery.undo import UndoSteps
from ._transactions.attempts import Attempt
from ._transactions.guarded import GuardedTransaction
from ._transactions.options import Committed
from .barrier import AsyncBarrier
from .compensation import Compensation
from .coordinator import Coordinator, CoordinatorStatistics
from .election import Leader, LeaderElection, Term
from .errors import (
    AcquireTimeout,
    BrokenBarrierError,
    CommandRefused,
    Conflict,
    CoordinatorClosed,
    FingerprintMismatch,
    LeaseLost,
    LimitMismatch,
    NotHeld,
    OutcomeUnknown,
    OutOfMemory,
    PartiallyApplied,
    PermissionDenied,
    PushUnavailable,
    QueueFull,
    ResultNotKept,
    RunInterrupted,
    StaleFence,
    StaleWriter,
    SyncError,
    TransactionMisuse,
    UndoFailed,
    UnknownStep,
    Unreachable,
    WouldDeadlock,
    WrongContext,
    WrongKeyType,
)
from .fence_gate import FenceGate
from .lock import AsyncLock, LockStatistics, synchronized
from .multilock import AsyncMultiLock, MultiLease
from .parties import AsyncCountDownLatch, AsyncEvent
from .redlock import AsyncRedlock, RedlockLease, RedlockStatistics
from .reentrant import AsyncReentrantLock
from .robust import AsyncRobustLock, RobustLease
from .rwlock import AsyncReadWriteLock, ReadSide, ReadWriteStatistics, WriteSide
from .semaphore import AsyncSemaphore, PermitHolder, SemaphoreStatistics
from .transaction import Transaction, WatchRetry, transaction, watch_retry

__all__ = [
    "Abandoned",
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
    "Attempt",
    "Backoff",
    "BrokenBarrierError",
    "CommandRefused",
    "Committed",
    "Compensation",
    "Conflict",
    "Coordinator",
    "CoordinatorClosed",
    "CoordinatorStatistics",
    "FenceGate",
    "FingerprintMismatch",
    "GuardedTransaction",
    "Leader",
    "LeaderElection",
    "Lease",
    "LeaseLost",
    "LimitMismatch",
    "LockStatistics",
    "MultiLease",
    "NotHeld",
    "OutOfMemory",
    "OutcomeUnknown",
    "PartiallyApplied",
    "PermissionDenied",
    "PermitHolder",
    "PushUnavailable",
    "QueueFull",
    "ReadSide",
    "ReadWriteStatistics",
    "RedlockLease",
    "RedlockStatistics",
    "ResultNotKept",
    "RobustLease",
    "RunInterrupted",
    "SemaphoreStatistics",
    "StaleFence",
    "StaleWriter",
    "SyncError",
    "Term",
    "Transaction",
    "TransactionMisuse",
    "UndoFailed",
    "UndoSteps",
    "UnknownStep",
    "Unreachable",
    "WatchRetry",
    "WouldDeadlock",
    "WriteSide",
    "WrongContext",
    "WrongKeyType",
    "synchronized",
    "transaction",
    "wait_until",
    "watch_retry",
]
