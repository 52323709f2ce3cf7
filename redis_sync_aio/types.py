"""The types in signatures of this package that have no other public place: for annotations of your own."""

from __future__ import annotations

from ._acquire.binding import CoordinatorLike
from ._acquire.options import CoordinatorOptions
from ._client.settings import Client, RedisClient, ValkeyClient
from ._coordinator import HeldHere, Push, WaitingHere
from ._core.arguments import Json, Name, Seconds
from ._core.attached import Observer, PatternOf
from ._core.keys import Engine
from ._leases.hold import Acquiring, OnLost
from ._leases.lease import BaseLease, GuardingLease
from ._primitives.lock import ClientSource, OnBusy, Synchronize, SynchronizeOrSkip
from ._primitives.semaphore import OnMismatch
from ._recovery.undo import UndoStep
from ._transactions.attempts import Attempts
from ._transactions.exec_replies import Replies
from .errors import LossReason

__all__ = [
    "Acquiring",
    "Attempts",
    "BaseLease",
    "Client",
    "ClientSource",
    "CoordinatorLike",
    "CoordinatorOptions",
    "Engine",
    "GuardingLease",
    "HeldHere",
    "Json",
    "LossReason",
    "Name",
    "Observer",
    "OnBusy",
    "OnLost",
    "OnMismatch",
    "PatternOf",
    "Push",
    "RedisClient",
    "Replies",
    "Seconds",
    "Synchronize",
    "SynchronizeOrSkip",
    "UndoStep",
    "ValkeyClient",
    "WaitingHere",
]
