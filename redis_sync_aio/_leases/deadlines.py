"""Deadlines of leases, from what was sent to the server and what it answered.

A renewal that ends a lease sooner counts from the moment it is sent (P1): the server may execute it, whatever becomes
of the answer. If it is refused, or was never sent, the lease lasts as long as before.
"""

from __future__ import annotations

from collections.abc import Callable

from .._core.clock import now
from .._transport.call import Call
from ..errors import CommandRefused
from .grant import Grant
from .in_flight import InFlightRenewals, Sent, Span
from .terms import LeaseState

CLAIM_USED = 1 / 6
"""The part of a claim after which it is renewed. Sections that are shorter than this need no renewal."""


class Deadlines:
    """Moves the deadlines of grants."""

    def __init__(self, alone: Callable[[], bool], keep: Callable[[Grant], None]) -> None:
        """Begin with no renewal in flight.

        ``alone`` tells whether no copy of a command can still arrive over an earlier connection.
        """
        self.keep: Callable[[Grant], None] = keep
        """Look at a grant in time, as its deadline was moved."""
        self._alone = alone
        self._unanswered = InFlightRenewals()

    def may_be_prolonged(self, lease: Grant) -> bool:
        """Return whether the server may prolong ``lease``, or may have done so, without an answer."""
        return self._unanswered.any(lease)

    def renew_claim_soon(self, lease: Grant) -> None:
        """Renew ``lease`` soon: it was handed over for less than its ttl, and a stall would lose it."""
        lease.claim = lease.period
        lease.renew_at = min(lease.renew_at, lease.deadline - lease.period * (1 - CLAIM_USED))
        self.keep(lease)

    def begin(self, lease: Grant, ttl: int) -> Sent:
        """Note that a renewal of ``lease`` is sent now.

        No other renewal is due until it is answered: that would undo what this one asks for.
        """
        span, known = (now(), ttl / 1000), None
        if sum(span) < lease.deadline:
            known = lease.deadline - lease.period, lease.period
            self._last_for(lease, span)
        lease.renewing += 1
        return self._unanswered.add(lease, span, known)

    def settle(self, lease: Grant, sent: Sent, call: Call) -> None:
        """Settle a renewal after its call was answered or given up."""
        if sent.given_up:  # it was settled before: only the error of giving up follows
            return
        lease.renewing -= 1
        nothing = changed_nothing(call)
        if nothing:
            self._unanswered.without_effect(lease, sent)
        elif call.error is None:
            self._unanswered.answered(lease, sent, call.ambiguous, self._alone())
        sent.given_up = True
        if lease.state is LeaseState.HELD:
            known = self._unanswered.known(lease) if nothing else None
            if known is not None and sum(known) > lease.deadline:
                self._last_for(lease, known)
            self.keep(lease)

    def apply(self, lease: Grant, span: Span) -> None:
        """Let ``lease`` last for ``span``, as the server said, unless a renewal in flight may end it sooner."""
        self._last_for(lease, self._unanswered.learn(lease, span))

    def _last_for(self, lease: Grant, span: Span) -> None:
        """Let ``lease`` last for ``span``."""
        since, lease.period = span
        lease.claim = 0.0
        lease.deadline = since + lease.period
        lease.renew_at = since + lease.period / 3 if lease.auto_renew else lease.deadline
        lease.prolonged()
        self.keep(lease)


def changed_nothing(call: Call) -> bool:
    """Return whether ``call`` failed and was certainly not executed: it was refused, or never sent."""
    refused = isinstance(call.error, CommandRefused) and not call.ambiguous
    return refused or (call.error is not None and not call.attempts)
