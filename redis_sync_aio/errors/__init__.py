"""The errors of locks, leases and transactions, in one tree.

Each says in which state things are, why it happens, and what to do.
[When it goes wrong](https://redis-sync-aio.github.io/redis-sync-aio/operations/when-it-goes-wrong/) starts from what a
user sees.

Each message names the lock, says what was expected and what was found, and what to do about it. It stands at the raise,
if one place raises it. Otherwise the class builds it from facts: in ``__init__``, or in a static method for each
situation. Those methods are for this package and may change.
``SyncError`` catches them all; the second base of a class is what callers would catch anyway
(``TimeoutError`` for a timeout, redis-py's ``ConnectionError`` for an unreachable server).
They can be pickled and copied. Not among them: bad arguments are TypeError, ValueError or RuntimeError;
`redis_sync_aio.embedded` has errors of its own, and `redis_sync_aio.compat` raises redis-py's.
"""

from __future__ import annotations

from ._base import SyncError
from ._leases import (
    AcquireTimeout,
    BrokenBarrierError,
    FingerprintMismatch,
    LeaseLost,
    LimitMismatch,
    LossReason,
    NotHeld,
    NotReplicated,
    QueueFull,
    ResultNotKept,
    RunInterrupted,
    StaleFence,
    StaleWriter,
    UndoFailed,
    UnknownStep,
    WaitTimeout,
    WouldDeadlock,
)
from ._misuse import TransactionMisuse
from ._servers import (
    CommandRefused,
    Conflict,
    CoordinatorClosed,
    OutcomeUnknown,
    OutOfMemory,
    PartiallyApplied,
    PermissionDenied,
    PushUnavailable,
    Unreachable,
    WrongContext,
    WrongKeyType,
)

__all__ = [
    "AcquireTimeout", "BrokenBarrierError", "CommandRefused", "Conflict", "CoordinatorClosed", "FingerprintMismatch",
    "LeaseLost", "LimitMismatch", "LossReason", "NotHeld", "NotReplicated", "OutOfMemory", "OutcomeUnknown",
    "PartiallyApplied", "PermissionDenied", "PushUnavailable", "QueueFull", "ResultNotKept", "RunInterrupted",
    "StaleFence", "StaleWriter", "SyncError", "TransactionMisuse", "UndoFailed", "UnknownStep", "Unreachable",
    "WaitTimeout", "WouldDeadlock", "WrongContext", "WrongKeyType",
]  # fmt: skip

# Tracebacks and pickles name the place where users find the classes.
for _name in __all__:
    if isinstance(globals()[_name], type):
        globals()[_name].__module__ = __name__
