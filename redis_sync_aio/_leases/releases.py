"""Releases, which are sent when a grant is not needed any more, and what their answers mean."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from .._client.resp import Argument
from .._core.clock import now
from .._core.keys import Keys
from .._engine.commands import Commands, Delivery
from .._scripts.constants import Released
from .._transport.call import Call
from ..errors import SyncError, Unreachable
from .grant import Grant
from .in_flight_counter import InFlightCounter
from .terms import LeaseState


class Releases:
    """The releases of a coordinator's grants."""

    def __init__(
        self,
        commands: Callable[[], Commands],
        loop: asyncio.AbstractEventLoop,
        retry_for: float,
        forget: Callable[[Grant], None],
    ) -> None:
        """Begin with no release in flight. ``forget`` removes a grant from those that are held."""
        self.in_flight: InFlightCounter = InFlightCounter()
        self._commands = commands
        self._loop = loop
        self._retry_for = retry_for
        self._forget = forget

    def release(self, lease: Grant) -> None:
        """Send the release of ``lease``, and repeat it until it is answered or the lease has expired."""
        time, pending, undoes = now(), lease.replayed, lease.reusable
        told = Delivery(time, min(lease.deadline, time + self._retry_for), self._answered)
        keys, token, release_args = lease.keys, lease.wire_token, lease.release_args()
        call = self._commands().release(
            keys, token, told, about=lease, pending=pending, release_args=release_args, undoes=undoes
        )
        # A command that is alone is on its way already (see `Connection`), so the rest adds no latency.
        self.in_flight.started(call)
        self._forget(lease)
        if (here := lease.same_identity) is not None:
            here.release_sent(lease.wire_token)

    def undo(
        self,
        keys: Keys,
        token: bytes,
        ticket: bytes = b"",
        *,
        pending: bool = False,
        release_args: tuple[Argument, ...] = (),
        done: Callable[[Call], None] | None = None,
    ) -> None:
        """Send a release that no task waits for; see `Resource.undo`. It is repeated for a minute at least."""

        def answered(call: Call) -> None:
            self.in_flight.finished(call)
            if done is not None:
                done(call)

        time = now()
        told, undoes = Delivery(time, time + max(self._retry_for, 60.0), answered), not pending
        call = self._commands().release(
            keys, token, told, ticket=ticket, pending=pending, release_args=release_args, undoes=undoes
        )
        self.in_flight.started(call)

    def undo_attach(self, keys: Keys, token: bytes, replaced: bytes, ttl_ms: int) -> None:
        """Let ``replaced`` hold again what was attached as ``token``, so that it may be attached again."""
        time = now()
        told = Delivery(time, time + max(self._retry_for, 60.0), self.in_flight.finished)
        self.in_flight.started(
            self._commands().attach(keys, replaced, told, ttl_ms=ttl_ms, replaced=token, undoes=True)
        )

    def repeat_downgrade(self, lease: Grant) -> None:
        """Repeat the downgrade of ``lease``, whose renewals would otherwise keep the writer's permit, to its deadline.

        Not after its end: the same identity may have become the writer again.
        """
        if lease.state is LeaseState.HELD:
            told = Delivery(now(), lease.deadline, self.in_flight.finished)
            self.in_flight.started(self._commands().downgrade(lease.keys, lease.wire_token, told, undoes=True))

    def _answered(self, call: Call) -> None:
        self.in_flight.finished(call)
        lease: Grant = call.context
        if (here := lease.same_identity) is not None:
            here.release_answered(lease.wire_token)
        plainly = call.reply == Released.RELEASED and lease.state is LeaseState.RELEASING
        error = None if plainly else release_error(lease, call)
        lease.release_ended(error)
        if error is not None:
            notice_end(self._loop, lease)


def release_error(lease: Grant, call: Call) -> SyncError | None:
    """Return why ``lease`` was not released, by the answer to its release. A lease that was gone is lost."""
    if lease.state is LeaseState.LOST:  # it was closed or found lost meanwhile
        return lease.loss()
    if call.error is not None:
        if isinstance(call.error, Unreachable) and now() >= lease.deadline:
            lease.lose("unreachable")
            return lease.loss()
        lease.release_uncertain |= call.attempts > 0 and (call.ambiguous or isinstance(call.error, Unreachable))
        return call.error
    found = call.reply  # a Released
    # An earlier copy of this release may have been executed and its answer lost. Before our deadline only we can have
    # ended the lease, so that copy did (P4).
    if found == Released.RELEASED or ((call.ambiguous or lease.release_uncertain) and call.sent < lease.deadline):
        return None
    lease.lose("expired" if found == Released.GONE else "taken")
    return lease.loss()


def notice_end(loop: asyncio.AbstractEventLoop, lease: Grant) -> None:
    """Notice the end of a lease whose release failed. No tick looks at it, but a task may wait for its loss."""
    left = lease.deadline - now()
    if lease.state is not LeaseState.HELD:
        return
    if left <= 0:
        lease.lose("expired")
    elif left < math.inf:
        loop.call_later(left, notice_end, loop, lease)
