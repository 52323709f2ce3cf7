"""The types that the package returns or takes and you do not make: for annotations of your own."""

from __future__ import annotations

from ._client.settings import Client, RedisClient, ValkeyClient
from ._coordinator import Push
from ._core.arguments import Json, Name, Seconds
from ._core.keys import Engine
from ._leases.hold import Acquiring, OnLost
from ._leases.implicit import CoordinatorLike
from ._leases.lease import BaseLease, GuardingLease, WriteLease
from ._leases.options import CoordinatorOptions
from ._primitives.election import Leader, Term
from ._primitives.lock import RobustLease
from ._primitives.multilock import MultiLease
from ._primitives.redlock import RedlockLease
from ._primitives.rwlock import ReadSide, WriteSide
from ._recovery.record import Abandoned, UndoSteps
from ._transaction import Transaction, WatchRetry
from ._transactions.attempts import Attempt
from ._transactions.handle import Committed, GuardedTransaction
from .errors import LossReason

__all__ = [
    "Abandoned",
    "Acquiring",
    "Attempt",
    "BaseLease",
    "Client",
    "Committed",
    "CoordinatorLike",
    "CoordinatorOptions",
    "Engine",
    "GuardedTransaction",
    "GuardingLease",
    "Json",
    "Leader",
    "LossReason",
    "MultiLease",
    "Name",
    "OnLost",
    "Push",
    "ReadSide",
    "RedisClient",
    "RedlockLease",
    "RobustLease",
    "Seconds",
    "Term",
    "Transaction",
    "UndoSteps",
    "ValkeyClient",
    "WatchRetry",
    "WriteLease",
    "WriteSide",
]
