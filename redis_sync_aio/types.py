"""The types in signatures of this package that have no other public place: for annotations of your own."""

from __future__ import annotations

from ._attempts import Attempts
from ._hold import OnLost
from ._keys import Engine
from ._link.client import Client
from ._lost import Lost
from ._types import Json, Name, Seconds
from ._undo import UndoStep
from .coordinator import Push
from .errors import LossReason
from .lock import ClientSource, OnBusy, Synchronize, SynchronizeOrSkip
from .semaphore import OnMismatch

__all__ = [
    "Attempts",
    "Client",
    "ClientSource",
    "Engine",
    "Json",
    "LossReason",
    "Lost",
    "Name",
    "OnBusy",
    "OnLost",
    "OnMismatch",
    "Push",
    "Seconds",
    "Synchronize",
    "SynchronizeOrSkip",
    "UndoStep",
]
