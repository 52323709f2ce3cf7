"""Which renewals have no answer yet, and so until when the server keeps a lease for certain.

Of several renewals that are under way any may be the last one that the server executes, and a shorter one ends the
lease sooner (P1): while it is not answered nothing that is heard of the others lets the lease last longer than it.

What is known without these is kept while they have no answer: one that is refused, or was never sent, changed nothing.

A copy of one whose connection was lost may be executed later, also when another copy of it was answered, unless it is
known that this connection has ended at the server, too. So what is heard for a while lets the lease last no longer than
that copy would from then on.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary

from .._core.clock import now

if TYPE_CHECKING:
    from .grant import Grant

Span: TypeAlias = tuple[float, float]
"""From when on (local clock), and for how many seconds."""


STRAY_FOR = 60.0
"""Seconds for which a copy on a lost connection is expected, as a tombstone lasts."""
_NONE: Span = (-math.inf, math.inf)


class Sent:
    """One renewal that was sent."""

    __slots__ = ("given_up", "span")

    def __init__(self, span: Span) -> None:
        self.span: Span = span
        """What it lets the lease last for, or later: from before it was sent for the first time."""
        self.given_up: bool = False
        """No answer is waited for any more; it may be executed yet."""


class InFlightRenewals:
    """The renewals without an answer, in the order in which they were sent, by the lease that the server knows."""

    def __init__(self) -> None:
        self._sent: WeakKeyDictionary[Grant, list[Sent]] = WeakKeyDictionary()
        self._stray: WeakKeyDictionary[Grant, Span] = WeakKeyDictionary()  # until when; seconds of the shortest
        self._known: WeakKeyDictionary[Grant, Span] = WeakKeyDictionary()  # by an answer; of those that are cut

    def add(self, permit: Grant, span: Span, known: Span | None) -> Sent:
        """Note that one is sent now. ``known``: for how long the permit lasted before, if it may cut that."""
        sent = Sent(span)
        self._sent.setdefault(permit, []).append(sent)
        if known is not None:
            self._known.setdefault(permit, known)
        return sent

    def without_effect(self, permit: Grant, sent: Sent) -> None:
        """Forget ``sent``: it was not executed, nor will it be. Earlier ones that were given up may have been."""
        found = self._sent.get(permit)
        if found is not None and sent in found:
            found.remove(sent)
            if not found:
                del self._sent[permit]

    def learned(self, permit: Grant, span: Span) -> Span:
        """The server let it last for ``span``: return for how long it does, as any other one may end it sooner."""
        if permit in self._sent:
            if permit in self._known:
                self._known[permit] = span
        else:
            self._known.pop(permit, None)
        return self.shortest(permit, span)

    def known(self, permit: Grant) -> Span | None:
        """Return for how long it lasts by what is known still; None if nothing had cut that."""
        span = self._known.get(permit)
        if span is None:
            return None
        if permit not in self._sent:
            del self._known[permit]
        return self.shortest(permit, span)

    def answered(self, permit: Grant, sent: Sent, ambiguous: bool, alone: bool) -> None:
        """The server has answered ``sent``: earlier ones that were given up are not under way here any more.

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

    def any(self, permit: Grant) -> bool:
        """Return whether the server may have prolonged it without our knowledge, or may do so yet."""
        return permit in self._sent or self._shortest_stray(permit) < math.inf

    def _shortest_stray(self, permit: Grant) -> float:
        until, seconds = self._stray.get(permit, _NONE)
        return seconds if now() < until else math.inf

    def shortest(self, permit: Grant, known: Span) -> Span:
        """Return the span that ends first: what is ``known``, cut by a stray copy, or that of one of these."""
        since, seconds = known
        known = since, min(seconds, self._shortest_stray(permit))
        return min((known, *(sent.span for sent in self._sent.get(permit, ()))), key=sum)

    def bound(self, permit: Grant) -> float:
        """Return until when each of these lets it last (local clock)."""
        return sum(self.shortest(permit, (math.inf, 0.0)))
