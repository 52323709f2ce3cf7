"""Deadlines of leases, from what was sent to the server and what it answered; renewals in flight.

A renewal that ends a lease sooner counts from the moment it is sent (P1): the server may execute it, whatever becomes
of the answer. If it is refused, or was never sent, the lease lasts as long as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary

from .._core.clock import now
from .._transport.call import Call
from ..errors import CommandRefused
from .grant import Grant
from .settings import LeaseState

if TYPE_CHECKING:
    from .hub import Hub
    from .manager import GrantManager

# -- Renewals in flight, and until when the server certainly keeps a lease in spite of them --------------------
#
# The server may execute any of several renewals in flight last, and a shorter one ends the lease sooner (P1). While
# that one is not answered, no answer to another lets the lease last longer than it does.
#
# The span that was known before is kept until they are answered: a renewal that is refused, or was never sent,
# changes nothing.
#
# A copy of a renewal whose connection was lost may be executed later, even if another copy was answered, unless this
# connection is known to have ended at the server, too. So for a while an answer lets the lease last no longer than
# such a copy would.


Span: TypeAlias = tuple[float, float]
"""The beginning (local clock) and the seconds from then on."""


STRAY_FOR = 60.0
"""Seconds for which a copy on a lost connection is expected: as long as a tombstone lasts."""
_NONE: Span = (-math.inf, math.inf)


class Sent:
    """A renewal in flight."""

    __slots__ = ("given_up", "span")

    def __init__(self, span: Span) -> None:
        self.span: Span = span
        """Least seconds for which the lease lasts if it is executed, counted from before it was first sent."""
        self.given_up: bool = False
        """Whether its answer is not awaited any more. It may still be executed."""


class InFlightRenewals:
    """The renewals in flight, in the order of sending, by the permit that they renew."""

    def __init__(self) -> None:
        self._sent: WeakKeyDictionary[object, list[Sent]] = WeakKeyDictionary()
        # Until when copies are expected, and the seconds of the shortest one.
        self._stray: WeakKeyDictionary[object, Span] = WeakKeyDictionary()
        # From answers, for permits that a renewal may cut.
        self._known: WeakKeyDictionary[object, Span] = WeakKeyDictionary()

    def add(self, permit: object, span: Span, known: Span | None) -> Sent:
        """Note a renewal that is sent now. ``known`` is how long the permit lasted before, if it may cut that."""
        sent = Sent(span)
        self._sent.setdefault(permit, []).append(sent)
        if known is not None:
            self._known.setdefault(permit, known)
        return sent

    def without_effect(self, permit: object, sent: Sent) -> None:
        """Forget ``sent``, which never is executed. Earlier renewals that were given up may have been."""
        found = self._sent.get(permit)
        if found is not None and sent in found:
            found.remove(sent)
            if not found:
                del self._sent[permit]

    def learn(self, permit: object, span: Span) -> Span:
        """Note that the server let ``permit`` last for ``span``; return how long it lasts if another one cuts that."""
        if permit in self._sent:
            if permit in self._known:
                self._known[permit] = span
        else:
            self._known.pop(permit, None)
        return self.shortest(permit, span)

    def known(self, permit: object) -> Span | None:
        """Return how long ``permit`` lasts by what was known before; None if nothing may have cut that."""
        span = self._known.get(permit)
        if span is None:
            return None
        if permit not in self._sent:
            del self._known[permit]
        return self.shortest(permit, span)

    def answered(self, permit: object, sent: Sent, ambiguous: bool, alone: bool) -> None:
        """Note that the server has answered ``sent``, and with that all earlier ones that were given up.

        A copy of those, or of ``sent`` if it is ``ambiguous``, may still arrive by a connection that was lost, unless
        the present one is known to be ``alone``.
        """
        found = self._sent.get(permit)
        if found is None or sent not in found:
            return
        place = found.index(sent)
        stray = [other for other in found[:place] if other.given_up] + ([sent] if ambiguous else [])
        if alone:
            self._stray.pop(permit, None)
        elif stray:
            seconds = min(other.span[1] for other in stray)
            self._stray[permit] = now() + STRAY_FOR, min(seconds, self._shortest_stray(permit))
        found[:] = [other for other in found[:place] if not other.given_up] + found[place + 1 :]
        if not found:
            del self._sent[permit]

    def any(self, permit: object) -> bool:
        """Return whether the server may prolong ``permit``, or may have done so, without an answer."""
        return permit in self._sent or self._shortest_stray(permit) < math.inf

    def _shortest_stray(self, permit: object) -> float:
        until, seconds = self._stray.get(permit, _NONE)
        return seconds if now() < until else math.inf

    def shortest(self, permit: object, known: Span) -> Span:
        """Return the span that ends first: ``known``, cut by a stray copy, or that of a renewal in flight."""
        since, seconds = known
        known = since, min(seconds, self._shortest_stray(permit))
        return min((known, *(sent.span for sent in self._sent.get(permit, ()))), key=sum)


CLAIM_USED = 1 / 6
"""The part of a claim after which it is renewed. Sections that are shorter than this need no renewal."""


class Deadlines:
    """Moves the deadlines of grants."""

    def __init__(self, hub: Hub, manager: GrantManager) -> None:
        self._hub = hub
        self._manager = manager
        self.keep: Callable[[Grant], None] = manager.keep
        """Look at a grant in time, as its deadline was moved."""
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
            self._unanswered.answered(lease, sent, call.ambiguous, self._hub.executor.alone)
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
