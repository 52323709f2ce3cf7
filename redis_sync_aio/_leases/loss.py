"""Why a lease was lost: what the server answered, in the light of what this process knows about itself.

A reason comes from whoever noticed the loss. When the time of the lease was up by then, the clock explains it: nobody
asked the server, or it answered too late to matter. If the lease was to be renewed, either Redis could not be reached,
or this process did not get round to it; only the stalls that were measured since the latest renewal tell which.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from .._core.clock import now
from .._core.keys import Keys
from ..errors import LossReason


class Cause(NamedTuple):
    """Facts about a loss; see `LeaseLost`."""

    reason: LossReason
    held_for: float
    stalled: float = 0.0
    time_is_up: bool = False
    claim: float = 0.0


class Witness(Protocol):
    """Knows what this process went through."""

    def stalled_since(self, time: float) -> float: ...
    def answering(self, keys: Keys, stalled: bool) -> bool: ...


class Losable(Protocol):
    """What is to be known of a lease, to say why it was lost."""

    @property
    def keys(self) -> Keys: ...
    @property
    def since(self) -> float: ...
    @property
    def deadline(self) -> float: ...
    @property
    def period(self) -> float: ...
    @property
    def claim(self) -> float: ...
    @property
    def permit(self) -> Losable: ...
    @property
    def manager(self) -> Witness: ...
    def ends_by(self) -> float: ...


def cause_of(lease: Losable, reason: LossReason) -> Cause:
    """Return the facts about a loss that is noticed now."""
    time = now()
    held_for = time - lease.since
    if time < lease.deadline or reason in ("closed", "released"):
        return Cause(reason, held_for)
    witness, period = lease.permit.manager, lease.period
    stalled = witness.stalled_since(lease.deadline - period)
    if stalled < period / 4:  # that alone leaves time for a renewal, which is due after a third of it
        stalled = 0.0
    if time < lease.ends_by() and (
        (reason == "expired" and stalled) or (reason == "unreachable" and witness.answering(lease.keys, stalled > 0))
    ):
        reason = "late"
    return Cause(reason, held_for, stalled, time_is_up=True, claim=lease.claim or lease.permit.claim)
