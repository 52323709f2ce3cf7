"""Events of requests, leases and connections, as facts: one frozen object for each event.

The package tells observers of these (`_core/observers.py`), and knows nothing of what they do with them. This module is
imported once something is observed: to make the classes takes longer than to import everything else of `_core`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from .keys import SlotState

WithdrawnOutcome: TypeAlias = Literal["timeout", "cancelled", "error", "taken"]
"""The reason that a request ended without a lease."""
LostReason: TypeAlias = Literal["expired", "taken", "unreachable", "late", "closed", "released", "forgotten"]
"""The reason that a lease ended before its holder released it: one of `LeaseLost`, and "forgotten"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events.

    Attributes:
        kind: "lock", "semaphore", "read", "write", "reentrant", "multi", "redlock", "robust", "election", "event",
            "latch", "barrier" or "job". "" for an event about a whole coordinator.
        name: The name of the lock, as text; the names of a multi-lock are joined by ", ". "" for an event about a
            coordinator.
        pattern: The part that names of this sort have in common, for metrics: the template of `synchronized` or
            `once_per`, or the result of ``pattern_of``, or the part before the first ":" and ":*", or the name.
        server: The address of the server, without credentials.
        time: Seconds on a monotonic clock of this process. Only differences mean anything.
        label: The text for people that came with the request, or the label of its coordinator. "" if there is none.
        request: A number that the events of one request share, unique in this process. 0 for an event about a
            coordinator or a job.
    """

    kind: str
    name: str
    pattern: str
    server: str
    time: float
    request: int
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested(Event):
    """A task asked for a lease. Exactly one of `Withdrawn`, `Released` and `Lost` follows, and ends the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted(Event):
    """The task has its lease. Exactly one of `Released` and `Lost` follows.

    Attributes:
        waited: Seconds since `Requested`: for how long the task waited.
        contended: True if it had to wait for another holder.
        fence: The fence of the lease.
        token: The token of the lease, which is the value under the key of a lock.
    """

    waited: float
    contended: bool
    fence: int
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn(Event):
    """A request ended without a lease.

    Attributes:
        outcome: "timeout": its time was up. "cancelled": the task was cancelled. "taken": others had the lock, and the
            request did not wait (`try_acquire`, or ``timeout=0``). "error": it raised anything else.
        waited: Seconds since `Requested`.
        error: The exception, for the outcomes "timeout" and "error". Else None.
    """

    outcome: WithdrawnOutcome
    waited: float
    error: BaseException | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Released(Event):
    """A lease was released, as the server confirmed, or handed on inside this process.

    A waiter of an event, a latch or a barrier holds nothing: this follows `Granted` immediately.

    Attributes:
        held: Seconds since `Granted`: for how long the task held the lease.
    """

    held: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Event):
    """A lease ended before its holder released it.

    Attributes:
        reason: The reason of [`LeaseLost`][redis_sync_aio.LeaseLost], or "forgotten": nothing is left that could
            release the lease.
        time_is_up: True if the time of the lease had ended by the clock of this process. With the reason "expired" it
            tells apart a lease that was not renewed and one that is gone from the server.
        held: Seconds since `Granted`.
    """

    reason: LostReason
    time_is_up: bool
    held: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewedLate(Event):
    """A renewal was sent late, and may still be in time: the event loop was blocked.

    Attributes:
        lateness: Seconds between the time at which the renewal was due and the time at which it was sent.
        left: Seconds that were left of the lease when it was sent.
    """

    lateness: float
    left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver(Event):
    """A task got the lease of another task of this process without a command. `Granted` follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped(Event):
    """A call of a job (`once`, `once_per`) did not run it.

    Attributes:
        state: The state of the slot. "done": a run has ended. "running": another run has the lock. "failed": an earlier
            run raised, was cancelled or was killed.
    """

    state: SlotState


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled(Event):
    """The event loop ran nothing for a while. Measured only while a coordinator holds something.

    Attributes:
        seconds: For how many seconds it ran nothing, at least 0.1.
    """

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLost(Event):
    """The connection to a server was lost. If it is still needed, a new one is being opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionRestored(Event):
    """There is a connection to a server again.

    Attributes:
        after: Seconds since `ConnectionLost`: for how long there was no connection.
        rechecked: How many leases and requests now ask the server about their state.
    """

    after: float
    rechecked: int
