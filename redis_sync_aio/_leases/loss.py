"""The cause of a loss: the answer of the server, and the facts that this process knows about itself.

Whatever noticed the loss gives a reason. If the time of the lease was up by then, the clock explains the loss: the
server was not asked, or answered too late to matter. If the lease was to be renewed, either Redis refused that until
the end, or it was out of reach, or this process was late. Only the stalls that were measured since the latest renewal,
or since its latest refusal, tell which.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from .._core.clock import now
from .._core.keys import Keys
from ..errors import LeaseLost, LossReason

REFUSING = 1.0
"""Seconds since a refusal within which the server counts as one that refuses. The next attempt is made in less."""


class Cause(NamedTuple):
    """Facts about a loss; see `LeaseLost`."""

    reason: LossReason
    held_for: float
    stalled: float = 0.0
    time_is_up: bool = False
    claim: float = 0.0

    def error(
        self,
        name: str,
        fence: int,
        held_before: float,
        given_back: tuple[str, ...],
        servers: tuple[int, int, int] | None,
    ) -> LeaseLost:
        """Return the error for what has this cause; ``held_before``: seconds that it was held before this grant."""
        return LeaseLost(
            name=name,
            reason=self.reason,
            fence=fence,
            held_for=self.held_for + held_before,
            stalled=self.stalled,
            time_is_up=self.time_is_up,
            claim=self.claim,
            given_back=given_back,
            servers=servers,
        )


class Health(Protocol):
    """Knows how this process and its connections fared."""

    def stalled_since(self, time: float, /) -> float: ...
    def answering(self, keys: Keys, stalled: bool, /) -> bool: ...


class Losable(Protocol):
    """The facts about a grant that explain its loss."""

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
    def refused(self) -> float: ...
    @property
    def permit(self) -> Losable: ...
    @property
    def manager(self) -> Health: ...
    def ends_by(self) -> float: ...


def cause_of(lease: Losable, reason: LossReason) -> Cause:
    """Return the facts about a loss that was noticed now."""
    time = now()
    held_for = time - lease.since
    if time < lease.deadline or reason in ("closed", "released"):
        return Cause(reason, held_for)
    witness, period, refused = lease.permit.manager, lease.period, max(lease.refused, lease.permit.refused)
    stalled = witness.stalled_since(max(lease.deadline - period, refused))
    if reason == "unreachable" and time - stalled - refused < REFUSING:
        reason = "expired"
    if stalled < period / 4:  # too short to prevent a renewal, which is due after a third of the period
        stalled = 0.0
    if time < lease.ends_by() and (
        (reason == "expired" and stalled) or (reason == "unreachable" and witness.answering(lease.keys, stalled > 0))
    ):
        reason = "late"
    return Cause(reason, held_for, stalled, time_is_up=True, claim=lease.claim or lease.permit.claim)
