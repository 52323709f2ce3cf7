"""Distributed locks for asyncio on Redis and Valkey: pushed hand-over, honest leases, fences.

The documentation: https://redis-sync-aio.github.io/redis-sync-aio/. P1 to P12, in comments and names of tests, are its
[guarantees](https://redis-sync-aio.github.io/redis-sync-aio/guarantees/).
"""

from ._coordinator import Coordinator, CoordinatorStatistics
from ._core.backoff import Backoff, wait_until
from ._core.version import __version__ as __version__
from ._leases.lease import Lease
from ._primitives.barrier import AsyncBarrier
from ._primitives.compensation import Compensation
from ._primitives.election import Leader, LeaderElection, Term
from ._primitives.fence_gate import FenceGate
from ._primitives.lock import AsyncLock, LockStatistics, synchronized
from ._primitives.multilock import AsyncMultiLock, MultiLease
from ._primitives.parties import AsyncCountDownLatch, AsyncEvent
from ._primitives.redlock import AsyncRedlock, RedlockLease, RedlockStatistics
from ._primitives.reentrant import AsyncReentrantLock
from ._primitives.robust import AsyncRobustLock, RobustLease
from ._primitives.rwlock import AsyncReadWriteLock, ReadSide, ReadWriteStatistics, WriteSide
from ._primitives.semaphore import AsyncSemaphore, PermitHolder, SemaphoreStatistics
from ._recovery.record import Abandoned
from ._recovery.undo import UndoSteps
from ._transaction import Transaction, WatchRetry, transaction, watch_retry
from ._transactions.attempts import Attempt
from ._transactions.guarded import GuardedTransaction
from ._transactions.options import Committed
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
