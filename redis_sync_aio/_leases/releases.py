"""What the answer to a release means for the lease, and for others of its identity."""

from __future__ import annotations

import asyncio
import math

from .._core.clock import now
from .._scripts.constants import Released
from .._transport.call import Call
from ..errors import SyncError, Unreachable
from .grant import Grant
from .terms import IdentityReleases, LeaseState


def release_error(lease: Grant, call: Call) -> SyncError | None:
    """Return why ``lease`` was not released, by the answer to its release; a lease that was gone is lost."""
    if lease.state is LeaseState.LOST:  # closed, or found lost, meanwhile
        return lease.loss()
    if call.error is not None:
        if isinstance(call.error, Unreachable) and now() >= lease.deadline:
            lease.lose("unreachable")
            return lease.loss()
        lease.release_uncertain |= call.attempts > 0 and (call.ambiguous or isinstance(call.error, Unreachable))
        return call.error
    found = call.reply  # a Released
    # An earlier copy of this very release may have been executed and its answer lost. Before our deadline nobody but
    # us can have ended the lease, so that copy did it (P4).
    if found == Released.RELEASED or ((call.ambiguous or lease.release_uncertain) and call.sent < lease.deadline):
        return None
    lease.lose("expired" if found == Released.GONE else "taken")
    return lease.loss()


def namesakes_of(lease: Grant) -> IdentityReleases | None:
    """Return the others of the lease's identity. That of an upgrade is the reader's."""
    return lease.namesakes if lease.reader is None else lease.reader.namesakes


def notice_end(loop: asyncio.AbstractEventLoop, lease: Grant) -> None:
    """Notice the end of a lease whose release failed: no tick looks at it, but somebody may wait for its loss."""
    left = lease.deadline - now()
    if lease.state is not LeaseState.HELD:
        return
    if left <= 0:
        lease.lose("expired")
    elif left < math.inf:
        loop.call_later(left, notice_end, loop, lease)
