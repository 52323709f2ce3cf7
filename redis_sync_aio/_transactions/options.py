"""The options of a transaction, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from .._core.backoff import Backoff
from .exec_replies import Replies

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Committed(Generic[T]):
    """A transaction that was committed, and what it took.

    Attributes:
        value: what the body returned; None in the form of a loop.
        replies: the replies to the queued commands, in order, as the client gives them; None when ``recovered``.
        attempts: how often the body ran, this time included.
        conflicts: how often a watched key had been changed by others.
        elapsed: seconds from the call to the commit.
        escalated: it had to take its turn (``escalate_after``).
        recovered: the answer to EXEC was lost, and the marker told that it was executed (``exactly_once``). Whether a
            command failed when it ran is not known then.
    """

    value: T
    replies: Replies | None
    attempts: int
    conflicts: int
    elapsed: float
    escalated: bool = False
    recovered: bool = False


@dataclass(frozen=True, slots=True)
class TransactionOptions:
    """The checked options of a transaction."""

    keys: tuple[bytes, ...]
    prefix: bytes
    """The beginning of keys that are written next to the caller's."""
    attempts: int
    deadline: float | None
    backoff: Backoff
    idempotent: bool
    exactly_once: bool
    escalate_after: int | None
