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
        value: The result of the body. None if the body is that of a loop, which has no result.
        replies: The replies to the queued commands, in order, as the client gives them. None if ``recovered``.
        attempts: How often the body ran, the last time included.
        conflicts: How many attempts were not committed because another client had changed a watched key.
        elapsed: Seconds from the call to the commit.
        escalated: Whether conflicts made it wait for a turn of its own (``escalate_after``).
        recovered: Whether the answer to EXEC was lost and the marker told that it was executed (``exactly_once``). It
            is not known then whether a command failed when it ran.
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
    timeout: float | None
    backoff: Backoff
    idempotent: bool
    exactly_once: bool
    escalate_after: int | None
