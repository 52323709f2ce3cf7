"""Why a lease was lost: what the server answered, in the light of what this process knows about itself.

A reason comes from whoever noticed the loss. When the time of the lease was up by then, the clock explains it: nobody
asked the server, or it answered too late to matter. If the lease was to be renewed, either Redis could not be reached,
or this process did not get round to it; only the stalls that were measured since the latest renewal tell which.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, NamedTuple, cast

from .._core import logs
from .._core.clock import now
from ..errors import LeaseLost, LossReason

if TYPE_CHECKING:
    from .grant import Grant


class Cause(NamedTuple):
    """Facts about a loss; see `LeaseLost`."""

    reason: LossReason
    held_for: float
    stalled: float = 0.0
    time_is_up: bool = False
    claim: float = 0.0


def cause_of(lease: Grant, reason: LossReason) -> Cause:
    """Return the facts about a loss that is noticed now."""
    time = now()
    held_for = time - lease.since
    if time < lease.deadline or reason in ("closed", "released"):
        return Cause(reason, held_for)
    keeper, period = lease.permit._keeper, lease.period
    stalled = keeper.stalled_since(lease.deadline - period)
    if stalled < period / 4:  # that alone leaves time for a renewal, which is due after a third of it
        stalled = 0.0
    if time < lease.ends_by() and (
        (reason == "expired" and stalled) or (reason == "unreachable" and keeper.answering(lease.keys, stalled > 0))
    ):
        reason = "late"
    return Cause(reason, held_for, stalled, time_is_up=True, claim=lease.claim or lease.permit.claim)


class ExplainedLoss:
    """The part of `Lease` that says how it was lost."""

    reason: LossReason | None = None
    cause: Cause | None = None
    """Why it was lost, once it is."""
    reports_loss = True
    """Whether its loss is logged: not for a part of something whose own loss is."""
    loss_reported: bool = False
    """Whether an error that says how it was lost was made for somebody."""

    def loss(self) -> LeaseLost:
        """Return the error that says how this lease was lost."""
        self.loss_reported = True
        return self.lost_as()

    def lost_as(
        self,
        given_back: tuple[str, ...] = (),
        servers: tuple[int, int, int] | None = None,
        fence: int | None = None,
        since: float | None = None,
    ) -> LeaseLost:
        """Return the same error, perhaps for something that this lease is a part of.

        ``fence``, ``since``: of that (``since``: when it was granted, local clock); the others as `LeaseLost`.
        """
        lease = cast("Grant", self)
        cause = self.cause or cause_of(lease, self.reason or "expired")
        return LeaseLost(
            name=lease.name,
            reason=cause.reason,
            fence=lease.fence if fence is None else fence,
            held_for=cause.held_for + (0.0 if since is None else lease.since - since),
            stalled=cause.stalled,
            time_is_up=cause.time_is_up,
            claim=cause.claim,
            given_back=given_back,
            servers=servers,
        )

    def _report_loss(self) -> None:
        reader = cast("Grant", self).reader
        if reader is None or reader.reason is None:  # else the reader's loss, which took this along, is reported
            logs.lease_lost(self.lost_as())


def notice_end(loop: asyncio.AbstractEventLoop, lease: Grant) -> None:
    """Notice the end of a lease whose release failed: no tick looks at it, but somebody may wait for its loss."""
    left = lease.deadline - now()
    if lease.state.value != "held":
        return
    if left <= 0:
        lease.lose("expired")
    elif left < math.inf:
        loop.call_later(left, notice_end, loop, lease)
